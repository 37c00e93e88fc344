// gemm_4bit_sm90_wide.cuh - the kernel of gemm_4bit_sm90_wide.cu, which says how it works, and of
// gemm_4bit_sm90_wide_grouped.cu.
#pragma once

#include "cuda/epilogues/epilogue_sm90_wide.cuh"
#include "cuda/loaders/loaders_sm90_wide_short.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"

namespace bsh {
namespace {

enum { X_WARP = 8, SCALE_WARP = 9, W_WARP = 11 };
// Of a thread. 256 consumers and 128 producers share what the kernel starts with, 384 times 168.
// SCALED: a loader of scales has more of them in registers.
template <typename FORM>
constexpr int CONSUMER_REGISTERS = FORM::TOKENS == 256 && FORM::MODE == SCALED     ? 224
                                   : FORM::TOKENS == 256 || FORM::MODE == UNSCALED ? 232
                                                                                   : 208;
template <typename FORM> constexpr int PRODUCER_REGISTERS = 3 * 168 - 2 * CONSUMER_REGISTERS<FORM>;

template <typename T, typename FORM>
__device__ __forceinline__ void produce(const bsh_gemm_wide_args &args, const bsh_tensor_map *x_map,
                                        const bsh_tensor_map *w_map, char *memory, uint32_t base,
                                        const wide_place &place, int warp, int lane) {
  if (warp == X_WARP) {
    if (lane != 0) return;
    wait_for_earlier_kernels();
    load_x<FORM>(args, x_map, base, place);
  } else if (warp == W_WARP) {
    if (lane != 0) return;
    prefetch_w<FORM>(args, w_map, base, place);
    wait_for_earlier_kernels();
    load_w<FORM>(args, w_map, base, place);
  } else {
    const int of_64 = (warp - SCALE_WARP) * BSH_WARP + lane;
    if constexpr (FORM::MODE == SCALED) prefetch_short_scales<FORM>(args, base, place, of_64);
    wait_for_earlier_kernels();
    load_scales<T, FORM>(args, memory, base, place, of_64);
  }
}

// Tokens of a tile that are multiplied, known where registers get their names.
template <int TOKENS_> struct tile_width {
  static constexpr int TOKENS = TOKENS_;
};

// What a warp that multiplies keeps from tile to tile: where it is in the rings of x and of W, and operands on their
// way. References to variables of consume, and functions that are not inlined by force: so the compiler makes the same
// code of them as of one long function.
template <typename T, typename FORM> struct wide_consumer {
  // Sets of operand registers: a product is issued while the one before it runs, and only then the next one's operands
  // are made, so decoding has the time of two products.
  static constexpr int SETS = 4;
  const wide_barriers<FORM> &barriers;
  const int &lane;
  const uint32_t &x_empty; // in both blocks of the pair: lane i frees a stage of x for block i
  const uint64_t &x_descriptor;
  typename operand_decoder<T, FORM>::type &decode;
  uint32_t (&a)[SETS][8];
  uint32_t &x_parity;
  int &x_stage;
  uint32_t &parity;
  int &stage;

  __device__ void release_x(int s) const {
    if (lane < BSH_GEMM_WIDE_PAIR) mbarrier_arrive_there(x_empty + 8 * s);
  }
  __device__ __forceinline__ void release_w() const {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barriers.w_empty + 8 * stage);
  }
  __device__ __forceinline__ void next_x() {
    if (++x_stage == FORM::X_STAGES) x_stage = 0, x_parity ^= 1;
  }
  __device__ __forceinline__ void next_w() {
    if (++stage == FORM::STAGES) stage = 0, parity ^= 1;
  }

  // The first groups of a tile's first piece.
  __device__ __forceinline__ void begin() {
    mbarrier_wait(barriers.w_full + 8 * stage, parity);
    decode.bytes(stage, 0);
    decode.lookup(stage, 0);
    decode.bytes(stage, 1);
    decode.values(a[0]);
    decode.lookup(stage, 1);
    decode.bytes(stage, 2);
  }
  // Four groups of 32 of depth, beside whose products those of the next piece are decoded, if there is more. before:
  // the stage of x that the last product but one has read, or -1; what it is after this piece.
  template <int WIDTH> __device__ __forceinline__ int multiply_piece(float *sum, bool more, int before) {
    const int next_stage = stage + 1 == FORM::STAGES ? 0 : stage + 1;
    const uint32_t next_parity = stage + 1 == FORM::STAGES ? parity ^ 1 : parity;
#pragma unroll
    for (int q = 0; q < 4; q++) {
      if (q % 2 == 0) mbarrier_wait(barriers.x_full + 8 * x_stage, x_parity);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 2; k++)
        wgmma_rs<T, WIDTH>::mma_async(sum, a[q % SETS] + 4 * k,
                                      x_descriptor + ((x_stage * FORM::X_BYTES) >> 4) + (q % 2) * 4 + k * 2);
      wgmma_commit();
      if (q < 3 || more) decode.values(a[(q + 1) % SETS]); // group q + 1
      if (q == 2) release_w();
      if (q < 2) decode.lookup(stage, q + 2); // group q + 2
      else if (more) decode.lookup(next_stage, q - 2);
      if (q == 0) decode.bytes(stage, 3); // group q + 3
      else if (more) {
        if (q == 1) mbarrier_wait(barriers.w_full + 8 * next_stage, next_parity);
        decode.bytes(next_stage, q - 1);
      }
      wgmma_wait<1>(); // the product before this one is done with its operands
      if (q % 2 == 0) {
        if (before >= 0) release_x(before);
      } else {
        before = x_stage;
        next_x();
      }
    }
    stage = next_stage, parity = next_parity;
    return before;
  }
  // The first half of a piece, the last of a tile.
  template <int WIDTH> __device__ __forceinline__ void multiply_half(float *sum) {
    mbarrier_wait(barriers.x_full + 8 * x_stage, x_parity);
    decode.values(a[1]);
    release_w();
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++)
      wgmma_rs<T, WIDTH>::mma_async(sum, a[k / 2] + k % 2 * 4, x_descriptor + ((x_stage * FORM::X_BYTES) >> 4) + k * 2);
    wgmma_commit();
    wgmma_wait<0>();
    release_x(x_stage);
    next_x();
    next_w();
  }
  // For a warpgroup without rows of A: the other one multiplies in half of the time.
  template <typename WORK> __device__ void skip(const bsh_gemm_wide_args &args, const WORK &work) {
#pragma unroll 1
    for (int step = 0; step < wide_place::steps<FORM>(args, work.to); step++) {
      if (step % 2 == 0) {
        mbarrier_wait(barriers.w_full + 8 * stage, parity);
        release_w();
        next_w();
      }
      mbarrier_wait(barriers.x_full + 8 * x_stage, x_parity);
      __syncwarp();
      release_x(x_stage);
      next_x();
    }
  }
};

template <typename T, typename FORM>
__device__ __forceinline__ void consume(const bsh_gemm_wide_args &args, char *memory, uint32_t base,
                                        const wide_place &place, int warp, int lane) {
  const wide_barriers<FORM> barriers(base);
  const uint32_t x_empty = map_to_rank(barriers.x_empty, lane & 1);
  const uint64_t x_descriptor = wgmma_descriptor_64(base + BSH_GEMM_WIDE_X_AT);
  typename operand_decoder<T, FORM>::type decode(base, warp, lane);
  auto work = place.template scheduler<FORM>(args, base);
  uint32_t a[wide_consumer<T, FORM>::SETS][8];
  int x_stage = 0, stage = 0;
  uint32_t x_parity = 0, parity = 0;
  wide_consumer<T, FORM> own = {barriers, lane, x_empty, x_descriptor, decode, a, x_parity, x_stage, parity, stage};
  auto multiply = [&](auto width) {
    constexpr int WIDTH = decltype(width)::TOKENS;
    float sum[WIDTH / 2];
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) sum[i] = 0.f;
    own.begin();
    int before = -1;
    // By a shuffle, so that all lanes are known to go round together: else the compiler gives up uniform registers, in
    // which the products want addresses.
    const bool half = FORM::TRIMMED && place.template half_piece<FORM>(args); // the last piece
    for (int left = __shfl_sync(~0u, work.to - work.from, 0) - half; left > 0; left--)
      before = own.template multiply_piece<WIDTH>(sum, left > 1 || half, before);
    wgmma_wait<0>();
    if (!half || before >= 0) own.release_x(before);
    if (half) own.template multiply_half<WIDTH>(sum);
    finish_sums<T, FORM, WIDTH>(args, place, work, memory, sum);
  };
  while (work.next()) {
    if constexpr (FORM::TRIMMED) {
      mbarrier_wait(barriers.x_full + 8 * x_stage, x_parity); // behind which the tile's place is there
      const tile_place at = place.template left_at<FORM>(base, work.round);
      const bool rows = at.row + (warp >> 2) * 64 < place.template rows<FORM>(args);
      const int width = __shfl_sync(~0u, rows ? at.width : 0, 0); // as all lanes know
      if (width == 0) own.skip(args, work);
      else if (width == 128) multiply(tile_width<128>());
      else if (width == 192) multiply(tile_width<192>());
      else multiply(tile_width<256>());
    } else multiply(tile_width<FORM::TOKENS>());
  }
}

// part = 64 of depth of A in registers times x.
template <typename T, int TOKENS>
__device__ __forceinline__ void multiply_unit(float *part, const uint32_t *a, uint64_t x) {
  wgmma_fence();
  wgmma_rs<T, TOKENS>::template mma_async<false>(part, a, x);
#pragma unroll
  for (int k = 1; k < 4; k++) wgmma_rs<T, TOKENS>::mma_async(part, a + 4 * k, x + k * 2);
  wgmma_commit();
}
template <int SUMS> __device__ __forceinline__ void add_scaled(float *sum, const float *part, float2 scale) {
#pragma unroll
  for (int i = 0; i < SUMS; i++) sum[i] = fmaf(part[i], i & 2 ? scale.y : scale.x, sum[i]);
}

// A warpgroup's products of 64 of depth go to `part`, and from there to `sum` with the scales of the rows while the
// other warpgroup's products run. The two take turns, so that they don't both multiply and then both add: each waits at
// a named barrier of its own, where the other one arrives without a stop. Packed bytes are read 64 of depth before they
// are looked up.
enum { FIRST_TURN = 7 }; // named barriers: 7 and 8; 1 to 6 are of the table, the scales and the spans
template <typename T, typename FORM>
__device__ __forceinline__ void consume_unscaled(const bsh_gemm_wide_args &args, char *memory, uint32_t base,
                                                 const wide_place &place, int warp, int lane) {
  constexpr int THREADS = BSH_GEMM_WIDE_CONSUMERS * BSH_WARP;
  const wide_barriers<FORM> barriers(base);
  const uint32_t x_empty = map_to_rank(barriers.x_empty, lane & 1);
  const uint64_t x_descriptor = wgmma_descriptor_64(base + BSH_GEMM_WIDE_X_AT);
  const decoder<T, FORM> decode(base, warp, lane);
  const int own_turn = FIRST_TURN + warp / 4, other_turn = FIRST_TURN + 1 - warp / 4;
  auto work = place.template scheduler<FORM>(args, base);
  float sum[FORM::SUMS], part[FORM::SUMS];
  uint32_t a[2][16], raw[16]; // of a unit, 64 of depth: two groups
  int x_stage = 0, stage = 0;
  uint32_t x_parity = 0, parity = 0;
  auto bytes = [&](int s, int unit) {
    decode.bytes(s, 2 * unit, raw);
    decode.bytes(s, 2 * unit + 1, raw + 8);
  };
  auto find = [&](uint32_t *to) {
    decode.find(raw, to);
    decode.find(raw + 8, to + 8);
  };
#pragma unroll
  for (int i = 0; i < FORM::SUMS; i++) part[i] = 0.f;
  if (own_turn != FIRST_TURN) named_barrier_arrive<THREADS>(FIRST_TURN);
  while (work.next()) {
#pragma unroll
    for (int i = 0; i < FORM::SUMS; i++) sum[i] = 0.f;
    mbarrier_wait(barriers.w_full + 8 * stage, parity);
    bytes(stage, 0);
    find(a[0]);
    bytes(stage, 1);
    for (int left = __shfl_sync(~0u, work.to - work.from, 0); left > 0; left--) {
      const bool more = left > 1;
      const int next_stage = stage + 1 == FORM::STAGES ? 0 : stage + 1;
      const uint32_t next_parity = stage + 1 == FORM::STAGES ? parity ^ 1 : parity;
#pragma unroll
      for (int unit = 0; unit < 2; unit++) {
        const uint64_t b = x_descriptor + ((x_stage * FORM::X_BYTES) >> 4);
        mbarrier_wait(barriers.x_full + 8 * x_stage, x_parity);
        named_barrier<THREADS>(own_turn);
        multiply_unit<T, FORM::TOKENS>(part, a[unit], b);
        named_barrier_arrive<THREADS>(other_turn);
        if (unit == 0 || more) find(a[1 - unit]);
        const float2 scale = decode.scales_of_rows(stage, unit);
        if (unit == 1) {
          __syncwarp();
          if (lane == 0) mbarrier_arrive(barriers.w_empty + 8 * stage);
        }
        if (more) {
          if (unit == 0) mbarrier_wait(barriers.w_full + 8 * next_stage, next_parity);
          bytes(next_stage, unit);
        }
        wgmma_wait<0>();
        if (lane < BSH_GEMM_WIDE_PAIR) mbarrier_arrive_there(x_empty + 8 * x_stage);
        if (++x_stage == FORM::X_STAGES) x_stage = 0, x_parity ^= 1;
        add_scaled<FORM::SUMS>(sum, part, scale);
      }
      stage = next_stage, parity = next_parity;
    }
    finish_sums<T, FORM, FORM::TOKENS>(args, place, work, memory, sum);
  }
}

template <typename T, typename FORM>
__device__ __forceinline__ void gemm_wide(const bsh_tensor_map &x_map, const bsh_tensor_map &w_map,
                                          const bsh_gemm_wide_args &args) {
  extern __shared__ __align__(1024) char dynamic[];
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  // The shared window: above bit 24, the block's rank in its cluster. Places in it are constants.
  const uint32_t base = shared_address(dynamic) & 0xFF000000;
  char *const memory = dynamic - (shared_address(dynamic) & 0xFFFFFF);
  if ((shared_address(dynamic) & 0xFFFFFF) > BSH_GEMM_WIDE_TABLE_AT) __trap();
  let_later_kernels_start();
  if (threadIdx.x == X_WARP * BSH_WARP) prefetch_map(&x_map);
  if (threadIdx.x == W_WARP * BSH_WARP) prefetch_map(&w_map);
  const wide_place place;
  if (threadIdx.x == 0) wide_barriers<FORM>(base).init();
  if constexpr (FORM::GROUPED) {
    const expert_rows of = place.template experts<FORM>(args, base);
    wait_for_earlier_kernels();
    if (warp == 0) of.fill(args.offs, args.M, wide_tiles_of<FORM::TOKENS>());
    __syncthreads();
    clear_rows<T>(args.y, args.ldy, FORM::GRADIENT ? args.K : args.N, of.end(args.experts - 1), args.M);
  }
  __syncthreads();
  cluster_sync_aligned();
  if (warp >= BSH_GEMM_WIDE_CONSUMERS) {
    give_registers<PRODUCER_REGISTERS<FORM>>();
    produce<T, FORM>(args, &x_map, &w_map, memory, base, place, warp, lane);
  } else {
    take_registers<CONSUMER_REGISTERS<FORM>>();
    build_wide_table<T, FORM>(memory + BSH_GEMM_WIDE_TABLE_AT, args.format);
    named_barrier<BSH_GEMM_WIDE_CONSUMERS * BSH_WARP>(1);
    wait_for_earlier_kernels();
    if constexpr (FORM::MODE == UNSCALED) consume_unscaled<T, FORM>(args, memory, base, place, warp, lane);
    else consume<T, FORM>(args, memory, base, place, warp, lane);
  }
  __syncwarp();
  cluster_sync_aligned(); // nobody ends while a block of its cluster may still write here
}

} // namespace
} // namespace bsh

#define BSH_GEMM_WIDE_ENTRY(T, NAME, ... /* form */)                                                                   \
  extern "C" __global__ void __launch_bounds__(BSH_GEMM_WIDE_THREADS, 1)                                               \
      NAME(const __grid_constant__ bsh_tensor_map x_map, const __grid_constant__ bsh_tensor_map w_map,                 \
           const __grid_constant__ bsh_gemm_wide_args args) {                                                          \
    bsh::gemm_wide<T, bsh::__VA_ARGS__>(x_map, w_map, args);                                                           \
  }
// Of a form: both dtypes, both directions.
#define BSH_GEMM_WIDE_ENTRIES(ENTRY, STEM, FORM, TOKENS)                                                               \
  ENTRY(__nv_bfloat16, STEM##bf16_##FORM, TOKENS, false)                                                               \
  ENTRY(__half, STEM##f16_##FORM, TOKENS, false)                                                                       \
  ENTRY(__nv_bfloat16, STEM##dgrad_bf16_##FORM, TOKENS, true)                                                          \
  ENTRY(__half, STEM##dgrad_f16_##FORM, TOKENS, true)
