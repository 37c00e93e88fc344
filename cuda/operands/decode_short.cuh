// decode_short.cuh - 8-bit scales of blocks below a unit (MXFP4, NVFP4) as factors of tensor-core operands.
//
// An operand is value * scale of its block, in T exact: a value of E2M1 has 2 significant bits, a scale of E8M0 1, of
// E4M3 4. The second level stays with the fp32 sums of a unit. Lane c of a quad holds elements 16c .. 16c + 15 of a
// unit (decode_unit): one block of 16 or half a block of 32, so its operands of a row have one factor.
//
// Scales are made of their bytes, not looked up: E8M0 are exponents of bf16, E4M3 bits of a small float. check_map
// compares the map that came with the weight; of another one, or an offset, y is NaN. block_factor makes those of a
// unit (gemv_4bit), factors_of those of four units in fewer steps, for a table of other values (gemm_4bit_sm90).
#pragma once

#include "cuda/operands/decode.cuh"

namespace bsh {

template <scale_kind KIND> constexpr bool SHORT = KIND == E8M0_32 || KIND == E4M3_16;
template <scale_kind KIND> constexpr int UNIT_BLOCKS = KIND == E4M3_16 ? 4 : 2;

// The scales of a unit, a byte each; codes are aligned to as many.
template <scale_kind KIND> __device__ __forceinline__ uint32_t unit_scales(const uint8_t *codes, uint32_t unit) {
  if (KIND == E4M3_16) return reinterpret_cast<const uint32_t *>(codes)[unit];
  return reinterpret_cast<const uint16_t *>(codes)[unit];
}
// Of the unit's second-level scale.
template <scale_kind KIND> __device__ __forceinline__ uint32_t second_level(uint32_t unit) {
  return unit / (BSH_NESTED_BLOCKSIZE / UNIT_BLOCKS<KIND>);
}

template <typename T> __device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  using pair = typename pair_of<T>::type;
  const pair product = __hmul2(*reinterpret_cast<const pair *>(&a), *reinterpret_cast<const pair *>(&b));
  return *reinterpret_cast<const uint32_t *>(&product);
}

// Permutation that puts the byte of lane c's block above a zero byte, twice.
template <scale_kind KIND> __device__ __forceinline__ uint32_t block_selector(int c) {
  return 0x0404 + (KIND == E4M3_16 ? c : c >> 1) * 0x1010;
}
// The scale of this lane's block, in T, twice. E8M0 is of bf16 only.
template <typename T, scale_kind KIND>
__device__ __forceinline__ uint32_t block_factor(uint32_t scales, uint32_t selector) {
  const uint32_t twice = __byte_perm(scales, 0, selector);
  if constexpr (KIND == E8M0_32) {
    static_assert(sizeof(T) == 2 && !std::is_same_v<T, __half>, "fp16 does not hold scales of E8M0");
    return max(twice >> 1, 0x00400040u); // byte 0: 2^-127, which bf16 has as a denormal number
  } else {
    constexpr bool HALF = std::is_same_v<T, __half>; // bias 15 and 10 bits, bf16: 127 and 7; E4M3: 7 and 3
    const uint32_t small = (HALF ? (twice >> 1) & 0x3F803F80u : (twice >> 4) & 0x07F007F0u) | (twice & 0x80008000u);
    return multiply_pairs<T>(small, HALF ? 0x5C005C00u : 0x7B807B80u); // 2^8, 2^120
  }
}

// Lane c of a quad has a word of 4 bytes; then byte c of the words of lanes 0 to 3.
__device__ __forceinline__ uint32_t transpose_quad(uint32_t word, int c) {
  const uint32_t halves = __byte_perm(word, __shfl_xor_sync(~0u, word, 2), c & 2 ? 0x3276 : 0x5410);
  return __byte_perm(halves, __shfl_xor_sync(~0u, halves, 1), c & 1 ? 0x3715 : 0x6240);
}

// For factors_of table entries are times TABLE_TIMES, factors by as much smaller: they are then moved bits. E8M0:
// 2^(byte - 126), so that none is a denormal number. E4M3 has a bias of 7 and 3 bits, bf16 127 and 7, fp16 15 and 10.
template <typename T, scale_kind KIND>
constexpr float TABLE_TIMES = !SHORT<KIND>                ? 1.f
                              : KIND == E8M0_32           ? 0.5f
                              : std::is_same_v<T, __half> ? 0x1p8f
                                                          : 0x1p120f;

// Factors of this lane's operands of four units, two in a register; lane c of a quad has the `scales` of unit c.
struct unit_factors {
  uint32_t pairs[2];
  __device__ __forceinline__ uint32_t of(int unit) const {
    return __byte_perm(pairs[unit >> 1], 0, unit & 1 ? 0x3232 : 0x1010);
  }
};
template <typename T, scale_kind KIND> __device__ __forceinline__ unit_factors factors_of(uint32_t scales, int c) {
  static_assert(KIND == E4M3_16 || !std::is_same_v<T, __half>, "fp16 does not hold scales of E8M0");
  const uint32_t bytes = transpose_quad(KIND == E8M0_32 ? __byte_perm(scales, 0, 0x1100) : scales, c);
  unit_factors factors;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t high = __byte_perm(bytes, 0, i ? 0x3424 : 0x1404); // a byte of zeros below each
    if (KIND == E8M0_32) factors.pairs[i] = (high >> 1) + 0x00800080u;
    else factors.pairs[i] = high >> (std::is_same_v<T, __half> ? 1 : 4);
  }
  return factors;
}
// Whether one of a unit's scales is none of the format's: beyond 2^125, negative, NaN.
template <scale_kind KIND> __device__ __forceinline__ bool is_beyond(uint32_t scales) {
  if (KIND == E8M0_32) return ((scales & 0x7F7Fu) + 0x0303u) & scales & 0x8080u;
  return (((scales & 0x7F7F7F7Fu) + 0x01010101u) | scales) & 0x80808080u;
}
constexpr uint32_t NAN_BITS = 0x7FC00000;

// The operands of a unit times the factors of their rows.
template <typename T>
__device__ __forceinline__ void scale_unit(uint32_t (*a)[4], uint32_t upper_factor, uint32_t lower_factor) {
#pragma unroll
  for (int k = 0; k < 4; k++)
#pragma unroll
    for (int i = 0; i < 4; i++) a[k][i] = multiply_pairs<T>(a[k][i], i & 1 ? lower_factor : upper_factor);
}

// What an entry of the map has to be; NaN are not looked at.
template <scale_kind KIND> __device__ __forceinline__ bool is_scale(int code, float value) {
  if (KIND == E8M0_32) return code == 255 || __float_as_uint(value) == max((uint32_t)code << 23, 0x00400000u);
  const float size = __uint_as_float((uint32_t)(code & 127) << 20) * 0x1p120f;
  return (code & 127) == 127 || value == (code & 128 ? -size : size);
}
enum { MAP_CHECKS = 256 / BSH_WARP };
// Whole warps, then a barrier, then map_verdict.
template <scale_kind KIND> __device__ __forceinline__ void check_map(float *checks, const float *map) {
  for (int i = threadIdx.x; i < 256; i += blockDim.x) {
    const bool right = __all_sync(~0u, is_scale<KIND>(i, map[i]));
    if (i % BSH_WARP == 0) checks[i / BSH_WARP] = right ? 0.f : __uint_as_float(NAN_BITS);
  }
}
// 0, or NaN where scales are not what is computed here.
__device__ __forceinline__ float map_verdict(const float *checks, float offset) {
  float verdict = offset == 0.f ? 0.f : __uint_as_float(NAN_BITS);
#pragma unroll
  for (int i = 0; i < MAP_CHECKS; i++) verdict += checks[i];
  return verdict;
}

} // namespace bsh
