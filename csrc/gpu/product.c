/* gpu/product.c - see gpu/product.h. */
#include "gpu/product.h"

#include "core/arithmetic.h"
#include "gpu/alignment.h"

static bsh_operand operand_of(const bsh_weight *const weight) {
  const bool rows = weight->format == BSH_INT8, nested = weight->scales.absmax == NULL;
  return (bsh_operand){.bits = rows ? 8 : 4,
                       .table = weight->format,
                       .scales = rows     ? BSH_SCALES_ROWS
                                 : nested ? BSH_SCALES_NESTED
                                          : BSH_SCALES_BLOCKS,
                       .blocksize = weight->blocksize};
}

static bsh_facts facts_of(const bsh_product_args *const args, const int32_t sm, const int32_t sms,
                          const bsh_vendor vendor) {
  const bsh_weight *const weight = &args->weight;
  const int64_t size = dtype_size(args->dtype);
  bsh_facts facts = {.w = operand_of(weight),
                     .M = args->M,
                     .N = args->N,
                     .K = args->K,
                     .E = args->E,
                     .workspace_bytes = bsh_cuda_workspace_bytes(),
                     .direction = args->direction,
                     .dtype = args->dtype,
                     .threshold = args->threshold > 0,
                     .x_alignment = rows_alignment(args->x, args->ldx * size),
                     .y_alignment = rows_alignment(args->y, args->ldy * size),
                     .packed_alignment = rows_alignment(weight->packed, weight->format == BSH_INT8 ? args->K : 0),
                     .code_alignment = alignment_of(weight->scales.absmax_code),
                     .bias_alignment = args->bias != NULL ? alignment_of(args->bias) : 0,
                     .sm = sm,
                     .sms = sms,
                     .image = bsh_image_here(sm),
                     .tensor_maps = bsh_cuda_has_tensor_maps(),
                     .vendor = vendor};
  facts.forced = bsh_forced_kernel(bsh_kind_of(&facts), args->direction);
  return facts;
}

bsh_status bsh_cuda_plan(const char *const op, const bsh_product_args *const args, const int32_t sm, const int32_t sms,
                         const bsh_vendor vendor, bsh_plan *const plan) {
  const bsh_facts facts = facts_of(args, sm, sms, vendor);
  return bsh_plan_product(op, &facts, plan);
}

/* A kernel stores as the plan says that it may. */
static bsh_status check_result(const bsh_product_args *const args, const bsh_plan *const plan,
                               const bsh_cuda_context *const context) {
  if (rows_alignment(args->y, args->ldy * dtype_size(args->dtype)) >= plan->y_alignment) return BSH_OK;
  return bsh_fail(BSH_BAD_VALUE, "%s: the result lies at %p, planned was a multiple of %d bytes", context->op, args->y,
                  (int)plan->y_alignment);
}

/* Rows [m, m + slice->rows) of the product. */
static bsh_status run_slice(const bsh_product_args *const args, const int64_t m, const bsh_plan *const plan,
                            const bsh_plan_slice *const slice, const bsh_cuda_context *const context) {
  static bsh_launch_slice *const launches[] = {[BSH_LAUNCH_FUSED] = bsh_launch_fused,
                                               [BSH_LAUNCH_STACK] = bsh_launch_stack,
                                               [BSH_LAUNCH_WIDE] = bsh_launch_wide,
                                               [BSH_LAUNCH_SM80] = bsh_launch_sm80,
                                               [BSH_LAUNCH_SM75] = bsh_launch_sm75,
                                               [BSH_LAUNCH_ROWS_INT8] = bsh_launch_rows_int8,
                                               [BSH_LAUNCH_CODES_INT8] = bsh_launch_codes_int8,
                                               [BSH_LAUNCH_MIXED_INT8] = bsh_launch_mixed_int8,
                                               [BSH_LAUNCH_DGRAD_INT8] = bsh_launch_dgrad_int8};
  const bsh_product_args part = rows_of(args, m, slice->rows);
  bsh_cuda_scratch scratch = {0};
  if (slice->scratch_bytes > 0) BSH_TRY(bsh_cuda_scratch_new(context, slice->scratch_bytes, &scratch));
  const bsh_status status = launches[plan->launch](&part, slice, scratch.data, context);
  if (slice->scratch_bytes > 0) bsh_cuda_scratch_delete(&scratch);
  return status;
}

bsh_status bsh_cuda_product(const bsh_product_args *const args, const bsh_plan *const plan,
                            const bsh_torch_operands *const operands, const bsh_cuda_context *const context) {
  const bool panels = plan->launch == BSH_LAUNCH_PANELS;
  if (panels && args->E > 0)
    return bsh_fail(BSH_NO_KERNEL, "%s: panels of a stack are multiplied by torch", context->op);
  if (panels) return bsh_launch_panels(args, plan, operands, context);
  const int64_t rows = plan->slice.rows, left = plan->n_slices * rows;
  BSH_TRY(check_result(args, plan, context));
  for (int64_t m = 0; m < left; m += rows) BSH_TRY(run_slice(args, m, plan, &plan->slice, context));
  return plan->rest.rows == 0 ? BSH_OK : run_slice(args, left, plan, &plan->rest, context);
}
