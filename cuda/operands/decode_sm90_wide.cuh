// decode_sm90_wide.cuh - packed bytes and scales of W to wgmma's A operand, W or W^T, for gemm_4bit_sm90_wide.cu.
//
// A stage of W is 128 rows of W by 64 packed bytes (128 columns), with 64-byte swizzle, in both directions:
//   forward: 128 rows of A x 128 of depth;   gradient: 128 of depth x 128 rows of A.
// Decoded is a group of 32 of depth at a time, 8 operand registers a thread; g = lane / 4, t = lane % 4. wgmma wants
// (k, k + 1) of operand row g or g + 8 in a register. Which rows of A are these is free: they are neighbours, rows 4g +
// 2 half and 4g + 2 half + 1 of a span of 32 rows that two warps (half = 0, 1) share, so that sums are neighbours in y.
//   forward: a pair (k, k + 1) is a packed byte. The order of k is that of x, so lane t needs byte t of every 32-bit
//     word of its rows: 2 LDS.128 (4 lanes read the same 16 bytes), and a PRMT selector that depends on the lane picks
//     byte t while it builds the table's address.
//   gradient: a byte is a pair of rows of A at one n. ldmatrix.trans of 16-bit units gives lane (g, t) the bytes (n,
//   2g),
//     (n, 2g + 1), (n + 1, 2g), (n + 1, 2g + 1), n = 8i + 2t; of each two the warp uses one, the other warp of the span
//     the other. Two looked-up pairs are interleaved to (n, n + 1) of one row of A and of the next.
// The table has the pairs of all 256 bytes, one copy a bank, in rows 256 bytes apart, so that one byte permutation is
// the address and the table's base an immediate. The upper 128 bytes of its rows serve the epilogue. Some look-ups are
// byte permutations of registers instead (value_bytes): twice the instructions, nothing of shared memory.
#pragma once

#include "cuda/sizes/gemm_4bit_sm90_wide.h"

#include "cuda/operands/decode.cuh"
#include "cuda/ptx/ptx_sm90_cluster.cuh"

namespace bsh {
namespace {

constexpr int TABLE_AT = BSH_GEMM_WIDE_TABLE_AT;

// How W is rounded (docs/numerics.md). ALPHA scales the 16 values to where they lie near numbers of the table's type.
//   HALF:  fp16(value * ALPHA), widened, * (scale / ALPHA) in fp32, rounded to T
//   EXACT: fp32 value * fp32 scale, rounded to T
//   SPLIT: T(value * ALPHA) * (scale / ALPHA as a sum of two T), rounded to T
//   UNSCALED: T(value * ALPHA); sums over 64 of depth * (scale / ALPHA) in fp32
//   SCALED: value * scale without the global scale, which sums get: exact, decode_sm90_wide_short.cuh
enum decode_mode { HALF, EXACT, SPLIT, UNSCALED, SCALED };
template <typename T> constexpr bool IS_HALF = false;
template <> constexpr bool IS_HALF<__half> = true;
// UNSCALED wants sums twice, for which 192 tokens leave no registers, and one scale for a row of A and 64 of depth,
// which W^T does not have.
template <typename T, int TOKENS, bool GRADIENT>
constexpr decode_mode MODE_OF = GRADIENT        ? SPLIT
                                : TOKENS == 128 ? UNSCALED
                                : IS_HALF<T>    ? EXACT
                                                : HALF;

// BLOCK: of W, 16 or 32 elements; 64: of so many and more.
template <typename T, int TOKENS_, bool GRADIENT_, int BLOCK_ = BSH_UNIT> struct wide_form {
  static constexpr int TOKENS = TOKENS_, SUMS = TOKENS / 2, BLOCK = BLOCK_; // SUMS: of a thread
  static constexpr bool GRADIENT = GRADIENT_, GROUPED = false, TRIMMED = false;
  static constexpr decode_mode MODE = BLOCK < BSH_UNIT ? SCALED : MODE_OF<T, TOKENS, GRADIENT>;
  static constexpr int X_STAGES = bsh_gemm_wide_x_stages(TOKENS), X_BYTES = bsh_gemm_wide_x_bytes(TOKENS);
  static constexpr int STAGES = BSH_GEMM_WIDE_STAGES;
  static constexpr int W_AT = bsh_gemm_wide_w_at(TOKENS), SCALES_AT = bsh_gemm_wide_scales_at(TOKENS);
  static constexpr int SCALE_BYTES = bsh_gemm_wide_scale_bytes(BLOCK), MAP_AT = bsh_gemm_wide_map_at(TOKENS, BLOCK);
  static constexpr int BARRIERS_AT = bsh_gemm_wide_barriers_at(TOKENS, BLOCK);
  // What the 16 values are multiplied with before they are rounded to the table's type.
  static __device__ __forceinline__ float alpha(int format) {
    if (MODE == EXACT || format == BSH_E2M1) return 1.f; // E2M1's values are exact in any type
    if (format == BSH_FP4) return 3.f;                   // multiples of 1/64: exact
    return MODE != HALF && !IS_HALF<T> ? 1.3743000030517578f : 1.6384999752044678f;
  }
};

// The same for a stack of experts. TRIMMED: of its last tokens, rows and depth only what there is of them is
// multiplied, in steps of 64.
template <typename T, int TOKENS, bool GRADIENT, int BLOCK = BSH_UNIT>
struct grouped_form : wide_form<T, TOKENS, GRADIENT, BLOCK> {
  static constexpr bool GROUPED = true, TRIMMED = TOKENS == 256;
};

// Fills the table, by the 256 threads that multiply; a barrier by the caller.
template <typename T, typename FORM> __device__ __forceinline__ void build_wide_table(char *table, int format) {
  const float value = code_value(format, threadIdx.x & 15) * FORM::alpha(format);
  for (int i = threadIdx.x; i < 256 * 8; i += BSH_GEMM_WIDE_CONSUMERS * BSH_WARP) { // 16 bytes of a row
    const int byte = i >> 3;
    const float first = __shfl_sync(~0u, value, byte >> 4), second = __shfl_sync(~0u, value, byte & 15);
    uint32_t low = pack_pair<T>(first, second), high = low;
    if (FORM::MODE == HALF) low = high = pack_pair<__half>(first, second);
    if (FORM::MODE == EXACT) low = __float_as_uint(first), high = __float_as_uint(second);
    *reinterpret_cast<uint4 *>(table + byte * 256 + (i & 7) * 16) = make_uint4(low, high, low, high);
  }
}

// Where the scale of row r (0..63) and the first unit of a stage of W goes, in bytes: in the order in which lanes read.
// That of row r + 64 lies 256 bytes further, that of the second unit 512. SPLIT: the second word of the sum lies 16
// bytes behind the first.
template <typename FORM> __device__ __forceinline__ int scale_place(int r) {
  if (!FORM::GRADIENT) return r * 4;
  return (r >> 5) * 128 + (r >> 1 & 3) * 32 + (r >> 3 & 3) * 4 + (r & 1) * 2; // group, t
}
template <typename T, typename FORM> __device__ __forceinline__ void put_scale(char *at, float scale) {
  if (FORM::MODE != SPLIT) {
    *reinterpret_cast<float *>(at) = scale;
    return;
  }
  T high, low;
  from_float(scale, &high);
  from_float(scale - to_float(high), &low);
  *reinterpret_cast<T *>(at) = high, *reinterpret_cast<T *>(at + 16) = low;
}

// prmt.b32: nibbles of the selector with bit 3 repeat a byte's sign, which __byte_perm does not.
__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}

// A selector of a byte permutation in pictures: its nibbles, highest first, name the bytes of the result, highest
// first. 0 to 3 are those of the first register, 4 to 7 those of the second; with bit 3 set, eight times the byte's
// sign.

// The 16 values for byte permutations, which the code itself selects from: a permutation yields the bytes of four codes
// below 8 (or, with their bits 3 flipped, of four others) from two registers. From the table, of pairs of values.
//
//   two packed bytes        byte 1: [upper code 1 | lower code 1]   byte 0: [upper code 0 | lower code 0]
//   as a selector           gives the bytes of   upper 1, lower 1, upper 0, lower 0   of any 8 values
struct value_bytes {
  uint32_t low[4], high[4]; // byte i & 3 of [i >> 2]: of the value of code i
  __device__ __forceinline__ void read(uint32_t table) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t first = ld_shared_4(table + (4 * i * 17 + 1) * 256);           // values 4i, 4i + 1
      const uint32_t second = ld_shared_4(table + (4 * i * 17 + 2 * 17 + 1) * 256); // 4i + 2, 4i + 3
      // first: [high 4i+1][low 4i+1][high 4i][low 4i], second: 4i+3 and 4i+2. 6420: the four low bytes, 7531: the high.
      low[i] = __byte_perm(first, second, 0x6420), high[i] = __byte_perm(first, second, 0x7531);
    }
  }
  // The values of two packed bytes, those in the lower half of `bytes`: the codes' lower and upper bytes, in the order
  // in which nibbles lie.
  __device__ __forceinline__ uint2 find(uint32_t bytes) const {
    const uint32_t other = bytes ^ 0x8888;
    // Bit 3 of each code, eight times: of an upper code it is the sign of its byte, of a lower one that of the byte
    // shifted by 4. 9 D 8 C = signs of [byte 1][byte 1 << 4][byte 0][byte 0 << 4].
    const uint32_t eight_on = permute(bytes, bytes << 4, 0x9D8C);
    return make_uint2(choose(eight_on, permute(low[2], low[3], other), permute(low[0], low[1], bytes)),
                      choose(eight_on, permute(high[2], high[3], other), permute(high[0], high[1], bytes)));
  }

private:
  static __device__ __forceinline__ uint32_t choose(uint32_t mask, uint32_t set, uint32_t clear) {
    return (set & mask) | (clear & ~mask);
  }
};

// Group q (0..3) of the piece in stage `s` becomes a[8], two k16 steps, in three steps that the main loop spreads over
// three iterations, so that no latency shows: bytes(), lookup() and values(). UNSCALED looks up the operands
// themselves.
template <typename T, typename FORM> struct decoder {
  static constexpr bool GRADIENT = FORM::GRADIENT;
  static constexpr decode_mode MODE = FORM::MODE;
  // Of the four pairs of packed bytes of a group of the gradient, how many are looked up by byte permutations, since
  // shared memory has more to do than the tensor cores.
  static constexpr int PERMUTED = GRADIENT ? 2 : 0;
  uint32_t weights, scales, lane_base, select[2], select_pair;
  value_bytes values_of; // PERMUTED
  uint32_t raw[GRADIENT ? 4 : 8];
  uint32_t scale[GRADIENT ? 8 : 2]; // gradient: first words of n and n + 1 of j = 0..3, then second ones
  // forward [row 0, 1][word], gradient [j][n, n + 1], where permuted [j][row of A]
  uint32_t found[MODE == EXACT ? 16 : 8];

  // base: shared address of the table less BSH_GEMM_WIDE_TABLE_AT. warp: of the 8 that multiply.
  __device__ __forceinline__ decoder(uint32_t base, int warp, int lane) {
    // half: warp & 1, but not by a shuffle, so selectors stay out of uniform registers, which the products need.
    const int g = lane >> 2, t = lane & 3, span = warp >> 1, half = threadIdx.x >> 5 & 1;
    lane_base = base + (MODE == EXACT ? (lane & 15) * 8 : lane * 4); // EXACT: 16 copies, half a warp at a time
    if (!GRADIENT) {
      const int row = span * 32 + 4 * g + 2 * half;
      weights = base + FORM::W_AT + row * 64 + ((row >> 1 & 3) << 4);
      scales = base + FORM::SCALES_AT + row * 4;
      select[0] = 0x7604 | t << 4, select[1] = 0; // 7 6 t 4: see find()
    } else {
      weights = base + FORM::W_AT + lane * 64 + ((span ^ (lane >> 1 & 3)) << 4);
      scales = base + FORM::SCALES_AT + (span >> 1) * 512 + t * 32;
      select[0] = 0x7604 | half << 4, select[1] = 0x7604 | (2 + half) << 4;
    }
    select_pair = half | (2 + half) << 4;
    select[0] = keep(select[0]), select[1] = keep(select[1]), select_pair = keep(select_pair);
    if (PERMUTED) values_of.read(lane_base + TABLE_AT);
  }

  __device__ __forceinline__ void bytes(int s, int q) { bytes(s, q, raw); }
  __device__ __forceinline__ void bytes(int s, int q, uint32_t *to) const {
    if (GRADIENT) {
      ldmatrix_x4_trans(to, weights + s * BSH_GEMM_WIDE_W_BYTES + q * 2048);
    } else {
      const uint32_t at = (weights + s * BSH_GEMM_WIDE_W_BYTES) ^ (q << 4);
      const uint4 r0 = ld_shared_16(at), r1 = ld_shared_16(at + 64);
      to[0] = r0.x, to[1] = r0.y, to[2] = r0.z, to[3] = r0.w;
      to[4] = r1.x, to[5] = r1.y, to[6] = r1.z, to[7] = r1.w;
    }
  }

  __device__ __forceinline__ void lookup(int s, int q) {
    const uint32_t at = scales + s * FORM::SCALE_BYTES;
    if (GRADIENT) {
      const uint4 high = ld_shared_16(at + q * 128), low = ld_shared_16(at + q * 128 + 16);
      scale[0] = high.x, scale[1] = high.y, scale[2 % SCALES] = high.z, scale[3 % SCALES] = high.w;
      scale[4 % SCALES] = low.x, scale[5 % SCALES] = low.y, scale[6 % SCALES] = low.z, scale[7 % SCALES] = low.w;
    } else if (q % 2 == 0) {
      const float2 rows = scales_of_rows(s, q / 2);
      scale[0] = __float_as_uint(rows.x), scale[1] = __float_as_uint(rows.y);
    }
    find(raw, found);
  }
  // Forward: the scales of the thread's two rows of A for unit 0 or 1 (64 of depth) of the piece.
  __device__ __forceinline__ float2 scales_of_rows(int s, int unit) const {
    const uint2 rows = ld_shared_8(scales + s * FORM::SCALE_BYTES + unit * 512);
    return make_float2(__uint_as_float(rows.x), __uint_as_float(rows.y));
  }

  // UNSCALED: to[8] is the group's operand. A look-up's address is lane_base with a packed byte in the place of its
  // byte 1, the table's row of 256 bytes: 7 6 t 4 = [lane_base 3][lane_base 2][byte t of the word][lane_base 0].
  // `% FOUND`, here and below, only keeps indices inside the array in the forms that do not come there.
  __device__ __forceinline__ void find(const uint32_t *from, uint32_t *to) const {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (i >> 1 < PERMUTED) {
        if (i % 2 == 1) continue;
        // bytes.x: low bytes of the values of [upper 1][lower 1][upper 0][lower 0], bytes.y: high ones.
        // 73 51 = the values of [upper 1][upper 0], 62 40 = those of [lower 1][lower 0].
        const uint2 bytes = values_of.find(permute(from[i / 2], 0, select_pair));
        to[i] = __byte_perm(bytes.x, bytes.y, 0x7351);
        to[i + 1] = __byte_perm(bytes.x, bytes.y, 0x6240);
        continue;
      }
      const uint32_t word = GRADIENT ? from[i >> 1] : from[i];
      const uint32_t address = permute(word, lane_base, GRADIENT ? select[i & 1] : select[0]);
      if (MODE == EXACT)
        asm("ld.shared.v2.u32 {%0, %1}, [%2 + %3];"
            : "=r"(to[2 * i % FOUND]), "=r"(to[(2 * i + 1) % FOUND])
            : "r"(address), "n"(TABLE_AT));
      else
        asm("ld.shared.u32 %0, [%1 + %2];"
            : "=r"(to[MODE == UNSCALED ? i % 4 * 2 + i / 4 : i])
            : "r"(address), "n"(TABLE_AT));
    }
  }

  __device__ __forceinline__ void values(uint32_t *a) const {
#pragma unroll
    for (int j = 0; j < 4; j++)
      if (GRADIENT) {
        const bool permuted = j < PERMUTED; // else pairs by packed byte: 54 10 = their first values, 76 32 the second
        const uint32_t first = permuted ? found[2 * j] : __byte_perm(found[2 * j], found[2 * j + 1], 0x5410);
        const uint32_t second = permuted ? found[2 * j + 1] : __byte_perm(found[2 * j], found[2 * j + 1], 0x7632);
        const uint32_t high = scale[j % SCALES], low = scale[(4 + j) % SCALES];
        a[2 * j] = fma_pair<T>(first, high, mul_pair<T>(first, low));
        a[2 * j + 1] = fma_pair<T>(second, high, mul_pair<T>(second, low));
      } else {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int i = h * 4 + j;
          const float by = __uint_as_float(scale[h]);
          const float2 v = MODE == EXACT ? make_float2(__uint_as_float(found[2 * i % FOUND]),
                                                       __uint_as_float(found[(2 * i + 1) % FOUND]))
                                         : __half22float2(*reinterpret_cast<const __half2 *>(&found[i]));
          a[2 * j + h] = pack_pair<T>(v.x * by, v.y * by);
        }
      }
  }

private:
  static constexpr int SCALES = GRADIENT ? 8 : 2, FOUND = MODE == EXACT ? 16 : 8;
};

} // namespace
} // namespace bsh
