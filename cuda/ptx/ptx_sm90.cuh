// ptx_sm90.cuh - one function for each instruction of sm_90a: barriers in shared memory, bulk copies, wgmma.
#pragma once

#include "cuda/ptx/ptx.cuh"

namespace bsh {

// ---- barriers and copies of the asynchronous proxy ----

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
               "@!done bra again;\n}" ::"r"(barrier),
               "r"(parity)
               : "memory");
}
// Announces `bytes` bytes; the barrier completes when they have arrived. Only where `wanted`, without a branch: behind
// one that lanes may take differently, the compiler gives up uniform registers, in which the products want addresses.
__device__ __forceinline__ void mbarrier_expect(uint32_t barrier, uint32_t bytes, bool wanted) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n"
               "@p mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;\n}" ::"r"(barrier),
               "r"(bytes), "r"((uint32_t)wanted)
               : "memory");
}
__device__ __forceinline__ void cp_async_bulk(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier,
                                              bool wanted) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %4, 0;\n"
      "@p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n}" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "r"((uint32_t)wanted)
      : "memory");
}

__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// What this thread wrote to shared memory is seen by the asynchronous proxy, through which wgmma reads.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- between warps and between blocks of threads ----

// Barrier `id` of the block, for `threads` threads of it.
template <int THREADS> __device__ __forceinline__ void named_barrier(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}
// Counts as having come there, and goes on.
template <int THREADS> __device__ __forceinline__ void named_barrier_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}
// ---- wgmma ----

// The descriptor of x in shared memory: rows of 128 bytes with 128-byte swizzle, groups of 8 rows 1024 bytes apart.
constexpr uint32_t WGMMA_DESCRIPTOR_HIGH = 1u << 30 | 1024 >> 4;
__device__ __forceinline__ uint32_t wgmma_descriptor(uint32_t address) { return 1u << 16 | (address & 0x3FFFF) >> 4; }

// d[64 rows of W x N tokens] (+)= a (16 rows a warp) * x. b: low word of the descriptor of the x operand.
template <typename T, int N> struct wgmma;
#define BSH_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define BSH_D16(i) BSH_D4(i), BSH_D4(i + 4), BSH_D4(i + 8), BSH_D4(i + 12)
#define BSH_WGMMA(TYPE, PTX, N, D_LIST, D_OPERANDS, A0, A1, A2, A3, B, P, B_HIGH)                                      \
  template <> struct wgmma<TYPE, N> {                                                                                  \
    static __device__ __forceinline__ void mma_async(float *d, const uint32_t *a, uint32_t b, int accumulate) {        \
      asm volatile("{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %" P ", 0;\nmov.b64 b, {%" B ", %" B_HIGH "};\n"    \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." PTX "." PTX " {" D_LIST "}, {%" A0 ",%" A1        \
                   ",%" A2 ",%" A3 "}, b, p, 1, 1, 0;\n}"                                                              \
                   : D_OPERANDS                                                                                        \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate), "n"(WGMMA_DESCRIPTOR_HIGH)); \
    }                                                                                                                  \
  };
#define BSH_WGMMA_SIZES(TYPE, PTX)                                                                                     \
  BSH_WGMMA(TYPE, PTX, 16, "%0,%1,%2,%3,%4,%5,%6,%7", BSH_D4(0) BSH_COMMA BSH_D4(4), "8", "9", "10", "11", "12", "13", \
            "14")                                                                                                      \
  BSH_WGMMA(TYPE, PTX, 32, "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15", BSH_D16(0), "16", "17", "18",      \
            "19", "20", "21", "22")                                                                                    \
  BSH_WGMMA(TYPE, PTX, 64,                                                                                             \
            "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"       \
            "%27,%28,%29,%30,%31",                                                                                     \
            BSH_D16(0) BSH_COMMA BSH_D16(16), "32", "33", "34", "35", "36", "37", "38")
#define BSH_COMMA ,
BSH_WGMMA_SIZES(__nv_bfloat16, "bf16")
BSH_WGMMA_SIZES(__half, "f16")

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most PENDING groups run; `d` of a finished one may be read after it.
template <int PENDING, int N> __device__ __forceinline__ void wgmma_wait(float *d) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

} // namespace bsh
