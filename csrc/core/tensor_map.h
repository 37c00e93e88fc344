/* core/tensor_map.h - a matrix in memory as the tensor memory accelerator of sm_90 reads it, a box at a time. C and
 * CUDA. */
#ifndef BSH_CORE_TENSOR_MAP_H
#define BSH_CORE_TENSOR_MAP_H

#include <stdint.h>

/* The driver's CUtensorMap; a kernel's parameter. */
typedef struct {
  uint64_t opaque[16];
} __attribute__((aligned(64))) bsh_tensor_map;

typedef enum { BSH_MAP_U8, BSH_MAP_F16, BSH_MAP_BF16 } bsh_map_type;

/* What a map says. A box lies in shared memory as rows of `box_columns` elements, 64 or 128 bytes: its swizzle is of as
 * many bytes. What of a box is outside the matrix reads as 0. */
typedef struct {
  const void *data;                 /* 16-byte aligned */
  int64_t rows, columns, row_bytes; /* row_bytes: from row to row, a multiple of 16 */
  int32_t box_rows, box_columns;    /* box_rows: at most 256 */
  bsh_map_type type;
} bsh_map_of;

#endif
