/* gpu/int8.c - the int8 ops on CUDA. */
#include "gpu/int8.h"

static bsh_status absent(const bsh_cuda_context *const context) {
  return bsh_fail(BSH_NO_KERNEL, "%s: not implemented for CUDA", context->op);
}

bsh_status bsh_cuda_quantize_int8(const bsh_quantize_int8_args *const args, const bsh_cuda_context *const context) {
  (void)args;
  return absent(context);
}

bsh_status bsh_cuda_dequantize_int8(const bsh_dequantize_int8_args *const args, const bsh_cuda_context *const context) {
  (void)args;
  return absent(context);
}

bsh_status bsh_cuda_product_int8(const bsh_product_int8_args *const args, const bsh_cuda_context *const context) {
  (void)args;
  return absent(context);
}

bsh_status bsh_cuda_scale_product_int8(const bsh_scale_product_int8_args *const args,
                                       const bsh_cuda_context *const context) {
  (void)args;
  return absent(context);
}

bsh_status bsh_cuda_linear_int8(const bsh_linear_int8_args *const args, const bool dgrad,
                                const bsh_cuda_context *const context) {
  (void)args, (void)dgrad;
  return absent(context);
}
