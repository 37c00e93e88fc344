/* torch/gemm.c - see torch/gemm.h. */
#include "torch/gemm.h"

#include "core/arithmetic.h"
#include "torch/tensor.h"

/* A 2-D tensor over foreign memory; the memory outlives the product. */
static AtenTensorHandle wrap(const void *const data, const int64_t rows, const int64_t columns,
                             const int64_t row_stride, const int64_t column_stride, const bsh_dtype dtype,
                             const int32_t device_type, const int32_t device_index) {
  const int64_t sizes[2] = {rows, columns}, strides[2] = {row_stride, column_stride};
  AtenTensorHandle tensor = NULL;
  bsh_torch.aoti_torch_create_tensor_from_blob((void *)(uintptr_t)data, 2, sizes, strides, 0, bsh_torch_dtype(dtype),
                                               device_type, device_index, &tensor);
  return tensor;
}

/* Takes over the matrices; the status is that of one product of them, which has `failed`. */
static bsh_status finish(const AtenTensorHandle *const matrices, const int count, const bool failed) {
  for (int i = 0; i < count; i++)
    if (matrices[i] != NULL) bsh_torch.aoti_torch_delete_tensor_object(matrices[i]);
  return failed ? bsh_fail(BSH_TORCH_ERROR, "torch's matrix product failed (its own text is on stderr)") : BSH_OK;
}

/* c = alpha a b + beta c, of handles that it takes over. torch adds in float32 and rounds once. */
static bsh_status multiply_cpu(const AtenTensorHandle c, const AtenTensorHandle a, const AtenTensorHandle b,
                               const double alpha, const double beta) {
  const AtenTensorHandle matrices[] = {c, a, b};
  bool failed = c == NULL || a == NULL || b == NULL;
  if (!failed && alpha == 1.0 && beta == 0.0) failed = bsh_torch.aoti_torch_cpu_mm_out(c, a, b) != 0;
  else if (!failed) failed = bsh_torch.aoti_torch_cpu_addmm_out(c, c, a, b, beta, alpha) != 0;
  return finish(matrices, 3, failed);
}

bsh_status bsh_torch_cpu_gemm(void *const context, const bsh_dtype dtype, const bool add, void *const c,
                              const int64_t ldc, const void *const a, const int64_t lda, const void *const b,
                              const int64_t ldb_row, const int64_t ldb_col, const int64_t m, const int64_t n,
                              const int64_t k) {
  (void)context;
  const int32_t cpu = bsh_torch.device_type_cpu;
  return multiply_cpu(wrap(c, m, n, ldc, 1, dtype, cpu, 0), wrap(a, m, k, lda, 1, dtype, cpu, 0),
                      wrap(b, k, n, ldb_row, ldb_col, dtype, cpu, 0), 1.0, add ? 1.0 : 0.0);
}

static AtenTensorHandle wrap_matrix(const bsh_torch_matrix *const matrix, const bsh_dtype dtype) {
  const char *const first = (const char *)matrix->data + matrix->offset * dtype_size(dtype);
  return wrap(first, matrix->rows, matrix->columns, matrix->row_stride, matrix->column_stride, dtype,
              bsh_torch.device_type_cpu, 0);
}

bsh_status bsh_torch_cpu_gemm_add(const bsh_dtype dtype, const bsh_torch_matrix *const c,
                                  const bsh_torch_matrix *const a, const bsh_torch_matrix *const b, const double alpha,
                                  const double beta) {
  return multiply_cpu(wrap_matrix(c, dtype), wrap_matrix(a, dtype), wrap_matrix(b, dtype), alpha, beta);
}

/* Views for one product; unlike tensors over foreign memory they cost no question to the driver. */
static AtenTensorHandle view(const bsh_torch_matrix *const matrix) {
  const int64_t sizes[2] = {matrix->rows, matrix->columns}, strides[2] = {matrix->row_stride, matrix->column_stride};
  AtenTensorHandle tensor = NULL;
  bsh_torch.aoti_torch__reinterpret_tensor(matrix->tensor, 2, sizes, strides, matrix->offset, &tensor);
  return tensor;
}

bsh_status bsh_torch_cuda_gemm(const bsh_torch_matrix *const c, const bsh_torch_matrix *const a,
                               const bsh_torch_matrix *const b, const bsh_torch_matrix *const bias) {
  AtenTensorHandle matrices[] = {view(c), view(a), view(b), NULL};
  const int count = bias == NULL ? 3 : 4;
  const int64_t stride = 1;
  /* addmm reads the bias as a 1-D tensor and adds it in the product's epilogue where cuBLASLt can. */
  if (bias != NULL)
    bsh_torch.aoti_torch__reinterpret_tensor(bias->tensor, 1, &bias->columns, &stride, bias->offset, &matrices[3]);
  bool failed = false;
  for (int i = 0; i < count; i++) failed = failed || matrices[i] == NULL;
  if (!failed && bias == NULL) failed = bsh_torch.aoti_torch_cuda_mm_out(matrices[0], matrices[1], matrices[2]) != 0;
  else if (!failed)
    failed = bsh_torch.aoti_torch_cuda_addmm_out(matrices[0], matrices[3], matrices[1], matrices[2], 1.0, 1.0) != 0;
  return finish(matrices, count, failed);
}
