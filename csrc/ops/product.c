/* ops/product.c - see ops/product.h. */
#include "ops/product.h"

#include <inttypes.h>

#include "cpu/cpu.h"
#include "gpu/product.h"
#include "ops/arguments.h"
#include "torch/gemm.h"

static const bsh_cpu_gemm cpu_gemm = {.mm = bsh_torch_cpu_gemm};

bsh_status bsh_read_input(bsh_call *const call, const char *const argument, bsh_product *const product) {
  bsh_product_args *const args = &product->args;
  const bsh_tensor *const bias = &product->bias, *const packed = &product->packed;
  const int64_t rows = args->E > 0 ? args->E * args->N : args->N; /* did not overflow in the op */
  BSH_TRY(bsh_read_activation(call, argument, args->ldx, &product->x, &args->dtype, &args->M));
  BSH_TRY(bsh_same_device(call, &product->x, argument, packed, "packed"));
  if (bias->numel != 0) BSH_TRY(bsh_data_of(call, bias, "bias", product->x.dtype, rows, packed, (void **)&args->bias));
  args->x = product->x.data;
  return BSH_OK;
}

/* ---- CUDA ---- */

static bsh_status plan_product(bsh_call *const call, const bsh_product *const product, bsh_plan *const plan) {
  int32_t sm, sms;
  BSH_TRY(bsh_cuda_gpu(call->op, product->x.device_index, &sm, &sms));
  BSH_TRY(bsh_cuda_plan(call->op, &product->args, sm, sms, call->caller->vendor, plan));
  return plan->vendor != BSH_VENDOR_NONE ? bsh_call_may_multiply(call, product->args.dtype) : BSH_OK;
}

static bsh_status decline(bsh_call *const call, const bsh_product *const product, const bsh_plan *const plan) {
  const int64_t sizes[3] = {0, plan->panel_lines, 0};
  bsh_tensor none;
  return bsh_call_output(call, &product->x, 3, sizes, product->x.dtype, &none);
}

static bsh_status run_plan(const bsh_call *const call, const bsh_product *const product, const bsh_plan *const plan,
                           const bsh_tensor *const y) {
  const bsh_product_args *const args = &product->args;
  const bsh_torch_operands operands = {product->x.handle, y->handle, args->bias != NULL ? product->bias.handle : NULL};
  bsh_cuda_context context;
  BSH_TRY(bsh_cuda_enter(&context, call->op, product->x.device_index, args->M, args->N, args->K));
  const bsh_status computed = bsh_cuda_product(args, plan, &operands, &context);
  bsh_cuda_leave(&context);
  return computed;
}

/* ---- any device ---- */

/* Where each sum has no terms and the result some: of one weight. */
static bool has_empty_sums(const bsh_product *const product, const bool cuda) {
  const bsh_product_args *const args = &product->args;
  return args->ldx == 0 && args->E == 0 && (cuda || args->weight.format == BSH_INT8);
}

static bsh_status check_terms(const bsh_call *const call, const bsh_product_args *const args) {
  if (args->E == 0 || args->ldx > 0) return BSH_OK;
  return bsh_fail(BSH_BAD_SHAPE, "%s: experts of [%" PRId64 ", %" PRId64 "]: each sum needs a term on a GPU", call->op,
                  args->N, args->K);
}

bsh_status bsh_multiply(bsh_call *const call, bsh_product *const product) {
  bsh_product_args *const args = &product->args;
  const bool cuda = bsh_on_cuda(&product->x), biased = args->bias != NULL;
  bsh_plan plan = {0};
  bsh_tensor y;
  if (cuda && args->M > 0 && args->ldy > 0) {
    BSH_TRY(check_terms(call, args));
    if (args->ldx > 0) BSH_TRY(plan_product(call, product, &plan));
    if (args->E > 0 && plan.launch == BSH_LAUNCH_PANELS) return decline(call, product, &plan);
  }
  BSH_TRY(bsh_new_activation(call, &product->x, args->ldy, product->x.dtype, &y));
  if (y.numel == 0) return BSH_OK;
  if (has_empty_sums(product, cuda)) return bsh_empty_sums(call, &y, biased ? &product->bias : NULL);
  args->y = y.data;
  bsh_call_compute(call);
  return cuda ? run_plan(call, product, &plan, &y) : bsh_cpu_product(args, &cpu_gemm);
}
