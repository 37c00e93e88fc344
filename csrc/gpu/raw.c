/* gpu/raw.c - calls with addresses instead of tensors: where they point, and the device that they name. */
#include "gpu/driver.h"

#include <dlfcn.h>

#include "gpu/driver_table.h"
#include "torch/abi.h"

/* Where an address points: type 0 is memory that CUDA does not know. */
typedef struct {
  unsigned type; /* a CUmemorytype */
  int device;
  unsigned managed; /* reached from everywhere */
} place;

static CUresult find_place(const void *const pointer, place *const found) {
  CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                      CU_POINTER_ATTRIBUTE_IS_MANAGED};
  void *values[] = {&found->type, &found->device, &found->managed};
  *found = (place){0};
  return bsh_driver.pointer_attributes(3, attributes, values, (CUdeviceptr)(uintptr_t)pointer);
}

static bsh_status place_of(const bsh_cuda_context *const context, const char *const argument, const void *const pointer,
                           place *const found) {
  const CUresult result = find_place(pointer, found);
  if (result != CUDA_SUCCESS) return bsh_driver_failed(context, argument, result);
  if (found->type != 0) return BSH_OK;
  return bsh_fail(BSH_BAD_DEVICE, "%s: %s (%p) is no address that a GPU reaches", context->op, argument, pointer);
}

bsh_status bsh_cuda_check_pointer(const bsh_cuda_context *const context, const char *const argument,
                                  const void *const pointer) {
  place found;
  BSH_TRY(place_of(context, argument, pointer, &found));
  if (found.type != CU_MEMORYTYPE_DEVICE || found.managed || found.device == context->device) return BSH_OK;
  return bsh_fail(BSH_BAD_DEVICE, "%s: %s is on cuda:%d, the output on cuda:%d", context->op, argument, found.device,
                  (int)context->device);
}

bsh_status bsh_cuda_enter_raw(bsh_cuda_context *const context, const char *const op, const char *const argument,
                              const void *const out, void *const stream, const int64_t size0, const int64_t size1,
                              const int64_t size2) {
  char text[160];
  place found;
  CUcontext current;
  *context = (bsh_cuda_context){.op = op, .sizes = {size0, size1, size2}, .stream = stream, .raw = true};
  const char *const error = bsh_driver_load(text, sizeof text);
  if (error != NULL) return bsh_fail(BSH_CUDA_ERROR, "%s: %s", op, error);
  BSH_TRY(place_of(context, argument, out, &found));
  context->device = found.device;
  BSH_TRY(bsh_driver_use_device(context, &current));
  if (current == bsh_driver_devices[found.device].primary) return BSH_OK;
  const CUresult result = bsh_driver.set_current(bsh_driver_devices[found.device].primary);
  if (result != CUDA_SUCCESS) return bsh_driver_failed(context, "making the device current", result);
  context->previous = current;
  context->switched = true;
  return BSH_OK;
}

void *bsh_cuda_torch_stream(const bsh_cuda_context *const context) {
  void *stream = NULL;
  if (!bsh_torch.has_cuda || bsh_torch.aoti_torch_get_current_cuda_stream(context->device, &stream)) return NULL;
  return stream;
}

bsh_status bsh_cuda_read(const bsh_cuda_context *const context, const char *const argument, const void *const data,
                         void *const copy, const int64_t n_bytes) {
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  CUresult result = bsh_driver.is_capturing(context->stream, &capture);
  if (result == CUDA_SUCCESS && capture != CU_STREAM_CAPTURE_STATUS_NONE)
    return bsh_fail(BSH_NO_KERNEL, "%s: %s cannot be read while a CUDA graph is captured", context->op, argument);
  if (result == CUDA_SUCCESS)
    result = bsh_driver.copy_to_host(copy, (CUdeviceptr)(uintptr_t)data, (size_t)n_bytes, context->stream);
  if (result == CUDA_SUCCESS) result = bsh_driver.wait(context->stream);
  return result == CUDA_SUCCESS ? BSH_OK : bsh_driver_failed(context, argument, result);
}

bool bsh_cuda_owns(const void *const pointer) {
  char text[160];
  place found;
  if (!bsh_driver_is_loaded()) {
    void *const library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (library == NULL) return false;
    dlclose(library);
  }
  if (bsh_driver_load(text, sizeof text) != NULL || find_place(pointer, &found) != CUDA_SUCCESS) return false;
  return found.type == CU_MEMORYTYPE_DEVICE && !found.managed;
}
