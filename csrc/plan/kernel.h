/* plan/kernel.h - what plan/plan.c asks of a fused kernel: what it cannot take, and how a product is cut. One object of
 * each, in plan_<kernel>.c. */
#ifndef BSH_PLAN_KERNEL_H
#define BSH_PLAN_KERNEL_H

#include "plan/plan.h"

typedef struct {
  int64_t rows; /* of x, of a launch */
  /* NULL, or what of the facts it cannot take. Any number of rows: they go in slices. */
  const char *(*refuses)(const bsh_facts *facts);
  /* Fills a zeroed slice for slice->rows rows of a product that is not refused. */
  void (*cut)(const bsh_facts *facts, bsh_fused_slice *slice);
} bsh_fused_kernel;

extern const bsh_fused_kernel bsh_plan_gemv_4bit, bsh_plan_gemv_4bit_simt, bsh_plan_gemm_4bit_sm90,
    bsh_plan_gemm_4bit_sm90_wide;

/* How long gemm_4bit_sm90_wide would take for a product that it does not refuse, nanoseconds on an H200. */
double bsh_plan_wide_nanoseconds(const bsh_facts *facts);

/* How long a piece of a tile of 128, 192 or 256 tokens takes there. */
double bsh_plan_wide_piece_nanoseconds(int32_t tokens, const bsh_facts *facts);

/* Nested scales, one a unit, whose codes a lane of gemv_4bit reads together: of two units where a warp has 8. */
bool bsh_gemv_reads_codes_together(const bsh_facts *facts, int32_t units);

/* How gemv_4bit and gemv_int8 cut a product; the words are those of bsh_fused_cut. */
typedef struct {
  int32_t token_tiles, units; /* template arguments of the kernel: tokens / 8, units of K per warp */
  int32_t token_groups;       /* of token_tiles * 8 tokens, each with blocks of its own */
  int32_t k_splits, k_warps, row_groups;
  int32_t teams; /* groups of k_splits blocks, for each token group */
} bsh_gemv_division;
bsh_gemv_division bsh_gemv_divide(int64_t M, int64_t N, int64_t K, int32_t arch, int32_t sms);
bsh_fused_cut bsh_gemv_cut(const bsh_gemv_division *division, int64_t N);

/* Clusters of k blocks, one block per multiprocessor, that run at once. */
int64_t bsh_gemv_clusters_at_once(int64_t sms, int64_t k);

/* What all for few rows refuse. */
static inline const char *bsh_fused_refuses(const bsh_facts *const facts) {
  if (facts->direction != BSH_FORWARD) return "no input gradient";
  if (facts->x_alignment < 16) return "rows of x are not 16-byte aligned";
  return facts->packed_alignment < 4 ? "packed is not 4-byte aligned" : NULL;
}

#endif
