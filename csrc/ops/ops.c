/* ops/ops.c - every torch op of bitshard: unpack the stack, check what would corrupt memory, allocate, compute.
 *
 * An op is a function `bsh_status bsh_op_name(bsh_call *)` and one line of BSH_OPS; the boxed kernel around it owns the
 * only exit, bsh_call_finish. "None" is an empty tensor; formats are bsh_format numbers. Python has checked what a user
 * gets wrong (functional.py); what is refused here would read or write out of bounds. */
#include "ops/ops.h"

#include <inttypes.h>

#include "core/arithmetic.h"
#include "core/linear_4bit_int8.h"
#include "core/packed.h"
#include "cpu/cpu.h"
#include "gpu/int8.h"
#include "gpu/ops.h"
#include "ops/arguments.h"
#include "ops/product.h"

#define WEIGHT_ARGUMENTS "Tensor packed, Tensor absmax, Tensor absmax_map, Tensor absmax2, Tensor offset"
#define STEP_ARGUMENTS                                                                                                 \
  "int algorithm, float lr, float beta1, float beta2, float beta3, float alpha, float eps, float weight_decay, int "   \
  "step"

/* X(name, tensors among the arguments, schema without the name) */
#define BSH_OPS(X)                                                                                                     \
  X(quantize_4bit, 1, "(Tensor x, int blocksize, int format, ScalarType storage) -> (Tensor, Tensor)")                 \
  X(dequantize_4bit, 5,                                                                                                \
    "(" WEIGHT_ARGUMENTS ", int blocksize, int format, int rows, int columns, ScalarType dtype) -> Tensor")            \
  X(quantize_blockwise, 3, "(Tensor x, Tensor map, Tensor offset, int blocksize) -> (Tensor, Tensor)")                 \
  X(dequantize_blockwise, 4,                                                                                           \
    "(Tensor code, Tensor absmax, Tensor map, Tensor offset, int blocksize, ScalarType dtype) -> Tensor")              \
  X(linear_4bit, 7,                                                                                                    \
    "(Tensor x, " WEIGHT_ARGUMENTS ", Tensor bias, int blocksize, int format, int N, int K) -> Tensor")                \
  X(linear_4bit_int8, 7,                                                                                               \
    "(Tensor x, " WEIGHT_ARGUMENTS ", Tensor bias, int blocksize, int format, int N, int K) -> Tensor")                \
  X(linear_4bit_dgrad, 6, "(Tensor dy, " WEIGHT_ARGUMENTS ", int blocksize, int format, int N, int K) -> Tensor")      \
  X(search_4bit, 3, "(Tensor x, Tensor weights, Tensor scales, int blocksize, int format) -> Tensor")                  \
  X(round_4bit, 3, "(Tensor w, Tensor u, Tensor scales, int format) -> (Tensor, Tensor)")                              \
  X(merge_4bit, 9,                                                                                                     \
    "(" WEIGHT_ARGUMENTS ", Tensor a, Tensor b, Tensor scales, Tensor map, int blocksize, int format, int N, int K) "  \
    "-> (Tensor, Tensor, Tensor, Tensor)")                                                                             \
  X(merge_e2m1, 8,                                                                                                     \
    "(" WEIGHT_ARGUMENTS ", Tensor a, Tensor b, Tensor scales, int blocksize, int format, int N, int K) -> "           \
    "(Tensor, Tensor, Tensor)")                                                                                        \
  X(merged_values, 8,                                                                                                  \
    "(" WEIGHT_ARGUMENTS                                                                                               \
    ", Tensor a, Tensor b, Tensor scales, int blocksize, int format, int N, int K, int row0, int rows) -> Tensor")     \
  X(quantize_int8, 1, "(Tensor x, float threshold) -> (Tensor, Tensor, Tensor)")                                       \
  X(dequantize_int8, 2, "(Tensor packed, Tensor absmax, int N, int K, ScalarType dtype) -> Tensor")                    \
  X(product_int8, 2, "(Tensor a, Tensor b) -> Tensor")                                                                 \
  X(scale_product_int8, 4,                                                                                             \
    "(Tensor sums, Tensor row_absmax, Tensor col_absmax, Tensor bias, ScalarType dtype) -> Tensor")                    \
  X(linear_int8, 4, "(Tensor x, Tensor packed, Tensor absmax, Tensor bias, float threshold, int N, int K) -> Tensor")  \
  X(linear_int8_dgrad, 3, "(Tensor dy, Tensor packed, Tensor absmax, int N, int K) -> Tensor")                         \
  X(sort_by_expert, 1, "(Tensor chosen, int E, bool elsewhere) -> (Tensor, Tensor, Tensor, Tensor)")                   \
  X(sum_by_token, 3, "(Tensor y, Tensor back, Tensor counts) -> Tensor")                                               \
  X(checksum, 1, "(Tensor packed) -> Tensor")                                                                          \
  X(optimizer_32bit, 5,                                                                                                \
    "(Tensor g, Tensor(a!) p, Tensor(b!) state1, Tensor(c!) state2, Tensor(d!) unorm, " STEP_ARGUMENTS                 \
    ", float max_unorm, float param_norm, float gnorm_scale, bool skip_zeros) -> ()")                                  \
  X(optimizer_8bit_blockwise, 8,                                                                                       \
    "(Tensor g, Tensor(a!) p, Tensor(b!) state1, Tensor(c!) state2, Tensor qmap1, Tensor qmap2, Tensor(d!) absmax1, "  \
    "Tensor(e!) absmax2, " STEP_ARGUMENTS ", float gnorm_scale, bool skip_zeros, int blocksize) -> ()")

/* In C for the CPU, for CUDA in Python: values to MXFP4 and NVFP4 (python/bitshard/functions/microscaled.py), and
 * products of a stack of weights (python/bitshard/functions/grouped.py), by panels or by the op behind them. */
#define BSH_CPU_OPS(X)                                                                                                 \
  X(quantize_e2m1, 2, "(Tensor x, Tensor whole) -> (Tensor, Tensor)")                                                  \
  X(grouped_linear_4bit, 8,                                                                                            \
    "(Tensor x, Tensor offs, " WEIGHT_ARGUMENTS ", Tensor bias, int blocksize, int format, int N, int K) -> Tensor")   \
  X(grouped_linear_4bit_dgrad, 7,                                                                                      \
    "(Tensor dy, Tensor offs, " WEIGHT_ARGUMENTS ", int blocksize, int format, int N, int K) -> Tensor")
#define BSH_CUDA_OPS(X)                                                                                                \
  X(grouped_linear_4bit_fused, 8,                                                                                      \
    "(Tensor x, Tensor offs, " WEIGHT_ARGUMENTS ", Tensor bias, int blocksize, int format, int N, int K) -> Tensor")   \
  X(grouped_linear_4bit_dgrad_fused, 7,                                                                                \
    "(Tensor dy, Tensor offs, " WEIGHT_ARGUMENTS ", int blocksize, int format, int N, int K) -> Tensor")

/* A float32 of `like`'s device, or NULL of an empty tensor. */
static bsh_status optional_number(bsh_call *const call, const int index, const char *const argument,
                                  const bsh_tensor *const like, const float **const number) {
  bsh_tensor tensor;
  BSH_TRY(bsh_call_tensor(call, index, &tensor));
  *number = NULL;
  if (tensor.numel == 0) return BSH_OK;
  return bsh_data_of(call, &tensor, argument, bsh_torch.dtype_float32, 1, like, (void **)(uintptr_t)number);
}

/* The four scale tensors that follow `packed` at stack[first + 1 ..]: n_blocks scales of `experts` weights, each of
 * which has a second level of its own. */
static bsh_status read_scales(bsh_call *const call, const int first, const bsh_tensor *const packed,
                              const int64_t n_blocks, const int64_t experts, bsh_scales *const scales) {
  const int32_t f32 = bsh_torch.dtype_float32;
  bsh_tensor absmax;
  BSH_TRY(bsh_call_tensor(call, first + 1, &absmax));
  if (absmax.dtype == f32) return bsh_data_of(call, &absmax, "absmax", f32, n_blocks, packed, (void **)&scales->absmax);
  BSH_TRY(bsh_data_of(call, &absmax, "absmax", bsh_torch.dtype_uint8, n_blocks, packed, (void **)&scales->absmax_code));
  BSH_TRY(bsh_vector_argument(call, first + 2, "absmax_map", f32, 256, packed, (void **)&scales->absmax_map));
  const int64_t n_scales2 = experts * bsh_block_count(n_blocks / experts, BSH_NESTED_BLOCKSIZE);
  BSH_TRY(bsh_vector_argument(call, first + 3, "absmax2", f32, n_scales2, packed, (void **)&scales->absmax2));
  return bsh_vector_argument(call, first + 4, "offset", f32, experts, packed, (void **)&scales->offset);
}

static bsh_status check_format(const char *const op, const int64_t format) {
  if (format >= 0 && format < BSH_4BIT_FORMATS) return BSH_OK;
  return bsh_fail(BSH_BAD_VALUE, "%s: format %" PRId64 " is none of NF4 (%d), FP4 (%d) and E2M1 (%d)", op, format,
                  BSH_NF4, BSH_FP4, BSH_E2M1);
}

/* E2M1's scales are no maxima of blocks: they are chosen before its codes. */
static bsh_status check_absmax_format(const char *const op, const int64_t format) {
  if (format == BSH_NF4 || format == BSH_FP4) return BSH_OK;
  return bsh_fail(BSH_BAD_VALUE, "%s: format %" PRId64 " is neither NF4 (%d) nor FP4 (%d)", op, format, BSH_NF4,
                  BSH_FP4);
}

/* `experts` packed weights of rows * columns elements in all: five tensors from stack[first], blocksize and format from
 * stack[ints]. */
static bsh_status read_weights(bsh_call *const call, const int first, const int ints, const int64_t experts,
                               const int64_t rows, const int64_t columns, bsh_tensor *const packed,
                               bsh_weight *const weight) {
  const int64_t blocksize = bsh_call_int(call, ints), format = bsh_call_int(call, ints + 1);
  int64_t n = 0;
  BSH_TRY(bsh_check_blocksize_weight(call->op, blocksize));
  BSH_TRY(check_format(call->op, format));
  BSH_TRY(bsh_checked_product(call->op, rows, columns, &n));
  BSH_TRY(bsh_call_tensor(call, first, packed));
  if (packed->itemsize == 0)
    return bsh_fail(BSH_BAD_DTYPE, "%s: packed has ScalarType %" PRId32 ", which is no quant_storage", call->op,
                    packed->dtype);
  BSH_TRY(bsh_check_packed_bytes(call->op, packed->numel * packed->itemsize, packed->itemsize, n));
  *weight = (bsh_weight){.packed = packed->data, .n = n, .blocksize = blocksize, .format = (bsh_format)format};
  return read_scales(call, first, packed, bsh_block_count(n, blocksize), experts, &weight->scales);
}

static bsh_status read_weight(bsh_call *const call, const int first, const int ints, const int64_t rows,
                              const int64_t columns, bsh_tensor *const packed, bsh_weight *const weight) {
  return read_weights(call, first, ints, 1, rows, columns, packed, weight);
}

/* ---- 4-bit blocks ---- */

static bsh_status bsh_op_quantize_4bit(bsh_call *const call) {
  const int64_t blocksize = bsh_call_int(call, 1), format = bsh_call_int(call, 2);
  const int32_t storage = bsh_call_dtype(call, 3);
  const int64_t itemsize = bsh_itemsize(storage);
  bsh_tensor x, packed, absmax;
  bsh_dtype dtype;
  BSH_TRY(bsh_check_blocksize(call->op, blocksize, BSH_MAX_BLOCKSIZE));
  BSH_TRY(check_absmax_format(call->op, format));
  if (itemsize == 0)
    return bsh_fail(BSH_BAD_DTYPE, "%s: ScalarType %" PRId32 " is no quant_storage", call->op, storage);
  BSH_TRY(bsh_call_tensor(call, 0, &x));
  BSH_TRY(bsh_compute_dtype(call->op, "x", x.dtype, &dtype));
  const int64_t packed_sizes[2] = {bsh_storage_elements(x.numel, itemsize), 1};
  const int64_t n_blocks = bsh_block_count(x.numel, blocksize);
  BSH_TRY(bsh_call_output(call, &x, 2, packed_sizes, storage, &packed));
  BSH_TRY(bsh_call_output(call, &x, 1, &n_blocks, bsh_torch.dtype_float32, &absmax));
  if (packed_sizes[0] * itemsize != bsh_packed_bytes(x.numel) && bsh_torch.aoti_torch_zero_(packed.handle))
    return bsh_fail(BSH_TORCH_ERROR, "%s: could not zero the padding", call->op);
  if (x.numel == 0) return BSH_OK;
  const bsh_quantize_4bit_args args = {.x = x.data,
                                       .packed = packed.data,
                                       .absmax = absmax.data,
                                       .n = x.numel,
                                       .blocksize = blocksize,
                                       .dtype = dtype,
                                       .format = (bsh_format)format};
  BSH_COMPUTE(quantize_4bit, &x, x.numel, 0, 0, &args);
}

/* Packed codes and scales of MXFP4; with a global scale, of NVFP4. */
static bsh_status bsh_op_quantize_e2m1(bsh_call *const call) {
  bsh_quantize_e2m1_args args = {0};
  bsh_tensor x, packed, scales;
  BSH_TRY(bsh_call_tensor(call, 0, &x));
  BSH_TRY(bsh_compute_dtype(call->op, "x", x.dtype, &args.dtype));
  BSH_TRY(optional_number(call, 1, "whole", &x, &args.whole));
  const int64_t n_bytes = bsh_packed_bytes(x.numel), n_blocks = bsh_block_count(x.numel, args.whole ? 16 : 32);
  BSH_TRY(bsh_call_output(call, &x, 1, &n_bytes, bsh_torch.dtype_uint8, &packed));
  BSH_TRY(bsh_call_output(call, &x, 1, &n_blocks, bsh_torch.dtype_uint8, &scales));
  args.x = x.data;
  args.packed = packed.data;
  args.scales = scales.data;
  args.n = x.numel;
  bsh_call_compute(call);
  return x.numel == 0 ? BSH_OK : bsh_cpu_quantize_e2m1(&args);
}

bsh_status bsh_op_dequantize_4bit(bsh_call *const call) {
  const int64_t sizes[2] = {bsh_call_int(call, 7), bsh_call_int(call, 8)};
  const int32_t torch_dtype = bsh_call_dtype(call, 9);
  bsh_tensor packed, out;
  bsh_dequantize_4bit_args args = {.columns = sizes[1], .n_rows = sizes[0], .n_columns = sizes[1], .ld = sizes[1]};
  BSH_TRY(bsh_compute_dtype(call->op, "dtype", torch_dtype, &args.dtype));
  BSH_TRY(read_weight(call, 0, 5, sizes[0], sizes[1], &packed, &args.weight));
  BSH_TRY(bsh_call_output(call, &packed, 2, sizes, torch_dtype, &out));
  if (out.numel == 0) return BSH_OK;
  args.out = out.data;
  BSH_COMPUTE(dequantize_4bit, &packed, sizes[0], sizes[1], 0, &args);
}

/* ---- 8-bit blocks ---- */

static bsh_status bsh_op_quantize_blockwise(bsh_call *const call) {
  bsh_quantize_blockwise_args args = {.blocksize = bsh_call_int(call, 3)};
  bsh_tensor x, code, absmax;
  BSH_TRY(bsh_check_blocksize(call->op, args.blocksize, BSH_MAX_BLOCKSIZE_8BIT));
  BSH_TRY(bsh_call_tensor(call, 0, &x));
  BSH_TRY(bsh_compute_dtype(call->op, "x", x.dtype, &args.dtype));
  BSH_TRY(bsh_vector_argument(call, 1, "map", bsh_torch.dtype_float32, 256, &x, (void **)&args.map));
  BSH_TRY(optional_number(call, 2, "offset", &x, &args.offset));
  const int64_t n_blocks = bsh_block_count(x.numel, args.blocksize);
  BSH_TRY(bsh_call_output(call, &x, x.dim, x.sizes, bsh_torch.dtype_uint8, &code));
  BSH_TRY(bsh_call_output(call, &x, 1, &n_blocks, bsh_torch.dtype_float32, &absmax));
  if (x.numel == 0) return BSH_OK;
  args.x = x.data;
  args.code = code.data;
  args.absmax = absmax.data;
  args.n = x.numel;
  BSH_COMPUTE(quantize_blockwise, &x, x.numel, 0, 0, &args);
}

static bsh_status bsh_op_dequantize_blockwise(bsh_call *const call) {
  const int32_t f32 = bsh_torch.dtype_float32, torch_dtype = bsh_call_dtype(call, 5);
  bsh_dequantize_blockwise_args args = {.blocksize = bsh_call_int(call, 4)};
  bsh_tensor code, out;
  BSH_TRY(bsh_check_blocksize(call->op, args.blocksize, BSH_MAX_BLOCKSIZE_8BIT));
  BSH_TRY(bsh_compute_dtype(call->op, "dtype", torch_dtype, &args.dtype));
  BSH_TRY(bsh_call_tensor(call, 0, &code));
  BSH_TRY(bsh_data_of(call, &code, "code", bsh_torch.dtype_uint8, code.numel, &code, (void **)&args.code));
  BSH_TRY(bsh_vector_argument(call, 1, "absmax", f32, bsh_block_count(code.numel, args.blocksize), &code,
                              (void **)&args.absmax));
  BSH_TRY(bsh_vector_argument(call, 2, "map", f32, 256, &code, (void **)&args.map));
  BSH_TRY(optional_number(call, 3, "offset", &code, &args.offset));
  BSH_TRY(bsh_call_output(call, &code, code.dim, code.sizes, torch_dtype, &out));
  if (code.numel == 0) return BSH_OK;
  args.out = out.data;
  args.n = code.numel;
  BSH_COMPUTE(dequantize_blockwise, &code, code.numel, 0, 0, &args);
}

/* ---- linear ---- */

bsh_status bsh_op_linear_4bit(bsh_call *const call) {
  const int64_t N = bsh_call_int(call, 9), K = bsh_call_int(call, 10);
  bsh_product product = {.args = {.N = N, .K = K, .ldx = K, .ldy = N, .direction = BSH_FORWARD}};
  BSH_TRY(read_weight(call, 1, 7, N, K, &product.packed, &product.args.weight));
  BSH_TRY(bsh_call_tensor(call, 6, &product.bias));
  BSH_TRY(bsh_read_input(call, "x", &product));
  return bsh_multiply(call, &product);
}

/* Groups of columns that have one scale of W each. */
static bsh_status check_groups(const bsh_call *const call, const bsh_product_args *const args) {
  const bsh_weight *const weight = &args->weight;
  BSH_TRY(check_absmax_format(call->op, weight->format));
  if (args->K > 0 && args->K % BSH_GROUP_INT8 == 0 && weight->blocksize % BSH_GROUP_INT8 == 0) return BSH_OK;
  return bsh_fail(BSH_BAD_SHAPE, "%s: %" PRId64 " columns in blocks of %" PRId64 ", expected multiples of %d", call->op,
                  args->K, weight->blocksize, BSH_GROUP_INT8);
}

static bsh_status bsh_op_linear_4bit_int8(bsh_call *const call) {
  const int64_t N = bsh_call_int(call, 9), K = bsh_call_int(call, 10);
  bsh_product product = {.args = {.N = N, .K = K, .ldx = K, .ldy = N, .direction = BSH_FORWARD}};
  BSH_TRY(read_weight(call, 1, 7, N, K, &product.packed, &product.args.weight));
  BSH_TRY(check_groups(call, &product.args));
  BSH_TRY(bsh_call_tensor(call, 6, &product.bias));
  BSH_TRY(bsh_read_input(call, "x", &product));
  bsh_tensor y;
  BSH_TRY(bsh_new_activation(call, &product.x, N, product.x.dtype, &y));
  if (y.numel == 0) return BSH_OK;
  product.args.y = y.data;
  BSH_COMPUTE(linear_4bit_int8, &product.x, product.args.M, N, K, &product.args);
}

bsh_status bsh_op_linear_4bit_dgrad(bsh_call *const call) {
  const int64_t N = bsh_call_int(call, 8), K = bsh_call_int(call, 9);
  bsh_product product = {.args = {.N = N, .K = K, .ldx = N, .ldy = K, .direction = BSH_INPUT_GRADIENT}};
  BSH_TRY(read_weight(call, 1, 6, N, K, &product.packed, &product.args.weight));
  BSH_TRY(bsh_read_input(call, "dy", &product));
  return bsh_multiply(call, &product);
}

/* ---- a stack of weights ---- */

/* The ends of the experts' rows at stack[1], int32 [E], and a stack of E weights [N, K], each of whole blocks. */
static bsh_status read_stack(bsh_call *const call, const int ints, bsh_product *const product) {
  bsh_product_args *const args = &product->args;
  const int64_t N = args->N, K = args->K, blocksize = bsh_call_int(call, ints);
  int64_t n = 0, rows = 0;
  bsh_tensor offs;
  BSH_TRY(bsh_call_tensor(call, 1, &offs));
  args->E = offs.numel;
  BSH_TRY(bsh_check_blocksize_weight(call->op, blocksize));
  BSH_TRY(bsh_checked_product(call->op, N, K, &n));
  BSH_TRY(bsh_checked_product(call->op, args->E, N, &rows));
  if (args->E == 0 || n % blocksize != 0)
    return bsh_fail(BSH_BAD_SHAPE,
                    "%s: %" PRId64 " experts of [%" PRId64 ", %" PRId64
                    "]: there must be some, and each of whole blocks of %" PRId64,
                    call->op, args->E, N, K, blocksize);
  BSH_TRY(read_weights(call, 2, ints, args->E, rows, K, &product->packed, &args->weight));
  return bsh_data_of(call, &offs, "offs", bsh_torch.dtype_int32, args->E, &product->packed,
                     (void **)(uintptr_t)&args->offs);
}

static bsh_status bsh_op_grouped_linear_4bit(bsh_call *const call) {
  const int64_t N = bsh_call_int(call, 10), K = bsh_call_int(call, 11);
  bsh_product product = {.args = {.N = N, .K = K, .ldx = K, .ldy = N, .direction = BSH_FORWARD}};
  BSH_TRY(read_stack(call, 8, &product));
  BSH_TRY(bsh_call_tensor(call, 7, &product.bias));
  BSH_TRY(bsh_read_input(call, "x", &product));
  return bsh_multiply(call, &product);
}

static bsh_status bsh_op_grouped_linear_4bit_dgrad(bsh_call *const call) {
  const int64_t N = bsh_call_int(call, 9), K = bsh_call_int(call, 10);
  bsh_product product = {.args = {.N = N, .K = K, .ldx = N, .ldy = K, .direction = BSH_INPUT_GRADIENT}};
  BSH_TRY(read_stack(call, 7, &product));
  BSH_TRY(bsh_read_input(call, "dy", &product));
  return bsh_multiply(call, &product);
}

static bsh_status bsh_op_grouped_linear_4bit_fused(bsh_call *const call) { return bsh_op_grouped_linear_4bit(call); }
static bsh_status bsh_op_grouped_linear_4bit_dgrad_fused(bsh_call *const call) {
  return bsh_op_grouped_linear_4bit_dgrad(call);
}

/* order, back, row [S] and offs [E] of chosen [..., k]. */
static bsh_status bsh_op_sort_by_expert(bsh_call *const call) {
  const int64_t E = bsh_call_int(call, 1);
  bsh_tensor chosen, pairs[3], offs;
  if (E < 1 || E > INT32_MAX) return bsh_fail(BSH_BAD_VALUE, "%s: %" PRId64 " experts", call->op, E);
  BSH_TRY(bsh_call_tensor(call, 0, &chosen));
  bsh_sort_by_expert_args args = {.S = chosen.numel, .E = (int32_t)E, .elsewhere = bsh_call_bool(call, 2)};
  BSH_TRY(
      bsh_data_of(call, &chosen, "chosen", bsh_torch.dtype_int64, args.S, &chosen, (void **)(uintptr_t)&args.chosen));
  if (chosen.dim < 1 || args.S > INT32_MAX)
    return bsh_fail(BSH_BAD_SHAPE, "%s: chosen has %" PRId64 " dimensions and %" PRId64 " elements", call->op,
                    chosen.dim, args.S);
  args.k = chosen.sizes[chosen.dim - 1];
  for (int i = 0; i < 3; i++) BSH_TRY(bsh_call_output(call, &chosen, 1, &args.S, bsh_torch.dtype_int64, &pairs[i]));
  BSH_TRY(bsh_call_output(call, &chosen, 1, &E, bsh_torch.dtype_int32, &offs));
  args.order = pairs[0].data, args.back = pairs[1].data, args.row = pairs[2].data, args.offs = offs.data;
  BSH_COMPUTE(sort_by_expert, &chosen, args.S, args.E, 0, &args);
}

/* y [T k, H], back [T k], counts [T, k] -> [T, H]. */
static bsh_status bsh_op_sum_by_token(bsh_call *const call) {
  bsh_tensor y, counts, out;
  BSH_TRY(bsh_call_tensor(call, 0, &y));
  BSH_TRY(bsh_call_tensor(call, 2, &counts));
  if (y.dim != 2 || counts.dim != 2 || y.sizes[0] != counts.numel)
    return bsh_fail(BSH_BAD_SHAPE,
                    "%s: y has %" PRId64 " dimensions and %" PRId64 " rows, counts %" PRId64 " dimensions and %" PRId64
                    " elements",
                    call->op, y.dim, y.dim > 0 ? y.sizes[0] : 0, counts.dim, counts.numel);
  const int64_t sizes[2] = {counts.sizes[0], y.sizes[1]};
  bsh_sum_by_token_args args = {.y = y.data, .counts = counts.data, .T = sizes[0], .k = counts.sizes[1], .H = sizes[1]};
  BSH_TRY(bsh_compute_dtype(call->op, "y", y.dtype, &args.dtype));
  BSH_TRY(bsh_compute_dtype(call->op, "counts", counts.dtype, &args.counts_dtype));
  BSH_TRY(bsh_same_device(call, &counts, "counts", &y, "y"));
  BSH_TRY(
      bsh_vector_argument(call, 1, "back", bsh_torch.dtype_int64, counts.numel, &y, (void **)(uintptr_t)&args.back));
  BSH_TRY(bsh_call_output(call, &y, 2, sizes, y.dtype, &out));
  if (out.numel == 0) return BSH_OK;
  if (args.k == 0) return bsh_empty_sums(call, &out, NULL);
  args.out = out.data;
  BSH_COMPUTE(sum_by_token, &y, args.T, args.k, args.H, &args);
}

/* ---- calibration ---- */

/* Tensor argument `index`, float32 of two dimensions, on the device of `like`. */
static bsh_status matrix(bsh_call *const call, const int index, const char *const argument,
                         const bsh_tensor *const like, bsh_tensor *const tensor, const float **const data) {
  BSH_TRY(bsh_call_tensor(call, index, tensor));
  if (tensor->dim != 2)
    return bsh_fail(BSH_BAD_SHAPE, "%s: %s has %" PRId64 " dimensions, expected 2", call->op, argument, tensor->dim);
  return bsh_data_of(call, tensor, argument, bsh_torch.dtype_float32, tensor->numel, like, (void **)(uintptr_t)data);
}

/* Tensor argument `index` with these two sizes. */
static bsh_status matrix_of(bsh_call *const call, const int index, const char *const argument, const int64_t rows,
                            const int64_t columns, const bsh_tensor *const like, const float **const data) {
  bsh_tensor tensor;
  BSH_TRY(matrix(call, index, argument, like, &tensor, data));
  if (tensor.sizes[0] == rows && tensor.sizes[1] == columns) return BSH_OK;
  return bsh_fail(BSH_BAD_SHAPE, "%s: %s is [%" PRId64 ", %" PRId64 "], expected [%" PRId64 ", %" PRId64 "]", call->op,
                  argument, tensor.sizes[0], tensor.sizes[1], rows, columns);
}

static bsh_status bsh_op_search_4bit(bsh_call *const call) {
  const int64_t format = bsh_call_int(call, 4);
  bsh_search_4bit_args args = {.blocksize = bsh_call_int(call, 3), .format = (bsh_format)format};
  bsh_tensor x, weights, scales, choice;
  BSH_TRY(bsh_check_blocksize_weight(call->op, args.blocksize));
  BSH_TRY(check_format(call->op, format));
  BSH_TRY(bsh_call_tensor(call, 0, &x));
  BSH_TRY(bsh_data_of(call, &x, "x", bsh_torch.dtype_float32, x.numel, &x, (void **)(uintptr_t)&args.x));
  BSH_TRY(bsh_call_tensor(call, 1, &weights));
  args.n = x.numel;
  args.period = weights.numel;
  if (args.period == 0) return bsh_fail(BSH_BAD_SHAPE, "%s: weights is empty", call->op);
  BSH_TRY(bsh_vector_argument(call, 1, "weights", bsh_torch.dtype_float32, args.period, &x,
                              (void **)(uintptr_t)&args.weights));
  const int64_t n_blocks = bsh_block_count(args.n, args.blocksize);
  BSH_TRY(matrix(call, 2, "scales", &x, &scales, &args.scales));
  args.G = scales.sizes[1];
  if (args.G < 1 || args.G > BSH_MAX_SCALES)
    return bsh_fail(BSH_BAD_SHAPE, "%s: %" PRId64 " scales a block, expected 1 to %d", call->op, args.G,
                    BSH_MAX_SCALES);
  BSH_TRY(matrix_of(call, 2, "scales", n_blocks, args.G, &x, &args.scales));
  BSH_TRY(bsh_call_output(call, &x, 1, &n_blocks, bsh_torch.dtype_uint8, &choice));
  if (n_blocks == 0) return BSH_OK;
  args.choice = choice.data;
  BSH_COMPUTE(search_4bit, &x, args.n, args.blocksize, args.G, &args);
}

static bsh_status bsh_op_round_4bit(bsh_call *const call) {
  const int64_t format = bsh_call_int(call, 3);
  bsh_round_4bit_args args = {.format = (bsh_format)format};
  bsh_tensor w, codes, errors;
  BSH_TRY(check_format(call->op, format));
  BSH_TRY(bsh_call_tensor(call, 0, &w));
  BSH_TRY(matrix(call, 0, "w", &w, &w, &args.w));
  args.N = w.sizes[0];
  args.P = w.sizes[1];
  if (args.P < 1 || args.P > BSH_ROUND_COLUMNS)
    return bsh_fail(BSH_BAD_SHAPE, "%s: w has %" PRId64 " columns, expected 1 to %d", call->op, args.P,
                    BSH_ROUND_COLUMNS);
  BSH_TRY(matrix_of(call, 1, "u", args.P, args.P, &w, &args.u));
  BSH_TRY(matrix_of(call, 2, "scales", args.N, args.P, &w, &args.scales));
  BSH_TRY(bsh_call_output(call, &w, 2, w.sizes, bsh_torch.dtype_uint8, &codes));
  BSH_TRY(bsh_call_output(call, &w, 2, w.sizes, bsh_torch.dtype_float32, &errors));
  if (args.N == 0) return BSH_OK;
  args.codes = codes.data;
  args.errors = errors.data;
  BSH_COMPUTE(round_4bit, &w, args.N, args.P, 0, &args);
}

/* ---- adapters ---- */

/* Tensor argument `index` [rows, columns] of `like`'s device and of the dtype of a. */
static bsh_status factor(bsh_call *const call, const int index, const char *const argument, const int64_t rows,
                         const int64_t columns, const bsh_tensor *const like, const int32_t dtype,
                         const void **const data) {
  bsh_tensor tensor;
  BSH_TRY(bsh_call_tensor(call, index, &tensor));
  if (tensor.dim != 2 || tensor.sizes[0] != rows || tensor.sizes[1] != columns)
    return bsh_fail(BSH_BAD_SHAPE, "%s: %s has %" PRId64 " elements, expected [%" PRId64 ", %" PRId64 "]", call->op,
                    argument, tensor.numel, rows, columns);
  return bsh_data_of(call, &tensor, argument, dtype, tensor.numel, like, (void **)(uintptr_t)data);
}

/* The weight and its adapters, arguments 0 to 7, and four integers from `first` on. */
static bsh_status read_merge(bsh_call *const call, const int first, bsh_tensor *const packed,
                             bsh_merge_4bit_args *const args) {
  bsh_tensor a, scales;
  *args = (bsh_merge_4bit_args){.N = bsh_call_int(call, first + 2), .K = bsh_call_int(call, first + 3)};
  BSH_TRY(read_weight(call, 0, first, args->N, args->K, packed, &args->weight));
  BSH_TRY(bsh_call_tensor(call, 5, &a));
  BSH_TRY(bsh_call_tensor(call, 7, &scales));
  BSH_TRY(bsh_compute_dtype(call->op, "a", a.dtype, &args->dtype));
  args->R = scales.numel;
  BSH_TRY(factor(call, 5, "a", args->R, args->K, packed, a.dtype, &args->a));
  BSH_TRY(factor(call, 6, "b", args->N, args->R, packed, a.dtype, &args->b));
  return bsh_data_of(call, &scales, "scales", bsh_torch.dtype_float32, args->R, packed,
                     (void **)(uintptr_t)&args->scales);
}

/* The first two results: packed bytes like those of the weight, zeros behind them, and a scale for each block. */
static bsh_status merge_outputs(bsh_call *const call, const bsh_tensor *const packed, bsh_merge_4bit_args *const args,
                                const int32_t scales_dtype, bsh_tensor *const scales) {
  const int64_t sizes[2] = {packed->numel, 1}, n_blocks = bsh_block_count(args->weight.n, args->weight.blocksize);
  bsh_tensor merged;
  BSH_TRY(bsh_call_output(call, packed, 2, sizes, packed->dtype, &merged));
  BSH_TRY(bsh_call_output(call, packed, 1, &n_blocks, scales_dtype, scales));
  if (packed->numel * packed->itemsize != bsh_packed_bytes(args->weight.n) && bsh_torch.aoti_torch_zero_(merged.handle))
    return bsh_fail(BSH_TORCH_ERROR, "%s: could not zero the padding", call->op);
  args->packed = merged.data;
  return BSH_OK;
}

static bsh_status merge_into(bsh_call *const call, const bsh_tensor *const packed,
                             const bsh_merge_4bit_args *const args) {
  BSH_COMPUTE(merge_4bit, packed, args->N, args->K, args->R, args);
}

/* The scales, which are found in fp32 first, nested. */
static bsh_status merge_and_nest(bsh_call *const call, const bsh_tensor *const packed, const int64_t n_blocks,
                                 bsh_merge_4bit_args *const args) {
  bsh_tensor absmax;
  BSH_TRY(bsh_tensor_new(call->op, packed, 1, &n_blocks, bsh_torch.dtype_float32, &absmax));
  args->absmax = absmax.data;
  const bsh_status status = merge_into(call, packed, args);
  bsh_torch.aoti_torch_delete_tensor_object(absmax.handle);
  return status;
}

/* Packed bytes like those of the weight, and their scales: without a map fp32, then two times [0]; with one u8 codes,
 * second-level scales and offset [1], of an empty weight [0]. */
static bsh_status bsh_op_merge_4bit(bsh_call *const call) {
  const int32_t f32 = bsh_torch.dtype_float32;
  bsh_merge_4bit_args args;
  bsh_tensor packed, map, scales, second, mean;
  BSH_TRY(read_merge(call, 9, &packed, &args));
  BSH_TRY(check_absmax_format(call->op, args.weight.format));
  BSH_TRY(bsh_call_tensor(call, 8, &map));
  const bool nests = map.numel != 0;
  if (nests) BSH_TRY(bsh_vector_argument(call, 8, "map", f32, 256, &packed, (void **)(uintptr_t)&args.map));
  BSH_TRY(merge_outputs(call, &packed, &args, nests ? bsh_torch.dtype_uint8 : f32, &scales));
  const int64_t n_second = nests ? divide_up(scales.numel, BSH_NESTED_BLOCKSIZE) : 0, n_means = n_second > 0;
  BSH_TRY(bsh_call_output(call, &packed, 1, &n_second, f32, &second));
  BSH_TRY(bsh_call_output(call, &packed, 1, &n_means, f32, &mean));
  if (args.weight.n == 0) return BSH_OK;
  args.absmax = scales.data;
  if (!nests) return merge_into(call, &packed, &args);
  args.scales8 = scales.data, args.second = second.data, args.mean = mean.data;
  return merge_and_nest(call, &packed, scales.numel, &args);
}

static bsh_status check_merge_e2m1(const bsh_call *const call, const bsh_tensor *const packed,
                                   const bsh_merge_4bit_args *const args) {
  const int64_t blocksize = args->weight.blocksize;
  if (args->weight.format != BSH_E2M1 || args->weight.scales.absmax || (blocksize != 32 && blocksize != 16))
    return bsh_fail(BSH_BAD_VALUE, "%s: format %d in blocks of %" PRId64 " is neither MXFP4 nor NVFP4", call->op,
                    args->weight.format, blocksize);
  if (bsh_on_cuda(packed) && (args->K % 64 != 0 || !aligned(packed->data, 4)))
    return bsh_fail(BSH_BAD_VALUE, "%s: K = %" PRId64 " on a GPU: 64 has to divide it, and words of 4 bytes be whole",
                    call->op, args->K);
  return BSH_OK;
}

/* Packed bytes like those of the weight, a scale for each block, and of NVFP4 its global scale for each 256 of them. */
static bsh_status bsh_op_merge_e2m1(bsh_call *const call) {
  bsh_merge_4bit_args args;
  bsh_tensor packed, scales, second;
  BSH_TRY(read_merge(call, 8, &packed, &args));
  BSH_TRY(check_merge_e2m1(call, &packed, &args));
  BSH_TRY(merge_outputs(call, &packed, &args, bsh_torch.dtype_uint8, &scales));
  const int64_t n_blocks = bsh_block_count(args.weight.n, args.weight.blocksize);
  const int64_t seconds = args.weight.blocksize == 16 ? bsh_block_count(n_blocks, BSH_NESTED_BLOCKSIZE) : 0;
  BSH_TRY(bsh_call_output(call, &packed, 1, &seconds, bsh_torch.dtype_float32, &second));
  if (args.weight.n == 0) return BSH_OK;
  args.scales8 = scales.data;
  args.second = seconds ? second.data : NULL;
  BSH_COMPUTE(merge_e2m1, &packed, args.N, args.K, args.R, &args);
}

/* Rows [row0, row0 + rows) of the sum, in fp32. */
static bsh_status bsh_op_merged_values(bsh_call *const call) {
  const int64_t row0 = bsh_call_int(call, 12), rows = bsh_call_int(call, 13);
  bsh_merge_4bit_args args;
  bsh_tensor packed, values;
  BSH_TRY(read_merge(call, 8, &packed, &args));
  if (row0 < 0 || rows < 0 || rows > args.N - row0)
    return bsh_fail(BSH_BAD_VALUE, "%s: %" PRId64 " rows from row %" PRId64 " on, the weight has %" PRId64, call->op,
                    rows, row0, args.N);
  const int64_t sizes[2] = {rows, args.K};
  BSH_TRY(bsh_call_output(call, &packed, 2, sizes, bsh_torch.dtype_float32, &values));
  if (values.numel == 0) return BSH_OK;
  BSH_COMPUTE(merged_values, &packed, rows, args.K, args.R, &args, row0 * args.K, (row0 + rows) * args.K, values.data);
}

/* ---- checksum ---- */

static bsh_status bsh_op_checksum(bsh_call *const call) {
  bsh_tensor packed, sum;
  BSH_TRY(bsh_call_tensor(call, 0, &packed));
  if (packed.itemsize == 0)
    return bsh_fail(BSH_BAD_DTYPE, "checksum: packed has ScalarType %" PRId32 ", which is no quant_storage",
                    packed.dtype);
  BSH_TRY(bsh_call_output(call, &packed, 0, NULL, bsh_torch.dtype_int64, &sum));
  const int64_t n_bytes = packed.numel * packed.itemsize;
  if (!bsh_on_cuda(&packed)) {
    *(uint64_t *)sum.data = bsh_cpu_checksum(packed.data, n_bytes);
    return BSH_OK;
  }
  bsh_cuda_context context;
  BSH_TRY(bsh_cuda_enter(&context, "checksum", packed.device_index, n_bytes, 0, 0));
  const bsh_status computed = bsh_cuda_checksum(packed.data, n_bytes, sum.data, &context);
  bsh_cuda_leave(&context);
  return computed;
}

/* ---- registration ---- */

#define BOXED(name, tensors, schema)                                                                                   \
  static void name##_boxed(StableIValue *const stack, const uint64_t n_arguments, const uint64_t n_outputs) {          \
    (void)n_arguments, (void)n_outputs;                                                                                \
    bsh_call call = {.op = #name, .caller = &bsh_dispatcher, .stack = stack, .n_tensors = tensors};                    \
    bsh_call_finish(&call, bsh_op_##name(&call));                                                                      \
  }
BSH_OPS(BOXED)
BSH_CPU_OPS(BOXED)
BSH_CUDA_OPS(BOXED)
#undef BOXED

static void torch_threads(const int64_t begin, const int64_t end, const int64_t grain, const bsh_range_function fn,
                          void *const ctx) {
  bsh_torch.torch_parallel_for(begin, end, grain, fn, ctx);
}

static AOTITorchError define_ops(const TorchLibraryHandle library) {
  AOTITorchError error = 0;
#define DEFINE(name, tensors, schema) error |= bsh_torch.aoti_torch_library_def(library, #name schema);
  BSH_OPS(DEFINE)
  BSH_CPU_OPS(DEFINE)
  BSH_CUDA_OPS(DEFINE)
#undef DEFINE
  return error;
}

static AOTITorchError implement_ops(const char *const key, const bool cpu) {
  TorchLibraryHandle library = NULL; /* stays alive for the process: deleting it deregisters the ops */
  AOTITorchError error = bsh_torch.aoti_torch_library_init_impl("bitshard", key, __FILE__, __LINE__, &library);
  if (error != 0) return error;
#define IMPLEMENT(name, tensors, schema) error |= bsh_torch.aoti_torch_library_impl(library, #name, name##_boxed);
  BSH_OPS(IMPLEMENT)
  if (cpu) {
    BSH_CPU_OPS(IMPLEMENT)
  } else {
    BSH_CUDA_OPS(IMPLEMENT)
  }
#undef IMPLEMENT
  return error;
}

const char *bsh_ops_register(void) {
  static bool registered = false;
  if (registered) return NULL;
  TorchLibraryHandle library = NULL;
  bsh_parallel_for = torch_threads;
  if (bsh_torch.aoti_torch_library_init_fragment("bitshard", __FILE__, __LINE__, &library) || define_ops(library) ||
      implement_ops("CPU", true) || (bsh_torch.has_cuda && implement_ops("CUDA", false)))
    return "torch refused the registration of the bitshard ops (its text is on stderr)";
  registered = true;
  return NULL;
}
