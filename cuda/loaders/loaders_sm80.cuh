// loaders_sm80.cuh - x by asynchronous copies to shared memory, and packed W to registers, decoded to shared memory,
// for gemm_4bit_sm80.cu and gemm_4bit_sm80_grouped.cu.
//
// A stage of x is [rows][64], rows of 128 bytes in 8 chunks of 16, chunk c of row r at c ^ r % 8. A stage of W is,
// decoded, forward [128 rows of W][64] in the same layout, for the gradient [64 rows of W][2][64]. Forms for sm_75 have
// 32 of depth in the place of 64: two rows of 64 bytes are then beside each other, chunk c of row r at c ^ r / 2 % 4.
#pragma once

#include "cuda/operands/decode_sm80.cuh"
#include "cuda/schedulers/scheduler_sm80.cuh"

namespace bsh {
namespace {

// GROUPED: of a stack of experts. SHORT: blocks of 16 with codes E2M1 and nested scales; 256 rows. ONE_LOOP: warps
// whose row groups all have rows have no loop of their own.
template <typename T_, int ROWS_, bool GRADIENT_, bool GROUPED_ = false, bool SHORT_ = false, bool ONE_LOOP_ = false>
struct sm80_form {
  using T = T_;
  static constexpr int ROWS = ROWS_, THREADS = bsh_gemm_sm80_threads(ROWS);
  static constexpr bool GRADIENT = GRADIENT_, GROUPED = GROUPED_, SHORT = SHORT_, ONE_LOOP = ONE_LOOP_;
  static constexpr int X_BYTES = bsh_gemm_sm80_x_bytes(ROWS), W_BYTES = BSH_GEMM_SM80_W_BYTES;
  static constexpr int DEPTH = BSH_UNIT; // of a stage
  static constexpr int W_AT = bsh_gemm_sm80_w_at(ROWS), MAP_AT = bsh_gemm_sm80_map_at(ROWS);
  static constexpr int PIECES_AT = bsh_gemm_sm80_pieces_at(ROWS), WORDS_AT = bsh_gemm_sm80_words_at(ROWS);
  static constexpr int SHARED_BYTES = bsh_gemm_sm80_shared_bytes(ROWS);
  static constexpr int WORDS = BSH_GEMM_SM80_COLUMNS * DEPTH / 8 / THREADS; // packed ones, of a thread and stage
  static_assert(!SHORT || WORDS == 4, "two blocks");
  static constexpr bool SKIPS = GROUPED; // row groups without rows
};

// Stages that follow each other, of which only the first needs a seek: those `left`, but the gradient's last.
template <typename FORM> __device__ __forceinline__ int stages_in_row(int left) {
  return FORM::GRADIENT && left > 1 ? left - 1 : left;
}

// Where rows of a stage are, and their chunks.
template <typename FORM> struct stage_rows {
  static constexpr int BYTES = FORM::DEPTH * 2, CHUNKS = FORM::DEPTH / 8;
  static __device__ __forceinline__ int turned(int row) { return CHUNKS == 8 ? row & 7 : row >> 1 & 3; }
};

// One of the two stages: bytes from the first one of x, and of W.
template <typename FORM> struct sm80_stage {
  uint32_t x = 0, w = 0;
  __device__ __forceinline__ sm80_stage other() const { return {FORM::X_BYTES - x, FORM::W_BYTES - w}; }
};

template <typename FORM> struct x_loader {
  using T = typename FORM::T;
  static constexpr int OF_ROW = stage_rows<FORM>::CHUNKS, SHIFT = OF_ROW == 8 ? 3 : 2; // chunks of a row
  static constexpr int STEP = FORM::THREADS / OF_ROW, CHUNKS = FORM::ROWS / STEP;      // of a thread
  uint32_t to;
  const char *from, *chunk; // the stage's first one, and one after the other
  int left = 0, rows;       // left: stages of the piece; rows: of x from the first chunk on

  __device__ __forceinline__ explicit x_loader(uint32_t base) {
    const int t = threadIdx.x;
    to = base + (t >> SHIFT) * stage_rows<FORM>::BYTES + (((t ^ (t >> 3)) & (OF_ROW - 1)) << 4);
  }
  // Before the first load of a stage.
  __device__ __forceinline__ void seek(const bsh_gemm_sm80_args &args, sm80_pieces &pieces) {
    if (left == 0) {
      const int t = thread_index();
      const sm80_piece piece = pieces.next<sm80_pieces::X>();
      left = uniform(piece.to() - piece.from());
      from = reinterpret_cast<const char *>(static_cast<const T *>(args.x) + (piece.row + (t >> SHIFT)) * args.ldx +
                                            piece.from() * FORM::DEPTH + (t & (OF_ROW - 1)) * 8);
      rows = piece.left - (t >> SHIFT);
    }
    if (FORM::GRADIENT && left == 1 && args.N % FORM::DEPTH) // columns of dy beyond N are zero
      if (pieces.last<sm80_pieces::X>().to() == args.cut.stages &&
          (args.cut.stages - 1) * FORM::DEPTH + (thread_index() & (OF_ROW - 1)) * 8 >= args.N)
        rows = 0;
  }
  // To the stage behind the next `stages`, which were loaded.
  __device__ __forceinline__ void pass(const bsh_gemm_sm80_args &args, sm80_pieces &pieces, int stages) {
    left -= stages;
    seek(args, pieces);
  }
  // A quarter of a stage. Of a stack rows that do not exist keep what they had, which gets into no other row's sums.
  __device__ __forceinline__ void load(const bsh_gemm_sm80_args &args, int quarter, const sm80_stage<FORM> &stage) {
#pragma unroll
    for (int i = quarter * CHUNKS / 4; i < (quarter + 1) * CHUNKS / 4; i++) {
      chunk = i == 0 ? from : chunk + args.x_step;
      if (!FORM::GROUPED || rows <= 0 || i * STEP < rows)
        cp_async_16_or_zero(to + stage.x + i * STEP * 128, chunk, i * STEP < rows);
    }
    if (quarter < 3) return;
    cp_async_commit();
    from += 2 * FORM::DEPTH;
  }
  // Of the block's first piece.
  __device__ __forceinline__ void load_first(const bsh_gemm_sm80_args &args, sm80_pieces &) {
#pragma unroll
    for (int quarter = 0; quarter < 4; quarter++) load(args, quarter, {});
  }
  // What was loaded is in shared memory.
  __device__ __forceinline__ void complete() const { cp_async_wait<0>(); }
};

template <typename FORM> struct w_loader {
  using T = typename FORM::T;
  static constexpr bool GRADIENT = FORM::GRADIENT;
  static constexpr int WORDS = FORM::WORDS;
  static constexpr int OF_STAGE = FORM::DEPTH / (BSH_UNIT / 2); // 32 weights each, of a row's depth
  using values_of = std::conditional_t<FORM::SHORT, short_values<T>, block_values<T>>;
  static constexpr int DECODE_STEPS = values_of::DECODE_STEPS * WORDS;
  uint32_t to;            // where the first word goes, decoded, in the first stage; word j at ^ j << 4
  int left = 0;           // stages of the piece
  uint32_t at;            // the first 32 weights that this thread decodes
  bool beyond = false;    // gradient: W has no such row
  uint32_t begin = 0;     // of a stack: the expert's first 32 weights
  uint32_t absmax_at = 0; // and its first place in absmax
  const uint32_t map_at;  // in shared memory
  float offset;           // of the scales
  uint32_t word[WORDS], ready[WORDS][4], code; // ready: decoded, not yet stored
  float absmax;
  typename values_of::scales scale;
  values_of values;

  // Its row of a stage, and which WORDS words where threads share the depth of it, or a unit of 64 columns.
  static __device__ __forceinline__ int row(int t) {
    const int lane = t & 31, warp = t >> 5;
    if (!GRADIENT) return WORDS == 8 ? t : t >> 1;
    if (WORDS == 2) return warp * 4 + (lane >> 4) * 2 + (lane >> 2 & 1);
    return WORDS == 4 ? warp * 8 + (lane >> 4) * 4 + ((lane >> 1) & 3) : warp * 16 + (lane >> 4) * 8 + (lane & 7);
  }
  static __device__ __forceinline__ int part(int t) { return WORDS == 8 ? 0 : WORDS == 2 && GRADIENT ? t & 3 : t & 1; }
  static __device__ __forceinline__ int half(int t) { return WORDS == 4 ? t & 1 : part(t) >> 1; } // of a unit
  static __device__ __forceinline__ int column_half(int t) { return GRADIENT ? t >> 3 & 1 : 0; }
  static __device__ __forceinline__ int turned(int row) { return GRADIENT ? row & 7 : stage_rows<FORM>::turned(row); }

  __device__ __forceinline__ explicit w_loader(uint32_t base) : map_at(base + FORM::MAP_AT) {
    const int t = threadIdx.x;
    to = base + FORM::W_AT + row(t) * (GRADIENT ? 256 : stage_rows<FORM>::BYTES) + column_half(t) * 128 +
         (((part(t) * WORDS) ^ turned(row(t))) << 4);
  }
  __device__ __forceinline__ void load_offset(const bsh_gemm_sm80_args &args, int expert) {
    offset = args.map ? __ldg(args.offset + expert) : -0.f; // x + -0 is x
  }
  // Before the first load of a stage. Forward, rows beyond W are the last one again, whose sums are not stored; so are
  // columns of the gradient, whose rows beyond W are zeros.
  __device__ __forceinline__ void seek(const bsh_gemm_sm80_args &args, sm80_pieces &pieces) {
    if (left == 0) {
      const int t = thread_index();
      const int units = args.K / BSH_UNIT; // of a row of W
      const sm80_piece piece = pieces.next<sm80_pieces::W>();
      left = uniform(piece.to() - piece.from());
      if (!GRADIENT) at = min(piece.column + row(t), args.N - 1) * (BSH_UNIT / FORM::DEPTH * units) + piece.from();
      else
        at = (piece.from() * FORM::DEPTH + row(t)) * units + min(piece.column / BSH_UNIT + column_half(t), units - 1);
      at = (GRADIENT ? 2 : OF_STAGE) * at + half(t);
      beyond = false;
      if (FORM::GROUPED) {
        begin = 2u * piece.expert * args.N * units, at += begin;
        absmax_at = (uint32_t)piece.expert * args.expert_absmax;
        load_offset(args, piece.expert);
      }
    }
    if (GRADIENT && left == 1 && args.N % FORM::DEPTH)
      if (pieces.last<sm80_pieces::W>().to() == args.cut.stages && row(thread_index()) >= args.N % FORM::DEPTH)
        beyond = true, at = begin;
  }
  // As x_loader's.
  __device__ __forceinline__ void pass(const bsh_gemm_sm80_args &args, sm80_pieces &pieces, int stages) {
    left -= stages;
    seek(args, pieces);
  }
  __device__ __forceinline__ void load_scale(const bsh_gemm_sm80_args &args) {
    if constexpr (FORM::SHORT) code = __ldg(reinterpret_cast<const uint16_t *>(args.codes) + at); // of both blocks
    else code = load_byte(args.codes + (at >> args.block_shift));
    absmax = __ldg(args.absmax + absmax_at + ((at - begin) >> args.absmax_shift));
  }
  // The packed words of a stage. Asks L2 for a later one where few rows wait for it; of the gradient always, and for
  // codes of its scales: forward a sector of them lasts for many stages.
  __device__ __forceinline__ void load(const bsh_gemm_sm80_args &args) {
    const uint4 *from = reinterpret_cast<const uint4 *>(args.packed + (uint64_t)at * 16);
#pragma unroll
    for (int i = 0; i < WORDS / 4; i++) {
      const uint4 v = __ldg(from + i);
      word[4 * i] = v.x, word[4 * i + 1] = v.y, word[4 * i + 2] = v.z, word[4 * i + 3] = v.w;
    }
    if (WORDS == 2) {
      const uint2 v = __ldg(reinterpret_cast<const uint2 *>(from) + (part(thread_index()) & 1));
      word[0] = v.x, word[1] = v.y;
    }
    at += OF_STAGE * (GRADIENT ? args.K : 1);
    const uint32_t ahead = min(at + (GRADIENT ? OF_STAGE * args.K : 6), args.last_half);
    if (GRADIENT || FORM::ROWS == 128) prefetch_l2(args.packed + (uint64_t)ahead * 16);
    if (GRADIENT) prefetch_l2(args.codes + (FORM::SHORT ? 2 * (uint64_t)ahead : ahead >> args.block_shift));
  }
  __device__ __forceinline__ float of_map(uint32_t code) const {
    return __uint_as_float(ld_shared_4(map_at + 4 * code));
  }
  // What dequantize_4bit has.
  __device__ __forceinline__ void make_scale() {
    if constexpr (FORM::SHORT) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        scale.of[i] = __fadd_rn(multiply_in_order(of_map(code >> 8 * i & 255), absmax), offset);
        if (GRADIENT && beyond) scale.of[i] = 0.f;
      }
    } else {
      scale = __fadd_rn(multiply_flush_in_order(of_map(code), absmax), offset);
      if (GRADIENT && beyond) scale = 0.f;
    }
  }
  __device__ __forceinline__ void build(const float *of_codes) {
#pragma unroll
    for (int i = 0; i < values_of::BUILD_STEPS; i++) values.build(i, of_codes, scale);
  }
  // Step k of DECODE_STEPS.
  __device__ __forceinline__ void decode(int k) { values.decode(k % 8, ready[k / 8], word[k / 8], k / 16); }
  __device__ __forceinline__ void store(int j, const sm80_stage<FORM> &stage) {
    st_shared_vector((to ^ (j << 4)) + stage.w, ready[j]);
  }
};

} // namespace
} // namespace bsh
