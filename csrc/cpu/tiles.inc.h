/* cpu/tiles.inc.h - linear_4bit and its gradient for any K and blocksize, by way of small decoded tiles on the stack.
 *
 * Forward: a tile of x, [M, TILE_K], is converted once for TILE_ROWS rows of W. Gradient: sums [M, TILE_K] stay on the
 * stack while all rows of W pass by. The order of every sum depends on K (or N) alone. */
#ifndef BSH_CPU_TILES_INC_H
#define BSH_CPU_TILES_INC_H

#include "cpu/blocks.inc.h"
#include "cpu/decode.inc.h"

enum { TILE_K = 512, TILE_ROWS = 32 };

static float dot(const float *const a, const float *const b, const int64_t n) {
  floats sums[4] = {0};
  int64_t i = 0;
  for (; i + 4 * LANES <= n; i += 4 * LANES)
    for (int j = 0; j < 4; j++) sums[j] = v_fma(v_read(a + i + j * LANES), v_read(b + i + j * LANES), sums[j]);
  for (; MASKED_ENDS && i < n; i += LANES)
    sums[0] = v_fma(v_load_some(a, BSH_F32, i, n - i), v_load_some(b, BSH_F32, i, n - i), sums[0]);
  float sum = v_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < n; i++) sum += a[i] * b[i];
  return sum;
}

/* out[i] += a[i] * scale. */
static void add_scaled(float *const out, const float *const a, const float scale, const int64_t n) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) v_write(out + i, v_fma(v_read(a + i), v_set(scale), v_read(out + i)));
  for (; i < n; i++) out[i] = fmaf(a[i], scale, out[i]);
}

static void decode_tile(const bsh_weight *const weight, const bsh_dtype dtype, const int64_t begin, const int64_t n,
                        float *const tile) {
  decode_run(&(bsh_decode_run){
      .weight = weight, .out = tile, .begin = begin, .end = begin + n, .rows = 1, .dtype = dtype, .as_f32 = true});
}

/* Adds bias, rounds, and writes sums[r * M + m] to y[m, row0 + r]. */
static void store_rows(const bsh_product_args *const args, const int64_t row0, const int64_t n_rows,
                       const float *const sums) {
  for (int64_t r = 0; r < n_rows; r++) {
    const float bias = args->bias ? load_f32(args->bias, args->dtype, row0 + r) : 0.0f;
    for (int64_t m = 0; m < args->M; m++)
      store_f32(args->y, args->dtype, m * args->ldy + row0 + r, sums[r * args->M + m] + bias);
  }
}

static void linear_by_tiles(const bsh_product_args *const args, const int64_t row_begin, const int64_t row_end) {
  float x[BSH_CPU_SMALL_M][TILE_K], w[TILE_K], sums[TILE_ROWS * BSH_CPU_SMALL_M];
  for (int64_t row0 = row_begin; row0 < row_end; row0 += TILE_ROWS) {
    const int64_t n_rows = min_i64(TILE_ROWS, row_end - row0);
    memset(sums, 0, sizeof sums);
    for (int64_t k0 = 0; k0 < args->K; k0 += TILE_K) {
      const int64_t n = min_i64(TILE_K, args->K - k0);
      for (int64_t m = 0; m < args->M; m++)
        convert_to_f32((const char *)args->x + (m * args->ldx + k0) * dtype_size(args->dtype), args->dtype, x[m], n);
      for (int64_t r = 0; r < n_rows; r++) {
        decode_tile(&args->weight, args->dtype, (row0 + r) * args->K + k0, n, w);
        for (int64_t m = 0; m < args->M; m++) sums[r * args->M + m] += dot(x[m], w, n);
      }
    }
    store_rows(args, row0, n_rows, sums);
  }
}

static void dgrad_by_tiles(const bsh_product_args *const args, const int64_t column_begin, const int64_t column_end) {
  float sums[BSH_CPU_SMALL_M][TILE_K], w[TILE_K];
  for (int64_t k0 = column_begin; k0 < column_end; k0 += TILE_K) {
    const int64_t n = min_i64(TILE_K, column_end - k0);
    memset(sums, 0, sizeof sums);
    for (int64_t row = 0; row < args->N; row++) {
      decode_tile(&args->weight, args->dtype, row * args->K + k0, n, w);
      for (int64_t m = 0; m < args->M; m++)
        add_scaled(sums[m], w, load_f32(args->x, args->dtype, m * args->ldx + row), n);
    }
    for (int64_t m = 0; m < args->M; m++)
      convert_from_f32(sums[m], args->dtype, (char *)args->y + (m * args->ldy + k0) * dtype_size(args->dtype), n);
  }
}

#endif
