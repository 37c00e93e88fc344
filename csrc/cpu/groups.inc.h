/* cpu/groups.inc.h - linear_4bit for few rows and its gradient where K is a multiple of 64, in vectors of any width
 * (cpu/isa/vectors.h); all else by tiles.
 *
 * 64 elements of a row, a group, have 32 bytes and share one scale; or they have two or four scales of a byte, for each
 * of whose 256 values a table is kept. x is brought once into the order in which an instruction set decodes a group
 * ("permuted"), instead of every row of W into the order of x. */
#ifndef BSH_CPU_GROUPS_INC_H
#define BSH_CPU_GROUPS_INC_H

#include "cpu/tiles.inc.h"

/* A chunk of x stays in the first-level cache, for BLOCK_ROWS rows of W; the sums of MOST_M rows of x in registers. */
enum { GROUP = 64, VECTORS = GROUP / LANES, X_BYTES = 32 << 10, BLOCK_ROWS = 256, MOST_M = REGISTERS / 2 };

ALWAYS_INLINE bool has_whole_groups(const bsh_weight *const weight, const int64_t K) {
  return K % GROUP == 0 && weight->blocksize >= GROUP;
}

/* Blocks within groups. Formats that have them have one number as the second level of their scales. */
ALWAYS_INLINE bool has_fine_groups(const bsh_weight *const weight, const int64_t K) {
  return K % GROUP == 0 && weight->blocksize < GROUP && weight->format == BSH_E2M1 && weight->scales.absmax == NULL;
}

static void make_block_tables(const bsh_weight *const weight, const bsh_dtype dtype, block_table tables[256]) {
  floats units[HALVES], values[HALVES];
  load_units(BSH_E2M1, units);
  for (int byte = 0; byte < 256; byte++) {
    values_of_byte(units, &weight->scales, byte, dtype, values);
    store_block_table(values, &tables[byte]);
  }
}

/* Tables of the quarters of a group whose first block has the scale code[0]. */
ALWAYS_INLINE void find_tables(const block_table *const tables, const uint8_t *const code, const int shift,
                               const block_table *quarters[4]) {
  UNROLL for (int q = 0; q < 4; q++) quarters[q] = &tables[code[16 * q >> shift]];
}

/* What a group is looked up in whose scale is ordinary. */
ALWAYS_INLINE group_table group_table_of(const floats units[HALVES], const float scale, const bsh_dtype dtype) {
  floats scaled[HALVES];
  for (int half = 0; half < HALVES; half++) scaled[half] = units[half] * v_set(scale);
  return make_group_table(scaled, dtype);
}

/* Columns [k0, k0 + n) of rows [m0, m0 + M) of x -> out[group][vector][m][lane]. */
static void permute_x(const bsh_product_args *const args, const int64_t m0, const int64_t M, const int64_t k0,
                      const int64_t n, float *const out) {
  float natural[GROUP];
  for (int64_t m = 0; m < M; m++)
    for (int64_t group = 0; group < n / GROUP; group++) {
      const int64_t i = (m0 + m) * args->ldx + k0 + group * GROUP;
      convert_to_f32((const char *)args->x + i * dtype_size(args->dtype), args->dtype, natural, GROUP);
      float *const to = out + group * M * GROUP + m * LANES;
      UNROLL for (int j = 0; j < VECTORS; j++) UNROLL for (int lane = 0; lane < LANES; lane++)
          to[j * M * LANES + lane] = natural[group_element(j, lane)];
    }
}

/* ordinary_scale of each. */
#ifndef all_ordinary
static bool all_ordinary(const float *const scales, const int64_t n) {
  int odd = 0;
  for (int64_t i = 0; i < n; i++) odd |= !(fabsf(scales[i]) >= 0x1p-100f) | !(fabsf(scales[i]) <= FLT_MAX);
  return !odd;
}
#endif

/* Independent sums per row of x, to hide the latency of an FMA. */
ALWAYS_INLINE int count_ways(const int M) { return M <= REGISTERS / 8 ? 4 : M <= REGISTERS / 4 ? 2 : 1; }

ALWAYS_INLINE void clear(floats *const accumulators, const int M) {
  const int n = M * count_ways(M);
  UNROLL for (int i = 0; i < n; i++) accumulators[i] = v_set(0.0f);
}

/* Vector j of a group times M rows of x. */
ALWAYS_INLINE void multiply_vector(const floats w, const float *const x, floats *const accumulators, const int j,
                                   const int M) {
  UNROLL for (int m = 0; m < M; m++) {
    floats *const sum = &accumulators[m * count_ways(M) + j % count_ways(M)];
    *sum = v_fma(w, v_read(x + (j * M + m) * LANES), *sum);
  }
}

ALWAYS_INLINE void add_accumulators(const floats *const accumulators, float *const sums, const int M) {
  const int ways = count_ways(M);
  floats totals[MOST_M];
  UNROLL for (int m = 0; m < MOST_M; m++) {
    totals[m] = m < M ? accumulators[m * ways] : v_set(0.0f);
    UNROLL for (int i = 1; m < M && i < ways; i++) totals[m] += accumulators[m * ways + i];
  }
  add_lane_sums(totals, M, sums);
}

/* One row of W times M rows of x over n columns: adds to sums[m]. False where a scale is not ordinary: the sums are
 * wrong. The table of a group is made one turn ahead, which hides how long that takes. */
ALWAYS_INLINE bool multiply_row(const bsh_product_args *const args, const int64_t begin, const int64_t n,
                                const float *x, float *const sums, const bsh_dtype dtype, const int M) {
  const int shift = __builtin_ctzll((uint64_t)args->weight.blocksize);
  const uint8_t *packed = args->weight.packed + begin / 2;
  bool ordinary = true;
  floats units[HALVES], accumulators[MOST_M * 4];
  load_units(args->weight.format, units);
  clear(accumulators, M);
  for (int64_t i = 0; i < n;) {
    float buffer[SCALES];
    const int64_t n_now = min_i64(n - i, SCALES * GROUP);
    const int64_t block0 = (begin + i) >> shift, n_blocks = ((begin + i + n_now - 1) >> shift) - block0 + 1;
    const float *const scales = load_scales(&args->weight.scales, block0, n_blocks, buffer);
    ordinary = ordinary && all_ordinary(scales, n_blocks);
    group_table next = group_table_of(units, scales[0], dtype);
    for (const int64_t end = i + n_now; i < end; packed += GROUP / 2, x += M * GROUP) {
      const group_table table = next;
      const group_codes codes = load_group(packed);
      i += GROUP;
      next = group_table_of(units, scales[((begin + min_i64(i, end - 1)) >> shift) - block0], dtype);
      UNROLL for (int j = 0; j < VECTORS; j++)
          multiply_vector(decode_vector(&codes, &table, dtype, j), x, accumulators, j, M);
    }
  }
  add_accumulators(accumulators, sums, M);
  return ordinary;
}

/* The same of fine groups. */
ALWAYS_INLINE bool multiply_fine_row(const bsh_product_args *const args, const block_table *const tables,
                                     const int64_t begin, const int64_t n, const float *x, float *const sums,
                                     const bsh_dtype dtype, const int M) {
  const int shift = __builtin_ctzll((uint64_t)args->weight.blocksize);
  const uint8_t *packed = args->weight.packed + begin / 2, *code = args->weight.scales.absmax_code + (begin >> shift);
  floats accumulators[MOST_M * 4];
  clear(accumulators, M);
  for (const uint8_t *const end = packed + n / 2; packed < end; packed += GROUP / 2, code += GROUP >> shift) {
    const block_table *quarters[4];
    find_tables(tables, code, shift, quarters);
    const group_codes codes = load_group(packed);
    UNROLL for (int j = 0; j < VECTORS; j++) {
      const group_table table = join_tables(quarters, dtype, j);
      multiply_vector(decode_vector(&codes, &table, dtype, j), x, accumulators, j, M);
    }
    x += M * GROUP;
  }
  add_accumulators(accumulators, sums, M);
  return has_one_factor(&args->weight, shift, begin, n);
}

/* X(M) for every M of a small product: the kernels below are compiled once for each. */
#define EACH_M(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15) X(16)
_Static_assert(BSH_CPU_SMALL_M == 16, "EACH_M lists every small M");

/* tables: of fine groups, else NULL. */
static bool multiply_row_any(const bsh_product_args *const args, const block_table *const tables, const int64_t M,
                             const int64_t begin, const int64_t n, const float *const x, float *const sums) {
  const bool bf16 = BF16_GROUPS && args->dtype == BSH_BF16;
  switch (M) {
#define CASE(M)                                                                                                        \
  case M:                                                                                                              \
    if (M > MOST_M) break;                                                                                             \
    if (tables && bf16) return multiply_fine_row(args, tables, begin, n, x, sums, BSH_BF16, M);                        \
    if (tables) return multiply_fine_row(args, tables, begin, n, x, sums, BSH_F32, M);                                 \
    if (bf16) return multiply_row(args, begin, n, x, sums, BSH_BF16, M);                                               \
    return multiply_row(args, begin, n, x, sums, args->dtype, M);
    EACH_M(CASE)
#undef CASE
  }
  return false;
}

static void linear_by_groups(const bsh_product_args *const args, const int64_t row_begin, const int64_t row_end) {
  const bool fine = has_fine_groups(&args->weight, args->K);
  if (!has_whole_groups(&args->weight, args->K) && !fine) {
    linear_by_tiles(args, row_begin, row_end);
    return;
  }
  block_table tables[256];
  if (fine) make_block_tables(&args->weight, args->dtype, tables);
  float x[X_BYTES / 4] __attribute__((aligned(64)));
  float sums[BLOCK_ROWS * BSH_CPU_SMALL_M];
  const int64_t M = args->M, step = X_BYTES / 4 / M / GROUP * GROUP;
  const int64_t at_once = divide_up(M, divide_up(M, MOST_M));
  int64_t loaded = -1;
  for (int64_t row0 = row_begin; row0 < row_end; row0 += BLOCK_ROWS) {
    const int64_t n_rows = min_i64(BLOCK_ROWS, row_end - row0);
    bool ordinary[BLOCK_ROWS];
    memset(sums, 0, sizeof sums);
    memset(ordinary, true, sizeof ordinary);
    for (int64_t k0 = 0; k0 < args->K; k0 += step) {
      const int64_t n = min_i64(step, args->K - k0);
      for (int64_t m = 0; m < M; m += at_once) {
        const int64_t n_m = min_i64(at_once, M - m);
        if (loaded != k0) permute_x(args, m, n_m, k0, n, x + m * n);
        for (int64_t r = 0; r < n_rows; r++)
          ordinary[r] &= multiply_row_any(args, fine ? tables : NULL, n_m, (row0 + r) * args->K + k0, n, x + m * n,
                                          sums + r * M + m);
      }
      loaded = k0;
    }
    store_rows(args, row0, n_rows, sums);
    for (int64_t r = 0; r < n_rows; r++)
      if (!ordinary[r]) linear_by_tiles(args, row0 + r, row0 + r + 1);
  }
}

enum { DGRAD_ROWS = 4, DGRAD_FLOATS = 8192 };

/* n_rows rows of W of one group times dy, into sums[m][vector][lane]; returns where the next group's sums are. */
ALWAYS_INLINE float *add_group(floats w[DGRAD_ROWS][VECTORS], float dy[DGRAD_ROWS][BSH_CPU_SMALL_M], float *sums,
                               const int64_t M, const int n_rows) {
  for (int64_t m = 0; m < M; m++, sums += GROUP) {
    floats by[DGRAD_ROWS];
    for (int r = 0; r < n_rows; r++) by[r] = v_set(dy[r][m]);
    for (int j = 0; j < VECTORS; j++) {
      floats sum = v_read(sums + LANES * j);
      for (int r = 0; r < n_rows; r++) sum = v_fma(w[r][j], by[r], sum);
      v_write(sums + LANES * j, sum);
    }
  }
  return sums;
}

ALWAYS_INLINE void load_dy(const bsh_product_args *const args, const int64_t row, float dy[DGRAD_ROWS][BSH_CPU_SMALL_M],
                           const int n_rows) {
  for (int r = 0; r < n_rows; r++)
    for (int64_t m = 0; m < args->M; m++) dy[r][m] = load_f32(args->x, args->dtype, m * args->ldx + row + r);
}

/* Rows [row, row + n_rows) of W, columns [k0, k0 + n), times dy, into sums[group][m][vector][lane]. False where a scale
 * is not ordinary. */
ALWAYS_INLINE bool add_weight_rows(const bsh_product_args *const args, const int64_t row, const int64_t k0,
                                   const int64_t n, float *sums, const bsh_dtype dtype, const int n_rows) {
  float dy[DGRAD_ROWS][BSH_CPU_SMALL_M], buffers[DGRAD_ROWS][SCALES];
  const float *scales[DGRAD_ROWS];
  int64_t block0[DGRAD_ROWS];
  bool ordinary = true;
  floats units[HALVES];
  load_units(args->weight.format, units);
  const int shift = __builtin_ctzll((uint64_t)args->weight.blocksize);
  load_dy(args, row, dy, n_rows);
  for (int r = 0; r < n_rows; r++) {
    const int64_t begin = (row + r) * args->K + k0;
    block0[r] = begin >> shift;
    const int64_t n_blocks = ((begin + n - 1) >> shift) - block0[r] + 1;
    scales[r] = load_scales(&args->weight.scales, block0[r], n_blocks, buffers[r]);
    ordinary = ordinary && all_ordinary(scales[r], n_blocks);
  }
  for (int64_t k = k0; k < k0 + n; k += GROUP) {
    floats w[DGRAD_ROWS][VECTORS];
    UNROLL for (int r = 0; r < n_rows; r++) {
      const int64_t begin = (row + r) * args->K + k;
      const group_table table = group_table_of(units, scales[r][(begin >> shift) - block0[r]], dtype);
      const group_codes codes = load_group(args->weight.packed + begin / 2);
      UNROLL for (int j = 0; j < VECTORS; j++) w[r][j] = decode_vector(&codes, &table, dtype, j);
    }
    sums = add_group(w, dy, sums, args->M, n_rows);
  }
  return ordinary;
}

/* The same of fine groups. */
ALWAYS_INLINE bool add_fine_rows(const bsh_product_args *const args, const block_table *const tables, const int64_t row,
                                 const int64_t k0, const int64_t n, float *sums, const bsh_dtype dtype,
                                 const int n_rows) {
  float dy[DGRAD_ROWS][BSH_CPU_SMALL_M];
  bool one_factor = true;
  const int shift = __builtin_ctzll((uint64_t)args->weight.blocksize);
  load_dy(args, row, dy, n_rows);
  for (int r = 0; r < n_rows; r++) one_factor &= has_one_factor(&args->weight, shift, (row + r) * args->K + k0, n);
  for (int64_t k = k0; k < k0 + n; k += GROUP) {
    floats w[DGRAD_ROWS][VECTORS];
    UNROLL for (int r = 0; r < n_rows; r++) {
      const int64_t begin = (row + r) * args->K + k;
      const block_table *quarters[4];
      find_tables(tables, args->weight.scales.absmax_code + (begin >> shift), shift, quarters);
      const group_codes codes = load_group(args->weight.packed + begin / 2);
      UNROLL for (int j = 0; j < VECTORS; j++) {
        const group_table table = join_tables(quarters, dtype, j);
        w[r][j] = decode_vector(&codes, &table, dtype, j);
      }
    }
    sums = add_group(w, dy, sums, args->M, n_rows);
  }
  return one_factor;
}

static void store_dx(const bsh_product_args *const args, const int64_t k0, const int64_t n, const float *const sums) {
  float natural[GROUP];
  for (int64_t group = 0; group < n / GROUP; group++)
    for (int64_t m = 0; m < args->M; m++) {
      const float *const from = sums + (group * args->M + m) * GROUP;
      for (int j = 0; j < VECTORS; j++)
        for (int lane = 0; lane < LANES; lane++) natural[group_element(j, lane)] = from[LANES * j + lane];
      char *const row = (char *)args->y + m * args->ldy * dtype_size(args->dtype);
      convert_from_f32(natural, args->dtype, row + (k0 + group * GROUP) * dtype_size(args->dtype), GROUP);
    }
}

/* tables: of fine groups, else NULL. */
ALWAYS_INLINE bool add_rows(const bsh_product_args *const args, const block_table *const tables, const int64_t row,
                            const int64_t k0, const int64_t n, float *const sums, const bsh_dtype dtype,
                            const int n_rows) {
  return tables ? add_fine_rows(args, tables, row, k0, n, sums, dtype, n_rows)
                : add_weight_rows(args, row, k0, n, sums, dtype, n_rows);
}

ALWAYS_INLINE void dgrad_of_dtype(const bsh_product_args *const args, const block_table *const tables,
                                  const int64_t column_begin, const int64_t column_end, const bsh_dtype dtype) {
  float sums[DGRAD_FLOATS] __attribute__((aligned(64)));
  const int64_t step = min_i64(DGRAD_FLOATS / args->M / GROUP * GROUP, SCALES * GROUP - GROUP);
  for (int64_t k0 = column_begin; k0 < column_end; k0 += step) {
    const int64_t n = min_i64(step, column_end - k0);
    memset(sums, 0, sizeof sums);
    int64_t row = 0;
    bool ordinary = true;
    for (; ordinary && row + DGRAD_ROWS <= args->N; row += DGRAD_ROWS)
      ordinary = add_rows(args, tables, row, k0, n, sums, dtype, DGRAD_ROWS);
    for (; ordinary && row < args->N; row++) ordinary = add_rows(args, tables, row, k0, n, sums, dtype, 1);
    if (ordinary) store_dx(args, k0, n, sums);
    else dgrad_by_tiles(args, k0, k0 + n); /* of the same bits: whose columns a chunk has depends on the threads */
  }
}

static void dgrad_by_fine_groups(const bsh_product_args *const args, const int64_t column_begin,
                                 const int64_t column_end) {
  block_table tables[256];
  make_block_tables(&args->weight, args->dtype, tables);
  if (BF16_GROUPS && args->dtype == BSH_BF16) dgrad_of_dtype(args, tables, column_begin, column_end, BSH_BF16);
  else dgrad_of_dtype(args, tables, column_begin, column_end, BSH_F32);
}

static void dgrad_by_groups(const bsh_product_args *const args, const int64_t column_begin, const int64_t column_end) {
  if (has_fine_groups(&args->weight, args->K)) dgrad_by_fine_groups(args, column_begin, column_end);
  else if (!has_whole_groups(&args->weight, args->K)) dgrad_by_tiles(args, column_begin, column_end);
  else if (BF16_GROUPS && args->dtype == BSH_BF16) dgrad_of_dtype(args, NULL, column_begin, column_end, BSH_BF16);
  else dgrad_of_dtype(args, NULL, column_begin, column_end, args->dtype);
}

#endif
