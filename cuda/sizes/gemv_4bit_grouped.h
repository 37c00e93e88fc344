/* gemv_4bit_grouped.h - sizes and arguments of gemv_4bit_grouped.cu, for the kernel, its plan (csrc/plan/grouped.c) and
 * tests. */
#ifndef BSH_GEMV_4BIT_GROUPED_H
#define BSH_GEMV_4BIT_GROUPED_H

#include "cuda/sizes/gemv_4bit.h"

/* X(name, token tiles: 8 rows of x each, units of K a warp): forms of gemv_4bit.h that a block has room for. */
#define BSH_GROUPED_GEMV_FORMS(X) X(m8_k4, 1, 4) X(m8_k8, 1, 8) X(m16_k4, 2, 4)

/* Shared memory between the sums and the table, 64 KiB from its start: where the rows of each expert end, and how many
 * groups of rows the experts before it have, of one more than all. */
enum { BSH_GROUPED_EXPERTS = 2048, BSH_GROUPED_ENDS_AT = 40 << 10 };

typedef struct {
  bsh_fused_args rows; /* of expert 0; M: rows of x; cut: k_splits, k_warps, row_groups, group_of_warp */
  const int32_t *offs; /* [experts] */
  int64_t expert_bytes;
  int32_t experts, expert_blocks, expert_scales2; /* of each: blocks and second-level scales */
} bsh_grouped_gemv_args;

#endif
