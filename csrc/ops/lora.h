/* ops/lora.h - the products with A and B of a LoRA layer on a 4-bit weight: what is added to y = W x + bias and dx = dy
 * W.
 */
#ifndef BSH_OPS_LORA_H
#define BSH_OPS_LORA_H

#include "core/kernels.h"
#include "core/status.h"
#include "gpu/driver.h"

enum { BSH_LORA_WORKSPACE = 4 << 20 }; /* bytes for cuBLAS: with few columns, a product is cut along its terms */

/* All matrices are contiguous, by rows, of `dtype`, and have elements. r: the rank. */
typedef struct {
  const void *x;  /* [M, K], what A multiplies; NULL without dA */
  const void *dy; /* [M, N], of the gradients */
  const void *A;  /* [r, K] */
  const void *B;  /* [N, r] */
  void *xa;       /* [M, r]: x A^T, made by the forward unless has_xa; NULL without dB */
  void *y;        /* [M, N]: the forward adds scale xa B^T; NULL: it makes xa only */
  void *dx;       /* [M, K]: scale (dy B) A is added; NULL where not needed, as dA and dB */
  void *dx_apart; /* [M, K]: takes scale (dy B) A instead of dx, which is not touched; NULL: dx does */
  void *dA;       /* [r, K]: scale (dy B)^T x */
  void *dB;       /* [N, r]: scale dy^T xa */
  int64_t M, N, K, r;
  double scale;
  bsh_dtype dtype;
  bool has_xa;
} bsh_lora_args;

/* On the CPU: by torch's product. */
bsh_status bsh_cpu_lora(const bsh_lora_args *args);
bsh_status bsh_cpu_lora_backward(const bsh_lora_args *args);

/* On context's device and stream: by cuBLAS, fp16 and bf16 only. */
bsh_status bsh_cuda_lora(const bsh_lora_args *args, const bsh_cuda_context *context);
bsh_status bsh_cuda_lora_backward(const bsh_lora_args *args, const bsh_cuda_context *context);

#endif
