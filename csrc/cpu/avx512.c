/* cpu/avx512.c - the CPU kernels with AVX-512 F, BW, VL, DQ and VBMI. Same order of sections as cpu/scalar.c;
 * decoding, products and optimizers are in files of their own. */
#include "cpu/avx512.h"

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
  if (args->dtype == BSH_F32) BY_FORMAT(quantize_blocks, args, block_begin, block_end, BSH_F32);
  else if (args->dtype == BSH_F16) BY_FORMAT(quantize_blocks, args, block_begin, block_end, BSH_F16);
  else BY_FORMAT(quantize_blocks, args, block_begin, block_end, BSH_BF16);
}

/* ---- quantize_blockwise, dequantize_blockwise ----------------------------------------------------------------- */

/* The search of encode_8bit (cpu/scalar.c) as a tree: entries of odd index by level, then thresholds around the even
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

const bsh_cpu_kernels bsh_cpu_avx512 = {
    .isa = "avx512",
    .quantize_4bit = quantize_4bit_avx512,
    .decode_4bit = bsh_cpu_avx512_decode_4bit,
    .quantize_blockwise = quantize_blockwise_avx512,
    .dequantize_blockwise = dequantize_blockwise_avx512,
    .linear_4bit = bsh_cpu_avx512_linear_4bit,
    .linear_4bit_dgrad = bsh_cpu_avx512_linear_4bit_dgrad,
    .to_f32 = convert_to_f32,
    .from_f32 = convert_from_f32,
    .optimizers = &bsh_cpu_avx512_optimizers,
    .calibration = &bsh_cpu_avx512_calibration,
    .int8 = &bsh_cpu_avx512_int8,
};
