/* cpu/avx512_decode.c - dequantize_4bit with AVX-512.
 *
 * Nibbles are spread by vpmultishiftqb (each byte of a 64-bit lane takes 8 bits from any bit offset). */
#include "cpu/avx512.h"

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

void bsh_cpu_avx512_decode_4bit(const bsh_decode_run *const run) {
  if (run->dtype == BSH_F32) decode_blocks(run, BSH_F32, true);
  else if (run->dtype == BSH_F16) run->wide ? decode_blocks(run, BSH_F16, true) : decode_blocks(run, BSH_F16, false);
  else run->wide ? decode_blocks(run, BSH_BF16, true) : decode_blocks(run, BSH_BF16, false);
}
