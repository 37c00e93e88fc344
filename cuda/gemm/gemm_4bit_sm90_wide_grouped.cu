// gemm_4bit_sm90_wide_grouped.cu - y[s] = x[s] W_e^T + bias_e and dx[s] = dy[s] W_e for rows sorted by expert, many of
// each: gemm_4bit_sm90_wide.cu with tiles of all experts (sm_90a).
//
// Each block reads where the rows of each expert end, and counts tiles (experts.cuh). A tile has rows of one expert
// only. What is left of an expert's rows is multiplied by fewer tokens at a time, and tiles are ordered by how long
// they take (scheduler_sm90_wide.cuh). A tile's last tokens may be rows of the next expert, or beyond x, whose results
// are not stored; rows of A beyond an expert's are the next expert's, or zero, and are not stored either; depth beyond
// it is zero in x. Experts without rows have no tiles. Rows behind the last expert's are zeroed.
#include "cuda/gemm/gemm_4bit_sm90_wide.cuh"

#define GROUPED(T, NAME, TOKENS, GRADIENT) BSH_GEMM_WIDE_ENTRY(T, NAME, grouped_form<T, TOKENS, GRADIENT>)
#define GROUPED_FORM(FORM, TOKENS) BSH_GEMM_WIDE_ENTRIES(GROUPED, gemm_wide_grouped_, FORM, TOKENS)
BSH_GEMM_WIDE_GROUPED_FORMS(GROUPED_FORM)
