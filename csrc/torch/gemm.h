/* torch/gemm.h - torch's own matrix product: on raw memory (CPU), on parts of tensors (CUDA). */
#ifndef BSH_TORCH_GEMM_H
#define BSH_TORCH_GEMM_H

#include "core/kernels.h"
#include "core/status.h"

/* c[m, n] = a[m, k] b[k, n], with `add` c += a b, all of one dtype on the CPU; c is rounded once. Rows of c and a are
 * ldc and lda elements apart; element (i, j) of b is b[i * ldb_row + j * ldb_col]. `context` is unused. */
bsh_status bsh_torch_cpu_gemm(void *context, bsh_dtype dtype, bool add, void *c, int64_t ldc, const void *a,
                              int64_t lda, const void *b, int64_t ldb_row, int64_t ldb_col, int64_t m, int64_t n,
                              int64_t k);

/* A matrix inside a torch tensor: element (i, j) lies offset + i * row_stride + j * column_stride elements behind the
 * tensor's first. */
typedef struct {
  void *tensor;     /* AtenTensorHandle, borrowed; NULL for cuBLAS */
  const void *data; /* of the tensor */
  int64_t offset, rows, columns, row_stride, column_stride;
} bsh_torch_matrix;

/* c = alpha a b + beta c, all of one dtype on the CPU, by torch's own product: the bits are those of torch.addmm. Of
 * the matrices, `tensor` is not used. With beta 0, c is not read. */
bsh_status bsh_torch_cpu_gemm_add(bsh_dtype dtype, const bsh_torch_matrix *c, const bsh_torch_matrix *a,
                                  const bsh_torch_matrix *b, double alpha, double beta);

/* c = a b + bias on a CUDA device and torch's current stream of it, all of one dtype. bias: NULL or one row, which is
 * added to every row. */
bsh_status bsh_torch_cuda_gemm(const bsh_torch_matrix *c, const bsh_torch_matrix *a, const bsh_torch_matrix *b,
                               const bsh_torch_matrix *bias);

#endif
