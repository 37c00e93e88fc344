// gemv_4bit.cuh - 4-bit codes as the operand of gemv.cuh: of gemv_4bit.cu, which says how it works, and of
// gemv_4bit_grouped.cu.
#pragma once

#include "cuda/gemv/gemv.cuh"
#include "cuda/operands/decode_short.cuh"

namespace bsh {
namespace {

struct gemv_memory {
  char *table, *ring;
  float *map, *sums;
};
template <int TOKEN_TILES> __device__ __forceinline__ gemv_memory memory_of(char *memory) {
  constexpr int sums_bytes = bsh_gemv_sums_bytes(ARCH, TOKEN_TILES);
  static_assert(!WIDE || BSH_MAP_BYTES + sums_bytes <= 63 * 1024, "the sums must end below the table");
  gemv_memory s;
  char *const low = memory + (WIDE ? 0 : bsh_table_bytes(ARCH));
  s.table = WIDE ? wide_table(memory) : memory;
  s.map = reinterpret_cast<float *>(low);
  s.sums = reinterpret_cast<float *>(low + BSH_MAP_BYTES);
  s.ring = WIDE ? wide_ring(s.table) : low + BSH_MAP_BYTES + sums_bytes;
  return s;
}

// Scales of one row tile and a warp's units: lane c of a quad holds units c * PER_LANE .. of rows g and g + 8. Fetched
// a tile ahead; what arrives is kept raw until it is used, so that nobody waits for it. NESTED_64: nested, one scale a
// unit, PER_LANE divides the units of a row; its two codes lie in raw[.][0]. SHORT: `scale` is that of the second
// level, the bytes of a unit's blocks are in `blocks`.
template <int PER_LANE, scale_kind KIND> struct tile_scales {
  uint32_t raw[2][PER_LANE]; // an 8-bit code, or the fp32 bits of a plain scale
  float second[2][PER_LANE];
  uint32_t blocks[2][PER_LANE];
  uint32_t first, tile_units, eight_rows; // unit index in W of row g; steps of it
  int unit;

  __device__ __forceinline__ void locate(const bsh_fused_args &args, const place &p) {
    const int units = args.K / BSH_UNIT;
    unit = p.first_unit + p.c * PER_LANE;
    if (KIND == NESTED_64) unit = min(unit, units - PER_LANE);
    tile_units = units * BSH_ROW_TILE, eight_rows = units * 8;
    first = keep(p.g * units + (KIND == NESTED_64 ? unit : 0));
  }
  __device__ __forceinline__ void fetch(const bsh_fused_args &args, int tile) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const uint32_t at = first + tile * tile_units + r * eight_rows;
      if constexpr (KIND == NESTED_64) {
        if (PER_LANE == 2) raw[r][0] = *reinterpret_cast<const uint16_t *>(args.absmax_code + at);
        else raw[r][0] = args.absmax_code[at];
        second[r][0] = args.absmax2[at / BSH_NESTED_BLOCKSIZE];
      } else if constexpr (SHORT<KIND>) {
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
          const uint32_t own = at + min(unit + i, args.K / BSH_UNIT - 1);
          raw[r][i] = unit_scales<KIND>(args.absmax_code, own);
          second[r][i] = args.absmax2[second_level<KIND>(own)];
        }
      } else {
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
          const uint32_t block = (at + min(unit + i, args.K / BSH_UNIT - 1)) >> args.block_shift;
          if (args.absmax) {
            raw[r][i] = __float_as_uint(args.absmax[block]);
          } else {
            raw[r][i] = args.absmax_code[block];
            second[r][i] = args.absmax2[block / BSH_NESTED_BLOCKSIZE];
          }
        }
      }
    }
  }
  __device__ __forceinline__ void resolve(const bsh_fused_args &args, const float *map, float offset,
                                          float (*scale)[PER_LANE]) {
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int i = 0; i < PER_LANE; i++)
        if (SHORT<KIND>) scale[r][i] = second[r][i] + offset, blocks[r][i] = raw[r][i];
        else if (KIND == NESTED_64)
          scale[r][i] = scale_with_denormals(map[i ? raw[r][0] >> 8 : raw[r][0] & 255], second[r][0], offset);
        else if (args.absmax) scale[r][i] = __uint_as_float(raw[r][i]);
        else scale[r][i] = scale_with_denormals(map[raw[r][i]], second[r][i], offset);
  }
};

// sum += scale * (one unit of 16 rows) * x. SCALED: the operands of a row have a factor besides.
template <typename T, int TOKEN_TILES, bool SCALED = false>
__device__ __forceinline__ void multiply_unit(float (*sum)[4], uint2 upper, uint2 lower, const uint32_t (*x)[8],
                                              float scale_upper, float scale_lower, uint32_t lane_base,
                                              uint32_t factor_upper = 0, uint32_t factor_lower = 0) {
  float part[TOKEN_TILES][4] = {};
  uint32_t a[4][4];
  decode_unit(a, upper, lower, lane_base);
  if constexpr (SCALED) scale_unit<T>(a, factor_upper, factor_lower);
#pragma unroll
  for (int k = 0; k < 4; k++)
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++) mma_m16n8k16<T>(part[n], a[k], x[n][2 * k], x[n][2 * k + 1]);
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; n++) {
    sum[n][0] += scale_upper * part[n][0], sum[n][1] += scale_upper * part[n][1];
    sum[n][2] += scale_lower * part[n][2], sum[n][3] += scale_lower * part[n][3];
  }
}

// Codes go to the tensor cores unscaled; the sums of a unit are multiplied by its scale. SHORT: with the scales of
// their blocks; the sums by that of the second level, and `offset` is 0, or NaN where scales are not what is taken for
// granted.
template <typename T, int TOKEN_TILES, int UNITS, scale_kind KIND> struct codes_4bit {
  static constexpr int PIECES = UNITS / BSH_PIECE_UNITS, TILES_PER_SYNC = bsh_gemv_tiles_per_sync(ARCH, TOKEN_TILES);
  static constexpr bool EVERY_STEP = false, HALVES_IN_TURN = TOKEN_TILES == 2;
  using loader = piece_loader<rows_of_4bit, PIECES, SLOTS<TOKEN_TILES>>;
  const float *map;
  float offset, scale[2][PIECES];
  tile_scales<PIECES, KIND> scales;
  uint32_t selector;        // SHORT: of this lane's block
  uint32_t lane_base, read; // read: 8 bytes of unit 0 of row g, in slot 0; unit j lies at the address ^ (32 * j)

  // The scales of the first row tile are on their way.
  __device__ __forceinline__ codes_4bit(const bsh_fused_args &args, const place &p, const float *map, float offset)
      : map(map), offset(offset) {
    scales.locate(args, p);
    scales.fetch(args, p.tile(0));
  }
  __device__ __forceinline__ void begin(const place &p, const gemv_memory &shared) {
    lane_base = keep(shared_address(shared.table) + p.lane * 4);
    read = keep(shared_address(shared.ring) + p.warp * SLOTS<TOKEN_TILES> * PIECE_BYTES + p.g * 128 + (p.g & 3) * 32 +
                p.c * 8);
    if constexpr (SHORT<KIND>) selector = block_selector<KIND>(p.c), offset = map_verdict(shared.map, offset);
  }
  __device__ __forceinline__ void enter(const bsh_fused_args &args, const place &p, int step) {
    scales.resolve(args, map, offset, scale);
    if (step + 1 < p.steps) scales.fetch(args, p.tile(step + 1));
  }
  __device__ __forceinline__ void multiply(float (*sum)[4], int piece, uint32_t slot,
                                           const uint32_t (*x)[TOKEN_TILES][8]) const {
#pragma unroll
    for (int j = 0; j < BSH_PIECE_UNITS; j++) {
      const int unit = piece * BSH_PIECE_UNITS + j;
      const uint32_t from = (read + slot) ^ (j * 32);
      const uint2 upper = ld_shared(from), lower = ld_shared(from + PIECE_BYTES / 2);
      if constexpr (SHORT<KIND>) {
        auto factor = [&](int r) {
          return block_factor<T, KIND>(__shfl_sync(~0u, scales.blocks[r][unit % PIECES], unit / PIECES, 4), selector);
        };
        multiply_unit<T, TOKEN_TILES, true>(
            sum, upper, lower, x[unit], __shfl_sync(~0u, scale[0][unit % PIECES], unit / PIECES, 4),
            __shfl_sync(~0u, scale[1][unit % PIECES], unit / PIECES, 4), lane_base, factor(0), factor(1));
      } else
        multiply_unit<T, TOKEN_TILES>(sum, upper, lower, x[unit],
                                      __shfl_sync(~0u, scale[0][unit % PIECES], unit / PIECES, 4),
                                      __shfl_sync(~0u, scale[1][unit % PIECES], unit / PIECES, 4), lane_base);
    }
  }
};

} // namespace
} // namespace bsh
