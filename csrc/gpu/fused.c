/* gpu/fused.c - launches of the kernels whose parameters are bsh_fused_args. */
#include "gpu/product.h"

#include "core/arithmetic.h"

bsh_fused_args bsh_fused_arguments(const bsh_product_args *const args, const bsh_plan_slice *const slice) {
  const bsh_weight *const weight = &args->weight;
  const bsh_scales *const scales = &weight->scales;
  return (bsh_fused_args){
      .packed = weight->packed,
      .absmax = scales->absmax,
      .absmax_code = scales->absmax_code,
      .absmax_map = scales->absmax_map,
      .absmax2 = scales->absmax2,
      .offset = scales->offset,
      .x = args->x,
      .bias = args->bias,
      .y = args->y,
      .ldx = args->ldx,
      .ldy = args->ldy,
      .M = (int32_t)args->M,
      .N = (int32_t)args->N,
      .K = (int32_t)args->K,
      .format = (int32_t)weight->format,
      .block_shift = slice->block_shift,
      .cut = slice->cut,
  };
}

/* The kernel in front: x in the order of the next one, and its counters cleared. */
static bsh_status launch_before(const bsh_plan_slice *const slice, bsh_fused_args *const args, void *memory,
                                const bsh_cuda_context *const context) {
  int32_t tokens = slice->tokens, x_units = slice->x_units, counters = slice->counters;
  void *arguments[] = {args, &memory, &tokens, &x_units, &counters};
  return bsh_cuda_launch(context, slice->before.kernel, &slice->before.shape, arguments);
}

bsh_status bsh_launch_fused(const bsh_product_args *const args, const bsh_plan_slice *const slice, char *const memory,
                            const bsh_cuda_context *const context) {
  bsh_fused_args of_kernel = bsh_fused_arguments(args, slice);
  void *arguments[] = {&of_kernel};
  if (memory != NULL) {
    of_kernel.partial = (float *)(memory + slice->partial_at);
    if (slice->before.kernel != NULL) of_kernel.counters = (uint32_t *)(memory + slice->counters_at);
  }
  if (slice->before.kernel != NULL) BSH_TRY(launch_before(slice, &of_kernel, memory, context));
  if (slice->orders_x) of_kernel.x = memory;
  BSH_TRY(bsh_cuda_launch(context, slice->product.kernel, &slice->product.shape, arguments));
  if (slice->after.kernel == NULL) return BSH_OK;
  return bsh_cuda_launch(context, slice->after.kernel, &slice->after.shape, arguments);
}
