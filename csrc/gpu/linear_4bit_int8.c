/* gpu/linear_4bit_int8.c - linear_4bit_int8 on CUDA: x in codes in one launch, the product in another; rows of x a
 * chunk at a time, so that scratch memory is bounded. */
#include "core/arithmetic.h"
#include "cuda/sizes/gemm_4bit_int8.h"
#include "gpu/alignment.h"
#include "gpu/int8.h"
#include "plan/images.h"

static bsh_status quantize(const bsh_groups_int8_args *const args, const bsh_dtype dtype,
                           const bsh_cuda_context *const context) {
  static bsh_cuda_kernel kernels[BSH_DTYPES] = BSH_BY_DTYPE(int8, "quantize_groups_int8_", "");
  const int64_t threads = args->M * args->K / 4;
  return bsh_cuda_launch_blocks(context, &kernels[dtype], divide_up(threads, BSH_INT8_THREADS), BSH_INT8_THREADS, true,
                                args);
}

static bsh_status multiply(const bsh_gemm_4bit_int8_args *const args, const bsh_dtype dtype,
                           const bsh_cuda_context *const context) {
  static bsh_cuda_kernel kernels[BSH_DTYPES] = BSH_BY_DTYPE(gemm_4bit_int8, "int8_gemm_4bit_", "");
  const int64_t tiles = args->m_tiles * divide_up(args->N, BSH_GEMM_4BIT_INT8_COLUMNS);
  if (tiles > INT32_MAX)
    return bsh_fail(BSH_BAD_SHAPE, "%s: tensor too large: %lld tiles of y", context->op, (long long)tiles);
  const bsh_cuda_launch_shape shape = bsh_overlapping(tiles, BSH_GEMM_4BIT_INT8_THREADS, 1, BSH_GEMM_4BIT_INT8_SHARED);
  void *arguments[] = {(void *)(uintptr_t)args};
  return bsh_cuda_launch(context, &kernels[dtype], &shape, arguments);
}

static bool rows_of_fours(const bsh_product_args *const args, const int64_t item) {
  return aligned(args->x, (int32_t)(4 * item)) && args->ldx % 4 == 0;
}

/* Rows [m0, m0 + M). memory: codes, then scales. */
static bsh_status run_chunk(const bsh_product_args *const args, const int64_t m0, const int64_t M, char *const memory,
                            const bsh_cuda_context *const context) {
  const int64_t item = args->dtype == BSH_F32 ? 4 : 2;
  const bsh_groups_int8_args groups = {.x = (const char *)args->x + m0 * args->ldx * item,
                                       .codes = (int8_t *)memory,
                                       .scales = (float *)(memory + M * args->K),
                                       .M = M,
                                       .K = args->K,
                                       .ldx = args->ldx,
                                       .fast = rows_of_fours(args, item)};
  const bsh_gemm_4bit_int8_args product = {.codes = groups.codes,
                                           .x_scales = groups.scales,
                                           .weight = args->weight,
                                           .bias = args->bias,
                                           .y = (char *)args->y + m0 * args->N * item,
                                           .M = (int32_t)M,
                                           .N = (int32_t)args->N,
                                           .K = (int32_t)args->K,
                                           .fast = aligned(args->weight.packed, 8),
                                           .pairs = args->N % 2 == 0 && aligned(args->y, (int32_t)(2 * item)),
                                           .m_tiles = (int32_t)divide_up(M, BSH_GEMM_4BIT_INT8_ROWS)};
  BSH_TRY(quantize(&groups, args->dtype, context));
  return multiply(&product, args->dtype, context);
}

static bsh_status check(const bsh_product_args *const args, const bsh_cuda_context *const context) {
  if (bsh_image_here(context->sm).arch < 80)
    return bsh_fail(BSH_NO_KERNEL,
                    "%s: needs a GPU of sm_80 or newer and a build for it, this is sm_%d: use linear_4bit", context->op,
                    context->sm);
  if (args->N <= INT32_MAX / 2 && args->K <= INT32_MAX / 2) return BSH_OK;
  return bsh_fail(BSH_BAD_SHAPE, "%s: too large: a weight of %lld rows and %lld columns", context->op,
                  (long long)args->N, (long long)args->K);
}

bsh_status bsh_cuda_linear_4bit_int8(const bsh_product_args *const args, const bsh_cuda_context *const context) {
  enum { TILE = BSH_GEMM_4BIT_INT8_ROWS };
  const int64_t row = args->K + args->K / BSH_GROUP_INT8 * (int64_t)sizeof(float);
  const int64_t fit = bsh_cuda_workspace_bytes() / row / TILE * TILE, chunk = min_i64(args->M, fit < TILE ? TILE : fit);
  bsh_cuda_scratch scratch;
  BSH_TRY(check(args, context));
  BSH_TRY(bsh_cuda_scratch_new(context, chunk * row, &scratch));
  bsh_status status = BSH_OK;
  for (int64_t m0 = 0; m0 < args->M && status == BSH_OK; m0 += chunk)
    status = run_chunk(args, m0, min_i64(chunk, args->M - m0), scratch.data, context);
  bsh_cuda_scratch_delete(&scratch);
  return status;
}
