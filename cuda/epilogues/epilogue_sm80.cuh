// epilogue_sm80.cuh - from a thread's sums to y, for gemm_4bit_sm80.cu and gemm_4bit_sm80_grouped.cu: stored, left for
// other blocks, or joined with theirs. Partial sums are added in an order that depends on the cut alone, so equal
// inputs give equal bits.
//
// sum[i][j][e]: row 8 (e / 2) + lane / 4 and column 8 j + 2 (lane % 4) + e % 2 of the warp's row group i and 64
// columns. Row groups of warps take turns: sm80_group.
#pragma once

#include "cuda/epilogues/shared_tile.cuh"
#include "cuda/loaders/loaders_sm80.cuh"

namespace bsh {
namespace {

enum { ROW_GROUPS = 4, COLUMN_GROUPS = 8 }; // of a warp: of 16 rows, 8 columns
using sm80_sums = float[ROW_GROUPS][COLUMN_GROUPS][4];
template <typename FORM> struct sm80_group {
  static constexpr int APART = FORM::ROWS / ROW_GROUPS; // rows, of a warp's row groups
  static __device__ __forceinline__ int first(int t) { return (t >> 6) * 16; }
};

// Row groups in a mask, as bits.
enum : uint32_t { ALL_GROUPS = (1u << ROW_GROUPS) - 1 };
template <typename F> __device__ __forceinline__ void for_groups(uint32_t groups, F f) {
#pragma unroll
  for (int i = 0; i < ROW_GROUPS; i++)
    if (groups >> i & 1) f(i);
}

// What a block leaves of a row group, of this thread: a float4 for each column group.
template <typename FORM> __device__ __forceinline__ float4 *sums_of(const bsh_gemm_sm80_args &args, int block) {
  return reinterpret_cast<float4 *>(args.partial) + (int64_t)block * (ROW_GROUPS * COLUMN_GROUPS * FORM::THREADS) +
         thread_index();
}
template <typename FORM>
__device__ __forceinline__ void leave_groups(const bsh_gemm_sm80_args &args, const sm80_sums &sum, uint32_t groups) {
  float4 *const to = sums_of<FORM>(args, blockIdx.x);
  for_groups(groups, [&](int i) {
#pragma unroll
    for (int j = 0; j < COLUMN_GROUPS; j++)
      __stcg(to + (i * COLUMN_GROUPS + j) * FORM::THREADS,
             make_float4(sum[i][j][0], sum[i][j][1], sum[i][j][2], sum[i][j][3]));
  });
}
template <typename FORM>
__device__ __forceinline__ void add_groups(const bsh_gemm_sm80_args &args, sm80_sums &sum, uint32_t groups, int block) {
  const float4 *const from = sums_of<FORM>(args, block);
  for_groups(groups, [&](int i) {
#pragma unroll
    for (int j = 0; j < COLUMN_GROUPS; j++) {
      const float4 v = __ldcg(from + (i * COLUMN_GROUPS + j) * FORM::THREADS);
      sum[i][j][0] += v.x, sum[i][j][1] += v.y, sum[i][j][2] += v.z, sum[i][j][3] += v.w;
    }
  });
}
__device__ __forceinline__ void clear_groups(sm80_sums &sum, uint32_t groups) {
  for_groups(groups, [&](int i) {
#pragma unroll
    for (int j = 0; j < COLUMN_GROUPS; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) sum[i][j][e] = 0.f;
  });
}

// The block that has the first of the shared stages of a tile.
__device__ __forceinline__ int first_block(const bsh_gemm_sm80_cut &cut, int tile) {
  const int begin = tile * cut.stages, of_longer = cut.longer * (cut.share + 1);
  return begin < of_longer ? begin / (cut.share + 1) : cut.longer + (begin - of_longer) / cut.share;
}

// What one thread has, for all.
__device__ __forceinline__ uint32_t for_block(uint32_t word_at, uint32_t value) {
  if (thread_index() == 0) st_shared(word_at, value);
  __syncthreads();
  value = ld_shared_4(word_at);
  __syncthreads();
  return value;
}

// Those who share a tile. LEFT and JOINED: all blocks share tiles in order. A block waits for blocks of lower index
// only, which leave theirs before they wait for anything, and adds theirs from the lowest on. SCATTERED: blocks share a
// tile in equal parts of its depth. Part p of the rows, some row groups of each warp, is joined by block p of them, or
// by the last to arrive (shared_tile.cuh): what block p has, and what the others have, from the lowest on.
struct sm80_sharing {
  int kind, first, shares, me; // first: of the blocks that share; shares: SCATTERED, how many they are
  __device__ __forceinline__ sm80_sharing(const bsh_gemm_sm80_cut &cut, const sm80_piece &piece)
      : kind(piece.kind()), shares(cut.splits), me(kind == SCATTERED ? blockIdx.x % cut.splits : 0) {
    first = kind == SCATTERED ? blockIdx.x - me : kind == JOINED ? first_block(cut, piece.tile()) : 0;
  }
  __device__ __forceinline__ uint32_t groups_of(int part) const {
    const int each = ROW_GROUPS / shares;
    return ((1u << each) - 1) << part * each;
  }
  // What this block leaves for others, and which parts it then joins, as bits.
  template <typename FORM>
  __device__ __forceinline__ uint32_t leave(const bsh_gemm_sm80_args &args, const sm80_sums &sum, int tile,
                                            uint32_t word_at) const {
    uint32_t groups = kind == LEFT ? ALL_GROUPS : ALL_GROUPS & ~groups_of(me), parts = 0;
#pragma unroll 1
    for (int round = 0; round < 2 && parts == 0; round++) { // the second: no more waiting
      leave_groups<FORM>(args, sum, groups);
      __syncthreads();
      const bool speaks = thread_index() == 0;
      if (kind == LEFT) {
        if (speaks) store_release(args.flags + blockIdx.x, 1);
        return 0;
      }
      uint32_t *const word = args.flags + tile;
      if (speaks) parts = round == 0 ? come(word, me, shares) : go(word, me, shares);
      parts = for_block(word_at, parts);
      groups = groups_of(me);
    }
    return parts;
  }
  // Which block comes k-th where a part is joined: its own, 0, and then the others.
  __device__ __forceinline__ int block_of(int part, int k) const { return first + (k == 0 ? part : k - (k <= part)); }
  template <typename FORM>
  __device__ __forceinline__ void join(const bsh_gemm_sm80_args &args, sm80_sums &sum, uint32_t groups,
                                       int part) const {
    const bool in_order = kind == JOINED, own = in_order || part == me;
    if (!own) clear_groups(sum, groups);
    const int blocks = in_order ? blockIdx.x - first : shares;
#pragma unroll 1
    for (int k = in_order || !own ? 0 : 1; k < blocks; k++) {
      const int block = in_order ? first + k : block_of(part, k);
      if (in_order) {
        if (thread_index() == 0)
          while (!load_acquire(args.flags + block)) {
          }
        __syncthreads();
      }
      add_groups<FORM>(args, sum, groups, block);
    }
  }
};

// Row groups that are complete, and stored here.
template <typename FORM>
__device__ __forceinline__ uint32_t share_sums(const bsh_gemm_sm80_args &args, sm80_sums &sum, const sm80_piece &piece,
                                               uint32_t word_at) {
  const sm80_sharing sharing(args.cut, piece);
  uint32_t parts = 1, complete = 0;
  if (sharing.kind != JOINED) parts = sharing.leave<FORM>(args, sum, piece.tile(), word_at);
#pragma unroll 1
  for (int part = 0; parts != 0; part++, parts >>= 1) {
    if (!(parts & 1)) continue;
    const uint32_t groups = sharing.kind == JOINED ? ALL_GROUPS : sharing.groups_of(part);
    sharing.join<FORM>(args, sum, groups, part);
    complete |= groups;
  }
  return complete;
}

// ---- to y ----

// In the order of the source: all loads at once would take registers.
template <typename T> __device__ __forceinline__ float load_bias(const void *bias, int column) {
  uint16_t bits;
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(bits) : "l"(static_cast<const T *>(bias) + column));
  return to_float(*reinterpret_cast<const T *>(&bits));
}
template <typename T>
__device__ __forceinline__ void add_bias(const void *of_expert, int N, sm80_sums &sum, int column) {
#pragma unroll
  for (int j = 0; j < COLUMN_GROUPS; j++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float bias = load_bias<T>(of_expert, min(column + 8 * j + e, N - 1));
#pragma unroll
      for (int i = 0; i < ROW_GROUPS; i++) sum[i][j][e] += bias, sum[i][j][2 + e] += bias;
    }
}

// 4 x 4 words transposed among the four lanes of a quad.
__device__ __forceinline__ void transpose_quad(uint32_t (&v)[4], int c) {
  const bool odd = c & 1, upper = c & 2;
  const uint32_t first = __shfl_xor_sync(~0u, odd ? v[0] : v[1], 1), third = __shfl_xor_sync(~0u, odd ? v[2] : v[3], 1);
  const uint32_t u[] = {odd ? first : v[0], odd ? v[1] : first, odd ? third : v[2], odd ? v[3] : third};
  const uint32_t even = __shfl_xor_sync(~0u, upper ? u[0] : u[2], 2),
                 other = __shfl_xor_sync(~0u, upper ? u[1] : u[3], 2);
  v[0] = upper ? even : u[0], v[2] = upper ? u[2] : even, v[1] = upper ? other : u[1], v[3] = upper ? u[3] : other;
}

// 8 neighbours of y, of which `left` exist.
template <typename T>
__device__ __forceinline__ void store_eight(T *y, const uint32_t (&v)[4], int left, bool at_once) {
  if (at_once && left >= 8) {
    *reinterpret_cast<uint4 *>(y) = make_uint4(v[0], v[1], v[2], v[3]);
    return;
  }
#pragma unroll
  for (int e = 0; e < 8; e++)
    if (e < left) reinterpret_cast<uint16_t *>(y)[e] = (uint16_t)(v[e >> 1] >> (e & 1) * 16);
}

// The row groups in `groups`. Lane 4 g + c gets the 8 columns of column group 4 q + c.
template <typename FORM>
__device__ __forceinline__ void store_sums(const bsh_gemm_sm80_args &args, sm80_sums &sum, const sm80_piece &piece,
                                           uint32_t groups) {
  using T = typename FORM::T;
  const int t = thread_index(), lane = t & 31, c = lane & 3, width = FORM::GRADIENT ? args.K : args.N;
  const int row0 = sm80_group<FORM>::first(t) + (lane >> 2), column0 = piece.column + (t >> 5 & 1) * 64;
  if (!FORM::GRADIENT && args.bias)
    add_bias<T>(static_cast<const T *>(args.bias) + piece.expert * args.N, args.N, sum, column0 + 2 * c);
#pragma unroll
  for (int i = 0; i < ROW_GROUPS; i++) {
    if (!(groups >> i & 1)) continue;
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int q = 0; q < COLUMN_GROUPS / 4; q++) {
        uint32_t v[4];
#pragma unroll
        for (int j = 0; j < 4; j++) v[j] = pack_pair<T>(sum[i][4 * q + j][2 * h], sum[i][4 * q + j][2 * h + 1]);
        transpose_quad(v, c);
        const int row = row0 + i * sm80_group<FORM>::APART + h * 8, column = column0 + (4 * q + c) * 8;
        if (row < piece.left)
          store_eight(static_cast<T *>(args.y) + (piece.row + row) * args.ldy + column, v, width - column,
                      args.store_eights);
      }
  }
}

// The sums of a piece; `sum` is then zero.
template <typename FORM>
__device__ __forceinline__ void finish_sums(const bsh_gemm_sm80_args &args, sm80_sums &sum, const sm80_piece &piece,
                                            uint32_t word_at) {
  uint32_t groups = ALL_GROUPS;
  if (!FORM::GROUPED && piece.kind() != WHOLE) groups = share_sums<FORM>(args, sum, piece, word_at);
  if (groups) store_sums<FORM>(args, sum, piece, groups);
  clear_groups(sum, ALL_GROUPS);
}

} // namespace
} // namespace bsh
