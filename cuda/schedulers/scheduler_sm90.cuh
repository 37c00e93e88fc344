// scheduler_sm90.cuh - sizes of gemm_4bit_sm90.cu as template constants, its shared memory, which pieces of W a block
// of threads takes, and which row tile a warp.
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

// Pieces [piece, end) of a row block.
struct work_range {
  int block, piece, end;
};

// How pieces are shared out: block of threads i = blockIdx.x takes [begin(i), begin(i + 1)) of all pieces of all row
// blocks (K_PARTS = 1) or of those of row block blockIdx.y (2). The host has divided: `each`, and `more` to spread. It
// keeps all pieces * gridDim.x below 2^31.
template <typename FORM> struct scheduler {
  int pieces; // of a row block, of one part of K
  int each, more, begin, count;

  __device__ __forceinline__ explicit scheduler(const bsh_fused_args &args) {
    pieces = (args.K / BSH_UNIT + BSH_PIECE_UNITS * FORM::K_PARTS - 1) / (BSH_PIECE_UNITS * FORM::K_PARTS);
    each = args.cut.block_pieces, more = args.cut.more_pieces;
    begin = begin_of(blockIdx.x), count = begin_of(blockIdx.x + 1) - begin;
  }
  __device__ __forceinline__ int begin_of(uint32_t i) const { return i * each + (more > 0 ? i * more / gridDim.x : 0); }
  __device__ __forceinline__ work_range first() const {
    if (FORM::K_PARTS == 2) return {(int)blockIdx.y, begin, begin + count};
    const int last = begin + count - 1, block = last / pieces;
    return {block, max(begin - block * pieces, 0), last - block * pieces + 1};
  }
  __device__ __forceinline__ work_range after(work_range at) const { // may be none of this block's, but is one of W's
    const int block = max(at.block - 1, 0);
    return {block, max(begin - block * pieces, 0), pieces};
  }
  // K_PARTS = 1: blocks of threads that own earlier pieces of a row block.
  __device__ __forceinline__ int earlier_owners(int block) const {
    const uint32_t at = block * pieces;
    return blockIdx.x - ((at + 1) * gridDim.x - 1) / (each * gridDim.x + more);
  }
};

// The row tiles of a row block and the one of this warp among them; a warp left over has none.
template <typename FORM> struct row_block {
  int count, own;
  bool active;
  __device__ __forceinline__ explicit row_block(const bsh_fused_args &args) {
    constexpr int ROW_WARPS = FORM::ROW_WARPS;
    count = FORM::K_PARTS == 2 ? args.cut.row_tiles : ROW_WARPS;
    own = (threadIdx.x >> 5) % ROW_WARPS, active = FORM::K_PARTS == 1 || own < count;
  }
  __device__ __forceinline__ int tile(int block) const { return block * count + own; }
};

} // namespace
} // namespace bsh
