// gemm_int8_sm90.cuh - what the warps of gemm_int8_sm90 share: forms, the work of a block, its ring of stages.
#pragma once

#include "cuda/gemm/mainloop_sm90.cuh"
#include "cuda/operands/int8.cuh"
#include "cuda/ptx/wgmma_codes_sm90.cuh"

namespace bsh {
namespace {

enum { OUTLIER_WARPS = 3, RING_WARPS = 2 }; // behind COPY_WARP; those of them that read the ring

__device__ __forceinline__ void st_shared_8(uint32_t address, uint2 v) {
  asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
}

template <int ROWS_, int COLUMNS_, int STAGES_, int CLUSTER_> struct int8_form {
  static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, STAGES = STAGES_, CLUSTER = CLUSTER_;
  static constexpr int A_BYTES = ROWS * BSH_GEMM_INT8_DEPTH, B_BYTES = COLUMNS * BSH_GEMM_INT8_DEPTH;
  static constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
  static constexpr int READERS = bsh_gemm_int8_sm90_readers(CLUSTER); // blocks of a cluster
  static constexpr int PART = COLUMNS / READERS;                      // rows of W that each reads
  static constexpr int OWN = ROWS == 64 ? COLUMNS / 2 : COLUMNS;      // columns of a warpgroup
  static constexpr int SUMS = OWN / 2;                                // of a thread
  // Of the ring where outlier columns are found.
  static constexpr int FOUND_STAGES = bsh_gemm_int8_sm90_found_stages(ROWS, COLUMNS, STAGES);
  static constexpr bool FINDS = bsh_gemm_int8_sm90_finds(COLUMNS);
  // Of a thread, multiples of 8. Who asks for more than others gave waits for ever.
  static constexpr int REGISTERS = bsh_gemm_int8_sm90_registers(COLUMNS);
  static constexpr bool SAME = REGISTERS < BSH_GEMM_INT8_SM90_REGISTERS; // all keep those with which they begin
  static constexpr int CONSUMER_REGISTERS = SAME ? REGISTERS : FINDS ? 192 : 232;
  static constexpr int PRODUCER_REGISTERS = SAME ? REGISTERS : FINDS ? 120 : 40;
  static_assert(2 * CONSUMER_REGISTERS + PRODUCER_REGISTERS <= 3 * REGISTERS, "more registers than a block has");
};

struct int8_maps {
  const bsh_tensor_map *a, *b, *x, *w; // x, w: gathered
};

// Where a block's work is: its tiles, how many stages each takes, the ring.
template <typename FORM> struct int8_work {
  const bsh_int8_gemm_args &args;
  uint32_t memory, state; // the ring; barriers, and what follows them
  uint32_t full, empty, joined;
  uint32_t known, ready, free;     // how many columns there are; their operands are made; and read
  uint32_t counts, found_count;    // of found columns: of warps, all
  uint32_t listed, later;          // uint16 columns: the first 64, 64 further ones, and one behind them
  uint32_t columns;                // of a tile, twice: scale and bias of each
  uint32_t marks;                  // a bit for each column of x
  uint32_t x, w, x_codes, w_codes; // operands of found columns
  int stages;
  int rank, size, cluster;       // of this block in its cluster of `size`
  int first_step, steps, chunks; // stages of codes, of gathered columns

  __device__ __forceinline__ int8_work(const bsh_int8_gemm_args &a, uint32_t m) : args(a), memory(m) {
    stages = finds() ? FORM::FOUND_STAGES : FORM::STAGES;
    x = memory + stages * FORM::STAGE_BYTES, w = x + FORM::ROWS * 128, x_codes = w + FORM::COLUMNS * 128;
    w_codes = x_codes + 64 * 128;
    state = finds() ? w_codes + FORM::COLUMNS * 128 : x;
    full = state, empty = full + 8 * FORM::STAGES, joined = empty + 8 * FORM::STAGES;
    known = joined + 8, ready = joined + 16, free = joined + 24;
    counts = state + BSH_GEMM_INT8_SM90_STATE / 2, found_count = counts + 16, listed = counts + 32;
    later = listed + 2 * (BSH_INT8_CHUNK + 8), columns = state + BSH_GEMM_INT8_SM90_STATE;
    marks = columns + 2 * 8 * FORM::COLUMNS;
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
      mbarrier_init(full + 8 * i, 1),
          mbarrier_init(empty + 8 * i, (CONSUMERS + (finds() ? RING_WARPS : 0)) * FORM::CLUSTER);
    mbarrier_init(joined, CONSUMERS * max(1, size - 1));
    mbarrier_init(known, 1), mbarrier_init(ready, OUTLIER_WARPS), mbarrier_init(free, CONSUMERS);
    fence_mbarrier_init();
  }
  __device__ __forceinline__ int clusters() const { return gridDim.x / size; }
  // args.m_tiles: of the rows of a cluster.
  __device__ __forceinline__ int row(int tile) const {
    return (tile % args.m_tiles * FORM::CLUSTER + (FORM::CLUSTER > 1 ? rank : 0)) * FORM::ROWS;
  }
  __device__ __forceinline__ int column(int tile) const { return tile / args.m_tiles * FORM::COLUMNS; }
};

template <typename FORM> using int8_ring = ring_reader<int8_work<FORM>, FORM::CLUSTER, stage_first>;
template <typename FORM> __device__ __forceinline__ int8_ring<FORM> ring_of(const int8_work<FORM> &work, int lane) {
  return int8_ring<FORM>(FORM::CLUSTER == 1 ? work.empty : map_to_rank(work.empty, lane % FORM::CLUSTER), lane);
}

} // namespace
} // namespace bsh
