// mainloop_sm90.cuh - the main loop of the kernels whose operands of a product lie in one stage: gemm_int8_sm90 (both
// from shared memory), mixed_int8_sm90 and dgrad_int8_sm90 (A decoded into registers).
//
//   one thread        copies.enter(tile), from(step): where it lies; copy(that, stage, barrier)      fill_ring
//     v
//   ring of stages in shared memory, each with a barrier `full` and one `empty`
//     v
//   two warpgroups    get(): waits for a stage; wgmma; put(): the stage before is free               ring_reader
//
// WORK of a block: `memory`, `full`, `empty`, `stages` of the ring, FORM::STAGE_BYTES each; `cluster` and clusters():
// its tiles are every clusters()-th of args.tiles from `cluster` on.
#pragma once

#include "cuda/ptx/ptx_sm90_cluster.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"

namespace bsh {
namespace {

enum { COPY_WARP = 8, CONSUMERS = 8 }; // warps

// One thread.
template <typename FORM, typename WORK, typename COPIES>
__device__ __forceinline__ void fill_ring(const WORK &work, COPIES copies) {
  int stage = 0;
  uint32_t parity = 1;
  for (int tile = work.cluster; tile < work.args.tiles; tile += work.clusters()) {
    copies.enter(work, tile);
#pragma unroll 1
    for (int step = 0; step < copies.steps(work); step++) {
      const auto from = copies.from(work, step);
      const uint32_t to = work.memory + stage * FORM::STAGE_BYTES, full = work.full + 8 * stage;
      mbarrier_wait(work.empty + 8 * stage, parity);
      mbarrier_expect(full, FORM::STAGE_BYTES, true);
      copies.copy(work, from, to, full);
      if (++stage == work.stages) stage = 0, parity ^= 1;
    }
  }
}

// Where one is in a ring. The order of the members decides what registers the compiler gives: a kernel has the one that
// it was measured with.
struct stage_first {
  int stage = 0;
  uint32_t parity = 0;
};
struct parity_first {
  uint32_t parity = 0;
  int stage = 0;
};

// The ring as a warp goes round it that reads it: get(), products of the stage, put(); done() after the last one of a
// tile. PEERS: blocks whose copies fill a stage, and which all its readers free.
template <typename WORK, int PEERS, typename PLACE> struct ring_reader : PLACE {
  using PLACE::parity, PLACE::stage;
  const uint32_t there; // `empty` in block lane % PEERS of them
  const int lane;
  int before = -1; // the stage whose products are under way

  __device__ __forceinline__ ring_reader(uint32_t there, int lane) : there(there), lane(lane) {}
  __device__ __forceinline__ void get(const WORK &work) const { mbarrier_wait(work.full + 8 * stage, parity); }
  __device__ __forceinline__ void release(int s) const {
    if (lane < PEERS) mbarrier_arrive_there(there + 8 * s);
  }
  __device__ __forceinline__ void next(const WORK &work) {
    if (++stage == work.stages) stage = 0, parity ^= 1;
  }
  // The stage before is free: its products are done, with their operands in registers, too.
  __device__ __forceinline__ void put(const WORK &work) {
    wgmma_commit();
    wgmma_wait<1>();
    if (before >= 0) release(before);
    before = stage;
    next(work);
  }
  // After the wait for all products.
  __device__ __forceinline__ void done() {
    if (before >= 0) release(before);
    before = -1;
  }
};

// To the compiler sums are new after the wait for the products that make them: nothing that reads them comes before it.
template <int N> __device__ __forceinline__ void renew(int (&sum)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+r"(sum[i])::"memory");
}
template <int N> __device__ __forceinline__ void renew(float (&sum)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(sum[i])::"memory");
}

// sum += products of stages of which both operands lie in shared memory, a and b in the first one. MMA: a step of 32
// bytes of depth.
template <typename MMA, typename FORM, typename WORK, typename RING, typename SUM, int SUMS>
__device__ __forceinline__ void multiply_stages(const WORK &work, RING &ring, const int &stages, SUM (&sum)[SUMS],
                                                const uint64_t &a, const uint64_t &b) {
  for (int left = stages; left > 0; left--) {
    ring.get(work);
    wgmma_fence();
    const uint64_t at = (uint64_t)(ring.stage * FORM::STAGE_BYTES) >> 4;
#pragma unroll
    for (int k = 0; k < 4; k++) MMA::mma_async(sum, a + at + 2 * k, b + at + 2 * k);
    ring.put(work);
  }
  wgmma_wait<0>();
  ring.done();
  renew(sum);
}

} // namespace
} // namespace bsh
