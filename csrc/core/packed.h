/* core/packed.h - sizes of packed 4-bit data in a storage dtype, and the slices that ranks keep. Needs neither Python
 * nor torch. */
#ifndef BSH_CORE_PACKED_H
#define BSH_CORE_PACKED_H

#include <stddef.h>
#include <stdint.h>

#include "core/status.h"

enum { BSH_MIN_BLOCKSIZE = 32, BSH_MAX_BLOCKSIZE = 4096, BSH_MAX_BLOCKSIZE_8BIT = 16384 };
enum { BSH_MIN_BLOCKSIZE_WEIGHT = 16 }; /* that is decoded or multiplied */

/* A run of elements of a flat tensor. */
typedef struct {
  int64_t begin;
  int64_t length;
} bsh_slice;

/* Bytes of n 4-bit codes: ceil(n / 2). n >= 0. */
int64_t bsh_packed_bytes(int64_t n);

/* Whole storage elements of `itemsize` bytes that hold n codes; the rest of the last one is zero. */
int64_t bsh_storage_elements(int64_t n, int64_t itemsize);

/* Blocks (and so scales) of n elements: ceil(n / blocksize). */
int64_t bsh_block_count(int64_t n, int64_t blocksize);

/* The part of `total` elements that `rank` of `world` keeps when cut like torch.chunk: ceil(total / world) each, the
 * last ranks shorter or empty. */
bsh_slice bsh_rank_slice(int64_t total, int64_t world, int64_t rank);

/* A power of two from `least` to `largest`, or BSH_BAD_VALUE. */
bsh_status bsh_check_blocksize_from(const char *op, int64_t blocksize, int64_t least, int64_t largest);
/* The same from BSH_MIN_BLOCKSIZE, and of a weight. */
bsh_status bsh_check_blocksize(const char *op, int64_t blocksize, int64_t largest);
bsh_status bsh_check_blocksize_weight(const char *op, int64_t blocksize);

/* `n_bytes` of storage in elements of `itemsize` must be exactly what n codes take, or BSH_BAD_SHAPE. */
bsh_status bsh_check_packed_bytes(const char *op, int64_t n_bytes, int64_t itemsize, int64_t n);

/* *product = a * b for sizes a, b >= 0, or BSH_BAD_SHAPE where negative or beyond int64. */
bsh_status bsh_checked_product(const char *op, int64_t a, int64_t b, int64_t *product);

#endif
