// mixed_int8_sm90.cuh - products of 16-bit tokens with codes of W on wgmma, for both directions: mixed_int8_sm90.cu
// (y = x W^T) and dgrad_int8_sm90.cu (dx = dy W). They differ in how codes become the A operand, and in what is stored.
//
//   codes of W                                 tokens [M, depth]
//     | tensor copies: a stage                   | tensor copies, half of the tokens to both blocks of a pair
//     v  of 64 of depth x 128 rows               v
//   ring in shared memory                      the same ring: 64 of depth of 64, 128 or 256 tokens
//     | an operand's decode()                    |
//     v                                          |
//   A operand in registers, 64 rows a warpgroup  |
//     '--------------> wgmma m64nNk16 <----------'
//                         | fp32 sums of rows x tokens
//                         v
//                      an epilogue's store(), two neighbouring rows of each of two tokens
//
// A "row" is one of what is not summed over: of W forward, a column of W for dx. A block has 128 rows by `tokens`
// tokens, a pair of blocks 256 rows. Where there are few tiles, `splits` pairs of a cluster share the depth of one: all
// leave their sums in shared memory, and each adds and stores its part of them, in the order of the pairs: equal inputs
// give equal bits.
#pragma once

#include "cuda/gemm/mainloop_sm90.cuh"
#include "cuda/operands/int8.cuh"

namespace bsh {
namespace {

enum { PAIR = 2 }; // blocks
constexpr int ROWS = BSH_MIXED_INT8_ROWS, DEPTH = BSH_MIXED_INT8_DEPTH, TOKEN_BYTES = DEPTH * 2;

// REGISTERS_: with which a thread begins.
template <int TOKENS_, int STAGES_, int REGISTERS_> struct mixed_form {
  static constexpr int TOKENS = TOKENS_, STAGES = STAGES_, SUMS = TOKENS / 2;
  static constexpr int A_BYTES = TOKENS * TOKEN_BYTES, B_BYTES = DEPTH * ROWS, STAGE_BYTES = A_BYTES + B_BYTES;
  // Of a thread, multiples of 8. Who asks for more than others gave waits for ever.
  static constexpr int PRODUCER_REGISTERS = 32, CONSUMER_REGISTERS = (3 * REGISTERS_ - PRODUCER_REGISTERS) / 16 * 8;
};

// 64 tokens have a short ring where a block's part of the depth is at most SHORT times twice DEPTH. With one for every
// part, 33 rows of 4096 x 4096, of which a block has 22 stages, took 14.4 us instead of 15.2 on an H100; 64 rows of
// 28672 x 8192, 128 stages, 98.8 instead of 92.6.
enum { SHORT = 12, FEW_STAGES = 6 };

// This block's tiles, its part of their depth, and the ring.
template <typename FORM> struct mixed_work {
  const bsh_int8_mixed_args &args;
  uint32_t memory, full, empty;
  int member, split, cluster; // of a pair; which pair of its cluster
  int stages;                 // of the ring
  int first, pairs;           // of depth: the first, and how many twice DEPTH

  __device__ __forceinline__ mixed_work(const bsh_int8_mixed_args &a, uint32_t m) : args(a), memory(m) {
    full = memory + FORM::STAGES * FORM::STAGE_BYTES, empty = full + 8 * FORM::STAGES;
    const int size = PAIR * args.splits, rank = blockIdx.x % size, all = (args.depth + 2 * DEPTH - 1) / (2 * DEPTH);
    cluster = blockIdx.x / size, member = rank % PAIR, split = rank / PAIR;
    const int begin = all * split / args.splits;
    first = begin * 2 * DEPTH, pairs = all * (split + 1) / args.splits - begin;
    stages = FORM::TOKENS == 64 && all <= SHORT * args.splits ? FEW_STAGES : FORM::STAGES;
  }
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < FORM::STAGES; i++)
      mbarrier_init(full + 8 * i, 1), mbarrier_init(empty + 8 * i, CONSUMERS * PAIR);
    fence_mbarrier_init();
  }
  __device__ __forceinline__ int clusters() const { return gridDim.x / (PAIR * args.splits); }
  __device__ __forceinline__ int token(int tile) const { return tile % args.token_tiles * FORM::TOKENS; }
  __device__ __forceinline__ int row(int tile) const { return (tile / args.token_tiles * PAIR + member) * ROWS; }
};

// Stages of tokens, half of which each block of a pair brings for both, and of codes. DEPTH_FIRST: a row of W's matrix
// lies along the depth.
template <bool DEPTH_FIRST, typename FORM> struct mixed_copies {
  const bsh_tensor_map *x, *w;
  int token, row;

  static __device__ __forceinline__ int steps(const mixed_work<FORM> &work) { return 2 * work.pairs; }
  __device__ __forceinline__ void enter(const mixed_work<FORM> &work, int tile) {
    token = work.token(tile) + work.member * (FORM::TOKENS / PAIR), row = work.row(tile);
  }
  static __device__ __forceinline__ int from(const mixed_work<FORM> &work, int step) {
    return work.first + step * DEPTH;
  }
  __device__ __forceinline__ void copy(const mixed_work<FORM> &work, int depth, uint32_t to, uint32_t full) const {
    tensor_copy_to(to + work.member * (FORM::TOKENS / PAIR) * TOKEN_BYTES, x, depth, token, full,
                   3 << (PAIR * work.split));
    tensor_copy(to + FORM::A_BYTES, w, DEPTH_FIRST ? depth : row, DEPTH_FIRST ? row : depth, full);
  }
};

// One thread, while earlier kernels run: what it will read first of W.
template <bool DEPTH_FIRST, typename FORM>
__device__ __forceinline__ void prefetch_w(const mixed_work<FORM> &work, const bsh_tensor_map *w) {
  if (work.cluster >= work.args.tiles) return;
  const int row = work.row(work.cluster);
#pragma unroll 1
  for (int step = 0; step < min(2 * work.pairs, 2 * FORM::STAGES); step++) {
    const int depth = work.first + step * DEPTH;
    tensor_prefetch_l2(w, DEPTH_FIRST ? depth : row, DEPTH_FIRST ? row : depth);
  }
}

// Sums of the pairs that share a tile's depth, in the ring, which is idle by then: [4 sums of a thread][thread]. All
// threads of the cluster meet once while these are written and read, the warp that copies, too.
template <typename FORM, typename EPILOGUE>
__device__ __forceinline__ void join(const float *sum, const mixed_work<FORM> &work, const EPILOGUE &epilogue) {
  constexpr int GROUP = CONSUMERS * 32, VECTORS = FORM::SUMS / 4, MOST = BSH_MIXED_INT8_SPLITS;
  static_assert(VECTORS * GROUP * 16 <= FORM::STAGES * FORM::STAGE_BYTES, "");
  const int splits = work.args.splits;
  const uint32_t own = work.memory + threadIdx.x * 16;
  named_barrier<GROUP>(1); // all have read the ring
#pragma unroll
  for (int i = 0; i < VECTORS; i++)
    st_shared_16(own + i * GROUP * 16, make_uint4(__float_as_uint(sum[4 * i]), __float_as_uint(sum[4 * i + 1]),
                                                  __float_as_uint(sum[4 * i + 2]), __float_as_uint(sum[4 * i + 3])));
  cluster_sync();
  uint32_t from[MOST];
#pragma unroll
  for (int k = 0; k < MOST; k++) from[k] = map_to_rank(own, PAIR * min(k, splits - 1) + work.member);
#pragma unroll 2
  for (int i = work.split; i < VECTORS; i += splits) {
    uint4 v[MOST];
#pragma unroll
    for (int k = 0; k < MOST; k++) v[k] = k < splits ? ld_cluster_16(from[k] + i * GROUP * 16) : make_uint4(0, 0, 0, 0);
    float total[4];
#pragma unroll
    for (int k = 0; k < MOST; k++) {
      const float part[4] = {__uint_as_float(v[k].x), __uint_as_float(v[k].y), __uint_as_float(v[k].z),
                             __uint_as_float(v[k].w)};
#pragma unroll
      for (int e = 0; e < 4; e++) total[e] = k == 0 ? part[e] : total[e] + part[e];
    }
    epilogue.store(i, total);
  }
}

// OPERAND: enter(depth) before a tile's first stage, of which its depth begins at `depth`; decode(a, address, depth) of
// a stage whose codes lie at `address`, the next one's depth beginning at `depth`: a[4 k + i], k steps of 16 of depth.
// EPILOGUE: enter(row, token) of the warp's first row and the block's first token; store(i, sums): of two rows, those
// that lane (g, c) has in A at g and g + 8, at tokens 8 i + 2 c and the next: sums of the former at both, of the
// latter.
template <typename T, typename FORM, typename OPERAND, typename EPILOGUE>
__device__ __forceinline__ void multiply_tiles(const mixed_work<FORM> &work, int warp, int lane, OPERAND operand,
                                               EPILOGUE epilogue) {
  const uint64_t b = wgmma_descriptor_64(work.memory);
  const uint32_t codes = work.memory + FORM::A_BYTES;
  ring_reader<mixed_work<FORM>, PAIR, parity_first> ring(map_to_rank(work.empty, PAIR * work.split + lane % PAIR),
                                                         lane);
  uint32_t a[2][16];
  float sum[FORM::SUMS];
  for (int tile = work.cluster; tile < work.args.tiles; tile += work.clusters()) {
#pragma unroll
    for (int i = 0; i < FORM::SUMS; i++) sum[i] = 0.f;
    operand.enter(work.first);
    epilogue.enter(work.row(tile) + warp * 16, work.token(tile));
    for (int pair = 0; pair < work.pairs; pair++) {
#pragma unroll
      for (int u = 0; u < 2; u++) {
        ring.get(work);
        operand.decode(a[u], codes + ring.stage * FORM::STAGE_BYTES, work.first + (2 * pair + u + 1) * DEPTH);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++)
          wgmma_rs<T, FORM::TOKENS>::mma_async(sum, a[u] + 4 * k, b + ((ring.stage * FORM::STAGE_BYTES) >> 4) + 2 * k);
        ring.put(work);
      }
    }
    wgmma_wait<0>();
    renew(sum);
    ring.done();
    if (work.args.splits > 1) {
      join(sum, work, epilogue);
      continue;
    }
#pragma unroll
    for (int i = 0; i < FORM::SUMS / 4; i++) epilogue.store(i, sum + 4 * i);
  }
}

// All of a kernel.
template <typename T, typename FORM, typename OPERAND, typename EPILOGUE>
__device__ __forceinline__ void multiply_mixed(const bsh_tensor_map &x, const bsh_tensor_map &w,
                                               const bsh_int8_mixed_args &args) {
  extern __shared__ __align__(1024) char dynamic[];
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const mixed_work<FORM> work(args, (shared_address(dynamic) + 1023) / 1024 * 1024);
  if (threadIdx.x == 0) work.init();
  if (warp == COPY_WARP && lane == 0) prefetch_map(&x), prefetch_map(&w);
  __syncthreads();
  cluster_sync_aligned_relaxed();
  let_later_kernels_start();
  if (warp == COPY_WARP && lane == 0) prefetch_w<OPERAND::DEPTH_FIRST>(work, &w);
  wait_for_earlier_kernels();
  if (warp >= COPY_WARP) {
    give_registers<FORM::PRODUCER_REGISTERS>();
    if (warp == COPY_WARP && lane == 0) fill_ring<FORM>(work, mixed_copies<OPERAND::DEPTH_FIRST, FORM>{&x, &w});
    __syncwarp();
    if (args.splits > 1) cluster_sync(); // with those that join sums
  } else {
    take_registers<FORM::CONSUMER_REGISTERS>();
    multiply_tiles<T>(work, warp, lane, OPERAND(args, warp, lane), EPILOGUE(args, lane));
  }
  __syncwarp();
  cluster_sync_aligned_relaxed(); // nobody ends while a block of its cluster may still write here
}

} // namespace
} // namespace bsh

#define BSH_MIXED_KERNEL(NAME, REGISTERS, BODY)                                                                        \
  extern "C" __global__ void __maxnreg__(REGISTERS)                                                                    \
      NAME(const __grid_constant__ bsh_tensor_map x, const __grid_constant__ bsh_tensor_map w,                         \
           const __grid_constant__ bsh_int8_mixed_args args) {                                                         \
    BODY;                                                                                                              \
  }
