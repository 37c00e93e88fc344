/* ops/lora.c - see ops/lora.h. Every sum is the accumulation of a product, every scale its factor. */
#include "ops/lora.h"

#include <stdlib.h>

#include "core/arithmetic.h"
#include "gpu/cublas.h"
#include "torch/gemm.h"

enum { CPU_ALIGNMENT = 64 }; /* bytes, torch's: products may round by it */

/* Who multiplies: with `context` NULL torch on the CPU. */
typedef struct {
  const bsh_cuda_context *context;
  void *workspace;
  bsh_dtype dtype;
} multiplier;

static bsh_torch_matrix matrix(const void *const data, const int64_t rows, const int64_t columns) {
  return (bsh_torch_matrix){.data = data, .rows = rows, .columns = columns, .row_stride = columns, .column_stride = 1};
}

static bsh_torch_matrix transposed(const void *const data, const int64_t rows, const int64_t columns) {
  return (bsh_torch_matrix){.data = data, .rows = columns, .columns = rows, .row_stride = 1, .column_stride = columns};
}

/* c = alpha a b + beta c */
static bsh_status add_product(const multiplier *const by, const bsh_torch_matrix c, const double alpha,
                              const bsh_torch_matrix a, const bsh_torch_matrix b, const double beta) {
  if (by->context == NULL) return bsh_torch_cpu_gemm_add(by->dtype, &c, &a, &b, alpha, beta);
  return bsh_cublas_gemm_add(by->context, by->dtype, &c, &a, &b, alpha, beta, by->workspace, BSH_LORA_WORKSPACE);
}

static bsh_status forward(const multiplier *const by, const bsh_lora_args *const l) {
  if (!l->has_xa)
    BSH_TRY(
        add_product(by, matrix(l->xa, l->M, l->r), 1.0, matrix(l->x, l->M, l->K), transposed(l->A, l->r, l->K), 0.0));
  if (l->y == NULL) return BSH_OK;
  return add_product(by, matrix(l->y, l->M, l->N), l->scale, matrix(l->xa, l->M, l->r), transposed(l->B, l->N, l->r),
                     1.0);
}

/* dxa [M, r] takes scale dy B. */
static bsh_status backward(const multiplier *const by, const bsh_lora_args *const l, void *const dxa) {
  const bsh_torch_matrix dy = matrix(l->dy, l->M, l->N), inner = matrix(dxa, l->M, l->r);
  void *const into = l->dx_apart != NULL ? l->dx_apart : l->dx;
  if (into != NULL || l->dA != NULL) BSH_TRY(add_product(by, inner, l->scale, dy, matrix(l->B, l->N, l->r), 0.0));
  if (l->dB != NULL)
    BSH_TRY(add_product(by, matrix(l->dB, l->N, l->r), l->scale, transposed(l->dy, l->M, l->N),
                        matrix(l->xa, l->M, l->r), 0.0));
  if (l->dA != NULL)
    BSH_TRY(
        add_product(by, matrix(l->dA, l->r, l->K), 1.0, transposed(dxa, l->M, l->r), matrix(l->x, l->M, l->K), 0.0));
  if (into == NULL) return BSH_OK;
  return add_product(by, matrix(into, l->M, l->K), 1.0, inner, matrix(l->A, l->r, l->K), into == l->dx ? 1.0 : 0.0);
}

bsh_status bsh_cpu_lora(const bsh_lora_args *const args) {
  const multiplier by = {.dtype = args->dtype};
  return forward(&by, args);
}

bsh_status bsh_cpu_lora_backward(const bsh_lora_args *const args) {
  const multiplier by = {.dtype = args->dtype};
  const int64_t n_bytes = args->M * args->r * dtype_size(args->dtype);
  void *const dxa = aligned_alloc(CPU_ALIGNMENT, (size_t)(divide_up(n_bytes, CPU_ALIGNMENT) * CPU_ALIGNMENT));
  if (dxa == NULL) return bsh_no_memory("lora", "dx A", BSH_DEVICE_CPU, (double)n_bytes);
  const bsh_status status = backward(&by, args, dxa);
  free(dxa);
  return status;
}

bsh_status bsh_cuda_lora(const bsh_lora_args *const args, const bsh_cuda_context *const context) {
  bsh_cuda_scratch scratch;
  if (args->dtype == BSH_F32) return bsh_fail(BSH_NO_KERNEL, "%s: cuBLAS is asked for fp16 and bf16", context->op);
  BSH_TRY(bsh_cuda_scratch_new(context, BSH_LORA_WORKSPACE, &scratch));
  const multiplier by = {.context = context, .workspace = scratch.data, .dtype = args->dtype};
  const bsh_status status = forward(&by, args);
  bsh_cuda_scratch_delete(&scratch);
  return status;
}

bsh_status bsh_cuda_lora_backward(const bsh_lora_args *const args, const bsh_cuda_context *const context) {
  bsh_cuda_scratch scratch;
  if (args->dtype == BSH_F32) return bsh_fail(BSH_NO_KERNEL, "%s: cuBLAS is asked for fp16 and bf16", context->op);
  BSH_TRY(bsh_cuda_scratch_new(context, BSH_LORA_WORKSPACE + 2 * args->M * args->r, &scratch));
  const multiplier by = {.context = context, .workspace = scratch.data, .dtype = args->dtype};
  const bsh_status status = backward(&by, args, (char *)scratch.data + BSH_LORA_WORKSPACE);
  bsh_cuda_scratch_delete(&scratch);
  return status;
}
