// gemm_int8_sm90.cuh - what the warps of gemm_int8_sm90 share: forms, the work of a block, its ring of stages.
#pragma once

#include "int8.cuh"
#include "ptx_sm90_cluster.cuh"
#include "wgmma_codes_sm90.cuh"

namespace bsh {
namespace {

#ifdef BSH_HAS_WGMMA
enum { COPY_WARP = 8, CONSUMERS = 8 }; // warps
// Of a thread. All threads begin with an equal share of the 65,536, a multiple of 8; what is more would wait for ever.
enum { CONSUMER_REGISTERS = 200, PRODUCER_REGISTERS = 104, SHARE = 65536 / BSH_GEMM_INT8_SM90_THREADS / 8 * 8 };
static_assert(2 * CONSUMER_REGISTERS + PRODUCER_REGISTERS <= 3 * SHARE, "more registers than a block has");
enum { OUTLIER_WARPS = 3 }; // behind COPY_WARP

template <int ROWS_, int COLUMNS_, int STAGES_, int CLUSTER_> struct int8_form {
  static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, STAGES = STAGES_, CLUSTER = CLUSTER_;
  static constexpr int A_BYTES = ROWS * BSH_GEMM_INT8_DEPTH, B_BYTES = COLUMNS * BSH_GEMM_INT8_DEPTH;
  static constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
  static constexpr int OWN = ROWS == 64 ? COLUMNS / 2 : COLUMNS; // columns of a warpgroup
  static constexpr int SUMS = OWN / 2;                           // of a thread
  // Where outlier columns are found: the ring, and operands of 64 columns in 16 bits, of x, its codes, and W.
  static constexpr int FOUND_STAGES = bsh_gemm_int8_sm90_found_stages(ROWS, COLUMNS, STAGES);
  static constexpr bool FINDS = FOUND_STAGES >= 4;
  static constexpr int X_BYTES = ROWS * 2 * BSH_INT8_CHUNK, W_BYTES = COLUMNS * 2 * BSH_INT8_CHUNK;
};

struct int8_maps {
  const bsh_tensor_map *a, *b, *x, *w; // x, w: gathered
};

// Where a block's work is: its tiles, how many stages each takes, the ring.
template <typename FORM> struct int8_work {
  const bsh_int8_gemm_args &args;
  uint32_t memory, found, state; // the ring; operands of found columns; barriers and the list of columns
  uint32_t full, empty, joined;
  uint32_t known, ready, free; // barriers: columns are listed; their operands are made; and read
  uint32_t counts;             // of found columns: all, of warps
  uint32_t listed, later;      // uint16 columns: the first 64, 64 further ones
  uint32_t starts;             // uint8: which of the first 64 come before a stage
  int stages;
  int rank, size, cluster;       // of this block in its cluster of `size`
  int first_step, steps, chunks; // stages of codes, of gathered columns

  __device__ __forceinline__ int8_work(const bsh_int8_gemm_args &a, uint32_t m) : args(a), memory(m) {
    stages = finds() ? FORM::FOUND_STAGES : FORM::STAGES;
    found = memory + stages * FORM::STAGE_BYTES;
    state = finds() ? found + 2 * FORM::X_BYTES + FORM::W_BYTES : found;
    full = state, empty = full + 8 * FORM::STAGES, joined = empty + 8 * FORM::STAGES;
    known = joined + 8, ready = joined + 16, free = joined + 24;
    counts = state + BSH_GEMM_INT8_SM90_STATE / 2 - 16, listed = counts + 16;
    later = listed + 2 * BSH_INT8_CHUNK, starts = later + 2 * BSH_INT8_CHUNK;
    size = FORM::CLUSTER > 1 ? FORM::CLUSTER : args.splits;
    cluster = blockIdx.x / size, rank = blockIdx.x - cluster * size;
    const int all = (args.K + BSH_GEMM_INT8_DEPTH - 1) / BSH_GEMM_INT8_DEPTH;
    first_step = shares_depth() ? all * rank / size : 0, chunks = 0;
    steps = (shares_depth() ? all * (rank + 1) / size : all) - first_step;
  }
  // Whether outlier columns are found here.
  __device__ __forceinline__ bool finds() const { return FORM::FINDS && args.claims != nullptr; }
  __device__ __forceinline__ bool shares_depth() const { return FORM::CLUSTER == 1 && size > 1; }
  // After the earlier kernels.
  __device__ __forceinline__ int count_outliers() {
    const int count = args.outliers.count == nullptr ? 0 : *args.outliers.count;
    if (!shares_depth() || rank == 0)
      chunks = (min(count, args.outliers.capacity) + BSH_INT8_CHUNK - 1) / BSH_INT8_CHUNK;
    return count;
  }
  // One thread. A stage is filled by the copies of all blocks of the cluster and freed by the warps of all of them.
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < FORM::STAGES; i++)
      mbarrier_init(full + 8 * i, 1), mbarrier_init(empty + 8 * i, CONSUMERS * FORM::CLUSTER);
    mbarrier_init(joined, CONSUMERS * max(1, size - 1));
    mbarrier_init(known, 1), mbarrier_init(ready, OUTLIER_WARPS + CONSUMERS), mbarrier_init(free, CONSUMERS);
    fence_mbarrier_init();
  }
  __device__ __forceinline__ int clusters() const { return gridDim.x / size; }
  // args.m_tiles: of the rows of a cluster.
  __device__ __forceinline__ int row(int tile) const {
    return (tile % args.m_tiles * FORM::CLUSTER + (FORM::CLUSTER > 1 ? rank : 0)) * FORM::ROWS;
  }
  __device__ __forceinline__ int column(int tile) const { return tile / args.m_tiles * FORM::COLUMNS; }
};

// The ring as consumers go round.
template <typename FORM> struct int8_ring {
  const int8_work<FORM> &work;
  uint32_t there; // `empty` in block lane % CLUSTER of the cluster
  int stage = 0;
  uint32_t parity = 0;
  int lane;

  __device__ __forceinline__ int8_ring(const int8_work<FORM> &w, int l) : work(w), lane(l) {
    there = FORM::CLUSTER == 1 ? w.empty : map_to_rank(w.empty, l % FORM::CLUSTER);
  }
  __device__ __forceinline__ void release(int s) const {
    if (lane < FORM::CLUSTER) mbarrier_arrive_there(there + 8 * s);
  }
  // `read` multiplies a stage, which is freed when the products after it are on their way and its own are done.
  // `beside`, of a stage and its number, reads it while its products are made.
  template <typename READ, typename BESIDE> __device__ __forceinline__ void walk(int steps, READ read, BESIDE beside) {
    int before = -1;
    for (int step = 0; step < steps; step++) {
      mbarrier_wait(work.full + 8 * stage, parity);
      wgmma_fence();
      read(stage);
      wgmma_commit();
      beside(stage, step);
      wgmma_wait<1>();
      if (before >= 0) release(before);
      before = stage;
      if (++stage == work.stages) stage = 0, parity ^= 1;
    }
    wgmma_wait<0>();
    if (before >= 0) release(before);
  }
};
#endif

} // namespace
} // namespace bsh
