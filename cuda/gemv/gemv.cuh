// gemv.cuh - products of few rows of x, for weights of any operand: how the warps of a block share W and K, the rings
// of packed bytes, x in registers, and the sums of warps and blocks. gemv_4bit.cu has the picture.
//
// An operand: TILES_PER_SYNC row tiles after which warps synchronize and their sums are used; EVERY_STEP: that is 1,
// and known to be to the compiler; HALVES_IN_TURN: the halves of a block use sums in turn, of which there are 256;
// enter(args, p, step) before a row tile; multiply(sum, piece, slot, x): sum += piece `piece` of a warp's K, which lies
// in the ring from `slot` on. Arguments and places are parameters, not members: registers would hold them otherwise.
#pragma once

#include "cuda/sizes/gemv_4bit.h"

#include "cuda/operands/decode.cuh"
#include "cuda/epilogues/epilogue.cuh"

namespace bsh {
namespace {

constexpr int WARPS = bsh_gemv_warps(ARCH);
constexpr int PIECE_BYTES = BSH_PIECE_BYTES;                                        // a ring slot
template <int TOKEN_TILES> constexpr int SLOTS = bsh_gemv_slots(ARCH, TOKEN_TILES); // of a warp's ring

// Who this thread is and which row tiles its block and its warp take.
struct place {
  int lane, warp, g, c;            // g: row within 8, c: lane within a quad
  int first_unit;                  // of this warp's K
  int split, tile_begin, tile_end; // part of K and row tiles of the block
  int group, row_groups, steps;    // a step: one row tile for each group; the last may repeat the block's last tile
  __device__ __forceinline__ int tile(int step) const {
    return min(tile_begin + step * row_groups + group, tile_end - 1);
  }
};
template <int UNITS> __device__ __forceinline__ place find_place(const bsh_fused_args &args) {
  place p;
  p.lane = threadIdx.x & 31, p.warp = threadIdx.x >> 5, p.g = p.lane >> 2, p.c = p.lane & 3;
  int team = blockIdx.x;
  p.split = 0;
  if (args.cut.k_splits > 1) team = blockIdx.x / args.cut.k_splits, p.split = blockIdx.x - team * args.cut.k_splits;
  const bool longer = team < args.cut.longer_teams;
  p.tile_begin = team * args.cut.team_tiles + min(team, args.cut.longer_teams);
  p.tile_end = p.tile_begin + args.cut.team_tiles + longer;
  p.row_groups = args.cut.row_groups, p.steps = longer ? args.cut.longer_steps : args.cut.steps;
  p.group = p.warp * args.cut.group_of_warp >> 16;
  p.first_unit = (p.split * args.cut.k_warps + p.warp - p.group * args.cut.k_warps) * UNITS;
  if (UNITS == 4) // with 8, registers are scarce and the compiler does better by computing these again
    p.tile_begin = keep(p.tile_begin), p.tile_end = keep(p.tile_end), p.steps = keep(p.steps),
    p.first_unit = keep(p.first_unit);
  return p;
}

// Rows of 4-bit codes, and of 8-bit ones, in pieces of 16 rows x 128 bytes. 16-byte chunks are swizzled so that lanes
// that read together, 32 bytes of each of 8 rows, or 64 of each of 2, have no bank conflict.
struct rows_of_4bit {
  using offset = uint32_t;
  static constexpr int UNIT_BYTES = 32;
  static __device__ __forceinline__ int pitch(const bsh_fused_args &args) { return args.K >> 1; }
  static __device__ __forceinline__ int swizzle(int row) { return row << 1; }
  static __device__ __forceinline__ uint64_t at(int tile, uint32_t tile_bytes) {
    return (uint64_t)(uint32_t)tile * tile_bytes;
  }
};
struct rows_of_int8 {
  using offset = int64_t;
  static constexpr int UNIT_BYTES = 64;
  static __device__ __forceinline__ int64_t pitch(const bsh_fused_args &args) { return args.K; }
  static __device__ __forceinline__ int swizzle(int row) { return (row & 1) << 2; }
  static __device__ __forceinline__ int64_t at(int tile, int64_t tile_bytes) { return tile * tile_bytes; }
};

// The pieces of a warp's K, PIECES of a row tile. Columns beyond W repeat its last bytes (their x is zero).
template <typename ROWS, int PIECES, int SLOTS> struct piece_loader {
  const uint8_t *from[PIECES]; // this lane's first 16 bytes of a piece in row tile 0
  uint32_t to;
  typename ROWS::offset tile_bytes, four_rows;

  __device__ __forceinline__ piece_loader(const bsh_fused_args &args, const place &p, const char *ring) {
    const auto pitch = ROWS::pitch(args);
    const int row = p.lane >> 3, chunk = p.lane & 7;
    tile_bytes = pitch * BSH_ROW_TILE, four_rows = pitch * 4;
    to = keep(shared_address(ring) + p.warp * SLOTS * PIECE_BYTES + row * 128 + ((chunk ^ ROWS::swizzle(row)) << 4));
#pragma unroll
    for (int i = 0; i < PIECES; i++)
      from[i] = keep(args.packed + row * pitch +
                     min(p.first_unit * ROWS::UNIT_BYTES + i * 128 + chunk * 16, (int)pitch - 16));
  }
  __device__ __forceinline__ void start(int tile, int piece, uint32_t slot) const {
    const uint8_t *source = from[piece] + ROWS::at(tile, tile_bytes);
#pragma unroll
    for (int i = 0; i < 4; i++, source += four_rows) cp_async_16(to + slot + i * 512, source);
  }
  // Hints, before the earlier kernels have ended.
  __device__ __forceinline__ void prefetch(const place &p) const {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i / PIECES >= p.steps) continue;
      const uint8_t *source = from[i % PIECES] + ROWS::at(p.tile(i / PIECES), tile_bytes);
      if ((threadIdx.x & 7) == 0)
#pragma unroll
        for (int r = 0; r < 4; r++, source += four_rows) prefetch_l2(source);
    }
  }
  // Fills all slots but one.
  __device__ __forceinline__ void begin(const place &p) const {
#pragma unroll
    for (int i = 0; i < SLOTS - 1; i++) {
      if (i / PIECES < p.steps) start(p.tile(i / PIECES), i % PIECES, i * PIECE_BYTES);
      cp_async_commit();
    }
  }
};

// x of a warp's units as mma B operands: lane (g, c) holds elements 16c..16c+15 of each unit of token g. What lies
// beyond x is read from its last place, so that all loads are on their way together. Units beyond K are then made zero;
// sums of tokens beyond M are never stored.
template <int TOKEN_TILES, int UNITS>
__device__ __forceinline__ void load_x(uint32_t (*x)[TOKEN_TILES][8], const bsh_fused_args &args, const place &p) {
  const int units = args.K / BSH_UNIT;
  uint4 loaded[UNITS][TOKEN_TILES][2];
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; n++) {
    const uint16_t *row = static_cast<const uint16_t *>(args.x) +
                          min(first_token<TOKEN_TILES>() + n * 8 + p.g, args.M - 1) * args.ldx + p.c * 16;
#pragma unroll
    for (int j = 0; j < UNITS; j++) {
      const uint4 *from = reinterpret_cast<const uint4 *>(row + min(p.first_unit + j, units - 1) * BSH_UNIT);
      loaded[j][n][0] = from[0], loaded[j][n][1] = from[1];
    }
  }
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; n++)
#pragma unroll
    for (int j = 0; j < UNITS; j++) {
      const uint4 u = loaded[j][n][0], v = loaded[j][n][1];
      uint32_t *to = x[j][n];
      to[0] = u.x, to[1] = u.y, to[2] = u.z, to[3] = u.w, to[4] = v.x, to[5] = v.y, to[6] = v.z, to[7] = v.w;
    }
  if (p.first_unit + UNITS <= units) return;
#pragma unroll
  for (int j = 0; j < UNITS; j++)
    if (p.first_unit + j >= units)
#pragma unroll
      for (int n = 0; n < TOKEN_TILES; n++)
#pragma unroll
        for (int i = 0; i < 8; i++) x[j][n][i] = 0;
}

// Element e of a row tile's sums of k_warps warps, the first of which has it at `from`, added in the order of K.
template <int TOKEN_TILES>
__device__ __forceinline__ float sum_of_warps(const bsh_fused_args &args, const float *from) {
  constexpr int TILE = TOKEN_TILES * 128;
  float v[4] = {};
#pragma unroll
  for (int w = 0; w < WARPS; w++)
    if (w < args.cut.k_warps) v[w & 3] += from[w * TILE];
  return (v[0] + v[1]) + (v[2] + v[3]);
}

// Hands such a sum on: to blocks that share the tile's K, or to STORE.
template <int TOKEN_TILES, typename STORE> struct hand_on {
  __device__ __forceinline__ void operator()(const bsh_fused_args &args, const place &p, int tile, int e,
                                             const float *from) const {
    const float sum = sum_of_warps<TOKEN_TILES>(args, from);
    if (args.cut.k_splits > 1) *split_sums<TOKEN_TILES>(args, tile, p.split, e) = sum;
    else STORE{args}(element(tile, first_token<TOKEN_TILES>(), e), sum);
  }
};

// use() gets the sums of the warps of each element of the `steps` steps from `step` on.
template <typename OPERAND, int TOKEN_TILES, typename USE>
__device__ __forceinline__ void use_sums(const bsh_fused_args &args, const place &p, const float *sums, int step,
                                         int steps, const USE &use) {
  constexpr int TILE = TOKEN_TILES * 128, TILES_PER_SYNC = OPERAND::TILES_PER_SYNC;
  int o = threadIdx.x;
  if (OPERAND::HALVES_IN_TURN && step & 1) o = o < blockDim.x / 2 ? o + blockDim.x / 2 : o - blockDim.x / 2;
  for (; o < TILES_PER_SYNC * p.row_groups * TILE; o += blockDim.x) {
    const int e = o % TILE, s = o / TILE % TILES_PER_SYNC, group = o / (TILE * TILES_PER_SYNC);
    const int tile = p.tile_begin + (step + s) * p.row_groups + group;
    if (s >= steps || tile >= p.tile_end) continue;
    use(args, p, tile, e, sums + (s * WARPS + group * args.cut.k_warps) * TILE + e);
  }
}

// The product of the row tiles of a place: `stream` has begun, W is ready for the first tile. first_half: of the
// double-buffered sums, written first; the next one is returned.
template <typename OPERAND, int TOKEN_TILES, typename ROWS, int PIECES, int SLOTS, typename USE>
__device__ __forceinline__ int multiply_tiles(const bsh_fused_args &args, const place &p, float *sums,
                                              const piece_loader<ROWS, PIECES, SLOTS> &stream, OPERAND &w,
                                              const uint32_t (*x)[TOKEN_TILES][8], int first_half, const USE &use) {
  constexpr int TILE = TOKEN_TILES * 128, TILES_PER_SYNC = OPERAND::TILES_PER_SYNC;
  const uint32_t own_sums = keep(shared_address(sums + p.warp * TILE + p.lane * 4));
  uint32_t slot = 0, fill = (SLOTS - 1) * PIECE_BYTES;
  int half = first_half, used = 0; // of the double-buffered sums; steps whose sums were used

  for (int step = 0; step < p.steps; step++) {
    float sum[TOKEN_TILES][4] = {};
    if (OPERAND::EVERY_STEP) used = step;
    w.enter(args, p, step);
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
      cp_async_wait<SLOTS - 2>();
      __syncwarp();
      const int ahead = piece + SLOTS - 1; // SLOTS - 1 pieces ahead
      if (step + ahead / PIECES < p.steps) stream.start(p.tile(step + ahead / PIECES), ahead % PIECES, fill);
      cp_async_commit();
      w.multiply(sum, piece, slot, x);
      fill = slot;
      slot = slot == (SLOTS - 1) * PIECE_BYTES ? 0 : slot + PIECE_BYTES;
    }
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++)
      st_shared(own_sums + ((half * TILES_PER_SYNC + step - used) * WARPS * TILE + n * 128) * 4, sum[n]);
    if (step + 1 - used == TILES_PER_SYNC || step + 1 == p.steps) {
      __syncthreads(); // the sums are written, and the other half has been read
      use_sums<OPERAND, TOKEN_TILES>(args, p, sums + half * TILES_PER_SYNC * WARPS * TILE, used, step + 1 - used, use);
      used = step + 1, half ^= 1;
    }
  }
  return half;
}

// Adds what the blocks of a cluster that share K have left, and stores it.
template <int TOKEN_TILES, typename STORE>
__device__ __forceinline__ void join_cluster(const bsh_fused_args &args, const place &p) {
#if __CUDA_ARCH__ >= 900
  if (args.cut.k_splits <= 1) return;
  cluster_sync();
  join_splits<TOKEN_TILES>(args, p.tile_begin, p.split * blockDim.x + threadIdx.x,
                           (p.tile_end - p.tile_begin) * TOKEN_TILES * 128, args.cut.k_splits * blockDim.x,
                           STORE{args});
#endif
}

} // namespace
} // namespace bsh
