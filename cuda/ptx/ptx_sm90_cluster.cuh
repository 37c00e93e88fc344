// ptx_sm90_cluster.cuh - one function for each instruction of sm_90a by which blocks of a cluster work together: tensor
// copies, barriers of other blocks, registers given from warpgroup to warpgroup.
#pragma once

#include "cuda/ptx/ptx_sm90.cuh"
#include "core/tensor_map.h"

namespace bsh {

// A box from (column, row) of a matrix on, to this block; the barrier gets its bytes.
__device__ __forceinline__ void tensor_copy(uint32_t to, const bsh_tensor_map *map, int column, int row,
                                            uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          to),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}
// The same to the blocks of the cluster in `blocks`, one bit each: at the same place of each, and to the barrier there.
__device__ __forceinline__ void tensor_copy_to(uint32_t to, const bsh_tensor_map *map, int column, int row,
                                               uint32_t barrier, uint32_t blocks) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
               "l"(map), "r"(column), "r"(row), "r"(barrier), "h"((uint16_t)blocks)
               : "memory");
}
// A hint, as prefetch_l2, and as that allowed before wait_for_earlier_kernels.
__device__ __forceinline__ void tensor_prefetch_l2(const bsh_tensor_map *map, int column, int row) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(column), "r"(row));
}
__device__ __forceinline__ void prefetch_map(const bsh_tensor_map *map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// The address, as other blocks see it, of what lies at `address` in block `rank` of the cluster.
__device__ __forceinline__ uint32_t map_to_rank(uint32_t address, uint32_t rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// Plain, without release.cluster: that costs two MEMBARs, and what is ordered is an asynchronous read, finished before.
__device__ __forceinline__ void mbarrier_arrive_there(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void cluster_sync_aligned() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
// The same, and what was written before is not ordered, which takes MEMBAR: barriers are, by fence_mbarrier_init, and
// what was read has been used.
__device__ __forceinline__ void cluster_sync_aligned_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

template <int REGISTERS> __device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> __device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

__device__ __forceinline__ uint4 ld_shared_16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
// From another block of the cluster: an address of map_to_rank.
__device__ __forceinline__ uint4 ld_cluster_16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared::cluster.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
__device__ __forceinline__ void st_shared_16(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ uint2 ld_shared_8(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}
// d = a * b + c and a * b of two 16-bit floats each, rounded once.
template <typename T> __device__ __forceinline__ uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c);
template <typename T> __device__ __forceinline__ uint32_t mul_pair(uint32_t a, uint32_t b);
template <> __device__ __forceinline__ uint32_t fma_pair<__nv_bfloat16>(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t v;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(c));
  return v;
}
template <> __device__ __forceinline__ uint32_t fma_pair<__half>(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t v;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(c));
  return v;
}
template <> __device__ __forceinline__ uint32_t mul_pair<__nv_bfloat16>(uint32_t a, uint32_t b) {
  uint32_t v;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
  return v;
}
template <> __device__ __forceinline__ uint32_t mul_pair<__half>(uint32_t a, uint32_t b) {
  uint32_t v;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
  return v;
}

} // namespace bsh
