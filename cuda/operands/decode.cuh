// decode.cuh - 4-bit codes to tensor-core operands.
//
//   packed bytes of a row of W          shared memory: table[256][32 or 64 words]       registers
//   | k k+1 | k+2 k+3 | ...             row b: the pair (value[b >> 4], value[b & 15]),
//      byte b ------------------------> once in each bank; lane l reads word l -------> a[.]: T pair (k, k + 1)
//
// One packed byte holds the elements (k, k + 1), k even, so one byte is one 32-bit mma operand register. It is decoded
// by one shared-memory load from a table of 256 pairs that has one copy per bank: never a bank conflict. The operands
// are the format's 16 values rounded to T; block scales are applied in fp32 to the sums.
#pragma once

#include "cuda/sizes/fused.h"

#include "cuda/ptx/ptx.cuh"

namespace bsh {

constexpr bool WIDE = bsh_is_wide(ARCH);
constexpr int TABLE_ROW = bsh_table_row(ARCH);

// Where the table and the rings begin in shared memory (WIDE).
__device__ __forceinline__ char *wide_table(char *memory) {
  return memory + (BSH_WIDE_TABLE_AT - (shared_address(memory) & (BSH_WIDE_TABLE_AT - 1)));
}
__device__ __forceinline__ char *wide_ring(char *table) { return table + (BSH_WIDE_RING_AT - BSH_WIDE_TABLE_AT); }

// The format's value of `code`, from immediates: a table in memory would cost a cold miss.
__device__ __forceinline__ float pick(int code, float v0, float v1, float v2, float v3, float v4, float v5, float v6,
                                      float v7, float v8, float v9, float v10, float v11, float v12, float v13,
                                      float v14, float v15) {
  const bool b0 = code & 1, b1 = code & 2, b2 = code & 4, b3 = code & 8;
  const float w0 = b0 ? v1 : v0, w1 = b0 ? v3 : v2, w2 = b0 ? v5 : v4, w3 = b0 ? v7 : v6;
  const float w4 = b0 ? v9 : v8, w5 = b0 ? v11 : v10, w6 = b0 ? v13 : v12, w7 = b0 ? v15 : v14;
  const float u0 = b1 ? w1 : w0, u1 = b1 ? w3 : w2, u2 = b1 ? w5 : w4, u3 = b1 ? w7 : w6;
  const float t0 = b2 ? u1 : u0, t1 = b2 ? u3 : u2;
  return b3 ? t1 : t0;
}
__device__ __forceinline__ float code_value(int format, int code) {
  if (format == BSH_E2M1) return pick(code, BSH_E2M1_VALUES);
  return format == BSH_FP4 ? pick(code, BSH_FP4_VALUES) : pick(code, BSH_NF4_VALUES);
}

// Fills the pair table, with values times a power of two; all warps of the block, then a barrier by the caller.
template <typename T> __device__ __forceinline__ void build_table(char *table, int format, float times = 1.f) {
  const float value = code_value(format, threadIdx.x & 15) * times;
  for (int i = threadIdx.x; i < 256 * 8; i += blockDim.x) {
    const int byte = i >> 3; // blockDim is a multiple of 32: whole warps take part in the shuffles
    const float first = __shfl_sync(~0u, value, byte >> 4), second = __shfl_sync(~0u, value, byte & 15);
    const uint32_t pair = pack_pair<T>(first, second);
    *reinterpret_cast<uint4 *>(table + byte * TABLE_ROW + (i & 7) * 16) = make_uint4(pair, pair, pair, pair);
  }
}

// pair = the operand register of byte I of `word`. lane_base: shared address of the table + 4 * lane. SOME: only where
// `wanted`, else what is there stays.
template <int I, bool SOME>
__device__ __forceinline__ void decode(uint32_t &pair, uint32_t word, uint32_t lane_base, bool wanted) {
  uint32_t address;
  if (WIDE) address = __byte_perm(word, lane_base, 0x7604 | (I << 4));
  else address = lane_base + ((I == 0 ? word << 7 : word >> (8 * I - 7)) & 0x7F80);
  if (SOME)
    asm("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p ld.shared.u32 %0, [%1];\n}"
        : "+r"(pair)
        : "r"(address), "r"((uint32_t)wanted));
  else asm("ld.shared.u32 %0, [%1];" : "=r"(pair) : "r"(address));
}

// A operands of the four k16 steps of a unit: lane (g, c) of a quad holds bytes 8c..8c+7 of rows g (`upper`) and g + 8
// (`lower`). The order of k inside a unit is then 16c + 4 * step + {0, 1, 2, 3}: x is loaded in the same order.
template <bool SOME = false>
__device__ __forceinline__ void decode_unit(uint32_t (*a)[4], uint2 upper, uint2 lower, uint32_t lane_base,
                                            bool wanted = true) {
#pragma unroll
  for (int k = 0; k < 4; k += 2) {
    const uint32_t u = k ? upper.y : upper.x, l = k ? lower.y : lower.x;
    decode<0, SOME>(a[k][0], u, lane_base, wanted), decode<0, SOME>(a[k][1], l, lane_base, wanted);
    decode<1, SOME>(a[k][2], u, lane_base, wanted), decode<1, SOME>(a[k][3], l, lane_base, wanted);
    decode<2, SOME>(a[k + 1][0], u, lane_base, wanted), decode<2, SOME>(a[k + 1][1], l, lane_base, wanted);
    decode<3, SOME>(a[k + 1][2], u, lane_base, wanted), decode<3, SOME>(a[k + 1][3], l, lane_base, wanted);
  }
}

// Scales: nested with one block a unit, in which case codes are read some at a time; any of blocks from 64 on; 8-bit
// floats of blocks of 32 and 16, nested (decode_short.cuh).
enum scale_kind { NESTED_64, ANY_SCALES, E8M0_32, E4M3_16 };

} // namespace bsh
