// gemm_4bit_sm90.cuh - sizes of gemm_4bit_sm90.cu as template constants, and its shared memory.
#pragma once

#include "cuda/sizes/gemm_4bit_sm90.h"

#include "cuda/operands/decode.cuh"
#include "cuda/ptx/ptx_sm90.cuh"

namespace bsh {
namespace {

constexpr int PIECE_BYTES = BSH_PIECE_BYTES, SLOTS = BSH_GEMM_SLOTS, STAGES = BSH_GEMM_STAGES;

// A form of the kernel: rows of x, and parts of K that the warpgroups of a block work on at the same time.
template <int TOKENS_, int K_PARTS_> struct gemm_form {
  static constexpr int TOKENS = TOKENS_, K_PARTS = K_PARTS_;
  static constexpr bool AHEAD = bsh_gemm_ahead(TOKENS, K_PARTS), OWN_X = bsh_gemm_own_x(TOKENS, K_PARTS);
  static constexpr int WARPS = bsh_gemm_warps(TOKENS, K_PARTS), ROW_WARPS = WARPS / K_PARTS;
  static constexpr int OWN_TOKENS = TOKENS / K_PARTS;                       // whose sums a warp completes and stores
  static constexpr int STAGE_UNITS = bsh_gemm_stage_units(TOKENS, K_PARTS); // of each part of K
  static constexpr int PART_BYTES = bsh_gemm_part_bytes(TOKENS, K_PARTS);
  static constexpr int STAGE_BYTES = bsh_gemm_stage_bytes(TOKENS, K_PARTS);
};

// Shared memory: [barriers, map, x stages] below 64 KiB, the table at 64 KiB, the rings at 128 KiB (as gemv_4bit.cu).
struct shared_layout {
  char *table, *ring, *x;
  float *map;
  uint32_t full, empty; // addresses of STAGES barriers each
};
template <typename FORM> __device__ __forceinline__ shared_layout lay_out(char *memory) {
  static_assert(BSH_GEMM_X_AT + STAGES * FORM::STAGE_BYTES <= 63 * 1024, "x must end below the table");
  shared_layout s;
  s.table = wide_table(memory);
  s.ring = wide_ring(s.table);
  s.full = shared_address(memory), s.empty = s.full + 8 * STAGES;
  s.map = reinterpret_cast<float *>(memory + BSH_GEMM_MAP_AT);
  s.x = memory + BSH_GEMM_X_AT;
  return s;
}

} // namespace
} // namespace bsh
