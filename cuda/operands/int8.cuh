// int8.cuh - arithmetic that the int8 kernels share: codes, sums to y, products of codes.
#pragma once

#include "cuda/sizes/int8.h"

#include "cuda/ptx/ptx.cuh"

namespace bsh {

constexpr float INVERSE_127 = BSH_INT8_UNIT;

constexpr uint32_t INFINITE = 0x7F800000u;

// Four low bytes, the first lowest.
__device__ __forceinline__ uint32_t pack_codes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x40), __byte_perm(c, d, 0x40), 0x5410);
}
// Of bits of magnitudes. NaN is no outlier.
__device__ __forceinline__ bool is_outlier(uint32_t magnitude, uint32_t threshold) {
  return magnitude >= threshold && magnitude <= INFINITE;
}

// Sums to y without outliers, two roundings, then an fma: bitsandbytes' order.
__device__ __forceinline__ float scale_sum(int sum, float row, float col, float bias) {
  return __fmaf_rn(__fmul_rn(__fmul_rn((float)sum, row), col), BSH_INT8_PRODUCT_SCALE, bias);
}
// With outliers: what is added to products of x with codes of W, and the whole to y.
__device__ __forceinline__ float sum_beside_outliers(int sum, float row) {
  return __fmul_rn(__fmul_rn((float)sum, row), BSH_INT8_PRODUCT_SCALE * 127.f);
}
__device__ __forceinline__ float scale_codes(float sum, float col, float bias) {
  return __fmaf_rn(sum, __fmul_rn(col, INVERSE_127), bias);
}

template <typename T> __device__ __forceinline__ float bias_of(const void *bias, int64_t n) {
  return bias == nullptr ? 0.f : to_float(__ldg(static_cast<const T *>(bias) + n));
}

// Four codes to two pairs of 16-bit floats, exactly: in the order of memory.
template <typename T> __device__ __forceinline__ void widen_codes(uint32_t codes, uint32_t *pairs);
template <> __device__ __forceinline__ void widen_codes<__half>(uint32_t codes, uint32_t *pairs) {
  // 0x64 in front of byte b is 1024 + b; b is the code + 128.
  const uint32_t biased = codes ^ 0x80808080u, less = 0x64806480u; // 1152
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t pair = __byte_perm(biased, 0x64646464u, i == 0 ? 0x4140 : 0x4342);
    const __half2 value = __hsub2(*reinterpret_cast<const __half2 *>(&pair), *reinterpret_cast<const __half2 *>(&less));
    pairs[i] = *reinterpret_cast<const uint32_t *>(&value);
  }
}
template <> __device__ __forceinline__ void widen_codes<__nv_bfloat16>(uint32_t codes, uint32_t *pairs) {
  // 0x43 in front of seven bits is 128 + these; a code is these less 128 where bit 7 is set: 0x4380 is 256.
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t pair = __byte_perm(codes, 0x43434343u, i == 0 ? 0x4140 : 0x4342);
    const uint32_t value = pair & 0xFF7FFF7Fu, less = pair & 0xFF80FF80u;
#if __CUDA_ARCH__ >= 800
    asm("fma.rn.bf16x2 %0, %1, %2, %3;"
        : "=r"(pairs[i])
        : "r"(less), "r"(0xBF80BF80u), "r"(value)); // less * -1 + value
#else
    pairs[i] = value - less; // not launched: no bf16 tensor cores
#endif
  }
}

// d[16 x 8] += a[16 x 32] b[32 x 8] of codes. Lane (g, c) holds of a bytes 4c.. and 16 + 4c.. of rows g and g + 8, of d
// what mma_m16n8k16 has.
__device__ __forceinline__ void mma_codes(int *d, const uint32_t *a, uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
#pragma unroll
  for (int i = 0; i < 4; i++) { // 8 rows by half of the depth
    int *const rows = d + i % 2 * 2;
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
        : "+r"(rows[0]), "+r"(rows[1])
        : "r"(a[i]), "r"(i < 2 ? b0 : b1));
  }
#endif
}

// Whether tensor cores of this architecture multiply T.
template <typename T> constexpr bool HAS_MMA = false;
template <> constexpr bool HAS_MMA<__half> = true;
template <> constexpr bool HAS_MMA<__nv_bfloat16> = ARCH >= 80;

} // namespace bsh
