/* cpu/int8_dgrad.inc.h - dx = dy W for int8 weights, in vectors of any width. Included by cpu/int8.inc.h.
 *
 * dy is scaled first, so that codes are multiplied as they are: dx[m, k] = sum over n of (dy[m, n] absmax[n] / 127)
 * codes[n, k]. */
#ifndef BSH_CPU_INT8_DGRAD_INC_H
#define BSH_CPU_INT8_DGRAD_INC_H

/* Rows of dy, and vectors of columns of W, whose sums stay in registers. */
enum { EACH_DY = REGISTERS == 32 ? 6 : 4, WIDE = REGISTERS == 32 ? 4 : 2 };

/* ---- the gradient of few rows --------------------------------------------------------------------------------- */

enum { COLUMNS = 512, ROWS = 4 }; /* sums of so many columns stay in the first-level cache; rows of W at a time */

/* sums[k] += the products of ROWS numbers with columns [0, n) of as many rows of W; n is a multiple of LANES. */
ALWAYS_INLINE void add_products(float *const sums, const floats w[ROWS], const float scales[ROWS]) {
  floats sum = v_read(sums);
  UNROLL for (int r = 0; r < ROWS; r++) sum = v_fma(w[r], v_set(scales[r]), sum);
  v_write(sums, sum);
}

static void add_tile(const int8_t *const codes, const int64_t K, const int64_t n, const int64_t M,
                     const float (*const scales)[ROWS], float (*const sums)[COLUMNS]) {
  for (int64_t k = 0; k < n; k += LANES) {
    floats w[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) w[r] = v_load_codes(codes + r * K + k);
    for (int64_t m = 0; m < M; m++) add_products(sums[m] + k, w, scales[m]);
  }
}

/* The same for what does not fill ROWS rows and LANES columns. */
static void add_ragged(const int8_t *const codes, const int64_t K, const int64_t n, const int64_t rows, const int64_t M,
                       const float (*const scales)[ROWS], float (*const sums)[COLUMNS]) {
  int8_t padded[ROWS * COLUMNS] = {0};
  for (int64_t r = 0; r < rows; r++) memcpy(padded + r * COLUMNS, codes + r * K, (size_t)n);
  add_tile(padded, COLUMNS, divide_up(n, LANES) * LANES, M, scales, sums);
}

static void linear_dgrad_lanes(const bsh_product_args *const args, const int64_t k_begin, const int64_t k_end) {
  float sums[BSH_INT8_FEW_DY][COLUMNS] __attribute__((aligned(64)));
  for (int64_t k0 = k_begin; k0 < k_end; k0 += COLUMNS) {
    const int64_t n = min_i64(COLUMNS, k_end - k0);
    memset(sums, 0, sizeof sums);
    for (int64_t row = 0; row < args->N; row += ROWS) {
      const int64_t rows = min_i64(ROWS, args->N - row);
      float scales[BSH_INT8_FEW_DY][ROWS] = {0};
      for (int64_t m = 0; m < args->M; m++)
        for (int64_t r = 0; r < rows; r++)
          scales[m][r] = load_f32(args->x, args->dtype, m * args->ldx + row + r) *
                         (args->weight.scales.absmax[row + r] * BSH_INT8_UNIT);
      const int8_t *const codes = int8_codes(&args->weight) + row * args->K + k0;
      if (rows == ROWS && n % LANES == 0) add_tile(codes, args->K, n, args->M, scales, sums);
      else add_ragged(codes, args->K, n, rows, args->M, scales, sums);
    }
    for (int64_t m = 0; m < args->M; m++)
      bsh_cpu()->from_f32(sums[m], args->dtype, (char *)args->y + (m * args->K + k0) * dtype_size(args->dtype), n);
  }
}

/* ---- the gradient of many rows -------------------------------------------------------------------------------- */

enum { PANEL_ROWS = 1024 }; /* rows of W whose columns of a panel are in the second-level cache, as fp32 */

/* Per thread. */
typedef struct {
  float w[PANEL_ROWS][BSH_INT8_COLUMNS];
  float sums[BSH_INT8_DGRAD_ROWS][BSH_INT8_COLUMNS];
} panel_scratch;

_Static_assert(sizeof(panel_scratch) <= BSH_INT8_SCRATCH, "the scratch memory of a thread");
_Static_assert(BSH_INT8_DGRAD_GROUP % EACH_DY == 0 && BSH_INT8_COLUMNS % (WIDE * LANES) == 0, "whole tiles");

/* Columns [k0, k0 + n) of `rows` rows of W from row0 on, zeros behind them. */
static void decode_panel(const bsh_product_args *const args, const int64_t k0, const int64_t n, const int64_t row0,
                         const int64_t rows, panel_scratch *const own) {
  for (int64_t r = 0; r < rows; r++) {
    const int8_t *codes = int8_codes(&args->weight) + (row0 + r) * args->K + k0;
    int8_t padded[BSH_INT8_COLUMNS] = {0};
    if (row0 + r + 8 < args->N) __builtin_prefetch(codes + 8 * args->K); /* no hardware follows pieces of rows */
    if (n < BSH_INT8_COLUMNS) codes = memcpy(padded, codes, (size_t)n);
    for (int64_t k = 0; k < BSH_INT8_COLUMNS; k += LANES) v_write(&own->w[r][k], v_load_codes(codes + k));
  }
}

/* EACH_DY rows of dy, scaled, [rows][BSH_INT8_DGRAD_GROUP], with `rows` rows of W: added to sums. */
ALWAYS_INLINE void add_panel(const float *dy, const float (*w)[BSH_INT8_COLUMNS], const int64_t rows,
                             float (*const sums)[BSH_INT8_COLUMNS]) {
  floats sum[EACH_DY][WIDE];
  UNROLL for (int m = 0; m < EACH_DY; m++) UNROLL for (int j = 0; j < WIDE; j++) sum[m][j] =
      v_read(&sums[m][j * LANES]);
  for (int64_t r = 0; r < rows; r++, w++, dy += BSH_INT8_DGRAD_GROUP) {
    floats of_w[WIDE]; /* loaded once, not by each instruction */
    UNROLL for (int j = 0; j < WIDE; j++) of_w[j] = v_hold(v_read(&w[0][j * LANES]));
    UNROLL for (int m = 0; m < EACH_DY; m++) {
      const floats of_dy = v_hold(v_set(dy[m]));
      UNROLL for (int j = 0; j < WIDE; j++) sum[m][j] = v_fma(of_w[j], of_dy, sum[m][j]);
    }
  }
  UNROLL for (int m = 0; m < EACH_DY; m++) UNROLL for (int j = 0; j < WIDE; j++)
      v_write(&sums[m][j * LANES], sum[m][j]);
}

static void add_groups(const float *const dy, const int64_t N, const int64_t row0, const int64_t rows, const int64_t M,
                       panel_scratch *const own) {
  for (int64_t group = 0; group * BSH_INT8_DGRAD_GROUP < M; group++)
    for (int64_t m = 0; m < BSH_INT8_DGRAD_GROUP; m += EACH_DY)
      for (int64_t k = 0; k < BSH_INT8_COLUMNS; k += WIDE * LANES)
        add_panel(dy + (group * N + row0) * BSH_INT8_DGRAD_GROUP + m,
                  (const float (*)[BSH_INT8_COLUMNS])(own->w[0] + k), rows,
                  (float (*)[BSH_INT8_COLUMNS])(own->sums[group * BSH_INT8_DGRAD_GROUP + m] + k));
}

static void dgrad_panel_lanes(const bsh_product_args *const args, const float *const dy, const int64_t k0,
                              const int64_t n, void *const scratch) {
  panel_scratch *const own = scratch;
  memset(own->sums, 0, sizeof own->sums);
  for (int64_t row = 0; row < args->N; row += PANEL_ROWS) {
    const int64_t rows = min_i64(PANEL_ROWS, args->N - row);
    decode_panel(args, k0, n, row, rows, own);
    add_groups(dy, args->N, row, rows, args->M, own);
  }
  for (int64_t m = 0; m < args->M; m++)
    bsh_cpu()->from_f32(own->sums[m], args->dtype, (char *)args->y + (m * args->K + k0) * dtype_size(args->dtype), n);
}

#endif
