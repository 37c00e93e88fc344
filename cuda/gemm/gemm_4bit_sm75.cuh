// gemm_4bit_sm75.cuh - what the kernel of gemm_4bit_sm75.cu, which says how it works, and of gemm_4bit_sm75_grouped.cu
// has in the place of parts of gemm_4bit_sm80.cuh.
#pragma once

#include "cuda/gemm/gemm_4bit_sm80.cuh"
#include "cuda/loaders/loaders_sm75.cuh"

namespace bsh {
namespace {

template <typename FORM> struct sm75_operands : sm80_operands<FORM> {
  using layout = stage_rows<FORM>;
  static __device__ __forceinline__ int lane() { return threadIdx.x & 31; }
  __device__ __forceinline__ explicit sm75_operands(uint32_t base)
      : sm80_operands<FORM>(a_from(base), b_from(base + FORM::W_AT)) {}
  static __device__ __forceinline__ uint32_t a_from(uint32_t x) {
    const int row = sm80_group<FORM>::first(threadIdx.x) + (lane() & 15);
    return x + row * layout::BYTES + (((lane() >> 4) ^ layout::turned(row)) << 4);
  }
  static __device__ __forceinline__ uint32_t b_from(uint32_t w) {
    const int wn = threadIdx.x >> 5 & 1, row = wn * 64 + (lane() & 7) + (lane() >> 4) * 8;
    return FORM::GRADIENT ? w + (lane() & 15) * 256 + wn * 128 + (((lane() >> 4) ^ (lane() & 7)) << 4)
                          : w + row * layout::BYTES + (((lane() >> 3 & 1) ^ layout::turned(row)) << 4);
  }
  // A k16 step in two halves; neighbouring products add to different sums.
  __device__ __forceinline__ void multiply_pair(float (*sum)[4], int i, int j) const {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int k = 0; k < 2; k++) mma_m16n8k8(sum[k], this->a[i] + 2 * half, this->b[j][2 * k + half]);
  }
};

// A stage has 8 slots of 4 pairs of products. Stores lie before the barrier, behind slot 3.
template <typename FORM> struct sm75_schedule {
  enum { X_SLOT = 4, SCALE_SLOT = 0, W_SLOT = 3, TABLE_SLOT = 4, FIRST_PAIR = 2, EACH = 2, STEPS = 16 };
  static_assert(w_loader<FORM>::DECODE_STEPS == STEPS && FORM::WORDS == 2, "of a thread and stage");

  static constexpr __device__ int x_part_at(int slot, int j) { return j == 0 && slot >= X_SLOT ? slot - X_SLOT : -1; }

  static __device__ __forceinline__ void behind_pair(w_loader<FORM> &w, const float *values, int slot, int j) {
    if (slot >= TABLE_SLOT) w.values.build((slot - TABLE_SLOT) * 4 + j, values, w.scale);
    const int step = (slot * 4 + j - FIRST_PAIR) * EACH;
    if (step >= 0 && step < STEPS)
#pragma unroll
      for (int k = 0; k < EACH; k++) w.decode(step + k);
  }
  static __device__ __forceinline__ void behind_slot(w_loader<FORM> &w, x_through_registers<FORM> &x, int slot,
                                                     const sm80_stage<FORM> &to) {
    if (slot < 4) x.store(slot, to);
    if (slot == 2 || slot == 3) w.store(slot - 2, to);
  }
};

template <bool GRADIENT, bool GROUPED> struct parts_of<sm75_form<GRADIENT, GROUPED>> {
  using FORM = sm75_form<GRADIENT, GROUPED>;
  using x = x_through_registers<FORM>;
  using operands = sm75_operands<FORM>;
  using schedule = sm75_schedule<FORM>;
};

} // namespace
} // namespace bsh

#define BSH_GEMM_SM75_ENTRY(NAME, GRADIENT, GROUPED)                                                                   \
  extern "C" __global__ void __launch_bounds__(BSH_GEMM_SM75_THREADS, 1)                                               \
      NAME(const __grid_constant__ bsh_gemm_sm80_args args) {                                                          \
    bsh::gemm_sm80<bsh::sm75_form<GRADIENT, GROUPED>>(args);                                                           \
  }
