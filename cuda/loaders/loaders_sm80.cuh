// loaders_sm80.cuh - x by asynchronous copies to shared memory, and packed W to registers, decoded to shared memory,
// for gemm_4bit_sm80.cu and gemm_4bit_sm80_grouped.cu.
//
// A stage of x is [rows][64], rows of 128 bytes in 8 chunks of 16, chunk c of row r at c ^ r % 8. A stage of W is,
// decoded, forward [128 rows of W][64] in the same layout, for the gradient [64 rows of W][2][64].
#pragma once

#include "cuda/operands/decode_sm80.cuh"
#include "cuda/schedulers/scheduler_sm80.cuh"

namespace bsh {
namespace {

// GROUPED: of a stack of experts. SHORT: blocks of 16 with codes E2M1 and nested scales; 256 rows.
template <typename T_, int ROWS_, bool GRADIENT_, bool GROUPED_ = false, bool SHORT_ = false> struct sm80_form {
  using T = T_;
  static constexpr int ROWS = ROWS_, THREADS = bsh_gemm_sm80_threads(ROWS);
  static constexpr bool GRADIENT = GRADIENT_, GROUPED = GROUPED_, SHORT = SHORT_;
  static constexpr int X_BYTES = bsh_gemm_sm80_x_bytes(ROWS), W_BYTES = BSH_GEMM_SM80_W_BYTES;
  static constexpr int W_AT = bsh_gemm_sm80_w_at(ROWS);
  static constexpr int WORDS = BSH_GEMM_SM80_COLUMNS * BSH_UNIT / 8 / THREADS; // packed ones, of a thread and stage
  static_assert(!SHORT || WORDS == 4, "two blocks");
};

template <typename FORM> struct x_loader {
  using T = typename FORM::T;
  static constexpr int STEP = bsh_gemm_sm80_x_step(FORM::ROWS), CHUNKS = FORM::ROWS / STEP; // of a thread
  uint32_t to;
  const char *from;
  int left = 0, rows; // left: stages of the piece; rows: of x from the first chunk on

  __device__ __forceinline__ explicit x_loader(uint32_t base) {
    const int t = threadIdx.x;
    to = base + (t >> 3) * 128 + (((t ^ (t >> 3)) & 7) << 4);
  }
  // Before the first load of a stage.
  __device__ __forceinline__ void seek(const bsh_gemm_sm80_args &args, sm80_pieces &pieces) {
    if (left == 0) {
      const int t = thread_index();
      const sm80_piece piece = pieces.next<sm80_pieces::X>();
      left = uniform(piece.to() - piece.from());
      from = reinterpret_cast<const char *>(static_cast<const T *>(args.x) + (piece.row + (t >> 3)) * args.ldx +
                                            piece.from() * BSH_UNIT + (t & 7) * 8);
      rows = piece.left - (t >> 3);
    }
    if (FORM::GRADIENT && left == 1 && args.N % BSH_UNIT) // columns of dy beyond N are zero
      if (pieces.last<sm80_pieces::X>().to() == args.cut.stages &&
          (args.cut.stages - 1) * BSH_UNIT + (thread_index() & 7) * 8 >= args.N)
        rows = 0;
  }
  // A quarter of a stage; behind the last, `step` bytes to the other stage. Of a stack rows that do not exist keep what
  // they had, which gets into no other row's sums.
  __device__ __forceinline__ void load(const bsh_gemm_sm80_args &args, int quarter, int step) {
#pragma unroll
    for (int i = quarter * CHUNKS / 4; i < (quarter + 1) * CHUNKS / 4; i++, from += args.x_step)
      if (!FORM::GROUPED || rows <= 0 || i * STEP < rows)
        cp_async_16_or_zero(to + i * STEP * 128, from, i * STEP < rows);
    if (quarter < 3) return;
    cp_async_commit();
    from += args.x_back, left--, to += step;
  }
};

template <typename FORM> struct w_loader {
  using T = typename FORM::T;
  static constexpr bool GRADIENT = FORM::GRADIENT;
  static constexpr int WORDS = FORM::WORDS;
  using values_of = std::conditional_t<FORM::SHORT, short_values<T>, block_values<T>>;
  static constexpr int DECODE_STEPS = values_of::DECODE_STEPS * WORDS;
  uint32_t to;                                 // where the first word goes, decoded; word j at ^ j << 4
  int left = 0;                                // stages of the piece
  uint32_t at;                                 // the first 32 weights that this thread decodes
  bool beyond = false;                         // gradient: W has no such row
  uint32_t begin = 0;                          // of a stack: the expert's first 32 weights
  uint32_t absmax_at = 0;                      // and its first place in absmax
  float offset;                                // of its scales
  uint32_t word[WORDS], ready[WORDS][4], code; // ready: decoded, not yet stored
  float absmax;
  typename values_of::scales scale;
  values_of values;

  // Its row of a stage, and which half of a unit where two threads share one.
  static __device__ __forceinline__ int row(int t) {
    const int lane = t & 31, warp = t >> 5;
    if (!GRADIENT) return WORDS == 4 ? t >> 1 : t;
    return WORDS == 4 ? warp * 8 + (lane >> 4) * 4 + ((lane >> 1) & 3) : warp * 16 + (lane >> 4) * 8 + (lane & 7);
  }
  static __device__ __forceinline__ int half(int t) { return WORDS == 4 ? t & 1 : 0; }
  static __device__ __forceinline__ int column_half(int t) { return GRADIENT ? t >> 3 & 1 : 0; }

  __device__ __forceinline__ explicit w_loader(uint32_t base) {
    const int t = threadIdx.x;
    to = base + FORM::W_AT + row(t) * (GRADIENT ? 256 : 128) + column_half(t) * 128 +
         (((half(t) * 4) ^ (row(t) & 7)) << 4);
  }
  // Before the first load of a stage. Forward, rows beyond W are the last one again, whose sums are not stored; so are
  // columns of the gradient, whose rows beyond W are zeros.
  __device__ __forceinline__ void seek(const bsh_gemm_sm80_args &args, sm80_pieces &pieces) {
    if (left == 0) {
      const int t = thread_index();
      const int units = args.K / BSH_UNIT; // of a row of W
      const sm80_piece piece = pieces.next<sm80_pieces::W>();
      left = uniform(piece.to() - piece.from());
      if (!GRADIENT) at = min(piece.column + row(t), args.N - 1) * units + piece.from();
      else at = (piece.from() * BSH_UNIT + row(t)) * units + min(piece.column / BSH_UNIT + column_half(t), units - 1);
      at = 2 * at + half(t);
      beyond = false;
      if (FORM::GROUPED) {
        begin = 2u * piece.expert * args.N * units, at += begin,
        absmax_at = (uint32_t)piece.expert * args.expert_absmax;
        offset = args.map ? __ldg(args.offset + piece.expert) : -0.f; // x + -0 is x
      }
    }
    if (GRADIENT && left == 1 && args.N % BSH_UNIT)
      if (pieces.last<sm80_pieces::W>().to() == args.cut.stages && row(thread_index()) >= args.N % BSH_UNIT)
        beyond = true, at = begin;
  }
  __device__ __forceinline__ void load_scale(const bsh_gemm_sm80_args &args) {
    if constexpr (FORM::SHORT) code = __ldg(reinterpret_cast<const uint16_t *>(args.codes) + at); // of both blocks
    else code = __ldg(args.codes + (at >> args.block_shift));
    absmax = __ldg(args.absmax + absmax_at + ((at - begin) >> args.absmax_shift));
  }
  // The packed words of a stage; and asks L2 for a later one, of the gradient also for codes of its scales: forward a
  // sector of them lasts for many stages.
  __device__ __forceinline__ void load(const bsh_gemm_sm80_args &args) {
    const uint4 *from = reinterpret_cast<const uint4 *>(args.packed + (uint64_t)at * 16);
#pragma unroll
    for (int i = 0; i < WORDS / 4; i++) {
      const uint4 v = __ldg(from + i);
      word[4 * i] = v.x, word[4 * i + 1] = v.y, word[4 * i + 2] = v.z, word[4 * i + 3] = v.w;
    }
    at += GRADIENT ? 2 * args.K : 2, left--;
    const uint32_t ahead = min(at + (GRADIENT ? 2 * args.K : 6), args.last_half);
    prefetch_l2(args.packed + (uint64_t)ahead * 16);
    if (GRADIENT) prefetch_l2(args.codes + (FORM::SHORT ? 2 * (uint64_t)ahead : ahead >> args.block_shift));
  }
  // What dequantize_4bit has.
  __device__ __forceinline__ void make_scale(const float *map, const float *of_weight) {
    const float add = FORM::GROUPED ? offset : *of_weight;
    if constexpr (FORM::SHORT) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        scale.of[i] = __fadd_rn(multiply_in_order(map[code >> 8 * i & 255], absmax), add);
        if (GRADIENT && beyond) scale.of[i] = 0.f;
      }
    } else {
      scale = __fadd_rn(multiply_flush_in_order(map[code], absmax), add);
      if (GRADIENT && beyond) scale = 0.f;
    }
  }
  __device__ __forceinline__ void build(const float *of_codes) {
#pragma unroll
    for (int i = 0; i < values_of::BUILD_STEPS; i++) values.build(i, of_codes, scale);
  }
  // Step k of DECODE_STEPS.
  __device__ __forceinline__ void decode(int k) { values.decode(k % 8, ready[k / 8], word[k / 8], k / 16); }
  __device__ __forceinline__ void store(int j) { st_shared_vector(to ^ (j << 4), ready[j]); }
};

} // namespace
} // namespace bsh
