// decode.cuh - 4-bit codes to tensor-core operands, and the few PTX words the fused linear kernels share.
//
// One packed byte holds the elements (k, k + 1), k even, so one byte is one 32-bit mma operand register. It is decoded
// by one shared-memory load from a table of 256 pairs that has one copy per bank: lane l reads word l of row `byte`,
// never a bank conflict. The operands are the format's 16 values rounded to T; block scales are applied in fp32 to the
// sums.
#pragma once

#include "common.cuh"
#include "fused.h"

namespace bsh {

#if defined(__CUDA_ARCH__)
constexpr int ARCH = __CUDA_ARCH__ / 10; // 10 * major + minor
#else
constexpr int ARCH = 0;
#endif
constexpr bool WIDE = bsh_is_wide(ARCH);
constexpr int TABLE_ROW = bsh_table_row(ARCH);

__device__ __forceinline__ uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

// Where the table and the rings begin in shared memory (WIDE).
__device__ __forceinline__ char *wide_table(char *memory) {
  return memory + (BSH_WIDE_TABLE_AT - (shared_address(memory) & (BSH_WIDE_TABLE_AT - 1)));
}
__device__ __forceinline__ char *wide_ring(char *table) { return table + (BSH_WIDE_RING_AT - BSH_WIDE_TABLE_AT); }

// T pairs and the m16n8k16 product, fp32 accumulators.
template <typename T> struct number;

template <> struct number<__nv_bfloat16> {
  static __device__ __forceinline__ uint32_t pair(float low, float high) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&v);
  }
  static __device__ __forceinline__ __nv_bfloat16 round(float v) { return __float2bfloat16_rn(v); }
  static __device__ __forceinline__ float widen(__nv_bfloat16 v) { return __bfloat162float(v); }
  static __device__ __forceinline__ void mma(float *d, const uint32_t *a, uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    __trap(); // no bf16 tensor cores before sm_80: the host does not launch this
#endif
  }
};

template <> struct number<__half> {
  static __device__ __forceinline__ uint32_t pair(float low, float high) {
    const __half2 v = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&v);
  }
  static __device__ __forceinline__ __half round(float v) { return __float2half_rn(v); }
  static __device__ __forceinline__ float widen(__half v) { return __half2float(v); }
  static __device__ __forceinline__ void mma(float *d, const uint32_t *a, uint32_t b0, uint32_t b1) {
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
};

// The format's value of `code`, from immediates: a table in memory would cost a cold miss.
__device__ __forceinline__ float pick(int code, float v0, float v1, float v2, float v3, float v4, float v5, float v6,
                                      float v7, float v8, float v9, float v10, float v11, float v12, float v13,
                                      float v14, float v15) {
  const bool b0 = code & 1, b1 = code & 2, b2 = code & 4, b3 = code & 8;
  const float w0 = b0 ? v1 : v0, w1 = b0 ? v3 : v2, w2 = b0 ? v5 : v4, w3 = b0 ? v7 : v6;
  const float w4 = b0 ? v9 : v8, w5 = b0 ? v11 : v10, w6 = b0 ? v13 : v12, w7 = b0 ? v15 : v14;
  const float u0 = b1 ? w1 : w0, u1 = b1 ? w3 : w2, u2 = b1 ? w5 : w4, u3 = b1 ? w7 : w6;
  const float t0 = b2 ? u1 : u0, t1 = b2 ? u3 : u2;
  return b3 ? t1 : t0;
}
__device__ __forceinline__ float code_value(int format, int code) {
  return format == BSH_FP4 ? pick(code, BSH_FP4_VALUES) : pick(code, BSH_NF4_VALUES);
}

// Fills the pair table; all warps of the block, then a barrier by the caller.
template <typename T> __device__ __forceinline__ void build_table(char *table, int format) {
  const float value = code_value(format, threadIdx.x & 15);
  for (int i = threadIdx.x; i < 256 * 8; i += blockDim.x) {
    const int byte = i >> 3; // blockDim is a multiple of 32: whole warps take part in the shuffles
    const float first = __shfl_sync(~0u, value, byte >> 4), second = __shfl_sync(~0u, value, byte & 15);
    const uint32_t pair = number<T>::pair(first, second);
    *reinterpret_cast<uint4 *>(table + byte * TABLE_ROW + (i & 7) * 16) = make_uint4(pair, pair, pair, pair);
  }
}

// pair = the operand register of byte I of `word`. lane_base: shared address of the table + 4 * lane. SOME: only where
// `wanted`, else what is there stays.
template <int I, bool SOME>
__device__ __forceinline__ void decode(uint32_t &pair, uint32_t word, uint32_t lane_base, bool wanted) {
  uint32_t address;
  if (WIDE) address = __byte_perm(word, lane_base, 0x7604 | (I << 4));
  else address = lane_base + ((I == 0 ? word << 7 : word >> (8 * I - 7)) & 0x7F80);
  if (SOME)
    asm("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p ld.shared.u32 %0, [%1];\n}"
        : "+r"(pair)
        : "r"(address), "r"((uint32_t)wanted));
  else asm("ld.shared.u32 %0, [%1];" : "=r"(pair) : "r"(address));
}

// 8 bytes at a shared address; ordinary memory to the compiler, so the waits for asynchronous copies order it.
__device__ __forceinline__ uint2 load_shared(uint32_t address) {
  return *reinterpret_cast<const uint2 *>(__cvta_shared_to_generic(address));
}
__device__ __forceinline__ void store_shared(uint32_t address, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, const float *v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
               : "memory");
}

// A operands of the four k16 steps of a unit: lane (g, c) of a quad holds bytes 8c..8c+7 of rows g (`upper`) and g + 8
// (`lower`). The order of k inside a unit is then 16c + 4 * step + {0, 1, 2, 3}: x is loaded in the same order.
template <bool SOME = false>
__device__ __forceinline__ void decode_unit(uint32_t (*a)[4], uint2 upper, uint2 lower, uint32_t lane_base,
                                            bool wanted = true) {
#pragma unroll
  for (int k = 0; k < 4; k += 2) {
    const uint32_t u = k ? upper.y : upper.x, l = k ? lower.y : lower.x;
    decode<0, SOME>(a[k][0], u, lane_base, wanted), decode<0, SOME>(a[k][1], l, lane_base, wanted);
    decode<1, SOME>(a[k][2], u, lane_base, wanted), decode<1, SOME>(a[k][3], l, lane_base, wanted);
    decode<2, SOME>(a[k + 1][0], u, lane_base, wanted), decode<2, SOME>(a[k + 1][1], l, lane_base, wanted);
    decode<3, SOME>(a[k + 1][2], u, lane_base, wanted), decode<3, SOME>(a[k + 1][3], l, lane_base, wanted);
  }
}

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

// 16 bytes global to shared without passing registers (sm_80 on; before it, through registers).
__device__ __forceinline__ void copy16(uint32_t to, const void *from) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#else
  const uint4 v = __ldg(reinterpret_cast<const uint4 *>(from));
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
#endif
}
__device__ __forceinline__ void copy_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int PENDING> __device__ __forceinline__ void copy_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// A hint without a result, used before wait_for_earlier_kernels: the weight itself may come from the kernel before (an
// all-gather) and is read only after the wait. L2 is where all writers of this device's memory meet, so a line
// prefetched before an earlier kernel writes it is still right when it is read.
__device__ __forceinline__ void prefetch_l2(const void *p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// scale[b] of a nested or plain 4-bit tensor; the map may lie in shared memory.
__device__ __forceinline__ float nested_scale(const float *map, uint32_t code, float absmax2, float offset) {
  return __fadd_rn(__fmul_rn(map[code], absmax2), offset);
}

} // namespace bsh
