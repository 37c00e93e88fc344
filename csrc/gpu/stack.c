/* gpu/stack.c - the launch of a stack's product whose parameters are bsh_grouped_gemv_args. */
#include "core/stack.h"
#include "cuda/sizes/gemv_4bit_grouped.h"
#include "gpu/product.h"

bsh_status bsh_launch_stack(const bsh_product_args *const args, const bsh_plan_slice *const slice, char *const memory,
                            const bsh_cuda_context *const context) {
  const bsh_weight *const stack = &args->weight;
  const int64_t elements = stack->n / args->E;
  bsh_grouped_gemv_args of_kernel = {
      .rows = bsh_fused_arguments(args, slice),
      .offs = args->offs,
      .expert_bytes = elements / 2,
      .experts = (int32_t)args->E,
      .expert_blocks = (int32_t)(elements / stack->blocksize),
      .expert_scales2 = (int32_t)bsh_expert_scales2(stack->n, args->E, stack->blocksize),
  };
  void *arguments[] = {&of_kernel};
  (void)memory;
  return bsh_cuda_launch(context, slice->product.kernel, &slice->product.shape, arguments);
}
