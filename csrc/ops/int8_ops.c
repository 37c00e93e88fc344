/* ops/int8_ops.c - the ops of LLM.int8(): codes of rows, their products, and layers of them. Schemas: ops/ops.c.
 * Formulas: core/int8.h. */
#include <inttypes.h>

#include "core/arithmetic.h"
#include "core/int8.h"
#include "core/packed.h"
#include "cpu/int8.h"
#include "gpu/int8.h"
#include "ops/arguments.h"
#include "ops/ops.h"
#include "ops/product.h"

/* Bytes that were handed over as codes of a weight [N, K] are in storage of any dtype, filled up to whole items. */
static bsh_status read_weight(bsh_call *const call, const int first, const int64_t N, const int64_t K,
                              bsh_tensor *const packed, const int8_t **const codes, const float **const absmax) {
  int64_t n = 0;
  BSH_TRY(bsh_checked_product(call->op, N, K, &n));
  BSH_TRY(bsh_call_tensor(call, first, packed));
  if (packed->itemsize == 0)
    return bsh_fail(BSH_BAD_DTYPE, "%s: packed has ScalarType %" PRId32 ", which is no storage of int8 codes", call->op,
                    packed->dtype);
  const int64_t needed = divide_up(n, packed->itemsize) * packed->itemsize, there = packed->numel * packed->itemsize;
  if (there != needed)
    return bsh_fail(BSH_BAD_SHAPE,
                    "%s: packed has %" PRId64 " bytes, a weight [%" PRId64 ", %" PRId64 "] in storage of %" PRId64
                    "-byte items needs %" PRId64 "; a sharded or foreign weight reached the op",
                    call->op, there, N, K, packed->itemsize, needed);
  *codes = packed->data;
  return bsh_vector_argument(call, first + 1, "absmax", bsh_torch.dtype_float32, N, packed, (void **)(uintptr_t)absmax);
}

/* A sum over more columns may not be an int32. */
static bsh_status check_columns(const bsh_call *const call, const int64_t K) {
  if (K <= BSH_INT8_MAX_K) return BSH_OK;
  return bsh_fail(BSH_BAD_SHAPE, "%s: %" PRId64 " columns, the sum of at most %d products of codes is an int32",
                  call->op, K, BSH_INT8_MAX_K);
}

static bsh_status zero(const bsh_call *const call, const bsh_tensor *const tensor) {
  if (tensor->numel == 0 || bsh_torch.aoti_torch_zero_(tensor->handle) == 0) return BSH_OK;
  return bsh_fail(BSH_TORCH_ERROR, "%s: could not zero a result", call->op);
}

/* Of a tensor of rows: one dimension at least, its length, and the product of the others. */
static bsh_status read_rows(const bsh_call *const call, const bsh_tensor *const tensor, const char *const argument,
                            int64_t *const rows, int64_t *const columns) {
  if (tensor->dim < 1) return bsh_fail(BSH_BAD_SHAPE, "%s: %s has no dimension, expected rows", call->op, argument);
  *columns = tensor->sizes[tensor->dim - 1];
  *rows = 1;
  for (int64_t i = 0; i < tensor->dim - 1; i++) BSH_TRY(bsh_checked_product(call->op, *rows, tensor->sizes[i], rows));
  return BSH_OK;
}

/* ---- codes ---- */

bsh_status bsh_op_quantize_int8(bsh_call *const call) {
  bsh_quantize_int8_args args = {0};
  bsh_tensor x, codes, absmax, outliers;
  BSH_TRY(bsh_call_tensor(call, 0, &x));
  BSH_TRY(bsh_compute_dtype(call->op, "x", x.dtype, &args.dtype));
  BSH_TRY(bsh_int8_threshold(call->op, bsh_call_float(call, 1), args.dtype, &args.threshold));
  BSH_TRY(read_rows(call, &x, "x", &args.M, &args.K));
  args.ldx = args.K;
  const int64_t marks = args.threshold > 0.0f ? args.K : 0;
  BSH_TRY(bsh_new_activation(call, &x, args.K, bsh_torch.dtype_int8, &codes));
  BSH_TRY(bsh_call_output(call, &x, 1, &args.M, bsh_torch.dtype_float32, &absmax));
  BSH_TRY(bsh_call_output(call, &x, 1, &marks, bsh_torch.dtype_uint8, &outliers));
  if (x.numel == 0) {
    BSH_TRY(zero(call, &absmax));
    return zero(call, &outliers);
  }
  args.x = x.data;
  args.codes = codes.data;
  args.absmax = absmax.data;
  args.outliers = marks > 0 ? outliers.data : NULL;
  BSH_COMPUTE(quantize_int8, &x, args.M, args.K, 0, &args);
}

bsh_status bsh_op_dequantize_int8(bsh_call *const call) {
  const int64_t sizes[2] = {bsh_call_int(call, 2), bsh_call_int(call, 3)};
  const int32_t torch_dtype = bsh_call_dtype(call, 4);
  bsh_dequantize_int8_args args = {.N = sizes[0], .K = sizes[1]};
  bsh_tensor packed, y;
  BSH_TRY(bsh_compute_dtype(call->op, "dtype", torch_dtype, &args.dtype));
  BSH_TRY(read_weight(call, 0, args.N, args.K, &packed, &args.codes, &args.absmax));
  BSH_TRY(bsh_call_output(call, &packed, 2, sizes, torch_dtype, &y));
  if (y.numel == 0) return BSH_OK;
  args.y = y.data;
  BSH_COMPUTE(dequantize_int8, &packed, args.N, args.K, 0, &args);
}

/* ---- products of codes ---- */

/* Tensor argument `index`: int8 rows. */
static bsh_status read_codes(bsh_call *const call, const int index, const char *const argument,
                             bsh_tensor *const tensor, int64_t *const rows, int64_t *const columns) {
  BSH_TRY(bsh_call_tensor(call, index, tensor));
  if (tensor->dtype == bsh_torch.dtype_int8) return read_rows(call, tensor, argument, rows, columns);
  return bsh_fail(BSH_BAD_DTYPE, "%s: %s has ScalarType %" PRId32 ", expected %" PRId32, call->op, argument,
                  tensor->dtype, bsh_torch.dtype_int8);
}

bsh_status bsh_op_product_int8(bsh_call *const call) {
  bsh_product_int8_args args = {0};
  bsh_tensor a, b, sums;
  int64_t a_columns = 0;
  BSH_TRY(read_codes(call, 0, "a", &a, &args.M, &a_columns));
  BSH_TRY(read_codes(call, 1, "b", &b, &args.N, &args.K));
  if (b.dim != 2) return bsh_fail(BSH_BAD_SHAPE, "%s: b has %" PRId64 " dimensions, expected 2", call->op, b.dim);
  if (a_columns != args.K)
    return bsh_fail(BSH_BAD_SHAPE, "%s: last dimension of a is %" PRId64 ", b has %" PRId64 " columns", call->op,
                    a_columns, args.K);
  BSH_TRY(check_columns(call, args.K));
  BSH_TRY(bsh_same_device(call, &a, "a", &b, "b"));
  BSH_TRY(bsh_new_activation(call, &a, args.N, bsh_torch.dtype_int32, &sums));
  if (sums.numel == 0 || args.K == 0) return zero(call, &sums);
  args.a = a.data;
  args.b = b.data;
  args.sums = sums.data;
  BSH_COMPUTE(product_int8, &a, args.M, args.N, args.K, &args);
}

bsh_status bsh_op_scale_product_int8(bsh_call *const call) {
  const int32_t f32 = bsh_torch.dtype_float32, torch_dtype = bsh_call_dtype(call, 4);
  bsh_scale_product_int8_args args = {0};
  bsh_tensor sums, bias, y;
  BSH_TRY(bsh_compute_dtype(call->op, "dtype", torch_dtype, &args.dtype));
  BSH_TRY(bsh_call_tensor(call, 0, &sums));
  BSH_TRY(bsh_data_of(call, &sums, "sums", bsh_torch.dtype_int32, sums.numel, &sums, (void **)(uintptr_t)&args.sums));
  BSH_TRY(read_rows(call, &sums, "sums", &args.M, &args.N));
  BSH_TRY(bsh_vector_argument(call, 1, "row_absmax", f32, args.M, &sums, (void **)(uintptr_t)&args.row_absmax));
  BSH_TRY(bsh_vector_argument(call, 2, "col_absmax", f32, args.N, &sums, (void **)(uintptr_t)&args.col_absmax));
  BSH_TRY(bsh_call_tensor(call, 3, &bias));
  if (bias.numel != 0) BSH_TRY(bsh_data_of(call, &bias, "bias", torch_dtype, args.N, &sums, (void **)&args.bias));
  BSH_TRY(bsh_new_activation(call, &sums, args.N, torch_dtype, &y));
  if (y.numel == 0) return BSH_OK;
  args.y = y.data;
  BSH_COMPUTE(scale_product_int8, &sums, args.M, args.N, 0, &args);
}

/* ---- layers ---- */

/* The weight [N, K] of a layer at stack[1], as a product has it. */
static bsh_status read_operand(bsh_call *const call, bsh_product *const product) {
  bsh_product_args *const args = &product->args;
  const int8_t *codes = NULL;
  BSH_TRY(read_weight(call, 1, args->N, args->K, &product->packed, &codes, &args->weight.scales.absmax));
  args->weight.packed = (const uint8_t *)codes;
  args->weight.n = args->N * args->K;
  args->weight.format = BSH_INT8;
  return BSH_OK;
}

bsh_status bsh_op_linear_int8(bsh_call *const call) {
  const int64_t N = bsh_call_int(call, 5), K = bsh_call_int(call, 6);
  bsh_product product = {.args = {.N = N, .K = K, .ldx = K, .ldy = N, .direction = BSH_FORWARD}};
  BSH_TRY(read_operand(call, &product));
  BSH_TRY(check_columns(call, K));
  BSH_TRY(bsh_call_tensor(call, 3, &product.bias));
  BSH_TRY(bsh_read_input(call, "x", &product));
  BSH_TRY(bsh_int8_threshold(call->op, bsh_call_float(call, 4), product.args.dtype, &product.args.threshold));
  return bsh_multiply(call, &product);
}

bsh_status bsh_op_linear_int8_dgrad(bsh_call *const call) {
  const int64_t N = bsh_call_int(call, 3), K = bsh_call_int(call, 4);
  bsh_product product = {.args = {.N = N, .K = K, .ldx = N, .ldy = K, .direction = BSH_INPUT_GRADIENT}};
  BSH_TRY(read_operand(call, &product));
  BSH_TRY(bsh_read_input(call, "dy", &product));
  return bsh_multiply(call, &product);
}
