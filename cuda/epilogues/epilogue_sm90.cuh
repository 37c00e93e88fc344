// epilogue_sm90.cuh - from a warp's sums to y: stored, left for other blocks of threads, or joined with theirs.
#pragma once

#include "cuda/schedulers/scheduler_sm90.cuh"
#include "cuda/epilogues/epilogue.cuh"

namespace bsh {
namespace {

// Stores a warp's tokens of a tile. In the loop over row blocks, shuffles would cost uniform registers
// (mbarrier_expect).
template <typename T, typename FORM>
__device__ __forceinline__ void store(const bsh_fused_args &args, int tile, int token, const float *sum) {
  constexpr int TILES = FORM::OWN_TOKENS / 8;
  if (FORM::K_PARTS == 2) store_tile_pairs<T, TILES>(args, tile, token, sum);
  else store_tile<T, TILES>(args, tile, token, sum);
}

// Sums of a row block that several blocks of threads own: where those of this warp's tokens and tile lie.
template <typename FORM> struct fixup {
  static constexpr int TILE = FORM::TOKENS * BSH_ROW_TILE, OWN = FORM::OWN_TOKENS;
  int tile, token;
  float4 *sums;      // this lane's, of the first owner; TILE / 4 from one owner to the next
  uint32_t *counter; // of owners that have left their sums

  __device__ __forceinline__ fixup(const bsh_fused_args &args, int tile, int token) : tile(tile), token(token) {
    sums = reinterpret_cast<float4 *>(args.partial) + (int64_t)tile * args.cut.k_splits * (TILE / 4) +
           token * (BSH_ROW_TILE / 4) + (threadIdx.x & 31);
    counter = args.counters + tile * FORM::K_PARTS + token / OWN;
  }
  // Leaves the sums of owner `owner`; how many had left theirs before.
  __device__ __forceinline__ uint32_t leave(const float *sum, int owner) const {
    float4 *const own = sums + owner * (TILE / 4);
#pragma unroll
    for (int n = 0; n < OWN / 8; n++)
      own[n * 32] = make_float4(sum[4 * n], sum[4 * n + 1], sum[4 * n + 2], sum[4 * n + 3]);
    __syncwarp();
    return count_acq_rel(counter, threadIdx.x & 31);
  }
  __device__ __forceinline__ void wait_for(int owners) const {
    while (!__all_sync(~0u, load_acquire(counter) >= (uint32_t)owners));
  }
  // Adds the sums of the first `owners` owners and then `last`, if given, in the order of K, and stores the result.
  template <typename T>
  __device__ __forceinline__ void join(const bsh_fused_args &args, int owners, const float *last) const {
    constexpr int BATCH = 128 / OWN; // owners whose loads are on their way together
    float total[OWN / 2] = {};
    for (int k0 = 0; k0 < owners; k0 += BATCH) {
      float4 v[BATCH][OWN / 8];
#pragma unroll
      for (int k = 0; k < BATCH; k++)
#pragma unroll
        for (int n = 0; n < OWN / 8; n++)
          v[k][n] = k0 + k < owners ? __ldcg(sums + (k0 + k) * (TILE / 4) + n * 32) : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int k = 0; k < BATCH; k++)
#pragma unroll
        for (int n = 0; n < OWN / 8; n++) {
          total[4 * n] += v[k][n].x, total[4 * n + 1] += v[k][n].y;
          total[4 * n + 2] += v[k][n].z, total[4 * n + 3] += v[k][n].w;
        }
    }
    if (last)
#pragma unroll
      for (int i = 0; i < OWN / 2; i++) total[i] += last[i];
    store<T, FORM>(args, tile, token, total);
  }
};

// What becomes of a warp's sums of the pieces [from, at.end): stored, left for others, or joined with what others left.
// The votes tell the compiler that all lanes agree.
template <typename T, typename FORM>
__device__ __forceinline__ void epilogue(const bsh_fused_args &args, const scheduler<FORM> &work, work_range at,
                                         int from, int tile, const float *sum) {
  const bool exists = tile * BSH_ROW_TILE < args.N;
  const bool leaves = __any_sync(~0u, at.end < work.pieces), joins = __any_sync(~0u, from > 0);
  if (leaves || joins) {
    const fixup<FORM> others(args, tile, 0);
    const int earlier = work.earlier_owners(at.block);
    if (__any_sync(~0u, exists && leaves)) {
      others.leave(sum, earlier);
    } else if (__any_sync(~0u, exists)) {
      others.wait_for(earlier);
      others.template join<T>(args, earlier, sum);
    }
  } else if (exists) {
    store<T, FORM>(args, tile, 0, sum);
  }
}

// The same for two parts of K. The blocks that own a row block finish at about the same time. The last one adds the
// partial sums, so none waits, and the work is spread.
template <typename T, typename FORM>
__device__ __forceinline__ void epilogue_of_parts(const bsh_fused_args &args, const row_block<FORM> &rows,
                                                  const float *sum) {
  const int tile = rows.tile(blockIdx.y), token = threadIdx.x / 32 < FORM::ROW_WARPS ? 0 : FORM::OWN_TOKENS;
  if (!__any_sync(~0u, rows.active && tile * BSH_ROW_TILE < args.N)) return;
  if (gridDim.x == 1) return store<T, FORM>(args, tile, token, sum);
  const fixup<FORM> others(args, tile, token);
  const uint32_t before = others.leave(sum, blockIdx.x);
  __syncwarp();
  if (__any_sync(~0u, before == gridDim.x - 1)) others.template join<T>(args, gridDim.x, nullptr);
}

// Two parts of K: the two warps of a row tile exchange halves of their sums through their rings, which they are done
// with. Then the first OWN_TOKENS / 2 sums are complete: of the first half of the tokens in the first part's warp, of
// the second half in the other's.
template <typename FORM> __device__ __forceinline__ void add_parts(float *sum, char *ring) {
  constexpr int ROW_WARPS = FORM::ROW_WARPS, HALF = FORM::TOKENS / 4, RING = SLOTS * PIECE_BYTES / 16;
  static_assert(HALF * 32 * sizeof(float) <= RING * 16, "half of the sums must fit in a ring");
  const int warp = threadIdx.x >> 5;
  const bool second = warp >= ROW_WARPS;
  float4 *const given = reinterpret_cast<float4 *>(ring) + warp * RING + (threadIdx.x & 31);
  const float4 *const taken = given + (second ? -ROW_WARPS : ROW_WARPS) * RING;
  cp_async_wait<0>();
  __syncwarp();
#pragma unroll
  for (int i = 0; i < HALF; i += 4) {
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      v[j] = second ? sum[i + j] : sum[HALF + i + j];
      sum[i + j] = second ? sum[HALF + i + j] : sum[i + j];
    }
    given[i * 8] = make_float4(v[0], v[1], v[2], v[3]);
  }
  named_barrier<2 * BSH_WARP>(2 + warp % ROW_WARPS); // barrier 1 is sync_consumers's
#pragma unroll
  for (int i = 0; i < HALF; i += 4) {
    const float4 v = taken[i * 8];
    sum[i] += v.x, sum[i + 1] += v.y, sum[i + 2] += v.z, sum[i + 3] += v.w;
  }
}

} // namespace
} // namespace bsh
