/* torch_gemm.h - torch's own matrix product, called on raw memory. */
#ifndef BSH_TORCH_GEMM_H
#define BSH_TORCH_GEMM_H

#include "kernels.h"
#include "status.h"

/* c[m, n] = a[m, k] b[k, n], all of one dtype on the CPU. Rows of c and a are ldc and lda elements apart; element
 * (i, j) of b is b[i * ldb_row + j * ldb_col]. `context` is unused. */
bsh_status bsh_torch_cpu_gemm(void *context, bsh_dtype dtype, void *c, int64_t ldc, const void *a, int64_t lda,
                              const void *b, int64_t ldb_row, int64_t ldb_col, int64_t m, int64_t n, int64_t k);

/* c = a b + bias (bias [n], or NULL) on a CUDA device and torch's current stream of it. */
bsh_status bsh_torch_cuda_gemm(int32_t device, bsh_dtype dtype, void *c, int64_t ldc, const void *a, int64_t lda,
                               const void *b, int64_t ldb_row, int64_t ldb_col, const void *bias, int64_t m, int64_t n,
                               int64_t k);

#endif
