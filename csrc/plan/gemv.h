/* plan/gemv.h - what the kernels for few rows have in common. */
#ifndef BSH_PLAN_GEMV_H
#define BSH_PLAN_GEMV_H

#include "plan/kernel.h"

/* Clusters of k blocks, one block per multiprocessor, that run at once. */
int64_t bsh_clusters_at_once(int64_t sms, int64_t k);

/* How gemv_4bit and gemv_int8 cut a product; the words are those of bsh_fused_cut. */
typedef struct {
  int32_t token_tiles, units; /* template arguments of the kernel: tokens / 8, units of K per warp */
  int32_t token_groups;       /* of token_tiles * 8 tokens, each with blocks of its own */
  int32_t k_splits, k_warps, row_groups;
  int32_t teams; /* groups of k_splits blocks, for each token group */
} bsh_gemv_division;
bsh_gemv_division bsh_gemv_divide(int64_t M, int64_t N, int64_t K, int32_t arch, int32_t sms);

/* The division as the kernel reads it, its launch but for the kernel and shared memory, and where a product cut along K
 * needs one the launch that joins: `joins`, by token tiles / 2; and scratch memory for the sums. */
void bsh_gemv_lay_out(const bsh_gemv_division *division, const bsh_facts *facts, bsh_cuda_kernel *joins,
                      bsh_plan_slice *slice);

/* What gemv_4bit refuses, also of a stack. */
const char *bsh_gemv_4bit_refuses(const bsh_facts *facts);

/* Nested scales, one a unit, whose codes a lane reads together: of two units where a warp has 8. */
bool bsh_gemv_reads_codes_together(const bsh_facts *facts, int32_t units);

/* Which of a kernel's forms has these two numbers; one has. */
static inline int bsh_form_of(const int32_t (*const forms)[2], const int32_t first, const int32_t second) {
  int form = 0;
  while (forms[form][0] != first || forms[form][1] != second) form++;
  return form;
}

/* 4-bit blocks as a shift: how often a block has the unit of a kernel. */
static inline int32_t bsh_block_shift(const bsh_facts *const facts, const int64_t unit) {
  return __builtin_ctzll((uint64_t)(facts->w.blocksize / unit));
}

/* What all 4-bit kernels for few rows refuse. */
static inline const char *bsh_few_rows_refuse(const bsh_facts *const facts) {
  if (facts->x_alignment < 16) return "rows of x are not 16-byte aligned";
  return facts->packed_alignment < 4 ? "packed is not 4-byte aligned" : NULL;
}

#endif
