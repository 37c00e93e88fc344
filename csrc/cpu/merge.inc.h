/* cpu/merge.inc.h - adapters added to a weight, in vectors of any width (cpu/isa/vectors.h). */
#ifndef BSH_CPU_MERGE_INC_H
#define BSH_CPU_MERGE_INC_H

enum { MERGE_VECTORS = 4 }; /* whose sums are in registers at a time */

/* Up to MERGE_VECTORS vectors of row n, `count` elements from column k on; with `full` all of them. */
ALWAYS_INLINE void add_to_vectors(const bsh_merge_4bit_args *const args, const int64_t n, const int64_t k,
                                  const int64_t count, float *const values, const bsh_dtype dtype, const bool full) {
  floats value[MERGE_VECTORS], sum[MERGE_VECTORS] = {{0}};
  const int vectors = full ? MERGE_VECTORS : 1;
  UNROLL for (int j = 0; j < vectors; j++) value[j] =
      full ? v_read(values + j * LANES) : v_load_some(values, BSH_F32, 0, count);
  for (int64_t r = 0; r < args->R; r++) {
    const floats b = v_set(load_f32(args->b, dtype, n * args->R + r));
    const int64_t at = r * args->K + k;
    UNROLL for (int j = 0; j < vectors; j++) {
      const floats a = full ? v_load(args->a, dtype, at + j * LANES) : v_load_some(args->a, dtype, at, count);
      sum[j] = v_fma(b, a, sum[j]);
    }
    if (args->scales[r] == 0.0f) continue;
    UNROLL for (int j = 0; j < vectors; j++) {
      value[j] = v_fma(v_set(args->scales[r]), sum[j], value[j]);
      sum[j] = (floats){0};
    }
  }
  UNROLL for (int j = 0; j < vectors; j++) {
    if (full) v_write(values + j * LANES, value[j]);
    else v_write_some(values, count, value[j]);
  }
}

ALWAYS_INLINE void add_to_rows(const bsh_merge_4bit_args *const args, const int64_t begin, const int64_t end,
                               float *const values, const bsh_dtype dtype) {
  for (int64_t i = begin; i < end;) {
    const int64_t n = i / args->K, row_end = min_i64((n + 1) * args->K, end);
    for (; i + MERGE_VECTORS * LANES <= row_end; i += MERGE_VECTORS * LANES)
      add_to_vectors(args, n, i - n * args->K, MERGE_VECTORS * LANES, values + (i - begin), dtype, true);
    for (; i < row_end; i += LANES)
      add_to_vectors(args, n, i - n * args->K, min_i64(LANES, row_end - i), values + (i - begin), dtype, false);
    i = row_end;
  }
}

static void add_adapters_lanes(const bsh_merge_4bit_args *const args, const int64_t begin, const int64_t end,
                               float *const values) {
  BY_DTYPE(add_to_rows, args->dtype, args, begin, end, values);
}

#endif
