/* gpu/wide.c - launches of the kernels whose parameters are bsh_gemm_wide_args. */
#include "gpu/product.h"

#include "core/arithmetic.h"
#include "core/stack.h"

static bsh_gemm_wide_args wide_args(const bsh_product_args *const args, const bsh_plan_slice *const slice) {
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
static bsh_status make_maps(const bsh_product_args *const args, const int64_t experts, const int32_t tokens,
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
  BSH_TRY(make_maps(args, stack ? args->E : 1, stack ? BSH_GEMM_WIDE_BOX : slice->wide.tokens / BSH_GEMM_WIDE_PAIR,
                    context, &x, &w));
  return launch(slice, &x, &w, &of_kernel, context);
}
