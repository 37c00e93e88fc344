/* cpu/isa/avx512.h - cpu/isa/vectors.h with AVX-512 F, BW, VL, DQ and VBMI.
 *
 * The 16 values of a block, already scaled and rounded, are looked up by vpermps or vpermw, which ignore the upper
 * index bits. Nibbles are spread by vpmultishiftqb (each byte of a 64-bit lane takes 8 bits from any bit offset). */
#ifndef BSH_CPU_ISA_AVX512_H
#define BSH_CPU_ISA_AVX512_H

#if !defined(__AVX512VBMI__)
#error "compile with -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vbmi -mfma -mf16c"
#endif

#include <immintrin.h>

#define LANES 16
#define REGISTERS 32
#include "cpu/grid.h"
#include "cpu/isa/vectors.h"

typedef __mmask16 mask;
enum { MASKED_ENDS = 1 };

/* ---- numbers --------------------------------------------------------------------------------------------------- */

ALWAYS_INLINE floats v_set(const float number) { return _mm512_set1_ps(number); }
ALWAYS_INLINE floats v_fma(const floats a, const floats b, const floats c) { return _mm512_fmadd_ps(a, b, c); }
ALWAYS_INLINE floats v_sqrt(const floats a) { return _mm512_sqrt_ps(a); }
ALWAYS_INLINE float v_sum(const floats v) { return _mm512_reduce_add_ps(v); }

ALWAYS_INLINE floats v_hold(floats v) {
  __asm__("" : "+v"(v));
  return v;
}

ALWAYS_INLINE ints i_max(const ints a, const ints b) { return (ints)_mm512_max_epu32((__m512i)a, (__m512i)b); }
ALWAYS_INLINE words w_max(const words a, const words b) { return (words)_mm512_max_epu16((__m512i)a, (__m512i)b); }
ALWAYS_INLINE uint32_t i_reduce_max(const ints v) { return _mm512_reduce_max_epu32((__m512i)v); }

ALWAYS_INLINE words i_upper_halves(const ints a, const ints b) {
  const __m512i ramp = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25,
                                        23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  return (words)_mm512_permutex2var_epi16((__m512i)a, ramp, (__m512i)b);
}

/* ---- masks ------------------------------------------------------------------------------------------------------ */

ALWAYS_INLINE mask v_above(const floats a, const floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
ALWAYS_INLINE mask v_at_most(const floats a, const floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
ALWAYS_INLINE mask v_equal(const floats a, const floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
ALWAYS_INLINE floats v_choose(const mask m, const floats a, const floats b) { return _mm512_mask_mov_ps(b, m, a); }
ALWAYS_INLINE bool m_any(const mask m) { return m != 0; }
ALWAYS_INLINE mask first_lanes(const int64_t n) { return n >= LANES ? 0xFFFF : (mask)((1u << n) - 1u); }

ALWAYS_INLINE ints i_count(const ints n, const mask m) {
  return (ints)_mm512_mask_add_epi32((__m512i)n, m, (__m512i)n, _mm512_set1_epi32(1));
}

/* A compiler that knows that all are set leaves the register a gather goes to as it is, and the gather waits for what
 * that held before. */
ALWAYS_INLINE mask m_all(void) {
  mask all = 0xFFFF;
  __asm__("" : "+Yk"(all));
  return all;
}

ALWAYS_INLINE floats v_sign(const floats a) {
  const floats above = _mm512_maskz_mov_ps(v_above(a, v_set(0.0f)), v_set(1.0f));
  return v_choose(v_above(v_set(0.0f), a), v_set(-1.0f), above);
}

/* ---- rounding --------------------------------------------------------------------------------------------------- */

ALWAYS_INLINE floats v_flush(const floats v) {
  return _mm512_mask_and_ps(v, _mm512_fpclass_ps_mask(v, 0x20), v, v_set(-0.0f));
}

ALWAYS_INLINE floats canonical_nan(const floats v) {
  return v_choose(_mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), (floats)_mm512_set1_epi32(0x7FFFFFFF), v);
}

/* bf16 in the upper half of each lane, nearest even; what is below is not defined, and NaN become anything. */
ALWAYS_INLINE ints round_bf16(const floats v) {
  const mask odd = _mm512_test_epi32_mask((__m512i)v, _mm512_set1_epi32(0x10000));
  const __m512i half = _mm512_mask_mov_epi32(_mm512_set1_epi32(0x7FFF), odd, _mm512_set1_epi32(0x8000));
  return (ints)_mm512_add_epi32((__m512i)v, half);
}

/* The same without a test, which takes the port of lookups. */
ALWAYS_INLINE unsigneds round_bf16_by_sums(const floats v) {
  const unsigneds bits = (unsigneds)v;
  return bits + 0x7FFF + (bits >> 16 & 1);
}

ALWAYS_INLINE __m256i to_bf16(const floats v) {
  const mask nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  const __m512i rounded = (__m512i)(round_bf16_by_sums(v) >> 16);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7FFF)));
}

ALWAYS_INLINE __m256i to_f16(const floats v) {
  return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

ALWAYS_INLINE floats v_round_number(const bsh_dtype dtype, const floats v) {
  if (dtype == BSH_F32) return v;
  if (dtype == BSH_F16) return _mm512_cvtph_ps(to_f16(v));
  return (floats)(round_bf16_by_sums(v) & 0xFFFF0000);
}

ALWAYS_INLINE floats v_round(const bsh_dtype dtype, const floats v) {
  if (dtype == BSH_F32) return v;
  if (dtype == BSH_F16) return v_round_number(dtype, canonical_nan(v));
  const mask number = _mm512_cmp_ps_mask(v, v, _CMP_ORD_Q);
  return (floats)_mm512_mask_and_epi32(_mm512_set1_epi32(0x7FFF0000), number, (__m512i)round_bf16(v),
                                       _mm512_set1_epi32((int)0xFFFF0000));
}

/* ---- memory ----------------------------------------------------------------------------------------------------- */

ALWAYS_INLINE floats v_load_some(const void *const x, const bsh_dtype dtype, const int64_t i, const int64_t n) {
  const mask m = first_lanes(n);
  if (dtype == BSH_F32) return _mm512_maskz_loadu_ps(m, (const float *)x + i);
  const __m256i words = _mm256_maskz_loadu_epi16(m, (const uint16_t *)x + i);
  if (dtype == BSH_F16) return _mm512_cvtph_ps(words);
  return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16);
}

ALWAYS_INLINE void v_store_some(void *const out, const bsh_dtype dtype, const int64_t i, const int64_t n,
                                const floats v) {
  const mask m = first_lanes(n);
  if (dtype == BSH_F32) _mm512_mask_storeu_ps((float *)out + i, m, canonical_nan(v));
  else if (dtype == BSH_F16) _mm256_mask_storeu_epi16((uint16_t *)out + i, m, to_f16(canonical_nan(v)));
  else _mm256_mask_storeu_epi16((uint16_t *)out + i, m, to_bf16(v));
}

ALWAYS_INLINE floats v_load(const void *const x, const bsh_dtype dtype, const int64_t i) {
  return v_load_some(x, dtype, i, LANES);
}

ALWAYS_INLINE void v_store(void *const out, const bsh_dtype dtype, const int64_t i, const floats v) {
  v_store_some(out, dtype, i, LANES, v);
}

ALWAYS_INLINE void v_store_two(void *const out, const bsh_dtype dtype, const int64_t i, const floats a,
                               const floats b) {
  if (dtype != BSH_BF16) {
    v_store(out, dtype, i, a);
    v_store(out, dtype, i + LANES, b);
    return;
  }
  const __mmask32 nan = _mm512_kunpackw(_mm512_cmp_ps_mask(b, b, _CMP_UNORD_Q), _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q));
  const __m512i words = (__m512i)i_upper_halves(round_bf16(a), round_bf16(b));
  _mm512_storeu_si512((uint16_t *)out + i, _mm512_mask_mov_epi16(words, nan, _mm512_set1_epi16(0x7FFF)));
}

ALWAYS_INLINE void v_write_some(float *const out, const int64_t n, const floats v) {
  _mm512_mask_storeu_ps(out, first_lanes(n), v);
}

ALWAYS_INLINE floats v_load_codes(const int8_t *const codes) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)codes)));
}

ALWAYS_INLINE ints i_load_bytes(const uint8_t *const bytes) {
  return (ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)bytes));
}

ALWAYS_INLINE void i_store_bytes(void *const out, const ints v) {
  _mm_storeu_si128((__m128i *)out, _mm512_cvtepi32_epi8((__m512i)v));
}

ALWAYS_INLINE void w_store_bytes(uint8_t *const out, const words a, const words b) {
  const __m512i bytes = _mm512_packus_epi16((__m512i)a, (__m512i)b);
  _mm512_storeu_si512(out, _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), bytes));
}

ALWAYS_INLINE void i_store_nibbles(uint8_t *const out, const ints v[2]) {
  const __m512i words = _mm512_packus_epi32((__m512i)v[0], (__m512i)v[1]); /* lane l: a[4l .. 4l+3], b[4l .. 4l+3] */
  /* Pairs of words -> one byte in a 32-bit lane: even << 4 | odd. */
  const __m512i bytes = _mm512_madd_epi16(words, _mm512_set1_epi32(0x00010010));
  const __m128i packed = _mm512_cvtepi32_epi8(bytes); /* a0 a1 b0 b1 | a2 a3 b2 b3 | ... */
  const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  _mm_storeu_si128((__m128i *)out, _mm_shuffle_epi8(packed, order));
}

/* ---- tables ----------------------------------------------------------------------------------------------------- */

ALWAYS_INLINE floats v_gather(const float *const table, const ints at, const mask all) {
  return _mm512_mask_i32gather_ps(_mm512_setzero_ps(), all, (__m512i)at, table, 4);
}

ALWAYS_INLINE ints i_gather(const uint32_t *const table, const ints at, const mask all) {
  return (ints)_mm512_mask_i32gather_epi32(_mm512_setzero_si512(), all, (__m512i)at, table, 4);
}

ALWAYS_INLINE floats entry32(const float *const table, const ints at) {
  return _mm512_permutex2var_ps(v_read(table), (__m512i)at, v_read(table + LANES));
}

/* Levels 0 to 4 are 32 entries, level 5 as many, level 6 twice as many. */
ALWAYS_INLINE floats v_heap_entry(const float *const heap, const int level, const ints node) {
  if (level < 5) return entry32(heap, node);
  if (level == 5) return entry32(heap + 32, node);
  const mask high = _mm512_test_epi32_mask((__m512i)node, _mm512_set1_epi32(32));
  return v_choose(high, entry32(heap + 96, node), entry32(heap + 64, node));
}

/* ---- 4 bits ----------------------------------------------------------------------------------------------------- */

typedef __m512i table_16bit; /* the 16 values twice: vpermw uses five index bits, of which the fifth is not ours */

ALWAYS_INLINE table_16bit make_table(const floats values[1], const bsh_dtype dtype) {
  if (dtype == BSH_F16) return _mm512_broadcast_i64x4(to_f16(values[0]));
  return _mm512_broadcast_i64x4(_mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)values[0], 16)));
}

/* Index bytes for 16 values from 8 bytes; for 32 values (16-bit lanes) from 16 bytes. High nibble first. */
ALWAYS_INLINE __m512i spread8(const uint8_t *const packed) {
  const __m512i bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i *)packed));
  return _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x0000000000000004), bytes);
}

ALWAYS_INLINE __m512i spread16(const uint8_t *const packed) {
  const __m512i words = _mm512_cvtepu16_epi64(_mm_loadu_si128((const __m128i *)packed));
  return _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x0008000C00000004), words);
}

ALWAYS_INLINE void store_zmm(char *const out, const __m512i v, const bool stream) {
  if (stream) _mm512_stream_si512((__m512i *)out, v);
  else _mm512_storeu_si512(out, v);
}

ALWAYS_INLINE void end_stream(void) { _mm_sfence(); }

ALWAYS_INLINE void decode32_16bit(const uint8_t *const packed, const table_16bit *const table,
                                  const table_16bit *const second, char *const out, const bool stream) {
  const __m512i codes = spread16(packed);
  __m512i values = _mm512_permutexvar_epi16(codes, *table);
  if (second) values = _mm512_mask_permutexvar_epi16(values, 0xFFFF0000, codes, *second);
  store_zmm(out, values, stream);
}

typedef floats table_f32;

ALWAYS_INLINE table_f32 make_f32_table(const floats values[1]) { return values[0]; }

ALWAYS_INLINE void decode32_f32(const uint8_t *const packed, const table_f32 *const table,
                                const table_f32 *const second, char *const out, const bool stream) {
  store_zmm(out, (__m512i)_mm512_permutexvar_ps(spread8(packed), *table), stream);
  store_zmm(out + 64, (__m512i)_mm512_permutexvar_ps(spread8(packed + 8), second ? *second : *table), stream);
}

/* Vector j has elements 16 j to 16 j + 15, two at a time from each of the two halves of their 8 bytes. */
typedef floats group_table;
typedef const uint8_t *group_codes;
enum { BF16_GROUPS = 0 };

ALWAYS_INLINE int group_element(const int j, const int lane) {
  return 16 * j + 8 * (lane % 2) + 2 * (lane / 4) + (lane / 2 % 2 == 0);
}

ALWAYS_INLINE group_table make_group_table(const floats scaled[1], const bsh_dtype dtype) {
  return v_round_number(dtype, scaled[0]);
}

ALWAYS_INLINE group_codes load_group(const uint8_t *const packed) { return packed; }

ALWAYS_INLINE floats decode_vector(const group_codes *const codes, const group_table *const table,
                                   const bsh_dtype dtype, const int j) {
  (void)dtype;
  const __m512i shift = _mm512_setr_epi32(0, 0, 4, 4, 8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 28, 28);
  const __m512i words = _mm512_broadcastq_epi64(_mm_loadl_epi64((const __m128i *)(*codes + 8 * j)));
  return _mm512_permutexvar_ps(_mm512_srlv_epi32(words, shift), *table);
}

typedef floats block_table;

ALWAYS_INLINE void store_block_table(const floats values[1], block_table *const table) { *table = values[0]; }

ALWAYS_INLINE group_table join_tables(const block_table *const quarters[4], const bsh_dtype dtype, const int j) {
  (void)dtype;
  return *quarters[j];
}

/* Adds the sum of the lanes of v[m] to sums[m], m < n <= 16: a transposition by halves instead of 16 reductions. */
ALWAYS_INLINE void add_lane_sums(const floats v[16], const int64_t n, float *const sums) {
  floats pairs[8], fours[4], halves[2];
  UNROLL for (int i = 0; i < 8; i++) pairs[i] =
      _mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]) + _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]);
  UNROLL for (int i = 0; i < 4; i++) fours[i] =
      _mm512_shuffle_ps(pairs[2 * i], pairs[2 * i + 1], 0x44) + _mm512_shuffle_ps(pairs[2 * i], pairs[2 * i + 1], 0xEE);
  UNROLL for (int i = 0; i < 2; i++) halves[i] = _mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0x88) +
                                                 _mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0xDD);
  const floats all =
      _mm512_shuffle_f32x4(halves[0], halves[1], 0x88) + _mm512_shuffle_f32x4(halves[0], halves[1], 0xDD);
  v_write_some(sums, n, v_load_some(sums, BSH_F32, 0, n) + all);
}

/* As in cpu/decode.inc.h. */
ALWAYS_INLINE const float *load_scales(const bsh_scales *const scales, const int64_t begin, const int64_t n,
                                       float *const buffer) {
  if (scales->absmax) return scales->absmax + begin;
  const floats offset = v_set(scales->offset[0]);
  for (int64_t i = 0; i < n; i += LANES) {
    const mask m = first_lanes(n - i);
    const __m512i code = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(m, scales->absmax_code + begin + i));
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const int64_t first = (begin + i) / BSH_NESTED_BLOCKSIZE;
    const int within = (int)((begin + i) % BSH_NESTED_BLOCKSIZE);
    const mask second = _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(BSH_NESTED_BLOCKSIZE - within)) & m;
    floats absmax2 = v_set(scales->absmax2[first]);
    if (second) absmax2 = v_choose(second, v_set(scales->absmax2[first + 1]), absmax2);
    const floats unit = v_gather(scales->absmax_map, (ints)code, m);
    v_write_some(buffer + i, n - i, v_flush(v_flush(unit) * v_flush(absmax2)) + offset);
  }
  return buffer;
}
#define load_scales load_scales

/* As in cpu/groups.inc.h. */
ALWAYS_INLINE bool all_ordinary(const float *const scales, const int64_t n) {
  mask odd = 0;
  for (int64_t i = 0; i < n; i += 16) {
    const floats scale = v_abs(_mm512_mask_loadu_ps(v_set(1.0f), first_lanes(n - i), scales + i));
    odd |= _mm512_cmp_ps_mask(scale, v_set(0x1p-100f), _CMP_NGE_UQ);
    odd |= _mm512_cmp_ps_mask(scale, v_set(FLT_MAX), _CMP_NLE_UQ);
  }
  return odd == 0;
}
#define all_ordinary all_ordinary

/* By a uniform grid (cpu/grid.h), whose 32 cells are looked up. */
typedef struct {
  floats threshold0, threshold1;
  ints codes0, codes1;
  floats scale, shift;
} encoder;

ALWAYS_INLINE encoder make_encoder(const bsh_format format) {
  encode_grid grid;
  make_grid(format, &grid);
  return (encoder){v_read(grid.threshold),
                   v_read(grid.threshold + LANES),
                   (ints)_mm512_loadu_si512(grid.codes),
                   (ints)_mm512_loadu_si512(grid.codes + LANES),
                   v_set(grid.scale),
                   v_set(grid.shift)};
}

ALWAYS_INLINE ints encode(const encoder *const grid, const bsh_format format, const floats x, const floats inverse) {
  const floats v = x * inverse, key = format == BSH_NF4 ? v : v_abs(v);
  const __m512i cell = _mm512_cvttps_epi32(v_fma(key, grid->scale, grid->shift));
  const floats threshold = _mm512_permutex2var_ps(grid->threshold0, cell, grid->threshold1);
  const __m512i codes = _mm512_permutex2var_epi32((__m512i)grid->codes0, cell, (__m512i)grid->codes1);
  const __m512i code = _mm512_mask_srli_epi32(codes, v_above(key, threshold), codes, 4);
  if (format == BSH_NF4) return (ints)code & 15;
  const floats least = v_set(-FLT_MIN); /* a product or an element that is flushed has no sign */
  const mask negative = _mm512_mask_cmp_ps_mask(v_at_most(v, least), x, least, _CMP_LE_OQ);
  const __m512i signless = _mm512_and_si512(code, _mm512_set1_epi32(7));
  return (ints)_mm512_mask_or_epi32(code, negative, signless, _mm512_set1_epi32(8)) & 15;
}

/* ---- int8 ------------------------------------------------------------------------------------------------------- */

ALWAYS_INLINE ints i_load_words(const int8_t *const codes) {
  return (ints)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)codes));
}

/* By vpmaddwd, whose sums of two fit an int32 for any codes. One after the other: gcc computes all products first, and
 * runs out of registers. */
ALWAYS_INLINE ints i_multiply_words(ints sum, const ints a, const ints b) {
  ints products;
  __asm__("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+v"(sum), "=&v"(products) : "vm"(a), "v"(b));
  return sum;
}

ALWAYS_INLINE void i_reduce4(const ints sums[4], int32_t out[4]) {
  const __m512i a = (__m512i)sums[0], b = (__m512i)sums[1], c = (__m512i)sums[2], d = (__m512i)sums[3];
  const __m512i low = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i high = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  const __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
  const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
  _mm_storeu_si128((__m128i *)out, _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
}

#endif
