/* gpu/int8.c - see gpu/int8.h: the int8 ops that are no products with a weight. */
#include "gpu/int8.h"

#include "core/arithmetic.h"
#include "gpu/alignment.h"
#include "plan/product.h"

static bsh_status launch(const bsh_cuda_context *const context, bsh_cuda_kernel *const kernel, const int64_t blocks,
                         const void *const args) {
  return bsh_cuda_launch_blocks(context, kernel, blocks, BSH_INT8_THREADS, true, args);
}

/* ---- quantize_int8 ---- */

bsh_status bsh_cuda_code_rows(const bsh_quantize_int8_args *const args, uint16_t *const claims, uint32_t *const shares,
                              const bsh_cuda_context *const context) {
  static bsh_cuda_kernel kernels[BSH_DTYPES] = BSH_BY_DTYPE(int8, "quantize_int8_", "");
  static bsh_cuda_kernel clear = BSH_KERNEL(int8, "clear_int8");
  bsh_int8_rows_args used = {*args, claims, shares};
  if (!(args->threshold > 0)) used.rows.outliers = NULL;
  const bsh_int8_clear_args flags = {used.rows.outliers, args->K};
  if (used.rows.outliers != NULL) BSH_TRY(launch(context, &clear, divide_up(args->K, BSH_INT8_THREADS), &flags));
  return launch(context, &kernels[args->dtype], args->M, &used);
}

bsh_status bsh_cuda_gather_outliers(const bsh_int8_gather_args *const args, const bsh_dtype dtype,
                                    const bsh_cuda_context *const context) {
  static bsh_cuda_kernel kernels[BSH_DTYPES] = BSH_BY_DTYPE(int8, "outliers_int8_", "");
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
  return bsh_cuda_code_rows(args, NULL, NULL, context);
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
  return bsh_cuda_gather_outliers(&clear, args->dtype, context);
}

/* ---- dequantize_int8, product_int8, scale_product_int8 ---- */

static bsh_status dequantize(const bsh_int8_rectangle_args *const args, const bsh_dtype dtype,
                             const bsh_cuda_context *const context) {
  static bsh_cuda_kernel fast[BSH_DTYPES] = BSH_BY_DTYPE(int8, "dequantize_int8_", ""),
                         any[BSH_DTYPES] = BSH_BY_DTYPE(int8, "dequantize_int8_any_", "");
  const bool vectors =
      rows_alignment(args->codes, args->pitch) == 16 && args->columns % 16 == 0 && aligned(args->y, 16);
  const int64_t threads = args->rows * (args->columns / (vectors ? 16 : 1));
  return launch(context, &(vectors ? fast : any)[dtype], divide_up(threads, BSH_INT8_THREADS), args);
}

bsh_status bsh_cuda_dequantize_int8(const bsh_dequantize_int8_args *const args, const bsh_cuda_context *const context) {
  const bsh_int8_rectangle_args all = {args->codes, args->absmax, args->y, args->N, args->K, args->K};
  return dequantize(&all, args->dtype, context);
}

bsh_status bsh_cuda_dequantize_int8_part(const bsh_dequantize_4bit_args *const args,
                                         const bsh_cuda_context *const context) {
  const bsh_int8_rectangle_args part = {int8_codes(&args->weight) + args->row0 * args->columns + args->column0,
                                        args->weight.scales.absmax + args->row0,
                                        args->out,
                                        args->n_rows,
                                        args->n_columns,
                                        args->columns};
  return dequantize(&part, args->dtype, context);
}

bsh_status bsh_cuda_product_int8(const bsh_product_int8_args *const args, const bsh_cuda_context *const context) {
  bsh_plan_slice plan;
  const int32_t of_a = rows_alignment(args->a, args->K), of_b = rows_alignment(args->b, args->K);
  BSH_TRY(bsh_plan_product_int8(context->op, args->M, args->N, args->K, of_a < of_b ? of_a : of_b,
                                bsh_image_here(context->sm).arch, &plan));
  bsh_int8_gemm_args product = {.a = args->a,
                                .b = args->b,
                                .y = args->sums,
                                .M = (int32_t)args->M,
                                .N = (int32_t)args->N,
                                .K = (int32_t)args->K,
                                .fast = plan.reads_together,
                                .m_tiles = plan.int8.m_tiles,
                                .tiles = plan.int8.tiles};
  void *arguments[] = {&product};
  return bsh_cuda_launch(context, plan.product.kernel, &plan.product.shape, arguments);
}

bsh_status bsh_cuda_scale_product_int8(const bsh_scale_product_int8_args *const args,
                                       const bsh_cuda_context *const context) {
  static bsh_cuda_kernel kernels[BSH_DTYPES] = BSH_BY_DTYPE(int8, "scale_product_int8_", "");
  return launch(context, &kernels[args->dtype], divide_up(args->M * args->N, BSH_INT8_THREADS), args);
}

bsh_status bsh_cuda_split_scales_int8(const bsh_product_args *const args, const bsh_int8_scale_pair *const pairs,
                                      const bsh_cuda_context *const context) {
  static bsh_cuda_kernel split[] = {BSH_KERNEL(int8, "split_scales_int8_bf16"),
                                    BSH_KERNEL(int8, "split_scales_int8_f16")};
  const bsh_int8_split_args scales = {args->weight.scales.absmax, (bsh_int8_scale_pair *)(uintptr_t)pairs,
                                      (int32_t)args->N, bsh_dgrad_int8_pairs(args->N)};
  return launch(context, &split[args->dtype == BSH_F16], divide_up(scales.n_pairs, BSH_INT8_THREADS), &scales);
}
