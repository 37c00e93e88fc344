/* cpu/int8_product.inc.h - products of int8 codes by tiles of a and b that were copied into the order they are used in.
 *
 * Codes are multiplied as int16. Who multiplies them otherwise defines INT8_OPERANDS before, and
 *   WIDTH, STEPS                      columns that one step multiplies, steps in a chunk
 *   left_operand(codes), right_operand(codes)    WIDTH codes of a, of b, as `multiply` takes them
 *   multiply(sum, a, b)               sum + the products of neighbours in each lane, exact
 *   EXCESS                            what right_operand adds to each code of b; its products are subtracted again
 *
 * Within a chunk of STEPS * WIDTH columns, b is copied as [group of 4 rows][step][4] operands and reused for all rows
 * of a, and a group of rows of a as [step][EACH_ROWS]. Missing rows and columns are zeros of a. */
#ifndef BSH_CPU_INT8_PRODUCT_INC_H
#define BSH_CPU_INT8_PRODUCT_INC_H

#ifndef INT8_OPERANDS
enum { WIDTH = 2 * LANES, STEPS = 32, EXCESS = 0 };
ALWAYS_INLINE ints left_operand(const int8_t *const codes) { return i_load_words(codes); }
ALWAYS_INLINE ints right_operand(const int8_t *const codes) { return i_load_words(codes); }
ALWAYS_INLINE ints multiply(const ints sum, const ints a, const ints b) { return i_multiply_words(sum, a, b); }
#endif

/* EACH_ROWS rows of a at a time, whose EACH_ROWS * GROUP_ROWS sums stay in registers. */
enum { EACH_ROWS = REGISTERS == 32 ? 6 : 3, GROUP_ROWS = 4, GROUPS = BSH_INT8_PANEL / GROUP_ROWS };

static const int8_t zeros[WIDTH];

/* Per thread. */
typedef struct {
  ints b[GROUPS][STEPS][GROUP_ROWS];
  ints a[STEPS][EACH_ROWS];
  int32_t excess[EACH_ROWS]; /* EXCESS times the sum of a row of a */
} product_scratch;

_Static_assert(sizeof(product_scratch) <= BSH_INT8_SCRATCH, "the scratch memory of a thread");

/* Codes [k, k + WIDTH) of a row of n, zeros behind them; all zeros where row is NULL. */
ALWAYS_INLINE const int8_t *step_of(const int8_t *const row, const int64_t k, const int64_t n, int8_t padded[WIDTH]) {
  if (row != NULL && k + WIDTH <= n) return row + k;
  memset(padded, 0, WIDTH);
  if (row != NULL && k < n) memcpy(padded, row + k, (size_t)(n - k));
  return padded;
}

static void copy_b(product_scratch *const own, const bsh_product_int8_args *const args, const int64_t k0,
                   const int64_t n) {
  int8_t padded[WIDTH];
  for (int64_t row = 0; row < divide_up(args->N, GROUP_ROWS) * GROUP_ROWS; row++) {
    const int8_t *const codes = row < args->N ? args->b + row * args->K + k0 : NULL;
    for (int64_t step = 0; step < divide_up(n, WIDTH); step++) {
      if (codes != NULL) __builtin_prefetch(codes + GROUP_ROWS * args->K + step * WIDTH); /* of a row soon to come */
      own->b[row / GROUP_ROWS][step][row % GROUP_ROWS] = right_operand(step_of(codes, step * WIDTH, n, padded));
    }
  }
}

static void copy_a(product_scratch *const own, const bsh_product_int8_args *const args, const int64_t m,
                   const int64_t k0, const int64_t n) {
  int8_t padded[WIDTH];
  for (int64_t row = 0; row < EACH_ROWS; row++) {
    const int8_t *const codes = m + row < args->M ? args->a + (m + row) * args->K + k0 : NULL;
    ints sums[4] = {0};
    int32_t all[4];
    for (int64_t step = 0; step < divide_up(n, WIDTH); step++) {
      const ints a = left_operand(step_of(codes, step * WIDTH, n, padded));
      own->a[step][row] = a;
      if (EXCESS != 0) sums[0] = multiply(sums[0], a, right_operand(zeros)); /* a code 0 there is EXCESS */
    }
    i_reduce4(sums, all);
    own->excess[row] = all[0];
  }
}

/* out[r * ld + j] = the sums of lanes, as `first` chunk or added. */
ALWAYS_INLINE void store_group(const product_scratch *const own, ints (*const sums)[GROUP_ROWS], int32_t *const out,
                               const int64_t ld, const int64_t rows, const int64_t columns, const bool first) {
  UNROLL for (int r = 0; r < EACH_ROWS; r++) {
    uint32_t all[GROUP_ROWS];
    i_reduce4(sums[r], (int32_t *)all);
    if (r >= rows) continue;
    uint32_t before[GROUP_ROWS] = {0};
    if (!first && columns == GROUP_ROWS) memcpy(before, out + r * ld, sizeof before);
    else if (!first) memcpy(before, out + r * ld, (size_t)columns * sizeof before[0]);
    UNROLL for (int j = 0; j < GROUP_ROWS; j++) all[j] += before[j] - (uint32_t)own->excess[r];
    if (columns == GROUP_ROWS) memcpy(out + r * ld, all, sizeof all);
    else memcpy(out + r * ld, all, (size_t)columns * sizeof all[0]);
  }
}

/* EACH_ROWS * 4 sums over `steps` steps. */
ALWAYS_INLINE void multiply_group(const product_scratch *const own, const ints (*const b)[GROUP_ROWS],
                                  const int64_t steps, int32_t *const out, const int64_t ld, const int64_t rows,
                                  const int64_t columns, const bool first) {
  ints sums[EACH_ROWS][GROUP_ROWS] = {0};
  for (int64_t step = 0; step < steps; step++)
    UNROLL for (int r = 0; r < EACH_ROWS; r++) UNROLL for (int j = 0; j < GROUP_ROWS; j++) sums[r][j] =
        multiply(sums[r][j], own->a[step][r], b[step][j]);
  store_group(own, sums, out, ld, rows, columns, first);
}

/* The same with 4 whole rows of b where they are: no other rows of a want them again. `most` is a constant. */
ALWAYS_INLINE void multiply_rows_once(const product_scratch *const own, const int most, const int8_t *const b,
                                      const int64_t K, const int64_t steps, int32_t *const out, const int64_t ld,
                                      const int64_t rows, const bool first) {
  ints sums[EACH_ROWS][GROUP_ROWS] = {0};
  for (int64_t step = 0; step < steps; step++) UNROLL for (int j = 0; j < GROUP_ROWS; j++) {
      const ints of_b = right_operand(b + j * K + step * WIDTH);
      __builtin_prefetch(b + (j + GROUP_ROWS) * K + step * WIDTH);
      UNROLL for (int r = 0; r < most; r++) sums[r][j] = multiply(sums[r][j], own->a[step][r], of_b);
    }
  store_group(own, sums, out, ld, rows, GROUP_ROWS, first);
}

static void multiply_once(const product_scratch *const own, const int8_t *const b, const int64_t K, const int64_t steps,
                          int32_t *const out, const int64_t ld, const int64_t rows, const bool first) {
  if (rows == 1) multiply_rows_once(own, 1, b, K, steps, out, ld, rows, first);
  else multiply_rows_once(own, EACH_ROWS, b, K, steps, out, ld, rows, first);
}

/* Columns [k0, k0 + n) of all rows. */
static void multiply_chunk(product_scratch *const own, const bsh_product_int8_args *const args, const int64_t k0,
                           const int64_t n, const int64_t ld) {
  const int64_t steps = divide_up(n, WIDTH);
  const bool once = args->M <= EACH_ROWS && n % WIDTH == 0 && args->N % GROUP_ROWS == 0;
  if (!once) copy_b(own, args, k0, n);
  for (int64_t m = 0; m < args->M; m += EACH_ROWS) {
    const int64_t rows = min_i64(EACH_ROWS, args->M - m);
    copy_a(own, args, m, k0, n);
    for (int64_t j = 0; j < args->N; j += GROUP_ROWS) {
      int32_t *const out = args->sums + m * ld + j;
      if (once) multiply_once(own, args->b + j * args->K + k0, args->K, steps, out, ld, rows, k0 == 0);
      else multiply_group(own, own->b[j / GROUP_ROWS], steps, out, ld, rows, min_i64(GROUP_ROWS, args->N - j), k0 == 0);
    }
  }
}

/* Sums of at most BSH_INT8_PANEL rows of b. */
static void product_by_tiles(const bsh_product_int8_args *const args, const int64_t ld, void *const scratch) {
  for (int64_t k0 = 0; k0 < args->K; k0 += STEPS * WIDTH)
    multiply_chunk(scratch, args, k0, min_i64(STEPS * WIDTH, args->K - k0), ld);
}

#endif
