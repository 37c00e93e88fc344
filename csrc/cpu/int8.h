/* cpu/int8.h - the int8 ops on the CPU: one function for each, and the kernels of an instruction set behind them.
 *
 * Arguments (core/int8.h) were checked in ops/int8_ops.c; no size is zero. Results never depend on the number of
 * threads. Codes, sums and scaled products are equal bit for bit on all instruction sets. */
#ifndef BSH_CPU_INT8_H
#define BSH_CPU_INT8_H

#include "core/int8.h"
#include "core/status.h"

bsh_status bsh_cpu_quantize_int8(const bsh_quantize_int8_args *args);
bsh_status bsh_cpu_dequantize_int8(const bsh_dequantize_int8_args *args);
bsh_status bsh_cpu_product_int8(const bsh_product_int8_args *args);
bsh_status bsh_cpu_scale_product_int8(const bsh_scale_product_int8_args *args);

/* Up to BSH_CPU_SMALL_M rows x is multiplied as it is and nothing is allocated; more rows are coded. */
bsh_status bsh_cpu_linear_int8(const bsh_linear_int8_args *args);
bsh_status bsh_cpu_linear_int8_dgrad(const bsh_linear_int8_args *args);

/* ---- below: for csrc/cpu and tests ---------------------------------------------------------------------------------
 */

enum { BSH_INT8_PANEL = 64 }; /* rows of b that are multiplied at a time */
enum {
  BSH_INT8_SCRATCH = 300 << 10
}; /* bytes of memory for `product`, in multiples of 64 from an address that is one */

/* Single-threaded kernels of one instruction set. */
typedef struct {
  /* Largest magnitude of x [n] below the threshold, as core/int8.h says; marks where others are, if `outliers`. */
  float (*absmax)(const void *x, bsh_dtype dtype, int64_t n, float threshold, uint8_t *outliers);
  /* Codes of x [n]; zero from the threshold on, where that is not 0. */
  void (*encode)(const void *x, bsh_dtype dtype, int64_t n, float scale, float threshold, int8_t *codes);
  /* y [n] of dtype, of one row. */
  void (*decode)(const int8_t *codes, float absmax, int64_t n, bsh_dtype dtype, void *y);
  /* sums[m * ld + n] of at most BSH_INT8_PANEL rows of b; scratch: BSH_INT8_SCRATCH bytes. */
  void (*product)(const bsh_product_int8_args *args, int64_t ld, void *scratch);
  /* y [n] of one row: as core/int8.h says, plus `more` [n] where it is not NULL. */
  void (*scale)(const int32_t *sums, float row_absmax, const float *col_absmax, const void *bias, const float *more,
                int64_t n, bsh_dtype dtype, void *y);
  void (*linear)(const bsh_linear_int8_args *args, int64_t n_begin, int64_t n_end);       /* M <= BSH_CPU_SMALL_M */
  void (*linear_dgrad)(const bsh_linear_int8_args *args, int64_t k_begin, int64_t k_end); /* same */
} bsh_cpu_int8_kernels;

extern const bsh_cpu_int8_kernels bsh_cpu_scalar_int8;
#if defined(__x86_64__)
extern const bsh_cpu_int8_kernels bsh_cpu_avx2_int8;
extern const bsh_cpu_int8_kernels bsh_cpu_avx512_int8;
extern const bsh_cpu_int8_kernels bsh_cpu_avx512_vnni_int8; /* and AVX512-VNNI, which not all CPUs with VBMI have */
#endif

#endif
