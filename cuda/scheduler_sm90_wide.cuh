// scheduler_sm90_wide.cuh - which pieces of which tiles a pair of thread blocks takes (gemm_4bit_sm90_wide.h).
#pragma once

#include "gemm_4bit_sm90_wide.h"

#include "experts.cuh"
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

// Of a stack of experts: pair i takes tiles i, i + pairs, ... Tiles go through the experts, in each through its rows of
// A, and of these through its token tiles.
struct grouped_scheduler {
  int tiles, pieces, whole, tile, from, to;

  __device__ __forceinline__ grouped_scheduler(const bsh_gemm_wide_args &args, const expert_rows &of, int row_blocks,
                                               int pair)
      : tiles(of.start(args.experts) * row_blocks), pieces(args.cut.pieces), whole(pair), tile(0), from(0), to(0) {}
  __device__ __forceinline__ bool next() {
    if (whole >= tiles) return false;
    tile = whole, to = pieces, whole += gridDim.x / BSH_GEMM_WIDE_PAIR;
    return true;
  }
};

// Where a tile is: the first row of A of this block, the first token; of a stack also the expert, and the tokens from
// the first to the expert's last.
struct tile_place {
  int row, token, expert, left;
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
  template <typename FORM>
  static __device__ __forceinline__ expert_rows experts(const bsh_gemm_wide_args &args, uint32_t base) {
    return expert_rows(base + bsh_gemm_wide_shared_bytes(FORM::TOKENS), args.experts);
  }
  // Pairs of blocks that span the rows of A.
  template <typename FORM> static __device__ __forceinline__ int row_blocks(const bsh_gemm_wide_args &args) {
    constexpr int ROWS = BSH_GEMM_WIDE_ROWS * BSH_GEMM_WIDE_PAIR;
    return ((FORM::GRADIENT ? args.K : args.N) + ROWS - 1) / ROWS;
  }
  template <typename FORM>
  __device__ __forceinline__ auto scheduler(const bsh_gemm_wide_args &args, uint32_t base) const {
    if constexpr (FORM::GROUPED)
      return grouped_scheduler(args, experts<FORM>(args, base), row_blocks<FORM>(args), pair);
    else return wide_scheduler(args.cut, pair);
  }
  template <typename FORM>
  __device__ __forceinline__ tile_place at(const bsh_gemm_wide_args &args, uint32_t base, int tile) const {
    if constexpr (FORM::GROUPED) {
      const expert_rows of = experts<FORM>(args, base);
      const int blocks = row_blocks<FORM>(args), expert = of.of_group(tile / blocks), start = of.start(expert);
      const int token_tiles = of.start(expert + 1) - start, i = tile - start * blocks, block = i / token_tiles;
      const int token = of.begin(expert) + (i - block * token_tiles) * FORM::TOKENS;
      return {(block * BSH_GEMM_WIDE_PAIR + rank) * BSH_GEMM_WIDE_ROWS, token, expert, of.end(expert) - token};
    } else {
      const int first = token<FORM::TOKENS>(args.cut, tile);
      return {row(args.cut, tile), first, 0, args.M - first};
    }
  }
  // This block's index, for sums and flags of pair `other`.
  __device__ __forceinline__ int block_of(int other) const { return other * BSH_GEMM_WIDE_PAIR + rank; }
};

} // namespace
} // namespace bsh
#endif
