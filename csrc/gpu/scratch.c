/* gpu/scratch.c - scratch memory of one op call: torch's, or for calls without torch a pool of the driver. */
#include "gpu/driver.h"

#include <pthread.h>

#include "gpu/driver_table.h"
#include "torch/abi.h"

/* A pool of our own: the device's would give its memory back at every wait of the host. Keeps what a call may take. */
static CUresult find_pool(const int32_t device, CUmemoryPool *const pool) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  static CUmemoryPool pools[BSH_MAX_DEVICES];
  pthread_mutex_lock(&lock);
  CUresult result = CUDA_SUCCESS;
  CUmemoryPool *const kept = &pools[device];
  if (*kept == NULL) {
    const CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                       .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}};
    uint64_t bytes = (uint64_t)bsh_cuda_workspace_bytes();
    result = bsh_driver.pool_create(kept, &properties);
    if (result == CUDA_SUCCESS) bsh_driver.pool_attribute(*kept, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &bytes);
  }
  *pool = *kept;
  pthread_mutex_unlock(&lock);
  return result;
}

static bsh_status raw_scratch(const bsh_cuda_context *const context, const int64_t n_bytes,
                              bsh_cuda_scratch *const scratch) {
  CUmemoryPool pool;
  CUdeviceptr data = 0;
  *scratch = (bsh_cuda_scratch){.stream = context->stream};
  CUresult result = find_pool(context->device, &pool);
  if (result == CUDA_SUCCESS) result = bsh_driver.pool_allocate(&data, (size_t)n_bytes, pool, context->stream);
  if (result != CUDA_SUCCESS) return bsh_driver_failed(context, "allocating workspace", result);
  scratch->data = (void *)(uintptr_t)data;
  return BSH_OK;
}

static void raw_scratch_delete(const bsh_cuda_scratch *const scratch) {
  bsh_driver.pool_free((CUdeviceptr)(uintptr_t)scratch->data, scratch->stream);
}

bsh_status bsh_cuda_scratch_new(const bsh_cuda_context *const context, const int64_t n_bytes,
                                bsh_cuda_scratch *const scratch) {
  return bsh_cuda_scratch_of(context, n_bytes, bsh_torch.dtype_uint8, 1, scratch);
}

bsh_status bsh_cuda_scratch_of(const bsh_cuda_context *const context, const int64_t n, const int32_t torch_dtype,
                               const int64_t itemsize, bsh_cuda_scratch *const scratch) {
  if (context->raw) return raw_scratch(context, n * itemsize, scratch);
  const int64_t stride = 1;
  AtenTensorHandle tensor = NULL;
  *scratch = (bsh_cuda_scratch){0};
  if (bsh_torch.aoti_torch_empty_strided(1, &n, &stride, torch_dtype, bsh_torch.device_type_cuda, context->device,
                                         &tensor))
    return bsh_no_memory(context->op, "a workspace", context->device, (double)(n * itemsize));
  scratch->handle = tensor;
  if (bsh_torch.aoti_torch_get_data_ptr(tensor, &scratch->data) == 0) return BSH_OK;
  bsh_cuda_scratch_delete(scratch);
  return bsh_fail(BSH_TORCH_ERROR, "%s: a workspace without address", context->op);
}

void bsh_cuda_scratch_delete(bsh_cuda_scratch *const scratch) {
  if (scratch->handle != NULL) bsh_torch.aoti_torch_delete_tensor_object(scratch->handle);
  else if (scratch->data != NULL) raw_scratch_delete(scratch);
  *scratch = (bsh_cuda_scratch){0};
}
