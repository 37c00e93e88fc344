/* native/cpu.c - the exported functions that bitsandbytes' CPU library has. See native/native.h.
 *
 * Results are those of our ops: the bits of bitsandbytes' CUDA build, also where its CPU build has others. */
#include <inttypes.h>
#include <stdlib.h>

#include "core/arithmetic.h"
#include "core/numerics.h"
#include "core/packed.h"
#include "cpu/cpu.h"
#include "gpu/driver.h"
#include "native/native.h"

/* Usable by the CPU: the addresses of a GPU are not. */
static bsh_status check_pointers(const char *const op, const bsh_native_pointer *const pointers, const int count) {
  BSH_TRY(bsh_native_check_pointers(op, pointers, count));
  for (int i = 0; i < count; i++)
    if (bsh_cuda_owns(pointers[i].data))
      return bsh_fail(BSH_BAD_DEVICE, "%s: %s (%p) is memory of a GPU", op, pointers[i].name, pointers[i].data);
  return BSH_OK;
}

/* ---- 8-bit blocks ---- */

static bsh_status quantize(const char *const op, const bsh_quantize_blockwise_args *const args) {
  const bsh_native_pointer pointers[] = {{"code", args->map, sizeof(float)},
                                         {"A", args->x, (uintptr_t)dtype_size(args->dtype)},
                                         {"absmax", args->absmax, sizeof(float)},
                                         {"out", args->code, 1}};
  BSH_TRY(bsh_native_check_sizes(op, args->n, args->blocksize, BSH_MAX_BLOCKSIZE_8BIT));
  if (args->n == 0) return BSH_OK;
  BSH_TRY(check_pointers(op, pointers, 4));
  return bsh_cpu_quantize_blockwise(args);
}

static bsh_status dequantize(const char *const op, const bsh_dequantize_blockwise_args *const args) {
  const bsh_native_pointer pointers[] = {{"code", args->map, sizeof(float)},
                                         {"A", args->code, 1},
                                         {"absmax", args->absmax, sizeof(float)},
                                         {"out", args->out, (uintptr_t)dtype_size(args->dtype)}};
  BSH_TRY(bsh_native_check_sizes(op, args->n, args->blocksize, BSH_MAX_BLOCKSIZE_8BIT));
  if (args->n == 0) return BSH_OK;
  BSH_TRY(check_pointers(op, pointers, 4));
  return bsh_cpu_dequantize_blockwise(args);
}

/* code: the map, f32 [256]. A [n], absmax f32 [ceil(n / blocksize)], out u8 [n]. */
#define QUANTIZE(NAME, DTYPE)                                                                                          \
  BSH_NATIVE void cquantize_blockwise_cpu_##NAME(const float *code, const void *A, float *absmax, uint8_t *out,        \
                                                 long long blocksize, long long n) {                                   \
    const bsh_quantize_blockwise_args args = {                                                                         \
        .x = A, .map = code, .code = out, .absmax = absmax, .n = n, .blocksize = blocksize, .dtype = DTYPE};           \
    bsh_native_finish(quantize("cquantize_blockwise_cpu_" #NAME, &args));                                              \
  }
BSH_NATIVE_DTYPES(QUANTIZE)

/* The reverse: A u8 [n], out [n]. */
#define DEQUANTIZE(NAME, DTYPE)                                                                                        \
  BSH_NATIVE void cdequantize_blockwise_cpu_##NAME(const float *code, const uint8_t *A, const float *absmax,           \
                                                   void *out, long long blocksize, long long n) {                      \
    const bsh_dequantize_blockwise_args args = {                                                                       \
        .code = A, .absmax = absmax, .map = code, .out = out, .n = n, .blocksize = blocksize, .dtype = DTYPE};         \
    bsh_native_finish(dequantize("cdequantize_blockwise_cpu_" #NAME, &args));                                          \
  }
BSH_NATIVE_DTYPES(DEQUANTIZE)

/* ---- 4-bit blocks ---- */

static bsh_status dequantize_4bit(const char *const op, const bsh_format format, const bsh_dtype dtype,
                                  const uint8_t *const packed, const float *const absmax, void *const out,
                                  const int64_t blocksize, const int64_t m, const int64_t n) {
  const bsh_native_pointer pointers[] = {
      {"A", packed, 1}, {"absmax", absmax, sizeof(float)}, {"out", out, (uintptr_t)dtype_size(dtype)}};
  int64_t all = 0;
  BSH_TRY(bsh_checked_product(op, m, n, &all));
  BSH_TRY(bsh_native_check_sizes(op, all, blocksize, BSH_MAX_BLOCKSIZE));
  if (all == 0) return BSH_OK;
  BSH_TRY(check_pointers(op, pointers, 3));
  const bsh_dequantize_4bit_args args = {
      .weight = {.packed = packed, .scales = {.absmax = absmax}, .n = all, .blocksize = blocksize, .format = format},
      .out = out,
      .columns = all,
      .n_rows = 1,
      .n_columns = all,
      .ld = all,
      .dtype = dtype};
  return bsh_cpu_dequantize_4bit(&args);
}

/* A u8 [ceil(m n / 2)], absmax f32 [ceil(m n / blocksize)], out [m, n]; blocks run on from row to row. */
#define DEQUANTIZE_4BIT(NAME, DTYPE, FORMAT, NUMBER)                                                                   \
  BSH_NATIVE void cdequantize_blockwise_cpu_##FORMAT##_##NAME(const uint8_t *A, const float *absmax, void *out,        \
                                                              long long blocksize, long long m, long long n) {         \
    bsh_native_finish(dequantize_4bit("cdequantize_blockwise_cpu_" #FORMAT "_" #NAME, NUMBER, DTYPE, A, absmax, out,   \
                                      blocksize, m, n));                                                               \
  }
#define DEQUANTIZE_NF4(NAME, DTYPE) DEQUANTIZE_4BIT(NAME, DTYPE, nf4, BSH_NF4)
#define DEQUANTIZE_FP4(NAME, DTYPE) DEQUANTIZE_4BIT(NAME, DTYPE, fp4, BSH_FP4)
BSH_NATIVE_DTYPES(DEQUANTIZE_NF4)
BSH_NATIVE_DTYPES(DEQUANTIZE_FP4)

/* ---- products ---- */

/* bitsandbytes' second form of a weight [N, K], for these functions alone. B u8 [N / 32, K / 2, 32]: of 32 rows and a
 * pair of columns the 64 codes, row by row; the first 32 are low halves of the bytes, the others high halves. absmax
 * bf16 [K / blocksize, N]. */
typedef struct {
  const uint8_t *B;
  const uint16_t *absmax;
  int64_t N, K, blocksize;
} reordered;

enum { GROUP = 32, HALF = GROUP / 2 };

static int code_at(const reordered *const w, const int64_t row, const int64_t column) {
  const int64_t group = row / GROUP, r = row % GROUP;
  const uint8_t byte = w->B[(group * (w->K / 2) + column / 2) * GROUP + r % HALF * 2 + column % 2];
  return r < HALF ? byte & 15 : byte >> 4;
}

/* The form of checkpoints: packed u8 [N * K / 2], scales f32 [N, K / blocksize]. */
static void restore(const reordered *const w, uint8_t *const packed, float *const scales) {
  const int64_t blocks = w->K / w->blocksize;
  for (int64_t n = 0; n < w->N; n++) {
    uint8_t *const out = packed + n * (w->K / 2);
    for (int64_t k = 0; k < w->K; k += 2) out[k / 2] = (uint8_t)(code_at(w, n, k) << 4 | code_at(w, n, k + 1));
    for (int64_t b = 0; b < blocks; b++) scales[n * blocks + b] = bf16_to_f32(w->absmax[b * w->N + n]);
  }
}

static bsh_status check_product(const char *const op, const reordered *const w,
                                const bsh_linear_4bit_args *const args) {
  const bsh_native_pointer pointers[] = {
      {"x", args->x, 2}, {"w", w->B, 1}, {"absmax", w->absmax, 2}, {"out", args->y, 2}};
  int64_t n = 0;
  if (args->M < 0 || w->N < 0 || w->K < 1 || w->N % GROUP != 0 || w->blocksize < 1 || w->K % w->blocksize != 0)
    return bsh_fail(BSH_BAD_SHAPE,
                    "%s: M = %" PRId64 ", N = %" PRId64 ", K = %" PRId64 ", blocksize %" PRId64
                    ": N must be a multiple of %d, K of blocksize and above 0",
                    op, args->M, w->N, w->K, w->blocksize, GROUP);
  BSH_TRY(bsh_checked_product(op, w->N, w->K, &n));
  BSH_TRY(bsh_native_check_sizes(op, n, w->blocksize, BSH_MAX_BLOCKSIZE));
  return args->M == 0 || n == 0 ? BSH_OK : check_pointers(op, pointers, 4);
}

/* Restores the weight for the call: these functions are there for callers that hold the second form, not for speed. */
static bsh_status run_reordered(const char *const op, const reordered *const w, bsh_linear_4bit_args *const args) {
  BSH_TRY(check_product(op, w, args));
  const int64_t n = w->N * w->K;
  if (args->M == 0 || n == 0) return BSH_OK;
  args->weight.n = n;
  uint8_t *const packed = malloc((size_t)(n / 2));
  float *const scales = malloc((size_t)(n / w->blocksize) * sizeof(float));
  bsh_status status = BSH_OK;
  if (packed == NULL || scales == NULL) {
    status = bsh_no_memory(op, "codes and scales", BSH_DEVICE_CPU,
                           (double)n / 2 + (double)n / (double)w->blocksize * (double)sizeof(float));
  } else {
    restore(w, packed, scales);
    args->weight.packed = packed;
    args->weight.scales.absmax = scales;
    status = bsh_cpu_linear_4bit(args, NULL);
  }
  free(packed);
  free(scales);
  return status;
}

/* out [M, N] = x [M, K] W^T in bf16, rows x_stride and out_stride elements apart. */
#define GEMV(FORMAT, NUMBER)                                                                                           \
  BSH_NATIVE void gemv_4bit_inference_cpu_##FORMAT##_bf16(int64_t M, int64_t N, int64_t K, const uint16_t *x,          \
                                                          const uint8_t *w, const uint16_t *absmax, uint16_t *out,     \
                                                          int64_t blocksize, int64_t x_stride, int64_t out_stride) {   \
    const reordered form = {.B = w, .absmax = absmax, .N = N, .K = K, .blocksize = blocksize};                         \
    bsh_linear_4bit_args args = {.weight = {.blocksize = blocksize, .format = NUMBER}, /* n: once checked */           \
                                 .x = x,                                                                               \
                                 .y = out,                                                                             \
                                 .M = M,                                                                               \
                                 .N = N,                                                                               \
                                 .K = K,                                                                               \
                                 .ldx = x_stride,                                                                      \
                                 .ldy = out_stride,                                                                    \
                                 .dtype = BSH_BF16};                                                                   \
    bsh_native_finish(run_reordered("gemv_4bit_inference_cpu_" #FORMAT "_bf16", &form, &args));                        \
  }
GEMV(nf4, BSH_NF4)
GEMV(fp4, BSH_FP4)

/* ---- this CPU ---- */

BSH_NATIVE int has_avx512f_cpu(void);
BSH_NATIVE int has_avx512bf16_cpu(void);

#if defined(__x86_64__)
int has_avx512f_cpu(void) { return __builtin_cpu_supports("avx512f") != 0; }
int has_avx512bf16_cpu(void) { return __builtin_cpu_supports("avx512bf16") != 0; }
#else
int has_avx512f_cpu(void) { return 0; }
int has_avx512bf16_cpu(void) { return 0; }
#endif
