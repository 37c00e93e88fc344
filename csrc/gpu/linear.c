/* gpu/linear.c - see gpu/linear.h. */
#include "gpu/linear.h"

#include "core/arithmetic.h"
#include "gpu/fused.h"
#include "gpu/wide.h"

/* Bytes, a power of two up to 16, that all rows of a matrix begin at multiples of. */
static int32_t row_alignment(const void *const data, const int64_t ld, const bsh_dtype dtype) {
  const uintptr_t bits = (uintptr_t)data | (uintptr_t)(ld * dtype_size(dtype)) | 16;
  return (int32_t)(bits & -bits);
}
static int32_t alignment(const void *const data) { return row_alignment(data, 0, BSH_F16); }

bsh_facts bsh_cuda_facts(const bsh_linear_4bit_args *const args, const int32_t sm, const int32_t sms,
                         const bsh_vendor vendor) {
  const bsh_weight *const weight = &args->weight;
  return (bsh_facts){.M = args->M,
                     .N = args->N,
                     .K = args->K,
                     .blocksize = weight->blocksize,
                     .workspace_bytes = bsh_cuda_workspace_bytes(),
                     .direction = args->direction,
                     .dtype = args->dtype,
                     .format = weight->format,
                     .nested = weight->scales.absmax == NULL,
                     .x_alignment = row_alignment(args->x, args->ldx, args->dtype),
                     .y_alignment = row_alignment(args->y, args->ldy, args->dtype),
                     .packed_alignment = alignment(weight->packed),
                     .code_alignment = alignment(weight->scales.absmax_code),
                     .bias_alignment = args->bias != NULL ? alignment(args->bias) : 0,
                     .sm = sm,
                     .sms = sms,
                     .image = bsh_image_here(sm),
                     .tensor_maps = bsh_cuda_has_tensor_maps(),
                     .vendor = vendor,
                     .forced = bsh_forced_kernel(args->direction)};
}

bsh_status bsh_cuda_plan_linear_4bit(const char *const op, const bsh_linear_4bit_args *const args, const int32_t sm,
                                     const int32_t sms, const bsh_vendor vendor, bsh_plan *const plan) {
  const bsh_facts facts = bsh_cuda_facts(args, sm, sms, vendor);
  return bsh_plan_linear_4bit(op, &facts, plan);
}

/* A fused kernel stores as the plan says that it may. */
static bsh_status check_result(const bsh_linear_4bit_args *const args, const bsh_plan *const plan,
                               const bsh_cuda_context *const context) {
  if (row_alignment(args->y, args->ldy, args->dtype) >= plan->y_alignment) return BSH_OK;
  return bsh_fail(BSH_BAD_VALUE, "%s: the result lies at %p, planned was a multiple of %d bytes", context->op, args->y,
                  (int)plan->y_alignment);
}

bsh_status bsh_cuda_linear_4bit(const bsh_linear_4bit_args *const args, const bsh_plan *const plan,
                                const bsh_torch_operands *const operands, const bsh_cuda_context *const context) {
  if (plan->kernel == BSH_LINEAR_panels) return bsh_cuda_panels(args, plan, operands, context);
  BSH_TRY(check_result(args, plan, context));
  if (plan->kernel == BSH_LINEAR_gemm_4bit_sm90_wide) return bsh_cuda_wide(args, plan, context);
  return bsh_cuda_fused(args, plan, context);
}
