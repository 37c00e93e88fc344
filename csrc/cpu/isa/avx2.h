/* cpu/isa/avx2.h - cpu/isa/vectors.h with AVX2, FMA and F16C.
 *
 * The 16 values of a block, already scaled and rounded, are looked up by vpshufb, a byte of 32 values at a time. */
#ifndef BSH_CPU_ISA_AVX2_H
#define BSH_CPU_ISA_AVX2_H

#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "compile this file with -mavx2 -mfma -mf16c"
#endif

#include <immintrin.h>

#define LANES 8
#define REGISTERS 16
#include "cpu/isa/vectors.h"

typedef floats mask; /* all bits of a lane, or none */
enum { MASKED_ENDS = 0 };

/* ---- numbers --------------------------------------------------------------------------------------------------- */

ALWAYS_INLINE floats v_set(const float number) { return _mm256_set1_ps(number); }
ALWAYS_INLINE floats v_fma(const floats a, const floats b, const floats c) { return _mm256_fmadd_ps(a, b, c); }
ALWAYS_INLINE floats v_sqrt(const floats a) { return _mm256_sqrt_ps(a); }

ALWAYS_INLINE float v_sum(const floats v) {
  __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}

ALWAYS_INLINE floats v_hold(floats v) {
  __asm__("" : "+x"(v));
  return v;
}

ALWAYS_INLINE ints i_max(const ints a, const ints b) { return (ints)_mm256_max_epu32((__m256i)a, (__m256i)b); }
ALWAYS_INLINE words w_max(const words a, const words b) { return (words)_mm256_max_epu16((__m256i)a, (__m256i)b); }

ALWAYS_INLINE uint32_t i_reduce_max(const ints v) {
  __m128i most = _mm_max_epu32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0x4E));
  most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0xB1));
  return (uint32_t)_mm_cvtsi128_si32(most);
}

ALWAYS_INLINE words i_upper_halves(const ints a, const ints b) {
  const __m256i pairs = _mm256_packus_epi32(_mm256_srli_epi32((__m256i)a, 16), _mm256_srli_epi32((__m256i)b, 16));
  return (words)_mm256_permute4x64_epi64(pairs, 0xD8); /* quarters a b a b -> a a b b */
}

/* ---- masks ------------------------------------------------------------------------------------------------------ */

ALWAYS_INLINE mask v_above(const floats a, const floats b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
ALWAYS_INLINE mask v_at_most(const floats a, const floats b) { return _mm256_cmp_ps(a, b, _CMP_LE_OQ); }
ALWAYS_INLINE mask v_equal(const floats a, const floats b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
ALWAYS_INLINE floats v_choose(const mask m, const floats a, const floats b) { return _mm256_blendv_ps(b, a, m); }
ALWAYS_INLINE ints i_count(const ints n, const mask m) { return n - (ints)m; }
ALWAYS_INLINE bool m_any(const mask m) { return _mm256_movemask_ps(m) != 0; }
ALWAYS_INLINE mask m_all(void) { return v_hold((floats)_mm256_set1_epi32(-1)); }

ALWAYS_INLINE floats v_sign(const floats a) {
  const floats above = _mm256_and_ps(v_above(a, v_set(0.0f)), v_set(1.0f));
  return _mm256_or_ps(above, _mm256_and_ps(v_above(v_set(0.0f), a), v_set(-1.0f)));
}

/* ---- rounding --------------------------------------------------------------------------------------------------- */

ALWAYS_INLINE floats v_flush(const floats v) {
  const mask denormal = (mask)_mm256_cmpeq_epi32((__m256i)((ints)v & 0x7F800000), _mm256_setzero_si256());
  return v_choose(denormal, _mm256_and_ps(v, v_set(-0.0f)), v);
}

ALWAYS_INLINE floats canonical_nan(const floats v) {
  return v_choose(_mm256_cmp_ps(v, v, _CMP_UNORD_Q), (floats)_mm256_set1_epi32(0x7FFFFFFF), v);
}

/* bf16 in the upper half of each lane, nearest even; what is below is not defined, and NaN become anything. */
ALWAYS_INLINE unsigneds round_bf16(const floats v) {
  const unsigneds bits = (unsigneds)v;
  return bits + 0x7FFF + (bits >> 16 & 1);
}

ALWAYS_INLINE __m128i to_bf16(const floats v) {
  const mask nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
  const __m256i words =
      _mm256_blendv_epi8((__m256i)(round_bf16(v) >> 16), _mm256_set1_epi32(0x7FFF), _mm256_castps_si256(nan));
  return _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

ALWAYS_INLINE __m128i to_f16(const floats v) {
  return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

ALWAYS_INLINE floats v_round_number(const bsh_dtype dtype, const floats v) {
  if (dtype == BSH_F32) return v;
  if (dtype == BSH_F16) return _mm256_cvtph_ps(to_f16(v));
  return (floats)(round_bf16(v) & 0xFFFF0000);
}

ALWAYS_INLINE floats v_round(const bsh_dtype dtype, const floats v) {
  if (dtype == BSH_F32) return v;
  if (dtype == BSH_F16) return v_round_number(dtype, canonical_nan(v));
  const floats nan = (floats)_mm256_set1_epi32(0x7FFF0000);
  return v_choose(_mm256_cmp_ps(v, v, _CMP_UNORD_Q), nan, v_round_number(dtype, v));
}

/* ---- memory ----------------------------------------------------------------------------------------------------- */

ALWAYS_INLINE floats v_load(const void *const x, const bsh_dtype dtype, const int64_t i) {
  if (dtype == BSH_F32) return _mm256_loadu_ps((const float *)x + i);
  const __m128i words = _mm_loadu_si128((const __m128i *)((const uint16_t *)x + i));
  if (dtype == BSH_F16) return _mm256_cvtph_ps(words);
  return (floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16);
}

ALWAYS_INLINE void v_store(void *const out, const bsh_dtype dtype, const int64_t i, const floats v) {
  if (dtype == BSH_F32) {
    _mm256_storeu_ps((float *)out + i, canonical_nan(v));
    return;
  }
  const __m128i words = dtype == BSH_F16 ? to_f16(canonical_nan(v)) : to_bf16(v);
  _mm_storeu_si128((__m128i *)((uint16_t *)out + i), words);
}

#include "cpu/isa/lane_by_lane.h"

ALWAYS_INLINE floats v_load_codes(const int8_t *const codes) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)codes)));
}

ALWAYS_INLINE ints i_load_bytes(const uint8_t *const bytes) {
  return (ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)bytes));
}

ALWAYS_INLINE void i_store_bytes(void *const out, const ints v) {
  const __m256i lowest = _mm256_shuffle_epi8((__m256i)v, _mm256_set1_epi32(0x0C080400)); /* in each half */
  _mm_storel_epi64((__m128i *)out,
                   _mm_unpacklo_epi32(_mm256_castsi256_si128(lowest), _mm256_extracti128_si256(lowest, 1)));
}

ALWAYS_INLINE void w_store_bytes(uint8_t *const out, const words a, const words b) {
  const __m256i bytes = _mm256_packus_epi16((__m256i)a, (__m256i)b); /* quarters a b a b */
  _mm256_storeu_si256((__m256i *)out, _mm256_permute4x64_epi64(bytes, 0xD8));
}

ALWAYS_INLINE void i_store_nibbles(uint8_t *const out, const ints v[4]) {
  /* 128-bit lane l: four codes of each vector from 4 l on; then pairs even << 4 | odd; then the lanes together. */
  const __m256i codes = _mm256_packus_epi16(_mm256_packus_epi32((__m256i)v[0], (__m256i)v[1]),
                                            _mm256_packus_epi32((__m256i)v[2], (__m256i)v[3]));
  const __m256i words = _mm256_maddubs_epi16(codes, _mm256_set1_epi16(0x0110));
  const __m256i bytes = _mm256_packus_epi16(words, words);
  _mm_storeu_si128((__m128i *)out,
                   _mm_unpacklo_epi16(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)));
}

/* ---- tables ----------------------------------------------------------------------------------------------------- */

ALWAYS_INLINE floats v_gather(const float *const table, const ints at, const mask all) {
  return _mm256_mask_i32gather_ps(_mm256_setzero_ps(), table, (__m256i)at, all, 4);
}

ALWAYS_INLINE ints i_gather(const uint32_t *const table, const ints at, const mask all) {
  return (ints)_mm256_mask_i32gather_epi32(_mm256_setzero_si256(), (const int *)table, (__m256i)at, (__m256i)all, 4);
}

ALWAYS_INLINE floats v_heap_entry(const float *const heap, const int level, const ints node) {
  if (level > 3) return v_gather(heap, node, m_all());
  return _mm256_permutevar8x32_ps(v_read(heap + (level == 3 ? 8 : 0)), (__m256i)node); /* by three bits of node */
}

/* ---- 4 bits ----------------------------------------------------------------------------------------------------- */

/* Thresholds as a binary tree, whose third and fourth levels are looked up. Both, and the codes, lie at minus their
 * index modulo their count, as a comparison counts -1. */
typedef struct {
  floats first, second[2], third, fourth;
  ints codes;
} encoder;

ALWAYS_INLINE encoder make_encoder(const bsh_format format) {
  static const uint32_t nf4[15] = {BSH_NF4_THRESHOLD_BITS}, fp4[7] = {BSH_FP4_THRESHOLD_BITS};
  static const uint8_t fp4_order[8] = {BSH_FP4_ORDER};
  const floats none = {0};
  const int n = format == BSH_NF4 ? 16 : 8;
  const uint32_t *const below = format == BSH_NF4 ? nf4 : fp4; /* below[i]: between i and i + 1 */
  encoder tree = {v_set(bits_float(below[n / 2 - 1])),
                  {v_set(bits_float(below[n / 4 - 1])), v_set(bits_float(below[n / 2 + n / 4 - 1]))},
                  none,
                  none,
                  (ints)none};
  for (int i = 0; i < 8; i++) {
    tree.third[-i & 7] = bits_float(below[n / 8 - 1 + i % 4 * (n / 4)]);
    if (format == BSH_NF4) tree.fourth[-i & 7] = bits_float(below[2 * i]);
    else tree.codes[-i & 7] = fp4_order[i];
  }
  return tree;
}

/* Codes of 8 elements of a block. */
ALWAYS_INLINE ints encode(const encoder *const tree, const bsh_format format, const floats x, const floats inverse) {
  const floats v = x * inverse, key = format == BSH_NF4 ? v : v_abs(v);
  ints n = (ints)v_above(key, tree->first);
  n += n + (ints)v_above(key, v_choose((mask)n, tree->second[1], tree->second[0]));
  n += n + (ints)v_above(key, _mm256_permutevar_ps(tree->third, (__m256i)n));
  if (format == BSH_NF4) return -(n + n + (ints)v_above(key, _mm256_permutevar8x32_ps(tree->fourth, (__m256i)n)));
  const floats least = v_set(-FLT_MIN); /* a product or an element that is flushed has no sign */
  const ints sign = (v <= least) & (x <= least) & 8;
  return (ints)_mm256_permutevar8x32_epi32((__m256i)tree->codes, (__m256i)n) | sign;
}

/* Byte b, the lowest first, of 16 values, in both 128-bit lanes: those of 16 bits have two. */
typedef struct {
  __m256i byte[4];
} table_bytes;

/* Words, 0 to 3 and 8 to 11 in the lower lane and the others in the upper one, to two planes of bytes. */
ALWAYS_INLINE void split_words(const __m256i words, __m256i planes[2]) {
  const __m256i bytes =
      _mm256_packus_epi16(_mm256_and_si256(words, _mm256_set1_epi16(0xFF)), _mm256_srli_epi16(words, 8));
  planes[0] = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5));
  planes[1] = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(2, 6, 3, 7, 2, 6, 3, 7));
}

/* The words at bit `shift` of fp32 values, as split_words takes them. */
ALWAYS_INLINE __m256i words_at(const floats values[2], const int shift) {
  return _mm256_packus_epi32((__m256i)((unsigneds)values[0] >> shift & 0xFFFF),
                             (__m256i)((unsigneds)values[1] >> shift & 0xFFFF));
}

ALWAYS_INLINE table_bytes make_f32_table(const floats values[2]) {
  table_bytes table;
  split_words(words_at(values, 0), table.byte);
  split_words(words_at(values, 16), table.byte + 2);
  return table;
}

typedef table_bytes table_f32;
typedef table_bytes table_16bit;

ALWAYS_INLINE table_16bit make_table(const floats values[2], const bsh_dtype dtype) {
  table_16bit table;
  if (dtype == BSH_BF16) split_words(words_at(values, 16), table.byte);
  else split_words(_mm256_permute4x64_epi64(_mm256_set_m128i(to_f16(values[1]), to_f16(values[0])), 0xD8), table.byte);
  return table;
}

/* 16 bytes -> 32 codes, one a byte; `twice` names each byte twice. */
ALWAYS_INLINE __m256i spread16(const uint8_t *const packed, const __m256i twice) {
  const __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)packed));
  const unsigneds pairs = (unsigneds)_mm256_shuffle_epi8(bytes, twice);
  return (__m256i)((pairs >> 4 & 0x000F000F) | (pairs & 0x0F000F00));
}

/* Words of two bytes of the values of codes: of the first and the last 8 codes of each 128-bit lane. */
ALWAYS_INLINE void look_up_words(const __m256i planes[2], const __m256i codes, __m256i words[2]) {
  const __m256i low = _mm256_shuffle_epi8(planes[0], codes), high = _mm256_shuffle_epi8(planes[1], codes);
  words[0] = _mm256_unpacklo_epi8(low, high);
  words[1] = _mm256_unpackhi_epi8(low, high);
}

ALWAYS_INLINE void store_ymm(char *const out, const __m256i v, const bool stream) {
  if (stream) _mm256_stream_si256((__m256i *)out, v);
  else _mm256_storeu_si256((__m256i *)out, v);
}

ALWAYS_INLINE void end_stream(void) { _mm_sfence(); }

/* Each 128-bit lane takes the bytes whose codes end up in it. */
ALWAYS_INLINE void decode32_16bit(const uint8_t *const packed, const table_16bit *const table,
                                  const table_16bit *const second, char *const out, const bool stream) {
  const __m256i twice = _mm256_setr_epi8(0, 0, 1, 1, 2, 2, 3, 3, 8, 8, 9, 9, 10, 10, 11, 11, /* */
                                         4, 4, 5, 5, 6, 6, 7, 7, 12, 12, 13, 13, 14, 14, 15, 15);
  const __m256i codes = spread16(packed, twice);
  __m256i first[2], last[2];
  look_up_words(table->byte, codes, first);
  look_up_words((second ? second : table)->byte, codes, last);
  store_ymm(out, first[0], stream);
  store_ymm(out + 32, last[1], stream);
}

ALWAYS_INLINE void decode32_f32(const uint8_t *const packed, const table_f32 *const table,
                                const table_f32 *const second, char *const out, const bool stream) {
  const __m256i twice = _mm256_setr_epi8(0, 0, 1, 1, 4, 4, 5, 5, 8, 8, 9, 9, 12, 12, 13, 13, /* */
                                         2, 2, 3, 3, 6, 6, 7, 7, 10, 10, 11, 11, 14, 14, 15, 15);
  const __m256i codes = spread16(packed, twice);
  UNROLL for (int i = 0; i < 2; i++) {
    const table_f32 *const own = i == 1 && second ? second : table;
    __m256i low[2], high[2];
    look_up_words(own->byte, codes, low);
    look_up_words(own->byte + 2, codes, high);
    store_ymm(out + 64 * i, _mm256_unpacklo_epi16(low[i], high[i]), stream);
    store_ymm(out + 64 * i + 32, _mm256_unpackhi_epi16(low[i], high[i]), stream);
  }
}

/* Vector j = 4 h + 2 u + p has elements 2 i + h of the bytes i with u in bit 3 and p in bit 0. */
typedef table_bytes group_table;
typedef __m256i group_codes;
enum { BF16_GROUPS = 1 };

ALWAYS_INLINE int group_element(const int j, const int lane) {
  return 2 * (16 * (lane / 4) + 8 * (j / 2 % 2) + 2 * (lane % 4) + j % 2) + j / 4;
}

ALWAYS_INLINE group_table make_group_table(const floats scaled[2], const bsh_dtype dtype) {
  group_table table = {{_mm256_setzero_si256(), _mm256_setzero_si256()}};
  if (dtype == BSH_BF16) {
    const unsigneds low = round_bf16(scaled[0]) >> 16, high = round_bf16(scaled[1]) >> 16;
    split_words(_mm256_packus_epi32((__m256i)low, (__m256i)high), table.byte + 2);
    return table;
  }
  return make_f32_table((const floats[2]){v_round_number(dtype, scaled[0]), v_round_number(dtype, scaled[1])});
}

ALWAYS_INLINE group_codes load_group(const uint8_t *const packed) {
  return _mm256_loadu_si256((const __m256i *)packed);
}

ALWAYS_INLINE floats decode_vector(const group_codes *const codes, const group_table *const table,
                                   const bsh_dtype dtype, const int j) {
  const __m256i nibbles = (__m256i)((unsigneds)*codes >> (j < 4 ? 4 : 0) & 0x0F0F0F0F);
  __m256i low[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()}, high[2];
  if (dtype != BSH_BF16) look_up_words(table->byte, nibbles, low);
  look_up_words(table->byte + 2, nibbles, high);
  const __m256i a = low[j / 2 % 2], b = high[j / 2 % 2], even = _mm256_slli_epi32(b, 16);
  if (j % 2) return (floats)_mm256_blend_epi16(_mm256_srli_epi32(a, 16), b, 0xAA);
  return (floats)(dtype == BSH_BF16 ? even : _mm256_blend_epi16(a, even, 0xAA));
}

/* A table_bytes of one 128-bit lane. */
typedef struct {
  __m128i byte[4];
} block_table;

ALWAYS_INLINE void store_block_table(const floats values[2], block_table *const table) {
  const table_bytes both = make_f32_table(values);
  for (int b = 0; b < 4; b++) table->byte[b] = _mm256_castsi256_si128(both.byte[b]);
}

ALWAYS_INLINE group_table join_tables(const block_table *const quarters[4], const bsh_dtype dtype, const int j) {
  const block_table *const lower = quarters[j / 2 % 2], *const upper = quarters[2 + j / 2 % 2];
  group_table table = {{_mm256_setzero_si256(), _mm256_setzero_si256()}};
  UNROLL for (int b = dtype == BSH_BF16 ? 2 : 0; b < 4; b++) table.byte[b] =
      _mm256_set_m128i(upper->byte[b], lower->byte[b]);
  return table;
}

ALWAYS_INLINE void add_lane_sums(const floats *const v, const int64_t n, float *const sums) {
  for (int64_t i = 0; i < n; i++) sums[i] += v_sum(v[i]);
}

/* ---- int8 ------------------------------------------------------------------------------------------------------- */

ALWAYS_INLINE ints i_load_words(const int8_t *const codes) {
  return (ints)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)codes));
}

/* By vpmaddwd, whose sums of two fit an int32 for any codes (vpmaddubsw saturates). One after the other: gcc computes
 * all products first, and runs out of registers. */
ALWAYS_INLINE ints i_multiply_words(ints sum, const ints a, const ints b) {
  ints products;
  __asm__("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(products) : "xm"(a), "x"(b));
  return sum;
}

ALWAYS_INLINE void i_reduce4(const ints sums[4], int32_t out[4]) {
  const __m256i low = _mm256_hadd_epi32((__m256i)sums[0], (__m256i)sums[1]);
  const __m256i all = _mm256_hadd_epi32(low, _mm256_hadd_epi32((__m256i)sums[2], (__m256i)sums[3]));
  _mm_storeu_si128((__m128i *)out, _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
}

#endif
