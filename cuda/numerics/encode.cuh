// encode.cuh - 4-bit codes of numbers by a warp, in few instructions.
#ifndef BSH_ENCODE_CUH
#define BSH_ENCODE_CUH

#include "cuda/numerics/common.cuh"

namespace bsh {

// The code of v is the number of thresholds below it. [-1, 1] is cut into bins of width 1/15 (FP4: [0, 1] into 1/14),
// each with one threshold at most: code = thresholds of lower bins + (v > threshold of this bin). The bin is the
// rounded 15 v, taken from the low bits of 15 v + 15 + 1.5 * 2^23; rounding is monotonic, so a threshold in another bin
// lies on the right side of v. The low bits of a NaN are 31, a bin of its own with code 0.
constexpr int BINS = 32, NAN_BIN = 31;
constexpr float BIN_BIAS = 12582912.0f;
constexpr uint32_t NO_THRESHOLD = 0x7F800000u;

template <int FORMAT> struct bins {
  static constexpr float SCALE = FORMAT == BSH_FP4 ? 14.0f : 15.0f;
  static constexpr int FIRST = FORMAT == BSH_FP4 ? 0 : -15; // bin of entry 0
};

constexpr double value_of_bits(uint32_t bits) {
  double value = 1.0 + (bits & 0x7FFFFFu) / 8388608.0;
  for (int e = (int)(bits >> 23 & 255u) - 127; e < 0; e++) value /= 2;
  return bits >> 31 ? -value : value; // magnitudes below 1 only
}

template <int FORMAT> constexpr int bin_of(uint32_t bits) {
  const double scaled = value_of_bits(bits) * bins<FORMAT>::SCALE;
  return (int)(scaled < 0 ? scaled - 0.5 : scaled + 0.5);
}

struct bin_table {
  uint32_t threshold[BINS]; // fp32 bits
  uint32_t below[BINS];     // thresholds of lower bins
  bool unique;
};

template <int FORMAT, int COUNT> constexpr bin_table make_bins(const uint32_t (&thresholds)[COUNT]) {
  bin_table table{};
  table.unique = true;
  for (int entry = 0; entry < BINS; entry++) {
    const int bin = entry + bins<FORMAT>::FIRST;
    table.threshold[entry] = NO_THRESHOLD;
    int inside = 0;
    for (int i = 0; i < COUNT && entry != NAN_BIN; i++) {
      if (bin_of<FORMAT>(thresholds[i]) < bin) table.below[entry]++;
      if (bin_of<FORMAT>(thresholds[i]) != bin) continue;
      table.threshold[entry] = thresholds[i];
      inside++;
    }
    table.unique = table.unique && inside <= 1;
  }
  return table;
}

constexpr uint32_t NF4_THRESHOLDS[15] = {BSH_NF4_THRESHOLD_BITS};
constexpr uint32_t FP4_THRESHOLDS[7] = {BSH_FP4_THRESHOLD_BITS};
static_assert(make_bins<BSH_NF4>(NF4_THRESHOLDS).unique && make_bins<BSH_FP4>(FP4_THRESHOLDS).unique,
              "a bin holds two thresholds");
__device__ constexpr bin_table BIN_TABLES[2] = {make_bins<BSH_NF4>(NF4_THRESHOLDS), make_bins<BSH_FP4>(FP4_THRESHOLDS)};

constexpr uint32_t order_nibbles() {
  constexpr uint32_t order[8] = {BSH_FP4_ORDER};
  uint32_t nibbles = 0;
  for (int i = 0; i < 8; i++) nibbles |= order[i] << (4 * i);
  return nibbles;
}
constexpr uint32_t FP4_ORDER = order_nibbles();

// Encodes with one bin per lane; all lanes of the warp take part in every call.
template <int FORMAT> struct code_encoder {
  float threshold;
  uint32_t below;

  __device__ __forceinline__ code_encoder() {
    threshold = __uint_as_float(BIN_TABLES[FORMAT].threshold[threadIdx.x % BINS]);
    below = BIN_TABLES[FORMAT].below[threadIdx.x % BINS];
  }

  // codes + (code of v << shift), for v = x / absmax or NaN.
  __device__ __forceinline__ uint32_t add_code(uint32_t codes, float v, int shift) const {
    const float position = FORMAT == BSH_FP4 ? fabsf(v) : v;
    const int bin = __float_as_int(__fmaf_rn(position, bins<FORMAT>::SCALE, BIN_BIAS - bins<FORMAT>::FIRST));
    const float nearest = __shfl_sync(ALL_LANES, threshold, bin);
    const uint32_t lower = __shfl_sync(ALL_LANES, below, bin);
    if constexpr (FORMAT == BSH_NF4) {
      codes += lower << shift;
      asm("{ .reg .pred above; setp.gt.f32 above, %1, %2; @above add.u32 %0, %0, %3; }"
          : "+r"(codes)
          : "f"(v), "f"(nearest), "r"(1u << shift));
      return codes;
    }
    const uint32_t code = (FP4_ORDER >> (4 * (lower + (position > nearest))) & 7u) | (v < 0.0f ? 8u : 0u);
    return codes + (code << shift);
  }
};

__device__ __forceinline__ float warp_absmax(float absmax) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) absmax = fmaxf(absmax, __shfl_xor_sync(ALL_LANES, absmax, d));
  return absmax;
}

} // namespace bsh

#endif
