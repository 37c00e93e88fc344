/* cpu/avx512_linear.inc.h - linear_4bit for few rows in bf16, on a CPU with VDPBF16PS. Included by cpu/avx512.c.
 *
 * Products of bf16 pairs, exact in fp32. Four rows of W ("a quad") at a time share every load of x. They are decoded in
 * registers, in their own turn for the first FUSED_M rows of x and kept on the stack for the others, TILE_M rows at a
 * time: as many sums as there are registers. A sum runs over the groups of a chunk of columns in order, whatever quad
 * its row is in, so that threads may split the rows anywhere. */
#ifndef BSH_CPU_AVX512_LINEAR_INC_H
#define BSH_CPU_AVX512_LINEAR_INC_H

#include "cpu/groups.inc.h"

#define BF16_TARGET __attribute__((target("avx512bf16")))

enum { QUAD = 4, FUSED_M = 4, TILE_M = 6 };
enum { X_ELEMENTS = 32 << 10, W_COLUMNS = SCALES * GROUP };

/* On the stack of a thread: 122 KiB. */
typedef struct {
  union {
    __m512i unit_bytes[4][4]; /* byte b of the 256 units of nested scales, flushed */
    __m256i tables[256];      /* of fine groups: the values of a block whose scale has this byte */
  };
  uint16_t x[X_ELEMENTS];       /* [tile][group][row of the tile][GROUP] */
  uint16_t w[QUAD * W_COLUMNS]; /* [group][row of the quad][GROUP] */
  float scales[QUAD][SCALES];
  float sums[BLOCK_ROWS * BSH_CPU_SMALL_M]; /* [quad][row of x][row of the quad] */
} workspace;

/* Four rows of W, n_groups groups of each. */
typedef struct {
  const uint8_t *packed[QUAD];
  const float *scales[QUAD]; /* one for each group; fine groups have codes, one for each block of 1 << shift */
  const uint8_t *code[QUAD];
  int shift;
  int64_t n_groups;
  int64_t ahead; /* bytes from here to what comes next: hardware prefetchers stop at the end of a page */
} quad;

/* Rows [begin, begin + n) of x. */
typedef struct {
  int64_t begin, n;
} tile;

static int64_t count_tiles(const int64_t M) { return 1 + (M > FUSED_M ? divide_up(M - FUSED_M, TILE_M) : 0); }

static tile get_tile(const int64_t M, const int64_t i) {
  if (i == 0) return (tile){0, min_i64(M, FUSED_M)};
  const int64_t n = count_tiles(M) - 1, rest = M - FUSED_M;
  const int64_t begin = (i - 1) * rest / n;
  return (tile){FUSED_M + begin, i * rest / n - begin};
}

/* 32 codes, half a group: lanes 8 n to 8 n + 7 hold the nibbles n of the 8 words. */
ALWAYS_INLINE __m512i load_nibbles(const uint8_t *const packed) {
  const __m512i shift = _mm512_setr_epi64(0, 0, 4, 4, 8, 8, 12, 12) * 0x0001000100010001; /* of words */
  return _mm512_srlv_epi16(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)packed)), shift);
}

/* n elements in order -> out[group * step][half][lane], in the order of load_nibbles. */
static void arrange(const uint16_t *const in, const int64_t n, const int64_t step, uint16_t *out) {
  static const int16_t nibble_element[4] = {1, 0, 3, 2};
  int16_t element[32];
  for (int lane = 0; lane < 32; lane++) element[lane] = (int16_t)(4 * (lane % 8) + nibble_element[lane / 8]);
  const __m512i order = _mm512_loadu_si512(element);
  for (int64_t i = 0; i < n; i += GROUP, out += step) {
    _mm512_store_si512(out, _mm512_permutexvar_epi16(order, _mm512_loadu_si512(in + i)));
    _mm512_store_si512(out + 32, _mm512_permutexvar_epi16(order, _mm512_loadu_si512(in + i + 32)));
  }
}

/* Columns [k0, k0 + n) of some rows of x -> out[group][row][GROUP], arranged. */
static void arrange_x(const bsh_product_args *const args, const tile rows, const int64_t k0, const int64_t n,
                      uint16_t *const out) {
  for (int64_t t = 0; t < rows.n; t++)
    arrange((const uint16_t *)args->x + (rows.begin + t) * args->ldx + k0, n, rows.n * GROUP, out + t * GROUP);
}

/* For nested_scales. */
static void split_units(const bsh_scales *const scales, __m512i bytes[4][4]) {
  if (scales->absmax) return;
  for (int i = 0; i < 16; i++) {
    const __m512i unit = _mm512_castps_si512(v_flush(v_read(scales->absmax_map + 16 * i)));
    for (int b = 0; b < 4; b++)
      _mm_store_si128((__m128i *)bytes[b] + i, _mm512_cvtepi32_epi8(_mm512_srli_epi32(unit, (unsigned)(8 * b))));
  }
}

/* As load_scales with nested scales: four lookups of bytes for 64 scales instead of 64 gathered loads. */
static void nested_scales(const bsh_scales *const scales, const __m512i bytes[4][4], const int64_t begin,
                          const int64_t n, float out[SCALES]) {
  const __mmask64 present = n >= 64 ? ~(__mmask64)0 : ((__mmask64)1 << n) - 1;
  const __m512i transposition = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i codes =
      _mm512_permutexvar_epi32(transposition, _mm512_maskz_loadu_epi8(present, scales->absmax_code + begin));
  __m512i plane[4], pairs[4], unit[4];
  UNROLL for (int b = 0; b < 4; b++) plane[b] =
      _mm512_mask_mov_epi8(_mm512_permutex2var_epi8(bytes[b][0], codes, bytes[b][1]), _mm512_movepi8_mask(codes),
                           _mm512_permutex2var_epi8(bytes[b][2], codes, bytes[b][3]));
  UNROLL for (int b = 0; b < 4; b += 2) {
    pairs[b] = _mm512_unpacklo_epi8(plane[b], plane[b + 1]);
    pairs[b + 1] = _mm512_unpackhi_epi8(plane[b], plane[b + 1]);
  }
  UNROLL for (int i = 0; i < 2; i++) {
    unit[2 * i] = _mm512_unpacklo_epi16(pairs[i], pairs[i + 2]);
    unit[2 * i + 1] = _mm512_unpackhi_epi16(pairs[i], pairs[i + 2]);
  }
  const int64_t second = begin / BSH_NESTED_BLOCKSIZE, last = (begin + n - 1) / BSH_NESTED_BLOCKSIZE;
  const int64_t within = begin % BSH_NESTED_BLOCKSIZE;
  const floats before = v_flush(v_set(scales->absmax2[second]));
  const floats after = v_flush(v_set(scales->absmax2[last]));
  const __mmask64 beyond = last > second ? ~(__mmask64)0 << (BSH_NESTED_BLOCKSIZE - within) : 0;
  const floats offset = v_set(scales->offset[0]);
  UNROLL for (int i = 0; i < 4; i++) {
    const floats absmax2 = v_choose((mask)(beyond >> 16 * i), after, before);
    v_write(out + 16 * i, v_flush((floats)unit[i] * absmax2) + offset);
  }
}

/* One scale for each of n_groups groups from element `begin` on, in place or in `buffer`. */
static const float *group_scales(const bsh_weight *const weight, const __m512i bytes[4][4], const int64_t begin,
                                 const int64_t n_groups, float buffer[SCALES]) {
  const int shift = __builtin_ctzll((uint64_t)weight->blocksize);
  const int64_t block0 = begin >> shift, n_blocks = ((begin + n_groups * GROUP - 1) >> shift) - block0 + 1;
  const float *scales = buffer;
  if (weight->scales.absmax) scales = weight->scales.absmax + block0;
  else nested_scales(&weight->scales, bytes, block0, n_blocks, buffer);
  if (weight->blocksize == GROUP) return scales;
  for (int64_t g = n_groups - 1; g >= 0; g--) buffer[g] = scales[((begin + g * GROUP) >> shift) - block0];
  return buffer;
}

static void prefetch_scales(const bsh_weight *const weight, const int64_t begin, const int64_t n) {
  const int shift = __builtin_ctzll((uint64_t)weight->blocksize);
  const int64_t size = weight->scales.absmax ? 4 : 1;
  const char *const all =
      weight->scales.absmax ? (const char *)weight->scales.absmax : (const char *)weight->scales.absmax_code;
  for (int64_t i = 0; i < (n >> shift) * size; i += 64) _mm_prefetch(all + (begin >> shift) * size + i, _MM_HINT_T1);
}

/* make_table of the values of a block whose scale is ordinary. */
ALWAYS_INLINE BF16_TARGET __m512i values_bf16(const floats units, const float scale) {
  const floats values = units * v_set(scale);
  return (__m512i)_mm512_cvtne2ps_pbh(values, values);
}

BF16_TARGET static void make_word_tables(const bsh_weight *const weight, __m256i tables[256]) {
  const floats units = v_read(format_values(weight->format));
  for (int byte = 0; byte < 256; byte++) {
    floats values;
    values_of_byte(&units, &weight->scales, byte, BSH_BF16, &values);
    tables[byte] = (__m256i)_mm512_cvtneps_pbh(values);
  }
}

/* Half h of a group whose first block has the scale code[0]; each 16 elements have a table of their own, or the same.
 */
ALWAYS_INLINE __m512i decode_fine(const __m512i codes, const __m256i *const tables, const uint8_t *const code,
                                  const int shift, const int h) {
  const __m512i second = _mm512_broadcast_i32x4(_mm_setr_epi16(0, 0, 0, 0, 16, 16, 16, 16));
  const __m512i index = _mm512_ternarylogic_epi32(codes, _mm512_set1_epi16(15), second, 0xEA); /* codes & 15 | second */
  const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(tables[code[32 * h >> shift]]),
                                          tables[code[(32 * h + 16) >> shift]], 1);
  return _mm512_permutexvar_epi16(index, both);
}

/* Adds the lane sums of acc[T * QUAD] to sums. */
ALWAYS_INLINE void add_quad_sums(const floats acc[QUAD * TILE_M], float *const sums, const int T) {
  UNROLL for (int first = 0; first < QUAD * T; first += 16) {
    floats v[16];
    UNROLL for (int i = 0; i < 16; i++) v[i] = first + i < QUAD * T ? acc[first + i] : v_set(0.0f);
    add_lane_sums(v, QUAD * T - first, sums + first);
  }
}

/* T rows of x times a quad that is decoded here; with `keep` also to w. tables: of fine groups, else NULL. */
ALWAYS_INLINE BF16_TARGET void multiply_packed(const quad *const q, const __m256i *const tables, const floats units,
                                               const uint16_t *x, uint16_t *w, float *const sums, const int T,
                                               const bool keep) {
  const int64_t n_groups = q->n_groups, ahead = q->ahead, step = GROUP >> q->shift;
  const uint8_t *packed[QUAD], *code[QUAD];
  const float *scales[QUAD];
  UNROLL for (int r = 0; r < QUAD; r++) {
    packed[r] = q->packed[r];
    code[r] = q->code[r];
    scales[r] = q->scales[r];
  }
  floats acc[QUAD * TILE_M];
  UNROLL for (int i = 0; i < QUAD * T; i++) acc[i] = v_set(0.0f);
  for (int64_t g = 0; g < n_groups; g++, x += T * GROUP, w += QUAD * GROUP) {
    __m512bh halves[2][FUSED_M];
    UNROLL for (int t = 0; t < T; t++) UNROLL for (int h = 0; h < 2; h++) halves[h][t] =
        (__m512bh)_mm512_load_si512(x + t * GROUP + 32 * h);
    UNROLL for (int r = 0; r < QUAD; r++) {
      const uint8_t *const from = packed[r] + g * (GROUP / 2);
      _mm_prefetch((const char *)from + ahead, _MM_HINT_T1);
      const __m512i values = tables ? _mm512_setzero_si512() : values_bf16(units, scales[r][g]);
      UNROLL for (int h = 0; h < 2; h++) {
        const __m512i codes = load_nibbles(from + 16 * h);
        const __m512i decoded = tables ? decode_fine(codes, tables, code[r] + g * step, q->shift, h)
                                       : _mm512_permutexvar_epi16(codes, values);
        if (keep) _mm512_store_si512(w + r * GROUP + 32 * h, decoded);
        UNROLL for (int t = 0; t < T; t++) acc[t * QUAD + r] =
            _mm512_dpbf16_ps(acc[t * QUAD + r], (__m512bh)decoded, halves[h][t]);
      }
    }
  }
  add_quad_sums(acc, sums, T);
}

/* T rows of x times a decoded quad. */
ALWAYS_INLINE BF16_TARGET void multiply_decoded(const uint16_t *w, const int64_t n_groups, const uint16_t *x,
                                                float *const sums, const int T) {
  floats acc[QUAD * TILE_M];
  UNROLL for (int i = 0; i < QUAD * T; i++) acc[i] = v_set(0.0f);
  for (int64_t g = 0; g < n_groups; g++, x += T * GROUP, w += QUAD * GROUP) {
    UNROLL for (int h = 0; h < 2; h++) {
      __m512bh rows[QUAD];
      UNROLL for (int r = 0; r < QUAD; r++) rows[r] = (__m512bh)_mm512_load_si512(w + r * GROUP + h * 32);
      UNROLL for (int t = 0; t < T; t++) {
        const __m512bh half = (__m512bh)_mm512_load_si512(x + t * GROUP + h * 32);
        UNROLL for (int r = 0; r < QUAD; r++) acc[t * QUAD + r] = _mm512_dpbf16_ps(acc[t * QUAD + r], rows[r], half);
      }
    }
  }
  add_quad_sums(acc, sums, T);
}

ALWAYS_INLINE BF16_TARGET void multiply_packed_form(const quad *const q, const __m256i *const tables,
                                                    const floats units, const uint16_t *const x, uint16_t *const w,
                                                    float *const sums, const int64_t T, const bool keep) {
  if (keep) multiply_packed(q, tables, units, x, w, sums, FUSED_M, true);
  else if (T == 1) multiply_packed(q, tables, units, x, w, sums, 1, false);
  else if (T == 2) multiply_packed(q, tables, units, x, w, sums, 2, false);
  else if (T == 3) multiply_packed(q, tables, units, x, w, sums, 3, false);
  else multiply_packed(q, tables, units, x, w, sums, FUSED_M, false);
}

BF16_TARGET static void multiply_packed_any(const quad *const q, const __m256i *const tables, const floats units,
                                            const uint16_t *const x, uint16_t *const w, float *const sums,
                                            const int64_t T, const bool keep) {
  if (tables) multiply_packed_form(q, tables, units, x, w, sums, T, keep);
  else multiply_packed_form(q, NULL, units, x, w, sums, T, keep);
}

BF16_TARGET static void multiply_decoded_any(const uint16_t *const w, const int64_t n_groups, const uint16_t *const x,
                                             float *const sums, const int64_t T) {
  if (T == 1) multiply_decoded(w, n_groups, x, sums, 1);
  else if (T == 2) multiply_decoded(w, n_groups, x, sums, 2);
  else if (T == 3) multiply_decoded(w, n_groups, x, sums, 3);
  else if (T == 4) multiply_decoded(w, n_groups, x, sums, 4);
  else if (T == 5) multiply_decoded(w, n_groups, x, sums, 5);
  else multiply_decoded(w, n_groups, x, sums, 6);
}

/* Rows [row, row + QUAD) of W, columns [k0, k0 + n), with any scales. */
static void decode_quad(const bsh_product_args *const args, const int64_t row, const int64_t k0, const int64_t n,
                        uint16_t *const w) {
  uint16_t natural[W_COLUMNS];
  for (int r = 0; r < QUAD; r++) {
    const int64_t begin = min_i64(row + r, args->N - 1) * args->K + k0;
    decode_run(&(bsh_decode_run){
        .weight = &args->weight, .out = natural, .begin = begin, .end = begin + n, .rows = 1, .dtype = BSH_BF16});
    arrange(natural, n, QUAD * GROUP, w + r * GROUP);
  }
}

/* Scales of row r of a quad, from element `begin` on. False where they allow decode_quad only. */
static bool find_scales(const bsh_product_args *const args, workspace *const own, const int64_t begin, const int64_t n,
                        const bool fine, quad *const q, const int r) {
  if (fine) {
    q->code[r] = args->weight.scales.absmax_code + (begin >> q->shift);
    return has_one_factor(&args->weight, q->shift, begin, n);
  }
  q->scales[r] = group_scales(&args->weight, own->unit_bytes, begin, q->n_groups, own->scales[r]);
  return all_ordinary(q->scales[r], q->n_groups);
}

/* Rows [row, row + QUAD) of W times all of x, columns [k0, k0 + n): adds to sums. */
static void add_quad(const bsh_product_args *const args, workspace *const own, const int64_t row, const int64_t k0,
                     const int64_t n, const int64_t ahead, float *const sums) {
  const bool fine = args->weight.blocksize < GROUP;
  const floats units = v_read(format_values(args->weight.format));
  quad q = {.n_groups = n / GROUP, .ahead = ahead, .shift = __builtin_ctzll((uint64_t)args->weight.blocksize)};
  bool ordinary = true;
  for (int r = 0; r < QUAD; r++) {
    const int64_t begin = min_i64(row + r, args->N - 1) * args->K + k0;
    q.packed[r] = args->weight.packed + begin / 2;
    ordinary &= find_scales(args, own, begin, n, fine, &q, r);
    prefetch_scales(&args->weight, begin + 2 * ahead, n);
  }
  if (!ordinary) decode_quad(args, row, k0, n, own->w);
  for (int64_t i = 0; i < count_tiles(args->M); i++) {
    const tile rows = get_tile(args->M, i);
    const uint16_t *const x = own->x + rows.begin * n;
    float *const to = sums + QUAD * rows.begin;
    if (i == 0 && ordinary)
      multiply_packed_any(&q, fine ? own->tables : NULL, units, x, own->w, to, rows.n, args->M > FUSED_M);
    else multiply_decoded_any(own->w, q.n_groups, x, to, rows.n);
  }
}

/* Adds bias, rounds, and writes the sums of n_rows rows of W. */
static void store_sums(const bsh_product_args *const args, const int64_t row0, const int64_t n_rows,
                       const float *const sums) {
  const int64_t quad_sums = QUAD * args->M;
  for (int64_t m = 0; m < args->M; m++)
    for (int64_t r = 0; r < n_rows; r += 16) {
      const float *const from = sums + r / QUAD * quad_sums + m * QUAD;
      floats v = _mm512_castps128_ps512(_mm_loadu_ps(from));
      v = _mm512_insertf32x4(v, _mm_loadu_ps(from + quad_sums), 1);
      v = _mm512_insertf32x4(v, _mm_loadu_ps(from + 2 * quad_sums), 2);
      v = _mm512_insertf32x4(v, _mm_loadu_ps(from + 3 * quad_sums), 3);
      if (args->bias) v += v_load_some(args->bias, BSH_BF16, row0 + r, n_rows - r);
      v_store_some(args->y, BSH_BF16, m * args->ldy + row0 + r, n_rows - r, v);
    }
}

/* Chunks of columns within blocks of rows: x is brought into order once for each. */
static void linear_bf16(const bsh_product_args *const args, const int64_t row_begin, const int64_t row_end) {
  workspace own __attribute__((aligned(64)));
  if (args->weight.blocksize < GROUP) make_word_tables(&args->weight, own.tables);
  else split_units(&args->weight.scales, own.unit_bytes);
  const int64_t step = min_i64(X_ELEMENTS / args->M / GROUP * GROUP, W_COLUMNS);
  int64_t loaded = -1;
  for (int64_t row0 = row_begin; row0 < row_end; row0 += BLOCK_ROWS) {
    const int64_t n_rows = min_i64(BLOCK_ROWS, row_end - row0);
    memset(own.sums, 0, sizeof own.sums);
    for (int64_t k0 = 0; k0 < args->K; k0 += step) {
      const int64_t n = min_i64(step, args->K - k0);
      for (int64_t i = 0; i < count_tiles(args->M) && loaded != k0; i++) {
        const tile rows = get_tile(args->M, i);
        arrange_x(args, rows, k0, n, own.x + rows.begin * n);
      }
      loaded = k0;
      for (int64_t r = 0; r < n_rows; r += QUAD) {
        const bool last = r + QUAD >= n_rows;
        const int64_t ahead = (!last ? QUAD * args->K : k0 + n < args->K ? n - r * args->K : QUAD * args->K - k0) / 2;
        add_quad(args, &own, row0 + r, k0, n, ahead, own.sums + r * args->M);
      }
    }
    store_sums(args, row0, n_rows, own.sums);
  }
}

static void linear_avx512(const bsh_product_args *const args, const int64_t row_begin, const int64_t row_end) {
  const bool groups = has_whole_groups(&args->weight, args->K) || has_fine_groups(&args->weight, args->K);
  if (groups && args->dtype == BSH_BF16 && bsh_cpu_fast_bf16()) linear_bf16(args, row_begin, row_end);
  else linear_by_groups(args, row_begin, row_end);
}

#endif
