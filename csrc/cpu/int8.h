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

/* Up to BSH_INT8_FEW rows x is multiplied as it is, and nothing is allocated; more rows are coded. dy is never coded:
 * up to BSH_INT8_FEW_DY rows nothing is allocated. */
bsh_status bsh_cpu_linear_int8(const bsh_product_args *args);
bsh_status bsh_cpu_linear_int8_dgrad(const bsh_product_args *args);

/* No size is zero. */
bsh_status bsh_cpu_linear_4bit_int8(const bsh_product_args *args);

/* ---- below: for csrc/cpu and tests ---------------------------------------------------------------------------------
 */

enum {
  BSH_INT8_FEW = 4,            /* rows of x that are multiplied as they are: exact, and as fast as coded for one */
  BSH_INT8_FEW_DY = 8,         /* rows of dy whose gradient has all its sums in the first-level cache */
  BSH_INT8_PANEL = 128,        /* rows of b that are multiplied at a time, at most */
  BSH_INT8_COLUMNS = 64,       /* columns of W in a panel of the gradient */
  BSH_INT8_DGRAD_ROWS = 252,   /* rows of dy that are multiplied with a panel, at most */
  BSH_INT8_DGRAD_GROUP = 12,   /* rows of dy that lie together */
  BSH_INT8_SCRATCH = 560 << 10 /* bytes of memory of a thread, from a multiple of 64 on */
};

/* Single-threaded kernels of one instruction set. */
typedef struct {
  /* Largest magnitude of x [n] below the threshold, as core/int8.h says; marks where others are, if `outliers`. */
  float (*absmax)(const void *x, bsh_dtype dtype, int64_t n, float threshold, uint8_t *outliers);
  /* Codes of x [n]; zero from the threshold on, where that is not 0. */
  void (*encode)(const void *x, bsh_dtype dtype, int64_t n, float scale, float threshold, int8_t *codes);
  /* y [n] of dtype, of one row. */
  void (*decode)(const int8_t *codes, float absmax, int64_t n, bsh_dtype dtype, void *y);
  /* sums[m * ld + n] of at most BSH_INT8_PANEL rows of b. */
  void (*product)(const bsh_product_int8_args *args, int64_t ld, void *scratch);
  /* y [n] of one row: as core/int8.h says, plus `more` [n] where it is not NULL. */
  void (*scale)(const int32_t *sums, float row_absmax, const float *col_absmax, const void *bias, const float *more,
                int64_t n, bsh_dtype dtype, void *y);
  /* y[i] = fma(sums[i], x_scale * w_scales[i], y[i]), i < n: one group of linear_4bit_int8. */
  void (*add_scaled)(const int32_t *sums, float x_scale, const float *w_scales, int64_t n, float *y);
  /* sum[j] = sum over i of x[i] w[i * BSH_INT8_PANEL + j], j < BSH_INT8_PANEL: outlier columns of a row of x. */
  void (*columns)(const float *x, const float *w, int64_t n, float *sum);
  /* Columns of y, or of dx, for few rows. */
  void (*linear)(const bsh_product_args *args, int64_t n_begin, int64_t n_end);
  void (*linear_dgrad)(const bsh_product_args *args, int64_t k_begin, int64_t k_end);
  /* Columns [k0, k0 + n) of dx, n <= BSH_INT8_COLUMNS, M <= BSH_INT8_DGRAD_ROWS. dy[g][row][m], m <
   * BSH_INT8_DGRAD_GROUP: row m of group g of dy, zero behind the last one, times absmax[row] / 127. */
  void (*dgrad_panel)(const bsh_product_args *args, const float *dy, int64_t k0, int64_t n, void *scratch);
} bsh_cpu_int8_kernels;

extern const bsh_cpu_int8_kernels bsh_cpu_scalar_int8;

/* Those of the instruction set in use and of what else this CPU has. */
const bsh_cpu_int8_kernels *bsh_cpu_int8(void);

/* Rows of W in a panel: enough panels for many threads, none of more than BSH_INT8_PANEL rows. */
int64_t bsh_cpu_int8_panel(int64_t N);

/* Instead of bsh_cpu_avx512's, with AVX512-VNNI, which not all CPUs with VBMI have. */
extern const bsh_cpu_int8_kernels bsh_cpu_avx512_vnni_int8;
void bsh_cpu_avx512_vnni_product(const bsh_product_int8_args *args, int64_t ld, void *scratch);

/* Instead of bsh_cpu_avx2's, with AVX-VNNI. */
extern const bsh_cpu_int8_kernels bsh_cpu_avx_vnni_int8;
void bsh_cpu_avx_vnni_product(const bsh_product_int8_args *args, int64_t ld, void *scratch);

/* Instead of bsh_cpu_neon's, with the dot products of Armv8.2 and the 2 x 2 products of Armv8.6, whose CPUs have both.
 */
extern const bsh_cpu_int8_kernels bsh_cpu_neon_dot_int8, bsh_cpu_neon_i8mm_int8;
void bsh_cpu_neon_dot_product(const bsh_product_int8_args *args, int64_t ld, void *scratch);
void bsh_cpu_neon_i8mm_product(const bsh_product_int8_args *args, int64_t ld, void *scratch);

#endif
