/* cpu_avx512_optimizer.c - the optimizers with AVX-512, 16 elements at a time. */
#include "cpu_avx512.h"

#define STEP_FUNCTION ALWAYS_INLINE
#define LANES 16

typedef __m512 value;

STEP_FUNCTION value v_set(const float a) { return _mm512_set1_ps(a); }
STEP_FUNCTION value v_add(const value a, const value b) { return _mm512_add_ps(a, b); }
STEP_FUNCTION value v_mul(const value a, const value b) { return _mm512_mul_ps(a, b); }
STEP_FUNCTION value v_div(const value a, const value b) { return _mm512_div_ps(a, b); }
STEP_FUNCTION value v_sqrt(const value a) { return _mm512_sqrt_ps(a); }
STEP_FUNCTION value v_fma(const value a, const value b, const value c) { return _mm512_fmadd_ps(a, b, c); }
STEP_FUNCTION value v_flush(const value a) { return flush(a); }

STEP_FUNCTION value v_sign(const value a) {
  const __mmask16 above = _mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_GT_OQ);
  const __mmask16 below = _mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_LT_OQ);
  return _mm512_mask_mov_ps(_mm512_maskz_mov_ps(above, v_set(1.0f)), below, v_set(-1.0f));
}

STEP_FUNCTION value v_if_zero(const value g, const value a, const value b) {
  return _mm512_mask_mov_ps(b, _mm512_cmp_ps_mask(g, _mm512_setzero_ps(), _CMP_EQ_OQ), a);
}

STEP_FUNCTION value v_if_finite(const value g, const value a, const value b) {
  return _mm512_mask_mov_ps(b, _mm512_cmp_ps_mask(_mm512_abs_ps(g), v_set(FLT_MAX), _CMP_LE_OQ), a);
}

STEP_FUNCTION value v_round(const bsh_dtype dtype, const value a) {
  if (dtype == BSH_F32) return a;
  if (dtype == BSH_F16)
    return _mm512_cvtph_ps(_mm512_cvtps_ph(canonical_nan(a), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(to_bf16(a)), 16));
}

STEP_FUNCTION value load_values(const void *const x, const bsh_dtype dtype, const int64_t i) {
  return load16(x, dtype, i, 0xFFFF);
}

STEP_FUNCTION void store_values(void *const out, const bsh_dtype dtype, const int64_t i, const value v) {
  store16(out, dtype, i, 0xFFFF, v);
}

STEP_FUNCTION value map_values(const float *const map, const uint8_t *const code, const int64_t i) {
  return _mm512_i32gather_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(code + i))), map, 4);
}

#define find_search bsh_find_state_search

/* Largest magnitude of n states as a number without sign; NaN counts as more than infinity. */
STEP_FUNCTION float largest_magnitude(const float *const states, const int64_t n) {
  __m512i most = _mm512_setzero_si512();
  for (int64_t i = 0; i < n; i += LANES)
    most = _mm512_max_epu32(most, _mm512_castps_si512(_mm512_abs_ps(_mm512_loadu_ps(states + i))));
  return bits_float(_mm512_reduce_max_epu32(most));
}

STEP_FUNCTION __m128i encode16(const bsh_state_search *const search, const value v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF));
  const __m512i within = _mm512_min_epu32(_mm512_max_epu32(magnitude, _mm512_set1_epi32(BSH_SEARCH_LEAST)),
                                          _mm512_set1_epi32(BSH_SEARCH_MOST));
  const __m512i offset = _mm512_sub_epi32(within, _mm512_set1_epi32(BSH_SEARCH_LEAST));
  const __m512i positive = _mm512_srli_epi32(offset, BSH_SEARCH_SHIFT);
  const __m512i index =
      _mm512_mask_add_epi32(positive, _mm512_movepi32_mask(bits), positive, _mm512_set1_epi32(BSH_SEARCH_CELLS));
  const __m512i cell = _mm512_i32gather_epi32(index, search->cells, 4);
  const __m512i rest = _mm512_and_si512(within, _mm512_set1_epi32((1 << BSH_SEARCH_SHIFT) - 1));
  const __mmask16 beyond = _mm512_cmpge_epu32_mask(rest, _mm512_srli_epi32(cell, 10));
  const __m512i change =
      _mm512_sub_epi32(_mm512_and_si512(_mm512_srli_epi32(cell, 8), _mm512_set1_epi32(3)), _mm512_set1_epi32(1));
  return _mm512_cvtepi32_epi8(_mm512_mask_add_epi32(cell, beyond, cell, change));
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
    _mm_storeu_si128((__m128i *)(code + i), encode16(search, _mm512_mul_ps(inverse, _mm512_loadu_ps(states + i))));
}

#include "cpu_optimizer.h"

const bsh_cpu_optimizers bsh_cpu_avx512_optimizers = {
    .optimizer_32bit = optimizer_32bit,
    .optimizer_squares = optimizer_squares,
    .optimizer_8bit_blockwise = optimizer_8bit_blockwise,
};
