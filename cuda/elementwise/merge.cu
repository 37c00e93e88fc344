// merge.cu - a packed weight with LoRA adapters in it, quantized anew: the bits of cpu/merge.c.
//
//   packed -> value -> + s B A, fp32 FMAs by rank -> largest magnitude of the block -> code -> packed
//
// The fast kernels take blocks of 64 within a row. A block of threads has a panel of 512 columns and up to 64 rows,
// whose part of B is in shared memory; a warp has 64 of the columns, two a lane, and goes down the rows, 8 at a time: a
// rank is one load of A, two of the 8 numbers of B, and 16 FMAs. The *_any kernels give a warp a block of any size, and
// compute it twice. Host side: csrc/gpu/merge.c.
#include "cuda/sizes/merge.h"

#include "cuda/numerics/encode.cuh"

namespace bsh {

constexpr int ROWS = BSH_MERGE_ROWS, COLUMNS = BSH_MERGE_COLUMNS, PAD = BSH_MERGE_PAD;

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

__device__ __forceinline__ float2 load_two(const float *x) { return *reinterpret_cast<const float2 *>(x); }
__device__ __forceinline__ float2 load_two(const __half *x) { return __half22float2(*(const __half2 *)x); }
__device__ __forceinline__ float2 load_two(const __nv_bfloat16 *x) {
  return __bfloat1622float2(*(const __nv_bfloat162 *)x);
}

struct factors {
  float4 b[BSH_MERGE_FACTORS / 4]; // [R][rows of the panel + PAD]
  float scales[BSH_MERGE_RANKS];
};

// B of the panel's rows from `first` on; zeros beyond its end.
template <typename T>
__device__ __forceinline__ void load_factors(const bsh_merge_4bit_args &a, int64_t first, int rows, factors &f) {
  float *const b = reinterpret_cast<float *>(f.b);
  const T *const source = static_cast<const T *>(a.b) + first * a.R;
  const int ranks = (int)a.R, inside = (int)min((int64_t)rows, a.N - first) * ranks;
  for (int i = threadIdx.x; i < rows * ranks; i += BSH_MERGE_THREADS)
    b[i % ranks * (rows + PAD) + i / ranks] = i < inside ? to_float(source[i]) : 0.0f;
  for (int i = threadIdx.x; i < ranks; i += BSH_MERGE_THREADS) f.scales[i] = a.scales[i];
}

struct tile {
  float value[ROWS][2], sum[ROWS][2];
};

// W of 8 rows in fp32, the two columns of a lane.
template <int FORMAT>
__device__ __forceinline__ void decode(const bsh_merge_4bit_args &a, int64_t row, int64_t column, tile &t) {
  const int lane = threadIdx.x % 32;
  const float unit = VALUES[FORMAT][lane % 16];
  const int64_t scaled = min(row + lane / 4, a.N - 1); // lane l fetches the scale of row l / 4
  const float scales = scale_of_block(a.weight.scales, (scaled * a.K + column) / COLUMNS);
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    const int byte = row + i < a.N ? a.weight.packed[((row + i) * a.K + column) / 2 + lane] : 0;
    const float scale = __shfl_sync(ALL_LANES, scales, 4 * i);
    t.value[i][0] = multiply_flush(__shfl_sync(ALL_LANES, unit, byte >> 4, 16), scale);
    t.value[i][1] = multiply_flush(__shfl_sync(ALL_LANES, unit, byte & 15, 16), scale);
    t.sum[i][0] = t.sum[i][1] = 0.0f;
  }
}

// factor: A of a lane's columns. b: of the tile's rows, `stride` numbers from a rank to the next.
template <typename T>
__device__ __forceinline__ void add_ranks(const T *factor, int64_t K, const float4 *b, int stride, const float *scales,
                                          int ranks, tile &t) {
#pragma unroll 4
  for (int r = 0; r < ranks; r++, factor += K, b += stride / 4) {
    const float2 two = load_two(factor);
#pragma unroll
    for (int half = 0; half < ROWS / 4; half++) {
      const float of_row[4] = {b[half].x, b[half].y, b[half].z, b[half].w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        t.sum[4 * half + i][0] = __fmaf_rn(of_row[i], two.x, t.sum[4 * half + i][0]);
        t.sum[4 * half + i][1] = __fmaf_rn(of_row[i], two.y, t.sum[4 * half + i][1]);
      }
    }
    const float scale = scales[r];
    if (scale == 0.0f) continue;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
#pragma unroll
      for (int j = 0; j < 2; j++) t.value[i][j] = __fmaf_rn(scale, t.sum[i][j], t.value[i][j]), t.sum[i][j] = 0.0f;
    }
  }
}

// Largest magnitudes of the 8 rows over the warp; lane l gets that of row l / 4.
__device__ __forceinline__ float absmax_of_rows(const tile &t) {
  const int lane = threadIdx.x % 32;
  float most[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; i++) most[i] = absmax_step(absmax_step(-LARGEST, t.value[i][0]), t.value[i][1]);
#pragma unroll
  for (int half = ROWS / 2; half > 0; half /= 2) { // a lane keeps half of the rows, and gives the others away
    const bool upper = lane & 4 * half;
#pragma unroll
    for (int i = 0; i < half; i++) {
      const float given = upper ? most[i] : most[i + half], kept = upper ? most[i + half] : most[i];
      most[i] = fmaxf(kept, __shfl_xor_sync(ALL_LANES, given, 4 * half));
    }
  }
  const float pair = fmaxf(most[0], __shfl_xor_sync(ALL_LANES, most[0], 2));
  return fmaxf(pair, __shfl_xor_sync(ALL_LANES, pair, 1));
}

template <int FORMAT>
__device__ __forceinline__ void encode(const bsh_merge_4bit_args &a, const code_encoder<FORMAT> &encoder, int64_t row,
                                       int64_t column, const tile &t) {
  const int lane = threadIdx.x % 32;
  const float absmax = absmax_of_rows(t), inverses = exact_reciprocal(absmax);
  if (lane % 4 == 0 && row + lane / 4 < a.N) a.absmax[((row + lane / 4) * a.K + column) / COLUMNS] = absmax;
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    const float inverse = __shfl_sync(ALL_LANES, inverses, 4 * i);
    uint32_t codes = encoder.add_code(0, multiply_flush(inverse, t.value[i][0]), 4);
    codes = encoder.add_code(codes, multiply_flush(inverse, t.value[i][1]), 0);
    if (row + i < a.N) a.packed[((row + i) * a.K + column) / 2 + lane] = (uint8_t)codes;
  }
}

template <typename T, int FORMAT> __device__ __forceinline__ void merge_4bit(const bsh_merge_4bit_args &a) {
  __shared__ factors f;
  const code_encoder<FORMAT> encoder;
  const int rows = bsh_merge_panel_rows(a.R), stride = rows + PAD;
  const uint32_t across = (uint32_t)((a.K / COLUMNS + BSH_MERGE_WARPS - 1) / BSH_MERGE_WARPS);
  const int64_t column = (int64_t)(blockIdx.x % across * BSH_MERGE_WARPS + threadIdx.x / 32) * COLUMNS;
  const int64_t first = (int64_t)(blockIdx.x / across) * rows;
  wait_for_earlier_kernels();
  load_factors<T>(a, first, rows, f);
  __syncthreads();
  if (column >= a.K) return;
  const T *const factor = static_cast<const T *>(a.a) + column + 2 * (threadIdx.x % 32);
  for (int i = 0; i < rows && first + i < a.N; i += ROWS) {
    tile t;
    decode<FORMAT>(a, first + i, column, t);
    add_ranks(factor, a.K, f.b + i / 4, stride, f.scales, (int)a.R, t);
    encode(a, encoder, first + i, column, t);
  }
}

// Element i of the merged weight; 0 beyond its end.
template <typename T> __device__ float merged(const bsh_merge_4bit_args &a, float scale, int64_t i) {
  if (i >= a.weight.n) return 0.0f;
  const int64_t n = i / a.K, k = i % a.K;
  const int byte = a.weight.packed[i / 2];
  float value = multiply_flush(VALUES[a.weight.format][i % 2 ? byte & 15 : byte >> 4], scale), sum = 0.0f;
  for (int64_t r = 0; r < a.R; r++) {
    const float b = to_float(static_cast<const T *>(a.b)[n * a.R + r]);
    sum = __fmaf_rn(b, to_float(static_cast<const T *>(a.a)[r * a.K + k]), sum);
    if (a.scales[r] == 0.0f) continue;
    value = __fmaf_rn(a.scales[r], sum, value);
    sum = 0.0f;
  }
  return value;
}

template <typename T, int FORMAT> __device__ __forceinline__ void merge_4bit_any(const bsh_merge_4bit_args &a) {
  const code_encoder<FORMAT> encoder;
  const int lane = threadIdx.x % 32;
  const int64_t block = (int64_t)blockIdx.x * BSH_MERGE_WARPS + threadIdx.x / 32, begin = block * a.weight.blocksize;
  if (begin >= a.weight.n) return;
  const int length = (int)min(a.weight.blocksize, a.weight.n - begin);
  wait_for_earlier_kernels();
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
}

} // namespace bsh

#define MERGE(name, type, format_name, format)                                                                         \
  extern "C" __global__ void __launch_bounds__(BSH_MERGE_THREADS, 3)                                                   \
      merge_4bit_##name##_##format_name(const __grid_constant__ bsh_merge_4bit_args args) {                            \
    bsh::merge_4bit<type, format>(args);                                                                               \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(BSH_MERGE_THREADS)                                                      \
      merge_4bit_any_##name##_##format_name(const __grid_constant__ bsh_merge_4bit_args args) {                        \
    bsh::merge_4bit_any<type, format>(args);                                                                           \
  }
#define MERGE_FORMATS(name, type)                                                                                      \
  MERGE(name, type, nf4, BSH_NF4)                                                                                      \
  MERGE(name, type, fp4, BSH_FP4)
MERGE_FORMATS(f32, float)
MERGE_FORMATS(f16, __half)
MERGE_FORMATS(bf16, __nv_bfloat16)
