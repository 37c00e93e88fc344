/* torch_gemm.c - see torch_gemm.h. */
#include "torch_gemm.h"

#include "arithmetic.h"
#include "tensor.h"

typedef AOTITorchError (*mm_out)(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2);

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

static bsh_status multiply(const mm_out mm, const AtenTensorHandle c, const AtenTensorHandle a,
                           const AtenTensorHandle b) {
  const bool failed = c == NULL || a == NULL || b == NULL || mm(c, a, b) != 0;
  if (c != NULL) bsh_torch.aoti_torch_delete_tensor_object(c);
  if (a != NULL) bsh_torch.aoti_torch_delete_tensor_object(a);
  if (b != NULL) bsh_torch.aoti_torch_delete_tensor_object(b);
  return failed ? bsh_fail(BSH_TORCH_ERROR, "torch's matrix product failed (its own text is on stderr)") : BSH_OK;
}

bsh_status bsh_torch_cpu_gemm(void *const context, const bsh_dtype dtype, void *const c, const int64_t ldc,
                              const void *const a, const int64_t lda, const void *const b, const int64_t ldb_row,
                              const int64_t ldb_col, const int64_t m, const int64_t n, const int64_t k) {
  (void)context;
  const int32_t cpu = bsh_torch.device_type_cpu;
  return multiply(bsh_torch.aoti_torch_cpu_mm_out, wrap(c, m, n, ldc, 1, dtype, cpu, 0),
                  wrap(a, m, k, lda, 1, dtype, cpu, 0), wrap(b, k, n, ldb_row, ldb_col, dtype, cpu, 0));
}

static AtenTensorHandle wrap_matrix(const bsh_torch_matrix *const matrix, const bsh_dtype dtype) {
  const char *const first = (const char *)matrix->data + matrix->offset * dtype_size(dtype);
  return wrap(first, matrix->rows, matrix->columns, matrix->row_stride, matrix->column_stride, dtype,
              bsh_torch.device_type_cpu, 0);
}

bsh_status bsh_torch_cpu_gemm_add(const bsh_dtype dtype, const bsh_torch_matrix *const c,
                                  const bsh_torch_matrix *const a, const bsh_torch_matrix *const b, const double alpha,
                                  const double beta) {
  const AtenTensorHandle handles[] = {wrap_matrix(c, dtype), wrap_matrix(a, dtype), wrap_matrix(b, dtype)};
  bool failed = handles[0] == NULL || handles[1] == NULL || handles[2] == NULL;
  if (!failed && alpha == 1.0 && beta == 0.0)
    failed = bsh_torch.aoti_torch_cpu_mm_out(handles[0], handles[1], handles[2]) != 0;
  else if (!failed)
    failed = bsh_torch.aoti_torch_cpu_addmm_out(handles[0], handles[0], handles[1], handles[2], beta, alpha) != 0;
  for (int i = 0; i < 3; i++)
    if (handles[i] != NULL) bsh_torch.aoti_torch_delete_tensor_object(handles[i]);
  return failed ? bsh_fail(BSH_TORCH_ERROR, "torch's matrix product failed (its own text is on stderr)") : BSH_OK;
}

/* Views for one product; unlike tensors over foreign memory they cost no question to the driver. */
static AtenTensorHandle view(const bsh_torch_matrix *const matrix) {
  const int64_t sizes[2] = {matrix->rows, matrix->columns}, strides[2] = {matrix->row_stride, matrix->column_stride};
  AtenTensorHandle tensor = NULL;
  bsh_torch.aoti_torch__reinterpret_tensor(matrix->tensor, 2, sizes, strides, matrix->offset, &tensor);
  return tensor;
}

/* addmm reads the bias as a 1-D tensor and adds it in the product's epilogue where cuBLASLt can. */
static bsh_status multiply_add(const AtenTensorHandle c, const AtenTensorHandle bias, const AtenTensorHandle a,
                               const AtenTensorHandle b) {
  const AtenTensorHandle handles[] = {c, bias, a, b};
  bool failed = false;
  for (int i = 0; i < 4; i++) failed = failed || handles[i] == NULL;
  failed = failed || bsh_torch.aoti_torch_cuda_addmm_out(c, bias, a, b, 1.0, 1.0) != 0;
  for (int i = 0; i < 4; i++)
    if (handles[i] != NULL) bsh_torch.aoti_torch_delete_tensor_object(handles[i]);
  return failed ? bsh_fail(BSH_TORCH_ERROR, "torch's matrix product with bias failed (its own text is on stderr)")
                : BSH_OK;
}

bsh_status bsh_torch_cuda_gemm(const bsh_torch_matrix *const c, const bsh_torch_matrix *const a,
                               const bsh_torch_matrix *const b, const bsh_torch_matrix *const bias) {
  if (bias == NULL) return multiply(bsh_torch.aoti_torch_cuda_mm_out, view(c), view(a), view(b));
  const int64_t stride = 1;
  AtenTensorHandle slice = NULL;
  bsh_torch.aoti_torch__reinterpret_tensor(bias->tensor, 1, &bias->columns, &stride, bias->offset, &slice);
  return multiply_add(view(c), slice, view(a), view(b));
}
