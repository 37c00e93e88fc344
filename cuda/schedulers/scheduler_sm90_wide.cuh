// scheduler_sm90_wide.cuh - which pieces of which tiles a pair of thread blocks takes (gemm_4bit_sm90_wide.h).
#pragma once

#include "cuda/sizes/gemm_4bit_sm90_wide.h"

#include "cuda/schedulers/experts.cuh"
#include "cuda/ptx/ptx_sm90_cluster.cuh"

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

// ---- of a stack of experts ----
//
// An expert's tokens are tiles of 256, and what is left of them narrower tiles, at their end: of 192 and of 128 tokens,
// at most two. A product of fewer tokens takes less time, so nearly empty tiles are avoided: of 257 to 384 tokens are
// made two narrow tiles, of 385 to 448 a wide and a narrow one.
//
//   tokens left of an expert   ... 128 | 129 ... 192 | 193 ... 256 | 257 ... 320 | ... 384 | ... 448 | ... 512
//   tiles                          128 |     192     |     256     |  192 + 128  | 192 * 2 | 256+192 | 256 * 2

// How many tiles an expert of `rows` tokens has, in the word of BSH_GEMM_WIDE_NARROW_BIT.
template <int TOKENS> struct wide_tiles_of {
  __device__ __forceinline__ int operator()(int rows) const {
    const int tiles = (rows + TOKENS - 1) / TOKENS;
    if (TOKENS != 256 || tiles == 0) return tiles;
    const int last_two = rows - (tiles - 2) * TOKENS;
    const int narrow = tiles > 1 && last_two <= 384 ? 2 : last_two <= 448 ? 1 : 0;
    return tiles - narrow | narrow << BSH_GEMM_WIDE_NARROW_BIT;
  }
};
template <bool NARROW> struct tiles_in {
  __device__ __forceinline__ int operator()(int word) const {
    return NARROW ? word >> BSH_GEMM_WIDE_NARROW_BIT : word & ((1 << BSH_GEMM_WIDE_NARROW_BIT) - 1);
  }
};

// The 256 rows of A of a pair: how many such blocks are complete, and whether rows are left.
struct row_blocks {
  int complete, rest;
  __device__ __forceinline__ explicit row_blocks(int rows) {
    constexpr int ROWS = BSH_GEMM_WIDE_ROWS * BSH_GEMM_WIDE_PAIR;
    complete = rows / ROWS, rest = rows % ROWS > 0;
  }
};

// Tiles of all experts, those that take longest first: wide ones of complete row blocks, narrow ones, then both of the
// rest of the rows. Of each kind they go through the experts, in each through its rows of A, and of these through its
// tokens. Pairs of blocks take turns there and back: 0, 1, ... P - 1, P - 1, ... 1, 0, 0, ..., so that those that have
// had a longer tile get the shorter ones.
struct grouped_scheduler {
  const bsh_gemm_wide_args &args; // a parameter of the kernel: takes no registers
  expert_rows of;
  int rows, pair, round, tile, to; // rows: of A
  static constexpr int from = 0;

  __device__ __forceinline__ grouped_scheduler(const bsh_gemm_wide_args &args, const expert_rows &of, int rows,
                                               int pair)
      : args(args), of(of), rows(rows), pair(pair), round(0), tile(0), to(0) {}
  __device__ __forceinline__ bool next() {
    const int pairs = gridDim.x / BSH_GEMM_WIDE_PAIR, all = of.start(args.experts);
    const row_blocks blocks(rows);
    tile = round * pairs + (round & 1 ? pairs - 1 - pair : pair);
    round++, to = args.cut.pieces;
    return tile < (tiles_in<false>()(all) + tiles_in<true>()(all)) * (blocks.complete + blocks.rest);
  }
};

// Where a tile is: the first row of A of this block, the first token; of a stack also the expert, the tokens from the
// first to the expert's last, and how many of them are multiplied at most.
struct tile_place {
  int row, token, expert, left, width;
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
    return expert_rows(base + bsh_gemm_wide_experts_at(FORM::TOKENS, FORM::BLOCK), args.experts);
  }
  // Where the places of this pair's tiles are: of its i-th one.
  template <typename FORM> static __device__ __forceinline__ uint32_t place_at(uint32_t base, int i) {
    return base + bsh_gemm_wide_shared_bytes(FORM::TOKENS, FORM::BLOCK) + i % BSH_GEMM_WIDE_PLACES * 16;
  }
  // Of a stack: the thread that brings x leaves a tile's place, which takes a search, for those that multiply.
  template <typename FORM> __device__ __forceinline__ void leave(uint32_t base, int i, const tile_place &at) const {
    st_shared_16(place_at<FORM>(base, i), make_uint4(at.row, at.token, at.left, at.expert | at.width << 16));
  }
  template <typename FORM> static __device__ __forceinline__ tile_place left_at(uint32_t base, int i) {
    const uint4 v = ld_shared_16(place_at<FORM>(base, i));
    return {(int)v.x, (int)v.y, (int)v.w & 0xFFFF, (int)v.z, (int)v.w >> 16};
  }
  // Steps of 64 of depth of a tile: TRIMMED without a last one behind the depth.
  template <typename FORM> static __device__ __forceinline__ int steps(const bsh_gemm_wide_args &args, int pieces) {
    return 2 * pieces - (FORM::TRIMMED && half_piece<FORM>(args));
  }
  template <typename FORM> static __device__ __forceinline__ bool half_piece(const bsh_gemm_wide_args &args) {
    const int rest = (FORM::GRADIENT ? args.N : args.K) % BSH_GEMM_WIDE_PIECE;
    return rest > 0 && rest <= BSH_GEMM_WIDE_PIECE / 2;
  }
  // Rows of A.
  template <typename FORM> static __device__ __forceinline__ int rows(const bsh_gemm_wide_args &args) {
    return FORM::GRADIENT ? args.K : args.N;
  }
  template <typename FORM>
  __device__ __forceinline__ auto scheduler(const bsh_gemm_wide_args &args, uint32_t base) const {
    if constexpr (FORM::GROUPED) return grouped_scheduler(args, experts<FORM>(args, base), rows<FORM>(args), pair);
    else return wide_scheduler(args.cut, pair);
  }
  template <typename FORM>
  __device__ __forceinline__ tile_place at(const bsh_gemm_wide_args &args, uint32_t base, int tile) const {
    if constexpr (FORM::GROUPED) {
      const expert_rows of = experts<FORM>(args, base);
      row_blocks blocks(rows<FORM>(args));
      const int all = of.start(args.experts), wide = tiles_in<false>()(all), narrow = tiles_in<true>()(all);
      int first_block = 0, count = blocks.complete; // blocks of rows of A that this kind of tiles has
      if (tile >= (wide + narrow) * count) tile -= (wide + narrow) * count, first_block = count, count = 1;
      if (FORM::TOKENS < 256 || tile < wide * count) return at_kind<FORM, false>(of, tile, count, first_block);
      return at_kind<FORM, true>(of, tile - wide * count, count, first_block);
    } else {
      const int first = token<FORM::TOKENS>(args.cut, tile);
      return {row(args.cut, tile), first, 0, args.M - first, FORM::TOKENS};
    }
  }
  // Tile `tile` of those of one kind, wide or narrow, with `blocks` blocks of rows of A from `first_block` on.
  template <typename FORM, bool NARROW>
  __device__ __forceinline__ tile_place at_kind(const expert_rows &of, int tile, int blocks, int first_block) const {
    const tiles_in<NARROW> kind;
    const int expert = of.of_group(tile / blocks, kind), begin = of.start(expert), end = of.start(expert + 1);
    const int own = kind(end) - kind(begin), i = tile - kind(begin) * blocks, block = i / own, t = i - block * own;
    const int before = NARROW ? (tiles_in<false>()(end - begin)) * FORM::TOKENS + t * 192 : t * FORM::TOKENS;
    const int token = of.begin(expert) + before, left = of.end(expert) - token, narrow_width = left > 128 ? 192 : 128;
    return {((first_block + block) * BSH_GEMM_WIDE_PAIR + rank) * BSH_GEMM_WIDE_ROWS, token, expert, left,
            NARROW ? narrow_width : FORM::TOKENS};
  }
  // This block's index, for sums and flags of pair `other`.
  __device__ __forceinline__ int block_of(int other) const { return other * BSH_GEMM_WIDE_PAIR + rank; }
};

} // namespace
} // namespace bsh
