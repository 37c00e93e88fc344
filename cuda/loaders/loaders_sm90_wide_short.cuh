// loaders_sm90_wide_short.cuh - the warps that bring scales of blocks of 32 and 16 (decode_sm90_wide_short.cuh).
#pragma once

#include "cuda/loaders/loaders_sm90_wide.cuh"
#include "cuda/operands/decode_sm90_wide_short.cuh"

namespace bsh {
namespace {

// 64 lanes: the codes of a piece, of two neighbouring rows of W each, 2 units of a row, and the second level's scales.
// Fetched a piece ahead, as wide_scales. What lies behind the last row or unit counts as that one: W and x are 0 there.
template <typename FORM> struct short_scales {
  static constexpr int OF_UNIT = BSH_UNIT / FORM::BLOCK; // codes
  uint32_t codes[2][2];                                  // [row], see bytes()
  float second[2][2];                                    // [row][unit]

  // Of a lane's first row of W, clamped, its unit in the piece, and where that is among all units.
  struct unit_place {
    int row, unit, units;
    __device__ __forceinline__ unit_place(const bsh_gemm_wide_args &args, int lane, int tile_row, int piece) {
      const int depth = piece * BSH_GEMM_WIDE_PIECE;
      units = args.K / BSH_UNIT, row = (FORM::GRADIENT ? depth : tile_row) + 2 * lane;
      unit = min((FORM::GRADIENT ? tile_row : depth) / BSH_UNIT, (units - 1) & ~1); // even
    }
    __device__ __forceinline__ uint32_t at(const bsh_gemm_wide_args &args, int i) const {
      return (uint32_t)min(row + i, args.N - 1) * units + unit;
    }
  };
  static __device__ __forceinline__ const uint8_t *codes_of(const bsh_gemm_wide_args &args, int expert) {
    return args.absmax_code + (FORM::GROUPED ? (int64_t)expert * args.expert_blocks : 0);
  }
  // row: the first row of A of the tile.
  __device__ __forceinline__ void fetch(const bsh_gemm_wide_args &args, int lane, int row, int expert, int piece) {
    const float *const absmax2 = args.absmax2 + (FORM::GROUPED ? (int64_t)expert * args.expert_scales2 : 0);
    const unit_place place(args, lane, row, piece);
    const int next = place.unit + 1 < place.units; // to the other unit
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint32_t at = place.at(args, i);
      second[i][0] = absmax2[at / (BSH_NESTED_BLOCKSIZE / OF_UNIT)];
      second[i][1] = absmax2[(at + next) / (BSH_NESTED_BLOCKSIZE / OF_UNIT)];
      const uint8_t *const code = codes_of(args, expert) + (size_t)at * OF_UNIT;
      if (args.code_pairs == 2) read_piece(code, codes[i]);
      else if (args.code_pairs == 1) read_units(code, next * OF_UNIT, codes[i]);
      else read_codes(code, next * OF_UNIT, codes[i]);
    }
  }
  __device__ __forceinline__ static void prefetch(const bsh_gemm_wide_args &args, int lane, int row, int expert,
                                                  int piece) {
    const unit_place place(args, lane, row, piece);
#pragma unroll
    for (int i = 0; i < 2; i++) prefetch_l2(codes_of(args, expert) + (size_t)place.at(args, i) * OF_UNIT);
  }
  // A row's bytes, four codes each word.
  __device__ __forceinline__ uint32_t bytes(const bsh_gemm_wide_args &args, int i, int word) const {
    if (OF_UNIT == 4) return codes[i][word];
    return args.code_pairs == 2 ? codes[i][0] : __byte_perm(codes[i][0], codes[i][1], 0x5410); // two codes of each
  }

private:
  static __device__ __forceinline__ void read_piece(const uint8_t *code, uint32_t *to) {
    if constexpr (OF_UNIT == 4) {
      const uint2 both = *reinterpret_cast<const uint2 *>(code);
      to[0] = both.x, to[1] = both.y;
    } else to[0] = *reinterpret_cast<const uint32_t *>(code), to[1] = 0;
  }
  static __device__ __forceinline__ void read_units(const uint8_t *code, int next, uint32_t *to) {
#pragma unroll
    for (int b = 0; b < 2; b++)
      if constexpr (OF_UNIT == 4) to[b] = *reinterpret_cast<const uint32_t *>(code + b * next);
      else to[b] = *reinterpret_cast<const uint16_t *>(code + b * next);
  }
  static __device__ __forceinline__ void read_codes(const uint8_t *code, int next, uint32_t *to) {
    to[0] = to[1] = 0;
#pragma unroll
    for (int i = 0; i < 2 * OF_UNIT; i++)
      to[i / OF_UNIT] |= (uint32_t)code[i / OF_UNIT * next + i % OF_UNIT] << (i % OF_UNIT * 8);
  }
};

// ---- codes to scales: by shifts, where a map is that of E8M0 or E4M3 ----

// E8M0: all but 0 and 255. E4M3: positive numbers.
__device__ __forceinline__ uint32_t zero_bytes(uint32_t v) { return (v - 0x01010101u) & ~v & 0x80808080u; }
template <int BLOCK> __device__ __forceinline__ bool are_ordinary(uint32_t codes) {
  if (BLOCK == 32) return (zero_bytes(codes) | zero_bytes(~codes)) == 0;
  return ((codes | (codes + 0x01010101u)) & 0x80808080u) == 0;
}
// A warp: whether the map has their values.
template <int BLOCK> __device__ __forceinline__ bool is_ordinary(const float *map, int lane) {
  bool is = true;
#pragma unroll
  for (int i = 0; i < 256; i += BSH_WARP) {
    const uint32_t code = i + lane;
    const float value = BLOCK == 32 ? __uint_as_float(code << 23) : __uint_as_float(code << 20) * 0x1p120f;
    is &= map[code] == value || (BLOCK == 32 ? code - 1 >= 254 : code >= 127);
  }
  return __all_sync(~0u, is);
}
// Code `i` of both words, of the same block of two rows, as scales.
template <typename S, int BLOCK> __device__ __forceinline__ uint32_t ordinary_pair(uint32_t a, uint32_t b, int i) {
  if (BLOCK == 32) // [b i][b i][a i][a i], the exponent 8 bits from bit 7 on
    return permute(a, b, i * 0x1111 + 0x4400) >> 1 & 0x7F807F80;
  // [sign of b i][b i][sign of a i][a i]: signs are 0. Four bits of the exponent, three of the mantissa.
  const uint32_t pair = permute(a, b, i * 0x1111 + 0xC480);
  if (IS_HALF<S>) return mul_pair<S>(pair << 7, 0x5C005C00); // 2^8
  return mul_pair<S>(pair << 4, 0x7B807B80);                 // 2^120
}
// The scale of any code of any map, without the global scale.
template <typename S>
__device__ __forceinline__ S any_scale(const bsh_gemm_wide_args &args, uint32_t code, float absmax2, float offset,
                                       float global) {
  S scale;
  from_float(scale_with_denormals(args.absmax_map[code], absmax2, offset) / global, &scale);
  return scale;
}

// Two rows' scales to their place in a stage.
template <typename S, typename FORM>
__device__ __forceinline__ void put_ordinary(char *to, const uint32_t (&bytes)[2][2]) {
  constexpr int BLOCKS = BSH_GEMM_WIDE_PIECE / FORM::BLOCK;
  constexpr bool TOGETHER = !FORM::GRADIENT && FORM::BLOCK == 16; // blocks of a group are neighbours
#pragma unroll
  for (int c = 0; c < BLOCKS; c += 1 + TOGETHER) {
    const uint32_t pair = ordinary_pair<S, FORM::BLOCK>(bytes[0][c / 4], bytes[1][c / 4], c % 4);
    char *const at = to + short_scale_place<FORM>(0, c);
    if constexpr (TOGETHER)
      *reinterpret_cast<uint2 *>(at) =
          make_uint2(pair, ordinary_pair<S, FORM::BLOCK>(bytes[0][c / 4], bytes[1][c / 4], c % 4 + 1));
    else *reinterpret_cast<uint32_t *>(at) = pair;
  }
}

template <typename T, typename FORM>
__device__ void load_short_scales(const bsh_gemm_wide_args &args, char *memory, uint32_t base, const wide_place &place,
                                  int lane) {
  using S = short_scale_of<T, FORM>;
  constexpr int BLOCKS = BSH_GEMM_WIDE_PIECE / FORM::BLOCK, WORDS = BLOCKS / 4;
  const wide_barriers<FORM> barriers(base);
  const bool ordinary_map = is_ordinary<FORM::BLOCK>(args.absmax_map, lane % BSH_WARP);
  float offset = FORM::GROUPED ? 0.f : *args.offset, global = FORM::GROUPED ? 1.f : global_scale<FORM>(args, 0);
  auto work = place.template scheduler<FORM>(args, base);
  wide_ring<FORM::STAGES> ring;
  short_scales<FORM> scales;
  bool more = work.next();
  int piece = work.from;
  tile_place at = {};
  auto enter = [&] { // a tile
    if (more || !FORM::GROUPED) at = place.template at<FORM>(args, base, work.tile);
    if (FORM::GROUPED) offset = args.offset[at.expert], global = global_scale<FORM>(args, at.expert);
  };
  enter();
  if (more) scales.fetch(args, lane, at.row, at.expert, piece);
  char *const own = memory + FORM::SCALES_AT + short_scale_place<FORM>(2 * lane, 0);
  while (more) {
    uint32_t bytes[2][2];
    const float second[2][2] = {{scales.second[0][0], scales.second[0][1]}, {scales.second[1][0], scales.second[1][1]}};
    const float offset_now = offset, global_now = global;
    bool ordinary = ordinary_map && offset == 0.f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      ordinary &= second[i][0] == global && second[i][1] == global;
#pragma unroll
      for (int w = 0; w < WORDS; w++) {
        bytes[i][w] = scales.bytes(args, i, w);
        ordinary &= are_ordinary<FORM::BLOCK>(bytes[i][w]);
      }
    }
    if (++piece == work.to) {
      more = work.next(), piece = work.from;
      enter();
    }
    if (more) scales.fetch(args, lane, at.row, at.expert, piece);
    mbarrier_wait(barriers.w_empty + 8 * ring.stage, ring.parity);
    char *const to = own + ring.stage * FORM::SCALE_BYTES;
    if (ordinary) put_ordinary<S, FORM>(to, bytes);
    else
#pragma unroll
      for (int i = 0; i < 2 * BLOCKS; i++) {
        const int row = i & 1, block = i >> 1, unit = 2 * block / BLOCKS;
        const uint32_t code = bytes[row][block / 4] >> (block % 4 * 8) & 255;
        *reinterpret_cast<S *>(to + short_scale_place<FORM>(row, block)) =
            any_scale<S>(args, code, second[row][unit], offset_now, global_now);
      }
    __syncwarp();
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(barriers.w_full + 8 * ring.stage);
    ring.advance();
  }
}

// Hints, before the kernel in front is done: the first pieces.
template <typename FORM>
__device__ __forceinline__ void prefetch_short_scales(const bsh_gemm_wide_args &args, uint32_t base,
                                                      const wide_place &place, int lane) {
  auto work = place.template scheduler<FORM>(args, base);
  if (!work.next()) return;
  const tile_place at = place.template at<FORM>(args, base, work.tile);
#pragma unroll 1
  for (int piece = work.from; piece < min(work.to, work.from + FORM::STAGES); piece++)
    short_scales<FORM>::prefetch(args, lane, at.row, at.expert, piece);
}

} // namespace
} // namespace bsh
