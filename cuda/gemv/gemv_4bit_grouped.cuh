// gemv_4bit_grouped.cuh - the kernel of gemv_4bit_grouped.cu, which says how it works, and of
// gemv_4bit_grouped_short.cu.
#pragma once

#include "cuda/sizes/gemv_4bit_grouped.h"

#include "cuda/schedulers/experts.cuh"
#include "cuda/gemv/gemv_4bit.cuh"

namespace bsh {
namespace {

// The product of one expert with `rows` rows of x from `first` on.
template <typename T>
__device__ __forceinline__ bsh_fused_args of_expert(const bsh_grouped_gemv_args &all, int expert, int first, int rows) {
  bsh_fused_args args = all.rows;
  args.packed += expert * all.expert_bytes;
  if (args.absmax) args.absmax += (int64_t)expert * all.expert_blocks;
  else {
    args.absmax_code += (int64_t)expert * all.expert_blocks;
    args.absmax2 += (int64_t)expert * all.expert_scales2;
    args.offset += expert;
  }
  args.x = static_cast<const T *>(args.x) + first * args.ldx;
  args.y = static_cast<T *>(args.y) + first * args.ldy;
  if (args.bias) args.bias = static_cast<const T *>(args.bias) + (int64_t)expert * args.N;
  args.M = rows;
  return args;
}

// Where the sums of a segment wait for its next part of K: in the upper halves of the table's rows.
template <int TOKEN_TILES> struct waiting_sums {
  static constexpr int WORDS = TABLE_ROW / 8; // of a row's upper half
  static constexpr int TILES = 256 * WORDS / (TOKEN_TILES * 128);
  float *upper;
  __device__ __forceinline__ explicit waiting_sums(char *table)
      : upper(reinterpret_cast<float *>(table + TABLE_ROW / 2)) {}
  __device__ __forceinline__ float &at(int i) const { return upper[i / WORDS * (TABLE_ROW / 4) + i % WORDS]; }
};

// What becomes of an element's sums of one part of K: those of all parts are added in their order, by one thread.
template <typename T, int TOKEN_TILES> struct add_parts {
  waiting_sums<TOKEN_TILES> sums;
  __device__ __forceinline__ void operator()(const bsh_fused_args &args, const place &p, int tile, int e,
                                             const float *from) const {
    float sum = sum_of_warps<TOKEN_TILES>(args, from);
    float &waiting = sums.at((tile - p.tile_begin) * (TOKEN_TILES * 128) + e);
    if (p.split > 0) sum = waiting + sum;
    if (p.split + 1 == args.cut.k_splits) store_sum<T>{args}(element(tile, 0, e), sum);
    else waiting = sum;
  }
};

template <typename T, int TOKEN_TILES, int UNITS, scale_kind KIND>
__device__ __forceinline__ void multiply_segment(const bsh_fused_args &args, const place &p, const gemv_memory &shared,
                                                 int &half) {
  using codes = codes_4bit<T, TOKEN_TILES, UNITS, KIND>;
  const typename codes::loader stream(args, p, shared.ring);
  stream.begin(p);
  codes w(args, p, shared.map, args.absmax == nullptr ? *args.offset : 0.f);
  uint32_t x[UNITS][TOKEN_TILES][8];
  load_x<TOKEN_TILES, UNITS>(x, args, p);
  w.begin(p, shared);
  const add_parts<T, TOKEN_TILES> add{waiting_sums<TOKEN_TILES>(shared.table)};
  half = multiply_tiles<codes, TOKEN_TILES>(args, p, shared.sums, stream, w, x, half, add);
}

template <typename T, int TOKEN_TILES, int UNITS, scale_kind KIND>
__device__ __forceinline__ void gemv_grouped(const bsh_grouped_gemv_args &args) {
  constexpr int TOKENS = TOKEN_TILES * 8;
  static_assert(BSH_MAP_BYTES + bsh_gemv_sums_bytes(ARCH, TOKEN_TILES) <= BSH_GROUPED_ENDS_AT, "the sums end below");
  extern __shared__ __align__(1024) char memory[];
  const gemv_memory shared = memory_of<TOKEN_TILES>(memory);
  const expert_rows of(shared_address(memory) + BSH_GROUPED_ENDS_AT, args.experts);
  const int tiles = args.rows.N / BSH_ROW_TILE;
  build_table<T>(shared.table, args.rows.format);
  wait_for_earlier_kernels();
  let_later_kernels_start();
  if (threadIdx.x < BSH_WARP) of.fill(args.offs, args.rows.M, groups_of<TOKENS>());
  if constexpr (SHORT<KIND>) check_map<KIND>(shared.map, args.rows.absmax_map);
  else if (args.rows.absmax == nullptr)
    for (int i = threadIdx.x; i < 256; i += blockDim.x) shared.map[i] = args.rows.absmax_map[i];
  __syncthreads();
  clear_rows<T>(args.rows.y, args.rows.ldy, args.rows.N, of.end(args.experts - 1), args.rows.M);

  const int parts = args.rows.cut.k_splits;
  const int most_tiles = parts == 1 ? tiles : waiting_sums<TOKEN_TILES>::TILES;
  place p;
  p.lane = threadIdx.x & 31, p.warp = threadIdx.x >> 5, p.g = p.lane >> 2, p.c = p.lane & 3;
  p.row_groups = args.rows.cut.row_groups;
  p.group = p.warp * args.rows.cut.group_of_warp >> 16;
  const int64_t all = (int64_t)of.start(args.experts) * tiles; // below 2^31
  int at = all * blockIdx.x / gridDim.x, half = 0;
  const int end = all * (blockIdx.x + 1) / gridDim.x;
  while (at < end) {
    const int group = at / tiles;
    p.tile_begin = at - group * tiles;
    p.tile_end = min(tiles, p.tile_begin + min(end - at, most_tiles));
    p.steps = (p.tile_end - p.tile_begin + p.row_groups - 1) / p.row_groups;
    at += p.tile_end - p.tile_begin;
    const int expert = of.of_group(group);
    const int first = of.begin(expert) + (group - of.start(expert)) * TOKENS;
    const bsh_fused_args own = of_expert<T>(args, expert, first, min(TOKENS, of.end(expert) - first));
    for (p.split = 0; p.split < parts; p.split++) {
      p.first_unit = (p.split * args.rows.cut.k_warps + p.warp - p.group * args.rows.cut.k_warps) * UNITS;
      multiply_segment<T, TOKEN_TILES, UNITS, KIND>(own, p, shared, half);
    }
  }
}

} // namespace
} // namespace bsh

// The host launches these on code for sm_90 to sm_119 only.
#define BSH_GEMV_4BIT_GROUPED(T, NAME, TOKEN_TILES, UNITS, KIND)                                                       \
  extern "C" __global__ void __launch_bounds__(bsh::WARPS * 32, 1)                                                     \
      NAME(const __grid_constant__ bsh_grouped_gemv_args args) {                                                       \
    if constexpr (bsh::WIDE) bsh::gemv_grouped<T, TOKEN_TILES, UNITS, bsh::KIND>(args);                                \
    else __trap();                                                                                                     \
  }
