/* native/native.c - what the exported C functions share: checks of arguments, and how failures are told. See
 * native/native.h. */
#include "native/native.h"

#include <ctype.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>

#include "core/arithmetic.h"
#include "core/packed.h"

enum { MAX_TOLD = 64 };

static _Thread_local char last_error[512];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t told[MAX_TOLD]; /* hashes of the causes on stderr */
static int n_told;

const char *bsh_native_last_error(void) { return last_error; }

/* FNV-1a of the cause: of the message without the numbers and addresses behind its function. */
static uint64_t hash_of(const char *text) {
  uint64_t hash = UINT64_C(0xCBF29CE484222325);
  bool name = true;
  for (; *text != '\0'; text++) {
    if (!name && isdigit((unsigned char)*text)) {
      while (isalnum((unsigned char)text[1])) text++;
      continue;
    }
    name = name && *text != ':';
    hash = (hash ^ (uint8_t)*text) * UINT64_C(0x100000001B3);
  }
  return hash;
}

/* Whether a cause is new; after MAX_TOLD of them none is. */
static bool remember(const uint64_t hash) {
  for (int i = 0; i < n_told; i++)
    if (told[i] == hash) return false;
  if (n_told == MAX_TOLD) return false;
  told[n_told++] = hash;
  return true;
}

void bsh_native_finish(const bsh_status status) {
  last_error[0] = '\0';
  if (status == BSH_OK) return;
  snprintf(last_error, sizeof last_error, "%s", bsh_status_message());
  pthread_mutex_lock(&lock);
  const bool tell = remember(hash_of(last_error)), full = n_told == MAX_TOLD;
  pthread_mutex_unlock(&lock);
  if (tell) fprintf(stderr, "bitshard: %s; nothing was computed\n", last_error);
  if (tell && full) fprintf(stderr, "bitshard: further errors of native functions are not written here\n");
}

bsh_status bsh_native_check_pointers(const char *const op, const bsh_native_pointer *const pointers, const int count) {
  for (int i = 0; i < count; i++) {
    if (pointers[i].data == NULL) return bsh_fail(BSH_BAD_VALUE, "%s: %s is NULL", op, pointers[i].name);
    if (!aligned(pointers[i].data, pointers[i].alignment))
      return bsh_fail(BSH_BAD_VALUE, "%s: %s (%p) is not aligned to its elements of %d bytes", op, pointers[i].name,
                      pointers[i].data, (int)pointers[i].alignment);
  }
  return BSH_OK;
}

bsh_status bsh_native_check_sizes(const char *const op, const int64_t n, const int64_t blocksize,
                                  const int64_t largest) {
  if (n < 0) return bsh_fail(BSH_BAD_SHAPE, "%s: n is %" PRId64 ", expected >= 0", op, n);
  return bsh_check_blocksize(op, blocksize, largest);
}
