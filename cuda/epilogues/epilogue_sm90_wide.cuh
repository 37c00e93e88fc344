// epilogue_sm90_wide.cuh - from a thread's sums to y: stored, left for other pairs of thread blocks, or joined with
// theirs. Sums are added in the order of depth, so equal inputs give equal bits.
//
// sum[4j + e], e = 0, 1: token 8j + 2t + e of the first of the thread's two rows of A; e = 2, 3: of the second.
#pragma once

#include "cuda/epilogues/shared_tile.cuh"
#include "cuda/operands/decode_sm90_wide_short.cuh"
#include "cuda/schedulers/scheduler_sm90_wide.cuh"

namespace bsh {
namespace {

// Four rows of one token: `left` of them exist.
template <typename T>
__device__ __forceinline__ void store_four(const bsh_gemm_wide_args &args, T *y, uint32_t first, uint32_t second,
                                           int left) {
  if (args.store_fours) {
    *reinterpret_cast<uint2 *>(y) = make_uint2(first, second);
    return;
  }
  uint16_t *const to = reinterpret_cast<uint16_t *>(y);
  to[0] = (uint16_t)first;
  if (left > 1) to[1] = (uint16_t)(first >> 16);
  if (left > 2) to[2] = (uint16_t)second;
  if (left > 3) to[3] = (uint16_t)(second >> 16);
}

// Stores complete sums: of GROUPS groups of 8 tokens from group `first` on. The two warps of a span exchange halves of
// their tokens through the unused halves of the table's rows, so that a thread has four neighbours of y. tile: of a
// stack the how manieth of this pair.
template <typename T, typename FORM, int GROUPS>
__device__ __forceinline__ void store_sums(const bsh_gemm_wide_args &args, const wide_place &place, char *memory,
                                           int tile, int first, const float *sum) {
  constexpr int UPPER = 2 * GROUPS; // from a sum of the first half of the tokens to that of the second
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3, half = warp & 1;
  const int rows = FORM::GRADIENT ? args.K : args.N;
  tile_place at_tile;
  if constexpr (FORM::GROUPED) at_tile = place.template left_at<FORM>(shared_address(memory), tile);
  else at_tile = place.template at<FORM>(args, shared_address(memory), tile);
  const int row = at_tile.row + (warp >> 1) * 32 + 4 * g;
  const int token = at_tile.token + first * 8 + 2 * t;
  T *const y = static_cast<T *>(args.y) + token * args.ldy + row;
  const int end = FORM::GROUPED ? at_tile.token + at_tile.left : args.M;
  const int left = row < rows ? end - token : 0; // tokens
  float bias[2] = {0.f, 0.f};
  if (!FORM::GRADIENT && args.bias)
#pragma unroll
    for (int i = 0; i < 2; i++)
      bias[i] = to_float(static_cast<const T *>(
          args.bias)[(FORM::GROUPED ? (int64_t)at_tile.expert * rows : 0) + min(row + 2 * half + i, rows - 1)]);
  const uint32_t own =
      shared_address(memory) + BSH_GEMM_WIDE_TABLE_AT + warp * (32 * 256) + 128 + lane * 4; // 32 rows of 256 bytes
  const uint32_t other = own + (half ? -32 * 256 : 32 * 256);
  float global = 1.f;
  if constexpr (FORM::MODE == SCALED) global = global_scale<FORM>(args, at_tile.expert);
  auto pair = [&](int i) {
    if constexpr (FORM::MODE == SCALED)
      return pack_pair<T>(fmaf(sum[i], global, bias[0]), fmaf(sum[i + 2], global, bias[1]));
    return pack_pair<T>(sum[i] + bias[0], sum[i + 2] + bias[1]);
  };
  named_barrier<2 * BSH_WARP>(3 + (warp >> 1));
#pragma unroll
  for (int i = 0; i < GROUPS; i++) {
    const int u = 4 * (i >> 1) + (i & 1);
    st_shared(own + i * 256, half ? pair(u) : pair(u + UPPER));
  }
  named_barrier<2 * BSH_WARP>(3 + (warp >> 1));
#pragma unroll
  for (int i = 0; i < GROUPS; i++) {
    const int u = 4 * (i >> 1) + (i & 1), at = half * (GROUPS * 4) + 8 * (i >> 1) + (i & 1);
    const uint32_t got = ld_shared_4(other + i * 256), kept = half ? pair(u + UPPER) : pair(u);
    if (at < left) store_four(args, y + at * args.ldy, half ? got : kept, half ? kept : got, rows - row);
  }
}

// Sums that pair `other` leaves, of this thread, one float4 each 8 tokens; and its flag, of this warp.
template <typename FORM>
__device__ __forceinline__ float4 *sums_of(const bsh_gemm_wide_args &args, const wide_place &place, int other) {
  return reinterpret_cast<float4 *>(args.partial) + (int64_t)place.block_of(other) * (FORM::TOKENS / 8 * 256) +
         threadIdx.x;
}
__device__ __forceinline__ uint32_t *flag_of(const bsh_gemm_wide_args &args, const wide_place &place, int other) {
  return args.flags + place.block_of(other) * BSH_GEMM_WIDE_CONSUMERS + (threadIdx.x >> 5);
}
__device__ __forceinline__ void leave(float4 *to, const float *sum, int j) {
  __stcg(to + j * 256, make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]));
}
__device__ __forceinline__ void raise_flag(const bsh_gemm_wide_args &args, const wide_place &place) {
  __syncwarp();
  if ((threadIdx.x & 31) == 0) store_release(flag_of(args, place, place.pair), 1);
}
__device__ __forceinline__ void wait_for_flag(const bsh_gemm_wide_args &args, const wide_place &place, int other) {
  const uint32_t *const flag = flag_of(args, place, other);
  while (!__all_sync(~0u, load_acquire(flag))) {
  }
}

// A stretch that is not the whole tile: left for the pair that has the tile's end, or joined with what earlier pairs
// left. It waits for pairs of lower index only, which leave theirs before they wait for anything.
template <typename T, typename FORM>
__device__ __forceinline__ void share_sums(const bsh_gemm_wide_args &args, const wide_place &place,
                                           const wide_scheduler &work, char *memory, float *sum) {
  constexpr int GROUPS = FORM::TOKENS / 8;
  if (work.to < args.cut.pieces) {
    float4 *const to = sums_of<FORM>(args, place, place.pair);
#pragma unroll
    for (int j = 0; j < GROUPS; j++) leave(to, sum, j);
    return raise_flag(args, place);
  }
  if (work.from > 0)
    for (int other = place.pair - 1;; other--) {
      wait_for_flag(args, place, other);
      const float4 *const from = sums_of<FORM>(args, place, other);
#pragma unroll
      for (int j = 0; j < GROUPS; j++) {
        const float4 v = __ldcg(from + j * 256);
        sum[4 * j] += v.x, sum[4 * j + 1] += v.y, sum[4 * j + 2] += v.z, sum[4 * j + 3] += v.w;
      }
      if (work.begin_of(other) <= work.tile * args.cut.pieces) break;
    }
  store_sums<T, FORM, GROUPS>(args, place, memory, work.tile, 0, sum);
}

// ---- scatter: SHARES pairs have equal parts of one tile, and each joins and stores its own part of the tokens ----
//
// How they wait for each other: shared_tile.cuh. One word per span of rows.

// What the first thread of a span has, for all 64.
__device__ __forceinline__ uint32_t for_span(char *memory, uint32_t value) {
  const int span = threadIdx.x >> 6;
  const uint32_t at = shared_address(memory) + BSH_GEMM_WIDE_TABLE_AT + span * (64 * 256) + 128;
  if (threadIdx.x % (2 * BSH_WARP) == 0) st_shared(at, value);
  named_barrier<2 * BSH_WARP>(3 + span);
  return ld_shared_4(at);
}

template <int OWN> struct own_part {
  static constexpr int INDEX = OWN;
};
// use(own_part<me>()): registers have no index that is known only here.
template <int SHARES, int OWN = 0, typename USE> __device__ __forceinline__ void with_own(int me, USE use) {
  if (me == OWN) use(own_part<OWN>());
  if constexpr (OWN + 1 < SHARES) with_own<SHARES, OWN + 1>(me, use);
}

// Joins and stores part `part` of the tokens, which all pairs have left, but `me`, if any: of that it is `own`.
template <typename T, typename FORM, int SHARES>
__device__ __forceinline__ void join_part(const bsh_gemm_wide_args &args, const wide_place &place, int tile,
                                          char *memory, int part, int me, const float *own) {
  constexpr int GROUPS = FORM::TOKENS / 8 / SHARES;
  const int first = place.pair / SHARES * SHARES;
  float total[4 * GROUPS];
#pragma unroll
  for (int j = 0; j < GROUPS; j++) {
    float4 v[SHARES];
#pragma unroll
    for (int q = 0; q < SHARES; q++)
      v[q] = q == me ? make_float4(own[4 * j], own[4 * j + 1], own[4 * j + 2], own[4 * j + 3])
                     : __ldcg(sums_of<FORM>(args, place, first + q) + (part * GROUPS + j) * 256);
#pragma unroll
    for (int q = 1; q < SHARES; q++) v[0].x += v[q].x, v[0].y += v[q].y, v[0].z += v[q].z, v[0].w += v[q].w;
    total[4 * j] = v[0].x, total[4 * j + 1] = v[0].y, total[4 * j + 2] = v[0].z, total[4 * j + 3] = v[0].w;
  }
  store_sums<T, FORM, GROUPS>(args, place, memory, tile, part * GROUPS, total);
}

template <typename T, typename FORM, int SHARES>
__device__ __forceinline__ void scatter_sums(const bsh_gemm_wide_args &args, const wide_place &place, int tile,
                                             char *memory, const float *sum) {
  constexpr int GROUPS = FORM::TOKENS / 8 / SHARES;
  const int me = place.pair % SHARES, span = threadIdx.x >> 6;
  const bool speaks = threadIdx.x % (2 * BSH_WARP) == 0;
  uint32_t *const word = flag_of(args, place, place.pair - me) - (threadIdx.x >> 5 & 1); // of the span's first warp
  float4 *const to = sums_of<FORM>(args, place, place.pair);
#pragma unroll
  for (int part = 0; part < SHARES; part++)
    if (part != me)
#pragma unroll
      for (int j = part * GROUPS; j < (part + 1) * GROUPS; j++) leave(to, sum, j);
  named_barrier<2 * BSH_WARP>(3 + span);
  uint32_t parts = for_span(memory, speaks ? come(word, me, SHARES) : 0);
  if (parts == 0) {
    with_own<SHARES>(me, [&](auto own) {
#pragma unroll
      for (int j = own.INDEX * GROUPS; j < (own.INDEX + 1) * GROUPS; j++) leave(to, sum, j);
    });
    named_barrier<2 * BSH_WARP>(3 + span);
    parts = for_span(memory, speaks ? go(word, me, SHARES) : 0);
  }
  if (parts == 0) return;
  with_own<SHARES>(me, [&](auto own) {
    join_part<T, FORM, SHARES>(args, place, tile, memory, own.INDEX, own.INDEX, sum + own.INDEX * GROUPS * 4);
  });
  parts &= ~(1u << me);
#pragma unroll 1
  for (int part = 0; parts != 0; part++, parts >>= 1)
    if (parts & 1) join_part<T, FORM, SHARES>(args, place, tile, memory, part, -1, sum);
}

// The sums of a stretch, whole or not, of WIDTH tokens.
template <typename T, typename FORM, int WIDTH, typename WORK>
__device__ __forceinline__ void finish_sums(const bsh_gemm_wide_args &args, const wide_place &place, const WORK &work,
                                            char *memory, float *sum) {
  if constexpr (FORM::GROUPED) store_sums<T, FORM, WIDTH / 8>(args, place, memory, work.round, 0, sum);
  else if (args.cut.scatter == 2) scatter_sums<T, FORM, 2>(args, place, work.tile, memory, sum);
  else if (args.cut.scatter == 4) scatter_sums<T, FORM, 4>(args, place, work.tile, memory, sum);
  else share_sums<T, FORM>(args, place, work, memory, sum);
}

} // namespace
} // namespace bsh
