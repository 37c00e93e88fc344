// ptx_sm75.cuh - what gemm_4bit_sm75.cu has in the place of instructions of sm_80, in the order of the source as those
// of ptx_sm80.cuh.
#pragma once

#include "cuda/ptx/ptx_sm80.cuh"

namespace bsh {

// d[16 x 8] += a[16 x 8] b[8 x 8]: half of the depth of m16n8k16.
__device__ __forceinline__ void mma_m16n8k8(float *d, const uint32_t *a, uint32_t b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(b));
}

// 16 bytes, or zeros; volatile: not put off until they are needed.
__device__ __forceinline__ void load_16_or_zero(uint32_t *v, const void *from, bool there) {
  asm volatile("{ .reg .pred p; setp.ne.s32 p, %5, 0;\n"
               "mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;\n"
               "@p ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4]; }"
               : "=&r"(v[0]), "=&r"(v[1]), "=&r"(v[2]), "=&r"(v[3])
               : "l"(from), "r"((int)there));
}

} // namespace bsh
