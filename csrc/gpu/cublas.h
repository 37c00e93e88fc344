/* gpu/cublas.h - matrix products by cuBLASLt on raw memory, with the algorithm of each shape kept.
 *
 * Choosing an algorithm takes cuBLAS longer than launching it. The library is the one that torch has loaded. */
#ifndef BSH_GPU_CUBLAS_H
#define BSH_GPU_CUBLAS_H

#include "core/kernels.h"
#include "gpu/driver.h"
#include "torch/gemm.h"

/* Whether torch has what these products need. */
bool bsh_cublas_usable(void);

/* c = a b + bias of fp16 or bf16, sums in fp32, on context's device and stream. Rows of c and a are contiguous, rows or
 * columns of b. bias: NULL or one row. workspace: on the device, 256-byte aligned. BSH_NO_KERNEL where cuBLAS cannot.
 */
bsh_status bsh_cublas_gemm(const bsh_cuda_context *context, bsh_dtype dtype, const bsh_torch_matrix *c,
                           const bsh_torch_matrix *a, const bsh_torch_matrix *b, const bsh_torch_matrix *bias,
                           void *workspace, int64_t workspace_bytes);

/* c = alpha a b + beta c in the same way; rows or columns of a are contiguous too. */
bsh_status bsh_cublas_gemm_add(const bsh_cuda_context *context, bsh_dtype dtype, const bsh_torch_matrix *c,
                               const bsh_torch_matrix *a, const bsh_torch_matrix *b, double alpha, double beta,
                               void *workspace, int64_t workspace_bytes);

#endif
