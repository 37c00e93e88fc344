/* gpu/wide.c - see gpu/wide.h. */
#include "gpu/wide.h"

#include "core/arithmetic.h"
#include "core/stack.h"

static bsh_gemm_wide_args wide_args(const bsh_linear_4bit_args *const args, const bsh_fused_slice *const slice) {
  const bsh_weight *const weight = &args->weight;
  const bsh_scales *const scales = &weight->scales;
  const int64_t rows = args->direction == BSH_FORWARD ? args->N : args->K;
  return (bsh_gemm_wide_args){
      .absmax = scales->absmax,
      .absmax_code = scales->absmax_code,
      .absmax_map = scales->absmax_map,
      .absmax2 = scales->absmax2,
      .offset = scales->offset,
      .bias = args->bias,
      .y = args->y,
      .ldy = args->ldy,
      .M = (int32_t)args->M,
      .N = (int32_t)args->N,
      .K = (int32_t)args->K,
      .format = (int32_t)weight->format,
      .block_shift = slice->block_shift,
      .code_pairs = scales->absmax == NULL && slice->block_shift == 0 && args->K % BSH_GEMM_WIDE_PIECE == 0 &&
                    (uintptr_t)scales->absmax_code % 2 == 0,
      .store_fours = rows % 4 == 0 && (uintptr_t)args->y % 8 == 0 && args->ldy % 4 == 0,
      .cut = slice->wide,
  };
}

/* `tokens` of x, copied at once, by 64 of depth; 128 rows of W, of all `experts`, by 64 packed bytes. */
static bsh_status make_maps(const bsh_linear_4bit_args *const args, const int64_t experts, const int32_t tokens,
                            const bsh_cuda_context *const context, bsh_tensor_map *const x, bsh_tensor_map *const w) {
  const bsh_map_of of_x = {.data = args->x,
                           .rows = args->M,
                           .columns = args->direction == BSH_FORWARD ? args->K : args->N,
                           .row_bytes = args->ldx * dtype_size(args->dtype),
                           .box_rows = tokens,
                           .box_columns = BSH_UNIT,
                           .type = args->dtype == BSH_F16 ? BSH_MAP_F16 : BSH_MAP_BF16};
  const bsh_map_of of_w = {.data = args->weight.packed,
                           .rows = experts * args->N,
                           .columns = args->K / 2,
                           .row_bytes = args->K / 2,
                           .box_rows = BSH_GEMM_WIDE_ROWS,
                           .box_columns = BSH_GEMM_WIDE_PIECE / 2,
                           .type = BSH_MAP_U8};
  BSH_TRY(bsh_cuda_tensor_map(context, &of_x, x));
  return bsh_cuda_tensor_map(context, &of_w, w);
}

static bsh_status launch(const bsh_fused_slice *const slice, bsh_tensor_map *const x, bsh_tensor_map *const w,
                         bsh_gemm_wide_args *const args, const bsh_cuda_context *const context) {
  int32_t n_flags = slice->counters;
  void *clear[] = {&args->flags, &n_flags}, *product[] = {x, w, args};
  if (slice->before.kernel != NULL)
    BSH_TRY(bsh_cuda_launch(context, slice->before.kernel, &slice->before.shape, clear));
  return bsh_cuda_launch(context, slice->product.kernel, &slice->product.shape, product);
}

/* Rows [m, m + slice->rows) of the product. */
static bsh_status run_slice(const bsh_linear_4bit_args *const all, const int64_t m, const bsh_fused_slice *const slice,
                            const bsh_cuda_context *const context) {
  const bsh_linear_4bit_args part = rows_of(all, m, slice->rows);
  bsh_gemm_wide_args args = wide_args(&part, slice);
  bsh_tensor_map x, w;
  BSH_TRY(make_maps(&part, 1, slice->wide.tokens / BSH_GEMM_WIDE_PAIR, context, &x, &w));
  bsh_cuda_scratch scratch = {0};
  if (slice->scratch_bytes > 0) {
    BSH_TRY(bsh_cuda_scratch_new(context, slice->scratch_bytes, &scratch));
    args.flags = (uint32_t *)((char *)scratch.data + slice->counters_at);
    args.partial = (float *)((char *)scratch.data + slice->partial_at);
  }
  const bsh_status status = launch(slice, &x, &w, &args, context);
  bsh_cuda_scratch_delete(&scratch);
  return status;
}

bsh_status bsh_cuda_wide(const bsh_linear_4bit_args *const args, const bsh_plan *const plan,
                         const bsh_cuda_context *const context) {
  const int64_t rows = plan->slice.rows, left = plan->n_slices * rows;
  for (int64_t m = 0; m < left; m += rows) BSH_TRY(run_slice(args, m, &plan->slice, context));
  return plan->rest.rows == 0 ? BSH_OK : run_slice(args, left, &plan->rest, context);
}

bsh_status bsh_cuda_wide_grouped(const bsh_grouped_linear_4bit_args *const all, const bsh_fused_slice *const slice,
                                 const bsh_cuda_context *const context) {
  const bsh_weight *const stack = &all->rows.weight;
  bsh_gemm_wide_args args = wide_args(&all->rows, slice);
  bsh_tensor_map x, w;
  args.offs = all->offs;
  args.experts = (int32_t)all->E;
  args.expert_blocks = (int32_t)(stack->n / all->E / stack->blocksize);
  args.expert_scales2 = (int32_t)bsh_expert_scales2(stack->n, all->E, stack->blocksize);
  BSH_TRY(make_maps(&all->rows, all->E, BSH_GEMM_WIDE_BOX, context, &x, &w));
  return launch(slice, &x, &w, &args, context);
}
