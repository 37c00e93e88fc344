// loaders_sm75.cuh - the forms of gemm_4bit_sm75.cu and gemm_4bit_sm75_grouped.cu, and x through registers to shared
// memory: sm_75 has no asynchronous copies. W comes as in loaders_sm80.cuh.
#pragma once

#include "cuda/loaders/loaders_sm80.cuh"
#include "cuda/ptx/ptx_sm75.cuh"
#include "cuda/sizes/gemm_4bit_sm75.h"

namespace bsh {
namespace {

template <bool GRADIENT_, bool GROUPED_> struct sm75_form {
  using T = __half;
  static constexpr int ROWS = BSH_GEMM_SM75_ROWS, THREADS = BSH_GEMM_SM75_THREADS, DEPTH = BSH_GEMM_SM75_DEPTH;
  static constexpr bool GRADIENT = GRADIENT_, GROUPED = GROUPED_, SHORT = false, SKIPS = true;
  static constexpr bool ONE_LOOP = true; // no registers for two
  static constexpr int X_BYTES = BSH_GEMM_SM75_X_BYTES, W_BYTES = BSH_GEMM_SM75_W_BYTES, W_AT = BSH_GEMM_SM75_W_AT;
  static constexpr int MAP_AT = BSH_GEMM_SM75_MAP_AT, PIECES_AT = BSH_GEMM_SM75_PIECES_AT;
  static constexpr int WORDS_AT = BSH_GEMM_SM75_WORDS_AT, SHARED_BYTES = BSH_GEMM_SM75_SHARED_BYTES;
  static constexpr int WORDS = BSH_GEMM_SM80_COLUMNS * DEPTH / 8 / THREADS;
};

// The chunks of the stage after the next are in registers from the second half of a stage on, and stored in the first
// half of the next one.
template <typename FORM> struct x_through_registers : x_loader<FORM> {
  using x_loader<FORM>::x_loader;
  static constexpr int CHUNKS = x_loader<FORM>::CHUNKS, STEP = x_loader<FORM>::STEP;
  static_assert(CHUNKS == 4 && STEP == BSH_GEMM_SM75_X_STEP, "one chunk a slot");
  uint32_t held[CHUNKS][4];

  __device__ __forceinline__ void load(const bsh_gemm_sm80_args &args, int chunk, const sm80_stage<FORM> &) {
    this->chunk = chunk == 0 ? this->from : this->chunk + args.x_step;
    load_16_or_zero(held[chunk], this->chunk, chunk * STEP < this->rows);
    if (chunk == CHUNKS - 1) this->from += 2 * FORM::DEPTH;
  }
  __device__ __forceinline__ void store(int chunk, const sm80_stage<FORM> &stage) {
    st_shared_vector(this->to + stage.x + chunk * STEP * stage_rows<FORM>::BYTES, held[chunk]);
  }
  __device__ __forceinline__ void load_first(const bsh_gemm_sm80_args &args, sm80_pieces &pieces) {
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) load(args, chunk, {});
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) store(chunk, {});
    this->pass(args, pieces, 1);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) load(args, chunk, {});
  }
  __device__ __forceinline__ void complete() const {}
};

} // namespace
} // namespace bsh
