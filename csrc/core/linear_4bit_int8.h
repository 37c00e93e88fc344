/* core/linear_4bit_int8.h - products of 4-bit weights in 8-bit arithmetic.
 *
 * y = x W^T + bias, W [N, K] of NF4 or FP4 with K and blocks in multiples of 64. A group is 64 columns. codes[code] of
 * a format is rint(value * factor), W's scale of a group that of its block times 1 / factor; x is coded by row and
 * group as quantize_int8 codes rows:
 *
 *   s[m, n, g] = sum over the group's k of codes of x and of W, exact
 *   y[m, n] = the sum over g, in order, by fma in fp32 of s[m, n, g] (x_scale[m, g] * w_scale[n, g]); plus bias[n]
 *   x_scale[m, g] = absmax[m, g] * BSH_INT8_UNIT,  w_scale[n, g] = fp32 scale of the block * unit_int8(format)
 *
 * A row with an infinity or a NaN is NaN. Factors: NF4 124.11, at which its 16 values are nearest to integers for codes
 * of normal weights; FP4 120, at which all but +-1/192 (1, not 0.625) are integers. */
#ifndef BSH_LINEAR_4BIT_INT8_H
#define BSH_LINEAR_4BIT_INT8_H

#include <stdint.h>

#include "core/formats.h"

enum { BSH_GROUP_INT8 = 64 };

#define BSH_NF4_CODES_INT8 -124, -86, -65, -49, -35, -23, -11, 0, 10, 20, 31, 42, 55, 70, 90, 124
#define BSH_FP4_CODES_INT8 0, 1, 80, 120, 40, 60, 20, 30, 0, -1, -80, -120, -40, -60, -20, -30
#define BSH_NF4_FACTOR_INT8 124.11f
#define BSH_FP4_FACTOR_INT8 120.0f

/* NF4 or FP4. */
static inline const int8_t *codes_int8(const bsh_format format) {
  static const int8_t codes[2][16] = {{BSH_NF4_CODES_INT8}, {BSH_FP4_CODES_INT8}};
  return codes[format == BSH_FP4];
}

static inline float unit_int8(const bsh_format format) {
  return 1.0f / (format == BSH_FP4 ? BSH_FP4_FACTOR_INT8 : BSH_NF4_FACTOR_INT8);
}

#endif
