// dgrad_int8_sm90.cu - dx[M, K] = dy[M, N] W in one pass over the codes of W, on Hopper (sm_90a): wgmma of 16 bits,
// tensor copies, clusters.
//
//   W, codes [N, K]           scales [N]           dy [M, N]
//     | tensor copies: a stage   | a stage ahead     | tensor copies, half of the tokens to both blocks of a pair
//     v  of 64 of N x 128 of K   v                   v
//   ring in shared memory     registers            the same ring: 64 of N of 128 or 256 tokens
//     | ldmatrix, transposed     |                   |
//     v                          v                   |
//   codes widened, times their scale, which is the sum of two of T (split_scales_int8), rounded to T
//     | A operand, 64 of K a warpgroup               |
//     '------------------> wgmma m64nNk16 <----------'
//                             | fp32 sums of K x tokens
//                             v
//                          dx, two neighbours of K a store
//
// A block has 128 of K by `tokens` tokens, a pair of blocks 256 of K. Where there are few tiles, `splits` pairs of a
// cluster share the depth N of one, and the first adds the sums of the others in their order: equal inputs give equal
// bits. An 8 x 8 matrix of ldmatrix is 8 of N by 16 of K: lane (g, t) gets codes 2g and 2g + 1 of K at N = 2t and 2t +
// 1, which are rows g and g + 8 of A.
#include "int8.cuh"
#include "ptx_sm90_cluster.cuh"
#include "wgmma_sm90.cuh"

namespace bsh {
namespace {

#ifdef BSH_HAS_WGMMA
enum { COPY_WARP = 8, CONSUMERS = 8, PAIR = 2 }; // warps, warps, blocks
enum { CONSUMER_REGISTERS = 232, PRODUCER_REGISTERS = 40 };
constexpr int ROWS = BSH_DGRAD_INT8_ROWS, DEPTH = BSH_DGRAD_INT8_DEPTH, ROW_BYTES = 128;

template <int TOKENS_, int STAGES_> struct dgrad_form {
  static constexpr int TOKENS = TOKENS_, STAGES = STAGES_, SUMS = TOKENS / 2;
  static constexpr int X_BYTES = TOKENS * ROW_BYTES, W_BYTES = DEPTH * ROW_BYTES, STAGE_BYTES = X_BYTES + W_BYTES;
};

// This block's tiles, its part of their depth, and the ring.
template <typename FORM> struct dgrad_work {
  const bsh_int8_dgrad_args &args;
  uint32_t memory, full, empty, joined;
  int member, split, cluster; // of a pair; which pair of its cluster
  int first, pairs;           // of depth: the first, and how many twice DEPTH

  __device__ __forceinline__ dgrad_work(const bsh_int8_dgrad_args &a, uint32_t m) : args(a), memory(m) {
    full = memory + FORM::STAGES * FORM::STAGE_BYTES, empty = full + 8 * FORM::STAGES,
    joined = empty + 8 * FORM::STAGES;
    const int size = PAIR * args.splits, rank = blockIdx.x % size, all = (args.N + 2 * DEPTH - 1) / (2 * DEPTH);
    cluster = blockIdx.x / size, member = rank % PAIR, split = rank / PAIR;
    const int begin = all * split / args.splits;
    first = begin * 2 * DEPTH, pairs = all * (split + 1) / args.splits - begin;
  }
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < FORM::STAGES; i++)
      mbarrier_init(full + 8 * i, 1), mbarrier_init(empty + 8 * i, CONSUMERS * PAIR);
    mbarrier_init(joined, CONSUMERS * max(1, args.splits - 1));
    fence_mbarrier_init();
  }
  __device__ __forceinline__ int clusters() const { return gridDim.x / (PAIR * args.splits); }
  __device__ __forceinline__ int token(int tile) const { return tile % args.token_tiles * FORM::TOKENS; }
  __device__ __forceinline__ int row(int tile) const { return (tile / args.token_tiles * PAIR + member) * ROWS; }
};

// One thread.
template <typename FORM>
__device__ __forceinline__ void copy_tiles(const dgrad_work<FORM> &work, const bsh_tensor_map *dy,
                                           const bsh_tensor_map *w) {
  constexpr int HALF = FORM::TOKENS / PAIR;
  int stage = 0;
  uint32_t parity = 1;
  for (int tile = work.cluster; tile < work.args.tiles; tile += work.clusters()) {
    const int token = work.token(tile) + work.member * HALF, row = work.row(tile);
#pragma unroll 1
    for (int step = 0; step < 2 * work.pairs; step++) {
      const uint32_t to = work.memory + stage * FORM::STAGE_BYTES, full = work.full + 8 * stage;
      const int depth = work.first + step * DEPTH;
      mbarrier_wait(work.empty + 8 * stage, parity);
      mbarrier_expect(full, FORM::STAGE_BYTES, true);
      tensor_copy_to(to + work.member * HALF * ROW_BYTES, dy, depth, token, full, 3 << (PAIR * work.split));
      tensor_copy(to + FORM::X_BYTES, w, row, depth, full);
      if (++stage == FORM::STAGES) stage = 0, parity ^= 1;
    }
  }
}

// Two pairs of 16-bit floats of a word of codes: bytes 0 and 2, bytes 1 and 3.
template <typename T> __device__ __forceinline__ void widen_columns(uint32_t codes, uint32_t *pairs) {
  widen_codes<T>(__byte_perm(codes, 0, 0x3120), pairs);
}

// Scales of 64 of N, as sums of two of T: this lane's n = 8i + 2t and the next.
struct dgrad_scales {
  uint2 pairs[8];
  __device__ __forceinline__ void fetch(const bsh_int8_scale_pair *from, int depth, int t) {
#pragma unroll
    for (int i = 0; i < 8; i++) pairs[i] = reinterpret_cast<const uint2 *>(from)[depth / 2 + i * 4 + t];
  }
};

// A of a stage: a[4 k + i], k steps of 16 of N.
template <typename T>
__device__ __forceinline__ void decode(uint32_t *a, uint32_t address, const dgrad_scales &scales) {
  uint32_t v[8];
  ldmatrix_x4_trans(v, address);
  ldmatrix_x4_trans(v + 4, address + 32 * ROW_BYTES);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    uint32_t pairs[2];
    widen_columns<T>(v[i], pairs);
#pragma unroll
    for (int r = 0; r < 2; r++)
      a[i / 2 * 4 + i % 2 * 2 + r] = fma_pair<T>(pairs[r], scales.pairs[i].x, mul_pair<T>(pairs[r], scales.pairs[i].y));
  }
}

template <typename FORM>
__device__ __forceinline__ bool join(float (&sum)[FORM::SUMS], const dgrad_work<FORM> &work, int tile, int lane) {
  constexpr int GROUP = CONSUMERS * 32;
  const int others = work.args.splits - 1;
  float4 *const all = reinterpret_cast<float4 *>(work.args.partial) +
                      (int64_t)(tile * PAIR + work.member) * others * (FORM::SUMS / 4 * GROUP);
  if (work.split > 0) {
    float4 *const to = all + (work.split - 1) * (FORM::SUMS / 4 * GROUP) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < FORM::SUMS; i += 4) to[i / 4 * GROUP] = make_float4(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]);
    __threadfence();
    __syncwarp();
    if (lane == 0) mbarrier_arrive_there(map_to_rank(work.joined, work.member));
    return false;
  }
  mbarrier_wait(work.joined, 0);
  __threadfence();
  for (int other = 0; other < others; other++) {
    const float4 *const from = all + other * (FORM::SUMS / 4 * GROUP) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < FORM::SUMS; i += 4) {
      const float4 v = __ldcg(from + i / 4 * GROUP);
      sum[i] += v.x, sum[i + 1] += v.y, sum[i + 2] += v.z, sum[i + 3] += v.w;
    }
  }
  return true;
}

// k, token: of this thread's first sum. K is even.
template <typename T, typename FORM>
__device__ __forceinline__ void store(const float *sum, const bsh_int8_dgrad_args &args, int k, int token) {
  if (k >= args.K) return;
  T *const to = static_cast<T *>(args.dx) + k;
#pragma unroll
  for (int i = 0; i < FORM::SUMS; i += 4)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int m = token + i * 2 + e;
      if (m < args.M)
        *reinterpret_cast<uint32_t *>(to + (int64_t)m * args.K) = pack_pair<T>(sum[i + e], sum[i + e + 2]);
    }
}

template <typename T, typename FORM>
__device__ __forceinline__ void multiply_tiles(const dgrad_work<FORM> &work, int warp, int lane) {
  const uint64_t b = wgmma_descriptor_64(work.memory);
  // This lane's row of W in a stage, and of it the warp's 16 bytes: n = lane, then n = 32 + lane.
  const uint32_t own = work.memory + FORM::X_BYTES + lane * ROW_BYTES + ((warp ^ (lane & 7)) << 4);
  const uint32_t there = map_to_rank(work.empty, PAIR * work.split + lane % PAIR);
  dgrad_scales scales;
  uint32_t a[2][16];
  float sum[FORM::SUMS];
  int stage = 0, before = -1;
  uint32_t parity = 0;
  auto release = [&](int s) {
    if (lane < PAIR) mbarrier_arrive_there(there + 8 * s);
  };
  for (int tile = work.cluster; tile < work.args.tiles; tile += work.clusters()) {
#pragma unroll
    for (int i = 0; i < FORM::SUMS; i++) sum[i] = 0.f;
    scales.fetch(work.args.scales, work.first, lane % 4);
    for (int pair = 0; pair < work.pairs; pair++) {
#pragma unroll
      for (int u = 0; u < 2; u++) {
        mbarrier_wait(work.full + 8 * stage, parity);
        decode<T>(a[u], own + stage * FORM::STAGE_BYTES, scales);
        scales.fetch(work.args.scales, work.first + (2 * pair + u + 1) * DEPTH, lane % 4);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++)
          wgmma_rs<T, FORM::TOKENS>::mma_async(sum, a[u] + 4 * k, b + ((stage * FORM::STAGE_BYTES) >> 4) + 2 * k);
        wgmma_commit();
        wgmma_wait<1>(); // the products of the stage before this one are done, with their operands, too
        if (before >= 0) release(before);
        before = stage;
        if (++stage == FORM::STAGES) stage = 0, parity ^= 1;
      }
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < FORM::SUMS; i++) asm volatile("" : "+f"(sum[i])::"memory"); // read after the wait
    if (before >= 0) release(before);
    before = -1;
    if (work.args.splits > 1 && !join<FORM>(sum, work, tile, lane)) continue;
    store<T, FORM>(sum, work.args, work.row(tile) + warp * 16 + lane / 4 * 2, work.token(tile) + lane % 4 * 2);
  }
}

template <typename T, typename FORM>
__device__ __forceinline__ void dgrad(const bsh_tensor_map &dy, const bsh_tensor_map &w,
                                      const bsh_int8_dgrad_args &args) {
  extern __shared__ __align__(1024) char dynamic[];
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const dgrad_work<FORM> work(args, (shared_address(dynamic) + 1023) / 1024 * 1024);
  if (threadIdx.x == 0) work.init();
  if (warp == COPY_WARP && lane == 0) prefetch_map(&dy), prefetch_map(&w);
  __syncthreads();
  cluster_meet();
  let_later_kernels_start();
  wait_for_earlier_kernels();
  if (warp >= COPY_WARP) {
    give_registers<PRODUCER_REGISTERS>();
    if (warp == COPY_WARP && lane == 0) copy_tiles<FORM>(work, &dy, &w);
  } else {
    take_registers<CONSUMER_REGISTERS>();
    multiply_tiles<T, FORM>(work, warp, lane);
  }
  __syncwarp();
  cluster_meet(); // nobody ends while a block of its cluster may still write here
}
#endif

} // namespace
} // namespace bsh

#ifdef BSH_HAS_WGMMA
#define BODY(T, TOKENS, STAGES) bsh::dgrad<T, bsh::dgrad_form<TOKENS, STAGES>>(dy, w, args)
#else
#define BODY(T, TOKENS, STAGES) __trap()
#endif
#define DGRAD(NAME, T, TOKENS, STAGES)                                                                                 \
  extern "C" __global__ void __launch_bounds__(BSH_GEMM_INT8_SM90_THREADS, 1)                                          \
      NAME(const __grid_constant__ bsh_tensor_map dy, const __grid_constant__ bsh_tensor_map w,                        \
           const __grid_constant__ bsh_int8_dgrad_args args) {                                                         \
    BODY(T, TOKENS, STAGES);                                                                                           \
  }
#define DGRAD_F16(FORM, TOKENS, STAGES) DGRAD(dgrad_int8_sm90_f16_##FORM, __half, TOKENS, STAGES)
#define DGRAD_BF16(FORM, TOKENS, STAGES) DGRAD(dgrad_int8_sm90_bf16_##FORM, __nv_bfloat16, TOKENS, STAGES)
BSH_DGRAD_INT8_FORMS(DGRAD_F16)
BSH_DGRAD_INT8_FORMS(DGRAD_BF16)
