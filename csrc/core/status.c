/* core/status.c - the thread-local message behind bsh_status. */
#include "core/status.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char message[512];

bsh_status bsh_fail(const bsh_status code, const char *const format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  return code;
}

bsh_status bsh_no_memory(const char *const op, const char *const what, const int32_t device, const double n_bytes) {
  if (device == BSH_DEVICE_CPU)
    return bsh_fail(
        BSH_OUT_OF_MEMORY,
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate %.0f bytes. %s: no memory for %s", n_bytes,
        op, what);
  return bsh_fail(BSH_OUT_OF_MEMORY,
                  "CUDA out of memory. Tried to allocate %.2f MiB. %s: no memory for %s, %.0f bytes on cuda:%d",
                  n_bytes / (1 << 20), op, what, n_bytes, (int)device);
}

const char *bsh_status_message(void) { return message; }
