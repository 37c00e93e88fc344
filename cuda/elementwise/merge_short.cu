// merge_short.cu - a weight in MXFP4 or NVFP4 with LoRA adapters in it, quantized anew: the bytes of the sum in fp32
// (cpu/merge.c) by cpu/scalar.c's quantizer.
//
//   packed -> value -> + s B A (merge.cuh) -> largest of 4 or 2 lanes -> scale, core/e2m1.h -> value / scale -> code
//
// NVFP4's global scale is that of the largest merged value, so all are made twice: maxima of blocks of threads, the
// global scale of these, then scales and codes. Host side: csrc/gpu/merge.c.
#include "cuda/elementwise/merge.cuh"

#include "core/e2m1.h"

namespace bsh {

// Largest of each group of `LANES_OF_BLOCK` lanes; as bits, so that a NaN is the largest.
template <int LANES_OF_BLOCK> __device__ __forceinline__ uint32_t largest_of_lanes(uint32_t most) {
#pragma unroll
  for (int d = LANES_OF_BLOCK / 2; d > 0; d /= 2) most = max(most, __shfl_xor_sync(ALL_LANES, most, d));
  return most;
}

__device__ __forceinline__ uint32_t largest_of(const float (&value)[8]) {
  uint32_t most = 0;
#pragma unroll
  for (int j = 0; j < 8; j++) most = max(most, __float_as_uint(value[j]) & 0x7FFFFFFFu);
  return most;
}

// The code of a number in units of its scale: the nearest; of a NaN 7.
__device__ __forceinline__ uint32_t e2m1_code(float v) {
  constexpr uint32_t thresholds[7] = {BSH_E2M1_THRESHOLD_BITS};
  uint32_t code = 7;
#pragma unroll
  for (int i = 0; i < 7; i++) code -= fabsf(v) <= __uint_as_float(thresholds[i]);
  return code + (v < 0.0f ? 8 : 0);
}

// BLOCK: 32 or 16 columns, of 4 or 2 lanes.
template <int BLOCK> struct short_blocks {
  const float unit = VALUES[BSH_E2M1][threadIdx.x % 16];

  template <int T> struct rows {
    __device__ __forceinline__ rows(const bsh_merge_4bit_args &, const part<T> &) {}
  };

  // The block of the lane's columns in row i.
  template <int T> static __device__ __forceinline__ int64_t block_of(const part<T> &p, int i) {
    return (2 * p.at(i) + 8 * p.lane) / BLOCK;
  }

  template <int T>
  __device__ __forceinline__ void decode(const bsh_merge_4bit_args &args, const part<T> &p, const rows<T> &, int i,
                                         float (&value)[8]) const {
    const float scale = i < p.inside ? exact_scale(args.weight.scales, block_of(p, i)) : 0.0f;
#pragma unroll
    for (int j = 0; j < 8; j++)
      value[j] = scaled<true>(__shfl_sync(ALL_LANES, unit, p.words[i] >> shift_of(j), 16), scale);
  }

  template <int T>
  __device__ __forceinline__ void encode(const bsh_merge_4bit_args &args, const part<T> &p,
                                         const float (&value)[T][8]) {
#pragma unroll
    for (int i = 0; i < T; i++) {
      const uint32_t most = largest_of_lanes<BLOCK / 8>(largest_of(value[i]));
      float divisor;
      const uint8_t scale =
          bsh_short_scale(__uint_as_float(most), BLOCK == BSH_NVFP4_BLOCK ? args.second : nullptr, &divisor);
      uint32_t codes = 0;
#pragma unroll
      for (int j = 0; j < 8; j++) codes |= e2m1_code(__fdiv_rn(value[i][j], divisor)) << shift_of(j);
      if (i >= p.inside) continue;
      *reinterpret_cast<uint32_t *>(args.packed + p.at(i) + 4 * p.lane) = codes;
      if (p.lane % (BLOCK / 8) == 0) args.scales8[block_of(p, i)] = scale;
    }
  }

  __device__ __forceinline__ void end(const bsh_merge_4bit_args &) const {}
};

// The largest magnitude of a block of threads. Values beyond the weight's end are 0.
struct maxima : short_blocks<BSH_NVFP4_BLOCK> {
  uint32_t most = 0;

  template <int T>
  __device__ __forceinline__ void encode(const bsh_merge_4bit_args &, const part<T> &p, const float (&value)[T][8]) {
#pragma unroll
    for (int i = 0; i < T; i++) most = i < p.inside ? max(most, largest_of(value[i])) : most;
  }

  __device__ __forceinline__ void end(const bsh_merge_4bit_args &args) {
    __shared__ uint32_t of_warps[BSH_MERGE_WARPS];
    most = largest_of_lanes<32>(most);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = most;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int warp = 1; warp < BSH_MERGE_WARPS; warp++) most = max(most, of_warps[warp]);
    args.maxima[blockIdx.x] = most;
  }
};

// The global scale of the maxima of `count` blocks of threads, for each of `seconds` runs of blocks of the weight.
__device__ __forceinline__ void global_scale(const uint32_t *maxima, int64_t count, float *second, int64_t seconds) {
  __shared__ uint32_t of_warps[BSH_MERGE_MEAN_THREADS / 32];
  uint32_t most = 0;
  wait_for_earlier_kernels();
  for (int64_t i = threadIdx.x; i < count; i += BSH_MERGE_MEAN_THREADS) most = max(most, maxima[i]);
  most = largest_of_lanes<32>(most);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = most;
  __syncthreads();
  const float whole = bsh_global_scale(__uint_as_float(largest_of_lanes<32>(of_warps[threadIdx.x % 32])));
  for (int64_t i = threadIdx.x; i < seconds; i += BSH_MERGE_MEAN_THREADS) second[i] = whole;
}

} // namespace bsh

#define MERGE(name, type, codec_name, codec)                                                                           \
  extern "C" __global__ void __launch_bounds__(BSH_MERGE_THREADS, BSH_MERGE_RESIDENT)                                  \
      merge_##codec_name##_##name(const __grid_constant__ bsh_merge_4bit_args args) {                                  \
    bsh::merge_tile<type, bsh::codec>(args);                                                                           \
  }
#define MERGE_CODECS(name, type)                                                                                       \
  MERGE(name, type, mxfp4, short_blocks<BSH_MXFP4_BLOCK>)                                                              \
  MERGE(name, type, nvfp4, short_blocks<BSH_NVFP4_BLOCK>)                                                              \
  MERGE(name, type, nvfp4_maxima, maxima)
MERGE_CODECS(f32, float)
MERGE_CODECS(f16, __half)
MERGE_CODECS(bf16, __nv_bfloat16)

extern "C" __global__ void __launch_bounds__(BSH_MERGE_MEAN_THREADS)
    merge_nvfp4_scale(const uint32_t *maxima, int64_t count, float *second, int64_t seconds) {
  bsh::global_scale(maxima, count, second, seconds);
}
