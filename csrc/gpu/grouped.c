/* gpu/grouped.c - see gpu/grouped.h. */
#include "gpu/grouped.h"

#include <inttypes.h>

#include "core/stack.h"
#include "cuda/gemv_4bit_grouped.h"
#include "gpu/fused.h"
#include "gpu/linear.h"
#include "gpu/wide.h"

static bsh_grouped_gemv_args gemv_args(const bsh_grouped_linear_4bit_args *const args,
                                       const bsh_fused_slice *const slice) {
  const bsh_weight *const stack = &args->rows.weight;
  const int64_t elements = stack->n / args->E;
  return (bsh_grouped_gemv_args){
      .rows = bsh_cuda_fused_args(&args->rows, slice),
      .offs = args->offs,
      .expert_bytes = elements / 2,
      .experts = (int32_t)args->E,
      .expert_blocks = (int32_t)(elements / stack->blocksize),
      .expert_scales2 = (int32_t)bsh_expert_scales2(stack->n, args->E, stack->blocksize),
  };
}

static bsh_status launch_gemv(const bsh_grouped_linear_4bit_args *const args, const bsh_fused_slice *const slice,
                              const bsh_cuda_context *const context) {
  bsh_grouped_gemv_args of_kernel = gemv_args(args, slice);
  void *arguments[] = {&of_kernel};
  return bsh_cuda_launch(context, slice->product.kernel, &slice->product.shape, arguments);
}

bsh_status bsh_cuda_grouped_linear_4bit(const bsh_grouped_linear_4bit_args *const args, const bsh_grouped_kernel kernel,
                                        const bsh_cuda_context *const context) {
  const bsh_facts facts = bsh_cuda_facts(&args->rows, context->sm, context->sms, BSH_VENDOR_NONE);
  const char *const reason = bsh_grouped_refuses(kernel, &facts, args->E);
  if (reason != NULL)
    return bsh_fail(BSH_NO_KERNEL,
                    "%s: %s cannot multiply %" PRId64 " rows with %" PRId64 " experts [%" PRId64 ", %" PRId64 "]: %s",
                    context->op, bsh_grouped_kernel_name(kernel), args->rows.M, args->E, args->rows.N, args->rows.K,
                    reason);
  bsh_fused_slice slice = {0};
  bsh_cut_grouped(kernel, &facts, args->E, &slice);
  return kernel == BSH_GROUPED_gemv_4bit_grouped ? launch_gemv(args, &slice, context)
                                                 : bsh_cuda_wide_grouped(args, &slice, context);
}
