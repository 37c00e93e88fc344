/* plan/choose.c - see plan/product.h. */
#include <ctype.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/arithmetic.h"
#include "plan/kernel.h"

/* Of equal costs the first is taken. */
static const bsh_kernel *const kernels[] = {
    &bsh_kernel_gemm_4bit_sm90,
    &bsh_kernel_gemv_4bit,
    &bsh_kernel_gemm_4bit_sm90_wide,
    &bsh_kernel_gemv_4bit_simt,
    &bsh_kernel_gemm_4bit_sm80,
    &bsh_kernel_gemm_4bit_sm75,
    &bsh_kernel_gemv_4bit_grouped,
    &bsh_kernel_gemm_4bit_sm90_wide_grouped,
    &bsh_kernel_gemm_4bit_sm80_grouped,
    &bsh_kernel_gemm_4bit_sm75_grouped,
    &bsh_kernel_gemv_int8,
    &bsh_kernel_mixed_int8_sm90,
    &bsh_kernel_gemm_int8_sm90,
    &bsh_kernel_gemm_int8,
    &bsh_kernel_any_int8,
    &bsh_kernel_gemv_int8_dgrad,
    &bsh_kernel_dgrad_int8_sm90,
    &bsh_kernel_panels,
};
enum { KERNELS = sizeof kernels / sizeof *kernels };

static const char *const ops[BSH_OPERANDS][2] = {
    [BSH_OF_4BIT] = {"linear_4bit", "linear_4bit_dgrad"},
    [BSH_OF_STACK] = {"grouped_linear_4bit", "grouped_linear_4bit_dgrad"},
    [BSH_OF_INT8] = {"linear_int8", "linear_int8_dgrad"},
};

const char *bsh_op_name(const bsh_operand_kind kind, const bsh_direction direction) { return ops[kind][direction]; }

const char *bsh_kernel_name(const bsh_kernel *const kernel) { return kernel->name; }

double bsh_kernel_cost(const bsh_kernel *const kernel, const bsh_facts *const facts) {
  return kernel->estimate != NULL ? kernel->estimate(facts) : kernel->cost(facts);
}

/* ---- which kernel ---- */

static bool takes_operands(const bsh_kernel *const kernel, const bsh_operand_kind kind) {
  return kernel->operands >> kind & 1;
}

/* NULL, or why it does not take a product of operands that it takes. */
static const char *refuses(const bsh_kernel *const kernel, const bsh_facts *const facts) {
  const bool sm90a = facts->sm == 90 && facts->image.arch == 90 && facts->image.this_gpu_only;
  if (!(kernel->directions >> facts->direction & 1))
    return facts->direction == BSH_FORWARD ? "only of the input gradient" : "no input gradient";
  if (kernel->needs != BSH_ANY_CARD && !sm90a) return "needs sm_90a code on sm_90";
  if (kernel->needs == BSH_SM90A_MAPS && !facts->tensor_maps) return "the driver makes no tensor maps";
  return kernel->refuses(facts);
}

/* The cheapest of those that take the product; NULL: none. What a vendor refuses for the bias is left to whoever has
 * another vendor: torch's is faster than a kernel that comes last. */
static const bsh_kernel *choose(const bsh_facts *const facts) {
  const bsh_kernel *best = NULL;
  const bsh_operand_kind kind = bsh_kind_of(facts);
  double least = 0;
  for (int i = 0; i < KERNELS; i++) {
    if (!takes_operands(kernels[i], kind) || refuses(kernels[i], facts) != NULL) continue;
    const double cost = kernels[i]->cost(facts);
    if (best == NULL || cost < least) best = kernels[i], least = cost;
  }
  return least == BSH_LAST && facts->vendor != BSH_VENDOR_NONE ? NULL : best;
}

/* ---- the plan ---- */

static void cut_slices(const bsh_kernel *const kernel, const bsh_facts *const facts, bsh_plan *const plan) {
  const int64_t rows = kernel->rows == 0 ? facts->M : min_i64(facts->M, kernel->rows);
  plan->n_slices = facts->M / rows;
  plan->slice.rows = rows;
  kernel->cut(facts, &plan->slice);
  plan->scratch_bytes = plan->slice.scratch_bytes;
  plan->rest.rows = facts->M % rows;
  if (plan->rest.rows == 0) return;
  kernel->cut(facts, &plan->rest);
  if (plan->rest.scratch_bytes > plan->scratch_bytes) plan->scratch_bytes = plan->rest.scratch_bytes;
}

/* "gemv_4bit: N is no multiple of 16; ...", of the forced kernel or of all. */
static void list_reasons(const bsh_facts *const facts, char *const text, const size_t size) {
  const bsh_operand_kind kind = bsh_kind_of(facts);
  size_t at = 0;
  for (int i = 0; i < KERNELS && at < size; i++) {
    if (facts->forced != NULL ? kernels[i] != facts->forced : !takes_operands(kernels[i], kind)) continue;
    at += (size_t)snprintf(text + at, size - at, "%s%s: %s", at > 0 ? "; " : "", kernels[i]->name,
                           refuses(kernels[i], facts));
  }
}

static bsh_status cannot(const char *const op, const bsh_facts *const facts) {
  static const char *const dtypes[] = {"float32", "float16", "bfloat16"};
  char reasons[600], weight[80] = "";
  if (facts->w.bits == 4) snprintf(weight, sizeof weight, " in blocks of %" PRId64, facts->w.blocksize);
  if (facts->E > 0)
    snprintf(weight + strlen(weight), sizeof weight - strlen(weight), ", %" PRId64 " experts", facts->E);
  list_reasons(facts, reasons, sizeof reasons);
  return bsh_fail(BSH_NO_KERNEL, "%s: %s M = %" PRId64 ", N = %" PRId64 ", K = %" PRId64 " of %s%s on sm_%d: %s", op,
                  facts->forced != NULL ? "the kernel that was forced cannot multiply" : "nothing multiplies", facts->M,
                  facts->N, facts->K, dtypes[facts->dtype], weight, (int)facts->sm, reasons);
}

bsh_status bsh_plan_product(const char *const op, const bsh_facts *const facts, bsh_plan *const plan) {
  const bsh_kernel *const kernel = facts->forced != NULL ? facts->forced : choose(facts);
  if (kernel == NULL || (facts->forced != NULL && refuses(kernel, facts) != NULL)) return cannot(op, facts);
  *plan = (bsh_plan){.kernel = kernel, .launch = kernel->launch, .y_alignment = facts->y_alignment};
  if (kernel->cut == NULL) bsh_cut_panels(facts, plan);
  else cut_slices(kernel, facts, plan);
  return BSH_OK;
}

/* ---- forced kernels ---- */

static _Atomic(const bsh_kernel *) forced_kernels[BSH_OPERANDS][2]; /* by direction */

static bsh_status find_op(const char *const op, bsh_operand_kind *const kind, bsh_direction *const direction) {
  char text[200];
  size_t at = 0;
  for (int i = 0; i < 2 * BSH_OPERANDS; i++) {
    *kind = (bsh_operand_kind)(i / 2), *direction = (bsh_direction)(i % 2);
    if (strcmp(ops[i / 2][i % 2], op) == 0) return BSH_OK;
    at += (size_t)snprintf(text + at, sizeof text - at, "%s%s", i > 0 ? ", " : "", ops[i / 2][i % 2]);
  }
  return bsh_fail(BSH_BAD_VALUE, "no kernels of '%s': expected one of %s", op, text);
}

bsh_status bsh_kernel_named(const char *const op, const char *const name, const bsh_kernel **const kernel) {
  bsh_operand_kind kind;
  bsh_direction direction;
  char text[300];
  size_t at = 0;
  BSH_TRY(find_op(op, &kind, &direction));
  for (int i = 0; i < KERNELS; i++) {
    if (!takes_operands(kernels[i], kind)) continue;
    *kernel = kernels[i];
    if (strcmp(kernels[i]->name, name) == 0) return BSH_OK;
    at += (size_t)snprintf(text + at, sizeof text - at, "%s%s", at > 0 ? ", " : "", kernels[i]->name);
  }
  return bsh_fail(BSH_BAD_VALUE, "no kernel '%s' of %s: expected one of %s", name, op, text);
}

bsh_status bsh_force_kernel(const char *const op, const char *const name) {
  const bsh_kernel *kernel = NULL;
  bsh_operand_kind kind;
  bsh_direction direction;
  BSH_TRY(find_op(op, &kind, &direction));
  if (name != NULL) BSH_TRY(bsh_kernel_named(op, name, &kernel));
  atomic_store_explicit(&forced_kernels[kind][direction], kernel, memory_order_relaxed);
  return BSH_OK;
}

const bsh_kernel *bsh_forced_kernel(const bsh_operand_kind kind, const bsh_direction direction) {
  return atomic_load_explicit(&forced_kernels[kind][direction], memory_order_relaxed);
}

bsh_status bsh_read_forced_kernels(void) {
  for (int i = 0; i < 2 * BSH_OPERANDS; i++) {
    const char *const op = ops[i / 2][i % 2];
    char variable[60] = "BITSHARD_";
    size_t at = strlen(variable);
    for (const char *c = op; *c != 0; c++) variable[at++] = (char)toupper((unsigned char)*c);
    const char *const name = getenv(variable);
    if (name != NULL) BSH_TRY(bsh_force_kernel(op, name));
  }
  return BSH_OK;
}
