/* gpu/panels.c - see gpu/panels.h.
 *
 * Forward takes panels of rows of W, the input gradient panels of columns: each panel gives its own columns of the
 * result, written once. Nothing is accumulated over panels, so the rounding is that of the whole product. */
#include "gpu/panels.h"

#include "core/arithmetic.h"
#include "gpu/cublas.h"
#include "gpu/ops.h"
#include "torch/gemm.h"
#include "torch/tensor.h"

/* As many elements of the panel's dtype as the plan has bytes: torch's product wants a tensor of that dtype. */
static bsh_status new_panel(const bsh_cuda_context *const context, const bsh_plan *const plan, const bsh_dtype dtype,
                            bsh_cuda_scratch *const panel) {
  const int64_t itemsize = dtype_size(dtype);
  return bsh_cuda_scratch_of(context, plan->scratch_bytes / itemsize, bsh_torch_dtype(dtype), itemsize, panel);
}

/* c = a b + bias, b in the panel; bias one row or NULL. */
static bsh_status multiply(const bsh_cuda_context *const context, const bsh_dtype dtype, const bsh_plan *const plan,
                           const bsh_cuda_scratch *const panel, const bsh_torch_matrix *const c,
                           const bsh_torch_matrix *const a, const bsh_torch_matrix *const b,
                           const bsh_torch_matrix *const bias) {
  if (plan->vendor == BSH_VENDOR_TORCH) return bsh_torch_cuda_gemm(c, a, b, bias);
  return bsh_cublas_gemm(context, dtype, c, a, b, bias, (char *)panel->data + plan->panel_bytes, plan->vendor_bytes);
}

bsh_status bsh_cuda_panels(const bsh_linear_4bit_args *const args, const bsh_plan *const plan,
                           const bsh_torch_operands *const operands, const bsh_cuda_context *const context) {
  const int64_t M = args->M, N = args->N, K = args->K, lines = plan->panel_lines;
  const bsh_torch_matrix x = {operands->x, args->x, 0, M, K, K, 1};
  bsh_cuda_scratch panel;
  BSH_TRY(new_panel(context, plan, args->dtype, &panel));
  bsh_status status = BSH_OK;
  for (int64_t row = 0; row < N && status == BSH_OK; row += lines) {
    const int64_t n_rows = min_i64(lines, N - row);
    const bsh_dequantize_4bit_args rectangle = {.weight = args->weight,
                                                .out = panel.data,
                                                .columns = K,
                                                .row0 = row,
                                                .n_rows = n_rows,
                                                .n_columns = K,
                                                .ld = K,
                                                .dtype = args->dtype};
    const bsh_torch_matrix w = {panel.handle, panel.data, 0, K, n_rows, 1, K};
    const bsh_torch_matrix y = {operands->y, args->y, row, M, n_rows, N, 1};
    const bsh_torch_matrix bias = {operands->bias, args->bias, row, 1, n_rows, N, 1};
    status = bsh_cuda_dequantize_4bit(&rectangle, context);
    if (status == BSH_OK)
      status = multiply(context, args->dtype, plan, &panel, &y, &x, &w, args->bias != NULL ? &bias : NULL);
  }
  bsh_cuda_scratch_delete(&panel);
  return status;
}

bsh_status bsh_cuda_panels_dgrad(const bsh_linear_4bit_dgrad_args *const args, const bsh_plan *const plan,
                                 const bsh_torch_operands *const operands, const bsh_cuda_context *const context) {
  const int64_t M = args->M, N = args->N, K = args->K, lines = plan->panel_lines;
  const bsh_torch_matrix dy = {operands->x, args->dy, 0, M, N, N, 1};
  bsh_cuda_scratch panel;
  BSH_TRY(new_panel(context, plan, args->dtype, &panel));
  bsh_status status = BSH_OK;
  for (int64_t column = 0; column < K && status == BSH_OK; column += lines) {
    const int64_t n_columns = min_i64(lines, K - column);
    const bsh_dequantize_4bit_args rectangle = {.weight = args->weight,
                                                .out = panel.data,
                                                .columns = K,
                                                .n_rows = N,
                                                .column0 = column,
                                                .n_columns = n_columns,
                                                .ld = n_columns,
                                                .dtype = args->dtype};
    const bsh_torch_matrix w = {panel.handle, panel.data, 0, N, n_columns, n_columns, 1};
    const bsh_torch_matrix dx = {operands->y, args->dx, column, M, n_columns, K, 1};
    status = bsh_cuda_dequantize_4bit(&rectangle, context);
    if (status == BSH_OK) status = multiply(context, args->dtype, plan, &panel, &dx, &dy, &w, NULL);
  }
  bsh_cuda_scratch_delete(&panel);
  return status;
}
