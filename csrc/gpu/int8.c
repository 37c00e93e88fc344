/* gpu/int8.c - see gpu/int8.h.
 *
 *   x --quantize_int8--> codes, absmax, flags --outliers_int8--> gathered columns --gemm_int8, gemm_int8_sm90--> y
 *   x (few rows) --gemv_int8, mixed_int8_sm90, linear_int8_any--> y
 *   dy --dgrad_int8_sm90, or dequantize_int8 and the vendor's product--> dx
 *
 * How many outlier columns there are stays on the GPU. */
#include "gpu/int8.h"

#include "core/arithmetic.h"
#include "gpu/cublas.h"
#include "plan/int8.h"

#define DTYPES 3 /* kernels below are indexed by bsh_dtype: f32, f16, bf16 */
#define BY_DTYPE(prefix)                                                                                               \
  {                                                                                                                    \
      {.fatbin = BSH_FATBIN_int8, .name = prefix "f32"},                                                               \
      {.fatbin = BSH_FATBIN_int8, .name = prefix "f16"},                                                               \
      {.fatbin = BSH_FATBIN_int8, .name = prefix "bf16"},                                                              \
  }

/* Bytes, a power of two up to 16, that all rows begin at multiples of. */
static int32_t row_alignment(const void *const data, const int64_t row_bytes) {
  const uintptr_t bits = (uintptr_t)data | (uintptr_t)row_bytes | 16;
  return (int32_t)(bits & -bits);
}

/* Launches `blocks` blocks of BSH_INT8_THREADS threads; the only kernel parameter is the argument struct. */
static bsh_status launch(const bsh_cuda_context *const context, bsh_cuda_kernel *const kernel, const int64_t blocks,
                         const void *const args) {
  if (blocks > INT32_MAX)
    return bsh_fail(BSH_BAD_SHAPE, "%s: tensor too large: %lld blocks of threads", context->op, (long long)blocks);
  const bsh_cuda_launch_shape shape = {
      .grid = {(uint32_t)blocks, 1, 1}, .block = {BSH_INT8_THREADS, 1, 1}, .overlap = true};
  void *arguments[] = {(void *)(uintptr_t)args};
  return bsh_cuda_launch(context, kernel, &shape, arguments);
}

/* ---- quantize_int8 ---- */

/* claims: instead of flags, or NULL; shares: as in bsh_int8_rows_args. */
static bsh_status quantize(const bsh_quantize_int8_args *const args, uint16_t *const claims, uint32_t *const shares,
                           const bsh_cuda_context *const context) {
  static bsh_cuda_kernel kernels[DTYPES] = BY_DTYPE("quantize_int8_");
  static bsh_cuda_kernel clear = {.fatbin = BSH_FATBIN_int8, .name = "clear_int8"};
  bsh_int8_rows_args used = {*args, claims, shares};
  if (!(args->threshold > 0)) used.rows.outliers = NULL;
  const bsh_int8_clear_args flags = {used.rows.outliers, args->K};
  if (used.rows.outliers != NULL) BSH_TRY(launch(context, &clear, divide_up(args->K, BSH_INT8_THREADS), &flags));
  return launch(context, &kernels[args->dtype], args->M, &used);
}

static bsh_status gather(const bsh_int8_gather_args *const args, const bsh_dtype dtype,
                         const bsh_cuda_context *const context) {
  static bsh_cuda_kernel kernels[DTYPES] = BY_DTYPE("outliers_int8_");
  const int64_t rows = (int64_t)args->M + (args->outliers.capacity > 0 ? args->N : 0);
  const int64_t at_once = (int64_t)context->sms * BSH_INT8_OUTLIER_BLOCKS;
  return launch(context, &kernels[dtype], min_i64(divide_up(rows, BSH_INT8_OUTLIER_ROWS), at_once), args);
}

static bsh_status check_size(const bsh_cuda_context *const context, const int64_t M, const int64_t K) {
  if (M <= INT32_MAX / 2 && K <= INT32_MAX / 2) return BSH_OK;
  return bsh_fail(BSH_BAD_SHAPE, "%s: too large: %lld rows of %lld", context->op, (long long)M, (long long)K);
}

bsh_status bsh_cuda_quantize_int8_rows(const bsh_quantize_int8_args *const args,
                                       const bsh_cuda_context *const context) {
  BSH_TRY(check_size(context, args->M, args->K));
  return quantize(args, NULL, NULL, context);
}

bsh_status bsh_cuda_quantize_int8(const bsh_quantize_int8_args *const args, const bsh_cuda_context *const context) {
  BSH_TRY(bsh_cuda_quantize_int8_rows(args, context));
  if (!(args->threshold > 0) || args->outliers == NULL || args->M == 1) return BSH_OK;
  const bsh_int8_gather_args clear = {.outliers = {.flags = args->outliers},
                                      .x = args->x,
                                      .codes = args->codes,
                                      .ldx = args->ldx,
                                      .M = (int32_t)args->M,
                                      .K = (int32_t)args->K};
  return gather(&clear, args->dtype, context);
}

/* ---- dequantize_int8, product_int8, scale_product_int8 ---- */

static bsh_status dequantize(const bsh_int8_rectangle_args *const args, const bsh_dtype dtype,
                             const bsh_cuda_context *const context) {
  static bsh_cuda_kernel fast[DTYPES] = BY_DTYPE("dequantize_int8_"), any[DTYPES] = BY_DTYPE("dequantize_int8_any_");
  const bool wide = row_alignment(args->codes, args->pitch) == 16 && args->columns % 16 == 0 && aligned(args->y, 16);
  const int64_t threads = args->rows * (args->columns / (wide ? 16 : 1));
  return launch(context, &(wide ? fast : any)[dtype], divide_up(threads, BSH_INT8_THREADS), args);
}

bsh_status bsh_cuda_dequantize_int8(const bsh_dequantize_int8_args *const args, const bsh_cuda_context *const context) {
  const bsh_int8_rectangle_args all = {args->codes, args->absmax, args->y, args->N, args->K, args->K};
  return dequantize(&all, args->dtype, context);
}

bsh_status bsh_cuda_product_int8(const bsh_product_int8_args *const args, const bsh_cuda_context *const context) {
  bsh_int8_plan plan;
  BSH_TRY(bsh_plan_product_int8(context->op, args->M, args->N, args->K, bsh_image_here(context->sm).arch, &plan));
  bsh_int8_gemm_args product = {.a = args->a,
                                .b = args->b,
                                .y = args->sums,
                                .M = (int32_t)args->M,
                                .N = (int32_t)args->N,
                                .K = (int32_t)args->K,
                                .m_tiles = plan.m_tiles,
                                .tiles = plan.tiles};
  product.fast = row_alignment(args->a, args->K) == 16 && row_alignment(args->b, args->K) == 16;
  void *arguments[] = {&product};
  return bsh_cuda_launch(context, plan.product.kernel, &plan.product.shape, arguments);
}

bsh_status bsh_cuda_scale_product_int8(const bsh_scale_product_int8_args *const args,
                                       const bsh_cuda_context *const context) {
  static bsh_cuda_kernel kernels[DTYPES] = BY_DTYPE("scale_product_int8_");
  return launch(context, &kernels[args->dtype], divide_up(args->M * args->N, BSH_INT8_THREADS), args);
}

/* ---- few rows ---- */

static bsh_status run_gemv(const bsh_linear_int8_args *const args, const bsh_int8_plan *const plan, void *const memory,
                           const bsh_cuda_context *const context) {
  bsh_fused_args used = {.packed = (const uint8_t *)args->packed,
                         .absmax = args->absmax,
                         .x = args->x,
                         .bias = args->bias,
                         .y = args->y,
                         .partial = memory,
                         .ldx = args->ldx,
                         .ldy = args->N,
                         .M = (int32_t)args->M,
                         .N = (int32_t)args->N,
                         .K = (int32_t)args->K,
                         .cut = plan->cut};
  void *arguments[] = {&used};
  BSH_TRY(bsh_cuda_launch(context, plan->product.kernel, &plan->product.shape, arguments));
  if (plan->after.kernel == NULL) return BSH_OK;
  return bsh_cuda_launch(context, plan->after.kernel, &plan->after.shape, arguments);
}

static bsh_status run_any(const bsh_linear_int8_args *const args, const bsh_int8_plan *const plan,
                          const bsh_cuda_context *const context) {
  void *arguments[] = {(void *)(uintptr_t)args};
  return bsh_cuda_launch(context, plan->product.kernel, &plan->product.shape, arguments);
}

/* ---- many rows ---- */

static bsh_int8_outliers outliers_in(const bsh_int8_plan *const plan, char *const memory, const bool there) {
  if (!there) return (bsh_int8_outliers){0};
  return (bsh_int8_outliers){.flags = (const uint8_t *)memory + plan->at.flags,
                             .count = (int32_t *)(memory + plan->at.count),
                             .list = (int32_t *)(memory + plan->at.list),
                             .x = memory + plan->at.x,
                             .w = memory + plan->at.w,
                             .capacity = plan->capacity};
}

static bsh_int8_gemm_args gemm_args(const bsh_linear_int8_args *const args, const bsh_int8_plan *const plan,
                                    char *const memory) {
  const bool fours = row_alignment(args->y, args->N * dtype_size(args->dtype)) == 16;
  return (bsh_int8_gemm_args){.a = (const int8_t *)memory + plan->at.codes,
                              .b = args->packed,
                              .y = args->y,
                              .row_absmax = (const float *)(memory + plan->at.absmax),
                              .col_absmax = args->absmax,
                              .bias = args->bias,
                              .x = args->x,
                              .ldx = args->ldx,
                              .outliers = outliers_in(plan, memory, args->threshold > 0 && !plan->finds),
                              .M = (int32_t)args->M,
                              .N = (int32_t)args->N,
                              .K = (int32_t)args->K,
                              .fast = row_alignment(args->packed, args->K) == 16,
                              .store_fours = fours,
                              .m_tiles = plan->m_tiles,
                              .tiles = plan->tiles,
                              .splits = plan->splits,
                              .partial = (int32_t *)(memory + plan->at.partial),
                              .claims = plan->finds ? (const uint16_t *)(memory + plan->at.claims) : NULL,
                              .threshold = args->threshold,
                              .found_x = memory + plan->at.x,
                              .found_codes = (int8_t *)memory + plan->at.x + args->M * BSH_INT8_CHUNK * 2,
                              .shares = plan->finds ? (uint32_t *)(memory + plan->at.shares) : NULL};
}

/* Codes of x, and what of its outlier columns is gathered. */
static bsh_status make_codes(const bsh_linear_int8_args *const args, const bsh_int8_gemm_args *const product,
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
                                        .w = args->packed,
                                        .ldx = args->ldx,
                                        .M = product->M,
                                        .N = product->N,
                                        .K = product->K};
  BSH_TRY(quantize(&codes, (uint16_t *)(uintptr_t)product->claims, product->shares, context));
  return product->outliers.count == NULL ? BSH_OK : gather(&columns, args->dtype, context);
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

static bsh_status run_sm90(const bsh_int8_plan *const plan, bsh_int8_gemm_args *const args, const bsh_dtype dtype,
                           const bsh_cuda_context *const context) {
  const bsh_int8_form *const form = &bsh_int8_forms[plan->form];
  const bsh_int8_outliers *const of = &args->outliers;
  const bsh_map_type type = dtype == BSH_F16 ? BSH_MAP_F16 : BSH_MAP_BF16;
  const int32_t part = form->columns / bsh_gemm_int8_sm90_readers(form->cluster);
  bsh_tensor_map a, b, x, w;
  BSH_TRY(map_of(context, args->a, args->M, args->K, BSH_MAP_U8, form->rows, &a));
  BSH_TRY(map_of(context, args->b, args->N, args->K, BSH_MAP_U8, part, &b));
  x = a, w = b; /* never read where nothing is gathered */
  if (of->capacity > 0) {
    BSH_TRY(map_of(context, of->x, args->M, of->capacity, type, form->rows, &x));
    BSH_TRY(map_of(context, of->w, args->N, of->capacity, type, part, &w));
  }
  void *arguments[] = {&a, &b, &x, &w, args};
  return bsh_cuda_launch(context, plan->product.kernel, &plan->product.shape, arguments);
}

static bsh_status run_gemm(const bsh_linear_int8_args *const args, const bsh_int8_plan *const plan, char *const memory,
                           const bsh_cuda_context *const context) {
  bsh_int8_gemm_args product = gemm_args(args, plan, memory);
  BSH_TRY(make_codes(args, &product, context));
  if (plan->kernel == BSH_INT8_gemm_int8_sm90) return run_sm90(plan, &product, args->dtype, context);
  void *arguments[] = {&product};
  return bsh_cuda_launch(context, plan->product.kernel, &plan->product.shape, arguments);
}

/* ---- x, or dy, as it is, in one pass over W ---- */

/* Scales of rows of W as the input gradient reads them. */
static bsh_status split_scales(const bsh_linear_int8_args *const args, const bsh_int8_scale_pair *const pairs,
                               const bsh_cuda_context *const context) {
  static bsh_cuda_kernel split[] = {{.fatbin = BSH_FATBIN_int8, .name = "split_scales_int8_bf16"},
                                    {.fatbin = BSH_FATBIN_int8, .name = "split_scales_int8_f16"}};
  const bsh_int8_split_args scales = {args->absmax, (bsh_int8_scale_pair *)(uintptr_t)pairs, (int32_t)args->N,
                                      bsh_dgrad_int8_pairs(args->N)};
  return launch(context, &split[args->dtype == BSH_F16], divide_up(scales.n_pairs, BSH_INT8_THREADS), &scales);
}

static bsh_int8_mixed_args mixed_args(const bsh_linear_int8_args *const args, const bool dgrad,
                                      const bsh_int8_plan *const plan, char *const memory) {
  const int64_t rows = dgrad ? args->K : args->N, depth = dgrad ? args->N : args->K;
  return (bsh_int8_mixed_args){.scales = dgrad ? (const bsh_int8_scale_pair *)(memory + plan->at.scales) : NULL,
                               .absmax = args->absmax,
                               .bias = args->bias,
                               .y = args->y,
                               .M = (int32_t)args->M,
                               .rows = (int32_t)rows,
                               .depth = (int32_t)depth,
                               .store_pairs = row_alignment(args->y, rows * dtype_size(args->dtype)) >= 4,
                               .token_tiles = plan->m_tiles,
                               .tiles = plan->tiles,
                               .splits = plan->splits};
}

static bsh_status run_mixed(const bsh_linear_int8_args *const args, const bsh_int8_plan *const plan, char *const memory,
                            const bsh_cuda_context *const context) {
  const bool dgrad = plan->kernel == BSH_INT8_dgrad_int8_sm90;
  bsh_int8_mixed_args used = mixed_args(args, dgrad, plan, memory);
  const bsh_map_of of_x = {.data = args->x,
                           .rows = args->M,
                           .columns = used.depth,
                           .row_bytes = args->ldx * dtype_size(args->dtype),
                           .box_rows = bsh_mixed_int8_tokens[plan->form] / 2,
                           .box_columns = BSH_MIXED_INT8_DEPTH,
                           .type = args->dtype == BSH_F16 ? BSH_MAP_F16 : BSH_MAP_BF16};
  const bsh_map_of of_w = {.data = args->packed,
                           .rows = args->N,
                           .columns = args->K,
                           .row_bytes = args->K,
                           .box_rows = dgrad ? BSH_MIXED_INT8_DEPTH : BSH_MIXED_INT8_ROWS,
                           .box_columns = dgrad ? BSH_MIXED_INT8_ROWS : BSH_MIXED_INT8_DEPTH,
                           .type = BSH_MAP_U8};
  bsh_tensor_map x, w;
  BSH_TRY(bsh_cuda_tensor_map(context, &of_x, &x));
  BSH_TRY(bsh_cuda_tensor_map(context, &of_w, &w));
  if (dgrad) BSH_TRY(split_scales(args, used.scales, context));
  void *arguments[] = {&x, &w, &used};
  return bsh_cuda_launch(context, plan->product.kernel, &plan->product.shape, arguments);
}

static bsh_status run_gemv_dgrad(const bsh_linear_int8_args *const args, const bsh_int8_plan *const plan,
                                 char *const memory, const bsh_cuda_context *const context) {
  bsh_int8_gemv_dgrad_args used = {.packed = args->packed,
                                   .absmax = args->absmax,
                                   .dy = args->x,
                                   .dx = args->y,
                                   .partial = (float *)memory,
                                   .ldy = args->ldx,
                                   .M = (int32_t)args->M,
                                   .N = (int32_t)args->N,
                                   .K = (int32_t)args->K,
                                   .splits = plan->splits};
  void *arguments[] = {&used};
  return bsh_cuda_launch(context, plan->product.kernel, &plan->product.shape, arguments);
}

/* ---- the input gradient by panels of columns of W: each gives its own columns of dx, written once ---- */

static bsh_status run_panel(const bsh_linear_int8_args *const args, const bsh_int8_plan *const plan, char *const memory,
                            const int64_t first, const int64_t n, const bsh_cuda_context *const context) {
  const bsh_int8_rectangle_args panel = {args->packed + first, args->absmax, memory, args->N, n, args->K};
  const bsh_torch_matrix dy = {NULL, args->x, 0, args->M, args->N, args->ldx, 1};
  const bsh_torch_matrix w = {NULL, memory, 0, args->N, n, n, 1};
  const bsh_torch_matrix dx = {NULL, args->y, first, args->M, n, args->K, 1};
  BSH_TRY(dequantize(&panel, args->dtype, context));
  return bsh_cublas_gemm(context, args->dtype, &dx, &dy, &w, NULL, memory + plan->panel_bytes, plan->vendor_bytes);
}

static bsh_status run_panels(const bsh_linear_int8_args *const args, const bsh_int8_plan *const plan,
                             char *const memory, const bsh_cuda_context *const context) {
  for (int64_t first = 0; first < args->K; first += plan->panel_columns)
    BSH_TRY(run_panel(args, plan, memory, first, min_i64(plan->panel_columns, args->K - first), context));
  return BSH_OK;
}

/* ---- linear_int8 ---- */

static bsh_int8_facts facts_of(const bsh_linear_int8_args *const args, const bool dgrad,
                               const bsh_cuda_context *const context) {
  return (bsh_int8_facts){.M = args->M,
                          .N = args->N,
                          .K = args->K,
                          .workspace_bytes = bsh_cuda_workspace_bytes(),
                          .dgrad = dgrad,
                          .outliers = args->threshold > 0,
                          .dtype = args->dtype,
                          .x_alignment = row_alignment(args->x, args->ldx * dtype_size(args->dtype)),
                          .y_alignment = row_alignment(args->y, args->N * dtype_size(args->dtype)),
                          .packed_alignment = row_alignment(args->packed, args->K),
                          .sm = context->sm,
                          .sms = context->sms,
                          .image = bsh_image_here(context->sm),
                          .tensor_maps = bsh_cuda_has_tensor_maps(),
                          .cublas = bsh_cublas_usable(),
                          .forced = bsh_forced_int8_kernel(dgrad)};
}

static bsh_status run(const bsh_linear_int8_args *const args, const bsh_int8_plan *const plan, char *const memory,
                      const bsh_cuda_context *const context) {
  switch (plan->kernel) {
  case BSH_INT8_gemv_int8:
    return run_gemv(args, plan, memory, context);
  case BSH_INT8_any:
    return run_any(args, plan, context);
  case BSH_INT8_mixed_int8_sm90:
  case BSH_INT8_dgrad_int8_sm90:
    return run_mixed(args, plan, memory, context);
  case BSH_INT8_gemv_int8_dgrad:
    return run_gemv_dgrad(args, plan, memory, context);
  case BSH_INT8_panels:
    return run_panels(args, plan, memory, context);
  default:
    return run_gemm(args, plan, memory, context);
  }
}

bsh_status bsh_cuda_linear_int8(const bsh_linear_int8_args *const args, const bool dgrad,
                                const bsh_cuda_context *const context) {
  const bsh_int8_facts facts = facts_of(args, dgrad, context);
  bsh_int8_plan plan;
  bsh_cuda_scratch scratch = {0};
  BSH_TRY(bsh_plan_linear_int8(context->op, &facts, &plan));
  if (plan.at.bytes > 0) BSH_TRY(bsh_cuda_scratch_new(context, plan.at.bytes, &scratch));
  const bsh_status status = run(args, &plan, scratch.data, context);
  if (plan.at.bytes > 0) bsh_cuda_scratch_delete(&scratch);
  return status;
}
