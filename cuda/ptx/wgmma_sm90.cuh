// wgmma_sm90.cuh - wgmma of 64, 128, 192 and 256 columns: A from registers, B from shared memory.
#pragma once

#include "cuda/ptx/ptx_sm90.cuh"

namespace bsh {

// The descriptor of a K-major tile with 128-byte swizzle, groups of 8 rows 1024 bytes apart. Above bit 18, a shared
// address says which block of the cluster.
__device__ __forceinline__ uint64_t wgmma_descriptor_64(uint32_t address) {
  return (uint64_t)WGMMA_DESCRIPTOR_HIGH << 32 | wgmma_descriptor(address);
}

// d[64 x N] += a[64 x 16, 16 rows a warp] b[16 x N]; without ADD d = a b.
template <typename T, int N> struct wgmma_rs;
#define BSH_D32(i) BSH_D16(i), BSH_D16(i + 16)
#define BSH_LIST_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define BSH_LIST_32 BSH_LIST_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define BSH_LIST_48 BSH_LIST_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define BSH_D64(i) BSH_D16(i), BSH_D16(i + 16), BSH_D16(i + 32), BSH_D16(i + 48)
#define BSH_LIST_64 BSH_LIST_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define BSH_LIST_96                                                                                                    \
  BSH_LIST_64                                                                                                          \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90"       \
  ",%91,%92,%93,%94,%95"
#define BSH_LIST_128                                                                                                   \
  BSH_LIST_96                                                                                                          \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117"         \
  ",%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define BSH_WGMMA_RS(TYPE, PTX, N, D_LIST, A0, A1, A2, A3, B, ADDS, ...)                                               \
  template <> struct wgmma_rs<TYPE, N> {                                                                               \
    template <bool ADD = true>                                                                                         \
    static __device__ __forceinline__ void mma_async(float *d, const uint32_t *a, uint64_t b) {                        \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." PTX "." PTX " {" D_LIST "}, {%" A0 ",%" A1        \
                   ",%" A2 ",%" A3 "}, %" B ", %" ADDS ", 1, 1, 0;"                                                    \
                   : __VA_ARGS__                                                                                       \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ADD));                                    \
    }                                                                                                                  \
  };
#define BSH_WGMMA_RS_SIZES(TYPE, PTX)                                                                                  \
  BSH_WGMMA_RS(TYPE, PTX, 64, BSH_LIST_32, "32", "33", "34", "35", "36", "37", BSH_D32(0))                             \
  BSH_WGMMA_RS(TYPE, PTX, 128, BSH_LIST_64, "64", "65", "66", "67", "68", "69", BSH_D64(0))                            \
  BSH_WGMMA_RS(TYPE, PTX, 192, BSH_LIST_96, "96", "97", "98", "99", "100", "101", BSH_D64(0), BSH_D16(64),             \
               BSH_D16(80))                                                                                            \
  BSH_WGMMA_RS(TYPE, PTX, 256, BSH_LIST_128, "128", "129", "130", "131", "132", "133", BSH_D64(0), BSH_D64(64))
BSH_WGMMA_RS_SIZES(__nv_bfloat16, "bf16")
BSH_WGMMA_RS_SIZES(__half, "f16")

// Waits until at most PENDING groups run.
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

} // namespace bsh
