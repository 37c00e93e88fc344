/* gpu/workspace.c - how much scratch memory a call may take. */
#include <stdatomic.h>
#include <stdlib.h>

#include "gpu/driver.h"

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
