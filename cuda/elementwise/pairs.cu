// pairs.cu - the pairs of tokens and experts of a layer: in the order of their experts, and the sums of a token's.
//
// sort_by_expert:
//
//   chosen [T, k] --count--> shared memory: for each warp's stretch of the pairs, how many each expert has
//                 --scan---> where the next pair of an expert goes: experts one after the other, in each the warps
//                 --place--> order, back, row; offs: where each expert's pairs end
//
// Each block of threads counts all pairs, which saves a second launch, and places those of some of the experts: one
// multiprocessor would take long for the stores of many pairs. Pairs of one expert keep their order. Experts elsewhere
// count as one more expert, the last. A wrong number counts as that of the nearest expert, and marks `back`: a GPU
// cannot raise without a wait.
//
// sum_by_token: a thread has 16 bytes of a token's sum, or one element where rows don't begin at 16 bytes.
#include "cuda/sizes/pairs.h"

#include "cuda/numerics/common.cuh"

namespace bsh {
namespace {

// The bucket of a pair: its expert, or E for all that are elsewhere. ~bucket where the number is wrong.
__device__ __forceinline__ int marked_bucket_of(const bsh_sort_by_expert_args &args, int64_t pair) {
  const int64_t expert = args.chosen[pair];
  if (expert >= 0 && expert < args.E) return (int)expert;
  if (expert < 0) return ~0;
  return args.elsewhere ? args.E : ~(args.E - 1);
}

__device__ __forceinline__ int unmarked(int bucket) { return bucket < 0 ? ~bucket : bucket; }

// Lanes of `among` that have the same bucket, of `bits` bits.
__device__ __forceinline__ uint32_t alike(int bucket, int bits, uint32_t among) {
  for (int bit = 0; bit < bits; bit++) {
    const bool set = bucket >> bit & 1;
    const uint32_t lanes = __ballot_sync(ALL_LANES, set);
    among &= set ? lanes : ~lanes;
  }
  return among;
}

// The marked buckets of the pairs from `first` on, one of 32 in turn, asked for together; the last one's, or none,
// behind them.
constexpr int BATCH = 8;
__device__ __forceinline__ void read(const bsh_sort_by_expert_args &args, int first, int end, int *buckets) {
#pragma unroll
  for (int i = 0; i < BATCH; i++) buckets[i] = marked_bucket_of(args, min(first + i * 32, end - 1));
}

// next[bucket]: pairs of it in this warp's stretch.
__device__ __forceinline__ void count(const bsh_sort_by_expert_args &args, uint32_t *next, int begin, int end) {
  int buckets[BATCH];
  for (int first = begin + (threadIdx.x & 31); first < end; first += 32 * BATCH) {
    read(args, first, end, buckets);
#pragma unroll
    for (int i = 0; i < BATCH; i++)
      if (first + i * 32 < end) atomicAdd(next + unmarked(buckets[i]), 1u);
  }
}

// next[warp][bucket] becomes the pairs of it in the stretches before, total[bucket] those in all.
__device__ __forceinline__ void scan_warps(uint32_t *next, uint32_t *total, int buckets, int warps) {
  for (int bucket = threadIdx.x; bucket < buckets; bucket += blockDim.x) {
    uint32_t sum = 0;
    for (int warp = 0; warp < warps; warp++) {
      const uint32_t own = next[warp * buckets + bucket];
      next[warp * buckets + bucket] = sum;
      sum += own;
    }
    total[bucket] = sum;
  }
}

// One warp: total[bucket] becomes the pairs of the buckets before. A lane has a run of buckets.
__device__ __forceinline__ void scan_buckets(const bsh_sort_by_expert_args &args, uint32_t *total, int buckets) {
  const int lane = threadIdx.x & 31, run = (buckets + 31) / 32;
  const int begin = min(lane * run, buckets), end = min(begin + run, buckets);
  uint32_t own = 0;
  for (int bucket = begin; bucket < end; bucket++) own += total[bucket];
  uint32_t at = sum_upto(own, lane) - own;
  for (int bucket = begin; bucket < end; bucket++) {
    const uint32_t pairs = total[bucket];
    total[bucket] = at;
    at += pairs;
    if (bucket < args.E && blockIdx.x == 0) args.offs[bucket] = (int32_t)at;
  }
}

// Pairs of this warp's stretch to their places, 32 at a time: those of the buckets [low, high).
__device__ __forceinline__ void place(const bsh_sort_by_expert_args &args, uint32_t *next, const uint32_t *start,
                                      int begin, int end, int low, int high) {
  const int lane = threadIdx.x & 31, bits = 32 - __clz(args.E);
  int buckets[BATCH];
  for (int first = begin; first < end; first += 32 * BATCH) {
    read(args, first + lane, end, buckets);
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int pair = first + i * 32 + lane, bucket = unmarked(buckets[i]);
      const bool own = pair < end && bucket >= low && bucket < high;
      const uint32_t lanes = __ballot_sync(ALL_LANES, own);
      if (lanes == 0) continue;
      const uint32_t same = alike(bucket, bits, lanes), before = same & ((1u << lane) - 1);
      const uint32_t at = own ? start[bucket] + next[bucket] + __popc(before) : 0;
      __syncwarp();
      if (own && before == 0) next[bucket] += __popc(same);
      __syncwarp();
      if (!own) continue;
      args.order[at] = pair, args.back[pair] = buckets[i] < 0 ? at - args.S : at;
      args.row[at] = (uint32_t)pair / (uint32_t)args.k;
    }
  }
}

// ---- sum_by_token ----

__device__ __forceinline__ float count_of(const bsh_sum_by_token_args &args, int64_t pair) {
  if (args.counts_dtype == BSH_F32) return static_cast<const float *>(args.counts)[pair];
  if (args.counts_dtype == BSH_F16) return to_float(static_cast<const __half *>(args.counts)[pair]);
  return to_float(static_cast<const __nv_bfloat16 *>(args.counts)[pair]);
}

// WIDTH elements of T together.
template <typename T, int WIDTH> struct alignas(sizeof(T) * WIDTH) run {
  T v[WIDTH];
};

// Products and sums are rounded one by one, in the order of a token's experts. The rows of 8 of them are on their way
// together. A place that y does not have, as that of a wrong number, counts NaN.
template <typename T, int WIDTH> __device__ __forceinline__ void sum_by_token(const bsh_sum_by_token_args &args) {
  constexpr int BATCH = 8;
  wait_for_earlier_kernels();
  let_later_kernels_start();
  const int64_t token = blockIdx.x, k = args.k, pairs = args.T * k;
  const int64_t column = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * WIDTH;
  if (column >= args.H) return;
  const T *const y = static_cast<const T *>(args.y) + column;
  float sum[WIDTH] = {};
  for (int64_t first = 0; first < k; first += BATCH) {
    run<T, WIDTH> rows[BATCH];
    float counts[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int64_t pair = token * k + min(first + i, k - 1), row = args.back[pair];
      const bool there = row >= 0 && row < pairs;
      rows[i] = *reinterpret_cast<const run<T, WIDTH> *>(y + (there ? row : 0) * args.H);
      const float count = count_of(args, pair); // in any case: a branch around its load costs registers
      counts[i] = there ? count : __int_as_float(0x7fffffff);
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++)
      if (first + i < k)
#pragma unroll
        for (int j = 0; j < WIDTH; j++) sum[j] = __fadd_rn(sum[j], __fmul_rn(counts[i], to_float(rows[i].v[j])));
  }
  run<T, WIDTH> out;
#pragma unroll
  for (int j = 0; j < WIDTH; j++) from_float(sum[j], &out.v[j]);
  *reinterpret_cast<run<T, WIDTH> *>(static_cast<T *>(args.out) + token * args.H + column) = out;
}

} // namespace
} // namespace bsh

// stretches: of the pairs, one for each of the first warps.
extern "C" __global__ void __launch_bounds__(32 * BSH_SORT_WARPS)
    sort_by_expert(const __grid_constant__ bsh_sort_by_expert_args args, int stretches) {
  extern __shared__ uint32_t counters[]; // [stretches][buckets], then [buckets]
  const int buckets = args.E + 1, warp = threadIdx.x / 32;
  uint32_t *const next = counters + warp * buckets, *const start = counters + stretches * buckets;
  const int64_t stretch = (args.S + stretches - 1) / stretches;
  const int begin = (int)min(warp * stretch, args.S), end = (int)min(begin + stretch, args.S);
  for (int i = threadIdx.x; i < stretches * buckets; i += blockDim.x) counters[i] = 0;
  __syncthreads();
  bsh::wait_for_earlier_kernels();
  bsh::let_later_kernels_start();
  if (warp < stretches) bsh::count(args, next, begin, end);
  __syncthreads();
  bsh::scan_warps(counters, start, buckets, stretches);
  __syncthreads();
  if (warp == 0) bsh::scan_buckets(args, start, buckets);
  __syncthreads();
  const int low = buckets * blockIdx.x / gridDim.x, high = buckets * (blockIdx.x + 1) / gridDim.x;
  if (warp < stretches) bsh::place(args, next, start, begin, end, low, high);
}

#define SUM_ENTRY(NAME, ...) BSH_ENTRY(__launch_bounds__(BSH_SUM_THREADS), NAME, bsh_sum_by_token_args, __VA_ARGS__)
#define SUM_BY_TOKEN(name, T)                                                                                          \
  SUM_ENTRY(sum_by_token_##name, sum_by_token<T, 16 / sizeof(T)>)                                                      \
  SUM_ENTRY(sum_by_token_##name##_any, sum_by_token<T, 1>)
SUM_BY_TOKEN(f32, float)
SUM_BY_TOKEN(f16, __half)
SUM_BY_TOKEN(bf16, __nv_bfloat16)
