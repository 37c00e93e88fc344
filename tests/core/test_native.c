/* test_native.c - the exported C functions without Python, torch or a GPU: results against the CPU backend bit for bit,
 * in buffers of exactly their size, and what a mistake does.
 *
 * For the CUDA functions the driver is replaced: device memory is ours, and a launched kernel is computed by the CPU
 * backend from the arguments it was given. */
#include "check.h"

#include <math.h>

#include "core/arithmetic.h"
#include "core/packed.h"
#include "cpu/cpu.h"
#include "cuda/sizes/gemv_4bit_simt.h"
#include "cuda/sizes/int8.h"
#include "gpu/int8.h"
#include "gpu/product.h"
#include "gpu/ops.h"
#include "native/native.h"
#include "torch/abi.h"

uint64_t check_seed;
bsh_torch_api bsh_torch; /* no torch, no cuBLAS */

/* ---- the driver ---- */

static void *const some_stream = (void *)0x5712;
static void *const torch_stream = (void *)0x7057;
static const void *host_pointer; /* an address that no GPU reaches */
static const void *gpu_pointer;  /* one that the CPU does not */
static int entered, launches;

bsh_status bsh_cuda_check_pointer(const bsh_cuda_context *const context, const char *const argument,
                                  const void *const pointer) {
  if (pointer != host_pointer) return BSH_OK;
  return bsh_fail(BSH_BAD_DEVICE, "%s: %s is no address that a GPU reaches", context->op, argument);
}

bsh_status bsh_cuda_enter_raw(bsh_cuda_context *const context, const char *const op, const char *const argument,
                              const void *const out, void *const stream, const int64_t size0, const int64_t size1,
                              const int64_t size2) {
  *context =
      (bsh_cuda_context){.op = op, .sizes = {size0, size1, size2}, .sm = 90, .sms = 132, .stream = stream, .raw = true};
  BSH_TRY(bsh_cuda_check_pointer(context, argument, out));
  entered++;
  return BSH_OK;
}

void bsh_cuda_leave(bsh_cuda_context *const context) {
  (void)context;
  entered--;
}

void *bsh_cuda_torch_stream(const bsh_cuda_context *const context) {
  (void)context;
  return torch_stream;
}

bsh_status bsh_cuda_read(const bsh_cuda_context *const context, const char *const argument, const void *const data,
                         void *const copy, const int64_t n_bytes) {
  (void)context, (void)argument;
  memcpy(copy, data, (size_t)n_bytes);
  return BSH_OK;
}

bool bsh_cuda_owns(const void *const pointer) { return pointer == gpu_pointer; }

bsh_status bsh_cuda_scratch_new(const bsh_cuda_context *const context, const int64_t n_bytes,
                                bsh_cuda_scratch *const scratch) {
  (void)context;
  *scratch = (bsh_cuda_scratch){.data = buffer(n_bytes)};
  return BSH_OK;
}

void bsh_cuda_scratch_delete(bsh_cuda_scratch *const scratch) {
  free(scratch->data);
  *scratch = (bsh_cuda_scratch){0};
}

bool bsh_cuda_has_tensor_maps(void) { return true; }
bsh_status bsh_cuda_tensor_map(const bsh_cuda_context *const context, const bsh_map_of *const what,
                               bsh_tensor_map *const map) {
  (void)context, (void)what, (void)map;
  return BSH_OK;
}
bsh_status bsh_cuda_zero(const bsh_cuda_context *const context, void *const data, const int64_t n_bytes) {
  (void)context;
  memset(data, 0, (size_t)n_bytes);
  return BSH_OK;
}

bsh_status bsh_launch_panels(const bsh_product_args *const args, const bsh_plan *const plan,
                             const bsh_torch_operands *const operands, const bsh_cuda_context *const context) {
  (void)args, (void)plan, (void)operands;
  return bsh_fail(BSH_NO_KERNEL, "%s: the test has no panels", context->op);
}
int64_t bsh_cuda_workspace_bytes(void) { return 64 << 20; }

/* The kernels of blockwise.cu know one element type each; the fused ones have it in their name too. */
static bsh_status run_fused(const bsh_fused_args *const fused, const char *const name) {
  const bsh_dtype dtype = strstr(name, "bf16") != NULL ? BSH_BF16 : strstr(name, "f16") != NULL ? BSH_F16 : BSH_F32;
  const bsh_weight weight = {.packed = fused->packed,
                             .scales = {.absmax = fused->absmax,
                                        .absmax_code = fused->absmax_code,
                                        .absmax_map = fused->absmax_map,
                                        .absmax2 = fused->absmax2,
                                        .offset = fused->offset},
                             .n = (int64_t)fused->N * fused->K,
                             .blocksize = (strstr(name, "simt") != NULL ? BSH_SIMT_BLOCKSIZE : INT64_C(64))
                                          << fused->block_shift,
                             .format = (bsh_format)fused->format};
  const bsh_product_args args = {.weight = weight,
                                 .x = fused->x,
                                 .bias = fused->bias,
                                 .y = fused->y,
                                 .M = fused->M,
                                 .N = fused->N,
                                 .K = fused->K,
                                 .ldx = fused->ldx,
                                 .ldy = fused->ldy,
                                 .dtype = dtype};
  return bsh_cpu_linear_4bit(&args, NULL);
}

/* The kernels of LLM.int8, of fp16. quantize_int8 marks columns of outliers, and zeroes none of them. */
static void run_int8(const char *const name, const void *const argument) {
  if (strncmp(name, "quantize", 8) == 0) {
    bsh_quantize_int8_args row = *(const bsh_quantize_int8_args *)argument;
    const int64_t rows = row.M;
    for (row.M = 1; row.absmax < ((const bsh_quantize_int8_args *)argument)->absmax + rows; row.absmax++) {
      CHECK((row.threshold > 0) == (row.outliers != NULL), "%s: marks without a threshold, or none", name);
      bsh_cpu_quantize_int8(&row);
      row.x = (const uint16_t *)row.x + row.ldx, row.codes += row.K;
    }
  } else if (strncmp(name, "scale_product", 13) == 0) {
    bsh_cpu_scale_product_int8(argument);
  } else if (strcmp(name, "gemm_int8_i32") == 0) {
    const bsh_int8_gemm_args *const p = argument;
    bsh_cpu_product_int8(&(bsh_product_int8_args){.a = p->a, .b = p->b, .sums = p->y, .M = p->M, .N = p->N, .K = p->K});
  } else {
    CHECK(strcmp(name, "clear_int8") == 0, "%s: another kernel", name);
  }
}

bsh_status bsh_cuda_launch(const bsh_cuda_context *const context, bsh_cuda_kernel *const kernel,
                           const bsh_cuda_launch_shape *const shape, void **const arguments) {
  (void)shape;
  launches++;
  CHECK(entered == 1 && context->raw, "%s: launched outside of a call", kernel->name);
  const bool int8 = strstr(kernel->name, "int8") != NULL;
  const bool quantizing = !int8 && strncmp(kernel->name, "quantize", 8) == 0;
  CHECK(context->stream == (quantizing ? torch_stream : some_stream), "%s on another stream", kernel->name);
  if (int8) return run_int8(kernel->name, arguments[0]), BSH_OK;
  if (strncmp(kernel->name, "quantize_4bit", 13) == 0) return bsh_cpu_quantize_4bit(arguments[0]);
  if (quantizing) return bsh_cpu_quantize_blockwise(arguments[0]);
  if (strncmp(kernel->name, "dequantize_blockwise", 20) == 0) return bsh_cpu_dequantize_blockwise(arguments[0]);
  if (strncmp(kernel->name, "dequantize_4bit", 15) != 0) return run_fused(arguments[0], kernel->name);
  bsh_dequantize_4bit_args args = *(const bsh_dequantize_4bit_args *)arguments[0];
  args.columns = args.n_columns = args.ld = args.weight.n; /* from rows of one span back to one row */
  args.n_rows = 1;
  return bsh_cpu_dequantize_4bit(&args);
}

/* ---- the functions, by dtype and format ---- */

#define DECLARE(NAME, DTYPE)                                                                                           \
  void cquantize_blockwise_cpu_##NAME(const float *, const void *, float *, uint8_t *, long long, long long);          \
  void cdequantize_blockwise_cpu_##NAME(const float *, const uint8_t *, const float *, void *, long long, long long);  \
  void cdequantize_blockwise_cpu_nf4_##NAME(const uint8_t *, const float *, void *, long long, long long, long long);  \
  void cdequantize_blockwise_cpu_fp4_##NAME(const uint8_t *, const float *, void *, long long, long long, long long);  \
  void cquantize_blockwise_##NAME(const float *, const void *, float *, uint8_t *, int32_t, int32_t);                  \
  void cquantize_blockwise_##NAME##_nf4(const float *, const void *, float *, uint8_t *, int32_t, int32_t);            \
  void cquantize_blockwise_##NAME##_fp4(const float *, const void *, float *, uint8_t *, int32_t, int32_t);            \
  void cdequantize_blockwise_##NAME(const float *, const uint8_t *, const float *, void *, int32_t, int32_t, void *);  \
  void cdequantize_blockwise_##NAME##_nf4(const float *, const uint8_t *, const float *, void *, int32_t, int32_t,     \
                                          void *);                                                                     \
  void cdequantize_blockwise_##NAME##_fp4(const float *, const uint8_t *, const float *, void *, int32_t, int32_t,     \
                                          void *);                                                                     \
  void cgemm_4bit_##NAME(const void *, const uint8_t *, const float *, const uint8_t *, const float *, const float *,  \
                         void *, const void *, int32_t, int32_t, int32_t, int32_t, int32_t, void *);                   \
  void cgemm_4bit_inference_naive_##NAME(int32_t, int32_t, int32_t, const void *, const uint8_t *, const float *,      \
                                         const float *, void *, int32_t, int32_t, int32_t, int32_t, void *);
BSH_NATIVE_DTYPES(DECLARE)
void cint8_vector_quant(const void *, int8_t *, float *, float, int32_t, int32_t, void *);
void cdequant_mm_int32_fp16(const int32_t *, const float *, const float *, void *, const void *, int32_t, int32_t,
                            void *);
int cigemmlt_32(void *, int32_t, int32_t, int32_t, const int8_t *, const int8_t *, void *, const float *, int32_t,
                int32_t, int32_t, void *);
#define THREE(PREFIX, SUFFIX) {PREFIX##fp32##SUFFIX, PREFIX##fp16##SUFFIX, PREFIX##bf16##SUFFIX}
static void (*const quantize_cpu[3])(const float *, const void *, float *, uint8_t *, long long,
                                     long long) = THREE(cquantize_blockwise_cpu_, );
static void (*const dequantize_cpu[3])(const float *, const uint8_t *, const float *, void *, long long,
                                       long long) = THREE(cdequantize_blockwise_cpu_, );
static void (*const dequantize_4bit_cpu[2][3])(const uint8_t *, const float *, void *, long long, long long,
                                               long long) = {THREE(cdequantize_blockwise_cpu_nf4_, ),
                                                             THREE(cdequantize_blockwise_cpu_fp4_, )};
static void (*const quantize[3][3])(const float *, const void *, float *, uint8_t *, int32_t, int32_t) = {
    THREE(cquantize_blockwise_, _nf4), THREE(cquantize_blockwise_, _fp4), THREE(cquantize_blockwise_, )};
static void (*const dequantize[3][3])(const float *, const uint8_t *, const float *, void *, int32_t, int32_t,
                                      void *) = {THREE(cdequantize_blockwise_, _nf4),
                                                 THREE(cdequantize_blockwise_, _fp4), THREE(cdequantize_blockwise_, )};
static void (*const gemm[3])(const void *, const uint8_t *, const float *, const uint8_t *, const float *,
                             const float *, void *, const void *, int32_t, int32_t, int32_t, int32_t, int32_t,
                             void *) = THREE(cgemm_4bit_, );
static void (*const gemv[3])(int32_t, int32_t, int32_t, const void *, const uint8_t *, const float *, const float *,
                             void *, int32_t, int32_t, int32_t, int32_t, void *) = THREE(cgemm_4bit_inference_naive_, );

static void fine(const char *const what) {
  CHECK(bsh_native_last_error()[0] == '\0' && entered == 0, "%s: %s", what, bsh_native_last_error());
}

/* The last call failed with these words and computed nothing. */
static void failed(const char *const words, const void *const out, const int64_t n_bytes) {
  CHECK(strstr(bsh_native_last_error(), words) != NULL, "'%s', expected '%s'", bsh_native_last_error(), words);
  CHECK(entered == 0, "%s: %d calls not left", words, entered);
  for (int64_t i = 0; i < n_bytes; i++) CHECK(((const uint8_t *)out)[i] == 0xA5, "%s: output byte touched", words);
}

/* ---- blocks ---- */

static void *random_values(uint64_t *const state, const bsh_dtype dtype, const int64_t n) {
  float *const wide = buffer(4 * n);
  for (int64_t i = 0; i < n; i++) wide[i] = random_unit(state);
  void *const values = buffer(n * dtype_size(dtype));
  bsh_cpu_scalar.from_f32(wide, dtype, values, n);
  free(wide);
  return values;
}

static const uint32_t map_bits[256] = {BSH_DYNAMIC_MAP_BITS};
static float *map; /* on the heap, so that its alignment is that of float and its end is watched */

static void eight_bits(uint64_t *const state, const bsh_dtype dtype, const int64_t n, const int64_t blocksize) {
  const int64_t n_scales = bsh_block_count(n, blocksize), out_bytes = n * dtype_size(dtype);
  void *const x = random_values(state, dtype, n);
  uint8_t *const expected = buffer(n), *const code = buffer(n);
  float *const scales = buffer(4 * n_scales), *const absmax = buffer(4 * n_scales);
  void *const values = buffer(out_bytes), *const out = buffer(out_bytes);
  bsh_cpu_quantize_blockwise(&(bsh_quantize_blockwise_args){
      .x = x, .map = map, .code = expected, .absmax = scales, .n = n, .blocksize = blocksize, .dtype = dtype});
  bsh_cpu_dequantize_blockwise(&(bsh_dequantize_blockwise_args){
      .code = expected, .absmax = scales, .map = map, .out = values, .n = n, .blocksize = blocksize, .dtype = dtype});
  for (int cuda = 0; cuda < 2; cuda++) {
    memset(code, 0, (size_t)n), memset(out, 0, (size_t)out_bytes);
    if (cuda) quantize[2][dtype](map, x, absmax, code, (int32_t)blocksize, (int32_t)n);
    else quantize_cpu[dtype](map, x, absmax, code, blocksize, n);
    fine("quantize");
    if (cuda) dequantize[2][dtype](map, code, absmax, out, (int32_t)blocksize, (int32_t)n, some_stream);
    else dequantize_cpu[dtype](map, code, absmax, out, blocksize, n);
    fine("dequantize");
    check_same_bytes("code", code, expected, n), check_same_bytes("absmax", absmax, scales, 4 * n_scales);
    check_same_bytes("out", out, values, out_bytes);
  }
  free(x), free(expected), free(code), free(scales), free(absmax), free(values), free(out);
}

static void four_bits(uint64_t *const state, const bsh_dtype dtype, const bsh_format format, const int64_t m,
                      const int64_t n, const int64_t blocksize) {
  const int64_t all = m * n, n_scales = bsh_block_count(all, blocksize), out_bytes = all * dtype_size(dtype);
  void *const x = random_values(state, dtype, all);
  uint8_t *const expected = buffer(bsh_packed_bytes(all)), *const packed = buffer(bsh_packed_bytes(all));
  float *const scales = buffer(4 * n_scales), *const absmax = buffer(4 * n_scales);
  void *const values = buffer(out_bytes), *const out = buffer(out_bytes);
  bsh_cpu_quantize_4bit(&(bsh_quantize_4bit_args){.x = x,
                                                  .packed = expected,
                                                  .absmax = scales,
                                                  .n = all,
                                                  .blocksize = blocksize,
                                                  .dtype = dtype,
                                                  .format = format});
  quantize[format][dtype](NULL, x, absmax, packed, (int32_t)blocksize, (int32_t)all);
  fine("quantize_4bit");
  check_same_bytes("packed", packed, expected, bsh_packed_bytes(all));
  check_same_bytes("absmax", absmax, scales, 4 * n_scales);
  const bsh_weight weight = {
      .packed = packed, .scales = {.absmax = absmax}, .n = all, .blocksize = blocksize, .format = format};
  bsh_cpu_dequantize_4bit(&(bsh_dequantize_4bit_args){
      .weight = weight, .out = values, .columns = n, .n_rows = m, .n_columns = n, .ld = n, .dtype = dtype});
  dequantize[format][dtype](NULL, packed, absmax, out, (int32_t)blocksize, (int32_t)all, some_stream);
  fine("dequantize_4bit");
  check_same_bytes("out", out, values, out_bytes);
  memset(out, 0, (size_t)out_bytes);
  dequantize_4bit_cpu[format][dtype](packed, absmax, out, blocksize, m, n);
  fine("dequantize_4bit_cpu");
  check_same_bytes("out", out, values, out_bytes);
  free(x), free(expected), free(packed), free(scales), free(absmax), free(values), free(out);
}

/* ---- products ---- */

/* Random codes; any byte is one. */
static uint8_t *random_bytes(uint64_t *const state, const int64_t n) {
  uint8_t *const bytes = buffer(n);
  for (int64_t i = 0; i < n; i++) bytes[i] = (uint8_t)random_bits(state);
  return bytes;
}

/* fp32 only: those kernels take x as it is. */
static void products(uint64_t *const state, const bsh_format format, const bool nested, const bool biased) {
  static const float tables[2][16] = {{BSH_NF4_VALUES}, {BSH_FP4_VALUES}};
  const int64_t N = 1 + random_below(state, 70), K = 32 * (1 + random_below(state, 9));
  const int64_t M = nested ? 1 + random_below(state, 40) : 1, blocksize = 32 << random_below(state, 4);
  const int64_t n_scales = bsh_block_count(N * K, blocksize), n_scales2 = bsh_block_count(n_scales, 256);
  uint8_t *const packed = random_bytes(state, bsh_packed_bytes(N * K)), *const codes = random_bytes(state, n_scales);
  float *const absmax = random_values(state, BSH_F32, n_scales), *const absmax2 =
                                                                     random_values(state, BSH_F32, n_scales2);
  float *const offset = random_values(state, BSH_F32, 1), *const bias = random_values(state, BSH_F32, N);
  float *const x = random_values(state, BSH_F32, M * K), *const table = buffer(sizeof tables[0]);
  float *const y = buffer(4 * M * N), *const expected = buffer(4 * M * N);
  memcpy(table, tables[format], sizeof tables[0]);
  bsh_weight weight = {.packed = packed, .n = N * K, .blocksize = blocksize, .format = format};
  if (nested)
    weight.scales = (bsh_scales){.absmax_code = codes, .absmax_map = map, .absmax2 = absmax2, .offset = offset};
  else weight.scales.absmax = absmax;
  for (int64_t m = 0; m < M; m++) { /* row by row: the order of sums depends on the number of rows */
    const bsh_product_args row = {.weight = weight,
                                  .x = x + m * K,
                                  .bias = biased ? bias : NULL,
                                  .y = expected + m * N,
                                  .M = 1,
                                  .N = N,
                                  .K = K,
                                  .ldx = K,
                                  .ldy = N,
                                  .dtype = BSH_F32};
    CHECK(bsh_cpu_linear_4bit(&row, NULL) == BSH_OK, "%s", bsh_status_message());
  }
  gemm[BSH_F32](x, packed, nested ? absmax2 : absmax, nested ? codes : NULL, nested ? map : NULL,
                nested ? offset : NULL, y, biased ? bias : NULL, (int32_t)M, (int32_t)N, (int32_t)K, (int32_t)blocksize,
                format == BSH_FP4 ? 1 : 2, some_stream);
  fine("gemm");
  for (int64_t i = 0; i < M * N; i++)
    CHECK(y[i] - expected[i] < 1e-4f && expected[i] - y[i] < 1e-4f, "gemm: %g, expected %g", y[i], expected[i]);
  if (!nested && !biased) {
    memset(y, 0, (size_t)(4 * N));
    gemv[BSH_F32]((int32_t)N, 1, (int32_t)K, x, packed, absmax, table, y, 0, (int32_t)(K / 2), 0, (int32_t)blocksize,
                  some_stream);
    fine("gemv");
    check_same_bytes("gemv", y, expected, 4 * N);
  }
  free(packed), free(codes), free(absmax), free(absmax2), free(offset), free(bias), free(x), free(table), free(y);
  free(expected);
}

/* ---- LLM.int8 ---- */

/* Codes of x by rows, their product with codes of a weight, and that scaled. */
static void int8_layer(uint64_t *const state, const float threshold, const bool biased) {
  const int64_t M = 1 + random_below(state, 20), N = 1 + random_below(state, 40), K = 1 + random_below(state, 200);
  uint16_t *const x = random_values(state, BSH_F16, M * K), *const bias = random_values(state, BSH_F16, N);
  int8_t *const w = (int8_t *)random_bytes(state, N * K), *const codes = buffer(M * K), *const codes0 = buffer(M * K);
  float *const rows = buffer(4 * M), *const rows0 = buffer(4 * M), *const columns = random_values(state, BSH_F32, N);
  int32_t *const sums = buffer(4 * M * N), *const sums0 = buffer(4 * M * N);
  uint16_t *const y = buffer(2 * M * N), *const y0 = buffer(2 * M * N);
  uint8_t *const marks = buffer(K);
  cint8_vector_quant(x, codes, rows, threshold, (int32_t)M, (int32_t)K, some_stream), fine("cint8_vector_quant");
  for (int64_t m = 0; m < M; m++) /* a row alone: its outliers only are zero */
    bsh_cpu_quantize_int8(&(bsh_quantize_int8_args){.x = x + m * K,
                                                    .codes = codes0 + m * K,
                                                    .absmax = rows0 + m,
                                                    .outliers = threshold > 0 ? marks : NULL,
                                                    .M = 1,
                                                    .K = K,
                                                    .ldx = K,
                                                    .threshold = threshold,
                                                    .dtype = BSH_F16});
  check_same_bytes("codes", codes, codes0, M * K), check_same_bytes("rowStats", rows, rows0, 4 * M);
  const int failed_to = cigemmlt_32(NULL, (int32_t)N, (int32_t)M, (int32_t)K, w, codes, sums, NULL, (int32_t)K,
                                    (int32_t)K, (int32_t)N, some_stream);
  CHECK(failed_to == 0, "cigemmlt_32 returned %d", failed_to);
  fine("cigemmlt_32");
  bsh_cpu_product_int8(&(bsh_product_int8_args){.a = codes0, .b = w, .sums = sums0, .M = M, .N = N, .K = K});
  check_same_bytes("sums", sums, sums0, 4 * M * N);
  cdequant_mm_int32_fp16(sums, rows, columns, y, biased ? bias : NULL, (int32_t)M, (int32_t)N, some_stream);
  fine("cdequant_mm_int32_fp16");
  bsh_cpu_scale_product_int8(&(bsh_scale_product_int8_args){.sums = sums0,
                                                            .row_absmax = rows0,
                                                            .col_absmax = columns,
                                                            .bias = biased ? bias : NULL,
                                                            .y = y0,
                                                            .M = M,
                                                            .N = N,
                                                            .dtype = BSH_F16});
  check_same_bytes("y", y, y0, 2 * M * N);
  free(x), free(bias), free(w), free(codes), free(codes0), free(rows), free(rows0), free(columns), free(sums);
  free(sums0), free(y), free(y0), free(marks);
}

static void int8_mistakes(uint64_t *const state) {
  uint16_t *const x = random_values(state, BSH_F16, 64);
  float *const stats = random_values(state, BSH_F32, 8);
  int8_t *const codes = (int8_t *)random_bytes(state, 64), *const out = buffer(256);
  int32_t *const sums = (int32_t *)(void *)out;
  cint8_vector_quant(x, out, stats, 0, 2, 0, NULL), failed("2 rows of 0", out, 256);
  cint8_vector_quant(x, out, stats, 0, -1, 8, NULL), failed("-1 rows of 8", out, 256);
  cint8_vector_quant(x, out, stats, -6.0f, 2, 8, NULL), failed("threshold -6", out, 256);
  cint8_vector_quant(x, out, stats, (float)NAN, 2, 8, NULL), failed("threshold", out, 256);
  cint8_vector_quant((char *)x + 1, out, stats, 0, 2, 8, NULL), failed("A (", out, 256);
  cint8_vector_quant(x, out, NULL, 0, 2, 8, NULL), failed("rowStats is NULL", out, 256);
  cint8_vector_quant(NULL, NULL, NULL, 0, 0, 8, NULL), fine("nothing to do");
  cdequant_mm_int32_fp16(NULL, stats, stats, out, NULL, 2, 8, NULL), failed("A is NULL", out, 256);
  cdequant_mm_int32_fp16(sums, stats, stats, out + 1, NULL, 2, 8, NULL), failed("out (", out, 256);
  cdequant_mm_int32_fp16(sums, stats, stats, out, (char *)x + 1, 2, 8, NULL), failed("bias (", out, 256);
  cdequant_mm_int32_fp16(sums, stats, NULL, out, NULL, 2, 8, NULL), failed("colStats is NULL", out, 256);
  cdequant_mm_int32_fp16(sums, stats, stats, out, NULL, 2, -8, NULL), failed("2 rows of -8", out, 256);
  CHECK(cigemmlt_32(NULL, 4, 2, 8, codes, codes, sums, NULL, 16, 8, 4, NULL) == 1, "a failure returned 0");
  failed("lda, ldb, ldc = 16, 8, 4, expected k, k, m = 8, 8, 4", out, 256);
  cigemmlt_32(NULL, 4, 2, 0, codes, codes, sums, NULL, 0, 0, 4, NULL), failed("k = 0", out, 256);
  cigemmlt_32(NULL, 4, 2, 131072, codes, codes, sums, NULL, 131072, 131072, 4, NULL), failed("k = 131072", out, 256);
  cigemmlt_32(NULL, 4, 2, 8, codes, NULL, sums, NULL, 8, 8, 4, NULL), failed("B is NULL", out, 256);
  cigemmlt_32(NULL, 4, 2, 8, codes, codes, out + 1, NULL, 8, 8, 4, NULL), failed("C (", out, 256);
  CHECK(cigemmlt_32(NULL, 4, 0, 8, NULL, NULL, NULL, NULL, 8, 8, 4, NULL) == 0, "nothing to do is a failure");
  free(x), free(stats), free(codes), free(out);
}

/* ---- mistakes ---- */

static void mistakes(uint64_t *const state) {
  float *const x = random_values(state, BSH_F32, 256), *const absmax = random_values(state, BSH_F32, 8);
  uint8_t *const packed = random_bytes(state, 4096), *const out = buffer(1024);
  const uint8_t *const no_bytes = NULL;
  host_pointer = gpu_pointer = packed;
  dequantize_4bit_cpu[0][0](packed, absmax, out, 64, 2, 64), failed("A (", out, 1024);
  dequantize[0][0](NULL, packed, absmax, out, 64, 128, some_stream), failed("A is no address", out, 1024);
  quantize[0][0](NULL, x, absmax, packed, 64, 256), failed("out is no address", out, 1024);
  host_pointer = gpu_pointer = NULL;
  dequantize_4bit_cpu[0][0](packed, absmax, out, 64, INT64_MAX, 3), failed("is not a tensor shape", out, 1024);
  dequantize_4bit_cpu[0][0](packed, absmax, out, 96, 1, 64), failed("blocksize 96 is not", out, 1024);
  dequantize_4bit_cpu[0][0](no_bytes, absmax, out, 64, 1, 64), failed("A is NULL", out, 1024);
  dequantize_4bit_cpu[0][0](packed, absmax, out + 1, 64, 1, 64), failed("is not aligned", out, 1024);
  dequantize_4bit_cpu[0][0](no_bytes, NULL, NULL, 64, 0, 64), fine("nothing to do");
  dequantize[0][0](NULL, packed, absmax, out, 64, -1, some_stream), failed("n is -1", out, 1024);
  dequantize[2][0](NULL, packed, absmax, out, 64, 64, some_stream), failed("code is NULL", out, 1024);
  dequantize[0][2](NULL, packed, absmax, out + 1, 64, 64, some_stream), failed("is not aligned", out, 1024);
  dequantize[0][0](NULL, NULL, NULL, NULL, 64, 0, some_stream), fine("nothing to do");
  gemv[0](8, 1, 64, x, packed, absmax, absmax - 1, out, 8, 31, 8, 64, some_stream), failed("ldb is 31", out, 1024);
  gemv[0](8, 3, 64, x, packed, absmax, x, out, 8, 32, 8, 64, some_stream), failed("n is 3", out, 1024);
  gemv[0](8, 1, 64, x, packed, absmax, x, out, 8, 32, 8, 64, some_stream), failed("neither NF4 nor FP4", out, 1024);
  gemm[0](x, packed, absmax, NULL, NULL, NULL, out, NULL, 1, 8, 64, 64, 0, some_stream);
  failed("quant_type 0", out, 1024);
  gemm[0](x, packed, absmax, packed, NULL, NULL, out, NULL, 1, 8, 64, 64, 1, some_stream);
  failed("absmax_code is NULL", out, 1024);
  gemm[0](x, packed, absmax, NULL, NULL, NULL, out, NULL, 1, 8, 66, 64, 1, some_stream);
  failed("K is no multiple of 32", out, 1024);
  gemm[2](x, packed, absmax, NULL, NULL, NULL, out, NULL, 1, 8, 66, 64, 1, some_stream);
  failed("no vendor's product", out, 1024);
  free(x), free(absmax), free(packed), free(out);
}

int main(const int argc, char **const argv) {
  check_seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
  const int rounds = argc > 2 ? atoi(argv[2]) : 60;
  uint64_t state = check_seed;
  map = buffer(sizeof map_bits);
  memcpy(map, map_bits, sizeof map_bits);
  for (int round = 0; round < rounds; round++) {
    const bsh_dtype dtype = (bsh_dtype)(round % 3);
    const bsh_format format = round / 3 % 2 ? BSH_FP4 : BSH_NF4;
    const int64_t n = 1 + random_below(&state, 3000), blocksize = 32 << random_below(&state, 8);
    eight_bits(&state, dtype, n, blocksize);
    four_bits(&state, dtype, format, 1 + random_below(&state, 5), n, blocksize);
    products(&state, format, round % 2, round / 2 % 2);
    int8_layer(&state, round % 2 ? 0.5f : 0.0f, round / 2 % 2);
  }
  mistakes(&state), int8_mistakes(&state);
  free(map);
  printf("test_native: ok, seed %" PRIu64 ", %d launches\n", check_seed, launches);
  return 0;
}
