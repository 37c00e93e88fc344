// gemv_4bit_grouped_short.cu - gemv_4bit_grouped.cu for stacks in MXFP4 and NVFP4.
#include "cuda/gemv/gemv_4bit_grouped.cuh"

// gemv_4bit_grouped_<dtype>_m<rows>_k<units per warp>_<scales>
#define GROUPED_MX(FORM, TOKEN_TILES, UNITS)                                                                           \
  BSH_GEMV_4BIT_GROUPED(__nv_bfloat16, gemv_4bit_grouped_bf16_##FORM##_mx, TOKEN_TILES, UNITS, E8M0_32)
#define GROUPED_NV(FORM, TOKEN_TILES, UNITS)                                                                           \
  BSH_GEMV_4BIT_GROUPED(__nv_bfloat16, gemv_4bit_grouped_bf16_##FORM##_nv, TOKEN_TILES, UNITS, E4M3_16)                \
  BSH_GEMV_4BIT_GROUPED(__half, gemv_4bit_grouped_f16_##FORM##_nv, TOKEN_TILES, UNITS, E4M3_16)
BSH_GROUPED_GEMV_FORMS(GROUPED_MX)
BSH_GROUPED_GEMV_FORMS(GROUPED_NV)
