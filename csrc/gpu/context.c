/* gpu/context.c - one op call on one device: entering and leaving it. */
#include "gpu/driver.h"

#include "gpu/driver_table.h"
#include "torch/abi.h"

/* Another device, or none, is current in this thread. torch's guard restores the former on leaving. */
static bsh_status make_current(bsh_cuda_context *const context, const CUcontext primary) {
  CUcontext current = NULL;
  if (bsh_torch.aoti_torch_create_cuda_guard(context->device, &context->guard)) {
    context->guard = NULL;
    return bsh_fail(BSH_TORCH_ERROR, "%s: torch cannot switch to cuda:%d", context->op, (int)context->device);
  }
  CUresult result = bsh_driver.get_current(&current);
  if (result == CUDA_SUCCESS && current != primary) result = bsh_driver.set_current(primary);
  if (result == CUDA_SUCCESS) return BSH_OK;
  bsh_cuda_leave(context);
  return bsh_driver_failed(context, "making the device current", result);
}

/* Fills the context from its device. */
static bsh_status know_device(bsh_cuda_context *const context) {
  const int32_t device = context->device;
  if (device < 0 || device >= BSH_MAX_DEVICES)
    return bsh_fail(BSH_BAD_DEVICE, "%s: cuda:%d is beyond the %d devices supported", context->op, (int)device,
                    BSH_MAX_DEVICES);
  const CUresult result = bsh_driver_prepare(device);
  if (result != CUDA_SUCCESS) return bsh_driver_failed(context, "preparing the device", result);
  context->sm = bsh_driver_devices[device].sm;
  context->sms = bsh_driver_devices[device].sms;
  return BSH_OK;
}

bsh_status bsh_driver_use_device(bsh_cuda_context *const context, CUcontext *const current) {
  *current = NULL;
  BSH_TRY(know_device(context));
  const CUresult result = bsh_driver.get_current(current);
  return result == CUDA_SUCCESS ? BSH_OK : bsh_driver_failed(context, "preparing the device", result);
}

static bsh_status need_driver(const char *const op, const int32_t device) {
  char text[160];
  if (!bsh_torch.has_cuda)
    return bsh_fail(BSH_CUDA_ERROR, "%s: tensor on cuda:%d, but libtorch_cuda lacks functions bitshard needs", op,
                    (int)device);
  const char *const error = bsh_driver_load(text, sizeof text);
  return error == NULL ? BSH_OK : bsh_fail(BSH_CUDA_ERROR, "%s: %s", op, error);
}

bsh_status bsh_cuda_gpu(const char *const op, const int32_t device, int32_t *const sm, int32_t *const sms) {
  bsh_cuda_context context = {.op = op, .device = device};
  BSH_TRY(need_driver(op, device));
  BSH_TRY(know_device(&context));
  *sm = context.sm, *sms = context.sms;
  return BSH_OK;
}

bsh_status bsh_cuda_enter(bsh_cuda_context *const context, const char *const op, const int32_t device,
                          const int64_t size0, const int64_t size1, const int64_t size2) {
  *context = (bsh_cuda_context){.op = op, .device = device, .sizes = {size0, size1, size2}};
  BSH_TRY(need_driver(op, device));
  CUcontext current;
  BSH_TRY(bsh_driver_use_device(context, &current));
  if (current != bsh_driver_devices[device].primary) BSH_TRY(make_current(context, bsh_driver_devices[device].primary));
  if (bsh_torch.aoti_torch_get_current_cuda_stream(device, &context->stream) == 0) return BSH_OK;
  bsh_cuda_leave(context);
  return bsh_fail(BSH_TORCH_ERROR, "%s: torch has no current stream on cuda:%d", op, (int)device);
}

void bsh_cuda_leave(bsh_cuda_context *const context) {
  if (context->guard != NULL) bsh_torch.aoti_torch_delete_cuda_guard(context->guard);
  if (context->switched) bsh_driver.set_current(context->previous);
  context->guard = NULL;
  context->switched = false;
}
