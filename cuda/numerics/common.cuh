// common.cuh - what every kernel shares: the tables, the arithmetic of the formats, 16-byte access, launch overlap.
//
// The arithmetic is upstream's CUDA build: fp32 products that flush denormals, one rounding per step, no FMA, the
// approximate reciprocal. It is written with explicit instructions and does not depend on compiler flags.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "core/formats.h"
#include "core/kernels.h"

// A kernel of one argument struct that calls bsh::FUNCTION with it.
#define BSH_ENTRY(BOUNDS, NAME, ARGS, ...) /* FUNCTION */                                                              \
  extern "C" __global__ void BOUNDS NAME(const __grid_constant__ ARGS args) { bsh::__VA_ARGS__(args); }

namespace bsh {

constexpr unsigned ALL_LANES = 0xFFFFFFFFu, kAllLanes = ALL_LANES; // the latter: optimizer.cu
// The sum of `own` over the lanes up to this one.
template <typename T> __device__ __forceinline__ T sum_upto(T own, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T other = __shfl_up_sync(ALL_LANES, own, step);
    if (lane >= step) own += other;
  }
  return own;
}

// *sum = the sum of the block's `mine`, in a fixed order; THREADS at most.
template <int THREADS> __device__ __forceinline__ void sum_of_block(double mine, double *sum) {
  __shared__ double warps[THREADS / 32];
#pragma unroll
  for (int d = 16; d > 0; d /= 2) mine += __shfl_xor_sync(ALL_LANES, mine, d);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x != 0) return;
  double total = 0;
  for (int i = 0; i < (int)blockDim.x / 32; i++) total += warps[i];
  *sum = total;
}

constexpr float LARGEST = 3.40282346638528859812e38f;

// Value of each code, [format][code].
__device__ const float VALUES[BSH_4BIT_FORMATS][16] = BSH_4BIT_VALUES;

__device__ __forceinline__ float multiply_flush(float a, float b) {
  float product;
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
  return product;
}

// Largest magnitude so far. NaN is passed over, denormals count as zero.
__device__ __forceinline__ float absmax_step(float absmax, float value) {
  float result;
  asm("max.ftz.f32 %0, %1, %2;" : "=f"(result) : "f"(absmax), "f"(fabsf(value)));
  return result;
}

__device__ __forceinline__ float reciprocal(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ __forceinline__ void from_float(float x, float *out) { *out = x; }
__device__ __forceinline__ void from_float(float x, __half *out) { *out = __float2half_rn(x); }
__device__ __forceinline__ void from_float(float x, __nv_bfloat16 *out) { *out = __float2bfloat16_rn(x); }

// Two values rounded into one 32-bit word, `low` first in memory.
template <typename T> __device__ __forceinline__ uint32_t pack_pair(float low, float high);
template <> __device__ __forceinline__ uint32_t pack_pair<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t *>(&pair);
}
template <> __device__ __forceinline__ uint32_t pack_pair<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t *>(&pair);
}

template <typename T> struct pair_of;
template <> struct pair_of<__half> {
  using type = __half2;
};
template <> struct pair_of<__nv_bfloat16> {
  using type = __nv_bfloat162;
};

// The 16 / sizeof(T) values of one 16-byte access.
template <typename T> struct vector16 {
  static constexpr int WIDTH = 16 / sizeof(T);
  uint4 raw;

  __device__ __forceinline__ float get(int i) const { return to_float(reinterpret_cast<const T *>(&raw)[i]); }

  __device__ __forceinline__ void load(const T *source) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
                 : "l"(source)); // volatile: stays behind wait_for_earlier_kernels
  }

  // Largest magnitude: NaN is passed over (-LARGEST if there is nothing else), denormals count as zero.
  __device__ __forceinline__ float absmax() const {
    float result = -LARGEST;
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < WIDTH; i++) result = absmax_step(result, get(i));
    } else {
      using pair_type = typename pair_of<T>::type;
      const pair_type *const pairs = reinterpret_cast<const pair_type *>(&raw);
      const pair_type pair =
          __hmax2(__hmax2(__habs2(pairs[0]), __habs2(pairs[1])), __hmax2(__habs2(pairs[2]), __habs2(pairs[3])));
      result = absmax_step(absmax_step(result, to_float(pair.x)), to_float(pair.y));
    }
    return result;
  }

  __device__ __forceinline__ void set(const float (&values)[WIDTH]) {
    uint32_t *const words = reinterpret_cast<uint32_t *>(&raw);
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < 4; i++) words[i] = __float_as_uint(values[i]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++) words[i] = pack_pair<T>(values[2 * i], values[2 * i + 1]);
    }
  }
};

// A bf16 is the upper half of an fp32.
template <> __device__ __forceinline__ float vector16<__nv_bfloat16>::get(int i) const {
  const uint32_t pair = reinterpret_cast<const uint32_t *>(&raw)[i / 2];
  return __uint_as_float(i % 2 ? pair & 0xFFFF0000u : pair << 16);
}

// The two forms of a nested scale, two roundings each, no FMA. This one has the bits of dequantize_4bit, which flushes
// denormal products as upstream does: fp32 scale of block `b`.
template <bool NESTED> __device__ __forceinline__ float block_scale(const bsh_scales &scales, int64_t b) {
  if constexpr (!NESTED) return scales.absmax[b];
  const float unit = scales.absmax_map[scales.absmax_code[b]];
  return __fadd_rn(multiply_flush(unit, scales.absmax2[b / BSH_NESTED_BLOCKSIZE]), *scales.offset);
}

// For the kernels that scale sums on tensor cores, which round otherwise anyway: denormal products stay what they are.
// unit: the map's value of a code.
__device__ __forceinline__ float scale_with_denormals(float unit, float absmax2, float offset) {
  return __fadd_rn(__fmul_rn(unit, absmax2), offset);
}

// Value of a code by scale, and the scale of a block. NF4 and FP4 flush denormal products, E2M1 (EXACT) does not.
template <bool EXACT> __device__ __forceinline__ float scaled(float unit, float scale) {
  return EXACT ? __fmul_rn(unit, scale) : multiply_flush(unit, scale);
}
__device__ __forceinline__ float exact_scale(const bsh_scales &scales, int64_t b) {
  if (scales.absmax != nullptr) return scales.absmax[b];
  const float unit = scales.absmax_map[scales.absmax_code[b]];
  return scale_with_denormals(unit, scales.absmax2[b / BSH_NESTED_BLOCKSIZE], *scales.offset);
}

// Programmatic dependent launch (sm_90 and newer): nothing that an earlier kernel wrote or still reads may be touched
// before wait_for_earlier_kernels.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_later_kernels_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

} // namespace bsh
