/* core/numerics.h - the scalar arithmetic every CPU kernel agrees on.
 *
 * The rule is what the CUDA build of bitsandbytes computes: fp32 products with flush-to-zero (denormal operands and
 * results count as zero of the same sign), one rounding per step, no FMA, the GPU's approximate reciprocal. Flushing is
 * explicit here and never a mode of the CPU. A NaN is written as the GPU writes it: 0x7FFFFFFF, 0x7FFF in 16 bits. */
#ifndef BSH_CORE_NUMERICS_H
#define BSH_CORE_NUMERICS_H

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "core/arithmetic.h"
#include "core/kernels.h"

static inline uint32_t float_bits(const float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float bits_float(const uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static inline float flush_denormal(const float value) {
  const uint32_t bits = float_bits(value);
  return (bits & 0x7F800000u) ? value : bits_float(bits & 0x80000000u);
}

static inline float multiply_flush(const float a, const float b) {
  return flush_denormal(flush_denormal(a) * flush_denormal(b));
}

static inline float bf16_to_f32(const uint16_t value) { return bits_float((uint32_t)value << 16); }

static inline uint16_t f32_to_bf16(const float value) {
  const uint32_t bits = float_bits(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FFF;
  return (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

static inline float f16_to_f32(const uint16_t value) {
  const uint32_t sign = (uint32_t)(value & 0x8000u) << 16;
  const uint32_t magnitude = value & 0x7FFFu;
  if (magnitude >= 0x7C00u) return bits_float(sign | 0x7F800000u | ((magnitude & 0x3FFu) << 13));
  if (magnitude >= 0x0400u) return bits_float(sign | ((magnitude << 13) + 0x38000000u));
  return bits_float(sign | float_bits((float)magnitude * 0x1p-24f));
}

static inline uint16_t f32_to_f16(const float value) {
  const uint32_t bits = float_bits(value);
  const uint16_t sign = (uint16_t)((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return 0x7FFF;
  if (magnitude >= 0x477FF000u) return sign | 0x7C00; /* 65520 and more round to infinity */
  if (magnitude >= 0x38800000u) {
    const uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
    return (uint16_t)(sign | ((rounded - 0x38000000u) >> 13));
  }
  const float shifted = bits_float(magnitude) * 0x1p24f + 0x1p23f; /* the sum rounds to the spacing of fp16 denormals */
  return (uint16_t)(sign | (float_bits(shifted) & 0x7FFFu));
}

static inline float load_f32(const void *const x, const bsh_dtype dtype, const int64_t i) {
  if (dtype == BSH_F32) return ((const float *)x)[i];
  const uint16_t value = ((const uint16_t *)x)[i];
  return dtype == BSH_BF16 ? bf16_to_f32(value) : f16_to_f32(value);
}

static inline void store_f32(void *const out, const bsh_dtype dtype, const int64_t i, const float value) {
  if (dtype == BSH_F32) ((float *)out)[i] = value == value ? value : bits_float(0x7FFFFFFFu);
  else ((uint16_t *)out)[i] = dtype == BSH_BF16 ? f32_to_bf16(value) : f32_to_f16(value);
}

/* The fp32 number that `value` becomes when stored as `dtype`. */
static inline float round_to_dtype(const float value, const bsh_dtype dtype) {
  if (dtype == BSH_BF16) return bf16_to_f32(f32_to_bf16(value));
  if (dtype == BSH_F16) return f16_to_f32(f32_to_f16(value));
  return value == value ? value : bits_float(0x7FFFFFFFu);
}

/* rcp.approx.ftz.f32 of an H200: exact table for mantissas of at most 10 bits, else the correctly rounded reciprocal.
 * `value` is an absmax: zero, normal, infinite or -FLT_MAX (a block of NaN only). */
static inline float reciprocal(const float value) {
  static const uint64_t corrections[32] = {BSH_RCP_WORDS};
  const float rounded = 1.0f / value;
  const uint32_t bits = float_bits(rounded);
  const uint32_t exponent = bits & 0x7F800000u;
  if (exponent == 0) return bits_float(bits & 0x80000000u);
  const uint32_t mantissa = float_bits(value) & 0x7FFFFFu;
  if (exponent == 0x7F800000u || (mantissa & 0x1FFFu)) return rounded;
  const uint32_t index = mantissa >> 13;
  const uint32_t correction = (uint32_t)(corrections[index / 32] >> (2 * (index % 32))) & 3u;
  return bits_float(bits + correction - 1u);
}

/* What a row of x of this absmax is multiplied by to become int8 codes: 127 * (1 / absmax), two roundings. Where x is
 * fp16 this is __fdividef(127, absmax) of a GPU, whose reciprocal is approximate; else both are rounded correctly, as
 * torch divides a number by a tensor (a reciprocal below 2^-126 is avoided). 0, which makes every code 0, for an absmax
 * that is infinite or NaN, and where a denormal x would matter. */
static inline float int8_scale(const float absmax, const bsh_dtype dtype) {
  if (!(absmax >= 0x1p-118f && absmax <= FLT_MAX)) return 0.0f;
  return dtype == BSH_F16 ? 127.0f * reciprocal(absmax) : 31.75f * (4.0f / absmax);
}

/* rint(value * scale), to even, for an int8_scale; 0 for a value that is infinite or NaN. */
static inline int8_t int8_code(const float value, const float scale) {
  const float product = value * scale;
  return fabsf(product) <= 128.0f ? (int8_t)(float_bits(product + 0x1.8p23f) & 0xFF) : 0;
}

/* Largest magnitude so far, as max.ftz.f32 keeps it: NaN is passed over, denormals count as zero. */
static inline float absmax_step(const float absmax, const float value) {
  const float magnitude = flush_denormal(fabsf(value));
  return magnitude > absmax ? magnitude : absmax;
}

static inline uint8_t encode_nf4(const float v) {
  static const uint32_t thresholds[15] = {BSH_NF4_THRESHOLD_BITS};
  uint8_t code = 0;
  for (int i = 0; i < 15; i++) code += v > bits_float(thresholds[i]);
  return code;
}

/* Of FP4 and E2M1, whose values are magnitudes with a sign: the seven thresholds, and the code of each rank. */
typedef struct {
  uint32_t thresholds[7];
  uint8_t order[8];
} magnitude_codes;

static inline const magnitude_codes *magnitude_codes_of(const bsh_format format) {
  static const magnitude_codes fp4 = {{BSH_FP4_THRESHOLD_BITS}, {BSH_FP4_ORDER}};
  static const magnitude_codes e2m1 = {{BSH_E2M1_THRESHOLD_BITS}, {BSH_E2M1_ORDER}};
  return format == BSH_FP4 ? &fp4 : &e2m1;
}

static inline uint8_t encode_signed(const magnitude_codes *const codes, const float v) {
  int rank = 0;
  for (int i = 0; i < 7; i++) rank += fabsf(v) > bits_float(codes->thresholds[i]);
  return (uint8_t)(codes->order[rank] + (v < 0 ? 8 : 0));
}

/* Code of v = x / scale: the nearest value of the format. */
static inline uint8_t encode_4bit(const bsh_format format, const float v) {
  return format == BSH_NF4 ? encode_nf4(v) : encode_signed(magnitude_codes_of(format), v);
}

/* Nearest entry of a 256-entry map. Seven halvings against entries of odd index leave an entry of even index between
 * two odd ones; the midpoints decide, and a tie goes to the even index. A NaN compares false throughout: index 0. */
static inline uint8_t encode_8bit(const float *const map, const float v) {
  int odd = 127;
  for (int step = 64; step > 1; step /= 2) odd += v > map[odd] ? step : -step;
  const int even = odd + (v > map[odd] ? 1 : -1);
  if (v > map[even]) return (uint8_t)(even + (v > flush_denormal((map[even] + map[even + 1]) * 0.5f)));
  if (even == 0) return 0;
  return (uint8_t)(even - (v < flush_denormal((map[even] + map[even - 1]) * 0.5f)));
}

/* Scale of block `b`; denormal products count as zero. */
static inline float block_scale(const bsh_scales *const scales, const int64_t b) {
  if (scales->absmax) return scales->absmax[b];
  return multiply_flush(scales->absmax_map[scales->absmax_code[b]], scales->absmax2[b / BSH_NESTED_BLOCKSIZE]) +
         scales->offset[0];
}

static inline const float *format_values(const bsh_format format) {
  static const float values[BSH_4BIT_FORMATS][16] = BSH_4BIT_VALUES;
  return values[format];
}

/* The 16 values of block `b`, rounded to `dtype`. NF4 and FP4 flush denormal products, as bitsandbytes does; E2M1 keeps
 * them, as its specification does. */
static inline void block_values(const bsh_weight *const weight, const bsh_dtype dtype, const int64_t b,
                                float values[16]) {
  const float *const units = format_values(weight->format);
  const bsh_scales *const scales = &weight->scales;
  const bool flushes = weight->format != BSH_E2M1;
  float scale = block_scale(scales, b);
  if (!flushes && !scales->absmax)
    scale = scales->absmax_map[scales->absmax_code[b]] * scales->absmax2[b / BSH_NESTED_BLOCKSIZE] + scales->offset[0];
  for (int code = 0; code < 16; code++)
    values[code] = round_to_dtype(flushes ? multiply_flush(units[code], scale) : units[code] * scale, dtype);
}

static inline uint8_t packed_code(const uint8_t *const packed, const int64_t i) {
  return i % 2 ? packed[i / 2] & 15 : packed[i / 2] >> 4;
}

#endif
