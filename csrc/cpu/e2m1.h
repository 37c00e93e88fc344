/* cpu/e2m1.h - scales of blocks in MXFP4 and NVFP4, each of which is chosen before the codes of its block. */
#ifndef BSH_CPU_E2M1_H
#define BSH_CPU_E2M1_H

#include "core/numerics.h"
#include "cpu/cpu.h"

/* E8M0 of 2^(e - 2) for a largest magnitude in [2^e, 2^(e + 1)); 2^0 for 0, NaN for one that is not finite. */
static inline uint8_t e8m0_of(const float largest) {
  const uint32_t bits = float_bits(largest);
  if (bits == 0) return 127;
  if (bits >= 0x7F800000u) return 255;
  const int exponent = bits >> 23 ? (int)(bits >> 23) - 127 : -118 - __builtin_clz(bits);
  return (uint8_t)(exponent < 2 - 127 ? 0 : exponent > 252 - 125 ? 252 : exponent + 125);
}

/* E4M3 of a number from 2^-9 to 448, to the nearest, of two as near the even one; NaN of NaN. */
static inline uint8_t e4m3_of(const float scale) {
  const uint32_t bits = float_bits(scale);
  if (scale < 0x1p-6f) return (uint8_t)rintf(scale * 512.0f);
  if (scale != scale) return 0x7F;
  return (uint8_t)(((bits + 0x7FFFFu + (bits >> 20 & 1u)) >> 20) - (120u << 3));
}

static inline float e8m0_value(const uint8_t byte) {
  return bits_float(byte == 255 ? 0x7FC00000u : byte == 0 ? 0x400000u : (uint32_t)byte << 23);
}

static inline float e4m3_value(const uint8_t byte) {
  if (byte >= 0x7F) return bits_float(0x7FC00000u);
  return byte < 8 ? (float)byte * 0x1p-9f : bits_float(((uint32_t)byte + (120u << 3)) << 20);
}

/* The scale of a block of this largest magnitude (a NaN's is not finite), and what its values are divided by. */
static inline uint8_t short_scale(const bsh_quantize_e2m1_args *const args, const float largest, float *const unit) {
  uint8_t byte;
  if (args->whole == NULL) {
    byte = e8m0_of(largest);
    *unit = e8m0_value(byte);
  } else {
    const float scale = largest / 6.0f / *args->whole;
    byte = e4m3_of(scale < 0x1p-9f ? 0x1p-9f : scale > 448.0f ? 448.0f : scale);
    *unit = e4m3_value(byte) * *args->whole;
  }
  if (largest == 0.0f) *unit = 1.0f;
  return byte;
}

static inline int64_t short_blocksize(const bsh_quantize_e2m1_args *const args) {
  return args->whole == NULL ? 32 : 16;
}

#endif
