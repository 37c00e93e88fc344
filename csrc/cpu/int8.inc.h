/* cpu/int8.inc.h - the int8 kernels in vectors of any width (cpu/isa/vectors.h), all but the product of codes.
 *
 * What does not fill a vector is left to the scalar kernels, where bits must be equal. */
#ifndef BSH_CPU_INT8_INC_H
#define BSH_CPU_INT8_INC_H

enum { MOST_SUMS = REGISTERS == 32 ? 24 : 8 }; /* vectors of sums that stay in registers */

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
    const floats v = v_abs(v_load(x, dtype, i));
    if (outliers == NULL || !m_any(v_at_most(v_set(threshold), v))) {
      most = i_max(most, (ints)v);
      continue;
    }
    const float part = bsh_cpu_scalar_int8.absmax(at(x, dtype, i), dtype, LANES, threshold, outliers + i);
    if ((int32_t)float_bits(part) > largest) largest = (int32_t)float_bits(part);
  }
  const float rest =
      bsh_cpu_scalar_int8.absmax(at(x, dtype, i), dtype, n - i, threshold, outliers != NULL ? outliers + i : NULL);
  if ((int32_t)float_bits(rest) > largest) largest = (int32_t)float_bits(rest);
  if ((int32_t)i_reduce_max(most) > largest) largest = (int32_t)i_reduce_max(most);
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
    const floats v = v_load(x, dtype, i), product = v * scale;
    ints kept = v_abs(product) <= 128.0f;
    if (threshold > 0.0f) kept &= v_abs(v) < threshold;
    i_store_bytes(codes + i, (ints)(product + 0x1.8p23f) & kept);
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
  for (; i + LANES <= n; i += LANES) v_store(y, dtype, i, v_load_codes(codes + i) * absmax * BSH_INT8_UNIT);
  bsh_cpu_scalar_int8.decode(codes + i, absmax, n - i, dtype, (char *)y + i * dtype_size(dtype));
}

static void decode_lanes(const int8_t *const codes, const float absmax, const int64_t n, const bsh_dtype dtype,
                         void *const y) {
  BY_DTYPE(decode_row, dtype, codes, absmax, n, y);
}

ALWAYS_INLINE void scale_row(const int32_t *const sums, const float row_absmax, const float *const col_absmax,
                             const void *const bias, const float *const more, const int64_t n, void *const y,
                             const bsh_dtype dtype) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    ints sum;
    memcpy(&sum, sums + i, sizeof sum);
    const floats scaled = __builtin_convertvector(sum, floats) * row_absmax * v_read(col_absmax + i);
    const floats added = bias != NULL ? v_load(bias, dtype, i) : v_set(0.0f);
    floats v = v_fma(scaled, v_set(BSH_INT8_PRODUCT_SCALE), added);
    if (more != NULL) v += v_read(more + i);
    v_store(y, dtype, i, v);
  }
  bsh_cpu_scalar_int8.scale(sums + i, row_absmax, col_absmax + i, bias != NULL ? at(bias, dtype, i) : NULL,
                            more != NULL ? more + i : NULL, n - i, dtype, (char *)y + i * dtype_size(dtype));
}

static void scale_lanes(const int32_t *const sums, const float row_absmax, const float *const col_absmax,
                        const void *const bias, const float *const more, const int64_t n, const bsh_dtype dtype,
                        void *const y) {
  BY_DTYPE(scale_row, dtype, sums, row_absmax, col_absmax, bias, more, n, y);
}

static void add_scaled_lanes(const int32_t *const sums, const float x_scale, const float *const w_scales,
                             const int64_t n, float *const y) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    ints sum;
    memcpy(&sum, sums + i, sizeof sum);
    v_write(y + i, v_fma(__builtin_convertvector(sum, floats), x_scale * v_read(w_scales + i), v_read(y + i)));
  }
  bsh_cpu_scalar_int8.add_scaled(sums + i, x_scale, w_scales + i, n - i, y + i);
}

static void columns_lanes(const float *const x, const float *const w, const int64_t n, float *const sum) {
  enum { VECTORS = BSH_INT8_PANEL / LANES / 2 }; /* in registers: half a panel */
  for (int64_t j0 = 0; j0 < BSH_INT8_PANEL; j0 += VECTORS * LANES) {
    floats sums[VECTORS] = {0};
    for (int64_t i = 0; i < n; i++)
      UNROLL for (int j = 0; j < VECTORS; j++) sums[j] =
          v_fma(v_set(x[i]), v_read(w + i * BSH_INT8_PANEL + j0 + j * LANES), sums[j]);
    memcpy(sum + j0, sums, sizeof sums);
  }
}

/* ---- few rows of x as they are -------------------------------------------------------------------------------- */

enum { X_FLOATS = 8192, BLOCK = 64 }; /* a chunk of x stays in the first-level cache while BLOCK rows of W pass */

/* Columns [k0, k0 + n) of x -> fp32, `rows` rows `padded` apart; zeros behind the n columns and the M rows. */
static void convert_chunk(const bsh_product_args *const args, const int64_t k0, const int64_t n, const int64_t rows,
                          const int64_t padded, float *const out) {
  memset(out, 0, (size_t)(rows * padded) * sizeof(float));
  for (int64_t m = 0; m < args->M; m++)
    bsh_cpu()->to_f32(at(args->x, args->dtype, m * args->ldx + k0), args->dtype, out + m * padded, n);
}

/* sums[r][m] += the products of n columns of `rows` rows of W with M rows of x. The rows of W that follow are wanted
 * next: hardware follows a row, but does not see the next one coming. */
ALWAYS_INLINE void multiply_tile(const int8_t *const codes, const int64_t K, const int64_t n, const float *const x,
                                 const int64_t padded, float (*const sums)[BSH_INT8_FEW], const int rows, const int M) {
  floats accumulators[4][BSH_INT8_FEW] = {0}, w[4];
  int64_t k = 0;
  for (; k + LANES <= n; k += LANES) {
    UNROLL for (int r = 0; r < rows; r++) {
      w[r] = v_load_codes(codes + r * K + k);
      __builtin_prefetch(codes + (r + rows) * K + k);
    }
    UNROLL for (int m = 0; m < M; m++) {
      const floats of_row = v_hold(v_read(x + m * padded + k)); /* loaded once, not by each instruction */
      UNROLL for (int r = 0; r < rows; r++) accumulators[r][m] = v_fma(w[r], of_row, accumulators[r][m]);
    }
  }
  if (k < n) {
    UNROLL for (int r = 0; r < rows; r++) {
      int8_t tail[LANES] = {0};
      memcpy(tail, codes + r * K + k, (size_t)(n - k));
      UNROLL for (int m = 0; m < M; m++) accumulators[r][m] =
          v_fma(v_load_codes(tail), v_read(x + m * padded + k), accumulators[r][m]);
    }
  }
  UNROLL for (int r = 0; r < rows; r++) { UNROLL for (int m = 0; m < M; m++) sums[r][m] += v_sum(accumulators[r][m]); }
}

#define BY_ROWS(M)                                                                                                     \
  do {                                                                                                                 \
    if (rows == 4 && 4 * M <= MOST_SUMS) multiply_tile(codes, K, n, x, padded, sums, 4, M);                            \
    else if (rows == 3 && 3 * M <= MOST_SUMS) multiply_tile(codes, K, n, x, padded, sums, 3, M);                       \
    else if (rows == 2) multiply_tile(codes, K, n, x, padded, sums, 2, M);                                             \
    else multiply_tile(codes, K, n, x, padded, sums, 1, M);                                                            \
  } while (0)

#define TILE(M)                                                                                                        \
  static void tile_##M(const int8_t *const codes, const int64_t K, const int64_t n, const float *const x,              \
                       const int64_t padded, float (*const sums)[BSH_INT8_FEW], const int64_t rows) {                  \
    BY_ROWS(M);                                                                                                        \
  }
TILE(1)
TILE(2)
TILE(4)
#undef TILE
#undef BY_ROWS

/* Up to BLOCK rows of W with all rows of x, of which there are 1, 2 or 4: as many at a time as have their sums in
 * registers. */
static void multiply_rows(const int8_t *const codes, const int64_t K, const int64_t n, const float *const x,
                          const int64_t padded, float (*const sums)[BSH_INT8_FEW], const int64_t rows,
                          const int64_t M) {
  static void (*const tiles[])(const int8_t *, int64_t, int64_t, const float *, int64_t, float (*)[BSH_INT8_FEW],
                               int64_t) = {[1] = tile_1, [2] = tile_2, [4] = tile_4};
  const int64_t at_once = min_i64(4, MOST_SUMS / M);
  for (int64_t r = 0; r < rows; r += at_once)
    tiles[M](codes + r * K, K, n, x, padded, sums + r, min_i64(at_once, rows - r));
}

static void store_block(const bsh_product_args *const args, const int64_t n0, const int64_t rows,
                        float (*const sums)[BSH_INT8_FEW]) {
  for (int64_t r = 0; r < rows; r++) {
    const float unit = args->weight.scales.absmax[n0 + r] * BSH_INT8_UNIT;
    const float bias = args->bias ? load_f32(args->bias, args->dtype, n0 + r) : 0.0f;
    for (int64_t m = 0; m < args->M; m++)
      store_f32(args->y, args->dtype, m * args->N + n0 + r, sums[r][m] * unit + bias);
  }
}

static void linear_lanes(const bsh_product_args *const args, const int64_t n_begin, const int64_t n_end) {
  float x[X_FLOATS] __attribute__((aligned(64))); /* loads across two lines take twice as long */
  const int64_t K = args->K, M = args->M <= 2 ? args->M : 4;
  const int64_t step = min_i64(X_FLOATS / M / 16 * 16, divide_up(K, 16) * 16);
  for (int64_t n0 = n_begin; n0 < n_end; n0 += BLOCK) {
    float sums[BLOCK][BSH_INT8_FEW] = {0};
    const int64_t rows = min_i64(BLOCK, n_end - n0);
    for (int64_t k0 = 0; k0 < K; k0 += step) {
      const int64_t n = min_i64(step, K - k0);
      if (n0 == n_begin || step < K) convert_chunk(args, k0, n, M, step, x);
      multiply_rows(int8_codes(&args->weight) + n0 * K + k0, K, n, x, step, sums, rows, M);
    }
    store_block(args, n0, rows, sums);
  }
}

#include "cpu/int8_dgrad.inc.h"

#define INT8_BY_LANES                                                                                                  \
  .absmax = absmax_lanes, .encode = encode_lanes, .decode = decode_lanes, .scale = scale_lanes,                        \
  .add_scaled = add_scaled_lanes, .columns = columns_lanes, .linear = linear_lanes,                                    \
  .linear_dgrad = linear_dgrad_lanes, .dgrad_panel = dgrad_panel_lanes

#endif
