// gemv_4bit_scaled.cuh - the operand of gemv.cuh for MXFP4 and NVFP4: codes with the scales of their blocks
// (decode_short.cuh), whose sums get the second level.
//
// Where the second level is the same in all of a warp's units and rows, which it is but in weights put together of
// others, the sums of a piece are added up by the tensor cores and get it once; else those of each unit.
#pragma once

#include "cuda/gemv/gemv_4bit.cuh"
#include "cuda/operands/decode_short.cuh"

namespace bsh {
namespace {

// Of one row tile and a warp's units, rows g and g + 8: lane c of a quad has the blocks of unit c of each piece, and
// samples the second level, which changes at most once in a row's units. Fetched a tile ahead.
template <typename T, int PIECES, scale_kind KIND> struct short_scales {
  uint32_t raw[2][PIECES]; // of the next row tile
  float second[2];
  unit_factors factors[2][PIECES]; // of this one
  float scale[2];
  bool same;
  uint32_t at; // unit index in W of unit 0 of row g of this one
  uint32_t first, tile_units, eight_rows;
  int last; // unit of a row, from the warp's first one on

  __device__ __forceinline__ void locate(const bsh_fused_args &args, const place &p) {
    const int units = args.K / BSH_UNIT;
    tile_units = units * BSH_ROW_TILE, eight_rows = units * 8;
    first = keep(p.g * units + min(p.first_unit, units - 1));
    last = max(units - 1 - p.first_unit, 0);
  }
  __device__ __forceinline__ void fetch(const bsh_fused_args &args, int tile) {
    const int c = threadIdx.x & 3;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const uint32_t row = first + tile * tile_units + r * eight_rows;
#pragma unroll
      for (int i = 0; i < PIECES; i++)
        raw[r][i] = unit_scales<KIND>(args.absmax_code, row + min(i * BSH_PIECE_UNITS + c, last));
      const int sampled = PIECES == 1 ? c : c * 2 + (c == 3); // the first and the last are among them
      second[r] = args.absmax2[second_level<KIND>(row + min(sampled, last))];
    }
  }
  __device__ __forceinline__ void resolve(int tile, float verdict) {
    const int c = threadIdx.x & 3;
    bool equal = true;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      bool beyond = false;
#pragma unroll
      for (int i = 0; i < PIECES; i++)
        factors[r][i] = factors_of<T, KIND>(raw[r][i], c), beyond |= is_beyond<KIND>(raw[r][i]);
      scale[r] = beyond ? __uint_as_float(NAN_BITS) : second[r] + verdict;
      equal &= __float_as_uint(scale[r]) == __shfl_sync(~0u, __float_as_uint(scale[r]), 0, 4);
    }
    same = __all_sync(~0u, equal), at = first + tile * tile_units;
  }
  // Where it is not the same: of a unit. NaN of one lane is that of all.
  __device__ __forceinline__ float second_of(const bsh_fused_args &args, int r, int unit) const {
    const bool wrong = __any_sync(~0u, isnan(scale[r]));
    const float found = args.absmax2[second_level<KIND>(at + r * eight_rows + min(unit, last))];
    return wrong ? __uint_as_float(NAN_BITS) : found;
  }
};

template <typename T, int TOKEN_TILES, int UNITS, scale_kind KIND> struct scaled_codes {
  static constexpr int PIECES = UNITS / BSH_PIECE_UNITS, TILES_PER_SYNC = bsh_gemv_tiles_per_sync(ARCH, TOKEN_TILES);
  static constexpr bool EVERY_STEP = false, HALVES_IN_TURN = TOKEN_TILES == 2;
  using loader = piece_loader<rows_of_4bit, PIECES, SLOTS<TOKEN_TILES>>;
  const bsh_fused_args &args;
  float verdict; // of map_verdict
  short_scales<T, PIECES, KIND> scales;
  uint32_t lane_base, read; // as in codes_4bit

  __device__ __forceinline__ scaled_codes(const bsh_fused_args &args, const place &p, const float *, float offset)
      : args(args), verdict(offset) {
    scales.locate(args, p);
    scales.fetch(args, p.tile(0));
  }
  __device__ __forceinline__ void begin(const place &p, const gemv_memory &shared) {
    verdict = map_verdict(shared.map, verdict);
    lane_base = keep(shared_address(shared.table) + p.lane * 4);
    read = keep(shared_address(shared.ring) + p.warp * SLOTS<TOKEN_TILES> * PIECE_BYTES + p.g * 128 + (p.g & 3) * 32 +
                p.c * 8);
  }
  __device__ __forceinline__ void enter(const bsh_fused_args &args, const place &p, int step) {
    scales.resolve(p.tile(step), verdict);
    if (step + 1 < p.steps) scales.fetch(args, p.tile(step + 1));
  }
  __device__ __forceinline__ void multiply(float (*sum)[4], int piece, uint32_t slot,
                                           const uint32_t (*x)[TOKEN_TILES][8]) const {
    float part[TOKEN_TILES][4] = {};
#pragma unroll
    for (int j = 0; j < BSH_PIECE_UNITS; j++) {
      const int unit = piece * BSH_PIECE_UNITS + j;
      const uint32_t from = (read + slot) ^ (j * 32);
      uint32_t a[4][4];
      decode_unit(a, ld_shared(from), ld_shared(from + PIECE_BYTES / 2), lane_base);
      scale_unit<T>(a, scales.factors[0][piece].of(j), scales.factors[1][piece].of(j));
#pragma unroll
      for (int k = 0; k < 4; k++)
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) mma_m16n8k16<T>(part[n], a[k], x[unit][n][2 * k], x[unit][n][2 * k + 1]);
      if (j + 1 < BSH_PIECE_UNITS && scales.same) continue;
      float upper = scales.scale[0], lower = scales.scale[1];
      if (!scales.same) upper = scales.second_of(args, 0, unit), lower = scales.second_of(args, 1, unit);
#pragma unroll
      for (int n = 0; n < TOKEN_TILES; n++) {
        sum[n][0] += upper * part[n][0], sum[n][1] += upper * part[n][1];
        sum[n][2] += lower * part[n][2], sum[n][3] += lower * part[n][3];
#pragma unroll
        for (int i = 0; i < 4; i++) part[n][i] = 0.f;
      }
    }
  }
};

template <typename T, int TOKEN_TILES, int UNITS, scale_kind KIND>
using operand_4bit =
    std::conditional_t<SHORT<KIND>, scaled_codes<T, TOKEN_TILES, UNITS, KIND>, codes_4bit<T, TOKEN_TILES, UNITS, KIND>>;

} // namespace
} // namespace bsh
