/* native/cpu.c - the exported CPU functions that bitsandbytes' CUDA library has. See native/native.h.
 *
 * Results are those of our ops: the bits of bitsandbytes' CUDA build, also where its CPU build has others. */
#include "core/arithmetic.h"
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

/* ---- this CPU ---- */

BSH_NATIVE int has_avx512f_cpu(void);
BSH_NATIVE int has_avx512bf16_cpu(void);

int has_avx512f_cpu(void) { return bsh_cpu_has()->avx512f; }
int has_avx512bf16_cpu(void) { return bsh_cpu_has()->avx512bf16; }
