// gemm_4bit_sm90_wide_short.cu - gemm_4bit_sm90_wide.cu with blocks of 32 (mx) and of 16 (nv) of W (sm_90a). Operands
// are value * scale of the block, which is exact (decode_sm90_wide_short.cuh); complete sums get the global scale.
#include "cuda/gemm/gemm_4bit_sm90_wide.cuh"

#define MX(T, NAME, TOKENS, GRADIENT) BSH_GEMM_WIDE_ENTRY(T, NAME, wide_form<T, TOKENS, GRADIENT, 32>)
#define NV(T, NAME, TOKENS, GRADIENT) BSH_GEMM_WIDE_ENTRY(T, NAME, wide_form<T, TOKENS, GRADIENT, 16>)
#define SHORT_FORM(FORM, TOKENS)                                                                                       \
  BSH_GEMM_WIDE_ENTRIES(MX, gemm_wide_mx_, FORM, TOKENS)                                                               \
  BSH_GEMM_WIDE_ENTRIES(NV, gemm_wide_nv_, FORM, TOKENS)
BSH_GEMM_WIDE_FORMS(SHORT_FORM)
