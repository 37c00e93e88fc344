// gemm_4bit_sm90.cuh - the kernel of gemm_4bit_sm90.cu, which says how it works, and of gemm_4bit_sm90_short.cu.
#pragma once

#include "cuda/epilogues/epilogue_sm90.cuh"
#include "cuda/loaders/loaders_sm90.cuh"

namespace bsh {
namespace {

// A barrier of the warps that multiply.
template <typename FORM> __device__ __forceinline__ void sync_consumers() { named_barrier<FORM::WARPS * BSH_WARP>(1); }

template <typename FORM> __device__ __forceinline__ void init_barriers(const shared_layout &shared) {
  for (int i = 0; i < STAGES; i++)
    mbarrier_init(shared.full + 8 * i, FORM::OWN_X ? BSH_GEMM_X_WARPS : 1),
        mbarrier_init(shared.empty + 8 * i, FORM::WARPS);
  fence_mbarrier_init();
}

// part = 64 of K of A in registers times x; added: to what is there.
template <typename T, int TOKENS>
__device__ __forceinline__ void multiply_unit(float *part, const uint32_t (*a)[4], uint32_t x, bool added = false) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; k++) wgmma<T, TOKENS>::mma_async(part, a[k], x + k * 2, k > 0 || added);
  wgmma_commit();
}

// The units of a piece, whose bytes lie in `slot` of the ring: decoded, multiplied, their products scaled into the
// sums. References: so the compiler makes the same code as where this stood in gemm().
template <typename T, typename FORM, scale_kind KIND, int SUMS>
__device__ __forceinline__ void
multiply_piece(const shared_layout &shared, const scale_loader<KIND> &scales, x_loader<FORM> &x_in,
               const bool &brings_x, const bool &active, const int &lane, const int &piece, const uint32_t &slot,
               const uint32_t &own, const uint32_t &lane_base, const uint32_t &x_base, const float &zero,
               uint32_t &stage, uint32_t &parity, uint32_t (*a)[4][4], float (&sum)[SUMS], float (&part)[SUMS]) {
  constexpr int TOKENS = FORM::TOKENS, K_PARTS = FORM::K_PARTS, UNITS = FORM::STAGE_UNITS;
  constexpr bool AHEAD = FORM::AHEAD;
  uint2 upper_bytes, lower_bytes; // of the unit decoded next, read one unit ahead
  auto scaled = [&](int unit) {   // the operands of a unit, with the scales of their blocks
    if constexpr (SHORT<KIND>)
      scale_unit<T>(a[AHEAD ? unit & 1 : 0], scales.factors[0].of(unit), scales.factors[1].of(unit));
  };
  auto read_bytes = [&](int unit) {
    const uint32_t bytes = (own + slot) ^ (unit * 32);
    upper_bytes = ld_shared(bytes), lower_bytes = ld_shared(bytes + PIECE_BYTES / 2);
  };
  read_bytes(0);
  if (AHEAD) decode_unit<K_PARTS == 2>(a[0], upper_bytes, lower_bytes, lane_base, active), read_bytes(1);
#pragma unroll
  for (int unit = 0; unit < BSH_PIECE_UNITS; unit++) {
    if (unit % UNITS == 0) {
      if (brings_x) x_in.bring();
      mbarrier_wait(shared.full + 8 * stage, parity);
    }
    if (!AHEAD) {
      decode_unit<K_PARTS == 2>(a[0], upper_bytes, lower_bytes, lane_base, active);
      if (unit + 1 < BSH_PIECE_UNITS) read_bytes(unit + 1);
    }
    scaled(unit);
    multiply_unit<T, TOKENS>(part, a[AHEAD ? unit & 1 : 0],
                             x_base + ((stage * FORM::STAGE_BYTES + unit % UNITS * (TOKENS * 128)) >> 4),
                             SHORT<KIND> && unit > 0);
    if (AHEAD && unit + 1 < BSH_PIECE_UNITS) {
      decode_unit<K_PARTS == 2>(a[(unit + 1) & 1], upper_bytes, lower_bytes, lane_base, active);
      if (unit + 2 < BSH_PIECE_UNITS) read_bytes(unit + 2);
    }
    const bool complete = !SHORT<KIND> || unit + 1 == BSH_PIECE_UNITS || !scales.same; // else the next unit is added
    const float upper = complete ? scales.of(0, piece, unit) : 0.f, lower = complete ? scales.of(1, piece, unit) : 0.f;
    wgmma_wait<0, SUMS>(part);
    if (unit % UNITS == UNITS - 1) {
      if (lane == 0) mbarrier_arrive(shared.empty + 8 * stage);
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    if (complete)
#pragma unroll
      for (int i = 0; i < SUMS; i++) {
        sum[i] += (i & 2 ? lower : upper) * part[i];
        if (SHORT<KIND>) part[i] = zero; // what is added to it: all warps of a group issue the same wgmma
      }
  }
}

template <typename T, typename FORM, scale_kind KIND> __device__ __forceinline__ void gemm(const bsh_fused_args &args) {
  constexpr int TOKENS = FORM::TOKENS, K_PARTS = FORM::K_PARTS;
  constexpr int SUMS = TOKENS / 2, UNITS = FORM::STAGE_UNITS, WARPS = FORM::WARPS, ROW_WARPS = FORM::ROW_WARPS;
  constexpr bool AHEAD = FORM::AHEAD, OWN_X = FORM::OWN_X;
  extern __shared__ __align__(1024) char memory[];
  const shared_layout shared = lay_out<FORM>(memory);
  // The shuffle tells the compiler that all lanes agree.
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), g = lane >> 2, c = lane & 3;
  const row_block<FORM> rows(args);
  const scheduler<FORM> work(args);
  const int base = K_PARTS == 1 ? 0 : warp / ROW_WARPS * work.pieces; // this warp's part of K: its first piece
  const work_range start = work.first();

  // ---- before the wait: constants, and hints about what will be read
  weight_loader weights(args, shared.ring);
  weights.enter(args, rows.tile(start.block));
  if (warp < WARPS)
    for (int i = 0; i < min(work.count, OWN_X ? 2 : 4); i++)
      weights.prefetch(base + min(start.piece + i, work.pieces - 1));
  build_table<T>(shared.table, args.format, TABLE_TIMES<T, KIND>);
  if (threadIdx.x == 0) init_barriers<FORM>(shared);
  if (OWN_X) __syncthreads();
  wait_for_earlier_kernels();
  let_later_kernels_start();
  if constexpr (OWN_X)
    if (warp >= WARPS) {
      constexpr int STEPS = BSH_PIECE_UNITS / UNITS; // stages of a piece
      return x_producer<FORM>(args, shared, work.pieces).run(start.piece * STEPS, start.end * STEPS);
    }

  // ---- the ring of packed pieces, x, scales: filled for the first pieces
  work_range ahead = start; // the piece that the ring loads next
  auto load_next = [&](bool there_is, uint32_t to_slot) {
    if (there_is && rows.active) weights.start(base + ahead.piece, to_slot);
    cp_async_commit();
    if (++ahead.piece < ahead.end || K_PARTS == 2) return; // two parts of K: one row block
    ahead = work.after(ahead);
    weights.enter(args, rows.tile(ahead.block));
  };
#pragma unroll
  for (int i = 0; i < SLOTS - 1; i++) load_next(i < work.count, i * PIECE_BYTES);
  const bool brings_x = !OWN_X && __any_sync(~0u, threadIdx.x < 32); // the vote: all lanes agree
  x_loader<FORM> x_in(args, shared, work);
  if (brings_x)
    for (int i = 0; i < STAGES - 1; i++) x_in.bring();
  const float map_value = SHORT<KIND> || args.absmax ? 0.f : args.absmax_map[threadIdx.x & 255];
  float offset = args.absmax ? 0.f : *args.offset;
  work_range at = start;
  scale_loader<KIND> scales;
  scales.fetch(args, rows.tile(start.block), base + start.piece);
  if constexpr (SHORT<KIND>) check_map<KIND>(shared.map, args.absmax_map);
  else if (threadIdx.x < 256) shared.map[threadIdx.x] = map_value;
  sync_consumers<FORM>();
  if constexpr (SHORT<KIND>) offset = map_verdict(shared.map, offset);

  // ---- the pieces of this block's share: decode a unit, multiply it, scale its product into the sums
  const uint32_t lane_base = keep(shared_address(shared.table) + lane * 4);
  const uint32_t own = keep(shared_address(shared.ring) + warp * SLOTS * PIECE_BYTES + g * 128 + (g & 3) * 32 + c * 8);
  const uint32_t x_base =
      wgmma_descriptor(shared_address(shared.x) + (K_PARTS == 1 ? 0 : warp / ROW_WARPS * FORM::PART_BYTES));
  // Where it knows sums to be 0, ptxas makes of the next wgmma one that does not add, by a flag of each warp; but it is
  // one instruction of a group of warps, which must not differ in that.
  const float zero = __int_as_float(args.K & (BSH_UNIT - 1));
  uint32_t a[AHEAD ? 2 : 1][4][4] = {};
  float sum[SUMS] = {}, part[SUMS];
  uint32_t slot = 0, fill = (SLOTS - 1) * PIECE_BYTES, stage = 0, parity = 0;
  int left = work.count;
  for (; left > 0; at = work.after(at)) {
    const int from = at.piece;
    for (; at.piece < at.end; at.piece++, left--) {
      cp_async_wait<SLOTS - 2>();
      __syncwarp();
      load_next(left >= SLOTS, fill);
      const int piece = base + at.piece;
      if (at.piece == from || piece % scales.GROUP == 0) {
        if constexpr (SHORT<KIND>) scales.template resolve_short<T>(offset);
        else scales.resolve(args, shared.map, offset);
        work_range next = {at.block, (piece / scales.GROUP + 1) * scales.GROUP, 0};
        if (K_PARTS == 1 && next.piece >= at.end) next = work.after(at);
        scales.fetch(args, rows.tile(next.block), next.piece);
      }
      multiply_piece<T, FORM, KIND>(shared, scales, x_in, brings_x, rows.active, lane, piece, slot, own, lane_base,
                                    x_base, zero, stage, parity, a, sum, part);
      fill = slot;
      slot = slot == (SLOTS - 1) * PIECE_BYTES ? 0 : slot + PIECE_BYTES;
    }
    // ---- the end of a row block
    if constexpr (K_PARTS == 2) {
      add_parts<FORM>(sum, shared.ring);
      return epilogue_of_parts<T, FORM>(args, rows, sum); // out of the loop: its shuffles cost no uniform registers
    } else {
      epilogue<T, FORM>(args, work, at, from, rows.tile(at.block), sum);
#pragma unroll
      for (int i = 0; i < SUMS; i++) sum[i] = 0.f;
    }
  }
}

} // namespace
} // namespace bsh

#define BSH_GEMM_SM90(T, NAME, TOKENS, K_PARTS, KIND)                                                                  \
  BSH_ENTRY(__launch_bounds__(bsh_gemm_threads(TOKENS, K_PARTS), 1), NAME, bsh_fused_args,                             \
            gemm<T, bsh::gemm_form<TOKENS, K_PARTS>, bsh::KIND>)
