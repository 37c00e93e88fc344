/* cpu/avx2_optimizer.c - the optimizers with AVX2, FMA and F16C, 8 elements at a time. */
#include "cpu/avx2.h"

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
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
  const value upper = _mm256_castsi256_ps(_mm256_and_si256(rounded, _mm256_set1_epi32((int)0xFFFF0000)));
  const value nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFF0000));
  return _mm256_blendv_ps(upper, nan, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}

STEP_FUNCTION value load_values(const void *const x, const bsh_dtype dtype, const int64_t i) {
  return load8(x, dtype, i);
}

STEP_FUNCTION void store_values(void *const out, const bsh_dtype dtype, const int64_t i, const value v) {
  store8(out, dtype, i, v);
}

#include "cpu/optimizer.inc.h"

/* ---- 8-bit states ------------------------------------------------------------------------------------------------ */

typedef __m256i peak;

STEP_FUNCTION peak p_zero(void) { return _mm256_setzero_si256(); }
STEP_FUNCTION peak p_bits(const peak p, const value v) { return _mm256_max_epu32(p, _mm256_castps_si256(v)); }
STEP_FUNCTION peak p_magnitude(const peak p, const value v) { return p_bits(p, _mm256_andnot_ps(v_set(-0.0f), v)); }
STEP_FUNCTION uint32_t reduce_peak(const peak p) { return reduce_max(p); }

STEP_FUNCTION value load_plain(const float *const x) { return _mm256_loadu_ps(x); }
STEP_FUNCTION void store_plain(float *const out, const value v) { _mm256_storeu_ps(out, v); }

/* Of a gather: see cpu/avx512_optimizer.c. */
typedef __m256i lanes;

STEP_FUNCTION lanes all_lanes(void) {
  lanes all = _mm256_set1_epi32(-1);
  __asm__("" : "+x"(all));
  return all;
}

typedef __m256i places;

STEP_FUNCTION places load_places(const uint8_t *const code) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)code));
}

STEP_FUNCTION value look_up(const float *const map, const places at, const lanes all) {
  return _mm256_mask_i32gather_ps(_mm256_setzero_ps(), map, at, _mm256_castsi256_ps(all), 4);
}

static void write_run(const float *const values, const int64_t n, void *const out, const bsh_dtype dtype) {
  for (int64_t i = 0; i < n; i += LANES) store_values(out, dtype, i, load_plain(values + i));
}

typedef __m256i codes; /* of 8 states in the lanes: cpu/state_search.h */

STEP_FUNCTION codes search(const uint32_t *const cells, const value v, const lanes all) {
  const __m256i bits = _mm256_castps_si256(v), index = _mm256_srli_epi32(bits, 16);
  const __m256i cell = _mm256_mask_i32gather_epi32(_mm256_setzero_si256(), (const int *)cells, index, all, 4);
  const __m256i sum = _mm256_add_epi32(cell, bits);
  const __m256i code = _mm256_xor_si256(_mm256_srli_epi32(sum, 16), _mm256_srli_epi32(sum, 24));
  return _mm256_and_si256(code, _mm256_set1_epi32(0xFF));
}

STEP_FUNCTION codes join(const codes a, const codes b) { return _mm256_packus_epi32(a, b); }

STEP_FUNCTION void store_unit(uint8_t *const code, const codes first, const codes second) {
  const __m256i bytes = _mm256_packus_epi16(first, second), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256((__m256i *)code, _mm256_permutevar8x32_epi32(bytes, order));
}

STEP_FUNCTION void store_codes(uint8_t *const code, const codes a) {
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  _mm_storel_epi64((__m128i *)code, _mm_packus_epi16(words, words));
}

#include "cpu/optimizer_blocks.inc.h"

const bsh_cpu_optimizers bsh_cpu_avx2_optimizers = {
    .optimizer_32bit = optimizer_32bit,
    .optimizer_squares = optimizer_squares,
    .optimizer_8bit_blockwise = optimizer_8bit_blockwise,
};
