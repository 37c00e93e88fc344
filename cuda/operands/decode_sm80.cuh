// decode_sm80.cuh - packed words of a block of W to 16-bit values with their scale, for gemm_4bit_sm80.cu.
//
// A block has one scale, and so only 16 different values: T(value of the code * scale), an fp32 product and one
// rounding, the bits of dequantize_4bit. A thread makes them once for what it decodes of a block, keeps them as two
// planes of bytes in eight registers, and looks up four codes at a time by byte permutations. Nothing of it is in
// memory.
//
// Blocks of 16 are two for a thread. Their codes are E2M1, whose upper half is the lower one with the other sign: a
// block has 8 different values and takes half of the registers, half of the steps to make, and fewer permutations.
//
// Both are steps of one to three instructions, which the main loop lays between its products.
#pragma once

#include "cuda/sizes/gemm_4bit_sm80.h"

#include "cuda/ptx/ptx_sm80.cuh"

namespace bsh {
namespace {

// Selectors of bytes 0 to 3 of a register, for eight codes. A grid has y = 0 only, which the compiler does not know: a
// second constant beside the mask would take an instruction of its own.
__device__ __forceinline__ uint32_t byte_places() { return 0x32103210u | blockIdx.y; }

// Selectors name the bytes of the result, highest first; 0 to 3 are those of the first register, 4 to 7 of the second.
template <typename T> struct block_values {
  enum { BUILD_STEPS = 16, DECODE_STEPS = 8 };
  using scales = float;
  uint32_t low[4], high[4]; // byte i & 3 of [i >> 2]: of the value of code i
  const uint32_t places = byte_places();

  __device__ __forceinline__ void build(int step, const float *values, float scale) {
    const int i = step >> 2;
    auto pair = [&](int code) {
      return in_order<T>::pack(multiply_flush_in_order(values[code], scale),
                               multiply_flush_in_order(values[code + 1], scale));
    };
    if (step % 4 == 0) first = pair(4 * i);
    if (step % 4 == 1) second = pair(4 * i + 2);
    if (step % 4 == 2) low[i] = permute_in_order(first, second, 0x6420);
    if (step % 4 == 3) high[i] = permute_in_order(first, second, 0x7531);
  }

  // The 8 values of a packed word, in order: out[4]. A code's lower three bits select from two registers, one for codes
  // below 8 and one for the others; its highest bit then selects between the two results.
  __device__ __forceinline__ void decode(int step, uint32_t *out, uint32_t word, int /* of one block */) {
    const int half = step >> 2; // four codes: nibbles 4 half .. 4 half + 3
    switch (step % 4) {
    case 0:
      if (half == 0) lower = word & 0x77777777u, upper = ((word >> 1) & 0x44444444u) | places;
      else lower >>= 16, upper >>= 16;
      break;
    case 1:
      below = permute_in_order(low[0], low[1], lower), above = permute_in_order(low[2], low[3], lower);
      break;
    case 2:
      high_below = permute_in_order(high[0], high[1], lower), high_above = permute_in_order(high[2], high[3], lower);
      low_bytes = permute_in_order(below, above, upper);
      break;
    default:
      high_below = permute_in_order(high_below, high_above, upper);
      // Elements lie upper nibble first: bytes 1 and 0 of the planes, then 3 and 2.
      out[2 * half] = permute_in_order(low_bytes, high_below, 0x4051);
      out[2 * half + 1] = permute_in_order(low_bytes, high_below, 0x6273);
    }
  }

private: // between steps
  uint32_t first, second, lower, upper, below, above, high_below, high_above, low_bytes;
};

// The same of two blocks of 16 with codes E2M1, four packed words.
template <typename T> struct short_values {
  enum { BUILD_STEPS = 16, DECODE_STEPS = 8 };
  struct scales {
    float of[2];
  };
  uint32_t low[2][2], high[2][2]; // of codes 0 to 7 of each block
  const uint32_t places = byte_places();

  __device__ __forceinline__ void build(int step, const float *values, const scales &scale) {
    const int block = step >> 3, i = step >> 2 & 1;
    auto pair = [&](int code) {
      return in_order<T>::pack(multiply_in_order(values[code], scale.of[block]),
                               multiply_in_order(values[code + 1], scale.of[block]));
    };
    if (step % 4 == 0) first = pair(4 * i);
    if (step % 4 == 1) second = pair(4 * i + 2);
    if (step % 4 == 2) low[block][i] = permute_in_order(first, second, 0x6420);
    if (step % 4 == 3) high[block][i] = permute_in_order(first, second, 0x7531);
  }

  __device__ __forceinline__ void decode(int step, uint32_t *out, uint32_t word, int block) {
    const int half = step >> 2;
    switch (step % 4) {
    case 0:
      if (half == 0) lower = word & 0x77777777u, upper = ((word >> 1) & 0x44444444u) | places;
      else lower >>= 16, upper >>= 16;
      break;
    case 1:
      low_bytes = permute_in_order(low[block][0], low[block][1], lower);
      below = permute_in_order(high[block][0], high[block][1], lower);
      break;
    case 2:
      high_bytes = permute_in_order(below, below ^ 0x80808080u, upper);
      break;
    default:
      out[2 * half] = permute_in_order(low_bytes, high_bytes, 0x4051);
      out[2 * half + 1] = permute_in_order(low_bytes, high_bytes, 0x6273);
    }
  }

private: // between steps
  uint32_t first, second, lower, upper, below, low_bytes, high_bytes;
};

} // namespace
} // namespace bsh
