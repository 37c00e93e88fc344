// scheduler_sm90_wide.cuh - which pieces of which tiles a pair of thread blocks takes (gemm_4bit_sm90_wide.h).
#pragma once

#include "gemm_4bit_sm90_wide.h"

#include "ptx_sm90_cluster.cuh"

#ifdef BSH_HAS_WGMMA
namespace bsh {
namespace {

// The stretches of a pair in order: its part of the shared tiles, last tile first, then whole tiles. What others wait
// for is left first.
struct wide_scheduler {
  const bsh_gemm_wide_cut &cut; // a parameter of the kernel: takes no registers
  int begin, at, whole;
  int tile, from, to; // the stretch: pieces [from, to) of a tile

  __device__ __forceinline__ wide_scheduler(const bsh_gemm_wide_cut &cut, int pair) : cut(cut) {
    whole = cut.shared + pair;
    begin = at = tile = from = to = 0;
    if (pair < cut.sharing) begin = begin_of(pair), at = begin_of(pair + 1);
  }
  __device__ __forceinline__ int begin_of(int i) const {
    return (int)((int64_t)i * (cut.shared * cut.pieces) / cut.sharing);
  }
  __device__ __forceinline__ bool next() {
    const int pieces = cut.pieces;
    if (at > begin) {
      tile = (at - 1) / pieces, to = at - tile * pieces, from = max(begin - tile * pieces, 0);
      at = tile * pieces + from;
      return true;
    }
    if (whole >= cut.tiles) return false;
    tile = whole, from = 0, to = pieces, whole += gridDim.x / BSH_GEMM_WIDE_PAIR;
    return true;
  }
};

// This thread block's place.
struct wide_place {
  int rank; // in its pair, which is a cluster
  int pair; // of the grid
  __device__ __forceinline__ wide_place() {
    rank = blockIdx.x % BSH_GEMM_WIDE_PAIR, pair = blockIdx.x / BSH_GEMM_WIDE_PAIR;
  }
  // The first row of A of this block, and the first token, of a tile.
  __device__ __forceinline__ int row(const bsh_gemm_wide_cut &cut, int tile) const {
    return (tile / cut.token_tiles * BSH_GEMM_WIDE_PAIR + rank) * BSH_GEMM_WIDE_ROWS;
  }
  template <int TOKENS> static __device__ __forceinline__ int token(const bsh_gemm_wide_cut &cut, int tile) {
    return tile % cut.token_tiles * TOKENS;
  }
  // This block's index, for sums and flags of pair `other`.
  __device__ __forceinline__ int block_of(int other) const { return other * BSH_GEMM_WIDE_PAIR + rank; }
};

} // namespace
} // namespace bsh
#endif
