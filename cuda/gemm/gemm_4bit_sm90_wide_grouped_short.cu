// gemm_4bit_sm90_wide_grouped_short.cu - gemm_4bit_sm90_wide_grouped.cu with blocks of 32 (mx) and of 16 (nv) of W, as
// gemm_4bit_sm90_wide_short.cu (sm_90a). Each expert has a global scale of its own.
#include "cuda/gemm/gemm_4bit_sm90_wide.cuh"

#define MX(T, NAME, TOKENS, GRADIENT) BSH_GEMM_WIDE_ENTRY(T, NAME, grouped_form<T, TOKENS, GRADIENT, 32>)
#define NV(T, NAME, TOKENS, GRADIENT) BSH_GEMM_WIDE_ENTRY(T, NAME, grouped_form<T, TOKENS, GRADIENT, 16>)
#define SHORT_FORM(FORM, TOKENS)                                                                                       \
  BSH_GEMM_WIDE_ENTRIES(MX, gemm_wide_grouped_mx_, FORM, TOKENS)                                                       \
  BSH_GEMM_WIDE_ENTRIES(NV, gemm_wide_grouped_nv_, FORM, TOKENS)
BSH_GEMM_WIDE_GROUPED_FORMS(SHORT_FORM)
