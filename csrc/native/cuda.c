/* native/cuda.c - the exported functions that bitsandbytes' CUDA library has for 4-bit and 8-bit blocks, and for
 * LLM.int8. See native/native.h.
 *
 * All addresses are those of one device, where `out` lies; its context need not be current. Work is enqueued on
 * `stream`, a CUstream; the quantizing functions have none and take torch's current one. Nothing waits for the GPU but
 * cgemm_4bit_inference_naive_*, which has to read which format `datatype` holds. */
#ifndef BSH_NO_CUDA

#include <inttypes.h>
#include <string.h>

#include "core/arithmetic.h"
#include "core/packed.h"
#include "gpu/cublas.h"
#include "gpu/int8.h"
#include "gpu/ops.h"
#include "gpu/product.h"
#include "native/native.h"
#include "ops/arguments.h"
#include "torch/abi.h"

/* Enters the device of the last pointer, the output; every pointer must be one of that device. */
static bsh_status enter(bsh_cuda_context *const context, const char *const op, const bsh_native_pointer *const pointers,
                        const int count, void *const stream, const int64_t size0, const int64_t size1,
                        const int64_t size2) {
  const bsh_native_pointer *const out = &pointers[count - 1];
  BSH_TRY(bsh_native_check_pointers(op, pointers, count));
  BSH_TRY(bsh_cuda_enter_raw(context, op, out->name, out->data, stream, size0, size1, size2));
  bsh_status status = BSH_OK;
  for (int i = 0; i < count - 1 && status == BSH_OK; i++)
    status = bsh_cuda_check_pointer(context, pointers[i].name, pointers[i].data);
  if (status != BSH_OK) bsh_cuda_leave(context);
  return status;
}

/* ---- 8-bit blocks ---- */

static bsh_status quantize(const char *const op, const bsh_quantize_blockwise_args *const args) {
  const bsh_native_pointer pointers[] = {{"code", args->map, sizeof(float)},
                                         {"A", args->x, (uintptr_t)dtype_size(args->dtype)},
                                         {"absmax", args->absmax, sizeof(float)},
                                         {"out", args->code, 1}};
  bsh_cuda_context context;
  BSH_TRY(bsh_native_check_sizes(op, args->n, args->blocksize, BSH_MAX_BLOCKSIZE_8BIT));
  if (args->n == 0) return BSH_OK;
  BSH_TRY(enter(&context, op, pointers, 4, NULL, args->n, 0, 0));
  context.stream = bsh_cuda_torch_stream(&context);
  const bsh_status status = bsh_cuda_quantize_blockwise(args, &context);
  bsh_cuda_leave(&context);
  return status;
}

static bsh_status dequantize(const char *const op, const bsh_dequantize_blockwise_args *const args,
                             void *const stream) {
  const bsh_native_pointer pointers[] = {{"code", args->map, sizeof(float)},
                                         {"A", args->code, 1},
                                         {"absmax", args->absmax, sizeof(float)},
                                         {"out", args->out, (uintptr_t)dtype_size(args->dtype)}};
  bsh_cuda_context context;
  BSH_TRY(bsh_native_check_sizes(op, args->n, args->blocksize, BSH_MAX_BLOCKSIZE_8BIT));
  if (args->n == 0) return BSH_OK;
  BSH_TRY(enter(&context, op, pointers, 4, stream, args->n, 0, 0));
  const bsh_status status = bsh_cuda_dequantize_blockwise(args, &context);
  bsh_cuda_leave(&context);
  return status;
}

/* code: the map, f32 [256]. A [n], absmax f32 [ceil(n / blocksize)], out u8 [n]. */
#define QUANTIZE(NAME, DTYPE)                                                                                          \
  BSH_NATIVE void cquantize_blockwise_##NAME(const float *code, const void *A, float *absmax, uint8_t *out,            \
                                             int32_t blocksize, int32_t n) {                                           \
    const bsh_quantize_blockwise_args args = {                                                                         \
        .x = A, .map = code, .code = out, .absmax = absmax, .n = n, .blocksize = blocksize, .dtype = DTYPE};           \
    bsh_native_finish(quantize("cquantize_blockwise_" #NAME, &args));                                                  \
  }
BSH_NATIVE_DTYPES(QUANTIZE)

/* The reverse: A u8 [n], out [n]. */
#define DEQUANTIZE(NAME, DTYPE)                                                                                        \
  BSH_NATIVE void cdequantize_blockwise_##NAME(const float *code, const uint8_t *A, const float *absmax, void *out,    \
                                               int32_t blocksize, int32_t n, void *stream) {                           \
    const bsh_dequantize_blockwise_args args = {                                                                       \
        .code = A, .absmax = absmax, .map = code, .out = out, .n = n, .blocksize = blocksize, .dtype = DTYPE};         \
    bsh_native_finish(dequantize("cdequantize_blockwise_" #NAME, &args, stream));                                      \
  }
BSH_NATIVE_DTYPES(DEQUANTIZE)

/* ---- 4-bit blocks ---- */

static bsh_status quantize_4bit(const char *const op, const bsh_quantize_4bit_args *const args) {
  const bsh_native_pointer pointers[] = {{"A", args->x, (uintptr_t)dtype_size(args->dtype)},
                                         {"absmax", args->absmax, sizeof(float)},
                                         {"out", args->packed, 1}};
  bsh_cuda_context context;
  BSH_TRY(bsh_native_check_sizes(op, args->n, args->blocksize, BSH_MAX_BLOCKSIZE));
  if (args->n == 0) return BSH_OK;
  BSH_TRY(enter(&context, op, pointers, 3, NULL, args->n, 0, 0));
  context.stream = bsh_cuda_torch_stream(&context);
  const bsh_status status = bsh_cuda_quantize_4bit(args, &context);
  bsh_cuda_leave(&context);
  return status;
}

static bsh_status dequantize_4bit(const char *const op, const bsh_weight *const weight, const bsh_dtype dtype,
                                  void *const out, void *const stream) {
  const bsh_native_pointer pointers[] = {{"A", weight->packed, 1},
                                         {"absmax", weight->scales.absmax, sizeof(float)},
                                         {"out", out, (uintptr_t)dtype_size(dtype)}};
  const int64_t n = weight->n;
  const bsh_dequantize_4bit_args args = {
      .weight = *weight, .out = out, .columns = n, .n_rows = 1, .n_columns = n, .ld = n, .dtype = dtype};
  bsh_cuda_context context;
  BSH_TRY(bsh_native_check_sizes(op, n, weight->blocksize, BSH_MAX_BLOCKSIZE));
  if (n == 0) return BSH_OK;
  BSH_TRY(enter(&context, op, pointers, 3, stream, n, 0, 0));
  const bsh_status status = bsh_cuda_dequantize_4bit(&args, &context);
  bsh_cuda_leave(&context);
  return status;
}

/* code is not read. A [n], absmax f32 [ceil(n / blocksize)], out u8 [ceil(n / 2)]. */
#define QUANTIZE_4BIT(NAME, DTYPE, FORMAT, NUMBER)                                                                     \
  BSH_NATIVE void cquantize_blockwise_##NAME##_##FORMAT(const float *code, const void *A, float *absmax, uint8_t *out, \
                                                        int32_t blocksize, int32_t n) {                                \
    const bsh_quantize_4bit_args args = {                                                                              \
        .x = A, .packed = out, .absmax = absmax, .n = n, .blocksize = blocksize, .dtype = DTYPE, .format = NUMBER};    \
    (void)code;                                                                                                        \
    bsh_native_finish(quantize_4bit("cquantize_blockwise_" #NAME "_" #FORMAT, &args));                                 \
  }
#define QUANTIZE_NF4(NAME, DTYPE) QUANTIZE_4BIT(NAME, DTYPE, nf4, BSH_NF4)
#define QUANTIZE_FP4(NAME, DTYPE) QUANTIZE_4BIT(NAME, DTYPE, fp4, BSH_FP4)
BSH_NATIVE_DTYPES(QUANTIZE_NF4)
BSH_NATIVE_DTYPES(QUANTIZE_FP4)

/* The reverse; n: elements of out. */
#define DEQUANTIZE_4BIT(NAME, DTYPE, FORMAT, NUMBER)                                                                   \
  BSH_NATIVE void cdequantize_blockwise_##NAME##_##FORMAT(const float *code, const uint8_t *A, const float *absmax,    \
                                                          void *out, int32_t blocksize, int32_t n, void *stream) {     \
    const bsh_weight weight = {                                                                                        \
        .packed = A, .scales = {.absmax = absmax}, .n = n, .blocksize = blocksize, .format = NUMBER};                  \
    (void)code;                                                                                                        \
    bsh_native_finish(dequantize_4bit("cdequantize_blockwise_" #NAME "_" #FORMAT, &weight, DTYPE, out, stream));       \
  }
#define DEQUANTIZE_NF4(NAME, DTYPE) DEQUANTIZE_4BIT(NAME, DTYPE, nf4, BSH_NF4)
#define DEQUANTIZE_FP4(NAME, DTYPE) DEQUANTIZE_4BIT(NAME, DTYPE, fp4, BSH_FP4)
BSH_NATIVE_DTYPES(DEQUANTIZE_NF4)
BSH_NATIVE_DTYPES(DEQUANTIZE_FP4)

/* ---- products ---- */

/* cuBLAS multiplies dequantized 16-bit panels, nobody fp32 ones and those with an odd bias: a fused kernel takes them,
 * some rows at a time. */
static bsh_status run_linear(const bsh_product_args *const args, const bsh_cuda_context *const context) {
  const bool odd = args->bias != NULL && !aligned(args->bias, BSH_CUBLAS_BIAS_ALIGNMENT);
  const bool cublas = bsh_torch.has_cublas && args->dtype != BSH_F32 && !odd;
  const bsh_torch_operands none = {0};
  bsh_plan plan;
  BSH_TRY(
      bsh_cuda_plan(context->op, args, context->sm, context->sms, cublas ? BSH_VENDOR_CUBLAS : BSH_VENDOR_NONE, &plan));
  return bsh_cuda_product(args, &plan, &none, context);
}

static bsh_status check_product(const char *const op, const int64_t M, const int64_t N, const int64_t K,
                                const int64_t blocksize) {
  if (M < 0 || N < 0 || K < 1)
    return bsh_fail(BSH_BAD_SHAPE, "%s: M = %" PRId64 ", N = %" PRId64 ", K = %" PRId64 " is no product", op, M, N, K);
  return bsh_check_blocksize(op, blocksize, BSH_MAX_BLOCKSIZE);
}

/* Plain scales, or all four parts of nested ones; 2: the numbers of the formats in quant_type. */
enum { QUANT_TYPE_FP4 = 1, QUANT_TYPE_NF4 = 2 };

static bsh_status gemm(const char *const op, bsh_product_args *const args, const int32_t quant_type,
                       void *const stream) {
  const uintptr_t itemsize = (uintptr_t)dtype_size(args->dtype);
  const bsh_scales *const s = &args->weight.scales;
  const bool nested = s->absmax_code != NULL, biased = args->bias != NULL;
  bsh_native_pointer pointers[8] = {
      {"A", args->x, itemsize}, {"B", args->weight.packed, 1}, {"absmax", nested ? s->absmax2 : s->absmax, 4}};
  int count = 3;
  if (quant_type != QUANT_TYPE_FP4 && quant_type != QUANT_TYPE_NF4)
    return bsh_fail(BSH_BAD_VALUE, "%s: quant_type %d is neither FP4 (%d) nor NF4 (%d)", op, (int)quant_type,
                    QUANT_TYPE_FP4, QUANT_TYPE_NF4);
  args->weight.format = quant_type == QUANT_TYPE_FP4 ? BSH_FP4 : BSH_NF4;
  BSH_TRY(check_product(op, args->M, args->N, args->K, args->weight.blocksize));
  if (args->M == 0 || args->N == 0) return BSH_OK;
  if (nested) {
    pointers[count++] = (bsh_native_pointer){"absmax_8bit", s->absmax_code, 1};
    pointers[count++] = (bsh_native_pointer){"absmax_code", s->absmax_map, 4};
    pointers[count++] = (bsh_native_pointer){"absmax_offset", s->offset, 4};
  }
  if (biased) pointers[count++] = (bsh_native_pointer){"bias", args->bias, itemsize};
  pointers[count++] = (bsh_native_pointer){"out", args->y, itemsize};
  bsh_cuda_context context;
  BSH_TRY(enter(&context, op, pointers, count, stream, args->M, args->N, args->K));
  const bsh_status status = run_linear(args, &context);
  bsh_cuda_leave(&context);
  return status;
}

/* out [M, N] = A [M, K] W^T + bias; B: W [N, K], packed. absmax f32: the scales, or with absmax_8bit u8 the second
 * level of nested ones, absmax_code f32 [256] their map and absmax_offset f32 [1]. bias [N] or NULL. */
#define GEMM(NAME, DTYPE)                                                                                              \
  BSH_NATIVE void cgemm_4bit_##NAME(const void *A, const uint8_t *B, const float *absmax, const uint8_t *absmax_8bit,  \
                                    const float *absmax_code, const float *absmax_offset, void *out, const void *bias, \
                                    int32_t M, int32_t N, int32_t K, int32_t blocksize, int32_t quant_type,            \
                                    void *stream) {                                                                    \
    const bsh_scales plain = {.absmax = absmax};                                                                       \
    const bsh_scales nested = {                                                                                        \
        .absmax_code = absmax_8bit, .absmax_map = absmax_code, .absmax2 = absmax, .offset = absmax_offset};            \
    const bsh_weight weight = {                                                                                        \
        .packed = B, .scales = absmax_8bit != NULL ? nested : plain, .n = (int64_t)N * K, .blocksize = blocksize};     \
    bsh_product_args args = {                                                                                          \
        .weight = weight, .x = A, .bias = bias, .y = out, .M = M, .N = N, .K = K, .ldx = K, .ldy = N, .dtype = DTYPE}; \
    bsh_native_finish(gemm("cgemm_4bit_" #NAME, &args, quant_type, stream));                                           \
  }
BSH_NATIVE_DTYPES(GEMM)

/* Which format the 16 values on the device are. */
static bsh_status read_format(const bsh_cuda_context *const context, const float *const datatype,
                              bsh_format *const format) {
  static const float tables[2][16] = {[BSH_NF4] = {BSH_NF4_VALUES}, [BSH_FP4] = {BSH_FP4_VALUES}};
  float values[16];
  BSH_TRY(bsh_cuda_read(context, "datatype", datatype, values, sizeof values));
  for (int i = 0; i < 2; i++) {
    bool equal = true;
    for (int code = 0; code < 16; code++) equal = equal && values[code] == tables[i][code];
    *format = (bsh_format)i;
    if (equal) return BSH_OK;
  }
  return bsh_fail(BSH_BAD_VALUE, "%s: datatype holds the values of neither NF4 nor FP4: %g, %g, ... %g", context->op,
                  (double)values[0], (double)values[1], (double)values[15]);
}

static bsh_status gemv(const char *const op, bsh_product_args *const args, const float *const datatype,
                       const int32_t rows, const int32_t ldb, void *const stream) {
  const uintptr_t itemsize = (uintptr_t)dtype_size(args->dtype);
  const bsh_native_pointer pointers[] = {{"A", args->x, itemsize},
                                         {"B", args->weight.packed, 1},
                                         {"absmax", args->weight.scales.absmax, 4},
                                         {"datatype", datatype, 4},
                                         {"out", args->y, itemsize}};
  BSH_TRY(check_product(op, args->M, args->N, args->K, args->weight.blocksize));
  if (rows != 1) return bsh_fail(BSH_BAD_SHAPE, "%s: n is %d, expected 1 row of A", op, (int)rows);
  if (2 * (int64_t)ldb != args->K)
    return bsh_fail(BSH_BAD_SHAPE, "%s: ldb is %d, expected k / 2 for k = %" PRId64, op, (int)ldb, args->K);
  if (args->N == 0) return BSH_OK;
  bsh_cuda_context context;
  BSH_TRY(enter(&context, op, pointers, 5, stream, args->M, args->N, args->K));
  bsh_status status = read_format(&context, datatype, &args->weight.format);
  if (status == BSH_OK) status = run_linear(args, &context);
  bsh_cuda_leave(&context);
  return status;
}

/* out [m] = W A; A [k], n = 1; B: W [m, k], packed, rows ldb = k / 2 bytes apart; absmax f32, datatype f32 [16]: the
 * format's values. lda and ldc are not read. */
#define GEMV(NAME, DTYPE)                                                                                              \
  BSH_NATIVE void cgemm_4bit_inference_naive_##NAME(                                                                   \
      int32_t m, int32_t n, int32_t k, const void *A, const uint8_t *B, const float *absmax, const float *datatype,    \
      void *out, int32_t lda, int32_t ldb, int32_t ldc, int32_t blocksize, void *stream) {                             \
    const bsh_weight weight = {                                                                                        \
        .packed = B, .scales = {.absmax = absmax}, .n = (int64_t)m * k, .blocksize = blocksize};                       \
    bsh_product_args args = {                                                                                          \
        .weight = weight, .x = A, .y = out, .M = 1, .N = m, .K = k, .ldx = k, .ldy = m, .dtype = DTYPE};               \
    (void)lda, (void)ldc;                                                                                              \
    bsh_native_finish(gemv("cgemm_4bit_inference_naive_" #NAME, &args, datatype, n, ldb, stream));                     \
  }
BSH_NATIVE_DTYPES(GEMV)

/* ---- LLM.int8: fp16 activations, codes and scales of rows (core/int8.h) ---- */

/* rows >= 0 of at least one column. */
static bsh_status check_rows(const char *const op, const int64_t rows, const int64_t columns) {
  if (rows >= 0 && columns >= 1) return BSH_OK;
  return bsh_fail(BSH_BAD_SHAPE, "%s: %" PRId64 " rows of %" PRId64 ", expected >= 0 rows of >= 1", op, rows, columns);
}

/* Codes and scales; which columns have outliers is marked in scratch memory, and forgotten. */
static bsh_status quantize_rows(bsh_quantize_int8_args *const args, const bsh_cuda_context *const context) {
  if (!(args->threshold > 0)) return bsh_cuda_quantize_int8_rows(args, context);
  bsh_cuda_scratch marks;
  BSH_TRY(bsh_cuda_scratch_new(context, args->K, &marks));
  args->outliers = (uint8_t *)marks.data;
  const bsh_status status = bsh_cuda_quantize_int8_rows(args, context);
  bsh_cuda_scratch_delete(&marks);
  return status;
}

static bsh_status quantize_int8(const char *const op, bsh_quantize_int8_args *const args, void *const stream) {
  const bsh_native_pointer pointers[] = {
      {"A", args->x, 2}, {"rowStats", args->absmax, sizeof(float)}, {"out", args->codes, 1}};
  bsh_cuda_context context;
  BSH_TRY(check_rows(op, args->M, args->K));
  BSH_TRY(bsh_int8_threshold(op, args->threshold, args->dtype, &args->threshold));
  if (args->M == 0) return BSH_OK;
  BSH_TRY(enter(&context, op, pointers, 3, stream, args->M, args->K, 0));
  const bsh_status status = quantize_rows(args, &context);
  bsh_cuda_leave(&context);
  return status;
}

BSH_NATIVE void cint8_vector_quant(const void *A, int8_t *out, float *rowStats, float threshold, int32_t rows,
                                   int32_t cols, void *stream);

/* A f16 [rows, cols] -> out i8 [rows, cols], rowStats f32 [rows]. Values of `threshold` or more count for no scale and
 * have the code 0; the rest of their columns keeps its codes. */
void cint8_vector_quant(const void *const A, int8_t *const out, float *const rowStats, const float threshold,
                        const int32_t rows, const int32_t cols, void *const stream) {
  bsh_quantize_int8_args args = {.x = A,
                                 .codes = out,
                                 .absmax = rowStats,
                                 .M = rows,
                                 .K = cols,
                                 .ldx = cols,
                                 .threshold = threshold,
                                 .dtype = BSH_F16};
  bsh_native_finish(quantize_int8("cint8_vector_quant", &args, stream));
}

static bsh_status scale_product(const char *const op, const bsh_scale_product_int8_args *const args,
                                void *const stream) {
  bsh_native_pointer pointers[5] = {{"A", args->sums, sizeof(int32_t)},
                                    {"rowStats", args->row_absmax, sizeof(float)},
                                    {"colStats", args->col_absmax, sizeof(float)}};
  int count = 3;
  if (args->bias != NULL) pointers[count++] = (bsh_native_pointer){"bias", args->bias, 2};
  pointers[count++] = (bsh_native_pointer){"out", args->y, 2};
  bsh_cuda_context context;
  BSH_TRY(check_rows(op, args->M, args->N));
  if (args->M == 0) return BSH_OK;
  BSH_TRY(enter(&context, op, pointers, count, stream, args->M, args->N, 0));
  const bsh_status status = bsh_cuda_scale_product_int8(args, &context);
  bsh_cuda_leave(&context);
  return status;
}

BSH_NATIVE void cdequant_mm_int32_fp16(const int32_t *A, const float *rowStats, const float *colStats, void *out,
                                       const void *bias, int32_t numRows, int32_t numCols, void *stream);

/* A i32 [numRows, numCols], rowStats f32 [numRows], colStats f32 [numCols], bias f16 [numCols] or NULL
 * -> out f16 [numRows, numCols]. */
void cdequant_mm_int32_fp16(const int32_t *const A, const float *const rowStats, const float *const colStats,
                            void *const out, const void *const bias, const int32_t numRows, const int32_t numCols,
                            void *const stream) {
  const bsh_scale_product_int8_args args = {.sums = A,
                                            .row_absmax = rowStats,
                                            .col_absmax = colStats,
                                            .bias = bias,
                                            .y = out,
                                            .M = numRows,
                                            .N = numCols,
                                            .dtype = BSH_F16};
  bsh_native_finish(scale_product("cdequant_mm_int32_fp16", &args, stream));
}

static bsh_status product_int8(const char *const op, const bsh_product_int8_args *const args, const int32_t lda,
                               const int32_t ldb, const int32_t ldc, void *const stream) {
  const bsh_native_pointer pointers[] = {{"A", args->b, 1}, {"B", args->a, 1}, {"C", args->sums, sizeof(int32_t)}};
  bsh_cuda_context context;
  if (args->M < 0 || args->N < 0 || args->K < 1 || args->K > BSH_INT8_MAX_K)
    return bsh_fail(BSH_BAD_SHAPE, "%s: m = %" PRId64 ", n = %" PRId64 ", k = %" PRId64 ", expected k from 1 to %d", op,
                    args->N, args->M, args->K, BSH_INT8_MAX_K);
  if (lda != args->K || ldb != args->K || ldc != args->N)
    return bsh_fail(BSH_BAD_SHAPE,
                    "%s: lda, ldb, ldc = %d, %d, %d, expected k, k, m = %" PRId64 ", %" PRId64 ", %" PRId64, op,
                    (int)lda, (int)ldb, (int)ldc, args->K, args->K, args->N);
  if (args->M == 0 || args->N == 0) return BSH_OK;
  BSH_TRY(enter(&context, op, pointers, 3, stream, args->M, args->N, args->K));
  const bsh_status status = bsh_cuda_product_int8(args, &context);
  bsh_cuda_leave(&context);
  return status;
}

BSH_NATIVE void *get_context(void);
BSH_NATIVE int cigemmlt_32(void *ctx, int32_t m, int32_t n, int32_t k, const int8_t *A, const int8_t *B, void *C,
                           const float *rowStats, int32_t lda, int32_t ldb, int32_t ldc, void *stream);

/* What bitsandbytes' callers hand on as ctx: some address, which nothing reads. */
void *get_context(void) {
  static char context;
  bsh_native_finish(BSH_OK);
  return &context;
}

/* C i32 [n, m] = B [n, k] A^T, A [m, k], all codes i8: column-major matrices, as in cuBLAS, whose columns lda, ldb and
 * ldc elements are apart. Returns 0, or 1 where it could not. ctx and rowStats are not read. */
int cigemmlt_32(void *const ctx, const int32_t m, const int32_t n, const int32_t k, const int8_t *const A,
                const int8_t *const B, void *const C, const float *const rowStats, const int32_t lda, const int32_t ldb,
                const int32_t ldc, void *const stream) {
  const bsh_product_int8_args args = {.a = B, .b = A, .sums = C, .M = n, .N = m, .K = k};
  (void)ctx, (void)rowStats;
  const bsh_status status = product_int8("cigemmlt_32", &args, lda, ldb, ldc, stream);
  bsh_native_finish(status);
  return status == BSH_OK ? 0 : 1;
}

#endif
