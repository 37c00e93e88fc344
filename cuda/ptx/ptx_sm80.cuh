// ptx_sm80.cuh - instructions of sm_80 and later whose order is that of the source: they are volatile, so that a main
// loop can lay decoding between its products.
#pragma once

#include "cuda/ptx/ptx.cuh"

namespace bsh {

// The thread's index, read again each time: what is needed once a tile holds no register in the loop.
__device__ __forceinline__ int thread_index() {
  int t;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
  return t;
}
// As all lanes of the warp have it, and the compiler knows.
__device__ __forceinline__ int uniform(int v) { return __shfl_sync(~0u, v, 0); }
__device__ __forceinline__ uint32_t largest_of_warp(uint32_t v) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(~0u, v);
#else
#pragma unroll
  for (int step = 1; step < 32; step *= 2) v = max(v, __shfl_xor_sync(~0u, v, step));
  return v;
#endif
}

// To a whole register: what is loaded as an 8-bit type is masked again.
__device__ __forceinline__ uint32_t load_byte(const uint8_t *from) {
  uint32_t v;
  asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}
// 16 bytes global to shared, or zeros.
__device__ __forceinline__ void cp_async_16_or_zero(uint32_t to, const void *from, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void cp_async_4(uint32_t to, const void *from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void cp_async_8(uint32_t to, const void *from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void st_shared_vector(uint32_t address, const uint32_t *v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
               : "memory");
}

__device__ __forceinline__ uint32_t permute_in_order(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t d;
  asm volatile("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}
// Denormal products stay what they are.
__device__ __forceinline__ float multiply_in_order(float a, float b) {
  float d;
  asm volatile("mul.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}
__device__ __forceinline__ float multiply_flush_in_order(float a, float b) {
  float d;
  asm volatile("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

// pack_pair and mma_m16n8k16 in this order. PACK: rounds two fp32 to a word.
template <typename T> struct in_order;
#define BSH_IN_ORDER(TYPE, NAME, PACK)                                                                                 \
  template <> struct in_order<TYPE> {                                                                                  \
    static __device__ __forceinline__ uint32_t pack(float low, float high) {                                           \
      uint32_t d;                                                                                                      \
      asm volatile(PACK : "=r"(d) : "f"(high), "f"(low));                                                              \
      return d;                                                                                                        \
    }                                                                                                                  \
    static __device__ __forceinline__ void mma(float *d, const uint32_t *a, const uint32_t *b) {                       \
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME                                              \
                   ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                        \
                   : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                    \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                                \
    }                                                                                                                  \
  };
BSH_IN_ORDER(__nv_bfloat16, "bf16", "cvt.rn.bf16x2.f32 %0, %1, %2;")
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
BSH_IN_ORDER(__half, "f16", "cvt.rn.f16x2.f32 %0, %1, %2;")
#else
BSH_IN_ORDER(__half, "f16", "{ .reg .b16 l, h; cvt.rn.f16.f32 h, %1; cvt.rn.f16.f32 l, %2; mov.b32 %0, {l, h}; }")
#endif
#undef BSH_IN_ORDER

} // namespace bsh
