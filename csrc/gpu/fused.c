/* gpu/fused.c - see gpu/fused.h. */
#include "gpu/fused.h"

#include "core/arithmetic.h"

bsh_fused_args bsh_cuda_fused_args(const bsh_linear_4bit_args *const args, const bsh_fused_slice *const slice) {
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
static bsh_status launch_before(const bsh_fused_slice *const slice, bsh_fused_args *const args, void *memory,
                                const bsh_cuda_context *const context) {
  int32_t tokens = slice->tokens, x_units = slice->x_units, counters = slice->counters;
  void *arguments[] = {args, &memory, &tokens, &x_units, &counters};
  return bsh_cuda_launch(context, slice->before.kernel, &slice->before.shape, arguments);
}

static bsh_status launch_all(const bsh_fused_slice *const slice, bsh_fused_args *const args, void *const memory,
                             const bsh_cuda_context *const context) {
  void *arguments[] = {args};
  if (slice->before.kernel != NULL) BSH_TRY(launch_before(slice, args, memory, context));
  if (slice->orders_x) args->x = memory;
  BSH_TRY(bsh_cuda_launch(context, slice->product.kernel, &slice->product.shape, arguments));
  if (slice->after.kernel == NULL) return BSH_OK;
  return bsh_cuda_launch(context, slice->after.kernel, &slice->after.shape, arguments);
}

static bsh_status run_slice(const bsh_linear_4bit_args *const args, const bsh_fused_slice *const slice,
                            const bsh_cuda_context *const context) {
  bsh_fused_args kernel_args = bsh_cuda_fused_args(args, slice);
  bsh_cuda_scratch scratch = {0};
  if (slice->scratch_bytes > 0) {
    BSH_TRY(bsh_cuda_scratch_new(context, slice->scratch_bytes, &scratch));
    char *const memory = scratch.data;
    kernel_args.partial = (float *)(memory + slice->partial_at);
    if (slice->before.kernel != NULL) kernel_args.counters = (uint32_t *)(memory + slice->counters_at);
  }
  const bsh_status status = launch_all(slice, &kernel_args, scratch.data, context);
  bsh_cuda_scratch_delete(&scratch);
  return status;
}

bsh_status bsh_cuda_fused(const bsh_linear_4bit_args *const args, const bsh_plan *const plan,
                          const bsh_cuda_context *const context) {
  const int64_t rows = plan->slice.rows, left = plan->n_slices * rows;
  for (int64_t m = 0; m < left; m += rows) {
    const bsh_linear_4bit_args part = rows_of(args, m, rows);
    BSH_TRY(run_slice(&part, &plan->slice, context));
  }
  if (plan->rest.rows == 0) return BSH_OK;
  const bsh_linear_4bit_args part = rows_of(args, left, plan->rest.rows);
  return run_slice(&part, &plan->rest, context);
}
