/* cpu/blocks.inc.h - conversions, quantize_4bit, and blocks of 8 bits, in vectors of any width (cpu/isa/vectors.h).
 *
 * Blocks that are not full, or whose maximum is not ordinary (cpu/grid.h), are left to the scalar form. */
#ifndef BSH_CPU_BLOCKS_INC_H
#define BSH_CPU_BLOCKS_INC_H

#include "cpu/grid.h"

/* ---- conversions ---------------------------------------------------------------------------------------------- */

static void convert_to_f32(const void *const x, const bsh_dtype dtype, float *const out, const int64_t n) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) v_write(out + i, v_load(x, dtype, i));
  if (i < n) v_write_some(out + i, n - i, v_load_some(x, dtype, i, n - i));
}

static void convert_from_f32(const float *const x, const bsh_dtype dtype, void *const out, const int64_t n) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) v_store(out, dtype, i, v_read(x + i));
  if (i < n) v_store_some(out, dtype, i, n - i, v_load_some(x, BSH_F32, i, n - i));
}

/* ---- quantize_4bit -------------------------------------------------------------------------------------------- */

/* Largest magnitude of n elements (n a multiple of 32) as a number without sign; NaN counts as more than infinity. */
ALWAYS_INLINE float largest_magnitude(const void *const x, const bsh_dtype dtype, const int64_t begin,
                                      const int64_t n) {
  if (dtype == BSH_F32) {
    ints most = {0};
    for (int64_t i = 0; i < n; i += LANES) most = i_max(most, (ints)v_abs(v_load(x, BSH_F32, begin + i)));
    return bits_float(i_reduce_max(most));
  }
  words most = {0};
  for (int64_t i = 0; i < n; i += 2 * LANES)
    most = w_max(most, (words)v_read((const uint16_t *)x + begin + i) & 0x7FFF);
  const words pairs = w_max(most, (words)((unsigneds)most >> 16));
  const uint16_t largest = (uint16_t)i_reduce_max((ints)pairs & 0xFFFF);
  return dtype == BSH_BF16 ? bf16_to_f32(largest) : f16_to_f32(largest);
}

ALWAYS_INLINE void quantize_blocks(const bsh_quantize_4bit_args *const args, const int64_t block_begin,
                                   const int64_t block_end, const bsh_dtype dtype, const bsh_format format) {
  enum { VECTORS = 32 / LANES };
  const encoder coder = make_encoder(format);
  const int64_t blocksize = args->blocksize;
  for (int64_t b = block_begin; b < block_end; b++) {
    const int64_t begin = b * blocksize;
    const bool full = begin + blocksize <= args->n;
    const float absmax = full ? largest_magnitude(args->x, dtype, begin, blocksize) : NAN;
    if (!ordinary_absmax(absmax)) {
      bsh_cpu_scalar.quantize_4bit(args, b, b + 1);
      continue;
    }
    args->absmax[b] = absmax;
    const floats inverse = v_set(reciprocal(absmax));
    for (int64_t i = begin; i < begin + blocksize; i += 32) {
      ints codes[VECTORS];
      UNROLL for (int j = 0; j < VECTORS; j++) codes[j] =
          encode(&coder, format, v_load(args->x, dtype, i + j * LANES), inverse);
      i_store_nibbles(args->packed + i / 2, codes);
    }
  }
}

ALWAYS_INLINE void quantize_format(const bsh_quantize_4bit_args *const args, const int64_t block_begin,
                                   const int64_t block_end, const bsh_dtype dtype) {
  BY_FORMAT(quantize_blocks, args->format, args, block_begin, block_end, dtype);
}

static void quantize_4bit_lanes(const bsh_quantize_4bit_args *const args, const int64_t block_begin,
                                const int64_t block_end) {
  BY_DTYPE(quantize_format, args->dtype, args, block_begin, block_end);
}

/* ---- quantize_blockwise, dequantize_blockwise ----------------------------------------------------------------- */

/* The search of encode_8bit (core/numerics.h) as a heap numbered from 1: entries of odd index by level, then thresholds
 * around the even entry that is left. */
typedef struct {
  float heap[128];
  float threshold_below[128], threshold_above[128]; /* around even entry 2q */
} search_tables;

static void make_search(const float *const map, search_tables *const t) {
  t->heap[0] = 0;
  for (int level = 0; level < 7; level++)
    for (int i = 0; i < 1 << level; i++) t->heap[(1 << level) + i] = map[((2 * i + 1) << (7 - level)) - 1];
  for (int q = 0; q < 128; q++) {
    t->threshold_below[q] = q ? flush_denormal((map[2 * q] + map[2 * q - 1]) * 0.5f) : -INFINITY;
    t->threshold_above[q] = flush_denormal((map[2 * q] + map[2 * q + 1]) * 0.5f);
  }
}

ALWAYS_INLINE ints search_heap(const floats v, const search_tables *const t) {
  const mask all = m_all();
  ints node = (ints){0} + 1;
  UNROLL for (int level = 0; level < 7; level++) node =
      i_count(node + node, v_above(v, v_heap_entry(t->heap, level, node)));
  const ints q = node & 127;
  return q + q + (v < v_gather(t->threshold_below, q, all)) - (v > v_gather(t->threshold_above, q, all));
}

ALWAYS_INLINE void quantize_bytes(const bsh_quantize_blockwise_args *const args, const int64_t block_begin,
                                  const int64_t block_end, const bsh_dtype dtype) {
  search_tables tables;
  make_search(args->map, &tables);
  const floats offset = v_set(args->offset ? args->offset[0] : 0.0f);
  for (int64_t b = block_begin; b < block_end; b++) {
    const int64_t begin = b * args->blocksize, end = begin + args->blocksize;
    ints most = {0};
    for (int64_t i = begin; end <= args->n && i < end; i += LANES)
      most = i_max(most, (ints)v_abs(v_load(args->x, dtype, i) - offset));
    const float absmax = end <= args->n ? bits_float(i_reduce_max(most)) : NAN;
    if (!ordinary_absmax(absmax)) {
      bsh_cpu_scalar.quantize_blockwise(args, b, b + 1);
      continue;
    }
    args->absmax[b] = absmax;
    const floats inverse = v_set(reciprocal(absmax));
    for (int64_t i = begin; i < end; i += LANES) {
      const floats x = v_load(args->x, dtype, i) - offset;
      i_store_bytes(args->code + i, search_heap(v_flush(v_flush(x) * inverse), &tables));
    }
  }
}

static void quantize_blockwise_lanes(const bsh_quantize_blockwise_args *const args, const int64_t block_begin,
                                     const int64_t block_end) {
  BY_DTYPE(quantize_bytes, args->dtype, args, block_begin, block_end);
}

static void dequantize_blockwise_lanes(const bsh_dequantize_blockwise_args *const args, const int64_t begin,
                                       const int64_t end) {
  const int shift = __builtin_ctzll((uint64_t)args->blocksize);
  const mask all = m_all();
  for (int64_t i = begin; i < end;) {
    const int64_t block_end = min_i64(((i >> shift) + 1) << shift, end);
    const floats absmax = v_flush(v_set(args->absmax[i >> shift]));
    for (; i + LANES <= block_end; i += LANES) {
      floats value = v_flush(v_flush(v_gather(args->map, i_load_bytes(args->code + i), all)) * absmax);
      if (args->offset) value += v_set(args->offset[0]);
      v_store(args->out, args->dtype, i, value);
    }
    if (i < block_end) bsh_cpu_scalar.dequantize_blockwise(args, i, block_end);
    i = block_end;
  }
}

#endif
