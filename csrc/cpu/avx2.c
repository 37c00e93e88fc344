/* cpu/avx2.c - the CPU kernels with AVX2, FMA and F16C. Same order of sections as cpu/scalar.c.
 *
 * The 16 values of a block, already scaled and rounded, are looked up by vpshufb (two planes of bytes) for 16-bit
 * results and by vpermps (two halves) for fp32. */
#include "cpu/avx2.h"

/* ---- conversions ---------------------------------------------------------------------------------------------- */

static void convert_to_f32(const void *const x, const bsh_dtype dtype, float *const out, const int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, load8(x, dtype, i));
  for (; i < n; i++) out[i] = load_f32(x, dtype, i);
}

static void convert_from_f32(const float *const x, const bsh_dtype dtype, void *const out, const int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) store8(out, dtype, i, _mm256_loadu_ps(x + i));
  for (; i < n; i++) store_f32(out, dtype, i, x[i]);
}

/* ---- quantize_4bit -------------------------------------------------------------------------------------------- */

/* Largest magnitude of n elements (n a multiple of 16) as a number without sign; NaN counts as more than infinity. */
ALWAYS_INLINE float largest_magnitude(const void *const x, const bsh_dtype dtype, const int64_t begin,
                                      const int64_t n) {
  __m256i most = _mm256_setzero_si256();
  if (dtype == BSH_F32) {
    for (int64_t i = 0; i < n; i += 8) {
      const __m256i bits = _mm256_loadu_si256((const __m256i *)((const float *)x + begin + i));
      most = _mm256_max_epu32(most, _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF)));
    }
    return bits_float(reduce_max(most));
  }
  for (int64_t i = 0; i < n; i += 16) {
    const __m256i bits = _mm256_loadu_si256((const __m256i *)((const uint16_t *)x + begin + i));
    most = _mm256_max_epu16(most, _mm256_and_si256(bits, _mm256_set1_epi16(0x7FFF)));
  }
  const __m256i pairs = _mm256_max_epu16(most, _mm256_srli_epi32(most, 16));
  const uint16_t largest = (uint16_t)reduce_max(_mm256_and_si256(pairs, _mm256_set1_epi32(0xFFFF)));
  return dtype == BSH_BF16 ? bf16_to_f32(largest) : f16_to_f32(largest);
}

/* Number of thresholds below each lane. */
ALWAYS_INLINE __m256i count_below(const __m256 v, const uint32_t *const thresholds, const int n) {
  __m256i count = _mm256_setzero_si256();
  for (int i = 0; i < n; i++)
    count = _mm256_sub_epi32(
        count, _mm256_castps_si256(_mm256_cmp_ps(v, _mm256_set1_ps(bits_float(thresholds[i])), _CMP_GT_OQ)));
  return count;
}

ALWAYS_INLINE __m256i encode8(const __m256 x, const __m256 inverse, const bsh_format format) {
  static const uint32_t nf4[15] = {BSH_NF4_THRESHOLD_BITS};
  static const uint32_t fp4[7] = {BSH_FP4_THRESHOLD_BITS};
  const __m256 v = _mm256_mul_ps(x, inverse);
  if (format == BSH_NF4) return count_below(v, nf4, 15);
  const __m256i rank = count_below(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), v), fp4, 7);
  const __m256i code = _mm256_permutevar8x32_epi32(_mm256_setr_epi32(BSH_FP4_ORDER), rank);
  const __m256 least = _mm256_set1_ps(-FLT_MIN); /* a product or an element that is flushed has no sign */
  const __m256 negative = _mm256_and_ps(_mm256_cmp_ps(v, least, _CMP_LE_OQ), _mm256_cmp_ps(x, least, _CMP_LE_OQ));
  return _mm256_or_si256(code, _mm256_and_si256(_mm256_castps_si256(negative), _mm256_set1_epi32(8)));
}

/* 32 elements -> 16 bytes. */
ALWAYS_INLINE void encode32(const void *const x, const bsh_dtype dtype, const int64_t begin, const __m256 inverse,
                            const bsh_format format, uint8_t *const out) {
  const __m256i a = encode8(load8(x, dtype, begin), inverse, format);
  const __m256i b = encode8(load8(x, dtype, begin + 8), inverse, format);
  const __m256i c = encode8(load8(x, dtype, begin + 16), inverse, format);
  const __m256i d = encode8(load8(x, dtype, begin + 24), inverse, format);
  /* 128-bit lane l: four codes each of a, b, c, d from 4l on; then pairs even << 4 | odd; then the lanes together. */
  const __m256i codes = _mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d));
  const __m256i words = _mm256_maddubs_epi16(codes, _mm256_set1_epi16(0x0110));
  const __m256i bytes = _mm256_packus_epi16(words, words);
  _mm_storeu_si128((__m128i *)out,
                   _mm_unpacklo_epi16(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)));
}

ALWAYS_INLINE void quantize_blocks(const bsh_quantize_4bit_args *const args, const int64_t block_begin,
                                   const int64_t block_end, const bsh_dtype dtype, const bsh_format format) {
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
    const __m256 inverse = _mm256_set1_ps(reciprocal(absmax));
    for (int64_t i = 0; i < blocksize; i += 32)
      encode32(args->x, dtype, begin + i, inverse, format, args->packed + (begin + i) / 2);
  }
}

static void quantize_4bit_avx2(const bsh_quantize_4bit_args *const args, const int64_t block_begin,
                               const int64_t block_end) {
  if (args->dtype == BSH_F32) BY_FORMAT(quantize_blocks, args, block_begin, block_end, BSH_F32);
  else if (args->dtype == BSH_F16) BY_FORMAT(quantize_blocks, args, block_begin, block_end, BSH_F16);
  else BY_FORMAT(quantize_blocks, args, block_begin, block_end, BSH_BF16);
}

/* ---- dequantize_4bit ------------------------------------------------------------------------------------------ */

/* The 16 values of a block as fp32, rounded to dtype. */
ALWAYS_INLINE void scaled_values(const bsh_format format, const bsh_dtype dtype, const float scale, __m256 values[2]) {
  if (__builtin_expect(!ordinary_scale(scale), 0)) {
    float scalars[16];
    block_values(format, dtype, scale, scalars);
    values[0] = _mm256_loadu_ps(scalars);
    values[1] = _mm256_loadu_ps(scalars + 8);
    return;
  }
  for (int half = 0; half < 2; half++) {
    const __m256 product = _mm256_mul_ps(_mm256_loadu_ps(format_values(format) + 8 * half), _mm256_set1_ps(scale));
    if (dtype == BSH_F32) values[half] = product;
    else if (dtype == BSH_F16)
      values[half] = _mm256_cvtph_ps(_mm256_cvtps_ph(product, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    else values[half] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(to_bf16(product)), 16));
  }
}

/* Bytes of 16 values of 16 bits each, in both 128-bit lanes: all low bytes, all high bytes. */
ALWAYS_INLINE void byte_planes(const __m256 values[2], const bsh_dtype dtype, __m256i planes[2]) {
  __m128i words[2];
  for (int half = 0; half < 2; half++)
    words[half] = dtype == BSH_F16 ? _mm256_cvtps_ph(values[half], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
                                   : to_bf16(values[half]);
  const __m128i low_byte = _mm_set1_epi16(0xFF);
  planes[0] = _mm256_broadcastsi128_si256(
      _mm_packus_epi16(_mm_and_si128(words[0], low_byte), _mm_and_si128(words[1], low_byte)));
  planes[1] = _mm256_broadcastsi128_si256(_mm_packus_epi16(_mm_srli_epi16(words[0], 8), _mm_srli_epi16(words[1], 8)));
}

/* 16 bytes -> 32 codes, one a byte, in order: the first 16 in the lower lane. */
ALWAYS_INLINE __m256i spread16(const uint8_t *const packed) {
  const __m128i bytes = _mm_loadu_si128((const __m128i *)packed);
  const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), _mm_set1_epi8(15));
  const __m128i low = _mm_and_si128(bytes, _mm_set1_epi8(15));
  return _mm256_set_m128i(_mm_unpackhi_epi8(high, low), _mm_unpacklo_epi8(high, low));
}

ALWAYS_INLINE void store_ymm(void *const out, const __m256i v, const bool stream) {
  if (stream) _mm256_stream_si256(out, v);
  else _mm256_storeu_si256(out, v);
}

ALWAYS_INLINE void decode32_16bit(const uint8_t *const packed, const __m256i planes[2], char *const out,
                                  const bool stream) {
  const __m256i codes = spread16(packed);
  const __m256i low = _mm256_shuffle_epi8(planes[0], codes), high = _mm256_shuffle_epi8(planes[1], codes);
  const __m256i even = _mm256_unpacklo_epi8(low, high), odd = _mm256_unpackhi_epi8(low, high); /* eighths 0 2 | 1 3 */
  store_ymm(out, _mm256_permute2x128_si256(even, odd, 0x20), stream);
  store_ymm(out + 32, _mm256_permute2x128_si256(even, odd, 0x31), stream);
}

ALWAYS_INLINE void decode32_f32(const uint8_t *const packed, const __m256 values[2], char *const out,
                                const bool stream) {
  const __m256i codes = spread16(packed);
  const __m128i halves[2] = {_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1)};
  for (int i = 0; i < 4; i++) {
    const __m128i eight = i % 2 ? _mm_srli_si128(halves[i / 2], 8) : halves[i / 2];
    const __m256i index = _mm256_cvtepu8_epi32(eight); /* vpermps uses three bits, the fourth picks the half */
    const __m256 low = _mm256_permutevar8x32_ps(values[0], index), high = _mm256_permutevar8x32_ps(values[1], index);
    const __m256 chosen = _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
    store_ymm(out + 32 * i, _mm256_castps_si256(chosen), stream);
  }
}

/* Elements [begin, end) of one block. */
ALWAYS_INLINE void decode_block(const bsh_decode_run *const run, const int64_t begin, const int64_t end,
                                const bsh_dtype dtype, const bool wide, const bool stream) {
  const bsh_weight *const weight = run->weight;
  const int64_t size = wide ? 4 : dtype_size(dtype);
  const float scale = block_scale(&weight->scales, begin >> __builtin_ctzll((uint64_t)weight->blocksize));
  char *out = (char *)run->out + (begin - run->begin) * size;
  int64_t i = begin;
  if (i % 2 == 0 && i + 32 <= end) {
    __m256 values[2];
    __m256i planes[2];
    scaled_values(weight->format, dtype, scale, values);
    if (size == 2) byte_planes(values, dtype, planes);
    for (; i + 32 <= end; i += 32, out += 32 * size) {
      if (size == 2) decode32_16bit(weight->packed + i / 2, planes, out, stream);
      else decode32_f32(weight->packed + i / 2, values, out, stream);
    }
  }
  if (i == end) return;
  float values[16];
  block_values(weight->format, dtype, scale, values);
  for (int64_t j = 0; i + j < end; j++)
    store_f32(out, wide ? BSH_F32 : dtype, j, values[packed_code(weight->packed, i + j)]);
}

ALWAYS_INLINE void decode_blocks(const bsh_decode_run *const run, const bsh_dtype dtype, const bool wide) {
  const int64_t blocksize = run->weight->blocksize;
  const bool stream = run->stream && (uintptr_t)run->out % 32 == 0 && run->begin % 32 == 0;
  int64_t i = run->begin;
  if (i < run->end && i % 2) { /* a run that starts within a byte: one element, then whole bytes */
    decode_block(run, i, i + 1, dtype, wide, false);
    i++;
  }
  while (i < run->end) {
    const int64_t end = min_i64((i & -blocksize) + blocksize, run->end);
    if (stream) decode_block(run, i, end, dtype, wide, true);
    else decode_block(run, i, end, dtype, wide, false);
    i = end;
  }
  if (stream) _mm_sfence();
}

static void decode_run(const bsh_decode_run *const run) {
  if (run->dtype == BSH_F32) decode_blocks(run, BSH_F32, true);
  else if (run->dtype == BSH_F16) run->wide ? decode_blocks(run, BSH_F16, true) : decode_blocks(run, BSH_F16, false);
  else run->wide ? decode_blocks(run, BSH_BF16, true) : decode_blocks(run, BSH_BF16, false);
}

/* ---- quantize_blockwise, dequantize_blockwise ----------------------------------------------------------------- */

/* The search of encode_8bit (cpu/scalar.c) as a heap numbered from 1: entries of odd index by level, then thresholds
 * around the even entry that is left. */
typedef struct {
  float node[128];
  float threshold_below[128], threshold_above[128]; /* around even entry 2q */
} search_tables;

static void make_search(const float *const map, search_tables *const t) {
  t->node[0] = 0;
  for (int level = 0; level < 7; level++)
    for (int i = 0; i < 1 << level; i++) t->node[(1 << level) + i] = map[((2 * i + 1) << (7 - level)) - 1];
  for (int q = 0; q < 128; q++) {
    t->threshold_below[q] = q ? flush_denormal((map[2 * q] + map[2 * q - 1]) * 0.5f) : -INFINITY;
    t->threshold_above[q] = flush_denormal((map[2 * q] + map[2 * q + 1]) * 0.5f);
  }
}

/* Codes of 8 values, one a 32-bit lane. */
ALWAYS_INLINE __m256i search8(const __m256 v, const search_tables *const t) {
  __m256i node = _mm256_set1_epi32(1);
  for (int level = 0; level < 7; level++) {
    const __m256 beyond = _mm256_cmp_ps(v, _mm256_i32gather_ps(t->node, node, 4), _CMP_GT_OQ);
    node = _mm256_sub_epi32(_mm256_add_epi32(node, node), _mm256_castps_si256(beyond));
  }
  const __m256i q = _mm256_and_si256(node, _mm256_set1_epi32(127));
  const __m256 below = _mm256_cmp_ps(v, _mm256_i32gather_ps(t->threshold_below, q, 4), _CMP_LT_OQ);
  const __m256 above = _mm256_cmp_ps(v, _mm256_i32gather_ps(t->threshold_above, q, 4), _CMP_GT_OQ);
  const __m256i even = _mm256_add_epi32(q, q);
  return _mm256_sub_epi32(_mm256_add_epi32(even, _mm256_castps_si256(below)), _mm256_castps_si256(above));
}

static void quantize_blockwise_avx2(const bsh_quantize_blockwise_args *const args, const int64_t block_begin,
                                    const int64_t block_end) {
  search_tables tables;
  make_search(args->map, &tables);
  const __m256 offset = _mm256_set1_ps(args->offset ? args->offset[0] : 0.0f);
  for (int64_t b = block_begin; b < block_end; b++) {
    const int64_t begin = b * args->blocksize;
    const bool full = begin + args->blocksize <= args->n;
    __m256i most = _mm256_setzero_si256();
    for (int64_t i = 0; full && i < args->blocksize; i += 8) {
      const __m256 x = _mm256_sub_ps(load8(args->x, args->dtype, begin + i), offset);
      most = _mm256_max_epu32(most, _mm256_castps_si256(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), x)));
    }
    const float absmax = full ? bits_float(reduce_max(most)) : NAN;
    if (!ordinary_absmax(absmax)) {
      bsh_cpu_scalar.quantize_blockwise(args, b, b + 1);
      continue;
    }
    args->absmax[b] = absmax;
    const __m256 inverse = _mm256_set1_ps(reciprocal(absmax));
    for (int64_t i = 0; i < args->blocksize; i += 8) {
      const __m256 x = _mm256_sub_ps(load8(args->x, args->dtype, begin + i), offset);
      const __m256i codes = search8(flush(_mm256_mul_ps(flush(x), inverse)), &tables);
      const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
      _mm_storel_epi64((__m128i *)(args->code + begin + i), _mm_packus_epi16(words, words));
    }
  }
}

static void dequantize_blockwise_avx2(const bsh_dequantize_blockwise_args *const args, const int64_t begin,
                                      const int64_t end) {
  for (int64_t i = begin; i < end;) {
    const int64_t block_end = min_i64((i & -args->blocksize) + args->blocksize, end);
    const __m256 absmax = flush(_mm256_set1_ps(args->absmax[i / args->blocksize]));
    for (; i + 8 <= block_end; i += 8) {
      const __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(args->code + i)));
      __m256 value = flush(_mm256_mul_ps(flush(_mm256_i32gather_ps(args->map, code, 4)), absmax));
      if (args->offset) value = _mm256_add_ps(value, _mm256_set1_ps(args->offset[0]));
      store8(args->out, args->dtype, i, value);
    }
    if (i < block_end) bsh_cpu_scalar.dequantize_blockwise(args, i, block_end);
    i = block_end;
  }
}

/* ---- linear_4bit, linear_4bit_dgrad --------------------------------------------------------------------------- */

static float dot(const float *const a, const float *const b, const int64_t n) {
  __m256 sums[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
  int64_t i = 0;
  for (; i + 32 <= n; i += 32)
    for (int j = 0; j < 4; j++)
      sums[j] = _mm256_fmadd_ps(_mm256_loadu_ps(a + i + 8 * j), _mm256_loadu_ps(b + i + 8 * j), sums[j]);
  const __m256 all = _mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3]));
  __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
  quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  float sum = _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
  for (; i < n; i++) sum += a[i] * b[i];
  return sum;
}

static void add_scaled(float *const out, const float *const a, const float scale, const int64_t n) {
  const __m256 scales = _mm256_set1_ps(scale);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(out + i, _mm256_fmadd_ps(_mm256_loadu_ps(a + i), scales, _mm256_loadu_ps(out + i)));
  for (; i < n; i++) out[i] = fmaf(a[i], scale, out[i]);
}

#include "cpu/tiles.inc.h"

const bsh_cpu_kernels bsh_cpu_avx2 = {
    .isa = "avx2",
    .quantize_4bit = quantize_4bit_avx2,
    .decode_4bit = decode_run,
    .quantize_blockwise = quantize_blockwise_avx2,
    .dequantize_blockwise = dequantize_blockwise_avx2,
    .linear_4bit = linear_by_tiles,
    .linear_4bit_dgrad = dgrad_by_tiles,
    .to_f32 = convert_to_f32,
    .from_f32 = convert_from_f32,
    .optimizers = &bsh_cpu_avx2_optimizers,
    .calibration = &bsh_cpu_avx2_calibration,
    .int8 = &bsh_cpu_avx2_int8,
};
