/* cpu/decode.inc.h - dequantize_4bit in vectors of any width (cpu/isa/vectors.h). */
#ifndef BSH_CPU_DECODE_INC_H
#define BSH_CPU_DECODE_INC_H

#include "cpu/grid.h"

enum { SCALES = 64, HALVES = 16 / LANES }; /* scales decoded at a time; vectors of the 16 values of a block */

/* Scales of blocks [begin, begin + n), n <= SCALES: in place, or decoded into `buffer`. */
#ifndef load_scales
ALWAYS_INLINE const float *load_scales(const bsh_scales *const scales, const int64_t begin, const int64_t n,
                                       float buffer[SCALES]) {
  if (scales->absmax) return scales->absmax + begin;
  const floats offset = v_set(scales->offset[0]);
  const mask all = m_all();
  for (int64_t i = 0; i < n;) {
    const int64_t b = begin + i, second = b / BSH_NESTED_BLOCKSIZE;
    if (i + LANES > n || b % BSH_NESTED_BLOCKSIZE > BSH_NESTED_BLOCKSIZE - LANES) {
      buffer[i++] = block_scale(scales, b);
      continue;
    }
    const floats unit = v_gather(scales->absmax_map, i_load_bytes(scales->absmax_code + b), all);
    v_write(buffer + i, v_flush(v_flush(unit) * v_flush(v_set(scales->absmax2[second]))) + offset);
    i += LANES;
  }
  return buffer;
}
#endif

ALWAYS_INLINE void load_units(const bsh_format format, floats units[HALVES]) {
  for (int half = 0; half < HALVES; half++) units[half] = v_read(format_values(format) + half * LANES);
}

/* The 16 values of block `b`, whose scale this is, as fp32, rounded to dtype. */
ALWAYS_INLINE void scaled_values(const floats units[HALVES], const bsh_weight *const weight, const bsh_dtype dtype,
                                 const float scale, const int64_t b, floats values[HALVES]) {
  if (__builtin_expect(!ordinary_scale(scale), 0)) {
    float scalars[16];
    block_values(weight, dtype, b, scalars);
    for (int half = 0; half < HALVES; half++) values[half] = v_read(scalars + half * LANES);
    return;
  }
  for (int half = 0; half < HALVES; half++) values[half] = v_round_number(dtype, units[half] * v_set(scale));
}

/* Whether the second level of the scales is one number, for elements [begin, begin + n) that of the first block. */
ALWAYS_INLINE bool has_one_factor(const bsh_weight *const weight, const int shift, const int64_t begin,
                                  const int64_t n) {
  const float *const factors = weight->scales.absmax2;
  const int64_t last = ((begin + n - 1) >> shift) / BSH_NESTED_BLOCKSIZE;
  int other = 0;
  for (int64_t i = (begin >> shift) / BSH_NESTED_BLOCKSIZE; i <= last; i++) other |= !(factors[i] == factors[0]);
  return !other;
}

/* The values of a block whose scale has this byte, where has_one_factor: what block_values gives, of any scale. */
ALWAYS_INLINE void values_of_byte(const floats units[HALVES], const bsh_scales *const scales, const int byte,
                                  const bsh_dtype dtype, floats values[HALVES]) {
  const float scale = scales->absmax_map[byte] * scales->absmax2[0] + scales->offset[0];
  const floats nan = (floats)((ints){0} + 0x7FFFFFFF);
  for (int half = 0; half < HALVES; half++) {
    values[half] = v_round(dtype, units[half] * v_set(scale));
    if (dtype == BSH_F32) values[half] = v_choose(v_equal(values[half], values[half]), values[half], nan);
  }
}

/* What codes of a block are looked up in. */
typedef union {
  table_16bit words;
  table_f32 numbers;
} value_table;

ALWAYS_INLINE value_table make_value_table(const floats values[HALVES], const bsh_dtype dtype, const bool as_f32) {
  value_table table;
  if (as_f32 || dtype == BSH_F32) table.numbers = make_f32_table(values);
  else table.words = make_table(values, dtype);
  return table;
}

/* 32 elements; second: as in cpu/isa/vectors.h. */
ALWAYS_INLINE void decode32(const uint8_t *const packed, const value_table *const table,
                            const value_table *const second, char *const out, const bsh_dtype dtype, const bool as_f32,
                            const bool stream) {
  if (as_f32 || dtype == BSH_F32) decode32_f32(packed, &table->numbers, second ? &second->numbers : NULL, out, stream);
  else decode32_16bit(packed, &table->words, second ? &second->words : NULL, out, stream);
}

/* Elements [begin, end) of one block: 32 of them, or several times as many; begin is even. */
ALWAYS_INLINE void decode_block(const uint8_t *const packed, const int64_t begin, const int64_t end, char *out,
                                const floats values[HALVES], const bsh_dtype dtype, const bool as_f32,
                                const bool stream) {
  const int64_t size = as_f32 ? 4 : dtype_size(dtype);
  const value_table table = make_value_table(values, dtype, as_f32);
  for (int64_t i = begin; i < end; i += 32, out += 32 * size)
    decode32(packed + i / 2, &table, NULL, out, dtype, as_f32, stream);
}

/* Up to 31 elements [begin, end), of one block but where blocks have 16. */
static void decode_edge(const bsh_decode_run *const run, const int64_t begin, const int64_t end) {
  const bsh_weight *const weight = run->weight;
  const int64_t size = run->as_f32 ? 4 : dtype_size(run->dtype);
  floats units[HALVES], values[HALVES];
  load_units(weight->format, units);
  for (int64_t from = begin, to; from < end; from = to) {
    const int64_t b = from / weight->blocksize, first = from & -2;
    uint8_t packed[16] = {0};
    char decoded[32 * 4];
    to = min_i64(end, (b + 1) * weight->blocksize);
    scaled_values(units, weight, run->dtype, block_scale(&weight->scales, b), b, values);
    memcpy(packed, weight->packed + first / 2, (size_t)(to - first + 1) / 2);
    decode_block(packed, 0, 32, decoded, values, run->dtype, run->as_f32, false);
    memcpy((char *)run->out + (from - run->begin) * size, decoded + (from - first) * size,
           (size_t)((to - from) * size));
  }
}

/* Elements [i, i + 32) of two blocks of 16. */
ALWAYS_INLINE void decode_two_blocks(const bsh_weight *const weight, const int64_t i, char *const out,
                                     const floats units[HALVES], const float scales[2], const bsh_dtype dtype,
                                     const bool as_f32) {
  value_table tables[2];
  for (int b = 0; b < 2; b++) {
    floats values[HALVES];
    scaled_values(units, weight, dtype, scales[b], i / 16 + b, values);
    tables[b] = make_value_table(values, dtype, as_f32);
  }
  decode32(weight->packed + i / 2, &tables[0], &tables[1], out, dtype, as_f32, false);
}

/* Edges are apart: with a call in it, the loop over blocks loses its registers. */
ALWAYS_INLINE void decode_blocks(const bsh_decode_run *const run, const bool as_f32, const bsh_dtype dtype) {
  const bsh_weight *const weight = run->weight;
  const int shift = __builtin_ctzll((uint64_t)weight->blocksize);
  const bool stream = run->stream && (uintptr_t)run->out % sizeof(floats) == 0 && run->begin % 32 == 0;
  const int64_t size = as_f32 ? 4 : dtype_size(dtype), last = run->end & -32;
  int64_t i = min_i64((run->begin + 31) & -32, run->end);
  char *out = (char *)run->out + (i - run->begin) * size;
  floats units[HALVES];
  load_units(weight->format, units);
  if (run->begin < i) decode_edge(run, run->begin, i);
  while (i < last) {
    float buffer[SCALES];
    const int64_t block0 = i >> shift;
    const int64_t n_blocks = min_i64(SCALES, ((last - 1) >> shift) - block0 + 1);
    const float *const scales = load_scales(&weight->scales, block0, n_blocks, buffer);
    if (shift == 4) {
      for (int64_t b = 0; b < n_blocks; b += 2, i += 32, out += 32 * size)
        decode_two_blocks(weight, i, out, units, scales + b, dtype, as_f32);
      continue;
    }
    for (int64_t b = 0; b < n_blocks; b++) {
      const int64_t end = min_i64((block0 + b + 1) << shift, last);
      floats values[HALVES];
      scaled_values(units, weight, dtype, scales[b], block0 + b, values);
      if (stream) decode_block(weight->packed, i, end, out, values, dtype, as_f32, true);
      else decode_block(weight->packed, i, end, out, values, dtype, as_f32, false);
      out += (end - i) * size;
      i = end;
    }
  }
  if (i < run->end) decode_edge(run, i, run->end);
  if (stream) end_stream();
}

/* Rows that are short pieces far apart no hardware prefetcher follows. */
static void prefetch_row(const bsh_decode_run *const run, const int64_t row) {
  const bsh_weight *const weight = run->weight;
  const int64_t begin = run->begin + row * run->step, end = run->end + row * run->step;
  if (row >= run->rows || run->step == end - begin) return;
  for (int64_t byte = begin / 2; byte <= (end - 1) / 2; byte += 64) __builtin_prefetch(weight->packed + byte);
  const int64_t block = begin / weight->blocksize;
  if (weight->scales.absmax) __builtin_prefetch(weight->scales.absmax + block);
  else __builtin_prefetch(weight->scales.absmax_code + block);
}

/* Rows of whole blocks of 16 or 32, by a table for each value that a scale of one byte has. */
ALWAYS_INLINE void decode_by_tables(const bsh_decode_run *const run, const value_table *const tables, const bool as_f32,
                                    const bsh_dtype dtype) {
  const bsh_weight *const weight = run->weight;
  const int64_t n = run->end - run->begin;
  char *out = run->out;
  for (int64_t row = 0; row < run->rows; row++) {
    const int64_t begin = run->begin + row * run->step;
    const uint8_t *packed = weight->packed + begin / 2, *code = weight->scales.absmax_code + begin / weight->blocksize;
    prefetch_row(run, row + 8);
    for (int64_t i = 0; i < n; i += 32, packed += 16, out += 32 * (as_f32 ? 4 : dtype_size(dtype))) {
      const value_table *const first = &tables[*code++];
      if (weight->blocksize == 32) decode32(packed, first, NULL, out, dtype, as_f32, false);
      else decode32(packed, first, &tables[*code++], out, dtype, as_f32, false);
    }
  }
}

/* Whether that is exact, and shorter than to make a table for each block. */
static bool has_tables(const bsh_decode_run *const run) {
  enum { WORTH = 512 }; /* blocks */
  const bsh_weight *const weight = run->weight;
  const int64_t n = run->end - run->begin, last = run->begin + (run->rows - 1) * run->step + n;
  return weight->format == BSH_E2M1 && weight->scales.absmax == NULL && weight->blocksize <= 32 &&
         run->begin % 32 == 0 && run->step % 32 == 0 && n % 32 == 0 && run->rows * n >= WORTH * weight->blocksize &&
         has_one_factor(weight, __builtin_ctzll((uint64_t)weight->blocksize), run->begin, last - run->begin);
}

ALWAYS_INLINE void decode_rows(const bsh_decode_run *const run, const bool as_f32, const bsh_dtype dtype) {
  if (!run->stream && has_tables(run)) {
    floats units[HALVES], values[HALVES];
    value_table tables[256];
    load_units(BSH_E2M1, units);
    for (int byte = 0; byte < 256; byte++) {
      values_of_byte(units, &run->weight->scales, byte, dtype, values);
      tables[byte] = make_value_table(values, dtype, as_f32);
    }
    decode_by_tables(run, tables, as_f32, dtype);
    return;
  }
  bsh_decode_run one = *run;
  for (int64_t row = 0; row < run->rows; row++) {
    prefetch_row(run, row + 8);
    decode_blocks(&one, as_f32, dtype);
    one.out = (char *)one.out + (run->end - run->begin) * (as_f32 ? 4 : dtype_size(dtype));
    one.begin += run->step, one.end += run->step;
  }
}

static void decode_run(const bsh_decode_run *const run) {
  if (run->as_f32 || run->dtype == BSH_F32) BY_DTYPE(decode_rows, run->dtype, run, true);
  else BY_DTYPE(decode_rows, run->dtype, run, false);
}

#endif
