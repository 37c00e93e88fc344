// gemm_4bit_sm80.cuh - the kernel of gemm_4bit_sm80.cu, which says how it works, of gemm_4bit_sm80_grouped.cu, and of
// both for blocks of 16.
#pragma once

#include "cuda/epilogues/epilogue_sm80.cuh"

namespace bsh {
namespace {

#ifndef BSH_SM80_PRODUCTS
#define BSH_SM80_PRODUCTS 1 // 4 in benchmarks: as if tensor cores were as many times slower. y is as many times larger.
#endif

// The operands of a k16 step: one set of registers, loaded again behind the last product that reads it.
template <typename FORM> struct sm80_operands {
  uint32_t a[4][4], b[4][4]; // 16 rows each; 16 columns each
  uint32_t a_at, b_at;       // of this lane in the first stage
  int groups;                // SKIPS: of the warp's row groups those that have rows

  __device__ __forceinline__ explicit sm80_operands(uint32_t base) {
    const int lane = threadIdx.x & 31, wn = threadIdx.x >> 5 & 1, w = base + FORM::W_AT;
    a_at = base + (sm80_group<FORM>::first(threadIdx.x) + (lane & 15)) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
    b_at = FORM::GRADIENT ? w + (lane & 15) * 256 + wn * 128 + (((lane >> 4) ^ (lane & 7)) << 4)
                          : w + (wn * 64 + (lane & 7) + (lane >> 4) * 8) * 128 + (((lane >> 3 & 1) ^ (lane & 7)) << 4);
  }
  __device__ __forceinline__ sm80_operands(uint32_t a_at, uint32_t b_at) : a_at(a_at), b_at(b_at) {}
  __device__ __forceinline__ void count_groups(const sm80_piece &piece) {
    const int rows = piece.left - sm80_group<FORM>::first(thread_index()), apart = sm80_group<FORM>::APART;
    if (FORM::SKIPS) groups = uniform((rows + apart - 1) / apart);
  }
  // Of row groups without rows nothing is loaded or multiplied.
  __device__ __forceinline__ bool has(int i) const { return !FORM::SKIPS || i < groups; }
  __device__ __forceinline__ void load_a(int i, int step, const sm80_stage<FORM> &from) {
    ldmatrix_x4(a[i], (a_at ^ (step << 5)) + from.x + i * sm80_group<FORM>::APART * stage_rows<FORM>::BYTES);
  }
  __device__ __forceinline__ void load_b(int j, int step, const sm80_stage<FORM> &from) {
    if (FORM::GRADIENT) ldmatrix_x4_trans(b[j], (b_at ^ (j << 5)) + from.w + step * 4096);
    else ldmatrix_x4(b[j], (b_at ^ (step << 5)) + from.w + j * 16 * stage_rows<FORM>::BYTES);
  }
  __device__ __forceinline__ void load(const sm80_stage<FORM> &from) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      load_b(i, 0, from);
      if (has(i)) load_a(i, 0, from);
    }
  }
  // Two neighbouring products: row group i by 16 columns.
  __device__ __forceinline__ void multiply_pair(float (*sum)[4], int i, int j) const {
    using in_order = in_order<typename FORM::T>;
#pragma unroll
    for (int k = 0; k < 2 * BSH_SM80_PRODUCTS; k++) in_order::mma(sum[k & 1], a[i], b[j] + 2 * (k & 1));
  }
};

// What is decoded for the next stage between the products of this one. A stage has 16 slots of 4 pairs of products.
template <typename FORM> struct sm80_schedule {
  static constexpr int WORDS = FORM::WORDS, EACH = WORDS / 4; // of 32 steps of decoding those of 4 words are one
  enum { X_SLOT = 0, SCALE_SLOT = 3, W_SLOT = 11, TABLE_SLOT = 12, SLOTS = 16, STEPS = 32 };

  // Which part of x is loaded before a pair, or -1. All lie in one slot: ptxas puts three instructions before the first
  // copy behind an ldmatrix.
  static constexpr __device__ int x_part_at(int slot, int j) { return slot == X_SLOT ? j : -1; }

  // Words are stored a slot behind their decoding, the last in the same slot: before the stages turn.
  static constexpr __device__ int store_at(int slot) {
    return slot == 3 ? 0 : slot == 6 ? 1 : slot == 9 ? 2 : slot == 11 ? 3 : -1;
  }
  // The step at pair `at` of the stage, or -1. Two of three pairs have one, from the first on: of 40 ways to lay
  // decoding, copies and stores this is the fastest in both directions together.
  static constexpr __device__ int step_at(int at) {
    const int step = at / 3 * 2 + at % 3;
    return at % 3 < 2 && step < STEPS ? step : -1;
  }
  static __device__ __forceinline__ void behind_pair(w_loader<FORM> &w, const float *values, int slot, int j) {
    if (slot >= TABLE_SLOT) w.values.build((slot - TABLE_SLOT) * 4 + j, values, w.scale);
    const int step = step_at(slot * 4 + j);
    if (step >= 0)
#pragma unroll
      for (int k = 0; k < EACH; k++) w.decode(step * EACH + k);
  }
  static __device__ __forceinline__ void behind_slot(w_loader<FORM> &w, x_loader<FORM> &, int slot,
                                                     const sm80_stage<FORM> &to) {
    const int part = store_at(slot);
    if (part >= 0)
#pragma unroll
      for (int k = 0; k < EACH; k++) w.store(part * EACH + k, to);
  }
};

// Forms for sm_75 have parts of their own (loaders_sm75.cuh, gemm_4bit_sm75.cuh).
template <typename FORM> struct parts_of {
  using x = x_loader<FORM>;
  using operands = sm80_operands<FORM>;
  using schedule = sm80_schedule<FORM>;
};
template <typename FORM> using x_loader_of = typename parts_of<FORM>::x;
template <typename FORM> using operands_of = typename parts_of<FORM>::operands;
template <typename FORM> using schedule_of = typename parts_of<FORM>::schedule;
template <typename FORM> using pieces_of = std::conditional_t<FORM::GROUPED, grouped_pieces<FORM>, dense_pieces>;

template <typename FORM> struct sm80_block {
  static constexpr int STEPS = FORM::DEPTH / 16; // of a stage
  const bsh_gemm_sm80_args &args;
  pieces_of<FORM> pieces;
  x_loader_of<FORM> x;
  w_loader<FORM> w;
  operands_of<FORM> in;
  sm80_sums sum = {};
  sm80_stage<FORM> stage; // that is multiplied

  __device__ __forceinline__ sm80_block(const bsh_gemm_sm80_args &args, char *memory)
      : args(args), pieces(memory + FORM::PIECES_AT), x(shared_address(memory)), w(shared_address(memory)),
        in(shared_address(memory)) {}

  __device__ __forceinline__ void load_w() { w.load_scale(args), w.load(args), w.make_scale(), w.build(args.values); }
  // The first stage in shared memory, of the second what is loaded a stage ahead.
  __device__ __forceinline__ void begin() {
    if (!FORM::GROUPED) w.load_offset(args, 0);
    x.seek(args, pieces), w.seek(args, pieces);
    x.load_first(args, pieces);
    load_w();
#pragma unroll
    for (int k = 0; k < w.DECODE_STEPS; k++) w.decode(k);
#pragma unroll
    for (int j = 0; j < w.WORDS; j++) w.store(j, stage);
    w.pass(args, pieces, 1);
    load_w();
    x.complete();
    __syncthreads();
    x.pass(args, pieces, 1), w.pass(args, pieces, 1);
  }
  // Loads of W that begin at a slot.
  __device__ __forceinline__ void load_at(int slot) {
    using schedule = schedule_of<FORM>;
    if (slot == schedule::SCALE_SLOT) w.load_scale(args);
    if (slot == schedule::W_SLOT) w.load(args), w.make_scale();
  }
  // To the other stage: complete, and what is read here no longer needed.
  __device__ __forceinline__ void turn_over() {
    x.complete();
    __syncthreads();
    stage = stage.other();
  }
  // The products of row group i, if it HAS rows, with what lies between them.
  template <bool HAS> __device__ __forceinline__ void multiply_group(int step, int i) {
    using schedule = schedule_of<FORM>;
    const int slot = step * 4 + i, next = (step + 1) % STEPS;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int part = schedule::x_part_at(slot, j);
      if (part >= 0) x.load(args, part, stage.other());
      if (HAS) in.multiply_pair(sum[i] + 2 * j, i, j);
      if (i == 3) in.load_b(j, next, stage);
      schedule::behind_pair(w, args.values, slot, j);
    }
    if (HAS) in.load_a(i, next, stage);
  }
  // ALL: all row groups of the warp have rows, and nothing asks for it.
  template <bool ALL> __device__ __forceinline__ void multiply_stage() {
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      if (step == STEPS - 1) turn_over();
#pragma unroll
      for (int i = 0; i < 4; i++) {
        load_at(step * 4 + i);
        if (ALL || in.has(i)) multiply_group<true>(step, i);
        else multiply_group<false>(step, i);
        schedule_of<FORM>::behind_slot(w, x, step * 4 + i, stage.other());
      }
    }
  }
  template <bool ALL> __device__ __forceinline__ void multiply_stages(int count) {
#pragma unroll 1
    for (; count > 0; count--) multiply_stage<ALL>();
  }
  // The stages of a piece, in runs in which nothing that is loaded seeks. The loop that asks for rows was a sixth
  // slower beside the other one, in the gradient with tiles of 128 rows.
  __device__ __forceinline__ void multiply(int left) {
#pragma unroll 1
    while (left > 0) {
      const int stages = min(left, min(stages_in_row<FORM>(x.left), stages_in_row<FORM>(w.left)));
      if (!FORM::ONE_LOOP && in.has(3)) multiply_stages<true>(stages);
      else multiply_stages<false>(stages);
      left -= stages;
      x.pass(args, pieces, stages), w.pass(args, pieces, stages);
    }
  }
  __device__ __forceinline__ void run(uint32_t word_at) {
    begin();
#pragma unroll 1
    for (;; pieces.advance()) {
      const sm80_piece piece = pieces.now();
      if (!uniform(piece.work())) break;
      pieces.follow(args);
      in.count_groups(piece);
      in.load(stage); // here, and so not held while sums are finished
      multiply(uniform(piece.to() - piece.from()));
      finish_sums<FORM>(args, sum, pieces.now(), word_at);
    }
    x.complete();
  }
};

// Rows that no expert has.
template <typename FORM> __device__ __forceinline__ void clear_behind(const bsh_gemm_sm80_args &args) {
  int end = 0;
  for (int i = threadIdx.x & 31; i < args.experts; i += BSH_WARP) end = max(end, args.offs[i]);
  end = min((int)largest_of_warp((uint32_t)end), args.M);
  clear_rows<typename FORM::T>(args.y, args.ldy, FORM::GRADIENT ? args.K : args.N, end, args.M);
}

template <typename FORM> __device__ __forceinline__ void gemm_sm80(const bsh_gemm_sm80_args &args) {
  extern __shared__ __align__(1024) char memory[];
  float *const map = reinterpret_cast<float *>(memory + FORM::MAP_AT);
  let_later_kernels_start();
  wait_for_earlier_kernels();
  sm80_block<FORM> block(args, memory);
  block.pieces.begin(args);
  if (FORM::GROUPED) clear_behind<FORM>(args);
  for (int i = threadIdx.x; i < 256; i += FORM::THREADS) map[i] = args.map ? args.map[i] : 1.f;
  __syncthreads();
  block.run(shared_address(memory + FORM::WORDS_AT));
}

} // namespace
} // namespace bsh

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define BSH_GEMM_SM80_BODY(...) bsh::gemm_sm80<bsh::sm80_form<__VA_ARGS__>>(args);
#else
#define BSH_GEMM_SM80_BODY(...) __trap(); // the host does not launch it
#endif
#define BSH_GEMM_SM80_ENTRY(NAME, T, ROWS, ...) /* GRADIENT, GROUPED, SHORT */                                         \
  extern "C" __global__ void __launch_bounds__(bsh_gemm_sm80_threads(ROWS), ROWS == 256 ? 1 : 2)                       \
      NAME(const __grid_constant__ bsh_gemm_sm80_args args) {                                                          \
    BSH_GEMM_SM80_BODY(T, ROWS, __VA_ARGS__)                                                                           \
  }
// Of a form: both dtypes, both directions.
#define BSH_GEMM_SM80_ENTRIES(STEM, FORM, ROWS, ...) /* GROUPED, SHORT */                                              \
  BSH_GEMM_SM80_ENTRY(STEM##bf16_##FORM, __nv_bfloat16, ROWS, false, __VA_ARGS__)                                      \
  BSH_GEMM_SM80_ENTRY(STEM##f16_##FORM, __half, ROWS, false, __VA_ARGS__)                                              \
  BSH_GEMM_SM80_ENTRY(STEM##dgrad_bf16_##FORM, __nv_bfloat16, ROWS, true, __VA_ARGS__)                                 \
  BSH_GEMM_SM80_ENTRY(STEM##dgrad_f16_##FORM, __half, ROWS, true, __VA_ARGS__)
