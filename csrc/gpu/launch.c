/* gpu/launch.c - kernels of the embedded fatbins, loaded on first use; launches, and what goes with them. */
#include "gpu/driver.h"

#include <pthread.h>
#include <string.h>

#include "gpu/driver_table.h"

#define DECLARE_FATBIN(stem) extern const unsigned char bsh_fatbin_##stem[] __attribute__((visibility("hidden")));
BSH_FATBINS(DECLARE_FATBIN)
#define FATBIN_ADDRESS(stem) bsh_fatbin_##stem,
static const unsigned char *const fatbins[BSH_FATBIN_COUNT] = {BSH_FATBINS(FATBIN_ADDRESS)};

enum { STATIC_SHARED_LIMIT = 48 << 10 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of `libraries` and of a kernel's first look-up */
static CUlibrary libraries[BSH_FATBIN_COUNT];

static bsh_status load_failed(const bsh_cuda_context *const context, const char *const name, const CUresult result) {
  if (result != CUDA_ERROR_NO_BINARY_FOR_GPU && result != CUDA_ERROR_UNSUPPORTED_PTX_VERSION)
    return bsh_driver_failed(context, name, result);
  return bsh_fail(BSH_NO_KERNEL,
                  "%s: cuda:%d is an sm_%d GPU, but this build of bitshard was compiled for %s (%s): reinstall with "
                  "BITSHARD_CUDA_ARCHS=%d or BITSHARD_CUDA_ARCHS=all, or update the NVIDIA driver",
                  context->op, (int)context->device, (int)context->sm, BSH_CUDA_ARCHS, bsh_driver_result_name(result),
                  (int)context->sm);
}

/* The CUkernel of `kernel`: looked up once per process, its library loaded before. */
static CUresult find_kernel(bsh_cuda_kernel *const kernel) {
  CUresult result = CUDA_SUCCESS;
  CUkernel handle = NULL;
  pthread_mutex_lock(&lock);
  CUlibrary *const library = &libraries[kernel->fatbin];
  if (*library == NULL)
    result = bsh_driver.library_load(library, fatbins[kernel->fatbin], NULL, NULL, 0, NULL, NULL, 0);
  if (result == CUDA_SUCCESS) result = bsh_driver.library_kernel(&handle, *library, kernel->name);
  if (result == CUDA_SUCCESS) atomic_store_explicit(&kernel->handle, handle, memory_order_release);
  pthread_mutex_unlock(&lock);
  return result;
}

/* Allows blocks of more than 48 KiB of dynamic shared memory, once per device. */
static CUresult raise_shared_limit(bsh_cuda_kernel *const kernel, const int32_t shared_bytes, const int32_t device) {
  const uint64_t bit = UINT64_C(1) << device;
  if (shared_bytes <= STATIC_SHARED_LIMIT || (atomic_load(&kernel->raised) & bit)) return CUDA_SUCCESS;
  const CUresult result = bsh_driver.kernel_attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes,
                                                      atomic_load(&kernel->handle), bsh_driver_devices[device].device);
  if (result == CUDA_SUCCESS) atomic_fetch_or(&kernel->raised, bit);
  return result;
}

bsh_status bsh_cuda_launch(const bsh_cuda_context *const context, bsh_cuda_kernel *const kernel,
                           const bsh_cuda_launch_shape *const shape, void **const arguments) {
  CUresult result = CUDA_SUCCESS;
  if (atomic_load_explicit(&kernel->handle, memory_order_acquire) == NULL) result = find_kernel(kernel);
  if (result == CUDA_SUCCESS) result = raise_shared_limit(kernel, shape->shared_bytes, context->device);
  if (result != CUDA_SUCCESS) return load_failed(context, kernel->name, result);
  CUlaunchAttribute attributes[2];
  CUlaunchConfig config = {.gridDimX = shape->grid[0],
                           .gridDimY = shape->grid[1],
                           .gridDimZ = shape->grid[2],
                           .blockDimX = shape->block[0],
                           .blockDimY = shape->block[1],
                           .blockDimZ = shape->block[2],
                           .sharedMemBytes = (unsigned)shape->shared_bytes,
                           .hStream = context->stream,
                           .attrs = attributes};
  if (shape->cluster > 1) {
    attributes[config.numAttrs++] = (CUlaunchAttribute){.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
                                                        .value.clusterDim = {.x = shape->cluster, .y = 1, .z = 1}};
  }
  if (shape->overlap && context->sm >= 90) {
    attributes[config.numAttrs++] = (CUlaunchAttribute){.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                                                        .value.programmaticStreamSerializationAllowed = 1};
  }
  result = bsh_driver.launch(&config, (CUfunction)atomic_load_explicit(&kernel->handle, memory_order_relaxed),
                             arguments, NULL);
  return result == CUDA_SUCCESS ? BSH_OK : load_failed(context, kernel->name, result);
}

/* Of a driver that is not loaded nothing is known. */
bool bsh_cuda_has_tensor_maps(void) { return bsh_driver_is_loaded() && bsh_driver.tensor_map != NULL; }

bsh_status bsh_cuda_tensor_map(const bsh_cuda_context *const context, const bsh_map_of *const what,
                               bsh_tensor_map *const map) {
  static const CUtensorMapDataType types[] = {
      [BSH_MAP_U8] = CU_TENSOR_MAP_DATA_TYPE_UINT8,
      [BSH_MAP_F16] = CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      [BSH_MAP_BF16] = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
  };
  const int32_t box_bytes = what->box_columns * (what->type == BSH_MAP_U8 ? 1 : 2);
  const cuuint64_t sizes[] = {(cuuint64_t)what->columns, (cuuint64_t)what->rows};
  const cuuint64_t strides[] = {(cuuint64_t)what->row_bytes};
  const cuuint32_t box[] = {(cuuint32_t)what->box_columns, (cuuint32_t)what->box_rows}, steps[] = {1, 1};
  CUtensorMap made;
  const CUresult result = bsh_driver.tensor_map(
      &made, types[what->type], 2, (void *)(uintptr_t)what->data, sizes, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, box_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) return bsh_driver_failed(context, "describing a matrix to the GPU", result);
  _Static_assert(sizeof made == sizeof *map, "a tensor map has 128 bytes");
  memcpy(map, &made, sizeof made);
  return BSH_OK;
}

bsh_status bsh_cuda_zero(const bsh_cuda_context *const context, void *const data, const int64_t n_bytes) {
  const CUresult result =
      bsh_driver.memset((CUdeviceptr)(uintptr_t)data, 0, (size_t)n_bytes, (CUstream)context->stream);
  return result == CUDA_SUCCESS ? BSH_OK : bsh_driver_failed(context, "clearing the output", result);
}
