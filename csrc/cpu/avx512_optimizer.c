/* cpu/avx512_optimizer.c - the optimizers with AVX-512, 16 elements at a time. */
#include "cpu/avx512.h"
#include "cpu/state_search.h"

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

/* As bf16 in the upper half of each lane, nearest even; what is below is not defined, and NaN become anything. */
STEP_FUNCTION __m512i round_bf16(const value a) {
  const __m512i bits = _mm512_castps_si512(a);
  const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
  return _mm512_add_epi32(bits, _mm512_mask_mov_epi32(_mm512_set1_epi32(0x7FFF), odd, _mm512_set1_epi32(0x8000)));
}

STEP_FUNCTION value v_round(const bsh_dtype dtype, const value a) {
  if (dtype == BSH_F32) return a;
  if (dtype == BSH_F16)
    return _mm512_cvtph_ps(_mm512_cvtps_ph(canonical_nan(a), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  const __mmask16 number = _mm512_cmp_ps_mask(a, a, _CMP_ORD_Q);
  return _mm512_castsi512_ps(
      _mm512_mask_and_epi32(_mm512_set1_epi32(0x7FFF0000), number, round_bf16(a), _mm512_set1_epi32((int)0xFFFF0000)));
}

STEP_FUNCTION value load_values(const void *const x, const bsh_dtype dtype, const int64_t i) {
  return load16(x, dtype, i, 0xFFFF);
}

STEP_FUNCTION void store_values(void *const out, const bsh_dtype dtype, const int64_t i, const value v) {
  store16(out, dtype, i, 0xFFFF, v);
}

#include "cpu/optimizer.inc.h"

/* ---- 8-bit states ------------------------------------------------------------------------------------------------ */

typedef __m512i peak;

STEP_FUNCTION peak p_zero(void) { return _mm512_setzero_si512(); }
STEP_FUNCTION peak p_bits(const peak p, const value v) { return _mm512_max_epu32(p, _mm512_castps_si512(v)); }
STEP_FUNCTION peak p_magnitude(const peak p, const value v) {
  return _mm512_max_epu32(p, _mm512_castps_si512(_mm512_abs_ps(v)));
}
STEP_FUNCTION uint32_t reduce_peak(const peak p) { return _mm512_reduce_max_epu32(p); }

STEP_FUNCTION value load_plain(const float *const x) { return _mm512_loadu_ps(x); }
STEP_FUNCTION void store_plain(float *const out, const value v) { _mm512_storeu_ps(out, v); }

/* Of a gather. A compiler that knows that all are set leaves the register it gathers into as it is, and the gather
 * waits for what that held before. */
typedef __mmask16 lanes;

STEP_FUNCTION lanes all_lanes(void) {
  lanes all = 0xFFFF;
  __asm__("" : "+Yk"(all));
  return all;
}

typedef __m512i places;

STEP_FUNCTION places load_places(const uint8_t *const code) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)code));
}

STEP_FUNCTION value look_up(const float *const map, const places at, const lanes all) {
  return _mm512_mask_i32gather_ps(_mm512_setzero_ps(), all, at, map, 4);
}

/* The upper halves of the lanes of a, then of b. */
STEP_FUNCTION __m512i upper_halves(const __m512i a, const __m512i b) {
  const __m512i ramp = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25,
                                        23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  return _mm512_permutex2var_epi16(a, ramp, b);
}

static void write_bf16(const float *const values, const int64_t n, uint16_t *const out) {
  for (int64_t i = 0; i < n; i += 2 * LANES) {
    const value a = _mm512_loadu_ps(values + i), b = _mm512_loadu_ps(values + i + LANES);
    const __mmask32 nan =
        _mm512_kunpackw(_mm512_cmp_ps_mask(b, b, _CMP_UNORD_Q), _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q));
    const __m512i words = upper_halves(round_bf16(a), round_bf16(b));
    _mm512_mask_storeu_epi16(out + i, n - i < 2 * LANES ? 0xFFFF : 0xFFFFFFFF,
                             _mm512_mask_mov_epi16(words, nan, _mm512_set1_epi16(0x7FFF)));
  }
}

static void write_run(const float *const values, const int64_t n, void *const out, const bsh_dtype dtype) {
  if (dtype == BSH_BF16) write_bf16(values, n, out);
  else if (dtype == BSH_F16) convert_from_f32(values, BSH_F16, out, n);
  else convert_from_f32(values, BSH_F32, out, n);
}

typedef __m512i codes; /* sums with the cells of 16 states: cpu/state_search.h */

STEP_FUNCTION codes search(const uint32_t *const cells, const value v, const lanes all) {
  const __m512i bits = _mm512_castps_si512(v), index = _mm512_srli_epi32(bits, 16);
  return _mm512_add_epi32(_mm512_mask_i32gather_epi32(_mm512_setzero_si512(), all, index, cells, 4), bits);
}

/* The lower byte of each word without the sign that is in the upper one, which is cleared. */
STEP_FUNCTION __m512i without_sign(const __m512i words) {
  return _mm512_ternarylogic_epi32(words, _mm512_srli_epi16(words, 8), _mm512_set1_epi16(0xFF), 0x28); /* (a ^ b) & c */
}

STEP_FUNCTION codes join(const codes a, const codes b) { return without_sign(upper_halves(a, b)); }

STEP_FUNCTION void store_unit(uint8_t *const code, const codes first, const codes second) {
  const __m512i bytes = _mm512_packus_epi16(first, second);
  _mm512_storeu_si512(code, _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), bytes));
}

STEP_FUNCTION void store_codes(uint8_t *const code, const codes a) {
  _mm_storeu_si128((__m128i *)code, _mm512_cvtepi32_epi8(without_sign(_mm512_srli_epi32(a, 16))));
}

#include "cpu/optimizer_blocks.inc.h"

const bsh_cpu_optimizers bsh_cpu_avx512_optimizers = {
    .optimizer_32bit = optimizer_32bit,
    .optimizer_squares = optimizer_squares,
    .optimizer_8bit_blockwise = optimizer_8bit_blockwise,
};
