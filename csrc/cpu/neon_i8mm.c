/* cpu/neon_i8mm.c - products of int8 codes with the matrix products of Armv8.6: smmla adds the products of two rows of
 * 8 codes with two others to 2 x 2 int32, without saturation. Every sum is right modulo 2^32, for any codes.
 *
 * An operand is 8 columns of a pair of rows. A tile of 8 rows of a and 8 of b takes 16 smmla and 8 loads for 8 columns,
 * a seventh of the instructions that products of int16 take, and half of those of sdot. */
#include "cpu/isa/neon.h"

enum { WIDTH = 8, PAIRS = 4, ROWS = 2 * PAIRS, FEW = 6, STEPS = 64, GROUPS = BSH_INT8_PANEL / ROWS };

/* Per thread: [step][pair of rows]. */
typedef struct {
  int8x16_t b[GROUPS][STEPS][PAIRS];
  int8x16_t a[STEPS][PAIRS];
} pair_scratch;

_Static_assert(sizeof(pair_scratch) <= BSH_INT8_SCRATCH, "the scratch memory of a thread");

/* 8 codes from column k on of a row of n; zeros behind them, and where there is no such row. */
ALWAYS_INLINE int8x8_t eight(const int8_t *const row, const int64_t k, const int64_t n, const bool exists) {
  int8_t codes[WIDTH] = {0};
  if (exists) memcpy(codes, row + k, (size_t)min_i64(WIDTH, n - k));
  return vld1_s8(codes);
}

/* Columns [0, n) of `rows` rows, K apart; at most ROWS of them. */
static void copy_pairs(const int8_t *const codes, const int64_t rows, const int64_t K, const int64_t n,
                       int8x16_t (*const to)[PAIRS]) {
  for (int64_t k = 0; k < n; k += WIDTH)
    for (int pair = 0; pair < PAIRS; pair++) {
      const int8_t *const row = codes + 2 * pair * K;
      to[k / WIDTH][pair] =
          k + WIDTH <= n && 2 * pair + 1 < rows
              ? vcombine_s8(vld1_s8(row + k), vld1_s8(row + K + k))
              : vcombine_s8(eight(row, k, n, 2 * pair < rows), eight(row + K, k, n, 2 * pair + 1 < rows));
    }
}

/* Not the intrinsic, as in neon_dot.c. */
ALWAYS_INLINE int32x4_t multiply(int32x4_t sums, const int8x16_t a, const int8x16_t b) {
  __asm__(".arch armv8.2-a+i8mm\n\tsmmla %0.4s, %1.16b, %2.16b" : "+w"(sums) : "w"(a), "w"(b));
  return sums;
}

/* The first `columns` of 8 sums of a row, as the `first` chunk or added. */
ALWAYS_INLINE void store_sums(int32_t *const out, const int32x4_t sums[2], const int64_t columns, const bool first) {
  uint32_t all[ROWS], before[ROWS] = {0};
  memcpy(all, sums, sizeof all);
  if (!first) memcpy(before, out, (size_t)columns * sizeof before[0]);
  UNROLL for (int j = 0; j < ROWS; j++) all[j] += before[j];
  memcpy(out, all, (size_t)columns * sizeof all[0]);
}

/* The sums of `rows` rows of a and `columns` rows of b. */
ALWAYS_INLINE void multiply_tile(const int8x16_t (*const a)[PAIRS], const int8x16_t (*const b)[PAIRS],
                                 const int64_t steps, int32_t *const out, const int64_t ld, const int64_t rows,
                                 const int64_t columns, const bool first) {
  int32x4_t sums[PAIRS][PAIRS]; /* a0 b0, a0 b1, a1 b0, a1 b1 */
  UNROLL for (int i = 0; i < PAIRS; i++) UNROLL for (int j = 0; j < PAIRS; j++) sums[i][j] = vdupq_n_s32(0);
  for (int64_t step = 0; step < steps; step++)
    UNROLL for (int i = 0; i < PAIRS; i++) UNROLL for (int j = 0; j < PAIRS; j++) sums[i][j] =
        multiply(sums[i][j], a[step][i], b[step][j]);
  UNROLL for (int i = 0; i < PAIRS; i++) {
    int32x4_t even[2], odd[2];
    UNROLL for (int j = 0; j < 2; j++) {
      const int64x2_t left = vreinterpretq_s64_s32(sums[i][2 * j]), right = vreinterpretq_s64_s32(sums[i][2 * j + 1]);
      even[j] = vreinterpretq_s32_s64(vzip1q_s64(left, right));
      odd[j] = vreinterpretq_s32_s64(vzip2q_s64(left, right));
    }
    if (2 * i < rows) store_sums(out + 2 * i * ld, even, columns, first);
    if (2 * i + 1 < rows) store_sums(out + (2 * i + 1) * ld, odd, columns, first);
  }
}

/* Columns [k0, k0 + n) of all rows. */
static void multiply_pairs(pair_scratch *const own, const bsh_product_int8_args *const args, const int64_t k0,
                           const int64_t n, const int64_t ld) {
  for (int64_t j = 0; j < args->N; j += ROWS)
    copy_pairs(args->b + j * args->K + k0, args->N - j, args->K, n, own->b[j / ROWS]);
  for (int64_t m = 0; m < args->M; m += ROWS) {
    copy_pairs(args->a + m * args->K + k0, args->M - m, args->K, n, own->a);
    for (int64_t j = 0; j < args->N; j += ROWS)
      multiply_tile((const int8x16_t(*)[PAIRS])own->a, (const int8x16_t(*)[PAIRS])own->b[j / ROWS], divide_up(n, WIDTH),
                    args->sums + m * ld + j, ld, args->M - m, min_i64(ROWS, args->N - j), k0 == 0);
  }
}

/* Few rows of a do not repay a copy of b: they are left to sdot. */
void bsh_cpu_neon_i8mm_product(const bsh_product_int8_args *const args, const int64_t ld, void *const scratch) {
  if (args->M <= FEW) {
    bsh_cpu_neon_dot_product(args, ld, scratch);
    return;
  }
  for (int64_t k0 = 0; k0 < args->K; k0 += STEPS * WIDTH)
    multiply_pairs(scratch, args, k0, min_i64(STEPS * WIDTH, args->K - k0), ld);
}
