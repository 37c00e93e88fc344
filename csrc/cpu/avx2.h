/* cpu/avx2.h - what the AVX2 kernels share: conversions, flushing, the largest lane. Needs AVX2, FMA and F16C. */
#ifndef BSH_CPU_AVX2_H
#define BSH_CPU_AVX2_H

#include "cpu/cpu.h"

#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "compile this file with -mavx2 -mfma -mf16c"
#endif

#include <immintrin.h>

#include "core/numerics.h"
#include "cpu/grid.h"

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* ---- conversions ---------------------------------------------------------------------------------------------- */

/* fp32 x 8 -> bf16 x 8, nearest even; NaN as in core/numerics.h. */
ALWAYS_INLINE __m128i to_bf16(const __m256 v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i words = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FFF), nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

ALWAYS_INLINE __m256 canonical_nan(const __m256 v) {
  const __m256 nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
  return _mm256_blendv_ps(v, _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF)), nan);
}

ALWAYS_INLINE __m256 load8(const void *const x, const bsh_dtype dtype, const int64_t i) {
  if (dtype == BSH_F32) return _mm256_loadu_ps((const float *)x + i);
  const __m128i words = _mm_loadu_si128((const __m128i *)((const uint16_t *)x + i));
  if (dtype == BSH_F16) return _mm256_cvtph_ps(words);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}

ALWAYS_INLINE void store8(void *const out, const bsh_dtype dtype, const int64_t i, const __m256 v) {
  if (dtype == BSH_F32) {
    _mm256_storeu_ps((float *)out + i, canonical_nan(v));
    return;
  }
  const __m128i words =
      dtype == BSH_F16 ? _mm256_cvtps_ph(canonical_nan(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC) : to_bf16(v);
  _mm_storeu_si128((__m128i *)((uint16_t *)out + i), words);
}

/* Denormals become zero of the same sign. */
ALWAYS_INLINE __m256 flush(const __m256 v) {
  const __m256i exponent = _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7F800000));
  const __m256 denormal = _mm256_castsi256_ps(_mm256_cmpeq_epi32(exponent, _mm256_setzero_si256()));
  return _mm256_blendv_ps(v, _mm256_and_ps(v, _mm256_set1_ps(-0.0f)), denormal);
}

ALWAYS_INLINE uint32_t reduce_max(const __m256i v) {
  __m128i most = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0x4E));
  most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0xB1));
  return (uint32_t)_mm_cvtsi128_si32(most);
}

#endif
