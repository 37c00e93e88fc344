// gemv_4bit_simt.cu - y[M, N] = x[M, K] W^T + bias for M <= 8 without tensor cores: fp32 x, and what gemv_4bit.cu does
// not take (blocks of 16 and 32, N not a multiple of 16, bf16 before sm_80).
//
//   a lane: 4 bytes of each of 4 rows of W -> shuffle table, x scale, rounded to T      8 elements of each row of x
//             '-------------------> sum[4 rows][8 tokens] += w * x, fp32 <-----------------'   256 of K a step
//   behind K: the sums of 32 lanes, in a fixed order -> + bias -> y
//
// W is decoded exactly as dequantize_4bit does it (one fp32 product, one rounding to T), and every product with x is an
// fp32 FMA. A warp owns 4 rows of W and walks along K, 8 elements a lane and step; its lanes' sums are added at the end
// in a fixed order.
#include "cuda/sizes/gemv_4bit_simt.h"

#include "cuda/operands/decode.cuh"

namespace bsh {
namespace {

constexpr int WARPS = BSH_SIMT_WARPS, ROWS = BSH_SIMT_ROWS, TOKENS = BSH_SIMT_TOKENS, STEP = BSH_SIMT_STEP;

// 8 weights of one row: bytes of `word` in order, first of a pair in the high nibble. value: the format's value of code
// lane % 16. All lanes take part.
template <typename T> __device__ __forceinline__ void decode_word(float *w, uint32_t word, float scale, float value) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int shift = 8 * (i >> 1) + (i & 1 ? 0 : 4);
    const float code = __shfl_sync(ALL_LANES, value, (word >> shift) & 15, 16);
    T rounded;
    from_float(multiply_flush(code, scale), &rounded);
    w[i] = to_float(rounded);
  }
}

template <typename T> __device__ __forceinline__ void load_x(float *x, const T *from) {
#pragma unroll
  for (int i = 0; i < 8; i += vector16<T>::WIDTH) {
    vector16<T> v;
    v.raw = *reinterpret_cast<const uint4 *>(from + i);
#pragma unroll
    for (int j = 0; j < vector16<T>::WIDTH; j++) x[i + j] = v.get(j);
  }
}

template <typename T, bool NESTED> __device__ __forceinline__ void gemv(const bsh_fused_args &args) {
  const int lane = threadIdx.x & 31, row = (blockIdx.x * WARPS + (threadIdx.x >> 5)) * ROWS;
  const bsh_scales scales = {args.absmax, args.absmax_code, args.absmax_map, args.absmax2, args.offset};
  const float value = code_value(args.format, lane);
  const int block_shift = args.block_shift + 4; // log2(blocksize): this kernel counts from blocks of 16
  wait_for_earlier_kernels();
  let_later_kernels_start();
  if (row >= args.N) return;

  float sum[ROWS][TOKENS] = {};
  for (int k0 = 0; k0 < args.K; k0 += STEP) {
    const int k = min(k0 + lane * 8, args.K - 8);
    const bool there = k0 + lane * 8 < args.K;
    float w[ROWS][8];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const int64_t at = (int64_t)min(row + r, args.N - 1) * args.K + k;
      const uint32_t word = *reinterpret_cast<const uint32_t *>(args.packed + at / 2);
      decode_word<T>(w[r], word, block_scale<NESTED>(scales, at >> block_shift), value);
    }
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
      if (t >= args.M) break;
      float x[8];
      load_x(x, static_cast<const T *>(args.x) + t * args.ldx + k);
#pragma unroll
      for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int i = 0; i < 8; i++) sum[r][t] = fmaf(w[r][i], there ? x[i] : 0.f, sum[r][t]);
    }
  }

#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
      float total = sum[r][t];
#pragma unroll
      for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(ALL_LANES, total, step);
      if (lane != t || t >= args.M || row + r >= args.N) continue;
      if (args.bias) total += to_float(static_cast<const T *>(args.bias)[row + r]);
      from_float(total, static_cast<T *>(args.y) + t * args.ldy + row + r);
    }
}

} // namespace
} // namespace bsh

#define ENTRY(NAME, ...)                                                                                               \
  BSH_ENTRY(__launch_bounds__(bsh::WARPS * 32), gemv_4bit_simt_##NAME, bsh_fused_args, __VA_ARGS__)
#define GEMV(T, NAME) ENTRY(NAME##_nested, gemv<T, true>) ENTRY(NAME##_plain, gemv<T, false>)
GEMV(float, f32)
GEMV(__half, f16)
GEMV(__nv_bfloat16, bf16)
