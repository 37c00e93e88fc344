// scheduler_sm80.cuh - which stages of which tiles a block multiplies, for gemm_4bit_sm80.cu.
//
// A piece is some stages of one tile. A block knows a few pieces ahead: they lie in a ring in shared memory, since the
// loads of a piece begin while earlier ones are multiplied. Behind the last comes the last again, marked as no work, so
// that loads always have an address.
#pragma once

#include "cuda/sizes/gemm_4bit_sm80.h"

#include "cuda/ptx/ptx_sm80.cuh"

namespace bsh {
namespace {

enum : int { WHOLE, LEFT, JOINED, SCATTERED }; // what becomes of a piece's sums (epilogue_sm80.cuh)
enum { NO_WORK = 4, KIND_BITS = 3 };

// As it lies in shared memory: 16 bytes.
struct sm80_piece {
  int row, column; // of y
  uint32_t stages; // from | to << 16
  uint32_t rest;   // kind | NO_WORK | tile << KIND_BITS
  __device__ __forceinline__ int from() const { return stages & 0xFFFF; }
  __device__ __forceinline__ int to() const { return stages >> 16; }
  __device__ __forceinline__ int kind() const { return rest & 3; }
  __device__ __forceinline__ bool work() const { return !(rest & NO_WORK); }
  __device__ __forceinline__ int tile() const { return rest >> KIND_BITS; }
};

// Stages of the shared tiles before block `block`.
__device__ __forceinline__ int shared_before(const bsh_gemm_sm80_cut &cut, int block) {
  return block * cut.share + min(block, cut.longer);
}

__device__ __forceinline__ sm80_piece piece_of(const bsh_gemm_sm80_cut &cut, int tile, int from, int to, int kind,
                                               bool work) {
  sm80_piece piece;
  piece.row = tile % cut.row_tiles * cut.rows;
  piece.column = tile / cut.row_tiles * BSH_GEMM_SM80_COLUMNS;
  piece.stages = from | to << 16;
  piece.rest = kind | (work ? 0 : NO_WORK) | tile << KIND_BITS;
  return piece;
}

// Piece i of this block. Of shared tiles the one that reaches furthest comes first: what it leaves is then there early.
__device__ __forceinline__ sm80_piece find_piece(const bsh_gemm_sm80_cut &cut, int i) {
  const int block = blockIdx.x, blocks = gridDim.x;
  if (cut.splits > 0) {
    const int share = block % cut.splits;
    return piece_of(cut, block / cut.splits, share * cut.stages / cut.splits, (share + 1) * cut.stages / cut.splits,
                    SCATTERED, i == 0);
  }
  const int begin = shared_before(cut, block), end = shared_before(cut, block + 1);
  const int shares = end > begin ? (end - 1) / cut.stages - begin / cut.stages + 1 : 0;
  const int left = cut.tiles - cut.shared - block;
  const int pieces = shares + (left > 0 ? (left - 1) / blocks + 1 : 0);
  const bool work = i < pieces;
  if (!work) i = pieces - 1;
  if (i >= shares) return piece_of(cut, cut.shared + block + (i - shares) * blocks, 0, cut.stages, WHOLE, work);
  const int tile = (end - 1) / cut.stages - i;
  const int from = max(begin - tile * cut.stages, 0), to = min(end - tile * cut.stages, cut.stages);
  return piece_of(cut, tile, from, to, to < cut.stages ? LEFT : from > 0 ? JOINED : WHOLE, work);
}

struct sm80_pieces {
  sm80_piece *ring;
  // The piece that is multiplied, << 16; how many pieces from there on loads of x have begun with, and << 8 loads of W.
  uint32_t place = 0;
  enum : uint32_t { X = 1, W = 1 << 8, PIECE = 1 << 16 };
  enum { AHEAD = 4 }; // of one stage each

  __device__ __forceinline__ explicit sm80_pieces(char *at) : ring(reinterpret_cast<sm80_piece *>(at)) {}
  __device__ __forceinline__ sm80_piece now() const { return ring[(place >> 16) % BSH_GEMM_SM80_PIECES]; }
  template <uint32_t WHOSE> __device__ __forceinline__ sm80_piece last() const { return at<WHOSE>(place - WHOSE); }
  template <uint32_t WHOSE> __device__ __forceinline__ sm80_piece next() {
    const uint32_t from = place;
    place += WHOSE;
    return at<WHOSE>(from);
  }
  __device__ __forceinline__ void advance() { place += PIECE - W - X; }
  // By one thread each; a barrier by the caller.
  __device__ __forceinline__ void begin(const bsh_gemm_sm80_cut &cut, int thread) const {
    if (thread < AHEAD) ring[thread] = find_piece(cut, thread);
  }
  // When a piece begins. The stages of the pieces before it have barriers behind which all see what is written.
  __device__ __forceinline__ void follow(const bsh_gemm_sm80_cut &cut) const {
    const int i = (place >> 16) + AHEAD;
    if (thread_index() == 0) ring[i % BSH_GEMM_SM80_PIECES] = find_piece(cut, i);
  }

private:
  template <uint32_t WHOSE> __device__ __forceinline__ sm80_piece at(uint32_t from) const {
    return ring[((from >> 16) + (WHOSE == X ? from : from >> 8)) % BSH_GEMM_SM80_PIECES];
  }
};

} // namespace
} // namespace bsh
