/* gpu/pairs.c - launches the kernels of cuda/elementwise/pairs.cu. */
#include <inttypes.h>

#include "core/arithmetic.h"
#include "cuda/sizes/pairs.h"
#include "gpu/ops.h"

bsh_status bsh_cuda_sort_by_expert(const bsh_sort_by_expert_args *const args, const bsh_cuda_context *const context) {
  static bsh_cuda_kernel kernel = BSH_KERNEL(pairs, "sort_by_expert");
  const int64_t most =
      BSH_SORT_COUNTERS / ((int64_t)args->E + 1) - 1; /* warps whose counters there is room for, and the sums */
  if (most < 1 || args->S > INT32_MAX / 2)
    return bsh_fail(BSH_BAD_SHAPE, "%s: %" PRId64 " pairs of %d experts, at most %d of %d", context->op, args->S,
                    args->E, INT32_MAX / 2, BSH_SORT_COUNTERS / 2 - 1);
  const int64_t pairs = args->S > 0 ? args->S : 1;
  const int64_t stretches = min_i64(divide_up(pairs, BSH_SORT_WARP_PAIRS), min_i64(most, BSH_SORT_WARPS));
  const int64_t warps = stretches > BSH_SORT_LEAST_WARPS ? stretches : BSH_SORT_LEAST_WARPS;
  const int64_t blocks = min_i64(divide_up(pairs, BSH_SORT_BLOCK_PAIRS), min_i64(args->E, BSH_SORT_BLOCKS));
  const bsh_cuda_launch_shape shape = {.grid = {(uint32_t)blocks, 1, 1},
                                       .block = {(uint32_t)(32 * warps), 1, 1},
                                       .shared_bytes = BSH_SORT_COUNTERS * (int32_t)sizeof(uint32_t),
                                       .overlap = true};
  int32_t of_kernel = (int32_t)stretches;
  void *arguments[] = {(void *)(uintptr_t)args, &of_kernel};
  return bsh_cuda_launch(context, &kernel, &shape, arguments);
}

#define SUM_KERNEL(NAME) BSH_KERNEL(pairs, NAME)
#define SUM_KERNELS(name) {SUM_KERNEL("sum_by_token_" name), SUM_KERNEL("sum_by_token_" name "_any")}

bsh_status bsh_cuda_sum_by_token(const bsh_sum_by_token_args *const args, const bsh_cuda_context *const context) {
  static bsh_cuda_kernel kernels[3][2] = {SUM_KERNELS("f32"), SUM_KERNELS("f16"), SUM_KERNELS("bf16")};
  const int64_t width = 16 / dtype_size(args->dtype); /* elements of 16 bytes */
  const bool any = args->H % width != 0 || !aligned(args->y, 16) || !aligned(args->out, 16);
  const int64_t blocks = divide_up(args->H, BSH_SUM_THREADS * (any ? 1 : width));
  if (args->T > INT32_MAX || blocks > UINT16_MAX)
    return bsh_fail(BSH_BAD_SHAPE, "%s: %" PRId64 " tokens of %" PRId64 " columns", context->op, args->T, args->H);
  const bsh_cuda_launch_shape shape = {
      .grid = {(uint32_t)args->T, (uint32_t)blocks, 1}, .block = {BSH_SUM_THREADS, 1, 1}, .overlap = true};
  void *arguments[] = {(void *)(uintptr_t)args};
  return bsh_cuda_launch(context, &kernels[args->dtype][any], &shape, arguments);
}
