/* cuda_dense.c - products with W dequantized by panels into bounded scratch memory, and the vendor's GEMM per panel.
 *
 * Forward takes panels of rows of W, the input gradient panels of columns: each panel gives its own columns of the
 * result, written once. Nothing is accumulated over panels, so the rounding is that of the whole GEMM. */
#include "arithmetic.h"
#include "cublas.h"
#include "cuda_ops.h"
#include "tensor.h"
#include "torch_gemm.h"

/* Memory for a panel and, as far as the bound allows, behind it for cuBLAS. */
typedef struct {
  bsh_cuda_scratch scratch;
  void *data, *workspace;
  int64_t workspace_bytes;
} panel_memory;

static bsh_status new_panel(const bsh_cuda_context *const context, const int64_t n, const bsh_dtype dtype,
                            panel_memory *const panel) {
  const int64_t itemsize = dtype_size(dtype), bytes = divide_up(n * itemsize, 256) * 256;
  const int64_t left = (bsh_cuda_workspace_bytes() - bytes) / 256 * 256;
  panel->workspace_bytes = context->operands->cublas && left > 0 ? min_i64(left, BSH_CUBLAS_WORKSPACE) : 0;
  const int64_t all = (bytes + panel->workspace_bytes) / itemsize;
  BSH_TRY(bsh_cuda_scratch_of(context, all, bsh_torch_dtype(dtype), itemsize, &panel->scratch));
  panel->data = panel->scratch.data;
  panel->workspace = (char *)panel->data + bytes;
  return BSH_OK;
}

/* c = a b + bias, b in the panel; bias one row or NULL. */
static bsh_status multiply(const bsh_cuda_context *const context, const bsh_dtype dtype,
                           const panel_memory *const panel, const bsh_torch_matrix *const c,
                           const bsh_torch_matrix *const a, const bsh_torch_matrix *const b,
                           const bsh_torch_matrix *const bias) {
  if (context->operands->cublas)
    return bsh_cublas_gemm(context, dtype, c, a, b, bias, panel->workspace, panel->workspace_bytes);
  return bsh_torch_cuda_gemm(c, a, b, bias);
}

bsh_status bsh_cuda_linear_4bit_dense(const bsh_linear_4bit_args *const args, const bsh_cuda_context *const context) {
  const int64_t M = args->M, N = args->N, K = args->K, itemsize = dtype_size(args->dtype);
  const int64_t lines = bsh_panel_lines(N, K, itemsize, bsh_cuda_workspace_bytes());
  const bsh_torch_operands *const operands = context->operands;
  const bsh_torch_matrix x = {operands->x, args->x, 0, M, K, K, 1};
  panel_memory panel;
  BSH_TRY(new_panel(context, lines * K, args->dtype, &panel));
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
    const bsh_torch_matrix w = {panel.scratch.handle, panel.data, 0, K, n_rows, 1, K};
    const bsh_torch_matrix y = {operands->y, args->y, row, M, n_rows, N, 1};
    const bsh_torch_matrix bias = {operands->bias, args->bias, row, 1, n_rows, N, 1};
    status = bsh_cuda_dequantize_4bit(&rectangle, context);
    if (status == BSH_OK)
      status = multiply(context, args->dtype, &panel, &y, &x, &w, args->bias != NULL ? &bias : NULL);
  }
  bsh_cuda_scratch_delete(&panel.scratch);
  return status;
}

bsh_status bsh_cuda_linear_4bit_dgrad(const bsh_linear_4bit_dgrad_args *const args,
                                      const bsh_cuda_context *const context) {
  const int64_t M = args->M, N = args->N, K = args->K, itemsize = dtype_size(args->dtype);
  const int64_t lines = bsh_panel_lines(K, N, itemsize, bsh_cuda_workspace_bytes());
  const bsh_torch_operands *const operands = context->operands;
  const bsh_torch_matrix dy = {operands->x, args->dy, 0, M, N, N, 1};
  panel_memory panel;
  BSH_TRY(new_panel(context, lines * N, args->dtype, &panel));
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
    const bsh_torch_matrix w = {panel.scratch.handle, panel.data, 0, N, n_columns, n_columns, 1};
    const bsh_torch_matrix dx = {operands->y, args->dx, column, M, n_columns, K, 1};
    status = bsh_cuda_dequantize_4bit(&rectangle, context);
    if (status == BSH_OK) status = multiply(context, args->dtype, &panel, &dx, &dy, &w, NULL);
  }
  bsh_cuda_scratch_delete(&panel.scratch);
  return status;
}
