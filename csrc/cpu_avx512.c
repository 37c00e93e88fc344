/* cpu_avx512.c - the CPU kernels with AVX-512 F, BW, VL, DQ and VBMI. Same order of sections as cpu_scalar.c.
 *
 * Nibbles are spread by vpmultishiftqb (each byte of a 64-bit lane takes 8 bits from any bit offset), and the 16 values
 * of a block, already scaled and rounded, are looked up by vpermps or vpermw, which ignore the upper index bits. */
#include "cpu.h"

#if !defined(__AVX512VBMI__)
#error "compile this file with -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vbmi -mfma -mf16c"
#endif

#include <immintrin.h>

#include "cpu_grid.h"
#include "cpu_numerics.h"

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* Loops over sums that must stay in registers. */
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 64")
#endif

/* ---- conversions ---------------------------------------------------------------------------------------------- */

/* fp32 x 16 -> bf16 x 16, nearest even; NaN as in cpu_numerics.h. */
ALWAYS_INLINE __m256i to_bf16(const __m512 v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), nan, _mm512_set1_epi32(0x7FFF)));
}

ALWAYS_INLINE __m512 canonical_nan(const __m512 v) {
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_mask_mov_ps(v, nan, _mm512_castsi512_ps(_mm512_set1_epi32(0x7FFFFFFF)));
}

/* 16 elements from element i on, as fp32. Only the elements of `mask` are read. */
ALWAYS_INLINE __m512 load16(const void *const x, const bsh_dtype dtype, const int64_t i, const __mmask16 mask) {
  if (dtype == BSH_F32) return _mm512_maskz_loadu_ps(mask, (const float *)x + i);
  const __m256i words = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)x + i);
  if (dtype == BSH_F16) return _mm512_cvtph_ps(words);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

ALWAYS_INLINE void store16(void *const out, const bsh_dtype dtype, const int64_t i, const __mmask16 mask,
                           const __m512 v) {
  if (dtype == BSH_F32) _mm512_mask_storeu_ps((float *)out + i, mask, canonical_nan(v));
  else if (dtype == BSH_F16)
    _mm256_mask_storeu_epi16((uint16_t *)out + i, mask,
                             _mm512_cvtps_ph(canonical_nan(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  else _mm256_mask_storeu_epi16((uint16_t *)out + i, mask, to_bf16(v));
}

ALWAYS_INLINE __mmask16 first_lanes(const int64_t n) { return n >= 16 ? 0xFFFF : (__mmask16)((1u << n) - 1u); }

static void convert_to_f32(const void *const x, const bsh_dtype dtype, float *const out, const int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 mask = first_lanes(n - i);
    _mm512_mask_storeu_ps(out + i, mask, load16(x, dtype, i, mask));
  }
}

static void convert_from_f32(const float *const x, const bsh_dtype dtype, void *const out, const int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 mask = first_lanes(n - i);
    store16(out, dtype, i, mask, _mm512_maskz_loadu_ps(mask, x + i));
  }
}

/* Denormals become zero of the same sign. */
ALWAYS_INLINE __m512 flush(const __m512 v) {
  const __mmask16 denormal = _mm512_fpclass_ps_mask(v, 0x20);
  return _mm512_mask_and_ps(v, denormal, v, _mm512_set1_ps(-0.0f));
}

/* ---- quantize_4bit -------------------------------------------------------------------------------------------- */

/* Largest magnitude of n elements (n a multiple of 32) as a number without sign; NaN counts as more than infinity. */
ALWAYS_INLINE float largest_magnitude(const void *const x, const bsh_dtype dtype, const int64_t begin,
                                      const int64_t n) {
  __m512i most = _mm512_setzero_si512();
  if (dtype == BSH_F32) {
    for (int64_t i = 0; i < n; i += 16)
      most = _mm512_max_epu32(
          most, _mm512_and_si512(_mm512_loadu_si512((const float *)x + begin + i), _mm512_set1_epi32(0x7FFFFFFF)));
    return bits_float(_mm512_reduce_max_epu32(most));
  }
  for (int64_t i = 0; i < n; i += 32)
    most = _mm512_max_epu16(
        most, _mm512_and_si512(_mm512_loadu_si512((const uint16_t *)x + begin + i), _mm512_set1_epi16(0x7FFF)));
  const __m512i pairs = _mm512_max_epu16(most, _mm512_srli_epi32(most, 16));
  const uint16_t largest = (uint16_t)_mm512_reduce_max_epu32(_mm512_and_si512(pairs, _mm512_set1_epi32(0xFFFF)));
  return dtype == BSH_BF16 ? bf16_to_f32(largest) : f16_to_f32(largest);
}

typedef struct {
  __m512 threshold0, threshold1;
  __m512i codes0, codes1;
  __m512 scale, shift;
} grid_registers;

ALWAYS_INLINE grid_registers load_grid(const encode_grid *const grid) {
  return (grid_registers){_mm512_loadu_ps(grid->threshold), _mm512_loadu_ps(grid->threshold + 16),
                          _mm512_loadu_si512(grid->codes),  _mm512_loadu_si512(grid->codes + 16),
                          _mm512_set1_ps(grid->scale),      _mm512_set1_ps(grid->shift)};
}

/* Codes of 16 elements in the low nibbles of the lanes; the bits above are not defined. */
ALWAYS_INLINE __m512i encode16(const __m512 x, const __m512 inverse, const grid_registers *const grid,
                               const bsh_format format) {
  const __m512 v = _mm512_mul_ps(x, inverse);
  const __m512 key = format == BSH_NF4 ? v : _mm512_abs_ps(v);
  const __m512i cell = _mm512_cvttps_epi32(_mm512_fmadd_ps(key, grid->scale, grid->shift));
  const __m512 threshold = _mm512_permutex2var_ps(grid->threshold0, cell, grid->threshold1);
  const __m512i codes = _mm512_permutex2var_epi32(grid->codes0, cell, grid->codes1);
  const __mmask16 beyond = _mm512_cmp_ps_mask(key, threshold, _CMP_GT_OQ);
  const __m512i code = _mm512_mask_srli_epi32(codes, beyond, codes, 4);
  if (format == BSH_NF4) return code;
  const __m512 least = _mm512_set1_ps(-FLT_MIN); /* a product or an element that is flushed has no sign */
  const __mmask16 negative = _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(v, least, _CMP_LE_OQ), x, least, _CMP_LE_OQ);
  return _mm512_mask_or_epi32(code, negative, _mm512_and_si512(code, _mm512_set1_epi32(7)), _mm512_set1_epi32(8));
}

/* 32 elements -> 16 bytes. */
ALWAYS_INLINE void encode32(const void *const x, const bsh_dtype dtype, const int64_t begin, const __m512 inverse,
                            const grid_registers *const grid, const bsh_format format, uint8_t *const out) {
  const __m512i low = _mm512_set1_epi32(15);
  const __m512i a = _mm512_and_si512(encode16(load16(x, dtype, begin, 0xFFFF), inverse, grid, format), low);
  const __m512i b = _mm512_and_si512(encode16(load16(x, dtype, begin + 16, 0xFFFF), inverse, grid, format), low);
  const __m512i words = _mm512_packus_epi32(a, b); /* 128-bit lane l: a[4l .. 4l+3], b[4l .. 4l+3] */
  /* Pairs of words -> one byte in a 32-bit lane: even << 4 | odd. */
  const __m512i bytes = _mm512_madd_epi16(words, _mm512_set1_epi32(0x00010010));
  const __m128i packed = _mm512_cvtepi32_epi8(bytes); /* a0 a1 b0 b1 | a2 a3 b2 b3 | ... */
  const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  _mm_storeu_si128((__m128i *)out, _mm_shuffle_epi8(packed, order));
}

ALWAYS_INLINE void quantize_blocks(const bsh_quantize_4bit_args *const args, const int64_t block_begin,
                                   const int64_t block_end, const bsh_dtype dtype, const bsh_format format) {
  encode_grid tables;
  make_grid(format, &tables);
  const grid_registers grid = load_grid(&tables);
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
    const __m512 inverse = _mm512_set1_ps(reciprocal(absmax));
    for (int64_t i = 0; i < blocksize; i += 32)
      encode32(args->x, dtype, begin + i, inverse, &grid, format, args->packed + (begin + i) / 2);
  }
}

static void quantize_4bit_avx512(const bsh_quantize_4bit_args *const args, const int64_t block_begin,
                                 const int64_t block_end) {
  const bool nf4 = args->format == BSH_NF4;
  if (args->dtype == BSH_F32)
    nf4 ? quantize_blocks(args, block_begin, block_end, BSH_F32, BSH_NF4)
        : quantize_blocks(args, block_begin, block_end, BSH_F32, BSH_FP4);
  else if (args->dtype == BSH_F16)
    nf4 ? quantize_blocks(args, block_begin, block_end, BSH_F16, BSH_NF4)
        : quantize_blocks(args, block_begin, block_end, BSH_F16, BSH_FP4);
  else
    nf4 ? quantize_blocks(args, block_begin, block_end, BSH_BF16, BSH_NF4)
        : quantize_blocks(args, block_begin, block_end, BSH_BF16, BSH_FP4);
}

/* ---- dequantize_4bit ------------------------------------------------------------------------------------------ */

enum { SCALES = 64 }; /* scales decoded at a time */

/* Scales of blocks [begin, begin + n), n <= SCALES: in place, or decoded into `buffer`. */
ALWAYS_INLINE const float *load_scales(const bsh_scales *const scales, const int64_t begin, const int64_t n,
                                       float buffer[SCALES]) {
  if (scales->absmax) return scales->absmax + begin;
  const __m512 offset = _mm512_set1_ps(scales->offset[0]);
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 mask = first_lanes(n - i);
    const __m512i code = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, scales->absmax_code + begin + i));
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const int64_t first = (begin + i) / BSH_NESTED_BLOCKSIZE;
    const int within = (int)((begin + i) % BSH_NESTED_BLOCKSIZE);
    const __mmask16 second = _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(BSH_NESTED_BLOCKSIZE - within)) & mask;
    __m512 absmax2 = _mm512_set1_ps(scales->absmax2[first]);
    if (second) absmax2 = _mm512_mask_mov_ps(absmax2, second, _mm512_set1_ps(scales->absmax2[first + 1]));
    const __m512 unit = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), mask, code, scales->absmax_map, 4);
    _mm512_mask_storeu_ps(buffer + i, mask, _mm512_add_ps(flush(_mm512_mul_ps(flush(unit), flush(absmax2))), offset));
  }
  return buffer;
}

/* The 16 values of a block as fp32, rounded to dtype. */
ALWAYS_INLINE __m512 values_f32(const __m512 units, const bsh_format format, const bsh_dtype dtype, const float scale) {
  if (__builtin_expect(!ordinary_scale(scale), 0)) {
    float values[16];
    block_values(format, dtype, scale, values);
    return _mm512_loadu_ps(values);
  }
  const __m512 product = _mm512_mul_ps(units, _mm512_set1_ps(scale));
  if (dtype == BSH_F32) return product;
  if (dtype == BSH_F16) return _mm512_cvtph_ps(_mm512_cvtps_ph(product, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  const __m512i bits = _mm512_castps_si512(product);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  return _mm512_castsi512_ps(_mm512_and_si512(rounded, _mm512_set1_epi32((int)0xFFFF0000)));
}

/* The same as 16-bit patterns, twice: vpermw uses five index bits, of which the fifth is not ours. */
ALWAYS_INLINE __m512i values_16bit(const __m512 units, const bsh_format format, const bsh_dtype dtype,
                                   const float scale) {
  const __m512 values = values_f32(units, format, dtype, scale);
  const __m256i words = dtype == BSH_F16 ? _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
                                         : _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(values), 16));
  return _mm512_broadcast_i64x4(words);
}

/* Index bytes for 16 values from 8 bytes; for 32 values (16-bit lanes) from 16 bytes. High nibble first. */
ALWAYS_INLINE __m512i spread8(const uint8_t *const packed) {
  const __m512i bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i *)packed));
  return _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x0000000000000004), bytes);
}

ALWAYS_INLINE __m512i spread16(const uint8_t *const packed) {
  const __m512i words = _mm512_cvtepu16_epi64(_mm_loadu_si128((const __m128i *)packed));
  return _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x0008000C00000004), words);
}

ALWAYS_INLINE void store_zmm(void *const out, const __m512i v, const bool stream) {
  if (stream) _mm512_stream_si512(out, v);
  else _mm512_storeu_si512(out, v);
}

/* Elements [begin, end) of one block; begin is even unless the run starts within a byte. */
ALWAYS_INLINE void decode_block(const bsh_decode_run *const run, const int64_t begin, const int64_t end,
                                const __m512 units, const float scale, const bsh_dtype dtype, const bool wide,
                                const bool stream) {
  const uint8_t *const packed = run->weight->packed;
  const int64_t size = wide ? 4 : dtype_size(dtype);
  char *out = (char *)run->out + (begin - run->begin) * size;
  int64_t i = begin;
  if (wide || dtype == BSH_F32) {
    const __m512 values = values_f32(units, run->weight->format, dtype, scale);
    for (; i % 2 == 0 && i + 16 <= end; i += 16, out += 64)
      store_zmm(out, _mm512_castps_si512(_mm512_permutexvar_ps(spread8(packed + i / 2), values)), stream);
  } else {
    const __m512i values = values_16bit(units, run->weight->format, dtype, scale);
    for (; i % 2 == 0 && i + 32 <= end; i += 32, out += 64)
      store_zmm(out, _mm512_permutexvar_epi16(spread16(packed + i / 2), values), stream);
  }
  if (i == end) return;
  float values[16];
  block_values(run->weight->format, dtype, scale, values);
  for (int64_t j = 0; i + j < end; j++) store_f32(out, wide ? BSH_F32 : dtype, j, values[packed_code(packed, i + j)]);
}

ALWAYS_INLINE void decode_blocks(const bsh_decode_run *const run, const bsh_dtype dtype, const bool wide) {
  const bsh_weight *const weight = run->weight;
  const __m512 units = _mm512_loadu_ps(format_values(weight->format));
  const int shift = __builtin_ctzll((uint64_t)weight->blocksize);
  const bool stream = run->stream && (uintptr_t)run->out % 64 == 0 && run->begin % 32 == 0;
  int64_t i = run->begin;
  while (i < run->end && i % 2) { /* a run that starts within a byte: shift by one element, then again from there */
    float values[16];
    block_values(weight->format, dtype, block_scale(&weight->scales, i >> shift), values);
    store_f32(run->out, wide ? BSH_F32 : dtype, 0, values[packed_code(weight->packed, i)]);
    i++;
  }
  while (i < run->end) {
    float buffer[SCALES];
    const int64_t block0 = i >> shift;
    const int64_t n_blocks = min_i64(SCALES, ((run->end - 1) >> shift) - block0 + 1);
    const float *const scales = load_scales(&weight->scales, block0, n_blocks, buffer);
    for (int64_t b = 0; b < n_blocks; b++) {
      const int64_t end = min_i64((block0 + b + 1) << shift, run->end);
      if (stream) decode_block(run, i, end, units, scales[b], dtype, wide, true);
      else decode_block(run, i, end, units, scales[b], dtype, wide, false);
      i = end;
    }
  }
  if (stream) _mm_sfence();
}

static void decode_run(const bsh_decode_run *const run) {
  if (run->dtype == BSH_F32) decode_blocks(run, BSH_F32, true);
  else if (run->dtype == BSH_F16) run->wide ? decode_blocks(run, BSH_F16, true) : decode_blocks(run, BSH_F16, false);
  else run->wide ? decode_blocks(run, BSH_BF16, true) : decode_blocks(run, BSH_BF16, false);
}

/* ---- quantize_blockwise, dequantize_blockwise ----------------------------------------------------------------- */

/* The search of encode_8bit (cpu_scalar.c) as a tree: entries of odd index by level, then thresholds around the even
 * entry that is left. Level l has 2^l nodes; levels 0 to 4 are numbered from 1 as in a heap. */
typedef struct {
  float upper_levels[32], level5[32], level6[64];
  float threshold_below[128], threshold_above[128]; /* around even entry 2q */
} search_tables;

static void make_search(const float *const map, search_tables *const t) {
  t->upper_levels[0] = 0;
  for (int level = 0; level < 7; level++)
    for (int i = 0; i < 1 << level; i++) {
      const float entry = map[((2 * i + 1) << (7 - level)) - 1];
      if (level < 5) t->upper_levels[(1 << level) + i] = entry;
      if (level == 5) t->level5[i] = entry;
      if (level == 6) t->level6[i] = entry;
    }
  for (int q = 0; q < 128; q++) {
    t->threshold_below[q] = q ? flush_denormal((map[2 * q] + map[2 * q - 1]) * 0.5f) : -INFINITY;
    t->threshold_above[q] = flush_denormal((map[2 * q] + map[2 * q + 1]) * 0.5f);
  }
}

ALWAYS_INLINE __m512i descend(const __m512i node, const __m512 v, const __m512 entry) {
  const __m512i left = _mm512_add_epi32(node, node);
  return _mm512_mask_add_epi32(left, _mm512_cmp_ps_mask(v, entry, _CMP_GT_OQ), left, _mm512_set1_epi32(1));
}

ALWAYS_INLINE __m512 entry32(const float *const table, const __m512i index) {
  return _mm512_permutex2var_ps(_mm512_loadu_ps(table), index, _mm512_loadu_ps(table + 16));
}

/* Codes of 16 values. */
ALWAYS_INLINE __m128i search16(const __m512 v, const search_tables *const t) {
  __m512i node = _mm512_set1_epi32(1);
  for (int level = 0; level < 5; level++) node = descend(node, v, entry32(t->upper_levels, node));
  node = descend(node, v, entry32(t->level5, node));
  const __mmask16 high = _mm512_test_epi32_mask(node, _mm512_set1_epi32(32));
  node = descend(node, v, _mm512_mask_blend_ps(high, entry32(t->level6, node), entry32(t->level6 + 32, node)));
  const __m512i q = _mm512_and_si512(node, _mm512_set1_epi32(127));
  const __mmask16 below = _mm512_cmp_ps_mask(v, _mm512_i32gather_ps(q, t->threshold_below, 4), _CMP_LT_OQ);
  const __mmask16 above = _mm512_cmp_ps_mask(v, _mm512_i32gather_ps(q, t->threshold_above, 4), _CMP_GT_OQ);
  const __m512i one = _mm512_set1_epi32(1);
  const __m512i even = _mm512_add_epi32(q, q);
  return _mm512_cvtepi32_epi8(_mm512_mask_add_epi32(_mm512_mask_sub_epi32(even, below, even, one), above, even, one));
}

ALWAYS_INLINE void quantize_bytes(const bsh_quantize_blockwise_args *const args, const int64_t block_begin,
                                  const int64_t block_end, const bsh_dtype dtype) {
  search_tables tables;
  make_search(args->map, &tables);
  const __m512 offset = _mm512_set1_ps(args->offset ? args->offset[0] : 0.0f);
  for (int64_t b = block_begin; b < block_end; b++) {
    const int64_t begin = b * args->blocksize;
    const bool full = begin + args->blocksize <= args->n;
    __m512i most = _mm512_setzero_si512();
    for (int64_t i = 0; full && i < args->blocksize; i += 16) {
      const __m512 x = _mm512_sub_ps(load16(args->x, dtype, begin + i, 0xFFFF), offset);
      most = _mm512_max_epu32(most, _mm512_castps_si512(_mm512_abs_ps(x)));
    }
    const float absmax = full ? bits_float(_mm512_reduce_max_epu32(most)) : NAN;
    if (!ordinary_absmax(absmax)) {
      bsh_cpu_scalar.quantize_blockwise(args, b, b + 1);
      continue;
    }
    args->absmax[b] = absmax;
    const __m512 inverse = _mm512_set1_ps(reciprocal(absmax));
    for (int64_t i = 0; i < args->blocksize; i += 16) {
      const __m512 x = _mm512_sub_ps(load16(args->x, dtype, begin + i, 0xFFFF), offset);
      const __m512 v = flush(_mm512_mul_ps(flush(x), inverse));
      _mm_storeu_si128((__m128i *)(args->code + begin + i), search16(v, &tables));
    }
  }
}

static void quantize_blockwise_avx512(const bsh_quantize_blockwise_args *const args, const int64_t block_begin,
                                      const int64_t block_end) {
  if (args->dtype == BSH_F32) quantize_bytes(args, block_begin, block_end, BSH_F32);
  else if (args->dtype == BSH_F16) quantize_bytes(args, block_begin, block_end, BSH_F16);
  else quantize_bytes(args, block_begin, block_end, BSH_BF16);
}

static void dequantize_blockwise_avx512(const bsh_dequantize_blockwise_args *const args, const int64_t begin,
                                        const int64_t end) {
  const int shift = __builtin_ctzll((uint64_t)args->blocksize);
  for (int64_t i = begin; i < end;) {
    const int64_t block_end = min_i64(((i >> shift) + 1) << shift, end);
    const __m512 absmax = flush(_mm512_set1_ps(args->absmax[i >> shift]));
    for (; i < block_end; i += 16) {
      const __mmask16 mask = first_lanes(block_end - i);
      const __m512i code = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, args->code + i));
      const __m512 unit = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), mask, code, args->map, 4);
      __m512 value = flush(_mm512_mul_ps(flush(unit), absmax));
      if (args->offset) value = _mm512_add_ps(value, _mm512_set1_ps(args->offset[0]));
      store16(args->out, args->dtype, i, mask, value);
    }
    i = block_end;
  }
}

/* ---- linear_4bit, linear_4bit_dgrad --------------------------------------------------------------------------- */

static float dot(const float *const a, const float *const b, const int64_t n) {
  __m512 sums[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
  int64_t i = 0;
  for (; i + 64 <= n; i += 64)
    for (int j = 0; j < 4; j++)
      sums[j] = _mm512_fmadd_ps(_mm512_loadu_ps(a + i + 16 * j), _mm512_loadu_ps(b + i + 16 * j), sums[j]);
  for (; i < n; i += 16) {
    const __mmask16 mask = first_lanes(n - i);
    sums[0] = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(mask, a + i), _mm512_maskz_loadu_ps(mask, b + i), sums[0]);
  }
  return _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3])));
}

static void add_scaled(float *const out, const float *const a, const float scale, const int64_t n) {
  const __m512 scales = _mm512_set1_ps(scale);
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 mask = first_lanes(n - i);
    const __m512 sum =
        _mm512_fmadd_ps(_mm512_maskz_loadu_ps(mask, a + i), scales, _mm512_maskz_loadu_ps(mask, out + i));
    _mm512_mask_storeu_ps(out + i, mask, sum);
  }
}

#include "cpu_tiles.h"

/* The fast path: K a multiple of 64 and blocks of at least 64, so that 64 elements of a row share one scale and 32
 * bytes. 32 bytes are 16 lanes of 4 nibbles; nibble j of lane l is element 4 l + NIBBLE_ELEMENT[j]. x is brought into
 * that order once ("permuted"), instead of every row of W into the order of x. */
enum { PREFETCH_BYTES = 2048 }; /* ahead in the packed weight: hardware prefetchers stop at the end of a page */
enum { GROUP = 64, X_BYTES = 32 << 10 }; /* a chunk of x stays in the first-level cache */

ALWAYS_INLINE bool has_whole_groups(const bsh_weight *const weight, const int64_t K) {
  return K % GROUP == 0 && weight->blocksize >= GROUP;
}

/* fp32 vectors of a group: vector j holds the elements of nibble j. */
ALWAYS_INLINE void decode_group(const uint8_t *const packed, const __m512 values, __m512 w[4]) {
  const __m512i nibbles = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)packed));
  w[0] = _mm512_permutexvar_ps(nibbles, values);
  w[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(nibbles, 4), values);
  w[2] = _mm512_permutexvar_ps(_mm512_srli_epi32(nibbles, 8), values);
  w[3] = _mm512_permutexvar_ps(_mm512_srli_epi32(nibbles, 12), values);
}

static const int nibble_element[4] = {1, 0, 3, 2};

/* Columns [k0, k0 + n) of x, M rows -> out[group][m][nibble][lane]. */
static void permute_x(const bsh_linear_4bit_args *const args, const int64_t k0, const int64_t n, float *const out) {
  float natural[GROUP];
  const int64_t row_bytes = args->ldx * dtype_size(args->dtype);
  for (int64_t m = 0; m < args->M; m++)
    for (int64_t group = 0; group < n / GROUP; group++) {
      const char *const x = (const char *)args->x + m * row_bytes;
      convert_to_f32(x + (k0 + group * GROUP) * dtype_size(args->dtype), args->dtype, natural, GROUP);
      float *const to = out + (group * args->M + m) * GROUP;
      for (int j = 0; j < 4; j++)
        for (int lane = 0; lane < 16; lane++) to[16 * j + lane] = natural[4 * lane + nibble_element[j]];
    }
}

/* Adds the sum of the lanes of v[m] to sums[m], m < 16: a transposition by halves instead of 16 reductions. */
ALWAYS_INLINE void add_lane_sums(const __m512 v[16], const __mmask16 mask, float *const sums) {
  __m512 pairs[8], fours[4], halves[2];
  UNROLL for (int i = 0; i < 8; i++) pairs[i] =
      _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
  UNROLL for (int i = 0; i < 4; i++) fours[i] = _mm512_add_ps(_mm512_shuffle_ps(pairs[2 * i], pairs[2 * i + 1], 0x44),
                                                              _mm512_shuffle_ps(pairs[2 * i], pairs[2 * i + 1], 0xEE));
  UNROLL for (int i = 0; i < 2; i++) halves[i] =
      _mm512_add_ps(_mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0x88),
                    _mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0xDD));
  const __m512 all =
      _mm512_add_ps(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88), _mm512_shuffle_f32x4(halves[0], halves[1], 0xDD));
  _mm512_mask_storeu_ps(sums, mask, _mm512_add_ps(_mm512_maskz_loadu_ps(mask, sums), all));
}

/* One row of W times M rows of x over n columns: adds to sums[m]. */
ALWAYS_INLINE void multiply_row(const bsh_linear_4bit_args *const args, const __m512 units, const int64_t begin,
                                const int64_t n, const float *x, float *const sums, const int M) {
  enum { LANES = 16 };
  const int ways = M <= 4 ? 4 : M <= 8 ? 2 : 1; /* independent sums per row of x, to hide the latency of an FMA */
  const int shift = __builtin_ctzll((uint64_t)args->weight.blocksize);
  const uint8_t *packed = args->weight.packed + begin / 2;
  __m512 accumulators[BSH_CPU_SMALL_M * 4];
  UNROLL for (int i = 0; i < M * ways; i++) accumulators[i] = _mm512_setzero_ps();
  for (int64_t i = 0; i < n;) {
    float buffer[SCALES];
    const int64_t n_now = min_i64(n - i, SCALES * GROUP);
    const int64_t block0 = (begin + i) >> shift;
    const float *const scales =
        load_scales(&args->weight.scales, block0, ((begin + i + n_now - 1) >> shift) - block0 + 1, buffer);
    for (const int64_t end = i + n_now; i < end; i += GROUP, packed += GROUP / 2, x += M * GROUP) {
      const float scale = scales[((begin + i) >> shift) - block0];
      const __m512 values = values_f32(units, args->weight.format, args->dtype, scale);
      __m512 w[4];
      decode_group(packed, values, w);
      UNROLL for (int j = 0; j < 4; j++) UNROLL for (int m = 0; m < M; m++) {
        __m512 *const sum = &accumulators[m * ways + j % ways];
        *sum = _mm512_fmadd_ps(w[j], _mm512_loadu_ps(x + m * GROUP + j * LANES), *sum);
      }
    }
  }
  __m512 totals[16];
  UNROLL for (int m = 0; m < 16; m++) {
    totals[m] = m < M ? accumulators[m * ways] : _mm512_setzero_ps();
    UNROLL for (int i = 1; m < M && i < ways; i++) totals[m] = _mm512_add_ps(totals[m], accumulators[m * ways + i]);
  }
  add_lane_sums(totals, first_lanes(M), sums);
}

/* X(M) for every M of a small product: the kernels below are compiled once for each. */
#define EACH_M(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15) X(16)
_Static_assert(BSH_CPU_SMALL_M == 16, "EACH_M lists every small M");

static void multiply_row_any(const bsh_linear_4bit_args *const args, const __m512 units, const int64_t begin,
                             const int64_t n, const float *const x, float *const sums) {
  switch (args->M) {
#define CASE(M)                                                                                                        \
  case M:                                                                                                              \
    multiply_row(args, units, begin, n, x, sums, M);                                                                   \
    break;
    EACH_M(CASE)
#undef CASE
  }
}

/* bf16 on a CPU with VDPBF16PS: products of bf16 pairs, exact in fp32, with x in its own order. */
#define BF16_TARGET __attribute__((target("avx512bf16")))

/* Columns [k0, k0 + n) of x, M rows -> out[group][m][GROUP]: rows of x a power of two apart would share cache sets. */
static void gather_x(const bsh_linear_4bit_args *const args, const int64_t k0, const int64_t n, uint16_t *const out) {
  for (int64_t m = 0; m < args->M; m++)
    for (int64_t group = 0; group < n / GROUP; group++)
      memcpy(out + (group * args->M + m) * GROUP, (const uint16_t *)args->x + m * args->ldx + k0 + group * GROUP,
             GROUP * sizeof(uint16_t));
}

ALWAYS_INLINE BF16_TARGET __m512i values_bf16(const __m512 units, const bsh_format format, const float scale) {
  if (__builtin_expect(!ordinary_scale(scale), 0)) return values_16bit(units, format, BSH_BF16, scale);
  const __m512 values = _mm512_mul_ps(units, _mm512_set1_ps(scale));
  return (__m512i)_mm512_cvtne2ps_pbh(values, values);
}

/* As multiply_row. */
ALWAYS_INLINE BF16_TARGET void multiply_row_bf16(const bsh_linear_4bit_args *const args, const __m512 units,
                                                 const int64_t begin, const int64_t n, const uint16_t *x,
                                                 float *const sums, const int M) {
  const int ways = M <= 8 ? 2 : 1;
  const int shift = __builtin_ctzll((uint64_t)args->weight.blocksize);
  const uint8_t *const packed = args->weight.packed + begin / 2;
  __m512 accumulators[BSH_CPU_SMALL_M * 2];
  UNROLL for (int i = 0; i < M * ways; i++) accumulators[i] = _mm512_setzero_ps();
  for (int64_t i = 0; i < n;) {
    float buffer[SCALES];
    const int64_t n_now = min_i64(n - i, SCALES * GROUP);
    const int64_t block0 = (begin + i) >> shift;
    const float *const scales =
        load_scales(&args->weight.scales, block0, ((begin + i + n_now - 1) >> shift) - block0 + 1, buffer);
    for (const int64_t end = i + n_now; i < end; i += GROUP, x += M * GROUP) {
      _mm_prefetch((const char *)packed + i / 2 + PREFETCH_BYTES, _MM_HINT_T0);
      const __m512i values = values_bf16(units, args->weight.format, scales[((begin + i) >> shift) - block0]);
      const __m512i first = _mm512_permutexvar_epi16(spread16(packed + i / 2), values);
      const __m512i second = _mm512_permutexvar_epi16(spread16(packed + i / 2 + 16), values);
      UNROLL for (int m = 0; m < M; m++) {
        const uint16_t *const row = x + m * GROUP;
        __m512 *const sum = &accumulators[m * ways];
        sum[0] = _mm512_dpbf16_ps(sum[0], (__m512bh)first, (__m512bh)_mm512_loadu_si512(row));
        sum[ways - 1] = _mm512_dpbf16_ps(sum[ways - 1], (__m512bh)second, (__m512bh)_mm512_loadu_si512(row + 32));
      }
    }
  }
  __m512 totals[16];
  UNROLL for (int m = 0; m < 16; m++) {
    totals[m] = m < M ? accumulators[m * ways] : _mm512_setzero_ps();
    if (m < M && ways == 2) totals[m] = _mm512_add_ps(totals[m], accumulators[m * ways + 1]);
  }
  add_lane_sums(totals, first_lanes(M), sums);
}

BF16_TARGET static void multiply_row_bf16_any(const bsh_linear_4bit_args *const args, const __m512 units,
                                              const int64_t begin, const int64_t n, const uint16_t *const x,
                                              float *const sums) {
  switch (args->M) {
#define CASE(M)                                                                                                        \
  case M:                                                                                                              \
    multiply_row_bf16(args, units, begin, n, x, sums, M);                                                              \
    break;
    EACH_M(CASE)
#undef CASE
  }
}

static void linear_by_groups(const bsh_linear_4bit_args *const args, const int64_t row_begin, const int64_t row_end) {
  union {
    float f32[X_BYTES / 4];
    uint16_t bf16[X_BYTES / 2];
  } x __attribute__((aligned(64)));
  float sums[TILE_ROWS * BSH_CPU_SMALL_M];
  const __m512 units = _mm512_loadu_ps(format_values(args->weight.format));
  const bool as_bf16 = args->dtype == BSH_BF16 && bsh_cpu_fast_bf16();
  const int64_t step = X_BYTES / (as_bf16 ? 2 : 4) / args->M / GROUP * GROUP;
  int64_t loaded = -1;
  for (int64_t row0 = row_begin; row0 < row_end; row0 += TILE_ROWS) {
    const int64_t n_rows = min_i64(TILE_ROWS, row_end - row0);
    memset(sums, 0, sizeof sums);
    for (int64_t k0 = 0; k0 < args->K; k0 += step) {
      const int64_t n = min_i64(step, args->K - k0);
      if (loaded != k0) as_bf16 ? gather_x(args, k0, n, x.bf16) : permute_x(args, k0, n, x.f32);
      loaded = k0;
      for (int64_t r = 0; r < n_rows; r++) {
        const int64_t begin = (row0 + r) * args->K + k0;
        if (as_bf16) multiply_row_bf16_any(args, units, begin, n, x.bf16, sums + r * args->M);
        else multiply_row_any(args, units, begin, n, x.f32, sums + r * args->M);
      }
    }
    store_rows(args, row0, n_rows, sums);
  }
}

static void linear_4bit_avx512(const bsh_linear_4bit_args *const args, const int64_t row_begin, const int64_t row_end) {
  if (has_whole_groups(&args->weight, args->K)) linear_by_groups(args, row_begin, row_end);
  else linear_by_tiles(args, row_begin, row_end);
}

enum { DGRAD_ROWS = 4, DGRAD_FLOATS = 8192 };

/* Rows [row, row + n_rows) of W, columns [k0, k0 + n), times dy, into sums[group][m][nibble][lane]. */
ALWAYS_INLINE void add_rows(const bsh_linear_4bit_dgrad_args *const args, const int64_t row, const int n_rows,
                            const int64_t k0, const int64_t n, float *sums) {
  float dy[DGRAD_ROWS][BSH_CPU_SMALL_M], buffers[DGRAD_ROWS][SCALES];
  const float *scales[DGRAD_ROWS];
  int64_t block0[DGRAD_ROWS];
  const __m512 units = _mm512_loadu_ps(format_values(args->weight.format));
  const int shift = __builtin_ctzll((uint64_t)args->weight.blocksize);
  for (int r = 0; r < n_rows; r++) {
    for (int64_t m = 0; m < args->M; m++) dy[r][m] = load_f32(args->dy, args->dtype, m * args->lddy + row + r);
    const int64_t begin = (row + r) * args->K + k0;
    block0[r] = begin >> shift;
    scales[r] = load_scales(&args->weight.scales, block0[r], ((begin + n - 1) >> shift) - block0[r] + 1, buffers[r]);
  }
  for (int64_t k = k0; k < k0 + n; k += GROUP) {
    __m512 w[DGRAD_ROWS][4];
    for (int r = 0; r < n_rows; r++) {
      const int64_t begin = (row + r) * args->K + k;
      const float scale = scales[r][(begin >> shift) - block0[r]];
      decode_group(args->weight.packed + begin / 2, values_f32(units, args->weight.format, args->dtype, scale), w[r]);
    }
    for (int64_t m = 0; m < args->M; m++, sums += GROUP)
      for (int j = 0; j < 4; j++) {
        __m512 sum = _mm512_loadu_ps(sums + 16 * j);
        for (int r = 0; r < n_rows; r++) sum = _mm512_fmadd_ps(w[r][j], _mm512_set1_ps(dy[r][m]), sum);
        _mm512_storeu_ps(sums + 16 * j, sum);
      }
  }
}

static void store_dx(const bsh_linear_4bit_dgrad_args *const args, const int64_t k0, const int64_t n,
                     const float *const sums) {
  float natural[GROUP];
  for (int64_t group = 0; group < n / GROUP; group++)
    for (int64_t m = 0; m < args->M; m++) {
      const float *const from = sums + (group * args->M + m) * GROUP;
      for (int j = 0; j < 4; j++)
        for (int lane = 0; lane < 16; lane++) natural[4 * lane + nibble_element[j]] = from[16 * j + lane];
      char *const row = (char *)args->dx + m * args->lddx * dtype_size(args->dtype);
      convert_from_f32(natural, args->dtype, row + (k0 + group * GROUP) * dtype_size(args->dtype), GROUP);
    }
}

static void linear_4bit_dgrad_avx512(const bsh_linear_4bit_dgrad_args *const args, const int64_t column_begin,
                                     const int64_t column_end) {
  if (!has_whole_groups(&args->weight, args->K)) {
    dgrad_by_tiles(args, column_begin, column_end);
    return;
  }
  float sums[DGRAD_FLOATS] __attribute__((aligned(64)));
  const int64_t step = min_i64(DGRAD_FLOATS / args->M / GROUP * GROUP, SCALES * GROUP - GROUP);
  for (int64_t k0 = column_begin; k0 < column_end; k0 += step) {
    const int64_t n = min_i64(step, column_end - k0);
    memset(sums, 0, sizeof sums);
    int64_t row = 0;
    for (; row + DGRAD_ROWS <= args->N; row += DGRAD_ROWS) add_rows(args, row, DGRAD_ROWS, k0, n, sums);
    for (; row < args->N; row++) add_rows(args, row, 1, k0, n, sums);
    store_dx(args, k0, n, sums);
  }
}

const bsh_cpu_kernels bsh_cpu_avx512 = {
    .isa = "avx512",
    .quantize_4bit = quantize_4bit_avx512,
    .decode_4bit = decode_run,
    .quantize_blockwise = quantize_blockwise_avx512,
    .dequantize_blockwise = dequantize_blockwise_avx512,
    .linear_4bit = linear_4bit_avx512,
    .linear_4bit_dgrad = linear_4bit_dgrad_avx512,
    .to_f32 = convert_to_f32,
    .from_f32 = convert_from_f32,
};
