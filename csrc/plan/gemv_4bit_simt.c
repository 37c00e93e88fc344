/* plan/gemv_4bit_simt.c - what gemv_4bit_simt.cu takes and how it is launched. */
#include "core/arithmetic.h"
#include "cuda/gemv_4bit_simt.h"
#include "plan/kernel.h"

static const char *refuses(const bsh_facts *const facts) {
  if (facts->K % BSH_SIMT_BLOCKSIZE) return "K is no multiple of 32";
  if (facts->K > INT32_MAX - BSH_SIMT_STEP) return "K is too large for 32-bit indices";
  if (facts->N > INT32_MAX - BSH_SIMT_WARPS * BSH_SIMT_ROWS) return "N is too large for 32-bit indices";
  return bsh_fused_refuses(facts);
}

#define SIMT_KERNEL(DTYPE, SCALES) {.fatbin = BSH_FATBIN_gemv_4bit_simt, .name = "gemv_4bit_simt_" DTYPE "_" SCALES}
#define SIMT_SCALES(DTYPE) {SIMT_KERNEL(DTYPE, "plain"), SIMT_KERNEL(DTYPE, "nested")}
static bsh_cuda_kernel kernels[3][2] = {SIMT_SCALES("f32"), SIMT_SCALES("f16"), SIMT_SCALES("bf16")};

static void cut(const bsh_facts *const facts, bsh_fused_slice *const slice) {
  const int64_t blocks = divide_up(facts->N, BSH_SIMT_WARPS * BSH_SIMT_ROWS);
  slice->product.kernel = &kernels[facts->dtype][facts->nested];
  slice->product.shape = (bsh_cuda_launch_shape){
      .grid = {(uint32_t)blocks, 1, 1}, .block = {BSH_SIMT_WARPS * BSH_WARP, 1, 1}, .overlap = true};
  slice->block_shift = __builtin_ctzll((uint64_t)facts->blocksize / BSH_SIMT_BLOCKSIZE);
}

const bsh_fused_kernel bsh_plan_gemv_4bit_simt = {.rows = BSH_SIMT_TOKENS, .refuses = refuses, .cut = cut};
