// ptx.cuh - one function for each instruction that C++ has no word for: shared memory, asynchronous copies, mma.
#pragma once

#include "cuda/numerics/common.cuh"

namespace bsh {

#if defined(__CUDA_ARCH__)
constexpr int ARCH = __CUDA_ARCH__ / 10; // 10 * major + minor
#else
constexpr int ARCH = 0;
#endif

// The value itself, of unknown origin to the compiler: it stays in a register instead of being computed again in a
// loop.
__device__ __forceinline__ uint32_t keep(uint32_t v) {
  asm volatile("" : "+r"(v));
  return v;
}
template <typename P> __device__ __forceinline__ P *keep(P *p) {
  asm volatile("" : "+l"(p));
  return p;
}

// ---- shared memory ----

__device__ __forceinline__ uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

// 8 bytes at a shared address; ordinary memory to the compiler, so the waits for asynchronous copies order it.
__device__ __forceinline__ uint2 ld_shared(uint32_t address) {
  return *reinterpret_cast<const uint2 *>(__cvta_shared_to_generic(address));
}
__device__ __forceinline__ uint4 ld_shared_uint4(uint32_t address) {
  return *reinterpret_cast<const uint4 *>(__cvta_shared_to_generic(address));
}
__device__ __forceinline__ void st_shared(uint32_t address, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
__device__ __forceinline__ uint32_t ld_shared_4(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ void st_shared(uint32_t address, const float *v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
               : "memory");
}

// ---- copies ----

// 16 bytes global to shared without passing registers (sm_80 on; before it, through registers).
__device__ __forceinline__ void cp_async_16(uint32_t to, const void *from) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#else
  const uint4 v = __ldg(reinterpret_cast<const uint4 *>(from));
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
#endif
}
__device__ __forceinline__ void cp_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int PENDING> __device__ __forceinline__ void cp_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// A hint without a result, used before wait_for_earlier_kernels: the weight itself may come from the kernel before (an
// all-gather) and is read only after the wait. L2 is where all writers of this device's memory meet, so a line
// prefetched before an earlier kernel writes it is still right when it is read.
__device__ __forceinline__ void prefetch_l2(const void *p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Matrices of 8 x 8 16-bit units: lane l gives the address of row l % 8 of matrix l / 8, and v[i] gets units 2 (l % 4)
// and the next one of row l / 4 of matrix i.
__device__ __forceinline__ void ldmatrix_x4(uint32_t *v, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(address)
               : "memory");
}
// The same of the transposed matrices.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t *v, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(address)
               : "memory");
}

// ---- words that blocks share ----

// Adds 1 for a warp, after all that it wrote before; what was there in lane 0, 0 in the others.
__device__ __forceinline__ uint32_t count_acq_rel(uint32_t *counter, uint32_t lane) {
  uint32_t before = 0;
  asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, %2, 0;\n@p atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;\n}"
               : "+r"(before)
               : "l"(counter), "r"(lane)
               : "memory");
  return before;
}
__device__ __forceinline__ uint32_t load_acquire(const uint32_t *counter) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}
// All that this warp wrote before, then `value`, for other blocks.
__device__ __forceinline__ void store_release(uint32_t *flag, uint32_t value) {
  asm volatile("fence.acq_rel.gpu;\nst.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
// One thread: the word's value before, behind all that this thread and those it has met wrote before.
__device__ __forceinline__ uint32_t or_acq_rel(uint32_t *word, uint32_t bits) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.or.b32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(bits) : "memory");
  return before;
}

// ---- clusters ----

// All threads of the cluster; what they wrote before is seen by all after it.
__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// ---- products ----

// d[16 x 8] += a[16 x 16] b[16 x 8], a and b of T, d fp32. Lane (g, c) = (lane / 4, lane % 4) holds of d rows g, g, g +
// 8, g + 8 and columns 2c, 2c + 1, 2c, 2c + 1.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float *d, const uint32_t *a, uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float *d, const uint32_t *a, uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  __trap(); // no bf16 tensor cores before sm_80: the host does not launch this
#endif
}
template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float *d, const uint32_t *a, uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  // sm_75: the same product as two m16n8k8 halves of k.
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b0));
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

} // namespace bsh
