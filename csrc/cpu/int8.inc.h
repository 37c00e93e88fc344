/* cpu/int8.inc.h - the int8 kernels in vectors of any width, all but the product of codes.
 *
 * Included by each vector instruction set, which defines before:
 *   LANES                             numbers in a vector; floats and ints are vectors of gcc and clang
 *   load_floats(x, dtype, i)          x[i ...] as fp32
 *   store_floats(out, dtype, i, v)    out[i ...], rounded; NaN as in core/numerics.h
 *   fused(a, b, c)                    a * b + c, one rounding
 *   most_of(a, b)                     the larger in each lane, of ints
 *   any_from(v, threshold)            whether any lane of v is the threshold or more; false for NaN
 * What does not fill a vector is left to the scalar kernels, where bits must be equal. */
#ifndef BSH_CPU_INT8_INC_H
#define BSH_CPU_INT8_INC_H

#include "core/numerics.h"
#include "cpu/cpu.h"
#include "cpu/int8.h"

typedef int8_t codes_of_lanes __attribute__((vector_size(LANES)));

/* f(..., dtype) with a constant, so that a form is compiled for each. */
#define BY_DTYPE(f, dtype, ...)                                                                                        \
  ((dtype) == BSH_F32   ? f(__VA_ARGS__, BSH_F32)                                                                      \
   : (dtype) == BSH_F16 ? f(__VA_ARGS__, BSH_F16)                                                                      \
                        : f(__VA_ARGS__, BSH_BF16))

ALWAYS_INLINE floats magnitude(const floats v) { return (floats)((ints)v & 0x7FFFFFFF); }
ALWAYS_INLINE floats spread(const float number) { return (floats){0} + number; }

ALWAYS_INLINE floats load_codes(const int8_t *const codes) {
  codes_of_lanes loaded;
  memcpy(&loaded, codes, sizeof loaded);
  return __builtin_convertvector(__builtin_convertvector(loaded, ints), floats);
}

static const void *at(const void *const x, const bsh_dtype dtype, const int64_t i) {
  return (const char *)x + i * dtype_size(dtype);
}

/* ---- rows ----------------------------------------------------------------------------------------------------- */

/* The magnitudes of positive numbers and NaN are ordered as their bits. */
ALWAYS_INLINE float row_absmax(const void *const x, const int64_t n, const float threshold, uint8_t *const outliers,
                               const bsh_dtype dtype) {
  ints most = {0};
  int32_t largest = 0;
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    const floats v = magnitude(load_floats(x, dtype, i));
    if (outliers == NULL || !any_from(v, threshold)) {
      most = most_of(most, (ints)v);
      continue;
    }
    const float part = bsh_cpu_scalar_int8.absmax(at(x, dtype, i), dtype, LANES, threshold, outliers + i);
    if ((int32_t)float_bits(part) > largest) largest = (int32_t)float_bits(part);
  }
  const float rest =
      bsh_cpu_scalar_int8.absmax(at(x, dtype, i), dtype, n - i, threshold, outliers != NULL ? outliers + i : NULL);
  if ((int32_t)float_bits(rest) > largest) largest = (int32_t)float_bits(rest);
  for (int lane = 0; lane < LANES; lane++)
    if (most[lane] > largest) largest = most[lane];
  return bits_float(largest > 0x7F800000 ? 0x7FFFFFFFu : (uint32_t)largest);
}

static float absmax_lanes(const void *const x, const bsh_dtype dtype, const int64_t n, const float threshold,
                          uint8_t *const outliers) {
  return BY_DTYPE(row_absmax, dtype, x, n, threshold, outliers);
}

ALWAYS_INLINE void encode_row(const void *const x, const int64_t n, const float scale, const float threshold,
                              int8_t *const codes, const bsh_dtype dtype) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    const floats v = load_floats(x, dtype, i), product = v * scale;
    ints kept = magnitude(product) <= 128.0f;
    if (threshold > 0.0f) kept &= magnitude(v) < threshold;
    const codes_of_lanes found = __builtin_convertvector((ints)(product + 0x1.8p23f) & kept, codes_of_lanes);
    memcpy(codes + i, &found, sizeof found);
  }
  bsh_cpu_scalar_int8.encode(at(x, dtype, i), dtype, n - i, scale, threshold, codes + i);
}

static void encode_lanes(const void *const x, const bsh_dtype dtype, const int64_t n, const float scale,
                         const float threshold, int8_t *const codes) {
  BY_DTYPE(encode_row, dtype, x, n, scale, threshold, codes);
}

ALWAYS_INLINE void decode_row(const int8_t *const codes, const float absmax, const int64_t n, void *const y,
                              const bsh_dtype dtype) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store_floats(y, dtype, i, load_codes(codes + i) * absmax * BSH_INT8_UNIT);
  bsh_cpu_scalar_int8.decode(codes + i, absmax, n - i, dtype, (char *)y + i * dtype_size(dtype));
}

static void decode_lanes(const int8_t *const codes, const float absmax, const int64_t n, const bsh_dtype dtype,
                         void *const y) {
  BY_DTYPE(decode_row, dtype, codes, absmax, n, y);
}

ALWAYS_INLINE floats load_unaligned(const float *const from) {
  floats v;
  memcpy(&v, from, sizeof v);
  return v;
}

ALWAYS_INLINE void scale_row(const int32_t *const sums, const float row_absmax, const float *const col_absmax,
                             const void *const bias, const float *const more, const int64_t n, void *const y,
                             const bsh_dtype dtype) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    ints sum;
    memcpy(&sum, sums + i, sizeof sum);
    const floats scaled = __builtin_convertvector(sum, floats) * row_absmax * load_unaligned(col_absmax + i);
    const floats added = bias != NULL ? load_floats(bias, dtype, i) : spread(0.0f);
    floats v = fused(scaled, spread(BSH_INT8_PRODUCT_SCALE), added);
    if (more != NULL) v += load_unaligned(more + i);
    store_floats(y, dtype, i, v);
  }
  bsh_cpu_scalar_int8.scale(sums + i, row_absmax, col_absmax + i, bias != NULL ? at(bias, dtype, i) : NULL,
                            more != NULL ? more + i : NULL, n - i, dtype, (char *)y + i * dtype_size(dtype));
}

static void scale_lanes(const int32_t *const sums, const float row_absmax, const float *const col_absmax,
                        const void *const bias, const float *const more, const int64_t n, const bsh_dtype dtype,
                        void *const y) {
  BY_DTYPE(scale_row, dtype, sums, row_absmax, col_absmax, bias, more, n, y);
}

/* ---- few rows of x as they are -------------------------------------------------------------------------------- */

enum { X_FLOATS = 8192, BLOCK = 64 }; /* a chunk of x stays in the first-level cache while BLOCK rows of W pass */

/* Columns [k0, k0 + n) of x, M rows -> fp32, rows `padded` apart, zeros behind the n columns. */
static void convert_chunk(const bsh_linear_int8_args *const args, const int64_t k0, const int64_t n,
                          const int64_t padded, float *const out) {
  for (int64_t m = 0; m < args->M; m++) {
    bsh_cpu()->to_f32(at(args->x, args->dtype, m * args->ldx + k0), args->dtype, out + m * padded, n);
    memset(out + m * padded + n, 0, (size_t)(padded - n) * sizeof(float));
  }
}

/* sums[r][m] += the products of n columns of `rows` rows of W with M rows of x. */
ALWAYS_INLINE void multiply_tile(const int8_t *const codes, const int64_t K, const int64_t n, const float *const x,
                                 const int64_t padded, float (*const sums)[BSH_CPU_SMALL_M], const int rows,
                                 const int M) {
  floats accumulators[4][8] = {0};
  int64_t k = 0;
  for (; k + LANES <= n; k += LANES) UNROLL for (int r = 0; r < rows; r++) {
      const floats w = load_codes(codes + r * K + k);
      UNROLL for (int m = 0; m < M; m++) accumulators[r][m] =
          fused(w, load_unaligned(x + m * padded + k), accumulators[r][m]);
    }
  for (int r = 0; r < rows; r++) {
    int8_t tail[LANES] = {0};
    if (k < n) memcpy(tail, codes + r * K + k, (size_t)(n - k));
    for (int m = 0; m < M; m++) {
      floats all = accumulators[r][m];
      if (k < n) all = fused(load_codes(tail), load_unaligned(x + m * padded + k), all);
      sums[r][m] += sum_of(all);
    }
  }
}

#define BY_ROWS(M)                                                                                                     \
  do {                                                                                                                 \
    if (rows == 4) multiply_tile(codes, K, n, x, padded, sums, 4, M);                                                  \
    else if (rows == 2) multiply_tile(codes, K, n, x, padded, sums, 2, M);                                             \
    else multiply_tile(codes, K, n, x, padded, sums, 1, M);                                                            \
  } while (0)

static void tile_1(const int8_t *const codes, const int64_t K, const int64_t n, const float *const x,
                   const int64_t padded, float (*const sums)[BSH_CPU_SMALL_M], const int64_t rows) {
  BY_ROWS(1);
}
static void tile_2(const int8_t *const codes, const int64_t K, const int64_t n, const float *const x,
                   const int64_t padded, float (*const sums)[BSH_CPU_SMALL_M], const int64_t rows) {
  BY_ROWS(2);
}
static void tile_4(const int8_t *const codes, const int64_t K, const int64_t n, const float *const x,
                   const int64_t padded, float (*const sums)[BSH_CPU_SMALL_M], const int64_t rows) {
  BY_ROWS(4);
}
static void tile_8(const int8_t *const codes, const int64_t K, const int64_t n, const float *const x,
                   const int64_t padded, float (*const sums)[BSH_CPU_SMALL_M], const int64_t rows) {
  BY_ROWS(8);
}
#undef BY_ROWS

/* One row of W, or two or four, with all rows of x: 8, 4, 2 and 1 at a time, so that sums stay in registers. */
static void multiply_rows(const int8_t *const codes, const int64_t K, const int64_t n, const float *x,
                          const int64_t padded, float (*sums)[BSH_CPU_SMALL_M], const int64_t rows, const int64_t M) {
  for (int64_t m = 0; m < M;) {
    float (*const from)[BSH_CPU_SMALL_M] = (float (*)[BSH_CPU_SMALL_M])(sums[0] + m);
    const int64_t step = M - m >= 8 && LANES >= 16 ? 8 : M - m >= 4 ? 4 : M - m >= 2 ? 2 : 1;
    const int64_t most = MOST_TILES / step; /* rows of W whose sums fit */
    for (int64_t r = 0; r < rows;) {
      const int64_t now = rows - r >= 4 && most >= 4 ? 4 : rows - r >= 2 && most >= 2 ? 2 : 1;
      (step == 8   ? tile_8
       : step == 4 ? tile_4
       : step == 2 ? tile_2
                   : tile_1)(codes + r * K, K, n, x + m * padded, padded, from + r, now);
      r += now;
    }
    m += step;
  }
}

static void store_block(const bsh_linear_int8_args *const args, const int64_t n0, const int64_t rows,
                        float (*const sums)[BSH_CPU_SMALL_M]) {
  for (int64_t r = 0; r < rows; r++) {
    const float unit = args->absmax[n0 + r] * BSH_INT8_UNIT;
    const float bias = args->bias ? load_f32(args->bias, args->dtype, n0 + r) : 0.0f;
    for (int64_t m = 0; m < args->M; m++)
      store_f32(args->y, args->dtype, m * args->N + n0 + r, sums[r][m] * unit + bias);
  }
}

static void linear_lanes(const bsh_linear_int8_args *const args, const int64_t n_begin, const int64_t n_end) {
  float x[X_FLOATS + LANES];
  const int64_t K = args->K, step = min_i64(X_FLOATS / args->M / LANES * LANES, divide_up(K, LANES) * LANES);
  for (int64_t n0 = n_begin; n0 < n_end; n0 += BLOCK) {
    float sums[BLOCK][BSH_CPU_SMALL_M] = {0};
    const int64_t rows = min_i64(BLOCK, n_end - n0);
    for (int64_t k0 = 0; k0 < K; k0 += step) {
      const int64_t n = min_i64(step, K - k0);
      if (n0 == n_begin || step < K) convert_chunk(args, k0, n, step, x);
      for (int64_t r = 0; r < rows; r += 4)
        multiply_rows(args->packed + (n0 + r) * K + k0, K, n, x, step, sums + r, min_i64(4, rows - r), args->M);
    }
    store_block(args, n0, rows, sums);
  }
}

/* ---- the gradient of few rows --------------------------------------------------------------------------------- */

enum { COLUMNS = 512, ROWS = 4 }; /* sums of so many columns stay in the first-level cache; rows of W at a time */

/* sums[k] += the products of ROWS numbers with columns [0, n) of as many rows of W; n is a multiple of LANES. */
ALWAYS_INLINE void add_rows(float *const sums, const floats w[ROWS], const float scales[ROWS]) {
  floats sum = load_unaligned(sums);
  UNROLL for (int r = 0; r < ROWS; r++) sum = fused(w[r], spread(scales[r]), sum);
  memcpy(sums, &sum, sizeof sum);
}

static void add_tile(const int8_t *const codes, const int64_t K, const int64_t n, const int64_t M,
                     const float (*const scales)[ROWS], float (*const sums)[COLUMNS]) {
  for (int64_t k = 0; k < n; k += LANES) {
    floats w[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) w[r] = load_codes(codes + r * K + k);
    for (int64_t m = 0; m < M; m++) add_rows(sums[m] + k, w, scales[m]);
  }
}

/* The same for what does not fill ROWS rows and LANES columns. */
static void add_ragged(const int8_t *const codes, const int64_t K, const int64_t n, const int64_t rows, const int64_t M,
                       const float (*const scales)[ROWS], float (*const sums)[COLUMNS]) {
  int8_t padded[ROWS * COLUMNS] = {0};
  for (int64_t r = 0; r < rows; r++) memcpy(padded + r * COLUMNS, codes + r * K, (size_t)n);
  add_tile(padded, COLUMNS, divide_up(n, LANES) * LANES, M, scales, sums);
}

static void linear_dgrad_lanes(const bsh_linear_int8_args *const args, const int64_t k_begin, const int64_t k_end) {
  float sums[BSH_CPU_SMALL_M][COLUMNS];
  for (int64_t k0 = k_begin; k0 < k_end; k0 += COLUMNS) {
    const int64_t n = min_i64(COLUMNS, k_end - k0);
    memset(sums, 0, sizeof sums);
    for (int64_t row = 0; row < args->N; row += ROWS) {
      const int64_t rows = min_i64(ROWS, args->N - row);
      float scales[BSH_CPU_SMALL_M][ROWS] = {0};
      for (int64_t m = 0; m < args->M; m++)
        for (int64_t r = 0; r < rows; r++)
          scales[m][r] =
              load_f32(args->x, args->dtype, m * args->ldx + row + r) * (args->absmax[row + r] * BSH_INT8_UNIT);
      const int8_t *const codes = args->packed + row * args->K + k0;
      if (rows == ROWS && n % LANES == 0) add_tile(codes, args->K, n, args->M, scales, sums);
      else add_ragged(codes, args->K, n, rows, args->M, scales, sums);
    }
    for (int64_t m = 0; m < args->M; m++)
      bsh_cpu()->from_f32(sums[m], args->dtype, (char *)args->y + (m * args->K + k0) * dtype_size(args->dtype), n);
  }
}

#define INT8_BY_LANES                                                                                                  \
  .absmax = absmax_lanes, .encode = encode_lanes, .decode = decode_lanes, .scale = scale_lanes,                        \
  .linear = linear_lanes, .linear_dgrad = linear_dgrad_lanes

#endif
