/* gpu/driver_table.h - the driver's functions and devices, for the files here that call it: what gpu/driver.h offers is
 * driver.c (loading), context.c, raw.c (calls with addresses instead of tensors), scratch.c and launch.c; of a build
 * without CUDA, driver_absent.c. */
#ifndef BSH_GPU_DRIVER_TABLE_H
#define BSH_GPU_DRIVER_TABLE_H

#include <cuda.h>
#include <stdatomic.h>

#include "gpu/driver.h"

enum { BSH_MAX_DEVICES = 64 };

/* X(name in our table, exported symbol, (parameters)) */
#define BSH_DRIVER_FUNCTIONS(X)                                                                                        \
  X(init, "cuInit", (unsigned flags))                                                                                  \
  X(driver_version, "cuDriverGetVersion", (int *version))                                                              \
  X(device_get, "cuDeviceGet", (CUdevice * device, int ordinal))                                                       \
  X(device_attribute, "cuDeviceGetAttribute", (int *value, CUdevice_attribute attribute, CUdevice device))             \
  X(retain, "cuDevicePrimaryCtxRetain", (CUcontext * context, CUdevice device))                                        \
  X(get_current, "cuCtxGetCurrent", (CUcontext * context))                                                             \
  X(set_current, "cuCtxSetCurrent", (CUcontext context))                                                               \
  X(library_load, "cuLibraryLoadData",                                                                                 \
    (CUlibrary * library, const void *code, CUjit_option *jit_options, void **jit_values, unsigned n_jit,              \
     CUlibraryOption *options, void **values, unsigned n_options))                                                     \
  X(library_kernel, "cuLibraryGetKernel", (CUkernel * kernel, CUlibrary library, const char *name))                    \
  X(kernel_attribute, "cuKernelSetAttribute",                                                                          \
    (CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice device))                                     \
  X(launch, "cuLaunchKernelEx", (const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra))   \
  X(memset, "cuMemsetD8Async", (CUdeviceptr data, unsigned char value, size_t n_bytes, CUstream stream))               \
  X(pointer_attributes, "cuPointerGetAttributes",                                                                      \
    (unsigned n, CUpointer_attribute *attributes, void **values, CUdeviceptr pointer))                                 \
  X(pool_create, "cuMemPoolCreate", (CUmemoryPool * pool, const CUmemPoolProps *properties))                           \
  X(pool_attribute, "cuMemPoolSetAttribute", (CUmemoryPool pool, CUmemPool_attribute attribute, void *value))          \
  X(pool_allocate, "cuMemAllocFromPoolAsync",                                                                          \
    (CUdeviceptr * data, size_t n_bytes, CUmemoryPool pool, CUstream stream))                                          \
  X(pool_free, "cuMemFreeAsync", (CUdeviceptr data, CUstream stream))                                                  \
  X(is_capturing, "cuStreamIsCapturing", (CUstream stream, CUstreamCaptureStatus * status))                            \
  X(copy_to_host, "cuMemcpyDtoHAsync_v2", (void *copy, CUdeviceptr data, size_t n_bytes, CUstream stream))             \
  X(wait, "cuStreamSynchronize", (CUstream stream))                                                                    \
  X(error_name, "cuGetErrorName", (CUresult result, const char **text))                                                \
  X(error_text, "cuGetErrorString", (CUresult result, const char **text))

#define BSH_DECLARE_DRIVER(name, symbol, parameters) CUresult(*name) parameters;
typedef struct {
  BSH_DRIVER_FUNCTIONS(BSH_DECLARE_DRIVER)
  CUresult (*tensor_map)(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *data,
                         const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                         const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                         CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill); /* or NULL */
} bsh_driver_functions;
#undef BSH_DECLARE_DRIVER
extern bsh_driver_functions bsh_driver; /* filled by bsh_driver_load */

typedef struct {
  CUcontext primary;
  CUdevice device;
  int32_t sm, sms;
} bsh_driver_device;
extern bsh_driver_device bsh_driver_devices[BSH_MAX_DEVICES]; /* each filled by bsh_driver_prepare */

/* NULL, or why the driver cannot be used, perhaps in `text`; asked again after a failure. */
const char *bsh_driver_load(char *text, size_t size);

/* Whether it was loaded. */
bool bsh_driver_is_loaded(void);

/* Fills bsh_driver_devices[ordinal], once. */
CUresult bsh_driver_prepare(int32_t ordinal);

/* Fills the context from its device; *current: what is current in this thread. */
bsh_status bsh_driver_use_device(bsh_cuda_context *context, CUcontext *current);

/* "CUDA_ERROR_..." */
const char *bsh_driver_result_name(CUresult result);

/* "linear_4bit (M = 8, N = 4096, K = 4096) on cuda:0: <what>: <driver's words>" */
bsh_status bsh_driver_failed(const bsh_cuda_context *context, const char *what, CUresult result);

#endif
