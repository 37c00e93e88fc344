// gemm_4bit_sm75_grouped.cu - gemm_4bit_sm75.cu with tiles of all experts of a stack, as gemm_4bit_sm80_grouped.cu
// says.
#include "cuda/gemm/gemm_4bit_sm75.cuh"

BSH_GEMM_SM75_ENTRY(gemm_sm75_grouped_f16_m256, false, true)
BSH_GEMM_SM75_ENTRY(gemm_sm75_grouped_dgrad_f16_m256, true, true)
