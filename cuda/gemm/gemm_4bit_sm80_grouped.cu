// gemm_4bit_sm80_grouped.cu - y[s] = x[s] W_e^T + bias_e and dx[s] = dy[s] W_e for rows sorted by expert:
// gemm_4bit_sm80.cu with tiles of all experts, for sm_80 and later.
//
// A tile has rows of one expert only; blocks look up where the rows of each end (scheduler_sm80.cuh). Row groups of 16
// that have no rows are neither copied nor multiplied, and the warps take turns with them: an expert's last rows take
// as long as a tile of their number, rounded up to 32 or 64, would, beside decoding. Rows behind the last expert's are
// zeroed. Each tile has one block: equal inputs give equal bits.
#include "cuda/gemm/gemm_4bit_sm80.cuh"

#define GROUPED(FORM, ROWS) BSH_GEMM_SM80_ENTRIES(gemm_sm80_grouped_, FORM, ROWS, true)
BSH_GEMM_SM80_FORMS(GROUPED)
// Of few rows: ONE_LOOP. Forward both loops are as fast.
BSH_GEMM_SM80_ENTRY(gemm_sm80_grouped_dgrad_bf16_m128_few, __nv_bfloat16, 128, true, true, false, true)
BSH_GEMM_SM80_ENTRY(gemm_sm80_grouped_dgrad_f16_m128_few, __half, 128, true, true, false, true)
