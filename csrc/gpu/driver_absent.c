/* gpu/driver_absent.c - gpu/driver.h in a build without CUDA: every call fails with a text that says so. */
#include "gpu/driver.h"

#include <stdio.h>

static const char no_kernels[] = "this build of bitshard has no CUDA kernels: nvcc was not found when it was "
                                 "installed; install the CUDA toolkit and "
                                 "reinstall bitshard";

static bsh_status no_cuda(const char *const op, const int32_t device) {
  return bsh_fail(BSH_NO_KERNEL, "%s: tensor on cuda:%d, but %s", op, (int)device, no_kernels);
}

bsh_status bsh_cuda_gpu(const char *const op, const int32_t device, int32_t *const sm, int32_t *const sms) {
  *sm = *sms = 0;
  return no_cuda(op, device);
}

bsh_status bsh_cuda_enter(bsh_cuda_context *const context, const char *const op, const int32_t device,
                          const int64_t size0, const int64_t size1, const int64_t size2) {
  *context = (bsh_cuda_context){.op = op, .device = device, .sizes = {size0, size1, size2}};
  return no_cuda(op, device);
}

void bsh_cuda_leave(bsh_cuda_context *const context) { (void)context; }

bool bsh_cuda_owns(const void *const pointer) {
  (void)pointer;
  return false;
}

bsh_status bsh_cuda_scratch_new(const bsh_cuda_context *const context, const int64_t n_bytes,
                                bsh_cuda_scratch *const scratch) {
  (void)n_bytes, (void)scratch;
  return bsh_fail(BSH_NO_KERNEL, "%s: %s", context->op, no_kernels);
}

bsh_status bsh_cuda_scratch_of(const bsh_cuda_context *const context, const int64_t n, const int32_t torch_dtype,
                               const int64_t itemsize, bsh_cuda_scratch *const scratch) {
  (void)torch_dtype, (void)itemsize;
  return bsh_cuda_scratch_new(context, n, scratch);
}

void bsh_cuda_scratch_delete(bsh_cuda_scratch *const scratch) { (void)scratch; }

bsh_status bsh_cuda_launch(const bsh_cuda_context *const context, bsh_cuda_kernel *const kernel,
                           const bsh_cuda_launch_shape *const shape, void **const arguments) {
  (void)shape, (void)arguments;
  return bsh_fail(BSH_NO_KERNEL, "%s: no kernel %s: %s", context->op, kernel->name, no_kernels);
}

bool bsh_cuda_has_tensor_maps(void) { return false; }

bsh_status bsh_cuda_tensor_map(const bsh_cuda_context *const context, const bsh_map_of *const what,
                               bsh_tensor_map *const map) {
  (void)what, (void)map;
  return bsh_fail(BSH_NO_KERNEL, "%s: %s", context->op, no_kernels);
}

bsh_status bsh_cuda_zero(const bsh_cuda_context *const context, void *const data, const int64_t n_bytes) {
  (void)data, (void)n_bytes;
  return bsh_fail(BSH_NO_KERNEL, "%s: %s", context->op, no_kernels);
}

void bsh_cuda_describe(bsh_cuda_state *const state) {
  *state = (bsh_cuda_state){.built = false, .architectures = ""};
  snprintf(state->error, sizeof state->error, "%s", no_kernels);
}
