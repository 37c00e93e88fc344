/* cpu/avx512.h - what the AVX-512 kernels share: conversions, scales, the values of a block. Needs F, BW, VL, DQ and
 * VBMI.
 *
 * The 16 values of a block, already scaled and rounded, are looked up by vpermps or vpermw, which ignore the upper
 * index bits. */
#ifndef BSH_CPU_AVX512_H
#define BSH_CPU_AVX512_H

#include "cpu/cpu.h"

#if !defined(__AVX512VBMI__)
#error "compile with -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vbmi -mfma -mf16c"
#endif

#include <immintrin.h>

#include "core/numerics.h"
#include "cpu/grid.h"
#include "cpu/unroll.h"

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* ---- conversions ---------------------------------------------------------------------------------------------- */

/* fp32 x 16 -> bf16 x 16, nearest even; NaN as in core/numerics.h. */
ALWAYS_INLINE __m256i to_bf16(const __m512 v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), nan, _mm512_set1_epi32(0x7FFF)));
}

ALWAYS_INLINE __m512 canonical_nan(const __m512 v) {
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_mask_mov_ps(v, nan, _mm512_castsi512_ps(_mm512_set1_epi32(0x7FFFFFFF)));
}

/* 16 elements from element i on, as fp32. Only the elements of `mask` are read. */
ALWAYS_INLINE __m512 load16(const void *const x, const bsh_dtype dtype, const int64_t i, const __mmask16 mask) {
  if (dtype == BSH_F32) return _mm512_maskz_loadu_ps(mask, (const float *)x + i);
  const __m256i words = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)x + i);
  if (dtype == BSH_F16) return _mm512_cvtph_ps(words);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

ALWAYS_INLINE void store16(void *const out, const bsh_dtype dtype, const int64_t i, const __mmask16 mask,
                           const __m512 v) {
  if (dtype == BSH_F32) _mm512_mask_storeu_ps((float *)out + i, mask, canonical_nan(v));
  else if (dtype == BSH_F16)
    _mm256_mask_storeu_epi16((uint16_t *)out + i, mask,
                             _mm512_cvtps_ph(canonical_nan(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  else _mm256_mask_storeu_epi16((uint16_t *)out + i, mask, to_bf16(v));
}

ALWAYS_INLINE __mmask16 first_lanes(const int64_t n) { return n >= 16 ? 0xFFFF : (__mmask16)((1u << n) - 1u); }

static inline void convert_to_f32(const void *const x, const bsh_dtype dtype, float *const out, const int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 mask = first_lanes(n - i);
    _mm512_mask_storeu_ps(out + i, mask, load16(x, dtype, i, mask));
  }
}

static inline void convert_from_f32(const float *const x, const bsh_dtype dtype, void *const out, const int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 mask = first_lanes(n - i);
    store16(out, dtype, i, mask, _mm512_maskz_loadu_ps(mask, x + i));
  }
}

/* Denormals become zero of the same sign. */
ALWAYS_INLINE __m512 flush(const __m512 v) {
  const __mmask16 denormal = _mm512_fpclass_ps_mask(v, 0x20);
  return _mm512_mask_and_ps(v, denormal, v, _mm512_set1_ps(-0.0f));
}

/* ---- blocks ---- */

enum { SCALES = 64 }; /* scales decoded at a time */

/* Scales of blocks [begin, begin + n), n <= SCALES: in place, or decoded into `buffer`. */
ALWAYS_INLINE const float *load_scales(const bsh_scales *const scales, const int64_t begin, const int64_t n,
                                       float buffer[SCALES]) {
  if (scales->absmax) return scales->absmax + begin;
  const __m512 offset = _mm512_set1_ps(scales->offset[0]);
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 mask = first_lanes(n - i);
    const __m512i code = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, scales->absmax_code + begin + i));
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const int64_t first = (begin + i) / BSH_NESTED_BLOCKSIZE;
    const int within = (int)((begin + i) % BSH_NESTED_BLOCKSIZE);
    const __mmask16 second = _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(BSH_NESTED_BLOCKSIZE - within)) & mask;
    __m512 absmax2 = _mm512_set1_ps(scales->absmax2[first]);
    if (second) absmax2 = _mm512_mask_mov_ps(absmax2, second, _mm512_set1_ps(scales->absmax2[first + 1]));
    const __m512 unit = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), mask, code, scales->absmax_map, 4);
    _mm512_mask_storeu_ps(buffer + i, mask, _mm512_add_ps(flush(_mm512_mul_ps(flush(unit), flush(absmax2))), offset));
  }
  return buffer;
}

/* The 16 values of a block as fp32, rounded to dtype. */
ALWAYS_INLINE __m512 values_f32(const __m512 units, const bsh_format format, const bsh_dtype dtype, const float scale) {
  if (__builtin_expect(!ordinary_scale(scale), 0)) {
    float values[16];
    block_values(format, dtype, scale, values);
    return _mm512_loadu_ps(values);
  }
  const __m512 product = _mm512_mul_ps(units, _mm512_set1_ps(scale));
  if (dtype == BSH_F32) return product;
  if (dtype == BSH_F16) return _mm512_cvtph_ps(_mm512_cvtps_ph(product, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  const __m512i bits = _mm512_castps_si512(product);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  return _mm512_castsi512_ps(_mm512_and_si512(rounded, _mm512_set1_epi32((int)0xFFFF0000)));
}

/* The same as 16-bit patterns, twice: vpermw uses five index bits, of which the fifth is not ours. */
ALWAYS_INLINE __m512i values_16bit(const __m512 units, const bsh_format format, const bsh_dtype dtype,
                                   const float scale) {
  const __m512 values = values_f32(units, format, dtype, scale);
  const __m256i words = dtype == BSH_F16 ? _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
                                         : _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(values), 16));
  return _mm512_broadcast_i64x4(words);
}

/* Members of bsh_cpu_kernels in files of their own: cpu/avx512_decode.c, cpu/avx512_linear.c. */
void bsh_cpu_avx512_decode_4bit(const bsh_decode_run *run);
void bsh_cpu_avx512_linear_4bit(const bsh_linear_4bit_args *args, int64_t row_begin, int64_t row_end);
void bsh_cpu_avx512_linear_4bit_dgrad(const bsh_linear_4bit_args *args, int64_t column_begin, int64_t column_end);

#endif
