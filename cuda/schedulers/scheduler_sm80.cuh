// scheduler_sm80.cuh - which stages of which tiles a block multiplies, for gemm_4bit_sm80.cu and
// gemm_4bit_sm80_grouped.cu.
//
// A piece is some stages of one tile. A block knows a few pieces ahead: they lie in a ring in shared memory, since the
// loads of a piece begin while earlier ones are multiplied. Behind the last comes the last again, marked as no work, so
// that loads always have an address.
#pragma once

#include "cuda/sizes/gemm_4bit_sm80.h"

#include "cuda/schedulers/experts.cuh"
#include "cuda/ptx/ptx_sm80.cuh"

namespace bsh {
namespace {

enum : int { WHOLE, LEFT, JOINED, SCATTERED }; // what becomes of a piece's sums (epilogue_sm80.cuh)
enum { NO_WORK = 4, KIND_BITS = 3 };

// As it lies in shared memory.
struct __align__(BSH_GEMM_SM80_PIECE_BYTES) sm80_piece {
  int row, column; // of y
  int left;        // rows from the first on that exist: of a stack, of this expert
  int expert;
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

__device__ __forceinline__ sm80_piece piece_of(const bsh_gemm_sm80_args &args, int tile, int from, int to, int kind,
                                               bool work) {
  const bsh_gemm_sm80_cut &cut = args.cut;
  sm80_piece piece;
  piece.row = tile % cut.row_tiles * cut.rows;
  piece.column = tile / cut.row_tiles * BSH_GEMM_SM80_COLUMNS;
  piece.left = args.M - piece.row, piece.expert = 0;
  piece.stages = from | to << 16;
  piece.rest = kind | (work ? 0 : NO_WORK) | tile << KIND_BITS;
  return piece;
}

// Piece i of this block. Of shared tiles the one that reaches furthest comes first: what it leaves is then there early.
__device__ __forceinline__ sm80_piece find_piece(const bsh_gemm_sm80_args &args, int i) {
  const bsh_gemm_sm80_cut &cut = args.cut;
  const int block = blockIdx.x, blocks = gridDim.x;
  if (cut.splits > 0) {
    const int share = block % cut.splits;
    return piece_of(args, block / cut.splits, share * cut.stages / cut.splits, (share + 1) * cut.stages / cut.splits,
                    SCATTERED, i == 0);
  }
  const int begin = shared_before(cut, block), end = shared_before(cut, block + 1);
  const int shares = end > begin ? (end - 1) / cut.stages - begin / cut.stages + 1 : 0;
  const int left = cut.tiles - cut.shared - block;
  const int pieces = shares + (left > 0 ? (left - 1) / blocks + 1 : 0);
  const bool work = i < pieces;
  if (!work) i = pieces - 1;
  if (i >= shares) return piece_of(args, cut.shared + block + (i - shares) * blocks, 0, cut.stages, WHOLE, work);
  const int tile = (end - 1) / cut.stages - i;
  const int from = max(begin - tile * cut.stages, 0), to = min(end - tile * cut.stages, cut.stages);
  return piece_of(args, tile, from, to, to < cut.stages ? LEFT : from > 0 ? JOINED : WHOLE, work);
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

private:
  template <uint32_t WHOSE> __device__ __forceinline__ sm80_piece at(uint32_t from) const {
    return ring[((from >> 16) + (WHOSE == X ? from : from >> 8)) % BSH_GEMM_SM80_PIECES];
  }
};

// Of one weight.
struct dense_pieces : sm80_pieces {
  using sm80_pieces::sm80_pieces;
  // A barrier by the caller.
  __device__ __forceinline__ void begin(const bsh_gemm_sm80_args &args) const {
    const int thread = threadIdx.x;
    if (thread < AHEAD) ring[thread] = find_piece(args, thread);
  }
  // When a piece begins. The stages of the pieces before it have barriers behind which all see what is written.
  __device__ __forceinline__ void follow(const bsh_gemm_sm80_args &args) const {
    const int i = (place >> 16) + AHEAD;
    if (thread_index() == 0) ring[i % BSH_GEMM_SM80_PIECES] = find_piece(args, i);
  }
};

// Of a stack: whole tiles of all experts, in turn. They go through the experts, in each through its columns of y, and
// of these through its rows. The first warp looks up which tile is where: it has a window of 32 experts in shared
// memory, which slides on with the tiles, and so any number of experts.
template <typename FORM> struct grouped_pieces : sm80_pieces {
  uint32_t window;                                   // [first expert][tiles before each, and behind the last][ends]
  enum : int { STARTS = 4, ENDS = STARTS + 4 * 33 }; // bytes; ends: of the expert before the first, then of each
  enum : int { LAST_START = ENDS - 4, LAST_END = ENDS + 128 };

  __device__ __forceinline__ explicit grouped_pieces(char *at)
      : sm80_pieces(at), window(shared_address(at) + FORM::SHARED_BYTES - FORM::PIECES_AT) {}
  // Whole blocks; a barrier by the caller.
  __device__ __forceinline__ void begin(const bsh_gemm_sm80_args &args) const {
    const int thread = threadIdx.x;
    if (thread >= BSH_WARP) return;
    if (thread == 0)
      st_shared(window, (uint32_t)-BSH_WARP), st_shared(window + LAST_START, 0u), st_shared(window + LAST_END, 0u);
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < AHEAD; i++) put(args, i);
  }
  __device__ __forceinline__ void follow(const bsh_gemm_sm80_args &args) const {
    if (thread_index() < BSH_WARP) put(args, (place >> 16) + AHEAD);
  }

private:
  __device__ __forceinline__ int word(int at) const { return (int)ld_shared_4(window + at); }
  // To the next 32 experts.
  __device__ __forceinline__ void slide(const bsh_gemm_sm80_args &args) const {
    const int lane = thread_index() & 31, width = FORM::GRADIENT ? args.K : args.N;
    const int first = word(0) + BSH_WARP, tiles = word(LAST_START), last = word(LAST_END);
    const int end = sorted_end(args.offs, first, lane, args.experts, args.M, last);
    const int before = __shfl_up_sync(~0u, end, 1), begin = lane == 0 ? last : before;
    const int columns = (width + BSH_GEMM_SM80_COLUMNS - 1) / BSH_GEMM_SM80_COLUMNS;
    const int own = groups_of<FORM::ROWS>()(end - begin) * columns, sum = tiles + sum_upto(own, lane);
    st_shared(window + STARTS + 4 * lane + 4, (uint32_t)sum);
    st_shared(window + ENDS + 4 * lane + 4, (uint32_t)end);
    if (lane == 0) st_shared(window, first), st_shared(window + STARTS, tiles), st_shared(window + ENDS, last);
    __syncwarp();
  }
  // By the first warp.
  __device__ __forceinline__ void put(const bsh_gemm_sm80_args &args, int i) const {
    const int lane = thread_index() & 31, tile = blockIdx.x + i * gridDim.x;
    while (tile >= word(LAST_START) && word(0) + BSH_WARP < args.experts) slide(args);
    const int start = word(STARTS + 4 * lane), begin = word(ENDS + 4 * lane), end = word(ENDS + 4 * lane + 4);
    if (start <= tile && tile < word(STARTS + 4 * lane + 4)) {
      const int row_tiles = groups_of<FORM::ROWS>()(end - begin), row = begin + (tile - start) % row_tiles * FORM::ROWS;
      write(i, args, row, (tile - start) / row_tiles * BSH_GEMM_SM80_COLUMNS, end - row, word(0) + lane, 0);
    }
    if (lane == 0 && tile >= word(LAST_START)) write(i, args, 0, 0, 0, 0, NO_WORK);
    __syncwarp();
  }
  __device__ __forceinline__ void write(int i, const bsh_gemm_sm80_args &args, int row, int column, int left,
                                        int expert, uint32_t rest) const {
    ring[i % BSH_GEMM_SM80_PIECES] = {row, column, left, expert, (uint32_t)args.cut.stages << 16, rest | WHOLE};
  }
};

} // namespace
} // namespace bsh
