/* cpu_avx2_optimizer.c - the optimizers with AVX2, FMA and F16C, 8 elements at a time. */
#include "cpu_avx2.h"

#define STEP_FUNCTION ALWAYS_INLINE
#define LANES 8

typedef __m256 value;

STEP_FUNCTION value v_set(const float a) { return _mm256_set1_ps(a); }
STEP_FUNCTION value v_add(const value a, const value b) { return _mm256_add_ps(a, b); }
STEP_FUNCTION value v_mul(const value a, const value b) { return _mm256_mul_ps(a, b); }
STEP_FUNCTION value v_div(const value a, const value b) { return _mm256_div_ps(a, b); }
STEP_FUNCTION value v_sqrt(const value a) { return _mm256_sqrt_ps(a); }
STEP_FUNCTION value v_fma(const value a, const value b, const value c) { return _mm256_fmadd_ps(a, b, c); }
STEP_FUNCTION value v_flush(const value a) { return flush(a); }

STEP_FUNCTION value v_sign(const value a) {
  const value above = _mm256_and_ps(_mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_GT_OQ), v_set(1.0f));
  return _mm256_or_ps(above, _mm256_and_ps(_mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_LT_OQ), v_set(-1.0f)));
}

STEP_FUNCTION value v_if_zero(const value g, const value a, const value b) {
  return _mm256_blendv_ps(b, a, _mm256_cmp_ps(g, _mm256_setzero_ps(), _CMP_EQ_OQ));
}

STEP_FUNCTION value v_if_finite(const value g, const value a, const value b) {
  const value magnitude = _mm256_andnot_ps(v_set(-0.0f), g);
  return _mm256_blendv_ps(b, a, _mm256_cmp_ps(magnitude, v_set(FLT_MAX), _CMP_LE_OQ));
}

STEP_FUNCTION value v_round(const bsh_dtype dtype, const value a) {
  if (dtype == BSH_F32) return a;
  if (dtype == BSH_F16)
    return _mm256_cvtph_ps(_mm256_cvtps_ph(canonical_nan(a), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(to_bf16(a)), 16));
}

STEP_FUNCTION value load_values(const void *const x, const bsh_dtype dtype, const int64_t i) {
  return load8(x, dtype, i);
}

STEP_FUNCTION void store_values(void *const out, const bsh_dtype dtype, const int64_t i, const value v) {
  store8(out, dtype, i, v);
}

STEP_FUNCTION value map_values(const float *const map, const uint8_t *const code, const int64_t i) {
  return _mm256_i32gather_ps(map, _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(code + i))), 4);
}

#define find_search bsh_find_state_search

/* Largest magnitude of n states as a number without sign; NaN counts as more than infinity. */
STEP_FUNCTION float largest_magnitude(const float *const states, const int64_t n) {
  __m256i most = _mm256_setzero_si256();
  for (int64_t i = 0; i < n; i += LANES)
    most = _mm256_max_epu32(
        most, _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(states + i)), _mm256_set1_epi32(0x7FFFFFFF)));
  return bits_float(reduce_max(most));
}

/* Codes in the lanes; bits above the eighth are not defined. */
STEP_FUNCTION __m256i encode8(const bsh_state_search *const search, const value v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF));
  const __m256i within = _mm256_min_epu32(_mm256_max_epu32(magnitude, _mm256_set1_epi32(BSH_SEARCH_LEAST)),
                                          _mm256_set1_epi32(BSH_SEARCH_MOST));
  const __m256i offset = _mm256_sub_epi32(within, _mm256_set1_epi32(BSH_SEARCH_LEAST));
  const __m256i negative = _mm256_and_si256(_mm256_srai_epi32(bits, 31), _mm256_set1_epi32(BSH_SEARCH_CELLS));
  const __m256i index = _mm256_add_epi32(_mm256_srli_epi32(offset, BSH_SEARCH_SHIFT), negative);
  const __m256i cell = _mm256_i32gather_epi32((const int *)search->cells, index, 4);
  const __m256i rest = _mm256_and_si256(within, _mm256_set1_epi32((1 << BSH_SEARCH_SHIFT) - 1));
  const __m256i before = _mm256_cmpgt_epi32(_mm256_srli_epi32(cell, 10), rest);
  const __m256i change =
      _mm256_sub_epi32(_mm256_and_si256(_mm256_srli_epi32(cell, 8), _mm256_set1_epi32(3)), _mm256_set1_epi32(1));
  return _mm256_add_epi32(cell, _mm256_andnot_si256(before, change));
}

STEP_FUNCTION void store_codes(uint8_t *const code, const __m256i codes) {
  const __m256i bytes = _mm256_and_si256(codes, _mm256_set1_epi32(0xFF));
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
  _mm_storel_epi64((__m128i *)code, _mm_packus_epi16(words, words));
}

/* One block: where it has a NaN, an infinity or nothing but tiny states, or where the map has no table, in plain C. */
static void requantize(const bsh_state_search *const search, const float *const states, const int64_t n,
                       const float *const map, const bool keep_sign, uint8_t *const code, float *const absmax) {
  const float most = largest_magnitude(states, n);
  if (search == NULL || !ordinary_absmax(most)) {
    bsh_cpu_requantize(states, n, map, keep_sign, code, absmax);
    return;
  }
  const value inverse = v_set(reciprocal(most));
  *absmax = most;
  for (int64_t i = 0; i < n; i += LANES)
    store_codes(code + i, encode8(search, _mm256_mul_ps(inverse, _mm256_loadu_ps(states + i))));
}

#include "cpu_optimizer.h"

const bsh_cpu_optimizers bsh_cpu_avx2_optimizers = {
    .optimizer_32bit = optimizer_32bit,
    .optimizer_squares = optimizer_squares,
    .optimizer_8bit_blockwise = optimizer_8bit_blockwise,
};
