// mixed_int8_sm90.cu - y[M, N] = x[M, K] W^T + bias in one pass over the codes of W, x as it is, on Hopper (sm_90a).
//
// mixed_int8_sm90.cuh has the picture. A stage is 128 rows of W by 64 codes. Lane (g, c) of a warp has rows 2g and 2g +
// 1 of the warp's 16, which of them at g of A and which at g + 8 depends on the lane, so that a read of all lanes is
// of different banks. A lane wants of 16 codes those at 2c, 2c + 1 and, 8 further, two more: x lies in the order of
// memory, and so must codes. Codes are widened exactly; the scale of a row comes in at the end.
#include "cuda/gemm/mixed_int8_sm90.cuh"

namespace bsh {
namespace {

__device__ __forceinline__ bool odd_row_first(int lane) { return lane / 4 >= 4; }

__device__ __forceinline__ uint32_t two_codes(uint32_t address) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
  return v;
}

template <typename T> struct rows_of_w {
  static constexpr bool DEPTH_FIRST = true;
  uint32_t own[4]; // of a stage's codes: 16 of depth each, of the row at g of A; that at g + 8 is at the address ^ 64

  __device__ __forceinline__ rows_of_w(const bsh_int8_mixed_args &, int warp, int lane) {
    const int g = lane / 4, row = warp * 16 + 2 * g + odd_row_first(lane);
#pragma unroll
    for (int k = 0; k < 4; k++) own[k] = row * DEPTH + ((k ^ (g & 3)) << 4) + lane % 4 * 2;
  }
  __device__ __forceinline__ void enter(int) const {}
  __device__ __forceinline__ void decode(uint32_t *a, uint32_t codes, int) const {
    uint32_t words[8];
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const uint32_t at = codes + (r == 0 ? own[k] : own[k] ^ 64);
        words[2 * k + r] = __byte_perm(two_codes(at), two_codes(at + 8), 0x5410);
      }
#pragma unroll
    for (int i = 0; i < 8; i++) {
      uint32_t pairs[2];
      widen_codes<T>(words[i], pairs);
      a[i / 2 * 4 + i % 2] = pairs[0], a[i / 2 * 4 + i % 2 + 2] = pairs[1];
    }
  }
};

template <typename T> struct to_y {
  const bsh_int8_mixed_args &args;
  const int lane;
  int n, token;
  float absmax[2], bias[2]; // of rows n and n + 1

  __device__ __forceinline__ to_y(const bsh_int8_mixed_args &a, int l) : args(a), lane(l) {}
  __device__ __forceinline__ void enter(int row, int first_token) {
    n = row + lane / 4 * 2, token = first_token + lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      absmax[r] = n + r < args.rows ? args.absmax[n + r] : 0.f;
      bias[r] = n + r < args.rows ? bias_of<T>(args.bias, n + r) : 0.f;
    }
  }
  __device__ __forceinline__ void store(int i, const float *sums) const {
    const bool odd = odd_row_first(lane);
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int m = token + 8 * i + e;
      if (m >= args.M) continue;
      const float first = scale_codes(odd ? sums[e + 2] : sums[e], absmax[0], bias[0]);
      const float second = scale_codes(odd ? sums[e] : sums[e + 2], absmax[1], bias[1]);
      T *const to = static_cast<T *>(args.y) + (int64_t)m * args.rows + n;
      if (args.store_pairs) {
        if (n < args.rows) *reinterpret_cast<uint32_t *>(to) = pack_pair<T>(first, second);
        continue;
      }
      if (n < args.rows) from_float(first, to);
      if (n + 1 < args.rows) from_float(second, to + 1);
    }
  }
};

} // namespace
} // namespace bsh

// Of a thread: 64 tokens need no more.
#define REGISTERS_OF(TOKENS) (TOKENS == 64 ? 80 : (int)BSH_GEMM_INT8_SM90_REGISTERS)
#define BODY(T, TOKENS, STAGES)                                                                                        \
  bsh::multiply_mixed<T, bsh::mixed_form<TOKENS, STAGES, REGISTERS_OF(TOKENS)>, bsh::rows_of_w<T>, bsh::to_y<T>>(x, w, \
                                                                                                                 args)
#define MIXED_F16(FORM, TOKENS, STAGES)                                                                                \
  BSH_MIXED_KERNEL(mixed_int8_sm90_f16_##FORM, REGISTERS_OF(TOKENS), BODY(__half, TOKENS, STAGES))
#define MIXED_BF16(FORM, TOKENS, STAGES)                                                                               \
  BSH_MIXED_KERNEL(mixed_int8_sm90_bf16_##FORM, REGISTERS_OF(TOKENS), BODY(__nv_bfloat16, TOKENS, STAGES))
BSH_MIXED_INT8_FORMS(MIXED_F16)
BSH_MIXED_INT8_FORMS(MIXED_BF16)
