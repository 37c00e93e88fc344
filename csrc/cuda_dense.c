/* cuda_dense.c - products with W dequantized by panels into bounded scratch memory, and torch's GEMM per panel.
 *
 * Forward takes panels of rows of W, the input gradient panels of columns: each panel gives its own columns of the
 * result, written once. Nothing is accumulated over panels, so the rounding is that of the whole GEMM. */
#include "cuda_ops.h"
#include "tensor.h"
#include "torch_gemm.h"

static int64_t itemsize_of(const bsh_dtype dtype) { return dtype == BSH_F32 ? 4 : 2; }

bsh_status bsh_cuda_linear_4bit_dense(const bsh_linear_4bit_args *const args, const bsh_cuda_context *const context) {
  const int64_t M = args->M, N = args->N, K = args->K, itemsize = itemsize_of(args->dtype);
  const int64_t lines = bsh_panel_lines(N, K, itemsize, bsh_cuda_workspace_bytes());
  const bsh_torch_operands *const operands = context->operands;
  const bsh_torch_matrix x = {.tensor = operands->x, .rows = M, .columns = K, .row_stride = K, .column_stride = 1};
  bsh_cuda_scratch panel;
  BSH_TRY(bsh_cuda_scratch_of(context, lines * K, bsh_torch_dtype(args->dtype), itemsize, &panel));
  bsh_status status = BSH_OK;
  for (int64_t row = 0; row < N && status == BSH_OK; row += lines) {
    const int64_t n_rows = lines < N - row ? lines : N - row;
    const bsh_dequantize_4bit_args rectangle = {.weight = args->weight,
                                                .out = panel.data,
                                                .columns = K,
                                                .row0 = row,
                                                .n_rows = n_rows,
                                                .n_columns = K,
                                                .ld = K,
                                                .dtype = args->dtype};
    const bsh_torch_matrix w = {
        .tensor = panel.handle, .rows = K, .columns = n_rows, .row_stride = 1, .column_stride = K};
    const bsh_torch_matrix y = {
        .tensor = operands->y, .offset = row, .rows = M, .columns = n_rows, .row_stride = N, .column_stride = 1};
    status = bsh_cuda_dequantize_4bit(&rectangle, context);
    if (status == BSH_OK) status = bsh_torch_cuda_gemm(&y, &x, &w, operands->bias, row);
  }
  bsh_cuda_scratch_delete(&panel);
  return status;
}

bsh_status bsh_cuda_linear_4bit_dgrad(const bsh_linear_4bit_dgrad_args *const args,
                                      const bsh_cuda_context *const context) {
  const int64_t M = args->M, N = args->N, K = args->K, itemsize = itemsize_of(args->dtype);
  const int64_t lines = bsh_panel_lines(K, N, itemsize, bsh_cuda_workspace_bytes());
  const bsh_torch_operands *const operands = context->operands;
  const bsh_torch_matrix dy = {.tensor = operands->x, .rows = M, .columns = N, .row_stride = N, .column_stride = 1};
  bsh_cuda_scratch panel;
  BSH_TRY(bsh_cuda_scratch_of(context, lines * N, bsh_torch_dtype(args->dtype), itemsize, &panel));
  bsh_status status = BSH_OK;
  for (int64_t column = 0; column < K && status == BSH_OK; column += lines) {
    const int64_t n_columns = lines < K - column ? lines : K - column;
    const bsh_dequantize_4bit_args rectangle = {.weight = args->weight,
                                                .out = panel.data,
                                                .columns = K,
                                                .n_rows = N,
                                                .column0 = column,
                                                .n_columns = n_columns,
                                                .ld = n_columns,
                                                .dtype = args->dtype};
    const bsh_torch_matrix w = {
        .tensor = panel.handle, .rows = N, .columns = n_columns, .row_stride = n_columns, .column_stride = 1};
    const bsh_torch_matrix dx = {
        .tensor = operands->y, .offset = column, .rows = M, .columns = n_columns, .row_stride = K, .column_stride = 1};
    status = bsh_cuda_dequantize_4bit(&rectangle, context);
    if (status == BSH_OK) status = bsh_torch_cuda_gemm(&dx, &dy, &w, NULL, 0);
  }
  bsh_cuda_scratch_delete(&panel);
  return status;
}
