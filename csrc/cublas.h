/* cublas.h - cuBLAS, called through the handle and library that torch has loaded. */
#ifndef BSH_CUBLAS_H
#define BSH_CUBLAS_H

#include "kernels.h"
#include "status.h"

/* c[m, n] = a[m, k] b[k, n] of one dtype with fp32 accumulation, on torch's current device and stream. Rows of c and a
 * are ldc and lda elements apart; element (i, j) of b is b[i * ldb_row + j * ldb_col], one of the two strides being 1.
 * Precision flags are those torch has set on its handle.
 * BSH_NO_KERNEL where torch or cuBLAS does not offer it or a size is beyond int32: the caller then asks torch. */
bsh_status bsh_cublas_gemm(bsh_dtype dtype, void *c, int64_t ldc, const void *a, int64_t lda, const void *b,
                           int64_t ldb_row, int64_t ldb_col, int64_t m, int64_t n, int64_t k);

#endif
