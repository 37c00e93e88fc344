/* gpu/calibration.c - launches the kernels of cuda/elementwise/calibration.cu. */
#include "core/arithmetic.h"
#include "cuda/sizes/calibration.h"
#include "gpu/ops.h"

#define BY_FORMAT(prefix)                                                                                              \
  {BSH_KERNEL(calibration, prefix "nf4"), BSH_KERNEL(calibration, prefix "fp4"), BSH_KERNEL(calibration, prefix "e2m1")}

bsh_status bsh_cuda_search_4bit(const bsh_search_4bit_args *const args, const bsh_cuda_context *const context) {
  static bsh_cuda_kernel kernels[BSH_4BIT_FORMATS] = BY_FORMAT("search_4bit_");
  const int64_t blocks = divide_up(args->n, args->blocksize);
  return bsh_cuda_launch_blocks(context, &kernels[args->format], divide_up(blocks, BSH_SEARCH_WARPS),
                                32 * BSH_SEARCH_WARPS, false, args);
}

bsh_status bsh_cuda_round_4bit(const bsh_round_4bit_args *const args, const bsh_cuda_context *const context) {
  static bsh_cuda_kernel kernels[BSH_4BIT_FORMATS] = BY_FORMAT("round_4bit_");
  return bsh_cuda_launch_blocks(context, &kernels[args->format], divide_up(args->N, BSH_ROUND_THREADS),
                                BSH_ROUND_THREADS, false, args);
}
