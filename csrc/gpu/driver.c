/* gpu/driver.c - finds the CUDA driver and its devices, on first use. */
#include "gpu/driver.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "gpu/driver_table.h"
#include "torch/abi.h"

bsh_driver_functions bsh_driver;
bsh_driver_device bsh_driver_devices[BSH_MAX_DEVICES];

/* What is written under `lock` is read without it once `ready` says so. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool driver_ready;
static _Atomic(uint64_t) devices_ready; /* one bit per device */
static int driver_version;              /* 1000 * major + 10 * minor, 0 before first use */

static const char *result_text(const CUresult result) {
  const char *text = NULL;
  if (bsh_driver.error_text != NULL) bsh_driver.error_text(result, &text);
  return text != NULL ? text : "unknown error";
}

const char *bsh_driver_result_name(const CUresult result) {
  const char *name = NULL;
  if (bsh_driver.error_name != NULL) bsh_driver.error_name(result, &name);
  return name != NULL ? name : "unknown error";
}

bsh_status bsh_driver_failed(const bsh_cuda_context *const context, const char *const what, const CUresult result) {
  char sizes[80] = "";
  const int64_t *const s = context->sizes;
  if (s[2] != 0)
    snprintf(sizes, sizeof sizes, " (M = %" PRId64 ", N = %" PRId64 ", K = %" PRId64 ")", s[0], s[1], s[2]);
  else if (s[1] != 0) snprintf(sizes, sizeof sizes, " (%" PRId64 " x %" PRId64 ")", s[0], s[1]);
  else snprintf(sizes, sizeof sizes, " (%" PRId64 " elements)", s[0]);
  const bool memory = result == CUDA_ERROR_OUT_OF_MEMORY;
  return bsh_fail(memory ? BSH_OUT_OF_MEMORY : BSH_CUDA_ERROR, "%s%s%s on cuda:%d: %s: %s (%s)",
                  memory ? "CUDA out of memory. " : "", context->op, sizes, (int)context->device, what,
                  result_text(result), bsh_driver_result_name(result));
}

static const char *load_locked(char *const text, const size_t size) {
  void *const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) return "no NVIDIA driver: libcuda.so.1 was not found";
#define LOOK_UP(name, symbol, parameters)                                                                              \
  do {                                                                                                                 \
    void *const address = dlsym(library, symbol);                                                                      \
    if (address == NULL) {                                                                                             \
      snprintf(text, size, "the NVIDIA driver is too old: it lacks %s (CUDA 12.0 or newer is needed)", symbol);        \
      return text;                                                                                                     \
    }                                                                                                                  \
    memcpy(&bsh_driver.name, &address, sizeof address);                                                                \
  } while (0);
  BSH_DRIVER_FUNCTIONS(LOOK_UP)
#undef LOOK_UP
  void *const tensor_map = dlsym(library, "cuTensorMapEncodeTiled");
  memcpy(&bsh_driver.tensor_map, &tensor_map, sizeof tensor_map);
  const CUresult result = bsh_driver.init(0);
  if (result != CUDA_SUCCESS) {
    snprintf(text, size, "cuInit: %s (%s)", result_text(result), bsh_driver_result_name(result));
    return text;
  }
  bsh_driver.driver_version(&driver_version);
  atomic_store_explicit(&driver_ready, true, memory_order_release);
  return NULL;
}

bool bsh_driver_is_loaded(void) { return atomic_load_explicit(&driver_ready, memory_order_acquire); }

const char *bsh_driver_load(char *const text, const size_t size) {
  if (bsh_driver_is_loaded()) return NULL;
  pthread_mutex_lock(&lock);
  const char *const error = atomic_load(&driver_ready) ? NULL : load_locked(text, size);
  pthread_mutex_unlock(&lock);
  return error;
}

static CUresult read_device(const int32_t ordinal, bsh_driver_device *const info) {
  int major = 0, minor = 0, sms = 0;
  CUresult result = bsh_driver.device_get(&info->device, ordinal);
  if (result == CUDA_SUCCESS)
    result = bsh_driver.device_attribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, info->device);
  if (result == CUDA_SUCCESS)
    result = bsh_driver.device_attribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, info->device);
  if (result == CUDA_SUCCESS)
    result = bsh_driver.device_attribute(&sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, info->device);
  if (result == CUDA_SUCCESS) result = bsh_driver.retain(&info->primary, info->device);
  info->sm = 10 * major + minor;
  info->sms = sms;
  return result;
}

CUresult bsh_driver_prepare(const int32_t ordinal) {
  const uint64_t bit = UINT64_C(1) << ordinal;
  if (atomic_load_explicit(&devices_ready, memory_order_acquire) & bit) return CUDA_SUCCESS;
  pthread_mutex_lock(&lock);
  CUresult result = CUDA_SUCCESS;
  if (!(atomic_load(&devices_ready) & bit)) {
    result = read_device(ordinal, &bsh_driver_devices[ordinal]);
    if (result == CUDA_SUCCESS) atomic_fetch_or_explicit(&devices_ready, bit, memory_order_release);
  }
  pthread_mutex_unlock(&lock);
  return result;
}

void bsh_cuda_describe(bsh_cuda_state *const state) {
  *state = (bsh_cuda_state){.built = true, .architectures = BSH_CUDA_ARCHS};
  if (!bsh_torch.has_cuda) {
    snprintf(state->error, sizeof state->error, "this torch is built without CUDA");
    return;
  }
  char text[160];
  const char *const error = bsh_driver_load(text, sizeof text);
  if (error != NULL) snprintf(state->error, sizeof state->error, "%s", error);
  else snprintf(state->driver, sizeof state->driver, "%d.%d", driver_version / 1000, driver_version % 1000 / 10);
}
