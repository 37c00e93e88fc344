/* gpu/workspace.c - how much scratch memory a call may take. */
#include <stdatomic.h>
#include <stdlib.h>

#include "gpu/driver.h"
#include "plan/product.h"

int64_t bsh_cuda_workspace_bytes(void) {
  static _Atomic(int64_t) cached;
  int64_t bytes = atomic_load_explicit(&cached, memory_order_relaxed);
  if (bytes != 0) return bytes;
  const char *const text = getenv("BITSHARD_WORKSPACE_MB");
  const long megabytes = text != NULL ? strtol(text, NULL, 10) : 0;
  bytes = megabytes > 0 ? (int64_t)megabytes << 20 : BSH_WORKSPACE_BYTES;
  atomic_store_explicit(&cached, bytes, memory_order_relaxed);
  return bytes;
}
