// gemm_4bit_sm80_grouped_short.cu - gemm_4bit_sm80_grouped.cu for stacks in NVFP4.
#include "cuda/gemm/gemm_4bit_sm80.cuh"

BSH_GEMM_SM80_ENTRIES(gemm_sm80_grouped_, m256_nv, 256, true, true)
