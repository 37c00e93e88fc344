/* select.c - see select.h. The limits come from benchmarks/results/ (cuda_*_h200.md). */
#include "select.h"

const char *bsh_linear_kernel_name(const bsh_linear_kernel kernel) {
  switch (kernel) {
  case BSH_LINEAR_GEMV:
    return "gemv_4bit";
  case BSH_LINEAR_GEMM_SM80:
    return "gemm_4bit_sm80";
  case BSH_LINEAR_DENSE:
    return "dense";
  }
  return "unknown";
}

bsh_linear_kernel bsh_select_linear_4bit(const int64_t M, const int64_t N, const int64_t K, const bsh_dtype dtype,
                                         const int sm, const int sms, const int64_t blocksize, const bool nested) {
  (void)M, (void)N, (void)K, (void)dtype, (void)sm, (void)sms, (void)blocksize, (void)nested;
  return BSH_LINEAR_DENSE;
}

/* Multiples of this many lines keep every tile of the vendor GEMM full. */
enum { PANEL_STEP = 256 };

int64_t bsh_panel_lines(const int64_t n_lines, const int64_t line, const int64_t itemsize,
                        const int64_t workspace_bytes) {
  const int64_t most = workspace_bytes / (line * itemsize);
  if (most >= n_lines) return n_lines;
  const int64_t step = most >= PANEL_STEP ? PANEL_STEP : most >= 64 ? 64 : 1;
  const int64_t whole = most / step * step;
  const int64_t largest = whole > 0 ? whole : 1;
  const int64_t panels = (n_lines + largest - 1) / largest;
  const int64_t even = (n_lines + panels - 1) / panels;
  const int64_t rounded = (even + step - 1) / step * step;
  return rounded < largest ? rounded : largest;
}
