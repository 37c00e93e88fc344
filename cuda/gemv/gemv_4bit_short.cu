// gemv_4bit_short.cu - gemv_4bit.cu for blocks of 32 and 16 with 8-bit floats as scales: MXFP4 and NVFP4.
#include "cuda/gemv/gemv_4bit_dense.cuh"

// gemv_4bit_<dtype>_m<tokens>_k<units per warp>_<scales>
#define GEMV_MX(FORM, TOKEN_TILES, UNITS)                                                                              \
  BSH_GEMV_4BIT(__nv_bfloat16, gemv_4bit_bf16_##FORM##_mx, TOKEN_TILES, UNITS, E8M0_32)
#define GEMV_NV(FORM, TOKEN_TILES, UNITS)                                                                              \
  BSH_GEMV_4BIT(__nv_bfloat16, gemv_4bit_bf16_##FORM##_nv, TOKEN_TILES, UNITS, E4M3_16)                                \
  BSH_GEMV_4BIT(__half, gemv_4bit_f16_##FORM##_nv, TOKEN_TILES, UNITS, E4M3_16)
BSH_GEMV_FORMS(GEMV_MX)
BSH_GEMV_FORMS(GEMV_NV)
