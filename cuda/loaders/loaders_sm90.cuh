// loaders_sm90.cuh - how packed bytes, scales and x come to a warp.
#pragma once

#include "cuda/operands/decode_short.cuh"
#include "cuda/schedulers/scheduler_sm90.cuh"

namespace bsh {
namespace {

// The packed bytes of a warp's 16 rows, walking through the pieces. Rows and columns beyond W repeat its last ones.
struct weight_loader {
  const uint8_t *row; // this lane's first row in the row block of the next piece
  uint32_t to, chunk, last_chunk, four_rows;

  __device__ __forceinline__ weight_loader(const bsh_fused_args &args, const char *ring) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, lane_row = lane >> 3;
    chunk = keep((lane & 7) * 16), last_chunk = (args.K >> 1) - 16, four_rows = args.K * 2;
    to = keep(shared_address(ring) + warp * SLOTS * PIECE_BYTES + lane_row * 128 + (chunk ^ (lane_row << 5)));
  }
  __device__ __forceinline__ void enter(const bsh_fused_args &args, int tile) {
    const int lane_row = (threadIdx.x & 31) >> 3;
    const int first = min(tile * BSH_ROW_TILE, args.N - BSH_ROW_TILE) + lane_row;
    row = keep(args.packed + (int64_t)first * (args.K >> 1));
  }
  __device__ __forceinline__ void start(int piece, uint32_t slot) const {
    const uint8_t *from = row + min(piece * 128 + chunk, last_chunk);
#pragma unroll
    for (int i = 0; i < 4; i++, from += four_rows) cp_async_16(to + slot + i * 512, from);
  }
  __device__ __forceinline__ void prefetch(int piece) const {
    const uint8_t *from = row + min(piece * 128 + chunk, last_chunk);
    if (chunk == 0)
#pragma unroll
      for (int i = 0; i < 4; i++, from += four_rows) prefetch_l2(from);
  }
};

// Scales of a warp's 16 rows. A group is 4 pieces (ANY_SCALES: 1); lane c of a quad holds, for rows g and g + 8, the 4
// units of piece c of the group (ANY_SCALES: unit c of the piece). Fetched a group ahead and kept raw until used.
// NESTED_64: nested, one scale a unit, units of a row a multiple of 4. SHORT: `scale` is that of the second level, and
// `same` whether each row has one for all units of the piece; scales of blocks are in `factors`.
template <scale_kind KIND> struct scale_loader {
  static constexpr int GROUP = KIND == NESTED_64 ? 4 : 1; // pieces
  static constexpr int PER_LANE = KIND == NESTED_64 ? 4 : 1;
  uint32_t raw[2]; // 4 codes; ANY_SCALES: 1 code or the fp32 bits of a plain scale
  float second[2];
  float scale[2][PER_LANE];
  unit_factors factors[2];
  bool same;

  // Block of this lane's first scale, rows g (r = 0) and g + 8 of the tile.
  static __device__ __forceinline__ uint32_t block(const bsh_fused_args &args, int tile, int piece, int r) {
    const int units = args.K / BSH_UNIT, lane = threadIdx.x & 31;
    const int row = min(tile * BSH_ROW_TILE, args.N - BSH_ROW_TILE) + (lane >> 2);
    const int first = piece / GROUP * (GROUP * BSH_PIECE_UNITS) + (lane & 3) * PER_LANE;
    const uint32_t unit = (uint32_t)(row + r * 8) * units + min(first, units - PER_LANE);
    return KIND == NESTED_64 || SHORT<KIND> ? unit : unit >> args.block_shift;
  }
  __device__ __forceinline__ void fetch(const bsh_fused_args &args, int tile, int piece) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const uint32_t block = scale_loader::block(args, tile, piece, r);
      if constexpr (SHORT<KIND>) {
        raw[r] = unit_scales<KIND>(args.absmax_code, block);
        second[r] = args.absmax2[second_level<KIND>(block)];
      } else if (KIND == NESTED_64) {
        raw[r] = *reinterpret_cast<const uint32_t *>(args.absmax_code + block);
        second[r] = args.absmax2[block / BSH_NESTED_BLOCKSIZE];
      } else if (args.absmax) {
        raw[r] = __float_as_uint(args.absmax[block]);
      } else {
        raw[r] = args.absmax_code[block];
        second[r] = args.absmax2[block / BSH_NESTED_BLOCKSIZE];
      }
    }
  }
  __device__ __forceinline__ void resolve(const bsh_fused_args &args, const float *map, float offset) {
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int i = 0; i < PER_LANE; i++)
        if (KIND == NESTED_64) scale[r][i] = scale_with_denormals(map[raw[r] >> (8 * i) & 255], second[r], offset);
        else scale[r][i] = args.absmax ? __uint_as_float(raw[r]) : scale_with_denormals(map[raw[r]], second[r], offset);
  }
  // Scale of `unit` of the piece, rows g (r = 0) and g + 8.
  __device__ __forceinline__ float of(int r, int piece, int unit) const {
    return KIND == NESTED_64 ? __shfl_sync(~0u, scale[r][unit % PER_LANE], piece % GROUP, 4)
                             : __shfl_sync(~0u, scale[r][0], unit, 4);
  }
  // SHORT, instead of resolve. `verdict`, or a scale that is none of the format's, makes the piece NaN.
  template <typename T> __device__ __forceinline__ void resolve_short(float verdict) {
    bool equal = true;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      factors[r] = factors_of<T, KIND>(raw[r], threadIdx.x & 3);
      scale[r][0] = second[r] + verdict;
      if (__any_sync(~0u, is_beyond<KIND>(raw[r]))) scale[r][0] = __uint_as_float(NAN_BITS);
      equal &= __float_as_uint(scale[r][0]) == __shfl_sync(~0u, __float_as_uint(scale[r][0]), 0, 4);
    }
    same = __all_sync(~0u, equal);
  }
};

// Brings the next stage of x into its place; warp 0 calls it once every warp is done with what was there.
template <typename FORM> struct x_loader {
  static constexpr int STEPS = BSH_PIECE_UNITS / FORM::STAGE_UNITS; // stages of a piece
  const scheduler<FORM> &work;
  work_range at; // of the next stage
  const char *from;
  uint32_t to, full, empty, parity;
  int slot, step, left;
  uint32_t part_bytes; // from one part of K to the next in x
  bool refill;

  __device__ __forceinline__ x_loader(const bsh_fused_args &args, const shared_layout &shared,
                                      const scheduler<FORM> &work)
      : work(work), at(work.first()) {
    from = static_cast<const char *>(args.x), to = shared_address(shared.x), full = shared.full, empty = shared.empty;
    slot = 0, parity = 1, refill = false, step = 0, left = work.count * STEPS;
    part_bytes = work.pieces * (BSH_PIECE_UNITS * FORM::TOKENS * BSH_UNIT * 2);
  }
  __device__ __forceinline__ void bring() {
    if (left == 0) return;
    if (refill) mbarrier_wait(empty + 8 * slot, parity);
    constexpr int BYTES = FORM::PART_BYTES;
    const bool first_lane = (threadIdx.x & 31) == 0;
    mbarrier_expect(full + 8 * slot, BYTES * FORM::K_PARTS, first_lane);
#pragma unroll
    for (int k = 0; k < FORM::K_PARTS; k++)
      cp_async_bulk(to + (slot * FORM::K_PARTS + k) * BYTES,
                    from + (int64_t)(at.piece * STEPS + step) * BYTES + k * part_bytes, BYTES, full + 8 * slot,
                    first_lane);
    left--;
    if (++step == STEPS) {
      step = 0, at.piece++;
      if (FORM::K_PARTS == 1 && at.piece == at.end) at = work.after(at);
    }
    if (++slot == STAGES) slot = 0, parity ^= 1, refill = true;
  }
};

// OWN_X: how the last warps put x in order. Element 16c + 4s + 2h + e of a unit goes to 16s + 8h + 2c + e, 16-byte
// chunk j of token row n to chunk j ^ (n % 8). Thread t takes chunk t % 8 of the token rows t / 8 + 16 i of a stage.
template <typename FORM> struct x_producer {
  static constexpr int UNITS = FORM::STAGE_UNITS, GROUPS = FORM::TOKENS / 16, ROWS_BYTES = 16 * 128;
  static constexpr int LOADS = FORM::K_PARTS * UNITS * GROUPS;
  const uint16_t *from[GROUPS];
  uint32_t to[4], full, empty, parity; // to: of the four pairs of 16 bytes
  int units, part_units, rows, slot;   // rows: of x, counted from this thread's first one
  bool refill;

  __device__ __forceinline__ x_producer(const bsh_fused_args &args, const shared_layout &shared, int pieces) {
    const int t = threadIdx.x % (BSH_GEMM_X_WARPS * 32), chunk = t & 7, row = t >> 3;
    full = shared.full, empty = shared.empty, parity = 1, slot = 0, refill = false;
    units = args.K / BSH_UNIT, part_units = pieces * BSH_PIECE_UNITS, rows = args.M - row;
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
      from[i] = static_cast<const uint16_t *>(args.x) + min(i * 16 + row, args.M - 1) * args.ldx + chunk * 8;
#pragma unroll
    for (int i = 0; i < 4; i++)
      to[i] = shared_address(shared.x) + row * 128 + (chunk >> 1) * 4 + ((((chunk & 1) * 4 + i) ^ (row & 7)) << 4);
  }
  __device__ __forceinline__ void load(uint4 *v, int stage) const {
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      const int unit = i / (GROUPS * UNITS) * part_units + stage * UNITS + i / GROUPS % UNITS;
      v[i] = make_uint4(0, 0, 0, 0);
      if (unit < units && i % GROUPS * 16 < rows)
        v[i] = *reinterpret_cast<const uint4 *>(from[i % GROUPS] + unit * BSH_UNIT);
    }
  }
  __device__ __forceinline__ void store(const uint4 *v) {
    if (refill) mbarrier_wait(empty + 8 * slot, parity);
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      const uint32_t at = slot * FORM::STAGE_BYTES + i * ROWS_BYTES;
      st_shared(to[0] + at, v[i].x), st_shared(to[1] + at, v[i].y);
      st_shared(to[2] + at, v[i].z), st_shared(to[3] + at, v[i].w);
    }
    fence_proxy_async(); // the products read through the asynchronous proxy
    __syncwarp();
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(full + 8 * slot);
    if (++slot == STAGES) slot = 0, parity ^= 1, refill = true;
  }
  // Stages [first, end), the next one asked for before this one is written.
  __device__ __forceinline__ void run(int first, int end) {
    uint4 v[2][LOADS];
    load(v[0], first);
    for (int stage = first; stage < end; stage += 2) {
      if (stage + 1 < end) load(v[1], stage + 1);
      store(v[0]);
      if (stage + 1 == end) return;
      if (stage + 2 < end) load(v[0], stage + 2);
      store(v[1]);
    }
  }
};

} // namespace
} // namespace bsh
