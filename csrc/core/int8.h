/* core/int8.h - arguments of the int8 kernels: LLM.int8() products, and what they are made of.
 *
 * A weight W [N, K] is int8 codes, row-major, and one float32 absmax for each row: W[n, k] = codes[n, k] absmax[n] /
 * 127. Rows of x [M, K] are coded in the same way for a product of int8 by int8; sums are int32.
 *
 *   y[m, n] = sum[m, n] row_absmax[m] col_absmax[n] / 127^2 + bias[n]
 *
 * A column k of x with |x[m, k]| >= threshold in any row m is an outlier column. Its codes are zero where M > 1, and
 * its part of the product is computed with x as it is and W dequantized. threshold 0: there are none. */
#ifndef BSH_INT8_H
#define BSH_INT8_H

#include <stdint.h>

#include "core/kernels.h"

/* 1 / 127^2 as bitsandbytes' CUDA kernels have it: a rounded decimal, which exact results need. */
#define BSH_INT8_PRODUCT_SCALE 6.200012e-05f

/* 1 / 127, the nearest fp32 number. */
#define BSH_INT8_UNIT 7.874015718698502e-3f

/* codes[m, k] = rint(x[m, k] * scale), to even; absmax[m] = max |x[m, k]| over elements below the threshold. scale is
 * int8_scale(absmax[m], dtype) of core/numerics.h: on a GPU __fdividef(127, absmax) where x is fp16, else
 * 31.75f * __fdiv_rn(4.0f, absmax); zero where absmax is below 2^-118, infinite or NaN. absmax is NaN (0x7FFFFFFF)
 * where any of these elements is. Codes of elements of a magnitude from the threshold on are zero, and so is an
 * outlier's whole column where M > 1. */
typedef struct {
  const void *x;     /* [M, K] of dtype, rows ldx elements apart */
  int8_t *codes;     /* [M, K] */
  float *absmax;     /* [M] */
  uint8_t *outliers; /* [K], 1 where a column is one; NULL where threshold is 0 */
  int64_t M, K, ldx;
  float threshold; /* 0: none. The op has rounded it to dtype (ops/int8_ops.c): compare |x| with it as it is */
  bsh_dtype dtype;
} bsh_quantize_int8_args;

/* y[n, k] = (codes[n, k] * absmax[n]) * BSH_INT8_UNIT, each product rounded to fp32, then to dtype. */
typedef struct {
  const int8_t *codes; /* [N, K] */
  const float *absmax; /* [N] */
  void *y;             /* [N, K] of dtype */
  int64_t N, K;
  bsh_dtype dtype;
} bsh_dequantize_int8_args;

/* Of a weight in int8. */
static inline const int8_t *int8_codes(const bsh_weight *const weight) { return (const int8_t *)weight->packed; }

/* Columns up to which a sum of products of codes, -128 among them, is an int32. */
enum { BSH_INT8_MAX_K = 131071 };

/* sums[m, n] = sum over k of a[m, k] b[n, k], exact. K is BSH_INT8_MAX_K at most. */
typedef struct {
  const int8_t *a; /* [M, K] */
  const int8_t *b; /* [N, K] */
  int32_t *sums;   /* [M, N] */
  int64_t M, N, K;
} bsh_product_int8_args;

/* y[m, n] = fma((float)sums[m, n] * row_absmax[m] * col_absmax[n], BSH_INT8_PRODUCT_SCALE, bias[n]), from left to right
 * in fp32, rounded once to dtype. */
typedef struct {
  const int32_t *sums;     /* [M, N] */
  const float *row_absmax; /* [M] */
  const float *col_absmax; /* [N] */
  const void *bias;        /* [N] of dtype, or NULL */
  void *y;                 /* [M, N] of dtype */
  int64_t M, N;
  bsh_dtype dtype;
} bsh_scale_product_int8_args;

#endif
