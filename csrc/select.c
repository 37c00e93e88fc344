/* select.c - see select.h. The limits come from the H200 files of benchmarks/results. */
#include "select.h"

#include "cuda_linear.h"

const char *bsh_linear_kernel_name(const bsh_linear_kernel kernel) {
  switch (kernel) {
  case BSH_LINEAR_GEMV:
    return "gemv_4bit";
  case BSH_LINEAR_GEMM_SM90:
    return "gemm_4bit_sm90";
  case BSH_LINEAR_DENSE:
    return "dense";
  }
  return "unknown";
}

/* What the fused kernels take (cuda_linear.c decides, from the same numbers):
 *   gemv_4bit       M <= 16. Tensor cores: 16-bit x (bf16 from sm_80 on), N % 16 == 0, K % 64 == 0, blocksize >= 64.
 *                   Else, fp32 included, without them: K % 32 == 0, any N and blocksize.
 *   gemm_4bit_sm90  M <= 64 on sm_90: 16-bit x, N % 16 == 0, K % 64 == 0, blocksize >= 64.
 * Everything else, and arguments that are not 16-byte aligned, goes by dequantized panels. */
enum { GEMM_SM90_WEIGHTS = 80000000 };

bsh_linear_kernel bsh_select_linear_4bit(const int64_t M, const int64_t N, const int64_t K, const bsh_dtype dtype,
                                         const int sm, const int sms, const int64_t blocksize, const bool nested) {
  (void)sms, (void)nested;
  /* benchmarks/results/small_m_h200_202611.md: from 9 rows on, large weights are faster on warpgroup instructions. */
  const bool wide_product = M > 16 || (M > 8 && N * K >= GEMM_SM90_WEIGHTS);
  if (wide_product && bsh_gemm_sm90_takes(M, N, K, dtype, sm, blocksize)) return BSH_LINEAR_GEMM_SM90;
  return bsh_gemv_takes(M, N, K, dtype, sm, blocksize) ? BSH_LINEAR_GEMV : BSH_LINEAR_DENSE;
}

int64_t bsh_panel_lines(const int64_t n_lines, const int64_t line, const int64_t itemsize,
                        const int64_t workspace_bytes) {
  static const int64_t steps[] = {1024, 256, 64, 1};
  const int64_t most = workspace_bytes / (line * itemsize);
  if (most >= n_lines) return n_lines;
  for (int i = 0; i < 4; i++)
    if (most >= steps[i]) return most / steps[i] * steps[i];
  return 1;
}
