// merge.cu - a weight in NF4 or FP4 with LoRA adapters in it, quantized anew: the bits of cpu/merge.c.
//
// The fast kernels take blocks of 64 within a row (merge.cuh). The *_any kernels give a warp a block of any size, and
// compute it twice. add_adapters_*: values that are decoded already, whatever the format, and not quantized. Host side:
// csrc/gpu/merge.c.
#include "cuda/elementwise/blocks8.cuh"
#include "cuda/elementwise/merge.cuh"

namespace bsh {

// 1 / absmax as core/numerics.h has it: the approximate one where that is known (fp16 and bf16 numbers), else rounded
// correctly. The approximate one of a GPU is not for all fp32 numbers the same as on another machine.
__device__ __forceinline__ float exact_reciprocal(float absmax) {
  if ((__float_as_uint(absmax) & 0x1FFFu) == 0) return reciprocal(absmax);
  const float rounded = __fdiv_rn(1.0f, absmax);
  return __float_as_uint(rounded) & 0x7F800000u ? rounded : __uint_as_float(__float_as_uint(rounded) & 0x80000000u);
}

__device__ __forceinline__ float scale_of_block(const bsh_scales &scales, int64_t b) {
  return scales.absmax == nullptr ? block_scale<true>(scales, b) : block_scale<false>(scales, b);
}

// Largest magnitudes of the rows over their 8 lanes; lane l gets that of row l / (8 / T).
template <int T> __device__ __forceinline__ float absmax_of_rows(const float (&value)[T][8]) {
  const int lane = threadIdx.x % LANES;
  float most[T];
#pragma unroll
  for (int i = 0; i < T; i++) {
    most[i] = -LARGEST;
#pragma unroll
    for (int j = 0; j < 8; j++) most[i] = absmax_step(most[i], value[i][j]);
  }
#pragma unroll
  for (int half = T / 2; half > 0; half /= 2) { // a lane keeps half of the rows, and gives the others away
    const bool upper = lane & half * (LANES / T);
#pragma unroll
    for (int i = 0; i < half; i++) {
      const float given = upper ? most[i] : most[i + half], kept = upper ? most[i + half] : most[i];
      most[i] = fmaxf(kept, __shfl_xor_sync(ALL_LANES, given, half * (LANES / T)));
    }
  }
#pragma unroll
  for (int d = LANES / T / 2; d > 0; d /= 2) most[0] = fmaxf(most[0], __shfl_xor_sync(ALL_LANES, most[0], d));
  return most[0];
}

// NF4 and FP4 in blocks of 64: the rows of a warp's 8 lanes.
template <int FORMAT> struct blocks_of_64 {
  const code_encoder<FORMAT> encoder{};
  const float unit = VALUES[FORMAT][threadIdx.x % 16];
  double sum = 0; // of the scales that this lane has written

  template <int T> static __device__ __forceinline__ int mine(const part<T> &p) { return p.lane / (LANES / T); }

  template <int T> struct rows {
    float scale; // of row mine()

    __device__ __forceinline__ rows(const bsh_merge_4bit_args &args, const part<T> &p)
        : scale(mine(p) < p.inside ? scale_of_block(args.weight.scales, p.at(mine(p)) / (COLUMNS / 2)) : 0.0f) {}
  };

  template <int T>
  __device__ __forceinline__ void decode(const bsh_merge_4bit_args &, const part<T> &p, const rows<T> &kept, int i,
                                         float (&value)[8]) const {
    const float scale = __shfl_sync(ALL_LANES, kept.scale, i * (LANES / T), LANES);
#pragma unroll
    for (int j = 0; j < 8; j++)
      value[j] = multiply_flush(__shfl_sync(ALL_LANES, unit, p.words[i] >> shift_of(j), 16), scale);
  }

  template <int T>
  __device__ __forceinline__ void encode(const bsh_merge_4bit_args &args, const part<T> &p,
                                         const float (&value)[T][8]) {
    const float absmax = absmax_of_rows(value), inverses = exact_reciprocal(absmax);
    if (p.lane % (LANES / T) == 0 && mine(p) < p.inside) {
      args.absmax[p.at(mine(p)) / (COLUMNS / 2)] = absmax;
      sum += absmax;
    }
#pragma unroll
    for (int i = 0; i < T; i++) {
      const float inverse = __shfl_sync(ALL_LANES, inverses, i * (LANES / T), LANES);
      uint32_t codes = 0;
#pragma unroll
      for (int j = 0; j < 8; j++) codes = encoder.add_code(codes, multiply_flush(inverse, value[i][j]), shift_of(j));
      if (i < p.inside) *reinterpret_cast<uint32_t *>(args.packed + p.at(i) + 4 * p.lane) = codes;
    }
  }

  __device__ __forceinline__ void end(const bsh_merge_4bit_args &args) const {
    if (args.map != nullptr) sum_of_block<BSH_MERGE_THREADS>(sum, args.sums + blockIdx.x);
  }
};

// `value`, of element i of the weight, with the adapters added.
template <typename T> __device__ __forceinline__ float added(const bsh_merge_4bit_args &a, float value, int64_t i) {
  const int64_t n = i / a.K, k = i % a.K;
  float sum = 0.0f;
  for (int64_t r = 0; r < a.R; r++) {
    const float b = to_float(static_cast<const T *>(a.b)[n * a.R + r]);
    sum = __fmaf_rn(b, to_float(static_cast<const T *>(a.a)[r * a.K + k]), sum);
    if (a.scales[r] == 0.0f) continue;
    value = __fmaf_rn(a.scales[r], sum, value);
    sum = 0.0f;
  }
  return value;
}

// Element i of the merged weight; 0 beyond its end.
template <typename T> __device__ float merged(const bsh_merge_4bit_args &a, float scale, int64_t i) {
  if (i >= a.weight.n) return 0.0f;
  const int byte = a.weight.packed[i / 2];
  return added<T>(a, multiply_flush(VALUES[a.weight.format][i % 2 ? byte & 15 : byte >> 4], scale), i);
}

// A block of the weight by a warp; its scale.
template <typename T, int FORMAT>
__device__ __forceinline__ float merge_block(const bsh_merge_4bit_args &a, int64_t block) {
  const code_encoder<FORMAT> encoder;
  const int lane = threadIdx.x % 32;
  const int64_t begin = block * a.weight.blocksize;
  const int length = (int)min(a.weight.blocksize, a.weight.n - begin);
  const float scale = scale_of_block(a.weight.scales, block);
  float absmax = length < a.weight.blocksize ? 0.0f : -LARGEST;
  for (int i = lane; i < length; i += 32) absmax = absmax_step(absmax, merged<T>(a, scale, begin + i));
  absmax = warp_absmax(absmax);
  const float inverse = exact_reciprocal(absmax);
  if (lane == 0) a.absmax[block] = absmax;
  for (int pair = 0; pair < length; pair += 64) {
    const int64_t i = begin + pair + 2 * lane;
    const bool inside = pair + 2 * lane < length;
    const float high = inside ? merged<T>(a, scale, i) : 0.0f, low = inside ? merged<T>(a, scale, i + 1) : 0.0f;
    uint32_t codes = encoder.add_code(0, multiply_flush(inverse, high), 4);
    codes = encoder.add_code(codes, multiply_flush(inverse, low), 0);
    if (inside) a.packed[i / 2] = (uint8_t)codes;
  }
  return absmax;
}

template <typename T, int FORMAT> __device__ __forceinline__ void merge_4bit_any(const bsh_merge_4bit_args &a) {
  const int64_t block = (int64_t)blockIdx.x * BSH_MERGE_WARPS + threadIdx.x / 32;
  wait_for_earlier_kernels();
  const float absmax = block * a.weight.blocksize < a.weight.n ? merge_block<T, FORMAT>(a, block) : 0.0f;
  if (a.map != nullptr) sum_of_block<BSH_MERGE_THREADS>(threadIdx.x % 32 == 0 ? absmax : 0.0f, a.sums + blockIdx.x);
}

// The merged weight's scales nested: their mean, which every block of threads adds up for itself, in one order, from
// the `count` sums, and 8-bit codes of what is above it.
__device__ __forceinline__ void nest_merged_scales(const bsh_merge_4bit_args &a, int64_t count) {
  __shared__ double total;
  bsh_quantize_blockwise_args scales{};
  scales.x = a.absmax, scales.map = a.map, scales.code = a.scales8, scales.absmax = a.second;
  scales.n = (a.weight.n + a.weight.blocksize - 1) / a.weight.blocksize, scales.blocksize = BSH_NESTED_BLOCKSIZE;
  wait_for_earlier_kernels();
  double mine = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < count; i += BSH_BLOCK_THREADS) mine += a.sums[i];
  sum_of_block<BSH_BLOCK_THREADS>(mine, &total);
  __syncthreads();
  const float mean = (float)__dmul_rn(total, 1.0 / (double)scales.n);
  if (blockIdx.x == 0 && threadIdx.x == 0) *a.mean = mean;
  quantize_blocks8<float>(scales, mean);
}

// Adapters added in place to elements [begin, end) of the weight in fp32, values[0 ...].
template <typename T>
__device__ __forceinline__ void add_adapters(const bsh_merge_4bit_args &a, int64_t begin, int64_t end, float *values) {
  const int64_t i = begin + (int64_t)blockIdx.x * BSH_MERGE_THREADS + threadIdx.x;
  wait_for_earlier_kernels();
  if (i < end) values[i - begin] = added<T>(a, values[i - begin], i);
}

} // namespace bsh

#define MERGE(name, type, format_name, format)                                                                         \
  extern "C" __global__ void __launch_bounds__(BSH_MERGE_THREADS, BSH_MERGE_RESIDENT)                                  \
      merge_4bit_##name##_##format_name(const __grid_constant__ bsh_merge_4bit_args args) {                            \
    bsh::merge_tile<type, bsh::blocks_of_64<format>>(args);                                                            \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(BSH_MERGE_THREADS)                                                      \
      merge_4bit_any_##name##_##format_name(const __grid_constant__ bsh_merge_4bit_args args) {                        \
    bsh::merge_4bit_any<type, format>(args);                                                                           \
  }
#define MERGE_FORMATS(name, type)                                                                                      \
  extern "C" __global__ void __launch_bounds__(BSH_MERGE_THREADS) add_adapters_##name(                                 \
      const __grid_constant__ bsh_merge_4bit_args args, int64_t begin, int64_t end, float *values) {                   \
    bsh::add_adapters<type>(args, begin, end, values);                                                                 \
  }                                                                                                                    \
  MERGE(name, type, nf4, BSH_NF4)                                                                                      \
  MERGE(name, type, fp4, BSH_FP4)
MERGE_FORMATS(f32, float)
MERGE_FORMATS(f16, __half)
MERGE_FORMATS(bf16, __nv_bfloat16)

extern "C" __global__ void __launch_bounds__(BSH_BLOCK_THREADS)
    merge_4bit_nest(const __grid_constant__ bsh_merge_4bit_args args, int64_t count) {
  bsh::nest_merged_scales(args, count);
}
