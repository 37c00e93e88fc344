// gemv_4bit.cuh - the parts of gemv_4bit.cu, which says how they work together; gemv_4bit_grouped.cu is made of them,
// too.
#pragma once

#include "cuda/sizes/gemv_4bit.h"

#include "cuda/operands/decode.cuh"
#include "cuda/epilogues/epilogue.cuh"

namespace bsh {
namespace {

constexpr int WARPS = bsh_gemv_warps(ARCH);
constexpr int PIECE_BYTES = BSH_PIECE_BYTES;                                        // a ring slot
template <int TOKEN_TILES> constexpr int SLOTS = bsh_gemv_slots(ARCH, TOKEN_TILES); // of a warp's ring
template <int TOKEN_TILES> constexpr int TILES_PER_SYNC = bsh_gemv_meeting(ARCH, TOKEN_TILES);

struct shared_layout {
  char *table, *ring;
  float *map, *sums;
};
template <int TOKEN_TILES> __device__ __forceinline__ shared_layout lay_out(char *memory) {
  constexpr int sums_bytes = bsh_gemv_sums_bytes(ARCH, TOKEN_TILES);
  static_assert(!WIDE || BSH_MAP_BYTES + sums_bytes <= 63 * 1024, "the sums must end below the table");
  shared_layout s;
  char *const low = memory + (WIDE ? 0 : bsh_table_bytes(ARCH));
  s.table = WIDE ? wide_table(memory) : memory;
  s.map = reinterpret_cast<float *>(low);
  s.sums = reinterpret_cast<float *>(low + BSH_MAP_BYTES);
  s.ring = WIDE ? wide_ring(s.table) : low + BSH_MAP_BYTES + sums_bytes;
  return s;
}

// Who this thread is and which row tiles its block and its warp take.
struct place {
  int lane, warp, g, c;            // g: row within 8, c: lane within a quad
  int first_unit;                  // of this warp's K
  int split, tile_begin, tile_end; // part of K and row tiles of the block
  int group, row_groups, steps;    // a step: one row tile for each group; the last may repeat the block's last tile
  __device__ __forceinline__ int tile(int step) const {
    return min(tile_begin + step * row_groups + group, tile_end - 1);
  }
};
template <int UNITS> __device__ __forceinline__ place find_place(const bsh_fused_args &args) {
  place p;
  p.lane = threadIdx.x & 31, p.warp = threadIdx.x >> 5, p.g = p.lane >> 2, p.c = p.lane & 3;
  int team = blockIdx.x;
  p.split = 0;
  if (args.cut.k_splits > 1) team = blockIdx.x / args.cut.k_splits, p.split = blockIdx.x - team * args.cut.k_splits;
  const bool longer = team < args.cut.longer_teams;
  p.tile_begin = team * args.cut.team_tiles + min(team, args.cut.longer_teams);
  p.tile_end = p.tile_begin + args.cut.team_tiles + longer;
  p.row_groups = args.cut.row_groups, p.steps = longer ? args.cut.longer_steps : args.cut.steps;
  p.group = p.warp * args.cut.group_of_warp >> 16;
  p.first_unit = (p.split * args.cut.k_warps + p.warp - p.group * args.cut.k_warps) * UNITS;
  if (UNITS == 4) // with 8, registers are scarce and the compiler does better by computing these again
    p.tile_begin = keep(p.tile_begin), p.tile_end = keep(p.tile_end), p.steps = keep(p.steps),
    p.first_unit = keep(p.first_unit);
  return p;
}

// The packed bytes of a warp: pieces of 16 rows x 128 bytes, 16-byte chunks swizzled so that reading 32 bytes of each
// of 8 rows has no bank conflict. Columns beyond W repeat its last bytes (their x is zero).
template <int PIECES, int SLOTS> struct weight_loader {
  const uint8_t *from[PIECES]; // this lane's first 16 bytes of a piece in row tile 0
  uint32_t to, tile_bytes, four_rows;

  __device__ __forceinline__ weight_loader(const bsh_fused_args &args, const place &p, const char *ring) {
    const int pitch = args.K >> 1, row = p.lane >> 3, chunk = p.lane & 7;
    tile_bytes = pitch * BSH_ROW_TILE, four_rows = pitch * 4;
    to = keep(shared_address(ring) + p.warp * SLOTS * PIECE_BYTES + row * 128 + ((chunk ^ (row << 1)) << 4));
#pragma unroll
    for (int i = 0; i < PIECES; i++)
      from[i] = keep(args.packed + row * pitch + min(p.first_unit * 32 + i * 128 + chunk * 16, pitch - 16));
  }
  __device__ __forceinline__ void start(int tile, int piece, uint32_t slot) const {
    const uint8_t *source = from[piece] + (uint64_t)(uint32_t)tile * tile_bytes;
#pragma unroll
    for (int i = 0; i < 4; i++, source += four_rows) cp_async_16(to + slot + i * 512, source);
  }
  __device__ __forceinline__ void prefetch(int tile, int piece) const {
    const uint8_t *source = from[piece] + (uint64_t)(uint32_t)tile * tile_bytes;
    if ((threadIdx.x & 7) == 0)
#pragma unroll
      for (int i = 0; i < 4; i++, source += four_rows) prefetch_l2(source);
  }
};

// Scales of one row tile and a warp's units: lane c of a quad holds units c * PER_LANE .. of rows g and g + 8. Fetched
// a tile ahead; what arrives is kept raw until it is used, so that nobody waits for it. NESTED_64: nested, one scale a
// unit, PER_LANE divides the units of a row; its two codes lie in raw[.][0].
template <int PER_LANE, scale_kind KIND> struct scale_loader {
  uint32_t raw[2][PER_LANE]; // an 8-bit code, or the fp32 bits of a plain scale
  float second[2][PER_LANE];
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
                                          float (*scale)[PER_LANE]) const {
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int i = 0; i < PER_LANE; i++)
        if (KIND == NESTED_64)
          scale[r][i] = scale_with_denormals(map[i ? raw[r][0] >> 8 : raw[r][0] & 255], second[r][0], offset);
        else if (args.absmax) scale[r][i] = __uint_as_float(raw[r][i]);
        else scale[r][i] = scale_with_denormals(map[raw[r][i]], second[r][i], offset);
  }
};

// x of a warp's units as mma B operands: lane (g, c) holds elements 16c..16c+15 of each unit of token g. What lies
// beyond x is read from its last place, so that all loads are on their way together. Units beyond K are then made zero;
// sums of tokens beyond M are never stored.
template <int TOKEN_TILES, int UNITS>
__device__ __forceinline__ void load_x(uint32_t (*x)[TOKEN_TILES][8], const bsh_fused_args &args, const place &p) {
  const int units = args.K / BSH_UNIT;
  uint4 loaded[UNITS][TOKEN_TILES][2];
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; n++) {
    const uint16_t *row = static_cast<const uint16_t *>(args.x) +
                          min(first_token<TOKEN_TILES>() + n * 8 + p.g, args.M - 1) * args.ldx + p.c * 16;
#pragma unroll
    for (int j = 0; j < UNITS; j++) {
      const uint4 *from = reinterpret_cast<const uint4 *>(row + min(p.first_unit + j, units - 1) * BSH_UNIT);
      loaded[j][n][0] = from[0], loaded[j][n][1] = from[1];
    }
  }
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; n++)
#pragma unroll
    for (int j = 0; j < UNITS; j++) {
      const uint4 u = loaded[j][n][0], v = loaded[j][n][1];
      uint32_t *to = x[j][n];
      to[0] = u.x, to[1] = u.y, to[2] = u.z, to[3] = u.w, to[4] = v.x, to[5] = v.y, to[6] = v.z, to[7] = v.w;
    }
  if (p.first_unit + UNITS <= units) return;
#pragma unroll
  for (int j = 0; j < UNITS; j++)
    if (p.first_unit + j >= units)
#pragma unroll
      for (int n = 0; n < TOKEN_TILES; n++)
#pragma unroll
        for (int i = 0; i < 8; i++) x[j][n][i] = 0;
}

// sum += scale * (one unit of 16 rows) * x
template <typename T, int TOKEN_TILES>
__device__ __forceinline__ void multiply_unit(float (*sum)[4], uint2 upper, uint2 lower, const uint32_t (*x)[8],
                                              float scale_upper, float scale_lower, uint32_t lane_base) {
  float part[TOKEN_TILES][4] = {};
  uint32_t a[4][4];
  decode_unit(a, upper, lower, lane_base);
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

// Element e of a row tile's sums of k_warps warps, the first of which has it at `from`, added in the order of K.
template <int TOKEN_TILES> __device__ __forceinline__ float met_sum(const bsh_fused_args &args, const float *from) {
  constexpr int TILE = TOKEN_TILES * 128;
  float v[4] = {};
#pragma unroll
  for (int w = 0; w < WARPS; w++)
    if (w < args.cut.k_warps) v[w & 3] += from[w * TILE];
  return (v[0] + v[1]) + (v[2] + v[3]);
}

// Hands such a sum on: to blocks that share the tile's K, or to store(element, sum).
template <int TOKEN_TILES, typename STORE>
__device__ __forceinline__ void meet_element(const bsh_fused_args &args, const place &p, int tile, int e,
                                             const float *from, STORE store) {
  const float sum = met_sum<TOKEN_TILES>(args, from);
  if (args.cut.k_splits > 1) *split_sums<TOKEN_TILES>(args, tile, p.split, e) = sum;
  else store(element(tile, first_token<TOKEN_TILES>(), e), sum);
}

// What gemv_4bit does with an element's sums.
template <typename T, int TOKEN_TILES> struct meet_blocks {
  __device__ __forceinline__ void operator()(const bsh_fused_args &args, const place &p, int tile, int e,
                                             const float *from) const {
    meet_element<TOKEN_TILES>(args, p, tile, e, from, store_sum<T>{args});
  }
};

// Lets the k_warps sums of each element of the `steps` steps from `step` on meet.
template <int TOKEN_TILES, typename MEET>
__device__ __forceinline__ void meet(const bsh_fused_args &args, const place &p, const float *sums, int step, int steps,
                                     const MEET &meet_at) {
  constexpr int TILE = TOKEN_TILES * 128, MEETING = TILES_PER_SYNC<TOKEN_TILES>;
  int o = threadIdx.x;
  if (TOKEN_TILES == 2 && step & 1) // 256 sums a meeting: the halves of the block in turn
    o = o < blockDim.x / 2 ? o + blockDim.x / 2 : o - blockDim.x / 2;
  for (; o < MEETING * p.row_groups * TILE; o += blockDim.x) {
    const int e = o % TILE, s = o / TILE % MEETING, group = o / (TILE * MEETING);
    const int tile = p.tile_begin + (step + s) * p.row_groups + group;
    if (s >= steps || tile >= p.tile_end) continue;
    const float *from = sums + (s * WARPS + group * args.cut.k_warps) * TILE + e;
    meet_at(args, p, tile, e, from);
  }
}

// The product of the row tiles of a place: `stream`'s first SLOTS - 1 pieces are on their way, `scales` fetched for the
// first tile. first_half: of the double-buffered sums, written first; the next one is returned.
template <typename T, int TOKEN_TILES, int UNITS, scale_kind KIND, typename MEET>
__device__ __forceinline__ int walk(const bsh_fused_args &args, const place &p, const shared_layout &shared,
                                    const weight_loader<UNITS / BSH_PIECE_UNITS, SLOTS<TOKEN_TILES>> &stream,
                                    scale_loader<UNITS / BSH_PIECE_UNITS, KIND> &scales,
                                    const uint32_t (*x)[TOKEN_TILES][8], float offset, int first_half,
                                    const MEET &meet_at) {
  constexpr int PIECES = UNITS / BSH_PIECE_UNITS, MEETING = TILES_PER_SYNC<TOKEN_TILES>, TILE = TOKEN_TILES * 128;
  constexpr int SLOTS = bsh::SLOTS<TOKEN_TILES>;
  const uint32_t lane_base = keep(shared_address(shared.table) + p.lane * 4);
  // This lane's 8 bytes of unit 0 of row g, in slot 0; unit j lies at the address ^ (32 * j).
  const uint32_t read =
      keep(shared_address(shared.ring) + p.warp * SLOTS * PIECE_BYTES + p.g * 128 + (p.g & 3) * 32 + p.c * 8);
  const uint32_t own_sums = keep(shared_address(shared.sums + p.warp * TILE + p.lane * 4));
  uint32_t slot = 0, fill = (SLOTS - 1) * PIECE_BYTES;
  int half = first_half, met = 0; // of the double-buffered sums; steps already met

  for (int step = 0; step < p.steps; step++) {
    float scale[2][PIECES], sum[TOKEN_TILES][4] = {};
    scales.resolve(args, shared.map, offset, scale);
    if (step + 1 < p.steps) scales.fetch(args, p.tile(step + 1));
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
      cp_async_wait<SLOTS - 2>();
      __syncwarp();
      const int ahead = piece + SLOTS - 1; // SLOTS - 1 pieces ahead
      if (step + ahead / PIECES < p.steps) stream.start(p.tile(step + ahead / PIECES), ahead % PIECES, fill);
      cp_async_commit();
#pragma unroll
      for (int j = 0; j < BSH_PIECE_UNITS; j++) {
        const int unit = piece * BSH_PIECE_UNITS + j;
        const uint32_t from = (read + slot) ^ (j * 32);
        const uint2 upper = ld_shared(from), lower = ld_shared(from + PIECE_BYTES / 2);
        multiply_unit<T, TOKEN_TILES>(sum, upper, lower, x[unit],
                                      __shfl_sync(~0u, scale[0][unit % PIECES], unit / PIECES, 4),
                                      __shfl_sync(~0u, scale[1][unit % PIECES], unit / PIECES, 4), lane_base);
      }
      fill = slot;
      slot = slot == (SLOTS - 1) * PIECE_BYTES ? 0 : slot + PIECE_BYTES;
    }
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++)
      st_shared(own_sums + ((half * MEETING + step - met) * WARPS * TILE + n * 128) * 4, sum[n]);
    if (step + 1 - met == MEETING || step + 1 == p.steps) {
      __syncthreads(); // the sums are written, and the other half has been read
      meet<TOKEN_TILES>(args, p, shared.sums + half * MEETING * WARPS * TILE, met, step + 1 - met, meet_at);
      met = step + 1, half ^= 1;
    }
  }
  return half;
}

} // namespace
} // namespace bsh
