/* cpu/avx2_int8.c - the int8 kernels with AVX2, 8 numbers at a time; products of int8 codes as int16 by vpmaddwd, whose
 * sums of two fit an int32 for any codes (vpmaddubsw saturates). */
#include "cpu/avx2.h"
#include "cpu/unroll.h"

#define LANES 8
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
enum { MOST_SUMS = 8, EACH_DY = 4, WIDE = 2 };

ALWAYS_INLINE floats load_floats(const void *const x, const bsh_dtype dtype, const int64_t i) {
  return (floats)load8(x, dtype, i);
}
ALWAYS_INLINE void store_floats(void *const out, const bsh_dtype dtype, const int64_t i, const floats v) {
  store8(out, dtype, i, (__m256)v);
}
ALWAYS_INLINE floats load_codes(const int8_t *const codes) {
  return (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)codes)));
}
ALWAYS_INLINE void store_codes(int8_t *const codes, const ints v) {
  const __m256i lowest = _mm256_shuffle_epi8((__m256i)v, _mm256_set1_epi32(0x0C080400)); /* in each half */
  _mm_storel_epi64((__m128i *)codes,
                   _mm_unpacklo_epi32(_mm256_castsi256_si128(lowest), _mm256_extracti128_si256(lowest, 1)));
}
ALWAYS_INLINE floats fused(const floats a, const floats b, const floats c) {
  return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
ALWAYS_INLINE ints most_of(const ints a, const ints b) { return (ints)_mm256_max_epi32((__m256i)a, (__m256i)b); }
ALWAYS_INLINE bool any_from(const floats v, const float threshold) {
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)v, _mm256_set1_ps(threshold), _CMP_GE_OQ)) != 0;
}
ALWAYS_INLINE float sum_of(const floats v) {
  __m128 quarter = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}
#include "cpu/int8.inc.h"

typedef __m256i sums_of_lanes;
typedef __m256i operand;
enum { WIDTH = 16, EXCESS = 0, EACH_ROWS = 3 };

static const int8_t zeros[WIDTH];

ALWAYS_INLINE operand left_operand(const int8_t *const codes) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)codes));
}
ALWAYS_INLINE operand right_operand(const int8_t *const codes) { return left_operand(codes); }
/* One after the other: gcc computes all products first, and runs out of registers. */
ALWAYS_INLINE sums_of_lanes multiply(sums_of_lanes sum, const operand a, const operand b) {
  __m256i products;
  __asm__("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(products) : "xm"(a), "x"(b));
  return sum;
}

/* out[j] = the sum of the 8 lanes of sums[j]. */
ALWAYS_INLINE void reduce4(const __m256i sums[4], int32_t out[4]) {
  const __m256i all = _mm256_hadd_epi32(_mm256_hadd_epi32(sums[0], sums[1]), _mm256_hadd_epi32(sums[2], sums[3]));
  _mm_storeu_si128((__m128i *)out, _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
}
#define BSH_INT8_STEPS 32
#include "cpu/int8_product.inc.h"

const bsh_cpu_int8_kernels bsh_cpu_avx2_int8 = {INT8_BY_LANES, .product = product_by_tiles};
