/* select.c - see select.h. The limits come from the H200 files of benchmarks/results. */
#include "select.h"

#include <stdlib.h>
#include <string.h>

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
 *   gemv_4bit       Tensor cores, M <= 64: 16-bit x (bf16 from sm_80 on), N % 16 == 0, K % 64 == 0, blocksize >= 64.
 *                   Else, fp32 included, without them, M <= 16: K % 32 == 0, any N and blocksize.
 *   gemm_4bit_sm90  Any M, 64 rows a launch, on sm_90: 16-bit x, N % 16 == 0, K % 64 == 0, blocksize >= 64.
 * Everything else, and arguments that are not 16-byte aligned, goes by dequantized panels. */

/* Weights from which gemm_4bit_sm90 is faster than gemv_4bit: rows of benchmarks/results/small_m_h200_202611.md. */
static int64_t gemm_sm90_weights(const int64_t M) {
  if (M <= 8) return INT64_MAX;
  if (M <= 16) return 70000000; /* slower at 68 M, faster at 71 M */
  return M <= 32 ? 16000000 : 12000000;
}

/* Rows up to which launches of gemm_4bit_sm90 for 64 rows each are faster than panels. Same file. */
static int64_t gemm_sm90_rows(const int64_t weights) {
  if (weights >= 150000000) return 256;
  if (weights >= 40000000) return 192;
  return weights >= 30000000 ? 128 : 64;
}

/* Whether gemv_4bit is faster than panels for fp32 x: 8 rows a pass over W on the ordinary cores. Same file. */
static bool few_f32_rows(const int64_t M, const int64_t weights) {
  if (M <= 2) return true;
  return weights >= (M <= 8 ? 10000000 : 40000000);
}

bsh_linear_kernel bsh_select_linear_4bit(const int64_t M, const int64_t N, const int64_t K, const bsh_dtype dtype,
                                         const int sm, const int sms, const int64_t blocksize, const bool nested) {
  (void)sms, (void)nested;
  const bool gemv = bsh_gemv_takes(M, N, K, dtype, sm, blocksize) && (dtype != BSH_F32 || few_f32_rows(M, N * K));
  const bool gemm = bsh_gemm_sm90_takes(M, N, K, dtype, sm, blocksize) && M <= gemm_sm90_rows(N * K);
  if (gemm && (!gemv || N * K >= gemm_sm90_weights(M))) return BSH_LINEAR_GEMM_SM90;
  return gemv ? BSH_LINEAR_GEMV : BSH_LINEAR_DENSE;
}

/* One entry of the list: [compute_]<number>[a|f], up to a comma or the end. */
typedef struct {
  int32_t arch;
  bool ptx, this_gpu_only;
} image_entry;

static image_entry parse_entry(const char *text) {
  image_entry entry = {.ptx = strncmp(text, "compute_", 8) == 0};
  char *end;
  entry.arch = (int32_t)strtol(text + (entry.ptx ? 8 : 0), &end, 10);
  entry.this_gpu_only = *end == 'a';
  return entry;
}

static bool loads(const image_entry entry, const int32_t sm) {
  if (entry.this_gpu_only) return entry.arch == sm;
  return entry.arch <= sm && (entry.ptx || entry.arch / 10 == sm / 10);
}

bsh_kernel_image bsh_image_for(const char *architectures, const int32_t sm) {
  bsh_kernel_image best = {0};
  bool best_is_ptx = true;
  for (const char *at = architectures; at != NULL; at = strchr(at, ',')) {
    at += *at == ',';
    const image_entry entry = parse_entry(at);
    if (entry.arch <= 0 || !loads(entry, sm)) continue;
    const bool better =
        best.arch == 0 || entry.ptx < best_is_ptx || (entry.ptx == best_is_ptx && entry.arch > best.arch);
    if (better) best = (bsh_kernel_image){entry.arch, entry.this_gpu_only}, best_is_ptx = entry.ptx;
    else if (entry.ptx == best_is_ptx && entry.arch == best.arch) best.this_gpu_only &= entry.this_gpu_only;
  }
  return best;
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
