/* gpu/int8_product.c - launches of the kernels for int8 weights.
 *
 *   x --quantize_int8--> codes, absmax, flags --outliers_int8--> gathered columns --gemm_int8, gemm_int8_sm90--> y
 *   x (few rows) --gemv_int8, mixed_int8_sm90, linear_int8_any--> y
 *   dy --dgrad_int8_sm90, or dequantize_int8 and the vendor's product (gpu/panels.c)--> dx
 *
 * How many outlier columns there are stays on the GPU. */
#include "core/arithmetic.h"
#include "gpu/int8.h"
#include "gpu/product.h"

/* ---- x as it is, a row at a time ---- */

bsh_status bsh_launch_rows_int8(const bsh_product_args *const args, const bsh_plan_slice *const slice,
                                char *const memory, const bsh_cuda_context *const context) {
  bsh_int8_any_args of_kernel = {.x = args->x,
                                 .packed = int8_codes(&args->weight),
                                 .absmax = args->weight.scales.absmax,
                                 .bias = args->bias,
                                 .y = args->y,
                                 .M = args->M,
                                 .N = args->N,
                                 .K = args->K,
                                 .ldx = args->ldx,
                                 .threshold = args->threshold,
                                 .dtype = args->dtype};
  void *arguments[] = {&of_kernel};
  (void)memory;
  return bsh_cuda_launch(context, slice->product.kernel, &slice->product.shape, arguments);
}

/* ---- x in codes ---- */

static bsh_int8_outliers outliers_in(const bsh_int8_cut *const cut, char *const memory, const bool there) {
  if (!there) return (bsh_int8_outliers){0};
  return (bsh_int8_outliers){.flags = (const uint8_t *)memory + cut->flags_at,
                             .count = (int32_t *)(memory + cut->count_at),
                             .list = (int32_t *)(memory + cut->list_at),
                             .x = memory + cut->x_at,
                             .w = memory + cut->w_at,
                             .capacity = cut->capacity};
}

static bsh_int8_gemm_args gemm_args(const bsh_product_args *const args, const bsh_plan_slice *const slice,
                                    char *const memory) {
  const bsh_int8_cut *const cut = &slice->int8;
  return (bsh_int8_gemm_args){.a = (const int8_t *)memory + cut->codes_at,
                              .b = int8_codes(&args->weight),
                              .y = args->y,
                              .row_absmax = (const float *)(memory + cut->absmax_at),
                              .col_absmax = args->weight.scales.absmax,
                              .bias = args->bias,
                              .x = args->x,
                              .ldx = args->ldx,
                              .outliers = outliers_in(cut, memory, args->threshold > 0 && !cut->finds),
                              .M = (int32_t)args->M,
                              .N = (int32_t)args->N,
                              .K = (int32_t)args->K,
                              .fast = slice->reads_together,
                              .store_fours = slice->stores_together,
                              .m_tiles = cut->m_tiles,
                              .tiles = cut->tiles,
                              .splits = cut->splits,
                              .partial = (int32_t *)(memory + slice->partial_at),
                              .claims = cut->finds ? (const uint16_t *)(memory + cut->claims_at) : NULL,
                              .threshold = args->threshold,
                              .found_x = memory + cut->x_at,
                              .found_codes = (int8_t *)memory + cut->x_at + args->M * BSH_INT8_CHUNK * 2,
                              .shares = cut->finds ? (uint32_t *)(memory + cut->shares_at) : NULL};
}

/* Codes of x, and what of its outlier columns is gathered. */
static bsh_status make_codes(const bsh_product_args *const args, const bsh_int8_gemm_args *const product,
                             const bsh_cuda_context *const context) {
  const bsh_quantize_int8_args codes = {.x = args->x,
                                        .codes = (int8_t *)(uintptr_t)product->a,
                                        .absmax = (float *)(uintptr_t)product->row_absmax,
                                        .outliers = (uint8_t *)(uintptr_t)product->outliers.flags,
                                        .M = args->M,
                                        .K = args->K,
                                        .ldx = args->ldx,
                                        .threshold = args->threshold,
                                        .dtype = args->dtype};
  const bsh_int8_gather_args columns = {.outliers = product->outliers,
                                        .x = args->x,
                                        .codes = codes.codes,
                                        .w = int8_codes(&args->weight),
                                        .ldx = args->ldx,
                                        .M = product->M,
                                        .N = product->N,
                                        .K = product->K};
  BSH_TRY(bsh_cuda_code_rows(&codes, (uint16_t *)(uintptr_t)product->claims, product->shares, context));
  return product->outliers.count == NULL ? BSH_OK : bsh_cuda_gather_outliers(&columns, args->dtype, context);
}

/* A box of 128 bytes by `box_rows` of a matrix of codes, or of gathered columns. */
static bsh_status map_of(const bsh_cuda_context *const context, const void *const data, const int64_t rows,
                         const int64_t columns, const bsh_map_type type, const int32_t box_rows,
                         bsh_tensor_map *const map) {
  const int64_t item = type == BSH_MAP_U8 ? 1 : 2;
  const bsh_map_of what = {.data = data,
                           .rows = rows,
                           .columns = columns,
                           .row_bytes = columns * item,
                           .box_rows = box_rows,
                           .box_columns = (int32_t)(BSH_GEMM_INT8_DEPTH / item),
                           .type = type};
  return bsh_cuda_tensor_map(context, &what, map);
}

static bsh_status launch_with_maps(const bsh_plan_slice *const slice, bsh_int8_gemm_args *const args,
                                   const bsh_dtype dtype, const bsh_cuda_context *const context) {
  const bsh_int8_outliers *const of = &args->outliers;
  const bsh_map_type type = dtype == BSH_F16 ? BSH_MAP_F16 : BSH_MAP_BF16;
  const int32_t rows = slice->int8.rows, columns = slice->int8.columns;
  bsh_tensor_map a, b, x, w;
  BSH_TRY(map_of(context, args->a, args->M, args->K, BSH_MAP_U8, rows, &a));
  BSH_TRY(map_of(context, args->b, args->N, args->K, BSH_MAP_U8, columns, &b));
  x = a, w = b; /* never read where nothing is gathered */
  if (of->capacity > 0) {
    BSH_TRY(map_of(context, of->x, args->M, of->capacity, type, rows, &x));
    BSH_TRY(map_of(context, of->w, args->N, of->capacity, type, columns, &w));
  }
  void *arguments[] = {&a, &b, &x, &w, args};
  return bsh_cuda_launch(context, slice->product.kernel, &slice->product.shape, arguments);
}

bsh_status bsh_launch_codes_int8(const bsh_product_args *const args, const bsh_plan_slice *const slice,
                                 char *const memory, const bsh_cuda_context *const context) {
  bsh_int8_gemm_args of_kernel = gemm_args(args, slice, memory);
  BSH_TRY(make_codes(args, &of_kernel, context));
  if (slice->int8.maps) return launch_with_maps(slice, &of_kernel, args->dtype, context);
  void *arguments[] = {&of_kernel};
  return bsh_cuda_launch(context, slice->product.kernel, &slice->product.shape, arguments);
}

/* ---- x, or dy, as it is, in one pass over W ---- */

static bsh_int8_mixed_args mixed_args(const bsh_product_args *const args, const bsh_plan_slice *const slice,
                                      char *const memory) {
  const bool back = args->direction == BSH_INPUT_GRADIENT;
  const int64_t rows = back ? args->K : args->N, depth = back ? args->N : args->K;
  return (bsh_int8_mixed_args){.scales = back ? (const bsh_int8_scale_pair *)(memory + slice->int8.scales_at) : NULL,
                               .absmax = args->weight.scales.absmax,
                               .bias = args->bias,
                               .y = args->y,
                               .M = (int32_t)args->M,
                               .rows = (int32_t)rows,
                               .depth = (int32_t)depth,
                               .store_pairs = slice->stores_together,
                               .token_tiles = slice->int8.m_tiles,
                               .tiles = slice->int8.tiles,
                               .splits = slice->int8.splits};
}

bsh_status bsh_launch_mixed_int8(const bsh_product_args *const args, const bsh_plan_slice *const slice,
                                 char *const memory, const bsh_cuda_context *const context) {
  const bool back = args->direction == BSH_INPUT_GRADIENT;
  bsh_int8_mixed_args of_kernel = mixed_args(args, slice, memory);
  bsh_tensor_map x, w;
  BSH_TRY(bsh_map_x(args, slice->int8.rows, context, &x));
  BSH_TRY(bsh_map_w(args, args->N, args->K, back ? BSH_MIXED_INT8_DEPTH : BSH_MIXED_INT8_ROWS,
                    back ? BSH_MIXED_INT8_ROWS : BSH_MIXED_INT8_DEPTH, context, &w));
  if (back) BSH_TRY(bsh_cuda_split_scales_int8(args, of_kernel.scales, context));
  void *arguments[] = {&x, &w, &of_kernel};
  return bsh_cuda_launch(context, slice->product.kernel, &slice->product.shape, arguments);
}

bsh_status bsh_launch_dgrad_int8(const bsh_product_args *const args, const bsh_plan_slice *const slice,
                                 char *const memory, const bsh_cuda_context *const context) {
  bsh_int8_gemv_dgrad_args of_kernel = {.packed = int8_codes(&args->weight),
                                        .absmax = args->weight.scales.absmax,
                                        .dy = args->x,
                                        .dx = args->y,
                                        .partial = (float *)memory,
                                        .ldy = args->ldx,
                                        .M = (int32_t)args->M,
                                        .N = (int32_t)args->N,
                                        .K = (int32_t)args->K,
                                        .splits = slice->int8.splits};
  void *arguments[] = {&of_kernel};
  return bsh_cuda_launch(context, slice->product.kernel, &slice->product.shape, arguments);
}
