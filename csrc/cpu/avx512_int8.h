/* cpu/avx512_int8.h - what the two products of int8 codes with AVX-512 share. */
#ifndef BSH_CPU_AVX512_INT8_H
#define BSH_CPU_AVX512_INT8_H

#include "cpu/avx512.h"

/* out[j] = the sum of the 16 lanes of sums[j]. */
ALWAYS_INLINE void reduce4(const __m512i sums[4], int32_t out[4]) {
  const __m512i low =
      _mm512_add_epi32(_mm512_unpacklo_epi32(sums[0], sums[1]), _mm512_unpackhi_epi32(sums[0], sums[1]));
  const __m512i high =
      _mm512_add_epi32(_mm512_unpacklo_epi32(sums[2], sums[3]), _mm512_unpackhi_epi32(sums[2], sums[3]));
  const __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
  const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
  _mm_storeu_si128((__m128i *)out, _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
}

void bsh_cpu_avx512_vnni_product(const bsh_product_int8_args *args, int64_t ld, void *scratch);

#endif
