/* cpu/avx512_vnni.c - products of int8 codes with AVX-512 VNNI: vpdpbusd adds four products of an unsigned and a
 * signed byte to an int32, without saturation. The unsigned one is a code of b plus 128: its bits with the sign
 * inverted. Every sum is right modulo 2^32, for any codes.
 *
 * Few rows of a take the tiles of cpu/int8_product.inc.h. For many, b is copied as [64 rows][4 columns], so that a lane
 * is a row of b, four codes of a go to all lanes, and no sum has lanes to be added up. */
#include "cpu/isa/avx512.h"

#if !defined(__AVX512VNNI__)
#error "compile with -mavx512vnni too"
#endif

#define INT8_OPERANDS
enum { WIDTH = 64, STEPS = 64, EXCESS = 128 };

ALWAYS_INLINE ints left_operand(const int8_t *const codes) { return (ints)v_read(codes); }
ALWAYS_INLINE ints right_operand(const int8_t *const codes) { return left_operand(codes) ^ (int32_t)0x80808080; }
/* Not the intrinsic: gcc 12 copies the sum before and after it, and runs out of registers. */
ALWAYS_INLINE ints multiply(ints sum, const ints a, const ints b) {
  __asm__("vpdpbusd %1, %2, %0" : "+v"(sum) : "vm"(a), "v"(b));
  return sum;
}
#include "cpu/int8_product.inc.h"

/* ---- many rows of a ------------------------------------------------------------------------------------------- */

enum {
  MANY = 128,        /* rows of a from which copying b so pays */
  LANE_ROWS = LANES, /* rows of b in a vector */
  VECTORS = 4,       /* vectors of rows of b at a time: EACH_ROWS * VECTORS sums stay in registers */
  BLOCK_ROWS = LANE_ROWS * VECTORS,
  DEPTH = 4096,      /* columns that are copied at a time */
  QUADS = DEPTH / 4, /* of which four make one step */
};

/* Per thread: codes of b plus 128, [block][quad][vector][row][4]. */
typedef struct {
  ints b[BSH_INT8_PANEL / BLOCK_ROWS][QUADS][VECTORS];
} lanes_scratch;

_Static_assert(sizeof(lanes_scratch) <= BSH_INT8_SCRATCH, "the scratch memory of a thread");
_Static_assert(BSH_INT8_PANEL % BLOCK_ROWS == 0, "whole blocks");

/* rows[i] = 16 quads of row i  ->  rows[i] = quad i of 16 rows. */
ALWAYS_INLINE void transpose_quads(__m512i rows[16]) {
  __m512i pairs[16], fours[16];
  UNROLL for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  UNROLL for (int i = 0; i < 16; i += 4) UNROLL for (int j = 0; j < 2; j++) {
    fours[i + 2 * j] = _mm512_unpacklo_epi64(pairs[i + j], pairs[i + j + 2]);
    fours[i + 2 * j + 1] = _mm512_unpackhi_epi64(pairs[i + j], pairs[i + j + 2]);
  }
  UNROLL for (int j = 0; j < 4; j++) {
    const __m512i low = _mm512_shuffle_i32x4(fours[j], fours[j + 4], 0x88);
    const __m512i low_odd = _mm512_shuffle_i32x4(fours[j], fours[j + 4], 0xdd);
    const __m512i high = _mm512_shuffle_i32x4(fours[j + 8], fours[j + 12], 0x88);
    const __m512i high_odd = _mm512_shuffle_i32x4(fours[j + 8], fours[j + 12], 0xdd);
    rows[j] = _mm512_shuffle_i32x4(low, high, 0x88);
    rows[j + 8] = _mm512_shuffle_i32x4(low, high, 0xdd);
    rows[j + 4] = _mm512_shuffle_i32x4(low_odd, high_odd, 0x88);
    rows[j + 12] = _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd);
  }
}

/* Columns [k0, k0 + n) of all rows of b; missing rows and columns are zeros of a, or not stored. */
static void copy_lanes(lanes_scratch *const own, const bsh_product_int8_args *const args, const int64_t k0,
                       const int64_t n) {
  for (int64_t row = 0; row < divide_up(args->N, BLOCK_ROWS) * BLOCK_ROWS; row += LANE_ROWS)
    for (int64_t k = 0; k < n; k += WIDTH) {
      int8_t padded[WIDTH];
      ints codes[LANE_ROWS];
      UNROLL for (int i = 0; i < LANE_ROWS; i++) {
        const int8_t *const of_row = row + i < args->N ? args->b + (row + i) * args->K + k0 : NULL;
        codes[i] = right_operand(step_of(of_row, k, n, padded));
      }
      transpose_quads((__m512i *)codes);
      ints(*const to)[VECTORS] = &own->b[row / BLOCK_ROWS][k / 4];
      UNROLL for (int i = 0; i < LANE_ROWS; i++) to[i][row % BLOCK_ROWS / LANE_ROWS] = codes[i];
    }
}

/* EXCESS times the sum of n codes. */
static int32_t excess_of(const int8_t *const codes, const int64_t n) {
  int8_t padded[WIDTH];
  ints sum = {0};
  for (int64_t k = 0; k < n; k += WIDTH)
    sum = multiply(sum, left_operand(step_of(codes, k, n, padded)), right_operand(zeros));
  return _mm512_reduce_add_epi32((__m512i)sum);
}

ALWAYS_INLINE ints quad_of(const int8_t *const codes) {
  int32_t quad;
  memcpy(&quad, codes, sizeof quad);
  return (ints)_mm512_set1_epi32(quad);
}

/* sums[r][v] += products of n columns of rows a + r * K with a block of b. */
ALWAYS_INLINE void multiply_quads(ints (*const sums)[VECTORS], const int rows, const int8_t *const a, const int64_t K,
                                  const ints (*const b)[VECTORS], const int64_t n) {
  for (int64_t k = 0; k + 4 <= n; k += 4) UNROLL for (int r = 0; r < rows; r++) {
      const ints quad = quad_of(a + r * K + k);
      UNROLL for (int v = 0; v < VECTORS; v++) sums[r][v] = multiply(sums[r][v], quad, b[k / 4][v]);
    }
  if (n % 4 == 0) return;
  UNROLL for (int r = 0; r < rows; r++) {
    int8_t last[4] = {0};
    memcpy(last, a + r * K + n / 4 * 4, (size_t)(n % 4));
    UNROLL for (int v = 0; v < VECTORS; v++) sums[r][v] = multiply(sums[r][v], quad_of(last), b[n / 4][v]);
  }
}

/* out[r * ld + j], j < columns, as the `first` chunk or added. */
ALWAYS_INLINE void multiply_block(const int rows, const int8_t *const a, const int64_t K,
                                  const ints (*const b)[VECTORS], const int64_t n, const int32_t *const excess,
                                  int32_t *const out, const int64_t ld, const int64_t columns, const bool first) {
  ints sums[EACH_ROWS][VECTORS];
  UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < VECTORS; v++) sums[r][v] =
      (ints)_mm512_set1_epi32((int32_t)(0u - (uint32_t)excess[r]));
  multiply_quads(sums, rows, a, K, b, n);
  UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < VECTORS; v++) {
    const int64_t left = columns - v * LANE_ROWS;
    const mask m = left > 0 ? first_lanes(left) : 0;
    int32_t *const to = out + r * ld + v * LANE_ROWS;
    const __m512i before = first ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi32(m, to);
    _mm512_mask_storeu_epi32(to, m, _mm512_add_epi32((__m512i)sums[r][v], before));
  }
}

static void product_by_lanes(const bsh_product_int8_args *const args, const int64_t ld, lanes_scratch *const own) {
  for (int64_t k0 = 0; k0 < args->K; k0 += DEPTH) {
    const int64_t n = min_i64(DEPTH, args->K - k0);
    copy_lanes(own, args, k0, n);
    for (int64_t m = 0, rows; m < args->M; m += rows) {
      rows = args->M - m >= EACH_ROWS ? EACH_ROWS : 1;
      const int8_t *const a = args->a + m * args->K + k0;
      int32_t excess[EACH_ROWS];
      for (int64_t r = 0; r < rows; r++) excess[r] = excess_of(a + r * args->K, n);
      for (int64_t j = 0; j < args->N; j += BLOCK_ROWS) {
        int32_t *const out = args->sums + m * ld + j;
        const ints(*const b)[VECTORS] = (const ints(*)[VECTORS])own->b[j / BLOCK_ROWS];
        const int64_t columns = args->N - j;
        if (rows == EACH_ROWS) multiply_block(EACH_ROWS, a, args->K, b, n, excess, out, ld, columns, k0 == 0);
        else multiply_block(1, a, args->K, b, n, excess, out, ld, columns, k0 == 0);
      }
    }
  }
}

void bsh_cpu_avx512_vnni_product(const bsh_product_int8_args *const args, const int64_t ld, void *const scratch) {
  if (args->M >= MANY) product_by_lanes(args, ld, scratch);
  else product_by_tiles(args, ld, scratch);
}
