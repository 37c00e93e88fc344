// calibration.cu - scales and codes of calibration (docs/calibration.md), the bits of cpu/scalar_calibration.c.
//
//   search_4bit   a warp a block of weights, a lane a scale: each adds its errors in the order of the elements
//   round_4bit    a thread a row of a panel, which is in its registers
//
// Products and sums are rounded one by one. Host side: csrc/gpu/calibration.c.
#include "cuda/sizes/calibration.h"

#include "cuda/ptx/ptx.cuh"

namespace bsh {

constexpr int COLUMNS = BSH_ROUND_COLUMNS;

__device__ __forceinline__ float inverse_scale(float scale) {
  return fabsf(scale) >= 1.17549435e-38f ? __fdiv_rn(1.0f, scale) : 0.0f;
}

__device__ __forceinline__ int encode_nf4(float v) {
  constexpr uint32_t thresholds[15] = {BSH_NF4_THRESHOLD_BITS};
  int code = 0;
#pragma unroll
  for (int i = 0; i < 15; i++) code += v > __uint_as_float(thresholds[i]);
  return code;
}

// FP4 and E2M1: magnitudes with a sign.
template <bsh_format FORMAT> __device__ __forceinline__ int encode_magnitude(float v) {
  constexpr uint32_t thresholds[2][7] = {{BSH_FP4_THRESHOLD_BITS}, {BSH_E2M1_THRESHOLD_BITS}};
  constexpr uint64_t orders[2][8] = {{BSH_FP4_ORDER}, {BSH_E2M1_ORDER}};
  constexpr int WHICH = FORMAT == BSH_FP4 ? 0 : 1;
  uint64_t nibbles = 0; // known to the compiler
#pragma unroll
  for (int i = 0; i < 8; i++) nibbles |= orders[WHICH][i] << 4 * i;
  int rank = 0;
#pragma unroll
  for (int i = 0; i < 7; i++) rank += fabsf(v) > __uint_as_float(thresholds[WHICH][i]);
  return (int)(nibbles >> 4 * rank & 7) + (v < 0 ? 8 : 0);
}

template <bsh_format FORMAT> __device__ __forceinline__ int encode(float v) {
  return FORMAT == BSH_NF4 ? encode_nf4(v) : encode_magnitude<FORMAT>(v);
}

// Of all lanes the least sum, of equal ones that of the lower scale; a NaN is never less. Returns the scale's number.
__device__ __forceinline__ int least_of_warp(float least, int choice) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(ALL_LANES, least, step);
    const int others = __shfl_xor_sync(ALL_LANES, choice, step);
    if (other < least || (other == least && others < choice)) least = other, choice = others;
  }
  return choice;
}

// ---- search_4bit ----------------------------------------------------------------------------------------------------

template <bsh_format FORMAT> __device__ __forceinline__ void search_4bit(const bsh_search_4bit_args &a) {
  __shared__ float units[16];
  if (threadIdx.x < 16) units[threadIdx.x] = VALUES[FORMAT][threadIdx.x];
  __syncthreads();
  const int64_t block = (int64_t)blockIdx.x * BSH_SEARCH_WARPS + threadIdx.x / 32;
  const int64_t begin = block * a.blocksize, end = min(begin + a.blocksize, a.n);
  if (begin >= a.n) return;
  float least = INFINITY;
  int choice = 0;
  for (int64_t first = 0; first < a.G; first += 32) {
    const int64_t g = first + threadIdx.x % 32;
    const float scale = g < a.G ? a.scales[block * a.G + g] : 0.0f, inverse = inverse_scale(scale);
    float sum = 0;
    int64_t weight = begin % a.period;
    for (int64_t i = begin; i < end; i++) {
      const float x = a.x[i];
      const float error = __fsub_rn(x, __fmul_rn(units[encode<FORMAT>(__fmul_rn(x, inverse))], scale));
      sum = __fadd_rn(sum, __fmul_rn(a.weights[weight], __fmul_rn(error, error)));
      if (++weight == a.period) weight = 0;
    }
    if (g < a.G && sum < least) least = sum, choice = (int)g;
  }
  choice = least_of_warp(least, choice);
  if (threadIdx.x % 32 == 0) a.choice[block] = (uint8_t)choice;
}

// ---- round_4bit -----------------------------------------------------------------------------------------------------

// u [COLUMNS, COLUMNS] and 1 / u[j, j]; beyond P zeros and ones.
struct panel {
  float u[COLUMNS][COLUMNS], inverse[COLUMNS], units[16];
};

template <bsh_format FORMAT> __device__ __forceinline__ void load_panel(const bsh_round_4bit_args &a, panel &shared) {
  for (int i = threadIdx.x; i < COLUMNS * COLUMNS; i += blockDim.x) {
    const int j = i / COLUMNS, k = i % COLUMNS;
    shared.u[j][k] = j < a.P && k < a.P ? a.u[j * a.P + k] : 0.0f;
  }
  for (int j = threadIdx.x; j < COLUMNS; j += blockDim.x)
    shared.inverse[j] = j < a.P ? __fdiv_rn(1.0f, a.u[j * a.P + j]) : 1.0f;
  if (threadIdx.x < 16) shared.units[threadIdx.x] = VALUES[FORMAT][threadIdx.x];
  __syncthreads();
}

template <bsh_format FORMAT> __device__ __forceinline__ void round_4bit(const bsh_round_4bit_args &a) {
  __shared__ panel shared;
  load_panel<FORMAT>(a, shared);
  const int64_t row = (int64_t)blockIdx.x * BSH_ROUND_THREADS + threadIdx.x;
  if (row >= a.N) return;
  const uint32_t u = shared_address(shared.u); // read by instructions: ordinary loads give the same code, and take nvcc
                                               // six times as long
  float w[COLUMNS];
#pragma unroll
  for (int j = 0; j < COLUMNS; j++) w[j] = j < a.P ? a.w[row * a.P + j] : 0.0f;
#pragma unroll
  for (int j = 0; j < COLUMNS; j++) {
    const float scale = j < a.P ? a.scales[row * a.P + j] : 0.0f;
    const int code = encode<FORMAT>(__fmul_rn(w[j], inverse_scale(scale)));
    const float error = __fmul_rn(__fsub_rn(w[j], __fmul_rn(shared.units[code], scale)), shared.inverse[j]);
#pragma unroll
    for (int k = j + 1; k < COLUMNS; k++)
      w[k] = __fsub_rn(w[k], __fmul_rn(error, __uint_as_float(ld_shared_4(u + 4 * (j * COLUMNS + k)))));
    if (j >= a.P) continue;
    a.errors[row * a.P + j] = error;
    a.codes[row * a.P + j] = (uint8_t)code;
  }
}

} // namespace bsh

#define SEARCH(name, format)                                                                                           \
  extern "C" __global__ void __launch_bounds__(32 * BSH_SEARCH_WARPS)                                                  \
      search_4bit_##name(const __grid_constant__ bsh_search_4bit_args args) {                                          \
    bsh::search_4bit<format>(args);                                                                                    \
  }
#define ROUND(name, format)                                                                                            \
  extern "C" __global__ void __launch_bounds__(BSH_ROUND_THREADS)                                                      \
      round_4bit_##name(const __grid_constant__ bsh_round_4bit_args args) {                                            \
    bsh::round_4bit<format>(args);                                                                                     \
  }
SEARCH(nf4, BSH_NF4)
SEARCH(fp4, BSH_FP4)
SEARCH(e2m1, BSH_E2M1)
ROUND(nf4, BSH_NF4)
ROUND(fp4, BSH_FP4)
ROUND(e2m1, BSH_E2M1)
