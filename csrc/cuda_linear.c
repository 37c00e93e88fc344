/* cuda_linear.c - linear_4bit by kernels that decode and multiply at once. */
#include "cuda_ops.h"

bsh_status bsh_cuda_linear_4bit_fused(const bsh_linear_4bit_args *const args, const bsh_linear_kernel kernel,
                                      const bsh_cuda_context *const context) {
  return bsh_fail(BSH_NO_KERNEL, "%s: no kernel %s for M = %lld", context->op, bsh_linear_kernel_name(kernel),
                  (long long)args->M);
}
