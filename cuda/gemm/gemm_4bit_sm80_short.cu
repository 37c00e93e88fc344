// gemm_4bit_sm80_short.cu - gemm_4bit_sm80.cu for blocks of 16: NVFP4.
#include "cuda/gemm/gemm_4bit_sm80.cuh"

BSH_GEMM_SM80_ENTRIES(gemm_sm80_, m256_nv, 256, false, true)
