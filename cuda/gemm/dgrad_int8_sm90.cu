// dgrad_int8_sm90.cu - dx[M, K] = dy[M, N] W in one pass over the codes of W, on Hopper (sm_90a).
//
// mixed_int8_sm90.cuh has the picture: rows are columns of W, tokens those of dy, the depth is N. A stage is 64 of N by
// 128 codes. Codes are widened, times their scale, which is the sum of two of T (split_scales_int8), and rounded to T.
// An 8 x 8 matrix of ldmatrix, transposed, is 8 of N by 16 of K: lane (g, t) gets codes 2g and 2g + 1 of K at N = 2t
// and 2t + 1, which are rows g and g + 8 of A.
#include "cuda/gemm/mixed_int8_sm90.cuh"

namespace bsh {
namespace {

// Two pairs of 16-bit floats of a word of codes: bytes 0 and 2, bytes 1 and 3.
template <typename T> __device__ __forceinline__ void widen_columns(uint32_t codes, uint32_t *pairs) {
  widen_codes<T>(__byte_perm(codes, 0, 0x3120), pairs);
}

template <typename T> struct columns_of_w {
  static constexpr bool DEPTH_FIRST = false;
  const bsh_int8_scale_pair *const from;
  const int t;
  uint32_t own;   // this lane's row of W in a stage, and of it the warp's 16 bytes: n = lane, then n = 32 + lane
  uint2 pairs[8]; // scales of 64 of N, a stage ahead: this lane's n = 8i + 2t and the next

  __device__ __forceinline__ columns_of_w(const bsh_int8_mixed_args &args, int warp, int lane)
      : from(args.scales), t(lane % 4), own(lane * ROWS + ((warp ^ (lane & 7)) << 4)) {}
  __device__ __forceinline__ void enter(int depth) {
#pragma unroll
    for (int i = 0; i < 8; i++) pairs[i] = reinterpret_cast<const uint2 *>(from)[depth / 2 + i * 4 + t];
  }
  __device__ __forceinline__ void decode(uint32_t *a, uint32_t codes, int next_depth) {
    uint32_t v[8];
    ldmatrix_x4_trans(v, codes + own);
    ldmatrix_x4_trans(v + 4, codes + own + 32 * ROWS);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      uint32_t values[2];
      widen_columns<T>(v[i], values);
#pragma unroll
      for (int r = 0; r < 2; r++)
        a[i / 2 * 4 + i % 2 * 2 + r] = fma_pair<T>(values[r], pairs[i].x, mul_pair<T>(values[r], pairs[i].y));
    }
    enter(next_depth);
  }
};

// Of K two neighbours a lane; K is even.
template <typename T> struct to_dx {
  const bsh_int8_mixed_args &args;
  const int lane;
  int k, token;

  __device__ __forceinline__ to_dx(const bsh_int8_mixed_args &a, int l) : args(a), lane(l) {}
  __device__ __forceinline__ void enter(int row, int first_token) {
    k = row + lane / 4 * 2, token = first_token + lane % 4 * 2;
  }
  __device__ __forceinline__ void store(int i, const float *sums) const {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int m = token + 8 * i + e;
      if (m < args.M && k < args.rows)
        *reinterpret_cast<uint32_t *>(static_cast<T *>(args.y) + (int64_t)m * args.rows + k) =
            pack_pair<T>(sums[e], sums[e + 2]);
    }
  }
};

} // namespace
} // namespace bsh

#define BODY(T, TOKENS, STAGES)                                                                                        \
  bsh::multiply_mixed<T, bsh::mixed_form<TOKENS, STAGES, BSH_GEMM_INT8_SM90_REGISTERS>, bsh::columns_of_w<T>,          \
                      bsh::to_dx<T>>(x, w, args)
#define DGRAD_F16(FORM, TOKENS, STAGES)                                                                                \
  BSH_MIXED_KERNEL(dgrad_int8_sm90_f16_##FORM, BSH_GEMM_INT8_SM90_REGISTERS, BODY(__half, TOKENS, STAGES))
#define DGRAD_BF16(FORM, TOKENS, STAGES)                                                                               \
  BSH_MIXED_KERNEL(dgrad_int8_sm90_bf16_##FORM, BSH_GEMM_INT8_SM90_REGISTERS, BODY(__nv_bfloat16, TOKENS, STAGES))
BSH_MIXED_INT8_FORMS(DGRAD_F16)
BSH_MIXED_INT8_FORMS(DGRAD_BF16)
