/* gpu/calibration.c - launches the kernels of cuda/elementwise/calibration.cu. */
#include "core/arithmetic.h"
#include "cuda/sizes/calibration.h"
#include "gpu/ops.h"

#define BY_FORMAT(prefix)                                                                                              \
  {                                                                                                                    \
      {.fatbin = BSH_FATBIN_calibration, .name = prefix "nf4"},                                                        \
      {.fatbin = BSH_FATBIN_calibration, .name = prefix "fp4"},                                                        \
  }

static bsh_status launch(const bsh_cuda_context *const context, bsh_cuda_kernel *const kernel, const int64_t blocks,
                         const uint32_t threads, const void *const args) {
  if (blocks > INT32_MAX)
    return bsh_fail(BSH_BAD_SHAPE, "%s: tensor too large: %lld blocks of threads", context->op, (long long)blocks);
  const bsh_cuda_launch_shape shape = {.grid = {(uint32_t)blocks, 1, 1}, .block = {threads, 1, 1}};
  void *arguments[] = {(void *)(uintptr_t)args};
  return bsh_cuda_launch(context, kernel, &shape, arguments);
}

bsh_status bsh_cuda_search_4bit(const bsh_search_4bit_args *const args, const bsh_cuda_context *const context) {
  static bsh_cuda_kernel kernels[2] = BY_FORMAT("search_4bit_");
  const int64_t blocks = divide_up(args->n, args->blocksize);
  return launch(context, &kernels[args->format], divide_up(blocks, BSH_SEARCH_WARPS), 32 * BSH_SEARCH_WARPS, args);
}

bsh_status bsh_cuda_round_4bit(const bsh_round_4bit_args *const args, const bsh_cuda_context *const context) {
  static bsh_cuda_kernel kernels[2] = BY_FORMAT("round_4bit_");
  return launch(context, &kernels[args->format], divide_up(args->N, BSH_ROUND_THREADS), BSH_ROUND_THREADS, args);
}
