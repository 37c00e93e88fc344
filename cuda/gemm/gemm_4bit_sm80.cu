// gemm_4bit_sm80.cu - y[M, N] = x[M, K] W^T + bias and dx[M, K] = dy[M, N] W in one pass over the packed W, for many
// rows, in instructions of sm_80: cp.async, ldmatrix, mma.m16n8k16. For all later GPUs.
//
//   x (dy) [M, depth] --cp.async--> ring of 2 stages [rows][64] ------------- ldmatrix --> A operands: rows of x  \
//                                                                                                                  >
//                                                                                                                  mma
//   packed W --16-byte loads--> registers --> decoded, with its scale --> ring of 2 stages                        /
//   scales ------------------->               (decode_sm80.cuh)           of W, 64 x 128 -- ldmatrix --> B operands
//                                                                         (for dx transposed)
//   fp32 sums in registers over all of depth --> y, or args.partial (epilogue_sm80.cuh)
//
// A tile is 128 or 256 rows of x by 128 columns of y, 4 or 8 warps of 64 x 64. A stage is 64 of depth. There is one
// barrier a stage, before its last k16 step: loads and decoding of the next stages lie between the products, in the
// order of the source (ptx_sm80.cuh). Blocks stay: loads run on from tile to tile (scheduler_sm80.cuh).
//
// W has the bits of dequantize_4bit: the error is that of W rounded to x's dtype.
#include "cuda/gemm/gemm_4bit_sm80.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define GEMM_SM80_BODY(T, ROWS, GRADIENT) bsh::gemm_sm80<bsh::sm80_form<T, ROWS, GRADIENT>>(args);
#else
#define GEMM_SM80_BODY(T, ROWS, GRADIENT) __trap(); // the host does not launch it
#endif
#define GEMM_SM80(T, NAME, ROWS, GRADIENT)                                                                             \
  extern "C" __global__ void __launch_bounds__(bsh_gemm_sm80_threads(ROWS), ROWS == 256 ? 1 : 2)                       \
      NAME(const __grid_constant__ bsh_gemm_sm80_args args) {                                                          \
    GEMM_SM80_BODY(T, ROWS, GRADIENT)                                                                                  \
  }
#define GEMM_SM80_FORM(FORM, ROWS)                                                                                     \
  GEMM_SM80(__nv_bfloat16, gemm_sm80_bf16_##FORM, ROWS, false)                                                         \
  GEMM_SM80(__half, gemm_sm80_f16_##FORM, ROWS, false)                                                                 \
  GEMM_SM80(__nv_bfloat16, gemm_sm80_dgrad_bf16_##FORM, ROWS, true)                                                    \
  GEMM_SM80(__half, gemm_sm80_dgrad_f16_##FORM, ROWS, true)
BSH_GEMM_SM80_FORMS(GEMM_SM80_FORM)
