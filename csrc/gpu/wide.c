/* gpu/wide.c - launches of the kernels whose parameters are bsh_gemm_wide_args. */
#include "gpu/product.h"

#include "core/arithmetic.h"
#include "core/stack.h"

static bsh_gemm_wide_args wide_args(const bsh_product_args *const args, const bsh_plan_slice *const slice) {
  const bsh_weight *const weight = &args->weight;
  const bsh_scales *const scales = &weight->scales;
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
      .code_pairs = slice->reads_together,
      .store_fours = slice->stores_together,
      .cut = slice->wide,
  };
}

bsh_status bsh_map_x(const bsh_product_args *const args, const int32_t box_rows, const bsh_cuda_context *const context,
                     bsh_tensor_map *const map) {
  const bsh_map_of x = {.data = args->x,
                        .rows = args->M,
                        .columns = args->direction == BSH_FORWARD ? args->K : args->N,
                        .row_bytes = args->ldx * dtype_size(args->dtype),
                        .box_rows = box_rows,
                        .box_columns = BSH_UNIT,
                        .type = args->dtype == BSH_F16 ? BSH_MAP_F16 : BSH_MAP_BF16};
  return bsh_cuda_tensor_map(context, &x, map);
}

bsh_status bsh_map_w(const bsh_product_args *const args, const int64_t rows, const int64_t columns,
                     const int32_t box_rows, const int32_t box_columns, const bsh_cuda_context *const context,
                     bsh_tensor_map *const map) {
  const bsh_map_of w = {args->weight.packed, rows, columns, columns, box_rows, box_columns, BSH_MAP_U8};
  return bsh_cuda_tensor_map(context, &w, map);
}

static bsh_status launch(const bsh_plan_slice *const slice, bsh_tensor_map *const x, bsh_tensor_map *const w,
                         bsh_gemm_wide_args *const args, const bsh_cuda_context *const context) {
  int32_t n_flags = slice->counters;
  void *clear[] = {&args->flags, &n_flags}, *product[] = {x, w, args};
  if (slice->before.kernel != NULL)
    BSH_TRY(bsh_cuda_launch(context, slice->before.kernel, &slice->before.shape, clear));
  return bsh_cuda_launch(context, slice->product.kernel, &slice->product.shape, product);
}

bsh_status bsh_launch_wide(const bsh_product_args *const args, const bsh_plan_slice *const slice, char *const memory,
                           const bsh_cuda_context *const context) {
  const bsh_weight *const weight = &args->weight;
  const bool stack = args->E > 0;
  bsh_gemm_wide_args of_kernel = wide_args(args, slice);
  bsh_tensor_map x, w;
  if (stack) {
    of_kernel.offs = args->offs;
    of_kernel.experts = (int32_t)args->E;
    of_kernel.expert_blocks = (int32_t)(weight->n / args->E / weight->blocksize);
    of_kernel.expert_scales2 = (int32_t)bsh_expert_scales2(weight->n, args->E, weight->blocksize);
  }
  if (memory != NULL) {
    of_kernel.flags = (uint32_t *)(memory + slice->counters_at);
    of_kernel.partial = (float *)(memory + slice->partial_at);
  }
  const int32_t tokens = stack ? BSH_GEMM_WIDE_BOX : slice->wide.tokens / BSH_GEMM_WIDE_PAIR; /* copied at once */
  BSH_TRY(bsh_map_x(args, tokens, context, &x));
  BSH_TRY(bsh_map_w(args, (stack ? args->E : 1) * args->N, args->K / 2, BSH_GEMM_WIDE_ROWS, BSH_GEMM_WIDE_PIECE / 2,
                    context, &w));
  return launch(slice, &x, &w, &of_kernel, context);
}
