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

/* MXFP4 and NVFP4: codes E2M1 in blocks of 32 and 16, whose scales are 8-bit floats. */
static inline bool bsh_has_short_blocks(const bsh_facts *const facts) { return facts->w.blocksize < BSH_UNIT; }

/* Kernels of short blocks: MXFP4 in bf16; NVFP4 in bf16 and fp16. */
enum { BSH_SHORT_FORMS = 3 };
static inline int bsh_short_form(const bsh_facts *const facts) {
  return facts->w.blocksize == 32 ? 0 : 1 + (facts->dtype == BSH_F16);
}

#define BSH_SHORT_ENTRIES(file, stem, form)                                                                            \
  {BSH_KERNEL(file, stem "bf16_" #form "_mx"), BSH_KERNEL(file, stem "bf16_" #form "_nv"),                             \
   BSH_KERNEL(file, stem "f16_" #form "_nv")}

/* NULL, or why kernels that scale operands of tensor cores in 16 bits do not take the blocks: they load the scales of a
 * unit together, and take them for those formats'. */
static inline const char *bsh_short_blocks_refuse(const bsh_facts *const facts) {
  if (!bsh_has_short_blocks(facts)) return NULL;
  if (facts->w.table != BSH_E2M1 || facts->w.scales != BSH_SCALES_NESTED || facts->w.blocksize < 16)
    return "the blocksize is below 64, and it is neither MXFP4 nor NVFP4";
  if (facts->w.blocksize == 32 && facts->dtype == BSH_F16) return "float16 does not hold scales of MXFP4";
  return facts->code_alignment < BSH_UNIT / facts->w.blocksize ? "the scales of 64 weights are not aligned" : NULL;
}

/* 4-bit blocks as a shift: how often a block has the unit of a kernel. */
static inline int32_t bsh_block_shift(const bsh_facts *const facts, const int64_t unit) {
  if (facts->w.blocksize < unit) return 0;
  return __builtin_ctzll((uint64_t)(facts->w.blocksize / unit));
}

/* What all 4-bit kernels for few rows refuse. */
static inline const char *bsh_few_rows_refuse(const bsh_facts *const facts) {
  if (facts->x_alignment < 16) return "rows of x are not 16-byte aligned";
  return facts->packed_alignment < 4 ? "packed is not 4-byte aligned" : NULL;
}

#endif
