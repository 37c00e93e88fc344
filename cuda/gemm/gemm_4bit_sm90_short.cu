// gemm_4bit_sm90_short.cu - gemm_4bit_sm90.cu for blocks of 32 and 16 with 8-bit floats as scales: MXFP4 and NVFP4.
#include "cuda/gemm/gemm_4bit_sm90.cuh"

// gemm_4bit_<dtype>_m<tokens>[_p<parts of K>]_<scales>
#define GEMM_MX(FORM, TOKENS, K_PARTS)                                                                                 \
  BSH_GEMM_SM90(__nv_bfloat16, gemm_4bit_bf16_##FORM##_mx, TOKENS, K_PARTS, E8M0_32)
#define GEMM_NV(FORM, TOKENS, K_PARTS)                                                                                 \
  BSH_GEMM_SM90(__nv_bfloat16, gemm_4bit_bf16_##FORM##_nv, TOKENS, K_PARTS, E4M3_16)                                   \
  BSH_GEMM_SM90(__half, gemm_4bit_f16_##FORM##_nv, TOKENS, K_PARTS, E4M3_16)
BSH_GEMM_FORMS(GEMM_MX)
BSH_GEMM_FORMS(GEMM_NV)
