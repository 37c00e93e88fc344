/* plan/grouped.h - how a grouped product of a stack of 4-bit weights is computed on a GPU. Pure, as plan/plan.h.
 *
 * How many rows an expert has is known on the GPU only: the plan goes by the average. */
#ifndef BSH_PLAN_GROUPED_H
#define BSH_PLAN_GROUPED_H

#include "plan/plan.h"

/* X(name). gemv_4bit_grouped and gemm_4bit_sm90_wide_grouped: all experts in one launch, few and many rows of each.
 * panels: some experts at a time dequantized, and the vendor's grouped product of them (python/bitshard/grouped.py). */
#define BSH_GROUPED_KERNELS(X) X(gemv_4bit_grouped) X(gemm_4bit_sm90_wide_grouped) X(panels)
#define BSH_GROUPED_INDEX(name) BSH_GROUPED_##name,
typedef enum { BSH_GROUPED_KERNELS(BSH_GROUPED_INDEX) BSH_GROUPED_COUNT } bsh_grouped_kernel;
#undef BSH_GROUPED_INDEX

typedef struct {
  bsh_grouped_kernel kernel;
  bsh_fused_slice slice; /* but for panels: the one launch, of all rows */
  int64_t panel_experts; /* panels: dequantized at a time */
} bsh_grouped_plan;

/* Of E experts; the facts are those of a product with the weight of one: M rows of x in all, alignments of the whole
 * stack, workspace_bytes of a panel. */
void bsh_plan_grouped_linear_4bit(const bsh_facts *facts, int64_t E, bsh_grouped_plan *plan);

/* NULL, or what a kernel other than panels cannot take; fills a zeroed slice for a product that it takes. */
const char *bsh_grouped_refuses(bsh_grouped_kernel kernel, const bsh_facts *facts, int64_t E);
void bsh_cut_grouped(bsh_grouped_kernel kernel, const bsh_facts *facts, int64_t E, bsh_fused_slice *slice);

/* "gemv_4bit_grouped", ... */
const char *bsh_grouped_kernel_name(bsh_grouped_kernel kernel);

#endif
