// wgmma_codes_sm90.cuh - wgmma with both operands in shared memory: of int8 codes, and of 16 bits onto the same
// registers.
//
// Operands are K-major tiles with 128-byte swizzle, rows of 128 bytes: a descriptor is wgmma_descriptor_64's.
#pragma once

#include "cuda/ptx/wgmma_sm90.cuh"

namespace bsh {

#define BSH_I4(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#define BSH_I16(i) BSH_I4(i), BSH_I4(i + 4), BSH_I4(i + 8), BSH_I4(i + 12)
#define BSH_I32(i) BSH_I16(i), BSH_I16(i + 16)

// d[64 x N] += a[64 x 32] b[N x 32]^T of codes.
template <int N> struct wgmma_codes;
#define BSH_WGMMA_CODES(N, D_LIST, A, B, ...)                                                                          \
  template <> struct wgmma_codes<N> {                                                                                  \
    static __device__ __forceinline__ void mma_async(int *d, uint64_t a, uint64_t b) {                                 \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8.s8 {" D_LIST "}, %" A ", %" B ", 1;"             \
                   : __VA_ARGS__                                                                                       \
                   : "l"(a), "l"(b));                                                                                  \
    }                                                                                                                  \
  };
BSH_WGMMA_CODES(32, BSH_LIST_16, "16", "17", BSH_I16(0))
BSH_WGMMA_CODES(64, BSH_LIST_32, "32", "33", BSH_I32(0))
BSH_WGMMA_CODES(96, BSH_LIST_48, "48", "49", BSH_I32(0), BSH_I16(32))
BSH_WGMMA_CODES(128, BSH_LIST_64, "64", "65", BSH_I32(0), BSH_I32(32))
BSH_WGMMA_CODES(256, BSH_LIST_128, "128", "129", BSH_I32(0), BSH_I32(32), BSH_I32(64), BSH_I32(96))

// d[64 x N] += a[64 x 16] b[N x 16]^T of T.
template <typename T, int N> struct wgmma_ss;
#define BSH_WGMMA_SS(TYPE, PTX, N, D_LIST, A, B, ...)                                                                  \
  template <> struct wgmma_ss<TYPE, N> {                                                                               \
    static __device__ __forceinline__ void mma_async(float *d, uint64_t a, uint64_t b) {                               \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." PTX "." PTX " {" D_LIST "}, %" A ", %" B          \
                   ", 1, 1, 1, 0, 0;"                                                                                  \
                   : __VA_ARGS__                                                                                       \
                   : "l"(a), "l"(b));                                                                                  \
    }                                                                                                                  \
  };
#define BSH_WGMMA_SS_SIZES(TYPE, PTX)                                                                                  \
  BSH_WGMMA_SS(TYPE, PTX, 32, BSH_LIST_16, "16", "17", BSH_D16(0))                                                     \
  BSH_WGMMA_SS(TYPE, PTX, 64, BSH_LIST_32, "32", "33", BSH_D32(0))                                                     \
  BSH_WGMMA_SS(TYPE, PTX, 96, BSH_LIST_48, "48", "49", BSH_D32(0), BSH_D16(32))                                        \
  BSH_WGMMA_SS(TYPE, PTX, 128, BSH_LIST_64, "64", "65", BSH_D32(0), BSH_D32(32))                                       \
  BSH_WGMMA_SS(TYPE, PTX, 256, BSH_LIST_128, "128", "129", BSH_D32(0), BSH_D32(32), BSH_D32(64), BSH_D32(96))
BSH_WGMMA_SS_SIZES(__nv_bfloat16, "bf16")
BSH_WGMMA_SS_SIZES(__half, "f16")

} // namespace bsh
