// decode_sm90_wide_short.cuh - the same for blocks of 32 and 16 (MXFP4, NVFP4): operands are value * scale of the
// block, exact, without the global scale, which the sums get (epilogue_sm90_wide.cuh).
//
// A value of E2M1 has 2 significant bits, a scale 1 (E8M0) or 4 (E4M3), a product at most 6. Scales are 16-bit floats
// in shared memory: of T, but for E8M0 bf16, since a scale of fp16 would not reach; there the product is one of fp32,
// rounded to fp16 as dequantize_4bit does.
//
// Scales of a stage, in the order in which lanes read them. A piece has 4 blocks of 32 or 8 of 16 in a row of W.
//   forward: [group q of depth][pair of rows of A][of 16: block of the group][row of the pair]
//   gradient: [block of 32, or two of 16][group q][of 16: block of the two][t][j][n, n + 1], n = 32q + 8j + 2t
#pragma once

#include "cuda/operands/decode_sm90_wide.cuh"

namespace bsh {
namespace {

template <typename T, typename FORM> constexpr bool WIDENED = IS_HALF<T> && FORM::BLOCK == 32;
// What a scale is in shared memory.
template <typename T, bool WIDE_RANGE> struct short_scale {
  using type = T;
};
template <typename T> struct short_scale<T, true> {
  using type = __nv_bfloat16;
};
template <typename T, typename FORM> using short_scale_of = typename short_scale<T, WIDENED<T, FORM>>::type;

// Where in a stage the scale of row r (0..127) of W, and of the piece's block `block` of that row, is.
template <typename FORM> __device__ __forceinline__ int short_scale_place(int r, int block) {
  constexpr int OF_GROUP = 32 / FORM::BLOCK;
  const int group = block / OF_GROUP, part = block % OF_GROUP;
  if (!FORM::GRADIENT) return group * (256 * OF_GROUP) + (r >> 1) * (4 * OF_GROUP) + part * 4 + (r & 1) * 2;
  const int of_group = (r >> 1 & 3) * 16 + (r >> 3 & 3) * 4 + (r & 1) * 2; // t, j, n
  return group * (256 * OF_GROUP) + (r >> 5) * (64 * OF_GROUP) + part * 64 + of_group;
}

template <typename T, typename FORM> struct short_decoder : decoder<T, FORM> {
  static constexpr bool GRADIENT = FORM::GRADIENT;
  static constexpr int OF_GROUP = 32 / FORM::BLOCK;     // blocks of a group of 32 columns of W
  static constexpr int WORDS = GRADIENT ? 4 : OF_GROUP; // of scales, two each
  uint32_t scale[WORDS];                                // forward: [block] of both rows; gradient: [j] of n and n + 1
  uint32_t scales_at;

  __device__ __forceinline__ short_decoder(uint32_t base, int warp, int lane) : decoder<T, FORM>(base, warp, lane) {
    const int g = lane >> 2, t = lane & 3, span = warp >> 1, half = threadIdx.x >> 5 & 1;
    const int row = span * 32 + 4 * g + 2 * half; // of A, of the piece: forward a row of W, gradient a column
    const int place = GRADIENT ? short_scale_place<FORM>(2 * t, row / FORM::BLOCK) : short_scale_place<FORM>(row, 0);
    scales_at = base + FORM::SCALES_AT + place;
  }
  __device__ __forceinline__ void lookup(int s, int q) {
    const uint32_t at = scales_at + s * FORM::SCALE_BYTES + q * (GRADIENT ? 64 * OF_GROUP : 256 * OF_GROUP);
    if constexpr (GRADIENT) {
      const uint4 v = ld_shared_16(at);
      scale[0] = v.x, scale[1] = v.y, scale[2] = v.z, scale[3] = v.w;
    } else if constexpr (OF_GROUP == 2) {
      const uint2 v = ld_shared_8(at);
      scale[0] = v.x, scale[1] = v.y;
    } else scale[0] = ld_shared_4(at);
    this->find(this->raw, this->found);
  }
  __device__ __forceinline__ void values(uint32_t *a) const {
    const uint32_t (&found)[8] = this->found;
#pragma unroll
    for (int j = 0; j < 4; j++)
      if constexpr (GRADIENT) {
        const bool permuted = j < decoder<T, FORM>::PERMUTED; // see decoder::values
        a[2 * j] = scaled(permuted ? found[2 * j] : __byte_perm(found[2 * j], found[2 * j + 1], 0x5410), scale[j]);
        a[2 * j + 1] =
            scaled(permuted ? found[2 * j + 1] : __byte_perm(found[2 * j], found[2 * j + 1], 0x7632), scale[j]);
      } else {
#pragma unroll
        for (int h = 0; h < 2; h++) { // 10 10 = the first row's scale twice, 32 32 = the second's
          const uint32_t both = scale[j / 2 % OF_GROUP];
          a[2 * j + h] = scaled(found[h * 4 + j], __byte_perm(both, both, h ? 0x3232 : 0x1010));
        }
      }
  }

private:
  // Two values times their scales.
  static __device__ __forceinline__ uint32_t scaled(uint32_t pair, uint32_t by) {
    if constexpr (!WIDENED<T, FORM>) return mul_pair<T>(pair, by);
    const float2 v = __half22float2(*reinterpret_cast<const __half2 *>(&pair));
    return pack_pair<T>(v.x * __uint_as_float(by << 16), v.y * __uint_as_float(by & 0xFFFF0000u));
  }
};

template <typename T, typename FORM, bool SHORT = FORM::MODE == SCALED> struct operand_decoder {
  using type = decoder<T, FORM>;
};
template <typename T, typename FORM> struct operand_decoder<T, FORM, true> {
  using type = short_decoder<T, FORM>;
};

// The global scale of a weight, or of an expert: the first of the second level, or 1 where that is no positive number.
template <typename FORM> __device__ __forceinline__ float global_scale(const bsh_gemm_wide_args &args, int expert) {
  const float first = args.absmax2[FORM::GROUPED ? (int64_t)expert * args.expert_scales2 : 0];
  return first > 0.f && first <= LARGEST ? first : 1.f;
}

} // namespace
} // namespace bsh
