/* core/arithmetic.h - sizes and addresses, for the host code of CPU and CUDA kernels alike. */
#ifndef BSH_CORE_ARITHMETIC_H
#define BSH_CORE_ARITHMETIC_H

#include <stdbool.h>
#include <stdint.h>

#include "core/kernels.h"

static inline int64_t dtype_size(const bsh_dtype dtype) { return dtype == BSH_F32 ? 4 : 2; }

static inline int64_t min_i64(const int64_t a, const int64_t b) { return a < b ? a : b; }

static inline int64_t divide_up(const int64_t a, const int64_t b) { return a / b + (a % b != 0); }

/* Rows [m, m + rows) of a product. */
static inline bsh_product_args rows_of(const bsh_product_args *const args, const int64_t m, const int64_t rows) {
  bsh_product_args part = *args;
  part.M = rows;
  part.x = (const char *)args->x + m * args->ldx * dtype_size(args->dtype);
  part.y = (char *)args->y + m * args->ldy * dtype_size(args->dtype);
  return part;
}

static inline bool aligned(const void *const pointer, const uintptr_t bytes) { return (uintptr_t)pointer % bytes == 0; }

#endif
