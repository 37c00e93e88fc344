/* cuda_driver.c - see cuda_driver.h. */
#include "cuda_driver.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "torch_abi.h"

enum { DEFAULT_WORKSPACE_MB = 64 };

int64_t bsh_cuda_workspace_bytes(void) {
  static _Atomic(int64_t) cached;
  int64_t bytes = atomic_load_explicit(&cached, memory_order_relaxed);
  if (bytes != 0) return bytes;
  const char *const text = getenv("BITSHARD_WORKSPACE_MB");
  const long megabytes = text != NULL ? strtol(text, NULL, 10) : 0;
  bytes = (int64_t)(megabytes > 0 ? megabytes : DEFAULT_WORKSPACE_MB) << 20;
  atomic_store_explicit(&cached, bytes, memory_order_relaxed);
  return bytes;
}

bsh_status bsh_cuda_scratch_new(const bsh_cuda_context *const context, const int64_t n_bytes,
                                bsh_cuda_scratch *const scratch) {
  return bsh_cuda_scratch_of(context, n_bytes, bsh_torch.dtype_uint8, 1, scratch);
}

static bsh_status raw_scratch(const bsh_cuda_context *context, int64_t n_bytes, bsh_cuda_scratch *scratch);
static void raw_scratch_delete(const bsh_cuda_scratch *scratch);

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

#ifdef BSH_NO_CUDA

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

static bsh_status raw_scratch(const bsh_cuda_context *const context, const int64_t n_bytes,
                              bsh_cuda_scratch *const scratch) {
  (void)n_bytes, (void)scratch;
  return bsh_fail(BSH_NO_KERNEL, "%s: %s", context->op, no_kernels);
}

static void raw_scratch_delete(const bsh_cuda_scratch *const scratch) { (void)scratch; }

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

#else

#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

enum { MAX_DEVICES = 64, STATIC_SHARED_LIMIT = 48 << 10 };

/* X(name in our table, exported symbol, (parameters)) */
#define DRIVER_FUNCTIONS(X)                                                                                            \
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

typedef struct {
  CUcontext primary;
  CUdevice device;
  int32_t sm;
  int32_t sms;
  CUmemoryPool pool; /* scratch memory of raw calls, NULL before the first */
} device_info;

#define DECLARE(name, symbol, parameters) CUresult(*name) parameters;
static struct {
  DRIVER_FUNCTIONS(DECLARE)
  CUresult (*tensor_map)(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *data,
                         const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                         const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                         CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill); /* or NULL */
} driver;
#undef DECLARE

#define DECLARE_FATBIN(stem) extern const unsigned char bsh_fatbin_##stem[] __attribute__((visibility("hidden")));
BSH_FATBINS(DECLARE_FATBIN)
#define FATBIN_ADDRESS(stem) bsh_fatbin_##stem,
static const unsigned char *const fatbins[BSH_FATBIN_COUNT] = {BSH_FATBINS(FATBIN_ADDRESS)};

/* Written under `lock`; read without it once `ready` says so. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool driver_ready;
static _Atomic(uint64_t) devices_ready; /* one bit per device */
static device_info devices[MAX_DEVICES];
static CUlibrary libraries[BSH_FATBIN_COUNT];
static int driver_version; /* 1000 * major + 10 * minor, 0 before first use */

static const char *result_text(const CUresult result) {
  const char *text = NULL;
  if (driver.error_text != NULL) driver.error_text(result, &text);
  return text != NULL ? text : "unknown error";
}

static const char *result_name(const CUresult result) {
  const char *name = NULL;
  if (driver.error_name != NULL) driver.error_name(result, &name);
  return name != NULL ? name : "unknown error";
}

/* "linear_4bit (8 x 4096 x 4096) on cuda:0: <what>: <driver's words>" */
static bsh_status driver_failed(const bsh_cuda_context *const context, const char *const what, const CUresult result) {
  char sizes[80] = "";
  const int64_t *const s = context->sizes;
  if (s[2] != 0)
    snprintf(sizes, sizeof sizes, " (M = %" PRId64 ", N = %" PRId64 ", K = %" PRId64 ")", s[0], s[1], s[2]);
  else if (s[1] != 0) snprintf(sizes, sizeof sizes, " (%" PRId64 " x %" PRId64 ")", s[0], s[1]);
  else snprintf(sizes, sizeof sizes, " (%" PRId64 " elements)", s[0]);
  const bool memory = result == CUDA_ERROR_OUT_OF_MEMORY;
  return bsh_fail(memory ? BSH_OUT_OF_MEMORY : BSH_CUDA_ERROR, "%s%s%s on cuda:%d: %s: %s (%s)",
                  memory ? "CUDA out of memory. " : "", context->op, sizes, (int)context->device, what,
                  result_text(result), result_name(result));
}

/* ---- first use ---- */

static const char *load_driver_locked(char *const text, const size_t size) {
  void *const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) return "no NVIDIA driver: libcuda.so.1 was not found";
#define LOOK_UP(name, symbol, parameters)                                                                              \
  do {                                                                                                                 \
    void *const address = dlsym(library, symbol);                                                                      \
    if (address == NULL) {                                                                                             \
      snprintf(text, size, "the NVIDIA driver is too old: it lacks %s (CUDA 12.0 or newer is needed)", symbol);        \
      return text;                                                                                                     \
    }                                                                                                                  \
    memcpy(&driver.name, &address, sizeof address);                                                                    \
  } while (0);
  DRIVER_FUNCTIONS(LOOK_UP)
#undef LOOK_UP
  void *const tensor_map = dlsym(library, "cuTensorMapEncodeTiled");
  memcpy(&driver.tensor_map, &tensor_map, sizeof tensor_map);
  const CUresult result = driver.init(0);
  if (result != CUDA_SUCCESS) {
    snprintf(text, size, "cuInit: %s (%s)", result_text(result), result_name(result));
    return text;
  }
  driver.driver_version(&driver_version);
  atomic_store_explicit(&driver_ready, true, memory_order_release);
  return NULL;
}

/* NULL, or why the driver cannot be used; asked again after a failure. */
static const char *load_driver(char *const text, const size_t size) {
  if (atomic_load_explicit(&driver_ready, memory_order_acquire)) return NULL;
  pthread_mutex_lock(&lock);
  const char *const error = atomic_load(&driver_ready) ? NULL : load_driver_locked(text, size);
  pthread_mutex_unlock(&lock);
  return error;
}

static CUresult read_device(const int32_t ordinal, device_info *const info) {
  int major = 0, minor = 0, sms = 0;
  CUresult result = driver.device_get(&info->device, ordinal);
  if (result == CUDA_SUCCESS)
    result = driver.device_attribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, info->device);
  if (result == CUDA_SUCCESS)
    result = driver.device_attribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, info->device);
  if (result == CUDA_SUCCESS)
    result = driver.device_attribute(&sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, info->device);
  if (result == CUDA_SUCCESS) result = driver.retain(&info->primary, info->device);
  info->sm = 10 * major + minor;
  info->sms = sms;
  return result;
}

static CUresult prepare_device(const int32_t ordinal) {
  const uint64_t bit = UINT64_C(1) << ordinal;
  if (atomic_load_explicit(&devices_ready, memory_order_acquire) & bit) return CUDA_SUCCESS;
  pthread_mutex_lock(&lock);
  CUresult result = CUDA_SUCCESS;
  if (!(atomic_load(&devices_ready) & bit)) {
    result = read_device(ordinal, &devices[ordinal]);
    if (result == CUDA_SUCCESS) atomic_fetch_or_explicit(&devices_ready, bit, memory_order_release);
  }
  pthread_mutex_unlock(&lock);
  return result;
}

/* ---- one op call ---- */

/* Another device, or none, is current in this thread. torch's guard restores the former on leaving. */
static bsh_status make_current(bsh_cuda_context *const context, const CUcontext primary) {
  CUcontext current = NULL;
  if (bsh_torch.aoti_torch_create_cuda_guard(context->device, &context->guard)) {
    context->guard = NULL;
    return bsh_fail(BSH_TORCH_ERROR, "%s: torch cannot switch to cuda:%d", context->op, (int)context->device);
  }
  CUresult result = driver.get_current(&current);
  if (result == CUDA_SUCCESS && current != primary) result = driver.set_current(primary);
  if (result == CUDA_SUCCESS) return BSH_OK;
  bsh_cuda_leave(context);
  return driver_failed(context, "making the device current", result);
}

/* Fills the context from its device. */
static bsh_status know_device(bsh_cuda_context *const context) {
  const int32_t device = context->device;
  if (device < 0 || device >= MAX_DEVICES)
    return bsh_fail(BSH_BAD_DEVICE, "%s: cuda:%d is beyond the %d devices supported", context->op, (int)device,
                    MAX_DEVICES);
  const CUresult result = prepare_device(device);
  if (result != CUDA_SUCCESS) return driver_failed(context, "preparing the device", result);
  context->sm = devices[device].sm;
  context->sms = devices[device].sms;
  return BSH_OK;
}

/* The same; *current: what is current in this thread. */
static bsh_status use_device(bsh_cuda_context *const context, CUcontext *const current) {
  *current = NULL;
  BSH_TRY(know_device(context));
  const CUresult result = driver.get_current(current);
  return result == CUDA_SUCCESS ? BSH_OK : driver_failed(context, "preparing the device", result);
}

static bsh_status need_driver(const char *const op, const int32_t device) {
  char text[160];
  if (!bsh_torch.has_cuda)
    return bsh_fail(BSH_CUDA_ERROR, "%s: tensor on cuda:%d, but libtorch_cuda lacks functions bitshard needs", op,
                    (int)device);
  const char *const error = load_driver(text, sizeof text);
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
  BSH_TRY(use_device(context, &current));
  if (current != devices[device].primary) BSH_TRY(make_current(context, devices[device].primary));
  if (bsh_torch.aoti_torch_get_current_cuda_stream(device, &context->stream) == 0) return BSH_OK;
  bsh_cuda_leave(context);
  return bsh_fail(BSH_TORCH_ERROR, "%s: torch has no current stream on cuda:%d", op, (int)device);
}

void bsh_cuda_leave(bsh_cuda_context *const context) {
  if (context->guard != NULL) bsh_torch.aoti_torch_delete_cuda_guard(context->guard);
  if (context->switched) driver.set_current(context->previous);
  context->guard = NULL;
  context->switched = false;
}

/* ---- calls with addresses instead of tensors ---- */

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
  return driver.pointer_attributes(3, attributes, values, (CUdeviceptr)(uintptr_t)pointer);
}

static bsh_status place_of(const bsh_cuda_context *const context, const char *const argument, const void *const pointer,
                           place *const found) {
  const CUresult result = find_place(pointer, found);
  if (result != CUDA_SUCCESS) return driver_failed(context, argument, result);
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
  const char *const error = load_driver(text, sizeof text);
  if (error != NULL) return bsh_fail(BSH_CUDA_ERROR, "%s: %s", op, error);
  BSH_TRY(place_of(context, argument, out, &found));
  context->device = found.device;
  BSH_TRY(use_device(context, &current));
  if (current == devices[found.device].primary) return BSH_OK;
  const CUresult result = driver.set_current(devices[found.device].primary);
  if (result != CUDA_SUCCESS) return driver_failed(context, "making the device current", result);
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
  CUresult result = driver.is_capturing(context->stream, &capture);
  if (result == CUDA_SUCCESS && capture != CU_STREAM_CAPTURE_STATUS_NONE)
    return bsh_fail(BSH_NO_KERNEL, "%s: %s cannot be read while a CUDA graph is captured", context->op, argument);
  if (result == CUDA_SUCCESS)
    result = driver.copy_to_host(copy, (CUdeviceptr)(uintptr_t)data, (size_t)n_bytes, context->stream);
  if (result == CUDA_SUCCESS) result = driver.wait(context->stream);
  return result == CUDA_SUCCESS ? BSH_OK : driver_failed(context, argument, result);
}

bool bsh_cuda_owns(const void *const pointer) {
  char text[160];
  place found;
  if (!atomic_load_explicit(&driver_ready, memory_order_acquire)) {
    void *const library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (library == NULL) return false;
    dlclose(library);
  }
  if (load_driver(text, sizeof text) != NULL || find_place(pointer, &found) != CUDA_SUCCESS) return false;
  return found.type == CU_MEMORYTYPE_DEVICE && !found.managed;
}

/* A pool of our own: the device's would give its memory back at every wait of the host. Keeps what a call may take. */
static CUresult find_pool(const int32_t device, CUmemoryPool *const pool) {
  pthread_mutex_lock(&lock);
  CUresult result = CUDA_SUCCESS;
  CUmemoryPool *const kept = &devices[device].pool;
  if (*kept == NULL) {
    const CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                       .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}};
    uint64_t bytes = (uint64_t)bsh_cuda_workspace_bytes();
    result = driver.pool_create(kept, &properties);
    if (result == CUDA_SUCCESS) driver.pool_attribute(*kept, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &bytes);
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
  if (result == CUDA_SUCCESS) result = driver.pool_allocate(&data, (size_t)n_bytes, pool, context->stream);
  if (result != CUDA_SUCCESS) return driver_failed(context, "allocating workspace", result);
  scratch->data = (void *)(uintptr_t)data;
  return BSH_OK;
}

static void raw_scratch_delete(const bsh_cuda_scratch *const scratch) {
  driver.pool_free((CUdeviceptr)(uintptr_t)scratch->data, scratch->stream);
}

/* ---- kernels ---- */

static bsh_status load_failed(const bsh_cuda_context *const context, const char *const name, const CUresult result) {
  if (result != CUDA_ERROR_NO_BINARY_FOR_GPU && result != CUDA_ERROR_UNSUPPORTED_PTX_VERSION)
    return driver_failed(context, name, result);
  return bsh_fail(BSH_NO_KERNEL,
                  "%s: cuda:%d is an sm_%d GPU, but this build of bitshard was compiled for %s (%s): reinstall with "
                  "BITSHARD_CUDA_ARCHS=%d or BITSHARD_CUDA_ARCHS=all, or update the NVIDIA driver",
                  context->op, (int)context->device, (int)context->sm, BSH_CUDA_ARCHS, result_name(result),
                  (int)context->sm);
}

/* The CUkernel of `kernel`: looked up once per process, its library loaded before. */
static CUresult find_kernel(bsh_cuda_kernel *const kernel) {
  CUresult result = CUDA_SUCCESS;
  CUkernel handle = NULL;
  pthread_mutex_lock(&lock);
  CUlibrary *const library = &libraries[kernel->fatbin];
  if (*library == NULL) result = driver.library_load(library, fatbins[kernel->fatbin], NULL, NULL, 0, NULL, NULL, 0);
  if (result == CUDA_SUCCESS) result = driver.library_kernel(&handle, *library, kernel->name);
  if (result == CUDA_SUCCESS) atomic_store_explicit(&kernel->handle, handle, memory_order_release);
  pthread_mutex_unlock(&lock);
  return result;
}

/* Allows blocks of more than 48 KiB of dynamic shared memory, once per device. */
static CUresult raise_shared_limit(bsh_cuda_kernel *const kernel, const int32_t shared_bytes, const int32_t device) {
  const uint64_t bit = UINT64_C(1) << device;
  if (shared_bytes <= STATIC_SHARED_LIMIT || (atomic_load(&kernel->raised) & bit)) return CUDA_SUCCESS;
  const CUresult result = driver.kernel_attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes,
                                                  atomic_load(&kernel->handle), devices[device].device);
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
  result =
      driver.launch(&config, (CUfunction)atomic_load_explicit(&kernel->handle, memory_order_relaxed), arguments, NULL);
  return result == CUDA_SUCCESS ? BSH_OK : load_failed(context, kernel->name, result);
}

/* Of a driver that is not loaded nothing is known. */
bool bsh_cuda_has_tensor_maps(void) {
  return atomic_load_explicit(&driver_ready, memory_order_acquire) && driver.tensor_map != NULL;
}

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
  const CUresult result = driver.tensor_map(&made, types[what->type], 2, (void *)(uintptr_t)what->data, sizes, strides,
                                            box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                            box_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
                                            CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) return driver_failed(context, "describing a matrix to the GPU", result);
  _Static_assert(sizeof made == sizeof *map, "a tensor map has 128 bytes");
  memcpy(map, &made, sizeof made);
  return BSH_OK;
}

bsh_status bsh_cuda_zero(const bsh_cuda_context *const context, void *const data, const int64_t n_bytes) {
  const CUresult result = driver.memset((CUdeviceptr)(uintptr_t)data, 0, (size_t)n_bytes, (CUstream)context->stream);
  return result == CUDA_SUCCESS ? BSH_OK : driver_failed(context, "clearing the output", result);
}

void bsh_cuda_describe(bsh_cuda_state *const state) {
  *state = (bsh_cuda_state){.built = true, .architectures = BSH_CUDA_ARCHS};
  if (!bsh_torch.has_cuda) {
    snprintf(state->error, sizeof state->error, "this torch is built without CUDA");
    return;
  }
  char text[160];
  const char *const error = load_driver(text, sizeof text);
  if (error != NULL) snprintf(state->error, sizeof state->error, "%s", error);
  else snprintf(state->driver, sizeof state->driver, "%d.%d", driver_version / 1000, driver_version % 1000 / 10);
}

#endif
