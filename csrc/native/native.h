/* native/native.h - C functions with the names and signatures of bitsandbytes 0.50.2's native library, exported for
 * callers that have addresses instead of tensors (through ctypes: bitsandbytes.functional.lib).
 *
 *   native/cpu.c, native/cuda.c -> the same bsh_cpu_*, bsh_cuda_* functions that the ops call -> kernels
 *
 * They return nothing. What cannot be computed leaves the output untouched, is written to stderr once for each cause,
 * and is the text of bsh_native_last_error() until the next call on the same thread. Arguments have bitsandbytes' names
 * in messages. A build without CUDA kernels exports the CPU functions only. */
#ifndef BSH_NATIVE_H
#define BSH_NATIVE_H

#include <stdint.h>

#include "core/kernels.h"
#include "core/status.h"

#define BSH_NATIVE __attribute__((visibility("default"))) /* the rest of the library is hidden */

/* X(name in symbols, bsh_dtype) */
#define BSH_NATIVE_DTYPES(X) X(fp32, BSH_F32) X(fp16, BSH_F16) X(bf16, BSH_BF16)

/* What went wrong in the last call on this thread, "" where nothing did. */
BSH_NATIVE const char *bsh_native_last_error(void);

/* The end of a call: keeps the message of a failure and writes it to stderr, unless one was that differs in numbers
 * only. */
void bsh_native_finish(bsh_status status);

/* An address that a call was given. */
typedef struct {
  const char *name;
  const void *data;
  uintptr_t alignment; /* bytes */
} bsh_native_pointer;

/* None is NULL or misaligned. */
bsh_status bsh_native_check_pointers(const char *op, const bsh_native_pointer *pointers, int count);

/* n >= 0 elements in blocks of a power of two from 32 to `largest`. */
bsh_status bsh_native_check_sizes(const char *op, int64_t n, int64_t blocksize, int64_t largest);

#endif
