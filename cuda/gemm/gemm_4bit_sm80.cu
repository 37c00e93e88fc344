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
// A tile is 128 or 256 rows of x by 128 columns of y, 4 or 8 warps of 64 x 64; their row groups of 16 take turns. A
// stage is 64 of depth. There is one barrier a stage, before its last k16 step: loads and decoding of the next stages
// lie between the products, in the order of the source (ptx_sm80.cuh). Blocks stay: loads run on from tile to tile
// (scheduler_sm80.cuh).
//
// W has the bits of dequantize_4bit: the error is that of W rounded to x's dtype.
#include "cuda/gemm/gemm_4bit_sm80.cuh"

#define GEMM_SM80(FORM, ROWS) BSH_GEMM_SM80_ENTRIES(gemm_sm80_, FORM, ROWS, false)
BSH_GEMM_SM80_FORMS(GEMM_SM80)
