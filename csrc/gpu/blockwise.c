/* gpu/blockwise.c - chooses and launches the kernels of cuda/elementwise/blockwise.cu. */
#include "gpu/ops.h"

#include "core/arithmetic.h"
#include "cuda/sizes/blockwise.h"
#include "plan/dequantize.h"

static bsh_status launch(const bsh_cuda_context *const context, bsh_cuda_kernel *const kernel, const int64_t blocks,
                         const void *const args) {
  return bsh_cuda_launch_blocks(context, kernel, blocks, BSH_BLOCK_THREADS, true, args);
}

/* ---- dequantize_4bit ---- */

bsh_status bsh_cuda_dequantize_4bit(const bsh_dequantize_4bit_args *const args, const bsh_cuda_context *const context) {
  const bsh_dequantize_plan plan = bsh_plan_dequantize_4bit(args, context->sms);
  return launch(context, plan.kernel, plan.blocks, &plan.args);
}

/* ---- quantize_4bit ---- */

bsh_status bsh_cuda_quantize_4bit(const bsh_quantize_4bit_args *const args, const bsh_cuda_context *const context) {
  static bsh_cuda_kernel fast[2][BSH_DTYPES] = {BSH_BY_DTYPE(blockwise, "quantize_4bit_", "_nf4"),
                                                BSH_BY_DTYPE(blockwise, "quantize_4bit_", "_fp4")};
  static bsh_cuda_kernel any[2][BSH_DTYPES] = {BSH_BY_DTYPE(blockwise, "quantize_4bit_any_", "_nf4"),
                                               BSH_BY_DTYPE(blockwise, "quantize_4bit_any_", "_fp4")};
  if (args->blocksize <= BSH_WARP_TILE && aligned(args->x, BSH_VECTOR_BYTES) && aligned(args->packed, 4))
    return launch(context, &fast[args->format][args->dtype], divide_up(args->n, BSH_BLOCK_WARPS * BSH_WARP_TILE), args);
  return launch(context, &any[args->format][args->dtype],
                divide_up(divide_up(args->n, args->blocksize), BSH_BLOCK_WARPS), args);
}

/* ---- 8-bit blocks ---- */

int64_t bsh_cuda_search_blocks(const int64_t n, const int64_t blocksize, const bsh_cuda_context *const context) {
  const int64_t all = divide_up(divide_up(n, blocksize), BSH_BLOCK_WARPS);
  return min_i64(all, (int64_t)context->sms * BSH_SEARCH_BLOCKS_PER_SM);
}

bsh_status bsh_cuda_quantize_blockwise(const bsh_quantize_blockwise_args *const args,
                                       const bsh_cuda_context *const context) {
  static bsh_cuda_kernel kernels[BSH_DTYPES] = BSH_BY_DTYPE(blockwise, "quantize_blockwise_", "");
  return launch(context, &kernels[args->dtype], bsh_cuda_search_blocks(args->n, args->blocksize, context), args);
}

bsh_status bsh_cuda_dequantize_blockwise(const bsh_dequantize_blockwise_args *const args,
                                         const bsh_cuda_context *const context) {
  static bsh_cuda_kernel fast[BSH_DTYPES] = BSH_BY_DTYPE(blockwise, "dequantize_blockwise_", "");
  static bsh_cuda_kernel any[BSH_DTYPES] = BSH_BY_DTYPE(blockwise, "dequantize_blockwise_any_", "");
  if (aligned(args->code, 8) && aligned(args->out, BSH_VECTOR_BYTES))
    return launch(context, &fast[args->dtype], divide_up(args->n, BSH_BLOCK_WARPS * BSH_WARP_TILE), args);
  return launch(context, &any[args->dtype], bsh_looping_blocks(args->n, context->sms), args);
}

/* ---- checksum ---- */

bsh_status bsh_cuda_checksum(const uint8_t *const bytes, const int64_t n_bytes, uint64_t *const sum,
                             const bsh_cuda_context *const context) {
  static bsh_cuda_kernel kernel = BSH_KERNEL(blockwise, "checksum");
  BSH_TRY(bsh_cuda_zero(context, sum, sizeof *sum));
  if (n_bytes == 0) return BSH_OK;
  const bsh_cuda_launch_shape shape = {
      .grid = {(uint32_t)bsh_looping_blocks(divide_up(n_bytes, 8), context->sms), 1, 1},
      .block = {BSH_BLOCK_THREADS, 1, 1}};
  void *arguments[] = {(void *)(uintptr_t)&bytes, (void *)(uintptr_t)&n_bytes, (void *)(uintptr_t)&sum};
  return bsh_cuda_launch(context, &kernel, &shape, arguments);
}
