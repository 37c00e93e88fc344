/* plan/panels.c - W dequantized into bounded scratch memory a panel at a time, and a vendor's product of each. For all
 * that no kernel of ours takes, and where such a product is faster. Panels are rows of W; for the input gradient
 * columns; of a stack experts. */
#include "core/arithmetic.h"
#include "cuda/sizes/blockwise.h"
#include "plan/dequantize.h"
#include "plan/kernel.h"

static const char *refuses(const bsh_facts *const facts) {
  const bsh_operand_kind kind = bsh_kind_of(facts);
  if (kind == BSH_OF_STACK) return NULL; /* torch's grouped product, python/bitshard/functions/grouped.py */
  if (facts->vendor == BSH_VENDOR_NONE) return "no vendor's product";
  if (kind == BSH_OF_INT8) {
    if (facts->direction == BSH_FORWARD) return "only of the input gradient";
    return facts->dtype == BSH_F32 ? "no float32" : facts->N == 0 ? "N is 0" : NULL;
  }
  const bool odd_bias = facts->bias_alignment > 0 && facts->bias_alignment < BSH_CUBLAS_BIAS_ALIGNMENT;
  return facts->vendor == BSH_VENDOR_CUBLAS && odd_bias ? "the bias is not 16-byte aligned for cuBLAS" : NULL;
}

static double cost(const bsh_facts *const facts) {
  return bsh_kind_of(facts) == BSH_OF_4BIT ? bsh_panels_nanoseconds(facts) : BSH_ORDER(3);
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

/* The first of the panels of a 4-bit weight: rows of W, for the input gradient columns. */
static bsh_planned_launch dequantize_panel(const bsh_facts *const facts, const int64_t lines) {
  const bool forward = facts->direction == BSH_FORWARD;
  const char *const address = (const char *)(uintptr_t)facts->packed_alignment; /* one of that alignment */
  bsh_dequantize_4bit_args args = {.out = (void *)BSH_VECTOR_BYTES, .columns = facts->K, .dtype = facts->dtype};
  args.n_rows = forward ? lines : facts->N;
  args.n_columns = args.ld = forward ? facts->K : lines;
  args.weight = (bsh_weight){.packed = (const uint8_t *)address, .n = facts->N * facts->K, .format = facts->w.table};
  args.weight.blocksize = facts->w.blocksize;
  args.weight.scales.absmax = facts->w.scales == BSH_SCALES_NESTED ? NULL : (const float *)address;
  const bsh_dequantize_plan plan = bsh_plan_dequantize_4bit(&args, facts->sms);
  return (bsh_planned_launch){
      plan.kernel, {.grid = {(uint32_t)plan.blocks, 1, 1}, .block = {BSH_BLOCK_THREADS, 1, 1}, .overlap = true}};
}

void bsh_cut_panels(const bsh_facts *const facts, bsh_plan *const plan) {
  enum { ALIGNMENT = 256 }; /* bytes, of what lies in the scratch memory */
  const bool forward = facts->direction == BSH_FORWARD;
  const int64_t n_lines = forward ? facts->N : facts->K, line = forward ? facts->K : facts->N;
  const int64_t size = dtype_size(facts->dtype);
  if (facts->E > 0) {
    const int64_t most = facts->workspace_bytes / (facts->N * facts->K * size);
    plan->panel_lines = min_i64(facts->E, most > 0 ? most : 1);
    return;
  }
  plan->vendor = facts->vendor;
  plan->panel_lines = panel_lines(n_lines, line * size, facts->workspace_bytes);
  plan->panel_bytes = divide_up(plan->panel_lines * line * size, ALIGNMENT) * ALIGNMENT;
  if (facts->w.bits == 4) plan->panel = dequantize_panel(facts, plan->panel_lines);
  const int64_t left = (facts->workspace_bytes - plan->panel_bytes) / ALIGNMENT * ALIGNMENT;
  if (facts->vendor == BSH_VENDOR_CUBLAS && left > 0) plan->vendor_bytes = min_i64(left, BSH_CUBLAS_WORKSPACE);
  plan->scratch_bytes = plan->panel_bytes + plan->vendor_bytes;
}

const bsh_kernel bsh_kernel_panels = {.name = "panels",
                                      .operands = BSH_KIND(4BIT) | BSH_KIND(STACK) | BSH_KIND(INT8),
                                      .directions = BSH_BOTH,
                                      .launch = BSH_LAUNCH_PANELS,
                                      .refuses = refuses,
                                      .cost = cost};
