// gemm_4bit_sm75.cu - the products of gemm_4bit_sm80.cu on sm_75 (T4, RTX 20), for x in fp16: its main loop, W's
// decoding, its scheduler and its epilogue, in instructions of sm_75.
//
//   x (dy) [M, depth] --16-byte loads--> registers --> ring of 2 stages [256][32] -- ldmatrix --> A operands \
//                                                                                                            two
//                                                                                                            m16n8k8
//   packed W ----------8-byte loads---> registers --> decoded --> ring of 2 stages -- ldmatrix --> B operands /
//
// A tile is 256 rows of x by 128 columns of y, 8 warps of 64 x 64; a stage is 32 of depth, so that two of x and two of
// W fit in 64 KiB. x is loaded a stage ahead, since sm_75 has no asynchronous copies. Row groups of 16 that have no
// rows are not multiplied: a tile with fewer rows takes as long as its rows, rounded up to 64.
#include "cuda/gemm/gemm_4bit_sm75.cuh"

BSH_GEMM_SM75_ENTRY(gemm_sm75_f16_m256, false, false)
BSH_GEMM_SM75_ENTRY(gemm_sm75_dgrad_f16_m256, true, false)
