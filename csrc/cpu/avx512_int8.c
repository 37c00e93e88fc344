/* cpu/avx512_int8.c - the int8 kernels with AVX-512, 16 numbers at a time; without VNNI, products of int8 codes as
 * int16 by vpmaddwd, whose sums of two fit an int32 for any codes. */
#include "cpu/avx512_int8.h"

#define LANES 16
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
enum { MOST_SUMS = 24, EACH_DY = 6, WIDE = 4 };

ALWAYS_INLINE floats load_floats(const void *const x, const bsh_dtype dtype, const int64_t i) {
  return (floats)load16(x, dtype, i, 0xFFFF);
}
ALWAYS_INLINE void store_floats(void *const out, const bsh_dtype dtype, const int64_t i, const floats v) {
  store16(out, dtype, i, 0xFFFF, (__m512)v);
}
ALWAYS_INLINE floats load_codes(const int8_t *const codes) {
  return (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)codes)));
}
ALWAYS_INLINE void store_codes(int8_t *const codes, const ints v) {
  _mm_storeu_si128((__m128i *)codes, _mm512_cvtepi32_epi8((__m512i)v));
}
ALWAYS_INLINE floats fused(const floats a, const floats b, const floats c) {
  return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
ALWAYS_INLINE ints most_of(const ints a, const ints b) { return (ints)_mm512_max_epi32((__m512i)a, (__m512i)b); }
ALWAYS_INLINE bool any_from(const floats v, const float threshold) {
  return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(threshold), _CMP_GE_OQ) != 0;
}
ALWAYS_INLINE float sum_of(const floats v) { return _mm512_reduce_add_ps((__m512)v); }
#include "cpu/int8.inc.h"

typedef __m512i sums_of_lanes;
typedef __m512i operand;
enum { WIDTH = 32, EXCESS = 0, EACH_ROWS = 6 };

static const int8_t zeros[WIDTH];

ALWAYS_INLINE operand left_operand(const int8_t *const codes) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)codes));
}
ALWAYS_INLINE operand right_operand(const int8_t *const codes) { return left_operand(codes); }
/* One after the other: gcc computes all products first, and runs out of registers. */
ALWAYS_INLINE sums_of_lanes multiply(sums_of_lanes sum, const operand a, const operand b) {
  __m512i products;
  __asm__("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+v"(sum), "=&v"(products) : "vm"(a), "v"(b));
  return sum;
}
#define BSH_INT8_STEPS 32
#include "cpu/int8_product.inc.h"

const bsh_cpu_int8_kernels bsh_cpu_avx512_int8 = {INT8_BY_LANES, .product = product_by_tiles};
const bsh_cpu_int8_kernels bsh_cpu_avx512_vnni_int8 = {INT8_BY_LANES, .product = bsh_cpu_avx512_vnni_product};
