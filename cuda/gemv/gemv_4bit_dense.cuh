// gemv_4bit_dense.cuh - the kernel of gemv_4bit.cu, which says how it works, and of gemv_4bit_short.cu.
#pragma once

#include "cuda/gemv/gemv_4bit.cuh"

namespace bsh {
namespace {

template <typename T, int TOKEN_TILES, int UNITS, scale_kind KIND>
__device__ __forceinline__ void gemv(const bsh_fused_args &args) {
  using codes = codes_4bit<T, TOKEN_TILES, UNITS, KIND>;
  extern __shared__ __align__(1024) char memory[];
  const gemv_memory shared = memory_of<TOKEN_TILES>(memory);
  const place p = find_place<UNITS>(args);

  // Before the wait: constants, and hints about what will be read.
  const typename codes::loader stream(args, p, shared.ring);
  stream.prefetch(p);
  build_table<T>(shared.table, args.format);
  wait_for_earlier_kernels();
  let_later_kernels_start();

  stream.begin(p);
  const float map_value = !SHORT<KIND> && args.absmax == nullptr ? args.absmax_map[threadIdx.x & 255] : 0.f;
  codes w(args, p, shared.map, args.absmax == nullptr ? *args.offset : 0.f);
  uint32_t x[UNITS][TOKEN_TILES][8];
  load_x<TOKEN_TILES, UNITS>(x, args, p);
  if constexpr (SHORT<KIND>) check_map<KIND>(shared.map, args.absmax_map);
  else {
    if (threadIdx.x < 256) shared.map[threadIdx.x] = map_value;
    if (args.absmax == nullptr)
      for (int i = threadIdx.x + blockDim.x; i < 256; i += blockDim.x) shared.map[i] = args.absmax_map[i];
  }
  __syncthreads();
  w.begin(p, shared);

  multiply_tiles<codes, TOKEN_TILES>(args, p, shared.sums, stream, w, x, 0, hand_on<TOKEN_TILES, store_sum<T>>{});
  join_cluster<TOKEN_TILES, store_sum<T>>(args, p);
}

} // namespace
} // namespace bsh

// The host starts m32 with kernels for sm_80 to sm_89 and sm_120 only: elsewhere its body would only cost compile time.
#define BSH_GEMV_4BIT(T, NAME, TOKEN_TILES, UNITS, KIND)                                                               \
  extern "C" __global__ void __launch_bounds__(bsh::WARPS * 32, 1) NAME(const __grid_constant__ bsh_fused_args args) { \
    if constexpr (TOKEN_TILES < 4 || (bsh::ARCH >= 80 && !bsh::WIDE))                                                  \
      bsh::gemv<T, TOKEN_TILES, UNITS, bsh::KIND>(args);                                                               \
    else __trap();                                                                                                     \
  }
