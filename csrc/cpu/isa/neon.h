/* cpu/isa/neon.h - cpu/isa/vectors.h with NEON, which every 64-bit Arm CPU has.
 *
 * The 16 values of a block, already scaled and rounded, are looked up by tbl, a byte of 16 values at a time. */
#ifndef BSH_CPU_ISA_NEON_H
#define BSH_CPU_ISA_NEON_H

#include <arm_neon.h>

#define LANES 4
#define REGISTERS 32
#include "cpu/isa/vectors.h"

typedef unsigneds mask; /* all bits of a lane, or none */
enum { MASKED_ENDS = 0 };

/* ---- numbers --------------------------------------------------------------------------------------------------- */

ALWAYS_INLINE floats v_set(const float number) { return (floats)vdupq_n_f32(number); }
ALWAYS_INLINE floats v_sqrt(const floats a) { return (floats)vsqrtq_f32((float32x4_t)a); }
ALWAYS_INLINE float v_sum(const floats v) { return vaddvq_f32((float32x4_t)v); }

ALWAYS_INLINE floats v_fma(const floats a, const floats b, const floats c) {
  return (floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}

ALWAYS_INLINE floats v_hold(floats v) {
  __asm__("" : "+w"(v));
  return v;
}

ALWAYS_INLINE ints i_max(const ints a, const ints b) { return (ints)vmaxq_u32((uint32x4_t)a, (uint32x4_t)b); }
ALWAYS_INLINE words w_max(const words a, const words b) { return (words)vmaxq_u16((uint16x8_t)a, (uint16x8_t)b); }
ALWAYS_INLINE uint32_t i_reduce_max(const ints v) { return vmaxvq_u32((uint32x4_t)v); }

ALWAYS_INLINE words i_upper_halves(const ints a, const ints b) {
  return (words)vuzp2q_u16((uint16x8_t)a, (uint16x8_t)b);
}

/* ---- masks ------------------------------------------------------------------------------------------------------ */

ALWAYS_INLINE mask v_above(const floats a, const floats b) { return (mask)(a > b); }
ALWAYS_INLINE mask v_at_most(const floats a, const floats b) { return (mask)(a <= b); }
ALWAYS_INLINE mask v_equal(const floats a, const floats b) { return (mask)(a == b); }
ALWAYS_INLINE ints i_count(const ints n, const mask m) { return n - (ints)m; }
ALWAYS_INLINE bool m_any(const mask m) { return vmaxvq_u32((uint32x4_t)m) != 0; }
ALWAYS_INLINE mask m_all(void) { return (mask){0} - 1; }

ALWAYS_INLINE floats v_choose(const mask m, const floats a, const floats b) {
  return (floats)vbslq_f32((uint32x4_t)m, (float32x4_t)a, (float32x4_t)b);
}

ALWAYS_INLINE floats v_sign(const floats a) {
  const mask above = v_above(a, v_set(0.0f)), below = v_above(v_set(0.0f), a);
  return (floats)((above & (mask)v_set(1.0f)) | (below & (mask)v_set(-1.0f)));
}

/* ---- rounding --------------------------------------------------------------------------------------------------- */

ALWAYS_INLINE floats v_flush(const floats v) {
  const mask normal = (mask)vtstq_u32((uint32x4_t)v, vdupq_n_u32(0x7F800000));
  return v_choose(normal, v, (floats)((unsigneds)v & 0x80000000));
}

ALWAYS_INLINE floats canonical_nan(const floats v) {
  return v_choose(v_equal(v, v), v, (floats)((mask){0} + 0x7FFFFFFF));
}

/* bf16 in the upper half of each lane, nearest even; what is below is not defined, and NaN become anything. */
ALWAYS_INLINE unsigneds round_bf16(const floats v) {
  const unsigneds bits = (unsigneds)v; /* the lowest bit that stays is added by a shift: one instruction less */
  return (unsigneds)vsraq_n_u32((uint32x4_t)(bits + 0x7FFF), (uint32x4_t)(bits << 15), 31);
}

ALWAYS_INLINE uint16x4_t to_bf16(const floats v) {
  const uint16x4_t rounded = vshrn_n_u32((uint32x4_t)round_bf16(v), 16);
  return vbsl_u16(vmovn_u32((uint32x4_t)v_equal(v, v)), rounded, vdup_n_u16(0x7FFF));
}

ALWAYS_INLINE uint16x4_t to_f16(const floats v) { return vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v)); }

ALWAYS_INLINE floats from_f16(const uint16x4_t words) { return (floats)vcvt_f32_f16(vreinterpret_f16_u16(words)); }

ALWAYS_INLINE floats v_round_number(const bsh_dtype dtype, const floats v) {
  if (dtype == BSH_F32) return v;
  if (dtype == BSH_F16) return from_f16(to_f16(v));
  return (floats)(round_bf16(v) & 0xFFFF0000);
}

ALWAYS_INLINE floats v_round(const bsh_dtype dtype, const floats v) {
  if (dtype == BSH_F32) return v;
  if (dtype == BSH_F16) return v_round_number(dtype, canonical_nan(v));
  return v_choose(v_equal(v, v), v_round_number(dtype, v), (floats)((mask){0} + 0x7FFF0000));
}

/* ---- memory ----------------------------------------------------------------------------------------------------- */

ALWAYS_INLINE floats v_load(const void *const x, const bsh_dtype dtype, const int64_t i) {
  if (dtype == BSH_F32) return v_read((const float *)x + i);
  const uint16x4_t words = vld1_u16((const uint16_t *)x + i);
  if (dtype == BSH_F16) return from_f16(words);
  return (floats)((unsigneds)vmovl_u16(words) << 16);
}

ALWAYS_INLINE uint16x4_t to_16bit(const bsh_dtype dtype, const floats v) {
  return dtype == BSH_F16 ? to_f16(canonical_nan(v)) : to_bf16(v);
}

ALWAYS_INLINE void v_store(void *const out, const bsh_dtype dtype, const int64_t i, const floats v) {
  if (dtype == BSH_F32) v_write((float *)out + i, canonical_nan(v));
  else vst1_u16((uint16_t *)out + i, to_16bit(dtype, v));
}

#include "cpu/isa/lane_by_lane.h"

/* LANES bytes, zeros behind them. */
ALWAYS_INLINE uint8x8_t load_bytes(const void *const bytes) {
  uint32_t four;
  memcpy(&four, bytes, sizeof four);
  return vreinterpret_u8_u32(vset_lane_u32(four, vdup_n_u32(0), 0));
}

ALWAYS_INLINE floats v_load_codes(const int8_t *const codes) {
  const int16x8_t widened = vmovl_s8(vreinterpret_s8_u8(load_bytes(codes)));
  return (floats)vcvtq_f32_s32(vmovl_s16(vget_low_s16(widened)));
}

ALWAYS_INLINE ints i_load_bytes(const uint8_t *const bytes) {
  return (ints)vmovl_u16(vget_low_u16(vmovl_u8(load_bytes(bytes))));
}

ALWAYS_INLINE void i_store_bytes(void *const out, const ints v) {
  const uint8x16_t words = vreinterpretq_u8_u16(vuzp1q_u16((uint16x8_t)v, (uint16x8_t)v));
  const uint32_t four = vgetq_lane_u32(vreinterpretq_u32_u8(vuzp1q_u8(words, words)), 0);
  memcpy(out, &four, sizeof four);
}

ALWAYS_INLINE void w_store_bytes(uint8_t *const out, const words a, const words b) {
  vst1q_u8(out, vuzp1q_u8((uint8x16_t)a, (uint8x16_t)b));
}

ALWAYS_INLINE void i_store_nibbles(uint8_t *const out, const ints v[8]) {
  uint8x16_t codes[2]; /* one a byte */
  UNROLL for (int i = 0; i < 2; i++) {
    const uint16x8_t low = vuzp1q_u16((uint16x8_t)v[4 * i], (uint16x8_t)v[4 * i + 1]);
    const uint16x8_t high = vuzp1q_u16((uint16x8_t)v[4 * i + 2], (uint16x8_t)v[4 * i + 3]);
    codes[i] = vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high));
  }
  vst1q_u8(out, vsliq_n_u8(vuzp2q_u8(codes[0], codes[1]), vuzp1q_u8(codes[0], codes[1]), 4));
}

/* ---- tables ----------------------------------------------------------------------------------------------------- */

ALWAYS_INLINE floats v_gather(const float *const table, const ints at, const mask all) {
  (void)all;
  return (floats){table[at[0]], table[at[1]], table[at[2]], table[at[3]]};
}

ALWAYS_INLINE ints i_gather(const uint32_t *const table, const ints at, const mask all) {
  return (ints)v_gather((const float *)table, at, all);
}

/* The bytes of the fp32 numbers n[lane] of a table. */
ALWAYS_INLINE uint8x16_t bytes_of(const unsigneds n) { return (uint8x16_t)(n * 0x04040404 + 0x03020100); }

ALWAYS_INLINE uint8x16_t read_bytes(const void *const x) { return (uint8x16_t)v_read(x); }

/* table[n[lane]] of 4 or 8 numbers. */
ALWAYS_INLINE floats look_up4(const float *const table, const unsigneds n) {
  return (floats)vqtbl1q_u8(read_bytes(table), bytes_of(n));
}

ALWAYS_INLINE floats look_up8(const float *const table, const unsigneds n) {
  const uint8x16x2_t bytes = {{read_bytes(table), read_bytes(table + 4)}};
  return (floats)vqtbl2q_u8(bytes, bytes_of(n));
}

ALWAYS_INLINE floats v_heap_entry(const float *const heap, const int level, const ints node) {
  if (level > 3) return v_gather(heap, node, m_all());
  if (level == 3) return look_up8(heap + 8, (unsigneds)node & 7);
  return look_up4(heap + (level == 2 ? 4 : 0), (unsigneds)node & 3);
}

/* ---- 4 bits ----------------------------------------------------------------------------------------------------- */

/* Thresholds as a binary tree, whose third and fourth levels are looked up. */
typedef struct {
  floats first, second[2];
  float third[4], fourth[8];
  uint8_t codes[16];
} encoder;

ALWAYS_INLINE encoder make_encoder(const bsh_format format) {
  static const uint32_t nf4[15] = {BSH_NF4_THRESHOLD_BITS}, fp4[7] = {BSH_FP4_THRESHOLD_BITS};
  const int n = format == BSH_NF4 ? 16 : 8;
  const uint32_t *const below = format == BSH_NF4 ? nf4 : fp4; /* below[i]: between i and i + 1 */
  encoder tree = {.first = v_set(bits_float(below[n / 2 - 1])),
                  .second = {v_set(bits_float(below[n / 4 - 1])), v_set(bits_float(below[n / 2 + n / 4 - 1]))},
                  .codes = {BSH_FP4_ORDER}};
  for (int i = 0; i < 4; i++) tree.third[i] = bits_float(below[n / 8 - 1 + i * (n / 4)]);
  for (int i = 0; i < 8 && format == BSH_NF4; i++) tree.fourth[i] = bits_float(below[2 * i]);
  return tree;
}

/* n with the answer of a comparison behind its bits. */
ALWAYS_INLINE unsigneds append(const unsigneds n, const mask answer) {
  return (unsigneds)vsliq_n_u32((uint32x4_t)answer, (uint32x4_t)n, 1);
}

/* Codes of 4 elements of a block. */
ALWAYS_INLINE ints encode(const encoder *const tree, const bsh_format format, const floats x, const floats inverse) {
  const floats v = x * inverse, key = format == BSH_NF4 ? v : v_abs(v);
  const mask upper = v_above(key, tree->first);
  unsigneds n = append(upper >> 31, v_above(key, v_choose(upper, tree->second[1], tree->second[0])));
  n = append(n, v_above(key, look_up4(tree->third, n)));
  if (format == BSH_NF4) return (ints)append(n, v_above(key, look_up8(tree->fourth, n)));
  const floats least = v_set(-FLT_MIN); /* a product or an element that is flushed has no sign */
  const ints sign = (v <= least) & (x <= least) & 8;
  return (ints)vqtbl1q_u8(read_bytes(tree->codes), (uint8x16_t)n) | sign; /* the code of 0 is 0 */
}

/* Byte b, the lowest first, of 16 values: those of 16 bits have two. */
typedef struct {
  uint8x16_t byte[4];
} table_bytes;

ALWAYS_INLINE void split_words(const uint16x8_t low, const uint16x8_t high, uint8x16_t planes[2]) {
  planes[0] = vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high));
  planes[1] = vuzp2q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high));
}

/* Planes of the upper 16 bits of fp32 values, or unsigneds. */
#define split_upper(values, planes)                                                                                    \
  split_words((uint16x8_t)i_upper_halves((ints)(values)[0], (ints)(values)[1]),                                        \
              (uint16x8_t)i_upper_halves((ints)(values)[2], (ints)(values)[3]), planes)

ALWAYS_INLINE table_bytes make_f32_table(const floats values[4]) {
  table_bytes table;
  split_words(vuzp1q_u16((uint16x8_t)values[0], (uint16x8_t)values[1]),
              vuzp1q_u16((uint16x8_t)values[2], (uint16x8_t)values[3]), table.byte);
  split_upper(values, table.byte + 2);
  return table;
}

typedef table_bytes table_f32;
typedef table_bytes table_16bit;

ALWAYS_INLINE table_16bit make_table(const floats values[4], const bsh_dtype dtype) {
  table_16bit table;
  if (dtype == BSH_BF16) split_upper(values, table.byte);
  else
    split_words(vcombine_u16(to_f16(values[0]), to_f16(values[1])), vcombine_u16(to_f16(values[2]), to_f16(values[3])),
                table.byte);
  return table;
}

/* 16 bytes -> 32 codes, one a byte. */
ALWAYS_INLINE uint8x16x2_t spread16(const uint8_t *const packed) {
  const uint8x16_t bytes = vld1q_u8(packed), even = vshrq_n_u8(bytes, 4), odd = vandq_u8(bytes, vdupq_n_u8(15));
  return (uint8x16x2_t){{vzip1q_u8(even, odd), vzip2q_u8(even, odd)}};
}

/* Words of two bytes of the values of codes: of the first and the last 8 codes. */
ALWAYS_INLINE void look_up_words(const uint8x16_t planes[2], const uint8x16_t codes, uint16x8_t words[2]) {
  const uint8x16_t low = vqtbl1q_u8(planes[0], codes), high = vqtbl1q_u8(planes[1], codes);
  words[0] = vreinterpretq_u16_u8(vzip1q_u8(low, high));
  words[1] = vreinterpretq_u16_u8(vzip2q_u8(low, high));
}

/* No store bypasses the cache. */
ALWAYS_INLINE void end_stream(void) {}

ALWAYS_INLINE void decode32_16bit(const uint8_t *const packed, const table_16bit *const table,
                                  const table_16bit *const second, char *const out, const bool stream) {
  (void)stream;
  const uint8x16x2_t codes = spread16(packed);
  UNROLL for (int i = 0; i < 2; i++) {
    uint16x8_t words[2];
    look_up_words((i == 1 && second ? second : table)->byte, codes.val[i], words);
    memcpy(out + 32 * i, words, sizeof words);
  }
}

ALWAYS_INLINE void decode32_f32(const uint8_t *const packed, const table_f32 *const table,
                                const table_f32 *const second, char *const out, const bool stream) {
  (void)stream;
  const uint8x16x2_t codes = spread16(packed);
  UNROLL for (int i = 0; i < 2; i++) {
    const table_f32 *const own = i == 1 && second ? second : table;
    uint16x8_t low[2], high[2];
    look_up_words(own->byte, codes.val[i], low);
    look_up_words(own->byte + 2, codes.val[i], high);
    UNROLL for (int j = 0; j < 2; j++) {
      const uint16x8_t numbers[2] = {vzip1q_u16(low[j], high[j]), vzip2q_u16(low[j], high[j])};
      memcpy(out + 64 * i + 32 * j, numbers, sizeof numbers);
    }
  }
}

/* Vector j = 8 h + 2 u + p has elements 2 i + h of the bytes i = 8 u + 2 lane + p. */
typedef table_bytes group_table;
typedef struct {
  uint8x16_t half[2];
} group_codes;
enum { BF16_GROUPS = 1 };

ALWAYS_INLINE int group_element(const int j, const int lane) {
  return 2 * (8 * (j / 2 % 4) + 2 * lane + j % 2) + j / 8;
}

ALWAYS_INLINE group_table make_group_table(const floats scaled[4], const bsh_dtype dtype) {
  floats values[4];
  if (dtype != BSH_BF16) {
    UNROLL for (int i = 0; i < 4; i++) values[i] = v_round_number(dtype, scaled[i]);
    return make_f32_table(values);
  }
  group_table table = {{vdupq_n_u8(0), vdupq_n_u8(0)}};
  UNROLL for (int i = 0; i < 4; i++) values[i] = (floats)round_bf16(scaled[i]);
  split_upper(values, table.byte + 2);
  return table;
}

ALWAYS_INLINE group_codes load_group(const uint8_t *const packed) {
  return (group_codes){{vld1q_u8(packed), vld1q_u8(packed + 16)}};
}

ALWAYS_INLINE floats decode_vector(const group_codes *const codes, const group_table *const table,
                                   const bsh_dtype dtype, const int j) {
  const uint8x16_t bytes = codes->half[j / 4 % 2];
  const uint8x16_t nibbles = j < 8 ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15));
  uint16x8_t low[2] = {vdupq_n_u16(0), vdupq_n_u16(0)}, high[2];
  if (dtype != BSH_BF16) look_up_words(table->byte, nibbles, low);
  look_up_words(table->byte + 2, nibbles, high);
  const uint16x8_t a = low[j / 2 % 2], b = high[j / 2 % 2];
  return (floats)(j % 2 ? vtrn2q_u16(a, b) : vtrn1q_u16(a, b));
}

typedef table_bytes block_table;

ALWAYS_INLINE void store_block_table(const floats values[4], block_table *const table) {
  *table = make_f32_table(values);
}

ALWAYS_INLINE group_table join_tables(const block_table *const quarters[4], const bsh_dtype dtype, const int j) {
  (void)dtype;
  return *quarters[j / 2 % 4];
}

ALWAYS_INLINE void add_lane_sums(const floats *const v, const int64_t n, float *const sums) {
  for (int64_t i = 0; i < n; i++) sums[i] += v_sum(v[i]);
}

/* ---- int8 ------------------------------------------------------------------------------------------------------- */

ALWAYS_INLINE ints i_load_words(const int8_t *const codes) { return (ints)vmovl_s8(vld1_s8(codes)); }

/* Which products a lane has does not matter: its sum is one of all lanes. */
ALWAYS_INLINE ints i_multiply_words(const ints sum, const ints a, const ints b) {
  const int32x4_t low = vmlal_s16((int32x4_t)sum, vget_low_s16((int16x8_t)a), vget_low_s16((int16x8_t)b));
  return (ints)vmlal_high_s16(low, (int16x8_t)a, (int16x8_t)b);
}

ALWAYS_INLINE void i_reduce4(const ints sums[4], int32_t out[4]) {
  const int32x4_t low = vpaddq_s32((int32x4_t)sums[0], (int32x4_t)sums[1]);
  const int32x4_t all = vpaddq_s32(low, vpaddq_s32((int32x4_t)sums[2], (int32x4_t)sums[3]));
  memcpy(out, &all, sizeof all);
}

#endif
