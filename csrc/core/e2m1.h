/* core/e2m1.h - scales of blocks in MXFP4 and NVFP4, each of which is chosen before the codes of its block. C and CUDA,
 * whose code for a GPU divides and rounds as this does. */
#ifndef BSH_E2M1_H
#define BSH_E2M1_H

#ifdef __CUDACC__
#define BSH_SHORT static __device__ __forceinline__
#define BSH_LEADING_ZEROS(bits) __clz((int)(bits))
#define BSH_BITS_OF(value) __float_as_uint(value)
#define BSH_OF_BITS(bits) __uint_as_float(bits)
#else
#include "core/numerics.h"
#define BSH_SHORT static inline
#define BSH_LEADING_ZEROS(bits) __builtin_clz(bits)
#define BSH_BITS_OF(value) float_bits(value)
#define BSH_OF_BITS(bits) bits_float(bits)
#endif

enum { BSH_MXFP4_BLOCK = 32, BSH_NVFP4_BLOCK = 16 };

/* E8M0 of 2^(e - 2) for a largest magnitude in [2^e, 2^(e + 1)); 2^0 for 0, NaN for one that is not finite. */
BSH_SHORT uint8_t bsh_e8m0_of(const float largest) {
  const uint32_t bits = BSH_BITS_OF(largest);
  if (bits == 0) return 127;
  if (bits >= 0x7F800000u) return 255;
  const int exponent = bits >> 23 ? (int)(bits >> 23) - 127 : -118 - BSH_LEADING_ZEROS(bits);
  return (uint8_t)(exponent < 2 - 127 ? 0 : exponent > 252 - 125 ? 252 : exponent + 125);
}

/* E4M3 of a number from 2^-9 to 448, to the nearest, of two as near the even one; NaN of NaN. */
BSH_SHORT uint8_t bsh_e4m3_of(const float scale) {
  const uint32_t bits = BSH_BITS_OF(scale);
  if (scale < 0x1p-6f) return (uint8_t)rintf(scale * 512.0f);
  if (scale != scale) return 0x7F;
  return (uint8_t)(((bits + 0x7FFFFu + (bits >> 20 & 1u)) >> 20) - (120u << 3));
}

BSH_SHORT float bsh_e8m0_value(const uint8_t byte) {
  return BSH_OF_BITS(byte == 255 ? 0x7FC00000u : byte == 0 ? 0x400000u : (uint32_t)byte << 23);
}

BSH_SHORT float bsh_e4m3_value(const uint8_t byte) {
  if (byte >= 0x7F) return BSH_OF_BITS(0x7FC00000u);
  return byte < 8 ? (float)byte * 0x1p-9f : BSH_OF_BITS(((uint32_t)byte + (120u << 3)) << 20);
}

/* The scale of a block of this largest magnitude (a NaN's is not finite), and what its values are divided by.
 * whole: the global scale of NVFP4; NULL: MXFP4. */
BSH_SHORT uint8_t bsh_short_scale(const float largest, const float *const whole, float *const unit) {
  uint8_t byte;
  if (whole == NULL) {
    byte = bsh_e8m0_of(largest);
    *unit = bsh_e8m0_value(byte);
  } else {
    const float scale = largest / 6.0f / *whole;
    byte = bsh_e4m3_of(scale < 0x1p-9f ? 0x1p-9f : scale > 448.0f ? 448.0f : scale);
    *unit = bsh_e4m3_value(byte) * *whole;
  }
  if (largest == 0.0f) *unit = 1.0f;
  return byte;
}

/* NVFP4's global scale of a weight of this largest magnitude: a number that is the inverse of a number, 1 for 0. */
BSH_SHORT float bsh_global_scale(const float largest) {
  const float whole = largest / (6.0f * 448.0f), again = 1.0f / (1.0f / whole);
  if (whole == 0.0f) return 1.0f;
  return again > 0.0f && BSH_BITS_OF(again) < 0x7F800000u ? again : whole;
}

#endif
