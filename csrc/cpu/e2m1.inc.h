/* cpu/e2m1.inc.h - values to MXFP4 and NVFP4, in vectors of any width (cpu/isa/vectors.h). */
#ifndef BSH_CPU_E2M1_INC_H
#define BSH_CPU_E2M1_INC_H

#include "core/e2m1.h"

/* Codes of values in units of their scales: the nearest. */
ALWAYS_INLINE ints e2m1_codes(const floats v) {
  static const uint32_t thresholds[7] = {BSH_E2M1_THRESHOLD_BITS};
  ints below = {0};
  UNROLL for (int i = 0; i < 7; i++) below = i_count(below, v_at_most(v_abs(v), v_set(bits_float(thresholds[i]))));
  return 7 - below + ((ints)(v < 0.0f) & 8); /* of a NaN 7 */
}

/* 32 values: one block, or two of 16. */
ALWAYS_INLINE void quantize_short_blocks(const bsh_quantize_e2m1_args *const args, const int64_t begin,
                                         const int64_t blocksize, const bsh_dtype dtype) {
  enum { VECTORS = 32 / LANES };
  const int each = (int)blocksize / LANES;
  floats x[VECTORS], unit[VECTORS];
  ints codes[VECTORS];
  UNROLL for (int j = 0; j < VECTORS; j++) x[j] = v_load(args->x, dtype, begin + j * LANES);
  for (int first = 0; first < VECTORS; first += each) {
    ints most = {0};
    float of_block;
    for (int j = first; j < first + each; j++) most = i_max(most, (ints)v_abs(x[j]));
    const int64_t block = (begin + first * LANES) / blocksize;
    args->scales[block] = bsh_short_scale(bits_float((uint32_t)i_reduce_max(most)), args->whole, &of_block);
    for (int j = first; j < first + each; j++) unit[j] = v_set(of_block);
  }
  UNROLL for (int j = 0; j < VECTORS; j++) codes[j] = e2m1_codes(v_div(x[j], unit[j]));
  i_store_nibbles(args->packed + begin / 2, codes);
}

ALWAYS_INLINE void quantize_short_run(const bsh_quantize_e2m1_args *const args, const int64_t begin, const int64_t end,
                                      const bsh_dtype dtype) {
  int64_t i = begin;
  if (args->whole == NULL)
    for (; i + 32 <= end; i += 32) quantize_short_blocks(args, i, 32, dtype);
  else
    for (; i + 32 <= end; i += 32) quantize_short_blocks(args, i, 16, dtype);
  if (i < end) bsh_cpu_scalar.quantize_e2m1(args, i, end);
}

static void quantize_e2m1_lanes(const bsh_quantize_e2m1_args *const args, const int64_t begin, const int64_t end) {
  BY_DTYPE(quantize_short_run, args->dtype, args, begin, end);
}

#endif
