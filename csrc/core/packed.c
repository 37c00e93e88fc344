/* core/packed.c - see core/packed.h. */
#include "core/packed.h"

#include <inttypes.h>

#include "core/arithmetic.h"

int64_t bsh_packed_bytes(const int64_t n) { return divide_up(n, 2); }

int64_t bsh_storage_elements(const int64_t n, const int64_t itemsize) {
  return divide_up(bsh_packed_bytes(n), itemsize);
}

int64_t bsh_block_count(const int64_t n, const int64_t blocksize) { return divide_up(n, blocksize); }

bsh_slice bsh_rank_slice(const int64_t total, const int64_t world, const int64_t rank) {
  const int64_t chunk = divide_up(total, world);
  if (chunk == 0 || rank >= divide_up(total, chunk)) return (bsh_slice){.begin = total, .length = 0};
  const int64_t begin = rank * chunk;
  return (bsh_slice){.begin = begin, .length = chunk < total - begin ? chunk : total - begin};
}

bsh_status bsh_check_blocksize_from(const char *const op, const int64_t blocksize, const int64_t least,
                                    const int64_t largest) {
  const int power_of_two = blocksize > 0 && (blocksize & (blocksize - 1)) == 0;
  if (power_of_two && blocksize >= least && blocksize <= largest) return BSH_OK;
  return bsh_fail(BSH_BAD_VALUE, "%s: blocksize %" PRId64 " is not a power of two from %" PRId64 " to %" PRId64, op,
                  blocksize, least, largest);
}

bsh_status bsh_check_blocksize(const char *const op, const int64_t blocksize, const int64_t largest) {
  return bsh_check_blocksize_from(op, blocksize, BSH_MIN_BLOCKSIZE, largest);
}

bsh_status bsh_check_blocksize_weight(const char *const op, const int64_t blocksize) {
  return bsh_check_blocksize_from(op, blocksize, BSH_MIN_BLOCKSIZE_WEIGHT, BSH_MAX_BLOCKSIZE);
}

bsh_status bsh_check_packed_bytes(const char *const op, const int64_t n_bytes, const int64_t itemsize,
                                  const int64_t n) {
  const int64_t needed = bsh_storage_elements(n, itemsize) * itemsize;
  if (n_bytes == needed) return BSH_OK;
  return bsh_fail(BSH_BAD_SHAPE,
                  "%s: packed has %" PRId64 " bytes, %" PRId64 " elements in storage of %" PRId64
                  "-byte items need %" PRId64 "; a sharded or foreign weight reached the op",
                  op, n_bytes, n, itemsize, needed);
}

bsh_status bsh_checked_product(const char *const op, const int64_t a, const int64_t b, int64_t *const product) {
  if (a >= 0 && b >= 0 && !__builtin_mul_overflow(a, b, product)) return BSH_OK;
  return bsh_fail(BSH_BAD_SHAPE, "%s: [%" PRId64 ", %" PRId64 "] is not a tensor shape", op, a, b);
}
