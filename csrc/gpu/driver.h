/* gpu/driver.h - the CUDA driver API, found with dlopen, and the one way to launch a kernel.
 *
 * No CUDA runtime is linked: kernels travel inside the extension as one fatbin per file of cuda/ and are loaded on
 * first use. Nothing but bsh_cuda_read waits for the GPU. A build without nvcc (BSH_NO_CUDA) has the same functions;
 * they fail with a text that says so. All functions are safe to call from any thread and inside the capture of a CUDA
 * graph. */
#ifndef BSH_GPU_DRIVER_H
#define BSH_GPU_DRIVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/cuda_kernel.h"
#include "core/status.h"
#include "core/tensor_map.h"

/* One op call on one device: made by bsh_cuda_enter, closed by bsh_cuda_leave. */
typedef struct {
  const char *op;   /* for messages */
  int64_t sizes[3]; /* for messages: M, N, K of a product, or n and zeros */
  int32_t device;
  int32_t sm;    /* compute capability, 10 * major + minor */
  int32_t sms;   /* multiprocessors */
  void *stream;  /* torch's current stream of the device, a CUstream */
  void *guard;   /* torch's device guard where another device was current, else NULL */
  bool raw;      /* a call without torch: made by bsh_cuda_enter_raw */
  bool switched; /* raw: `previous`, a CUcontext or NULL, was current before */
  void *previous;
} bsh_cuda_context;

/* sm and sms of a device, without entering it. */
bsh_status bsh_cuda_gpu(const char *op, int32_t device, int32_t *sm, int32_t *sms);

/* Makes `device` current in this thread (its primary context; a fresh thread has none) and takes its current stream. */
bsh_status bsh_cuda_enter(bsh_cuda_context *context, const char *op, int32_t device, int64_t size0, int64_t size1,
                          int64_t size2);
void bsh_cuda_leave(bsh_cuda_context *context);

/* The same for a call that has addresses and no tensors: `out`, called `argument` in messages, says which device, and
 * `stream`, a CUstream, is taken as it is. Scratch memory is then the driver's, in the order of that stream: a block of
 * torch's would belong to torch's current stream. BSH_BAD_DEVICE where no GPU reaches `out`. */
bsh_status bsh_cuda_enter_raw(bsh_cuda_context *context, const char *op, const char *argument, const void *out,
                              void *stream, int64_t size0, int64_t size1, int64_t size2);

/* BSH_BAD_DEVICE unless the device of the context reaches `pointer`: its own memory, managed or pinned memory. */
bsh_status bsh_cuda_check_pointer(const bsh_cuda_context *context, const char *argument, const void *pointer);

/* Torch's current stream of the device, or the default stream where torch has no CUDA. */
void *bsh_cuda_torch_stream(const bsh_cuda_context *context);

/* Copies n_bytes from the device and waits for the stream, the only function here that waits. An error during the
 * capture of a CUDA graph. */
bsh_status bsh_cuda_read(const bsh_cuda_context *context, const char *argument, const void *data, void *copy,
                         int64_t n_bytes);

/* Whether `pointer` is memory of a GPU that the CPU cannot read. Loads no driver that is not loaded. */
bool bsh_cuda_owns(const void *pointer);

/* Launches on context->stream. arguments[i] points to the i-th kernel parameter. */
bsh_status bsh_cuda_launch(const bsh_cuda_context *context, bsh_cuda_kernel *kernel, const bsh_cuda_launch_shape *shape,
                           void **arguments);

/* The same of a line of blocks; the only kernel parameter is `args`. */
static inline bsh_status bsh_cuda_launch_blocks(const bsh_cuda_context *const context, bsh_cuda_kernel *const kernel,
                                                const int64_t blocks, const int32_t threads, const bool overlap,
                                                const void *const args) {
  if (blocks > INT32_MAX)
    return bsh_fail(BSH_BAD_SHAPE, "%s: tensor too large: %lld blocks of threads", context->op, (long long)blocks);
  bsh_cuda_launch_shape shape = bsh_overlapping(blocks, threads, 1, 0);
  void *arguments[] = {(void *)(uintptr_t)args};
  shape.overlap = overlap;
  return bsh_cuda_launch(context, kernel, &shape, arguments);
}

/* Whether the driver makes tensor maps; and one. */
bool bsh_cuda_has_tensor_maps(void);
bsh_status bsh_cuda_tensor_map(const bsh_cuda_context *context, const bsh_map_of *what, bsh_tensor_map *map);

/* Sets n_bytes bytes at a device address to 0, on context->stream. */
bsh_status bsh_cuda_zero(const bsh_cuda_context *context, void *data, int64_t n_bytes);

/* Scratch memory on the device for the rest of one op call, from torch's caching allocator. Allocated per call, not
 * kept: the allocator then gives every stream its own block, puts it in a graph's private pool during capture, counts
 * it in torch.cuda's statistics and gives it back on torch.cuda.empty_cache(). Freeing does not wait: the block is
 * reused only by later work of the same stream. */
typedef struct {
  void *data;   /* 256-byte aligned */
  void *handle; /* torch's tensor; NULL: of the driver, ordered in `stream` */
  void *stream;
} bsh_cuda_scratch;
bsh_status bsh_cuda_scratch_new(const bsh_cuda_context *context, int64_t n_bytes, bsh_cuda_scratch *scratch);
/* The same, with a handle that torch takes for n elements of a dtype (torch's number) of `itemsize` bytes. */
bsh_status bsh_cuda_scratch_of(const bsh_cuda_context *context, int64_t n, int32_t torch_dtype, int64_t itemsize,
                               bsh_cuda_scratch *scratch);
void bsh_cuda_scratch_delete(bsh_cuda_scratch *scratch);

/* Bytes a dequantized panel, and what cuBLAS gets beside it, may take in one call: BITSHARD_WORKSPACE_MB, 64 MiB by
 * default. Read once. */
int64_t bsh_cuda_workspace_bytes(void);

/* For Python's cuda_state(). */
typedef struct {
  bool built;                /* this build has kernels */
  const char *architectures; /* what they were compiled for, "" without kernels */
  char driver[32];           /* "13.0", "" before first use or without a driver */
  char error[256];           /* why CUDA cannot be used, "" when nothing is known to be wrong */
} bsh_cuda_state;
void bsh_cuda_describe(bsh_cuda_state *state);

#endif
