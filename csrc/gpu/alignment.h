/* gpu/alignment.h - what addresses are multiples of. */
#ifndef BSH_GPU_ALIGNMENT_H
#define BSH_GPU_ALIGNMENT_H

#include <stdint.h>

/* Bytes, a power of two up to 16, that all rows of a matrix begin at multiples of. */
static inline int32_t rows_alignment(const void *const data, const int64_t row_bytes) {
  const uintptr_t bits = (uintptr_t)data | (uintptr_t)row_bytes | 16;
  return (int32_t)(bits & -bits);
}
static inline int32_t alignment_of(const void *const data) { return rows_alignment(data, 0); }

#endif
