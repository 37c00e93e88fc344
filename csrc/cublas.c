/* cublas.c - see cublas.h. */
#include "cublas.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include "torch_abi.h"

/* Values of cuBLAS's public enums. */
enum { OP_N = 0, OP_T = 1, COMPUTE_32F = 68, GEMM_DEFAULT = -1 };
enum { CUDA_R_32F = 0, CUDA_R_16F = 2, CUDA_R_16BF = 14 };

typedef int (*gemm_ex)(void *handle, int op_a, int op_b, int m, int n, int k, const void *alpha, const void *a,
                       int a_type, int lda, const void *b, int b_type, int ldb, const void *beta, void *c, int c_type,
                       int ldc, int compute_type, int algorithm);
typedef AOTITorchError (*get_handle)(void **handle);

static struct {
  gemm_ex gemm;
  get_handle handle; /* creates torch's handle on first use and points it at the current stream */
} blas;
static pthread_once_t loaded = PTHREAD_ONCE_INIT;

static void load(void) {
  void *cublas = dlopen("libcublas.so.13", RTLD_NOLOAD | RTLD_LAZY);
  if (cublas == NULL) cublas = dlopen("libcublas.so.12", RTLD_NOLOAD | RTLD_LAZY);
  void *const torch = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
  if (cublas == NULL || torch == NULL) return;
  void *const gemm = dlsym(cublas, "cublasGemmEx");
  void *const handle = dlsym(torch, "torch_get_current_cuda_blas_handle");
  if (gemm == NULL || handle == NULL) return;
  memcpy(&blas.gemm, &gemm, sizeof gemm);
  memcpy(&blas.handle, &handle, sizeof handle);
}

static bool fits(const int64_t size) { return size > 0 && size <= INT32_MAX; }

static int type_of(const bsh_dtype dtype) {
  return dtype == BSH_F32 ? CUDA_R_32F : dtype == BSH_F16 ? CUDA_R_16F : CUDA_R_16BF;
}

/* cuBLAS is column-major: it computes the transposed product, c^T[n, m] = b^T[n, k] a^T[k, m]. */
bsh_status bsh_cublas_gemm(const bsh_dtype dtype, void *const c, const int64_t ldc, const void *const a,
                           const int64_t lda, const void *const b, const int64_t ldb_row, const int64_t ldb_col,
                           const int64_t m, const int64_t n, const int64_t k) {
  const float one = 1.0f, zero = 0.0f;
  const bool transposed = ldb_row == 1; /* b^T is then stored row by row, as a weight [n, k] is */
  const int64_t ldb = transposed ? ldb_col : ldb_row;
  void *handle = NULL;
  pthread_once(&loaded, load);
  if (ldb_row == ldb_col) return BSH_NO_KERNEL; /* a single row or column: no leading dimension to be had from it */
  if (blas.gemm == NULL || !(fits(m) && fits(n) && fits(k) && fits(lda) && fits(ldb) && fits(ldc)))
    return BSH_NO_KERNEL;
  if (blas.handle(&handle) != 0) return BSH_NO_KERNEL;
  const int type = type_of(dtype);
  const int failed = blas.gemm(handle, transposed ? OP_T : OP_N, OP_N, (int)n, (int)m, (int)k, &one, b, type, (int)ldb,
                               a, type, (int)lda, &zero, c, type, (int)ldc, COMPUTE_32F, GEMM_DEFAULT);
  return failed == 0 ? BSH_OK : bsh_fail(BSH_CUDA_ERROR, "cublasGemmEx failed with status %d", failed);
}
