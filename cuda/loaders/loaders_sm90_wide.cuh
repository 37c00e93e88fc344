// loaders_sm90_wide.cuh - the producer warps of gemm_4bit_sm90_wide.cu: x, packed W and scales to shared memory.
#pragma once

#include "cuda/operands/decode_sm90_wide.cuh"
#include "cuda/schedulers/scheduler_sm90_wide.cuh"

namespace bsh {
namespace {

// Barriers: of a stage of x or W, `full` and `empty`.
template <typename FORM> struct wide_barriers {
  uint32_t x_full, x_empty, w_full, w_empty;
  __device__ __forceinline__ explicit wide_barriers(uint32_t base) {
    x_full = base + FORM::BARRIERS_AT, x_empty = x_full + 8 * FORM::X_STAGES;
    w_full = x_empty + 8 * FORM::X_STAGES, w_empty = w_full + 8 * FORM::STAGES;
  }
  // One thread. A stage of x is filled by both blocks of the pair and emptied by the consumers of both; one of W is
  // filled by a copy and two warps of scales.
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < FORM::X_STAGES; i++)
      mbarrier_init(x_full + 8 * i, 1), mbarrier_init(x_empty + 8 * i, BSH_GEMM_WIDE_CONSUMERS * BSH_GEMM_WIDE_PAIR);
    for (int i = 0; i < FORM::STAGES; i++)
      mbarrier_init(w_full + 8 * i, 3), mbarrier_init(w_empty + 8 * i, BSH_GEMM_WIDE_CONSUMERS);
    fence_mbarrier_init();
  }
};

// A ring of stages, as a producer goes round: parity 1 passes the first time.
template <int STAGES> struct wide_ring {
  int stage = 0;
  uint32_t parity = 1;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// One thread: each block of a pair brings half of the tokens to both, of a stack every other 64 tokens of those that
// are multiplied.
template <typename FORM>
__device__ __forceinline__ void load_x(const bsh_gemm_wide_args &args, const bsh_tensor_map *map, uint32_t base,
                                       const wide_place &place) {
  const wide_barriers<FORM> barriers(base);
  auto work = place.template scheduler<FORM>(args, base);
  wide_ring<FORM::X_STAGES> ring;
  constexpr int OWN_TOKENS = FORM::TOKENS / BSH_GEMM_WIDE_PAIR, BOX_BYTES = BSH_GEMM_WIDE_BOX * BSH_UNIT * 2;
  while (work.next()) {
    const tile_place at = place.template at<FORM>(args, base, work.tile);
    const int token = at.token + place.rank * OWN_TOKENS;
#pragma unroll 1
    for (int k = work.from * 2; k < place.template steps<FORM>(args, work.to); k++, ring.advance()) {
      mbarrier_wait(barriers.x_empty + 8 * ring.stage, ring.parity);
      if constexpr (FORM::GROUPED) {
        if (k == 0) place.template leave<FORM>(base, work.round, at);
        mbarrier_expect(barriers.x_full + 8 * ring.stage, at.width * (BSH_UNIT * 2), true);
        for (int box = place.rank; box < at.width / BSH_GEMM_WIDE_BOX; box += BSH_GEMM_WIDE_PAIR)
          tensor_copy_to(base + BSH_GEMM_WIDE_X_AT + ring.stage * FORM::X_BYTES + box * BOX_BYTES, map, k * BSH_UNIT,
                         at.token + box * BSH_GEMM_WIDE_BOX, barriers.x_full + 8 * ring.stage, 3);
        continue;
      }
      mbarrier_expect(barriers.x_full + 8 * ring.stage, FORM::X_BYTES, true);
      tensor_copy_to(base + BSH_GEMM_WIDE_X_AT + ring.stage * FORM::X_BYTES +
                         place.rank * (FORM::X_BYTES / BSH_GEMM_WIDE_PAIR),
                     map, k * BSH_UNIT, token, barriers.x_full + 8 * ring.stage, 3);
    }
  }
}

// Column and row of the packed bytes of a piece.
template <typename FORM>
__device__ __forceinline__ int2 packed_at(const bsh_gemm_wide_args &args, tile_place at, int piece) {
  const int depth = piece * BSH_GEMM_WIDE_PIECE, first = at.expert * args.N; // row of the packed stack
  return FORM::GRADIENT ? make_int2(at.row / 2, first + depth) : make_int2(depth / 2, first + at.row);
}

// One thread. Up to STAGES pieces of the first stretch.
template <typename FORM>
__device__ __forceinline__ void prefetch_w(const bsh_gemm_wide_args &args, const bsh_tensor_map *map, uint32_t base,
                                           const wide_place &place) {
  auto work = place.template scheduler<FORM>(args, base);
  if (!work.next()) return;
#pragma unroll 1
  for (int p = work.from; p < min(work.to, work.from + FORM::STAGES); p++) {
    const int2 at = packed_at<FORM>(args, place.template at<FORM>(args, base, work.tile), p);
    tensor_prefetch_l2(map, at.x, at.y);
  }
}
template <typename FORM>
__device__ __forceinline__ void load_w(const bsh_gemm_wide_args &args, const bsh_tensor_map *map, uint32_t base,
                                       const wide_place &place) {
  const wide_barriers<FORM> barriers(base);
  auto work = place.template scheduler<FORM>(args, base);
  wide_ring<FORM::STAGES> ring;
  while (work.next()) {
    tile_place tile;
    if constexpr (FORM::GROUPED) tile = place.template at<FORM>(args, base, work.tile);
#pragma unroll 1
    for (int p = work.from; p < work.to; p++, ring.advance()) {
      if constexpr (!FORM::GROUPED) tile = place.template at<FORM>(args, base, work.tile);
      const int2 at = packed_at<FORM>(args, tile, p);
      mbarrier_wait(barriers.w_empty + 8 * ring.stage, ring.parity);
      mbarrier_expect(barriers.w_full + 8 * ring.stage, BSH_GEMM_WIDE_W_BYTES, true);
      tensor_copy(base + FORM::W_AT + ring.stage * BSH_GEMM_WIDE_W_BYTES, map, at.x, at.y,
                  barriers.w_full + 8 * ring.stage);
    }
  }
}

// How the scales of a weight lie: nested, and both units of a piece two neighbouring codes of one block of them; plain;
// nested otherwise.
enum scale_kind { CODE_PAIRS, PLAIN_SCALES, CODES };

// 64 lanes: the scales of a piece, of 2 rows of W each, 2 units of a row. Fetched a piece ahead, and what is fetched is
// left as it is until then: any use, a shift too, would wait for it here. (CODES does, for want of registers.)
template <typename FORM, scale_kind KIND> struct wide_scales {
  static constexpr int BLOCKS = KIND == CODE_PAIRS ? 1 : 2; // of a row
  uint32_t there;           // bit 2i + b: W has unit b of row i, else its scale counts 0
  uint32_t codes[2];        // of a row: both units'
  float second[2 * BLOCKS]; // absmax2, or the plain scale

  // row: the first row of A of the tile.
  __device__ __forceinline__ void fetch(const bsh_gemm_wide_args &args, int lane, int row, int expert, int piece) {
    const uint8_t *const code = args.absmax_code + (FORM::GROUPED ? (int64_t)expert * args.expert_blocks : 0);
    const float *const absmax = args.absmax + (FORM::GROUPED ? (int64_t)expert * args.expert_blocks : 0);
    const float *const absmax2 = args.absmax2 + (FORM::GROUPED ? (int64_t)expert * args.expert_scales2 : 0);
    const int depth = piece * BSH_GEMM_WIDE_PIECE;
    const int first = (FORM::GRADIENT ? depth : row) + lane, column = FORM::GRADIENT ? row : depth;
    const int units = args.K / BSH_UNIT, unit = column / BSH_UNIT; // even
    const uint32_t units_there = unit + 1 < units ? 3 : unit < units ? 1 : 0;
    there = (first < args.N ? units_there : 0) | (first + 64 < args.N ? units_there << 2 : 0);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint32_t at = (uint32_t)min(first + i * 64, args.N - 1) * units + min(unit, (units - 1) & ~1);
      if (KIND == CODE_PAIRS) codes[i] = *reinterpret_cast<const uint16_t *>(code + at);
      if (KIND == CODES) codes[i] = 0;
#pragma unroll
      for (int b = 0; b < BLOCKS; b++) {
        const uint32_t block = (b == 0 ? at : at + (unit + 1 < units)) >> args.block_shift;
        if (KIND == CODES) codes[i] |= (uint32_t)code[block] << (8 * b);
        second[i * BLOCKS + b] = KIND == PLAIN_SCALES ? absmax[block] : absmax2[block / BSH_NESTED_BLOCKSIZE];
      }
    }
  }
  __device__ __forceinline__ float of(const float *map, float offset, int i, int b) const {
    const float own = second[i * BLOCKS + b % BLOCKS];
    if (!(there >> (2 * i + b) & 1)) return 0.f;
    return KIND == PLAIN_SCALES ? own : scale_with_denormals(map[codes[i] >> (8 * b) & 255], own, offset);
  }
};

template <typename T, typename FORM, scale_kind KIND>
__device__ __forceinline__ void load_scales_of(const bsh_gemm_wide_args &args, char *memory, uint32_t base,
                                               const wide_place &place, int lane) {
  const wide_barriers<FORM> barriers(base);
  float *const map = reinterpret_cast<float *>(memory + FORM::MAP_AT);
  const float inverse_alpha = 1.f / FORM::alpha(args.format);
  float offset = KIND == PLAIN_SCALES || FORM::GROUPED ? 0.f : *args.offset;
  auto work = place.template scheduler<FORM>(args, base);
  wide_ring<FORM::STAGES> ring;
  wide_scales<FORM, KIND> scales;
  bool more = work.next();
  int piece = work.from;
  tile_place at = {};
  if (more || !FORM::GROUPED) at = place.template at<FORM>(args, base, work.tile);
  if (more) scales.fetch(args, lane, at.row, at.expert, piece);
  if (FORM::GROUPED && KIND != PLAIN_SCALES) offset = args.offset[at.expert];
  if (KIND != PLAIN_SCALES)
#pragma unroll
    for (int i = 0; i < 256; i += 64) map[i + lane] = args.absmax_map[i + lane];
  named_barrier<64>(2);
  char *const own = memory + FORM::SCALES_AT + scale_place<FORM>(lane);
  while (more) {
    float v[2][2];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i >> 1][i & 1] = scales.of(map, offset, i >> 1, i & 1) * inverse_alpha;
    if (++piece == work.to) {
      more = work.next(), piece = work.from;
      if (more || !FORM::GROUPED) at = place.template at<FORM>(args, base, work.tile);
      if (FORM::GROUPED && KIND != PLAIN_SCALES) offset = args.offset[at.expert];
    }
    if (more) scales.fetch(args, lane, at.row, at.expert, piece);
    mbarrier_wait(barriers.w_empty + 8 * ring.stage, ring.parity);
    char *const to = own + ring.stage * FORM::SCALE_BYTES;
#pragma unroll
    for (int i = 0; i < 4; i++) put_scale<T, FORM>(to + (i >> 1) * 256 + (i & 1) * 512, v[i >> 1][i & 1]);
    __syncwarp();
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(barriers.w_full + 8 * ring.stage);
    ring.advance();
  }
}
template <typename T, typename FORM> // of blocks of 32 and 16: loaders_sm90_wide_short.cuh
__device__ void load_short_scales(const bsh_gemm_wide_args &args, char *memory, uint32_t base, const wide_place &place,
                                  int lane);
template <typename T, typename FORM>
__device__ __forceinline__ void load_scales(const bsh_gemm_wide_args &args, char *memory, uint32_t base,
                                            const wide_place &place, int lane) {
  if constexpr (FORM::MODE == SCALED) load_short_scales<T, FORM>(args, memory, base, place, lane);
  else if (args.code_pairs) load_scales_of<T, FORM, CODE_PAIRS>(args, memory, base, place, lane);
  else if (args.absmax) load_scales_of<T, FORM, PLAIN_SCALES>(args, memory, base, place, lane);
  else load_scales_of<T, FORM, CODES>(args, memory, base, place, lane);
}

} // namespace
} // namespace bsh
