/* plan/plan.c - see plan/plan.h. The limits come from the H200 files of benchmarks/results. */
#include "plan/plan.h"

#include <inttypes.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/arithmetic.h"
#include "cuda/blockwise.h"
#include "cuda/gemv_4bit.h"
#include "plan/dequantize.h"
#include "plan/kernel.h"

#define KERNEL_NAME(name) #name,
static const char *const names[BSH_LINEAR_COUNT] = {BSH_LINEAR_KERNELS(KERNEL_NAME)};

const char *bsh_linear_kernel_name(const bsh_linear_kernel kernel) { return names[kernel]; }

static const bsh_fused_kernel *const fused[BSH_LINEAR_panels] = {
    [BSH_LINEAR_gemv_4bit] = &bsh_plan_gemv_4bit,
    [BSH_LINEAR_gemv_4bit_simt] = &bsh_plan_gemv_4bit_simt,
    [BSH_LINEAR_gemm_4bit_sm90] = &bsh_plan_gemm_4bit_sm90,
    [BSH_LINEAR_gemm_4bit_sm90_wide] = &bsh_plan_gemm_4bit_sm90_wide,
};

static const char *panels_refuse(const bsh_facts *const facts) {
  if (facts->vendor == BSH_VENDOR_NONE) return "no vendor's product";
  const bool odd_bias = facts->bias_alignment > 0 && facts->bias_alignment < BSH_CUBLAS_BIAS_ALIGNMENT;
  return facts->vendor == BSH_VENDOR_CUBLAS && odd_bias ? "the bias is not 16-byte aligned for cuBLAS" : NULL;
}

static const char *refuses(const bsh_linear_kernel kernel, const bsh_facts *const facts) {
  return kernel == BSH_LINEAR_panels ? panels_refuse(facts) : fused[kernel]->refuses(facts);
}

/* ---- which kernel ---- */

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

/* Rows up to which gemv_4bit_simt is faster than panels: fp32, 8 rows a pass over W on the ordinary cores. Same file.
 * 16-bit: two passes still read less than dequantizing does. */
static int64_t simt_rows(const bsh_dtype dtype, const int64_t weights) {
  if (dtype != BSH_F32) return 16;
  if (weights >= 40000000) return 16;
  return weights >= 10000000 ? 8 : 2;
}

/* Nanoseconds by panels on an H200 (benchmarks/results/wide_h200_202611.md): every weight is dequantized, then comes
 * the vendor's product, at the speed of its tensor cores, which are fewer on smaller cards, or of its memory, and not
 * below what a launch takes. */
static double panels_nanoseconds(const bsh_facts *const facts) {
  const double begin = 1500, weights_per_ns = 1180, bytes_per_ns = 4200, least = 5000;
  const double flops_per_ns = 680e3 / 132 * facts->sms;
  const double weights = (double)facts->N * (double)facts->K;
  const double product = fmax(2 * weights * (double)facts->M / flops_per_ns, 2 * weights / bytes_per_ns);
  return begin + weights / weights_per_ns + fmax(product, least);
}

/* gemm_4bit_sm90_wide where it is faster than panels, and forward where gemm_4bit_sm90, 64 rows at a time, takes a
 * second look at W. */
static bool wide(const bsh_facts *const facts) {
  enum { GEMM_SM90_ROWS = 64 };
  if (facts->direction == BSH_FORWARD && facts->M <= GEMM_SM90_ROWS) return false;
  return !refuses(BSH_LINEAR_gemm_4bit_sm90_wide, facts) &&
         (facts->vendor == BSH_VENDOR_NONE || bsh_plan_wide_nanoseconds(facts) < panels_nanoseconds(facts));
}

/* The fastest of what takes the product. Where none is faster than panels, panels. */
static bsh_linear_kernel choose(const bsh_facts *const facts) {
  const int64_t M = facts->M, weights = facts->N * facts->K;
  bsh_linear_kernel best = BSH_LINEAR_panels;
  if (wide(facts)) return BSH_LINEAR_gemm_4bit_sm90_wide;
  if (M <= BSH_GEMV_TOKENS && !refuses(BSH_LINEAR_gemv_4bit, facts)) best = BSH_LINEAR_gemv_4bit;
  else if (M <= simt_rows(facts->dtype, weights) && !refuses(BSH_LINEAR_gemv_4bit_simt, facts))
    best = BSH_LINEAR_gemv_4bit_simt;
  const bool gemm = M <= gemm_sm90_rows(weights) && (best == BSH_LINEAR_panels || weights >= gemm_sm90_weights(M));
  return gemm && !refuses(BSH_LINEAR_gemm_4bit_sm90, facts) ? BSH_LINEAR_gemm_4bit_sm90 : best;
}

/* The same where panels cannot be multiplied: any number of rows by a fused kernel, if one takes them. */
static bsh_linear_kernel choose_without_vendor(const bsh_facts *const facts) {
  static const bsh_linear_kernel order[] = {BSH_LINEAR_gemm_4bit_sm90, BSH_LINEAR_gemv_4bit,
                                            BSH_LINEAR_gemm_4bit_sm90_wide, BSH_LINEAR_gemv_4bit_simt};
  const bsh_linear_kernel best = choose(facts);
  if (best != BSH_LINEAR_panels || facts->vendor != BSH_VENDOR_NONE) return best;
  for (int i = 0; i < 4; i++)
    if (!refuses(order[i], facts)) return order[i];
  return BSH_LINEAR_panels;
}

/* ---- how ---- */

static void plan_fused(const bsh_fused_kernel *const kernel, const bsh_facts *const facts, bsh_plan *const plan) {
  const int64_t rows = min_i64(facts->M, kernel->rows);
  plan->n_slices = facts->M / rows;
  plan->slice.rows = rows;
  kernel->cut(facts, &plan->slice);
  plan->scratch_bytes = plan->slice.scratch_bytes;
  plan->rest.rows = facts->M % rows;
  if (plan->rest.rows == 0) return;
  kernel->cut(facts, &plan->rest);
  if (plan->rest.scratch_bytes > plan->scratch_bytes) plan->scratch_bytes = plan->rest.scratch_bytes;
}

/* Lines of W, each `line_bytes` long dequantized, that are dequantized at a time so that a panel takes at most
 * workspace_bytes: all n_lines, or the most that fit as a multiple of 1024, 256 or 64, the widths at which the vendor's
 * product loses least; at least one line. */
static int64_t panel_lines(const int64_t n_lines, const int64_t line_bytes, const int64_t workspace_bytes) {
  static const int64_t steps[] = {1024, 256, 64, 1};
  const int64_t most = workspace_bytes / line_bytes;
  if (most >= n_lines) return n_lines;
  for (int i = 0; i < 4; i++)
    if (most >= steps[i]) return most / steps[i] * steps[i];
  return 1;
}

/* The first of the panels: rows of W, for the input gradient columns. */
static bsh_planned_launch dequantize_panel(const bsh_facts *const facts, const int64_t lines) {
  const bool forward = facts->direction == BSH_FORWARD;
  const char *const address = (const char *)(uintptr_t)facts->packed_alignment; /* one of that alignment */
  bsh_dequantize_4bit_args args = {.out = (void *)BSH_VECTOR_BYTES, .columns = facts->K, .dtype = facts->dtype};
  args.n_rows = forward ? lines : facts->N;
  args.n_columns = args.ld = forward ? facts->K : lines;
  args.weight = (bsh_weight){.packed = (const uint8_t *)address, .n = facts->N * facts->K};
  args.weight.blocksize = facts->blocksize;
  args.weight.scales.absmax = facts->nested ? NULL : (const float *)address;
  const bsh_dequantize_plan plan = bsh_plan_dequantize_4bit(&args, facts->sms);
  return (bsh_planned_launch){
      plan.kernel, {.grid = {(uint32_t)plan.blocks, 1, 1}, .block = {BSH_BLOCK_THREADS, 1, 1}, .overlap = true}};
}

static void plan_panels(const bsh_facts *const facts, bsh_plan *const plan) {
  enum { ALIGNMENT = 256 }; /* bytes, of what lies in the scratch memory */
  const bool forward = facts->direction == BSH_FORWARD;
  const int64_t n_lines = forward ? facts->N : facts->K, line = forward ? facts->K : facts->N;
  const int64_t line_bytes = line * dtype_size(facts->dtype);
  plan->vendor = facts->vendor;
  plan->panel_lines = panel_lines(n_lines, line_bytes, facts->workspace_bytes);
  plan->panel_bytes = divide_up(plan->panel_lines * line_bytes, ALIGNMENT) * ALIGNMENT;
  plan->panel = dequantize_panel(facts, plan->panel_lines);
  const int64_t left = (facts->workspace_bytes - plan->panel_bytes) / ALIGNMENT * ALIGNMENT;
  if (facts->vendor == BSH_VENDOR_CUBLAS && left > 0) plan->vendor_bytes = min_i64(left, BSH_CUBLAS_WORKSPACE);
  plan->scratch_bytes = plan->panel_bytes + plan->vendor_bytes;
}

/* "gemv_4bit: N is no multiple of 16; ...", of one kernel or of all. */
static void list_reasons(const bsh_facts *const facts, char *const text, const size_t size) {
  const int first = facts->forced != BSH_LINEAR_COUNT ? (int)facts->forced : 0;
  const int last = facts->forced != BSH_LINEAR_COUNT ? (int)facts->forced : BSH_LINEAR_COUNT - 1;
  size_t at = 0;
  for (int kernel = first; kernel <= last && at < size; kernel++)
    at += (size_t)snprintf(text + at, size - at, "%s%s: %s", kernel > first ? "; " : "", names[kernel],
                           refuses((bsh_linear_kernel)kernel, facts));
}

static bsh_status cannot(const char *const op, const bsh_facts *const facts) {
  static const char *const dtypes[] = {"float32", "float16", "bfloat16"};
  char reasons[400];
  list_reasons(facts, reasons, sizeof reasons);
  return bsh_fail(
      BSH_NO_KERNEL,
      "%s: %s M = %" PRId64 ", N = %" PRId64 ", K = %" PRId64 " of %s in blocks of %" PRId64 " on sm_%d: %s", op,
      facts->forced != BSH_LINEAR_COUNT ? "the kernel that was forced cannot multiply" : "nothing multiplies", facts->M,
      facts->N, facts->K, dtypes[facts->dtype], facts->blocksize, (int)facts->sm, reasons);
}

bsh_status bsh_plan_linear_4bit(const char *const op, const bsh_facts *const facts, bsh_plan *const plan) {
  const bool forced = facts->forced != BSH_LINEAR_COUNT;
  const bsh_linear_kernel kernel = forced ? facts->forced : choose_without_vendor(facts);
  *plan = (bsh_plan){.kernel = kernel, .y_alignment = facts->y_alignment};
  if ((forced || kernel == BSH_LINEAR_panels) && refuses(kernel, facts) != NULL) return cannot(op, facts);
  if (kernel == BSH_LINEAR_panels) plan_panels(facts, plan);
  else plan_fused(fused[kernel], facts, plan);
  return BSH_OK;
}

/* ---- forced kernels ---- */

static _Atomic(int) forced_kernels[2] = {BSH_LINEAR_COUNT, BSH_LINEAR_COUNT}; /* by direction */

bsh_status bsh_force_kernel(const bsh_direction direction, const char *const name) {
  int kernel = 0;
  if (name == NULL) kernel = BSH_LINEAR_COUNT;
  while (kernel < BSH_LINEAR_COUNT && strcmp(names[kernel], name) != 0) kernel++;
  if (name != NULL && kernel == BSH_LINEAR_COUNT)
    return bsh_fail(BSH_BAD_VALUE,
                    "no kernel '%s': expected gemv_4bit, gemv_4bit_simt, gemm_4bit_sm90, gemm_4bit_sm90_wide or panels",
                    name);
  atomic_store_explicit(&forced_kernels[direction], kernel, memory_order_relaxed);
  return BSH_OK;
}

bsh_linear_kernel bsh_forced_kernel(const bsh_direction direction) {
  return (bsh_linear_kernel)atomic_load_explicit(&forced_kernels[direction], memory_order_relaxed);
}

bsh_status bsh_read_forced_kernels(void) {
  const char *const forward = getenv("BITSHARD_LINEAR_4BIT"), *const dgrad = getenv("BITSHARD_LINEAR_4BIT_DGRAD");
  if (forward != NULL) BSH_TRY(bsh_force_kernel(BSH_FORWARD, forward));
  return dgrad != NULL ? bsh_force_kernel(BSH_INPUT_GRADIENT, dgrad) : BSH_OK;
}
