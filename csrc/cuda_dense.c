/* cuda_dense.c - products with W dequantized by panels into bounded scratch memory, and torch's GEMM per panel.
 *
 * Forward takes panels of rows of W, the input gradient panels of columns: each panel gives its own columns of the
 * result, written once. Nothing is accumulated over panels, so the rounding is that of the whole GEMM. */
#include "cuda_ops.h"
#include "torch_gemm.h"

static int64_t itemsize_of(const bsh_dtype dtype) { return dtype == BSH_F32 ? 4 : 2; }

static void *element(const void *const base, const int64_t index, const bsh_dtype dtype) {
  return base == NULL ? NULL : (char *)(uintptr_t)base + index * itemsize_of(dtype);
}

bsh_status bsh_cuda_linear_4bit_dense(const bsh_linear_4bit_args *const args, const bsh_cuda_context *const context) {
  const int64_t K = args->K, itemsize = itemsize_of(args->dtype);
  const int64_t lines = bsh_panel_lines(args->N, K, itemsize, bsh_cuda_workspace_bytes());
  bsh_cuda_scratch panel;
  BSH_TRY(bsh_cuda_scratch_new(context, lines * K * itemsize, &panel));
  bsh_status status = BSH_OK;
  for (int64_t row = 0; row < args->N && status == BSH_OK; row += lines) {
    const int64_t n_rows = lines < args->N - row ? lines : args->N - row;
    const bsh_dequantize_4bit_args rectangle = {.weight = args->weight,
                                                .out = panel.data,
                                                .columns = K,
                                                .row0 = row,
                                                .n_rows = n_rows,
                                                .n_columns = K,
                                                .ld = K,
                                                .dtype = args->dtype};
    status = bsh_cuda_dequantize_4bit(&rectangle, context);
    if (status == BSH_OK)
      status =
          bsh_torch_cuda_gemm(context->device, args->dtype, element(args->y, row, args->dtype), args->ldy, args->x,
                              args->ldx, panel.data, 1, K, element(args->bias, row, args->dtype), args->M, n_rows, K);
  }
  bsh_cuda_scratch_delete(&panel);
  return status;
}

bsh_status bsh_cuda_linear_4bit_dgrad(const bsh_linear_4bit_dgrad_args *const args,
                                      const bsh_cuda_context *const context) {
  const int64_t N = args->N, itemsize = itemsize_of(args->dtype);
  const int64_t lines = bsh_panel_lines(args->K, N, itemsize, bsh_cuda_workspace_bytes());
  bsh_cuda_scratch panel;
  BSH_TRY(bsh_cuda_scratch_new(context, lines * N * itemsize, &panel));
  bsh_status status = BSH_OK;
  for (int64_t column = 0; column < args->K && status == BSH_OK; column += lines) {
    const int64_t n_columns = lines < args->K - column ? lines : args->K - column;
    const bsh_dequantize_4bit_args rectangle = {.weight = args->weight,
                                                .out = panel.data,
                                                .columns = args->K,
                                                .n_rows = N,
                                                .column0 = column,
                                                .n_columns = n_columns,
                                                .ld = n_columns,
                                                .dtype = args->dtype};
    status = bsh_cuda_dequantize_4bit(&rectangle, context);
    if (status == BSH_OK)
      status = bsh_torch_cuda_gemm(context->device, args->dtype, element(args->dx, column, args->dtype), args->lddx,
                                   args->dy, args->lddy, panel.data, n_columns, 1, NULL, args->M, n_columns, N);
  }
  bsh_cuda_scratch_delete(&panel);
  return status;
}
