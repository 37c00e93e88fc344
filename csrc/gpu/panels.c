/* gpu/panels.c - products with W dequantized by panels into bounded scratch memory, a vendor's product of each.
 *
 * Forward takes panels of rows of W, the input gradient panels of columns: each panel gives its own columns of the
 * result, written once. Nothing is accumulated over panels, so the rounding is that of the whole product. */
#include "core/arithmetic.h"
#include "gpu/cublas.h"
#include "gpu/int8.h"
#include "gpu/ops.h"
#include "gpu/product.h"
#include "torch/gemm.h"
#include "torch/tensor.h"

/* As many elements of the panel's dtype as the plan has bytes: torch's product wants a tensor of that dtype. */
static bsh_status new_panel(const bsh_cuda_context *const context, const bsh_plan *const plan, const bsh_dtype dtype,
                            bsh_cuda_scratch *const panel) {
  const int64_t itemsize = dtype_size(dtype);
  return bsh_cuda_scratch_of(context, plan->scratch_bytes / itemsize, bsh_torch_dtype(dtype), itemsize, panel);
}

/* Rows (forward) or columns of W: [first, first + n). */
static bsh_status dequantize(const bsh_product_args *const args, void *const panel, const int64_t first,
                             const int64_t n, const bsh_cuda_context *const context) {
  const bool rows = args->direction == BSH_FORWARD;
  const bsh_dequantize_4bit_args rectangle = {.weight = args->weight,
                                              .out = panel,
                                              .columns = args->K,
                                              .row0 = rows ? first : 0,
                                              .n_rows = rows ? n : args->N,
                                              .column0 = rows ? 0 : first,
                                              .n_columns = rows ? args->K : n,
                                              .ld = rows ? args->K : n,
                                              .dtype = args->dtype};
  if (args->weight.format == BSH_INT8) return bsh_cuda_dequantize_int8_part(&rectangle, context);
  return bsh_cuda_dequantize_4bit(&rectangle, context);
}

/* Columns [first, first + n) of y = x times the panel, which forward holds transposed. */
static bsh_status multiply_panel(const bsh_product_args *const args, const bsh_plan *const plan,
                                 const bsh_torch_operands *const operands, const bsh_cuda_scratch *const panel,
                                 const int64_t first, const int64_t n, const bsh_cuda_context *const context) {
  const bool forward = args->direction == BSH_FORWARD;
  const int64_t M = args->M, inner = forward ? args->K : args->N, outer = forward ? args->N : args->K;
  const bsh_torch_matrix x = {operands->x, args->x, 0, M, inner, inner, 1};
  const bsh_torch_matrix w = {panel->handle, panel->data, 0, inner, n, forward ? 1 : n, forward ? inner : 1};
  const bsh_torch_matrix y = {operands->y, args->y, first, M, n, outer, 1};
  const bsh_torch_matrix row = {operands->bias, args->bias, first, 1, n, outer, 1};
  const bsh_torch_matrix *const bias = args->bias != NULL ? &row : NULL;
  if (plan->vendor == BSH_VENDOR_TORCH) return bsh_torch_cuda_gemm(&y, &x, &w, bias);
  return bsh_cublas_gemm(context, args->dtype, &y, &x, &w, bias, (char *)panel->data + plan->panel_bytes,
                         plan->vendor_bytes);
}

bsh_status bsh_launch_panels(const bsh_product_args *const args, const bsh_plan *const plan,
                             const bsh_torch_operands *const operands, const bsh_cuda_context *const context) {
  const int64_t outer = args->direction == BSH_FORWARD ? args->N : args->K, lines = plan->panel_lines;
  bsh_cuda_scratch panel;
  BSH_TRY(new_panel(context, plan, args->dtype, &panel));
  bsh_status status = BSH_OK;
  for (int64_t first = 0; first < outer && status == BSH_OK; first += lines) {
    const int64_t n = min_i64(lines, outer - first);
    status = dequantize(args, panel.data, first, n, context);
    if (status == BSH_OK) status = multiply_panel(args, plan, operands, &panel, first, n, context);
  }
  bsh_cuda_scratch_delete(&panel);
  return status;
}
