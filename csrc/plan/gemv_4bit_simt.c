/* plan/gemv_4bit_simt.c - what gemv_4bit_simt.cu takes and how it is launched. */
#include "core/arithmetic.h"
#include "cuda/sizes/gemv_4bit_simt.h"
#include "plan/cards.h"
#include "plan/gemv.h"

static const char *refuses(const bsh_facts *const facts) {
  if (facts->w.blocksize < BSH_SIMT_BLOCKSIZE) return "the blocksize is below 16";
  if (facts->K % BSH_SIMT_K) return "K is no multiple of 32";
  if (facts->K > INT32_MAX - BSH_SIMT_STEP) return "K is too large for 32-bit indices";
  if (facts->N > INT32_MAX - BSH_SIMT_WARPS * BSH_SIMT_ROWS) return "N is too large for 32-bit indices";
  return bsh_few_rows_refuse(facts);
}

/* Up to so many rows it was measured as faster than panels: fp32, 8 rows a pass over W on the ordinary cores; in 16
 * bits two passes still read less than dequantizing does. */
static double cost(const bsh_facts *const facts) {
  const bsh_card *const card = bsh_card_of(facts->sm);
  int64_t rows = bsh_border_value(card->gemv_4bit_simt.rows_32bit, facts->N * facts->K, 2);
  if (facts->dtype != BSH_F32)
    rows = facts->w.blocksize < BSH_UNIT ? card->gemv_4bit_simt.rows_short_blocks : card->gemv_4bit_simt.rows_16bit;
  return facts->M <= rows ? BSH_ORDER(3) : BSH_LAST;
}

#define SIMT_KERNEL(DTYPE, SCALES) BSH_KERNEL(gemv_4bit_simt, "gemv_4bit_simt_" DTYPE "_" SCALES)
#define SIMT_SCALES(DTYPE) {SIMT_KERNEL(DTYPE, "plain"), SIMT_KERNEL(DTYPE, "nested")}
static bsh_cuda_kernel kernels[3][2] = {SIMT_SCALES("f32"), SIMT_SCALES("f16"), SIMT_SCALES("bf16")};

static void cut(const bsh_facts *const facts, bsh_plan_slice *const slice) {
  const int64_t blocks = divide_up(facts->N, BSH_SIMT_WARPS * BSH_SIMT_ROWS);
  slice->product.kernel = &kernels[facts->dtype][facts->w.scales == BSH_SCALES_NESTED];
  slice->product.shape = bsh_overlapping(blocks, BSH_SIMT_WARPS * BSH_WARP, 1, 0);
  slice->block_shift = bsh_block_shift(facts, BSH_SIMT_BLOCKSIZE);
}

const bsh_kernel bsh_kernel_gemv_4bit_simt = {.name = "gemv_4bit_simt",
                                              .operands = BSH_KIND(4BIT),
                                              .directions = BSH_FORWARD_ONLY,
                                              .launch = BSH_LAUNCH_FUSED,
                                              .rows = BSH_SIMT_TOKENS,
                                              .refuses = refuses,
                                              .cost = cost,
                                              .cut = cut};
