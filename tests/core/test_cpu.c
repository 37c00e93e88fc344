/* test_cpu.c - the CPU kernels without Python or torch: every instruction set against the scalar one bit for bit, the
 * scalar one against facts written down here, linear_4bit against fp64, and one thread against three. */
#include "check.h"

#include <math.h>

#include "core/packed.h"
#include "cpu/cpu.h"
#include "cpu/grid.h"
#include "inputs.h"

uint64_t check_seed;

/* ---- a packed weight -------------------------------------------------------------------------------------------- */

typedef struct {
  bsh_weight weight;
  uint8_t *packed, *absmax_code;
  float *absmax, *absmax2, map[256], offset;
} owned_weight;

static const uint32_t dynamic_bits[256] = {BSH_DYNAMIC_MAP_BITS};

/* E2M1 has blocks of 16 to 64, the others of `blocksize`. */
static int64_t block_of(uint64_t *const state, const bsh_format format, const int64_t blocksize) {
  return format == BSH_E2M1 ? INT64_C(16) << random_below(state, 3) : blocksize;
}

static owned_weight make_weight(uint64_t *const state, const int64_t n, const int64_t blocksize,
                                const bsh_format format, const bool nested) {
  const int64_t blocks = bsh_block_count(n, blocksize);
  owned_weight w = {.packed = buffer(bsh_packed_bytes(n)),
                    .absmax = buffer(4 * blocks),
                    .absmax_code = buffer(blocks),
                    .absmax2 = buffer(4 * bsh_block_count(blocks, 256)),
                    .offset = 0.03f};
  memcpy(w.map, dynamic_bits, sizeof w.map);
  for (int64_t i = 0; i < bsh_packed_bytes(n); i++) w.packed[i] = (uint8_t)random_bits(state);
  for (int64_t b = 0; b < blocks; b++) {
    w.absmax[b] = 0.01f + fabsf(random_unit(state)) * 0.05f;
    w.absmax_code[b] = (uint8_t)random_bits(state);
  }
  for (int64_t b = 0; b < bsh_block_count(blocks, 256); b++) w.absmax2[b] = 0.01f + fabsf(random_unit(state)) * 0.02f;
  const bool one_factor = format == BSH_E2M1 && random_below(state, 2); /* as MXFP4 and NVFP4 have */
  for (int64_t b = 0; one_factor && b < bsh_block_count(blocks, 256); b++) w.absmax2[b] = w.absmax2[0];
  w.weight = (bsh_weight){.packed = w.packed, .n = n, .blocksize = blocksize, .format = format};
  if (!nested) w.weight.scales.absmax = w.absmax;
  return w;
}

/* Pointers into the struct itself: set where the struct has come to rest. */
static void settle(owned_weight *const w) {
  if (w->weight.scales.absmax) return;
  w->weight.scales =
      (bsh_scales){.absmax_code = w->absmax_code, .absmax_map = w->map, .absmax2 = w->absmax2, .offset = &w->offset};
}

/* Some scales as only a checkpoint has them: zero, denormal, tiny, negative; one may be no number. */
static void set_odd_scales(uint64_t *const state, owned_weight *const w) {
  static const float odd[] = {0.0f, 0x1p-140f, 0x1p-110f, -0.04f};
  const int64_t blocks = bsh_block_count(w->weight.n, w->weight.blocksize);
  for (int64_t b = 0; b < blocks; b++)
    if (random_below(state, 16) == 0) w->absmax[b] = odd[random_below(state, 4)];
  if (blocks > 0 && random_below(state, 2)) w->absmax[random_below(state, blocks)] = bits_float(0x7FFFFFFFu);
  for (int64_t b = 0; b < bsh_block_count(blocks, 256); b++)
    if (random_below(state, 2)) w->absmax2[b] = -w->absmax2[b];
  if (random_below(state, 2)) w->offset = 0;
}

static void free_weight(owned_weight *const w) {
  free(w->packed);
  free(w->absmax);
  free(w->absmax_code);
  free(w->absmax2);
}

/* ---- facts about the formats ------------------------------------------------------------------------------------ */

static void quantize(const void *const x, const int64_t n, const bsh_dtype dtype, const bsh_format format,
                     const int64_t blocksize, uint8_t *const packed, float *const absmax) {
  CHECK(bsh_cpu_quantize_4bit(&(bsh_quantize_4bit_args){.x = x,
                                                        .packed = packed,
                                                        .absmax = absmax,
                                                        .n = n,
                                                        .blocksize = blocksize,
                                                        .dtype = dtype,
                                                        .format = format}) == BSH_OK,
        "quantize_4bit");
}

static uint8_t quantize_pair(const float first, const float second, const bsh_format format, float *const absmax) {
  float x[32] = {first, second};
  uint8_t packed[16];
  quantize(x, 32, BSH_F32, format, 32, packed, absmax);
  return packed[0];
}

/* Expected bytes follow from the definitions in core/formats.h and the flush-to-zero rule, worked out by hand. */
static void format_facts(void) {
  static const uint32_t nf4[15] = {BSH_NF4_THRESHOLD_BITS};
  float absmax;
  CHECK(quantize_pair(0.0f, 0.0f, BSH_NF4, &absmax) == 0x00 && absmax == 0.0f, "a block of zeros is 0x00");
  CHECK(quantize_pair(0x1p-140f, 0.0f, BSH_NF4, &absmax) == 0x00 && absmax == 0.0f, "denormals count as zero");
  CHECK(quantize_pair(1.0f, NAN, BSH_NF4, &absmax) == 0xF0 && absmax == 1.0f, "NaN is code 0 and no maximum");
  CHECK(quantize_pair(INFINITY, 1.0f, BSH_NF4, &absmax) == 0x07 && isinf(absmax), "inf * 0 is NaN, 1 * 0 is 0");
  CHECK(quantize_pair(1.0f, -0x1p-140f, BSH_FP4, &absmax) == 0x30, "a negative denormal has no sign");
  CHECK(quantize_pair(1.0f, -0x1p-120f, BSH_FP4, &absmax) == 0x38, "a tiny negative value is 0b1000");
  CHECK(quantize_pair(0x1p-90f, -0x1p-127f, BSH_FP4, &absmax) == 0x30, "a denormal element has no sign");
  CHECK(quantize_pair(0x1p-90f, -0x1p-126f, BSH_FP4, &absmax) == 0x38, "the smallest normal element has one");
  for (int i = 0; i < 15; i++) { /* a value on a threshold takes the lower code, the next float the upper one */
    const float t = bits_float(nf4[i]);
    CHECK(quantize_pair(1.0f, t, BSH_NF4, &absmax) == (0xF0 | i), "NF4 threshold %d", i);
    CHECK(quantize_pair(1.0f, nextafterf(t, 2.0f), BSH_NF4, &absmax) == (0xF0 | (i + 1)), "NF4 threshold %d", i);
  }
  const float one = -0.5f;
  uint8_t byte = 0;
  quantize(&one, 1, BSH_F32, BSH_NF4, 64, &byte, &absmax);
  CHECK(byte == 0x07 && absmax == 0.5f, "the element missing from the last byte is a zero, code 7: %02x", byte);
}

/* The counts of deviations from the correctly rounded reciprocal that were measured on the GPU. */
static void reciprocal_facts(void) {
  int below16 = 0, above16 = 0, below8 = 0, above8 = 0;
  for (uint32_t mantissa = 0; mantissa < 1024; mantissa++) {
    const float value = bits_float(0x41000000u | mantissa << 13);
    const int difference = (int)(float_bits(reciprocal(value)) - float_bits(1.0f / value));
    CHECK(difference >= -1 && difference <= 1, "1 / %g is off by %d ulp", (double)value, difference);
    below16 += difference < 0, above16 += difference > 0;
    if (mantissa % 8 == 0) below8 += difference < 0, above8 += difference > 0;
  }
  CHECK(below16 == 40 && above16 == 90, "fp16: %d below, %d above", below16, above16);
  CHECK(below8 == 5 && above8 == 15, "bf16: %d below, %d above", below8, above8);
  CHECK(reciprocal(0x1.8p126f) == 0.0f && reciprocal(INFINITY) == 0.0f, "denormal results are flushed");
  CHECK(isinf(reciprocal(0.0f)) && reciprocal(0x1p-126f) == 0x1p126f, "the ends of the range");
}

/* Every cell of the grid that the vector kernels use holds one threshold at most, away from its borders. */
static void grid_facts(void) {
  static const uint32_t nf4[15] = {BSH_NF4_THRESHOLD_BITS};
  static const uint32_t fp4[7] = {BSH_FP4_THRESHOLD_BITS};
  for (int format = 0; format < 2; format++) {
    encode_grid grid;
    make_grid((bsh_format)format, &grid);
    int found = 0;
    for (int cell = 0; cell < GRID_CELLS; cell++) found += isfinite(grid.threshold[cell]) ? 1 : 0;
    CHECK(found == (format ? 7 : 15), "format %d: %d thresholds in the grid", format, found);
    for (int i = 0; i < found; i++) {
      const double place = (double)bits_float(format ? fp4[i] : nf4[i]) * (double)grid.scale + (double)grid.shift;
      CHECK(fabs(place - nearbyint(place)) > 1e-3, "format %d: threshold %d on the border %g", format, i, place);
    }
  }
}

static void conversion_facts(void) {
  for (uint32_t word = 0; word < 65536; word++) {
    const float wide = f16_to_f32((uint16_t)word);
    const bool nan = (word & 0x7FFF) > 0x7C00;
    CHECK(nan ? isnan(wide) : f32_to_f16(wide) == word, "fp16 %04x", word);
    CHECK((word & 0x7FFF) > 0x7F80 || f32_to_bf16(bf16_to_f32((uint16_t)word)) == word, "bf16 %04x", word);
  }
  CHECK(f32_to_f16(65519.0f) == 0x7BFF && f32_to_f16(65520.0f) == 0x7C00, "fp16 overflow");
  CHECK(f32_to_f16(0x1p-25f) == 0 && f32_to_f16(0x1.8p-25f) == 1 && f32_to_f16(0x1.8p-24f) == 2, "fp16 denormal ties");
  CHECK(f32_to_bf16(bits_float(0x3F808000u)) == 0x3F80 && f32_to_bf16(bits_float(0x3F818000u)) == 0x3F82, "bf16 ties");
}

/* ---- instruction sets against scalar ------------------------------------------------------------------------------
 */

static const char *isas[4];
static int n_isas;

static void use(const char *const isa, const int threads) {
  n_threads = threads;
  CHECK(bsh_cpu_set_isa(isa) == BSH_OK, "%s", isa);
}

static void compare_quantize_4bit(uint64_t *const state, const int64_t n, const int64_t blocksize) {
  const bsh_dtype dtype = (bsh_dtype)random_below(state, 3);
  const bsh_format format = (bsh_format)random_below(state, 2);
  const int64_t n_bytes = bsh_packed_bytes(n), blocks = bsh_block_count(n, blocksize);
  void *const x = make_input(state, n, dtype, random_below(state, 4) != 0);
  uint8_t *const packed = buffer(n_bytes), *const expected = buffer(n_bytes);
  float *const absmax = buffer(4 * blocks), *const expected_absmax = buffer(4 * blocks);
  use("scalar", 1);
  quantize(x, n, dtype, format, blocksize, expected, expected_absmax);
  for (int i = 0; i < n_isas; i++)
    for (int threads = 1; threads <= 3; threads += 2) {
      char what[96];
      snprintf(what, sizeof what, "quantize_4bit %s %s format %d n %" PRId64 " blocksize %" PRId64, isas[i],
               dtype_names[dtype], format, n, blocksize);
      use(isas[i], threads);
      quantize(x, n, dtype, format, blocksize, packed, absmax);
      check_same_bytes(what, packed, expected, n_bytes);
      check_same_bytes(what, absmax, expected_absmax, 4 * blocks);
    }
  free(x), free(packed), free(expected), free(absmax), free(expected_absmax);
}

static void compare_blockwise(uint64_t *const state, const int64_t n, const int64_t blocksize) {
  const bsh_dtype dtype = (bsh_dtype)random_below(state, 3);
  const int64_t blocks = bsh_block_count(n, blocksize), n_out = n * dtype_size(dtype);
  const float offset = random_unit(state);
  const bool with_offset = random_below(state, 2), padded_map = random_below(state, 4) == 0;
  float map[256];
  memcpy(map, dynamic_bits, sizeof map);
  if (padded_map)
    for (int i = 100; i < 140; i++) map[i] = 0.0f; /* repeated entries, as in maps of fewer bits */
  void *const x = make_input(state, n, dtype, random_below(state, 4) != 0), *const out = buffer(n_out),
              *const expected_out = buffer(n_out);
  uint8_t *const code = buffer(n), *const expected = buffer(n);
  float *const absmax = buffer(4 * blocks), *const expected_absmax = buffer(4 * blocks);
  if (random_below(state, 2) && dtype == BSH_F32) /* values on the thresholds themselves */
    for (int64_t i = 0; i < n; i++) {
      const int64_t entry = random_below(state, 255);
      ((float *)x)[i] = i % blocksize ? (map[entry] + map[entry + 1]) * 0.5f : 1.0f;
    }
  bsh_quantize_blockwise_args args = {.x = x,
                                      .map = map,
                                      .offset = with_offset ? &offset : NULL,
                                      .code = expected,
                                      .absmax = expected_absmax,
                                      .n = n,
                                      .blocksize = blocksize,
                                      .dtype = dtype};
  bsh_dequantize_blockwise_args back = {.code = expected,
                                        .absmax = expected_absmax,
                                        .map = map,
                                        .offset = args.offset,
                                        .out = expected_out,
                                        .n = n,
                                        .blocksize = blocksize,
                                        .dtype = dtype};
  use("scalar", 1);
  bsh_cpu_quantize_blockwise(&args);
  bsh_cpu_dequantize_blockwise(&back);
  args.code = code, args.absmax = absmax, back.out = out;
  for (int i = 0; i < n_isas; i++) {
    use(isas[i], 1 + i);
    bsh_cpu_quantize_blockwise(&args);
    bsh_cpu_dequantize_blockwise(&back);
    check_same_bytes("quantize_blockwise codes", code, expected, n);
    check_same_bytes("quantize_blockwise absmax", absmax, expected_absmax, 4 * blocks);
    check_same_bytes("dequantize_blockwise", out, expected_out, n_out);
  }
  free(x), free(out), free(expected_out), free(code), free(expected), free(absmax), free(expected_absmax);
}

/* The whole tensor, and a rectangle of it with rows further apart than they are long. */
static void compare_dequantize_4bit(uint64_t *const state, const int64_t rows, const int64_t columns,
                                    const int64_t given) {
  const bsh_format format = (bsh_format)random_below(state, 3);
  const int64_t n = rows * columns, blocksize = block_of(state, format, given);
  owned_weight w = make_weight(state, n, blocksize, format, random_below(state, 2));
  settle(&w);
  if (random_below(state, 2) && n) /* hostile scales, as a checkpoint may hold them */
    for (int64_t b = 0; b < bsh_block_count(n, blocksize); b += 3)
      w.absmax[b] = hostile_value(state, (int)random_below(state, 10));
  const bsh_dtype dtype = (bsh_dtype)random_below(state, 3);
  const int64_t row0 = rows ? random_below(state, rows) : 0, column0 = columns ? random_below(state, columns) : 0;
  const int64_t n_rows = rows ? 1 + random_below(state, rows - row0) : 0;
  const int64_t n_columns = columns ? 1 + random_below(state, columns - column0) : 0;
  const int64_t ld = n_columns + random_below(state, 9), size = dtype_size(dtype);
  const int64_t part_bytes = n_rows ? ((n_rows - 1) * ld + n_columns) * size : 0;
  void *const whole = buffer(n * size), *const expected = buffer(n * size), *const part = buffer(part_bytes);
  bsh_dequantize_4bit_args args = {.weight = w.weight,
                                   .out = expected,
                                   .columns = columns,
                                   .n_rows = rows,
                                   .n_columns = columns,
                                   .ld = columns,
                                   .dtype = dtype};
  use("scalar", 1);
  bsh_cpu_dequantize_4bit(&args);
  for (int i = 0; i < n_isas; i++) {
    use(isas[i], 1 + i);
    args.out = whole;
    bsh_cpu_dequantize_4bit(&args);
    check_same_bytes("dequantize_4bit", whole, expected, n * size);
    bsh_cpu_dequantize_4bit(&(bsh_dequantize_4bit_args){.weight = w.weight,
                                                        .out = part,
                                                        .columns = columns,
                                                        .row0 = row0,
                                                        .n_rows = n_rows,
                                                        .column0 = column0,
                                                        .n_columns = n_columns,
                                                        .ld = ld,
                                                        .dtype = dtype});
    for (int64_t r = 0; r < n_rows; r++)
      check_same_bytes("rectangle", (char *)part + r * ld * size,
                       (char *)expected + ((row0 + r) * columns + column0) * size, n_columns * size);
  }
  free(whole), free(expected), free(part);
  free_weight(&w);
}

/* ---- linear_4bit ------------------------------------------------------------------------------------------------- */

static double unit_roundoff(const bsh_dtype dtype) {
  return dtype == BSH_F32 ? 0x1p-24 : dtype == BSH_F16 ? 0x1p-11 : 0x1p-8;
}

/* |result - exact| <= one rounding to dtype, also with a bias, and (terms + 4) fp32 roundings of the sum of magnitudes.
 */
static void check_sum(const char *const what, const float result, const double product, const double bias,
                      const double magnitude, const int64_t terms, const bsh_dtype dtype) {
  const double exact = product + bias;
  const double bound = 1.01 * unit_roundoff(dtype) * fabs(exact) + (double)(terms + 4) * 0x1p-24 * magnitude + 0x1p-24;
  CHECK(isnan(exact) ? isnan(result) : fabs((double)result - exact) <= bound, "%s: %g instead of %g, bound %g", what,
        (double)result, exact, bound);
}

typedef struct {
  int64_t M, N, K, ldx, ldy;
  bsh_dtype dtype;
  const float *w; /* decoded, [N, K] */
  const void *x, *dy, *bias;
} linear_case;

static void check_forward(const char *const what, const linear_case *const c, const void *const y) {
  for (int64_t m = 0; m < c->M; m++)
    for (int64_t n = 0; n < c->N; n++) {
      const double bias = c->bias ? (double)load_f32(c->bias, c->dtype, n) : 0.0;
      double exact = 0, magnitude = fabs(bias);
      for (int64_t k = 0; k < c->K; k++) {
        const double term = (double)load_f32(c->x, c->dtype, m * c->ldx + k) * (double)c->w[n * c->K + k];
        exact += term;
        magnitude += fabs(term);
      }
      check_sum(what, load_f32(y, c->dtype, m * c->ldy + n), exact, bias, magnitude, c->K, c->dtype);
    }
}

static void check_gradient(const char *const what, const linear_case *const c, const void *const dx) {
  for (int64_t m = 0; m < c->M; m++)
    for (int64_t k = 0; k < c->K; k++) {
      double exact = 0, magnitude = 0;
      for (int64_t n = 0; n < c->N; n++) {
        const double term = (double)load_f32(c->dy, c->dtype, m * c->ldy + n) * (double)c->w[n * c->K + k];
        exact += term;
        magnitude += fabs(term);
      }
      check_sum(what, load_f32(dx, c->dtype, m * c->ldx + k), exact, 0, magnitude, c->N, c->dtype);
    }
}

static void compare_linear(uint64_t *const state, const bsh_dtype dtype, const int64_t M, const int64_t N,
                           const int64_t K, const int64_t blocksize, const bool odd_scales) {
  const bsh_format format = (bsh_format)random_below(state, 3);
  owned_weight w = make_weight(state, N * K, block_of(state, format, blocksize), format, random_below(state, 2));
  settle(&w);
  if (odd_scales) set_odd_scales(state, &w);
  const int64_t ldx = K + random_below(state, 5), ldy = N + random_below(state, 5), size = dtype_size(dtype);
  const int64_t y_bytes = M * ldy * size, dx_bytes = M * ldx * size;
  void *const x = make_input(state, M * ldx, dtype, false), *const dy = make_input(state, M * ldy, dtype, false);
  void *const bias = make_input(state, N, dtype, false), *const y = buffer(y_bytes), *const dx = buffer(dx_bytes);
  void *const y_threads = buffer(y_bytes), *const dx_threads = buffer(dx_bytes);
  float *const decoded = buffer(4 * N * K);
  bsh_cpu_scalar.decode_4bit(
      &(bsh_decode_run){.weight = &w.weight, .out = decoded, .end = N * K, .rows = 1, .dtype = dtype, .as_f32 = true});
  const linear_case c = {.M = M,
                         .N = N,
                         .K = K,
                         .ldx = ldx,
                         .ldy = ldy,
                         .dtype = dtype,
                         .w = decoded,
                         .x = x,
                         .dy = dy,
                         .bias = random_below(state, 2) ? bias : NULL};
  const bsh_product_args forward = {w.weight, .x = x, .bias = c.bias, .y = y,     .M = M,
                                    .N = N,   .K = K, .ldx = ldx,     .ldy = ldy, .dtype = dtype};
  const bsh_product_args gradient = {w.weight, .x = dy,    .y = dx,    .M = M,         .N = N,
                                     .K = K,   .ldx = ldy, .ldy = ldx, .dtype = dtype, .direction = BSH_INPUT_GRADIENT};
  bsh_product_args forward_threads = forward;
  bsh_product_args gradient_threads = gradient;
  forward_threads.y = y_threads;
  gradient_threads.y = dx_threads;
  for (int i = 0; i < n_isas; i++) {
    char what[128];
    snprintf(what, sizeof what, "linear %s %s M %" PRId64 " N %" PRId64 " K %" PRId64 " blocksize %" PRId64, isas[i],
             dtype_names[dtype], M, N, K, blocksize);
    use(isas[i], 1);
    CHECK(bsh_cpu_linear_4bit(&forward, NULL) == BSH_OK, "%s", what);
    CHECK(bsh_cpu_linear_4bit(&gradient, NULL) == BSH_OK, "%s", what);
    check_forward(what, &c, y);
    check_gradient(what, &c, dx);
    use(isas[i], 3);
    bsh_cpu_linear_4bit(&forward_threads, NULL);
    bsh_cpu_linear_4bit(&gradient_threads, NULL);
    check_same_bytes(what, y_threads, y, y_bytes);
    check_same_bytes(what, dx_threads, dx, dx_bytes);
  }
  free(x), free(dy), free(bias), free(y), free(dx), free(y_threads), free(dx_threads), free(decoded);
  free_weight(&w);
}

/* ---- a stack of weights --------------------------------------------------------------------------------------------
 */

enum { MOST_EXPERTS = 5 };

/* The experts one after the other, in buffers of exactly that size. */
static owned_weight make_stack(owned_weight *const experts, float *const offsets, const int64_t E) {
  const bsh_weight *const one = &experts[0].weight;
  const int64_t blocks = one->n / one->blocksize, blocks2 = bsh_block_count(blocks, 256), bytes = one->n / 2;
  owned_weight w = {.packed = buffer(E * bytes),
                    .absmax = buffer(E * blocks * 4),
                    .absmax_code = buffer(E * blocks),
                    .absmax2 = buffer(E * blocks2 * 4)};
  for (int64_t e = 0; e < E; e++) {
    memcpy(w.packed + e * bytes, experts[e].packed, (size_t)bytes);
    memcpy(w.absmax + e * blocks, experts[e].absmax, (size_t)blocks * 4);
    memcpy(w.absmax_code + e * blocks, experts[e].absmax_code, (size_t)blocks);
    memcpy(w.absmax2 + e * blocks2, experts[e].absmax2, (size_t)blocks2 * 4);
    offsets[e] = experts[e].offset;
  }
  w.weight = *one;
  w.weight.n = E * one->n;
  w.weight.packed = w.packed;
  w.weight.scales = (bsh_scales){.absmax = w.absmax};
  if (one->scales.absmax == NULL)
    w.weight.scales = (bsh_scales){
        .absmax_code = w.absmax_code, .absmax_map = experts[0].map, .absmax2 = w.absmax2, .offset = offsets};
  return w;
}

/* The bits of linear_4bit of each expert's rows, zero behind them, with any number of threads; wrong offs are refused.
 */
static void compare_grouped(uint64_t *const state, const bsh_dtype dtype, const bsh_direction direction) {
  const int64_t blocksize = INT64_C(32) << random_below(state, 4), E = 1 + random_below(state, MOST_EXPERTS);
  const int64_t N = 2 * (1 + random_below(state, 40)), K = blocksize * (1 + random_below(state, 4));
  const int64_t width = direction == BSH_FORWARD ? K : N, height = direction == BSH_FORWARD ? N : K;
  owned_weight experts[MOST_EXPERTS];
  float offsets[MOST_EXPERTS];
  int32_t offs[MOST_EXPERTS];
  const bsh_format format = (bsh_format)random_below(state, 2);
  const bool nested = random_below(state, 2);
  int64_t M = 0, size = dtype_size(dtype);
  for (int64_t e = 0; e < E; e++) {
    experts[e] = make_weight(state, N * K, blocksize, format, nested);
    experts[e].offset = random_unit(state);
    M += random_below(state, 3) ? random_below(state, 24) : 0;
    offs[e] = (int32_t)M;
  }
  for (int64_t e = 0; e < E; e++) settle(&experts[e]);
  owned_weight stack = make_stack(experts, offsets, E);
  const int64_t S = M + random_below(state, 3);
  void *const x = make_input(state, S * width, dtype, false), *const bias = make_input(state, E * N, dtype, false);
  void *const y = buffer(S * height * size), *const expected = buffer(S * height * size);
  const bool biased = direction == BSH_FORWARD && random_below(state, 2);
  bsh_product_args args = {.weight = stack.weight, .x = x, .y = y, .M = S, .N = N, .K = K, .offs = offs, .E = E};
  args.bias = biased ? bias : NULL;
  args.ldx = width, args.ldy = height, args.dtype = dtype, args.direction = direction;
  for (int i = 0; i < n_isas; i++) {
    use(isas[i], 1);
    memset(expected, 0, (size_t)(S * height * size));
    for (int64_t e = 0, begin = 0; e < E; begin = offs[e++]) {
      bsh_product_args own = rows_of(&args, begin, offs[e] - begin);
      own.weight = experts[e].weight;
      own.y = (char *)expected + begin * height * size;
      if (biased) own.bias = (const char *)bias + e * N * size;
      CHECK(bsh_cpu_linear_4bit(&own, NULL) == BSH_OK, "expert %" PRId64, e);
    }
    for (int threads = 1; threads <= 3; threads += 2) {
      use(isas[i], threads);
      memset(y, 0xA5, (size_t)(S * height * size));
      CHECK(bsh_cpu_grouped_linear_4bit(&args, NULL) == BSH_OK, "%s", isas[i]);
      check_same_bytes("grouped", y, expected, S * height * size);
    }
  }
  const int64_t wrong = random_below(state, E);
  offs[wrong] = random_below(state, 2) ? (int32_t)S + 1 : -1;
  CHECK(bsh_cpu_grouped_linear_4bit(&args, NULL) == BSH_BAD_VALUE, "offs[%" PRId64 "] %d", wrong, offs[wrong]);
  for (int64_t e = 0; e < E; e++) free_weight(&experts[e]);
  free_weight(&stack);
  free(x), free(bias), free(y), free(expected);
}

/* ---- optimizers -------------------------------------------------------------------------------------------------- */

typedef struct {
  int64_t n, first, blocks; /* elements, of state1, scales of state1 */
  void *g, *p;
  float *state1, *state2, *absmax1, *absmax2;
  uint8_t *code1, *code2;
} optimizer_data;

static const bsh_step_numbers step_numbers = {.beta1 = 0.9f,
                                              .beta2 = 0.99f,
                                              .beta3 = 0.999f,
                                              .rest1 = 0.1f,
                                              .rest2 = 0.01f,
                                              .rest3 = 0.001f,
                                              .lr = 0.01f,
                                              .alpha = 3.0f,
                                              .eps = 1e-8f,
                                              .weight_decay = 0.1f,
                                              .gnorm_scale = 0.5f,
                                              .stored_lr = 0.01f,
                                              .decay = 0.999f,
                                              .correction1 = 0.19f,
                                              .correction2 = 0.14f,
                                              .inverse1 = 5.0f,
                                              .inverse2 = 50.0f,
                                              .step_size = -0.0074f,
                                              .scaled_eps = 1.4e-9f,
                                              .update_scale = 1.0f};

/* The same data for the same seed, in buffers that end where the tensor does. */
static optimizer_data make_data(uint64_t seed, const bsh_optimizer_8bit_blockwise_args *const args,
                                const bool hostile) {
  const int64_t moments = args->algorithm == BSH_ADEMAMIX ? 2 : 1, n_blocks = bsh_block_count(args->n, args->blocksize);
  optimizer_data d = {.n = args->n, .first = moments * args->n, .blocks = moments * n_blocks};
  d.g = make_input(&seed, d.n, args->g_dtype, hostile);
  d.p = make_input(&seed, d.n, args->p_dtype, false);
  d.state1 = make_input(&seed, d.first, BSH_F32, hostile);
  d.state2 = make_input(&seed, d.n, BSH_F32, false);
  d.absmax1 = make_input(&seed, d.blocks, BSH_F32, hostile);
  d.absmax2 = make_input(&seed, n_blocks, BSH_F32, hostile);
  d.code1 = buffer(d.first);
  d.code2 = buffer(d.n);
  for (int64_t i = 0; i < d.first; i++) d.code1[i] = (uint8_t)random_bits(&seed);
  for (int64_t i = 0; i < d.n; i++) d.code2[i] = (uint8_t)random_bits(&seed);
  return d;
}

static void free_data(const optimizer_data *const d) {
  free(d->g), free(d->p), free(d->state1), free(d->state2), free(d->absmax1), free(d->absmax2), free(d->code1);
  free(d->code2);
}

static optimizer_data stepped(const uint64_t seed, bsh_optimizer_8bit_blockwise_args blocks, const bool hostile,
                              float *const unorm) {
  const optimizer_data d = make_data(seed, &blocks, hostile);
  blocks.g = d.g, blocks.p = d.p, blocks.state1 = d.code1, blocks.state2 = d.code2;
  blocks.absmax1 = d.absmax1, blocks.absmax2 = d.absmax2;
  const bsh_optimizer_32bit_args floats = {.g = d.g,
                                           .p = d.p,
                                           .state1 = d.state1,
                                           .state2 = d.state2,
                                           .unorm = blocks.algorithm <= BSH_RMSPROP ? unorm : NULL,
                                           .max_unorm = 0.1f,
                                           .param_norm = 2.0f,
                                           .n = d.n,
                                           .g_dtype = blocks.g_dtype,
                                           .p_dtype = blocks.p_dtype,
                                           .algorithm = blocks.algorithm,
                                           .numbers = blocks.numbers};
  CHECK(bsh_cpu_optimizer_32bit(&floats) == BSH_OK, "32-bit step");
  CHECK(bsh_cpu_optimizer_8bit_blockwise(&blocks) == BSH_OK, "8-bit step");
  return d;
}

static void compare_data(const char *const what, const optimizer_data *const a, const optimizer_data *const b,
                         const bsh_dtype p_dtype, const int64_t blocksize) {
  check_same_bytes(what, a->p, b->p, a->n * dtype_size(p_dtype));
  check_same_bytes(what, a->state1, b->state1, 4 * a->first);
  check_same_bytes(what, a->state2, b->state2, 4 * a->n);
  check_same_bytes(what, a->code1, b->code1, a->first);
  check_same_bytes(what, a->code2, b->code2, a->n);
  check_same_bytes(what, a->absmax1, b->absmax1, 4 * a->blocks);
  check_same_bytes(what, a->absmax2, b->absmax2, 4 * bsh_block_count(a->n, blocksize));
}

/* Both steps, one after the other on the same p: every instruction set with three threads against scalar with one. */
static void compare_optimizers(uint64_t *const state, const int64_t n, const int64_t blocksize, const int round) {
  float map[256], unsigned_map[256];
  memcpy(map, dynamic_bits, sizeof map);
  for (int i = 0; i < 256; i++)
    unsigned_map[i] = round % 3 ? (float)i / 255.0f : fabsf(map[i]); /* the latter unsorted */
  bsh_optimizer_8bit_blockwise_args args = {.map1 = map,
                                            .map2 = unsigned_map,
                                            .n = n,
                                            .blocksize = blocksize,
                                            .g_dtype = (bsh_dtype)random_below(state, 3),
                                            .p_dtype = (bsh_dtype)random_below(state, 3),
                                            .algorithm = (bsh_optimizer)(round % BSH_N_OPTIMIZERS),
                                            .numbers = step_numbers};
  args.numbers.round = args.g_dtype == args.p_dtype ? args.p_dtype : BSH_F32;
  args.numbers.first = random_below(state, 4) == 0;
  args.numbers.skip_zeros = random_below(state, 4) == 0;
  const uint64_t seed = random_bits(state);
  const bool hostile = random_below(state, 2);
  float unorm = 0, other_unorm = 0;
  use("scalar", 1);
  const optimizer_data expected = stepped(seed, args, hostile, &unorm);
  for (int i = 0; i < n_isas; i++) {
    char what[128];
    snprintf(what, sizeof what, "optimizer %d %s %s %s n %" PRId64 " blocksize %" PRId64, (int)args.algorithm, isas[i],
             dtype_names[args.g_dtype], dtype_names[args.p_dtype], n, blocksize);
    use(isas[i], 3);
    const optimizer_data found = stepped(seed, args, hostile, &other_unorm);
    compare_data(what, &found, &expected, args.p_dtype, blocksize);
    CHECK(float_bits(unorm) == float_bits(other_unorm) || isnan(unorm), "%s: norm", what);
    free_data(&found);
  }
  free_data(&expected);
}

/* ---- checksum ---------------------------------------------------------------------------------------------------- */

static void checksums(uint64_t *const state) {
  for (int round = 0; round < 60; round++) {
    const int64_t n = round < 20 ? round : random_below(state, 3 << 20);
    uint8_t *const bytes = buffer(n);
    for (int64_t i = 0; i < n; i++) bytes[i] = (uint8_t)random_bits(state);
    uint64_t expected = 0;
    for (int64_t i = 0; i < (n + 7) / 8; i++) {
      uint64_t z = 0;
      for (int64_t j = 0; j < 8 && 8 * i + j < n; j++) z |= (uint64_t)bytes[8 * i + j] << (8 * j);
      z += (uint64_t)(i + 1) * 0x9E3779B97F4A7C15u;
      z = (z ^ (z >> 32)) * 0xD6E8FEB86659FD93u;
      expected += z ^ (z >> 32);
    }
    n_threads = 1 + round % 3;
    CHECK(bsh_cpu_checksum(bytes, n) == expected, "n %" PRId64, n);
    if (n) {
      bytes[random_below(state, n)] ^= (uint8_t)(1u << random_below(state, 8));
      CHECK(bsh_cpu_checksum(bytes, n) != expected, "a flipped bit goes unseen, n %" PRId64, n);
    }
    free(bytes);
  }
}

/* ---- calibration ---- */

static float *floats(uint64_t *const state, const int64_t n) {
  float *const x = buffer(4 * n);
  for (int64_t i = 0; i < n; i++) x[i] = random_below(state, 50) ? random_unit(state) : hostile_value(state, 1);
  return x;
}

static void compare_search(uint64_t *const state, const int64_t n, const int64_t blocksize) {
  const int64_t blocks = bsh_block_count(n, blocksize), G = 1 + random_below(state, 40),
                period = 1 + random_below(state, 300);
  float *const x = floats(state, n), *const weights = floats(state, period), *const scales = floats(state, blocks * G);
  uint8_t *const choice = buffer(blocks), *const expected = buffer(blocks);
  bsh_search_4bit_args args = {x, weights, scales, expected, n, period, blocksize, G, random_below(state, 2)};
  use("scalar", 1);
  bsh_cpu_search_4bit(&args);
  args.choice = choice;
  for (int i = 0; i < n_isas; i++) {
    use(isas[i], 1 + i);
    bsh_cpu_search_4bit(&args);
    check_same_bytes("search_4bit", choice, expected, blocks);
  }
  free(x), free(weights), free(scales), free(choice), free(expected);
}

static void compare_round(uint64_t *const state) {
  const int64_t N = random_below(state, 70), P = 1 + random_below(state, BSH_ROUND_COLUMNS), n = N * P;
  float *const w = floats(state, n), *const u = floats(state, P * P), *const scales = floats(state, n);
  float *const errors = buffer(4 * n), *const expected_errors = buffer(4 * n);
  uint8_t *const codes = buffer(n), *const expected = buffer(n);
  bsh_round_4bit_args args = {w, u, scales, expected, expected_errors, N, P, random_below(state, 3)};
  use("scalar", 1);
  bsh_cpu_round_4bit(&args);
  args.codes = codes, args.errors = errors;
  for (int i = 0; i < n_isas; i++) {
    use(isas[i], 1 + i);
    bsh_cpu_round_4bit(&args);
    check_same_bytes("round_4bit codes", codes, expected, n);
    for (int64_t j = 0; j < n; j++) /* the sign of a NaN depends on how a compiler orders a product */
      CHECK(errors[j] == expected_errors[j] || (isnan(errors[j]) && isnan(expected_errors[j])), "round_4bit errors");
  }
  free(w), free(u), free(scales), free(errors), free(expected_errors), free(codes), free(expected);
}

/* ---- MXFP4 and NVFP4 ---- */

static void compare_quantize_e2m1(uint64_t *const state, const int64_t n) {
  const int64_t n_bytes = bsh_packed_bytes(n), n_blocks = bsh_block_count(n, 16);
  float *const x = floats(state, n);
  uint8_t *const packed = buffer(n_bytes), *const expected = buffer(n_bytes);
  uint8_t *const scales = buffer(n_blocks), *const expected_scales = buffer(n_blocks);
  const float whole = ldexpf(1.0f + random_unit(state) / 4, (int)random_below(state, 60) - 30);
  bsh_quantize_e2m1_args args = {.x = x, .packed = expected, .scales = expected_scales, .n = n};
  args.whole = random_below(state, 2) ? &whole : NULL;
  args.dtype = (bsh_dtype)random_below(state, 3);
  use("scalar", 1);
  bsh_cpu_quantize_e2m1(&args);
  args.packed = packed, args.scales = scales;
  for (int i = 0; i < n_isas; i++) {
    use(isas[i], 1 + i);
    bsh_cpu_quantize_e2m1(&args);
    check_same_bytes("quantize_e2m1 codes", packed, expected, n_bytes);
    check_same_bytes("quantize_e2m1 scales", scales, expected_scales, bsh_block_count(n, args.whole ? 16 : 32));
  }
  free(x), free(packed), free(expected), free(scales), free(expected_scales);
}

/* ---- adapters ---- */

/* Some rows of the sum, on each instruction set the bytes of the scalar one. */
static void compare_merged_values(uint64_t *const state, const bsh_merge_4bit_args *const args) {
  const int64_t row = random_below(state, args->N), rows = 1 + random_below(state, args->N - row);
  const int64_t begin = row * args->K, n = rows * args->K;
  float *const values = buffer(4 * n), *const expected = buffer(4 * n);
  use("scalar", 1);
  bsh_cpu_merged_values(args, begin, begin + n, expected);
  for (int i = 0; i < n_isas; i++) {
    use(isas[i], 1 + i);
    bsh_cpu_merged_values(args, begin, begin + n, values);
    for (int64_t j = 0; j < n; j++) /* the bits of a NaN depend on which of several the sum has met */
      CHECK((isnan(values[j]) && isnan(expected[j])) || float_bits(values[j]) == float_bits(expected[j]),
            "merged_values");
  }
  free(values), free(expected);
}

static void compare_merge(uint64_t *const state, const int64_t blocksize) {
  const int64_t N = 1 + random_below(state, 60), K = 1 + random_below(state, 300), R = random_below(state, 12),
                n = N * K;
  const int64_t n_blocks = bsh_block_count(n, blocksize), n_bytes = bsh_packed_bytes(n);
  float *const scales = buffer(4 * R), *const absmax = buffer(4 * n_blocks),
               *const expected_absmax = buffer(4 * n_blocks);
  float *const a = floats(state, R * K), *const b = floats(state, N * R), *const of_blocks = buffer(4 * n_blocks);
  uint8_t *const packed = buffer(n_bytes), *const merged = buffer(n_bytes), *const expected = buffer(n_bytes);
  for (int64_t r = 0; r < R; r++) scales[r] = r == R - 1 || random_below(state, 3) == 0 ? random_unit(state) : 0.0f;
  for (int64_t i = 0; i < n_bytes; i++) packed[i] = (uint8_t)random_below(state, 256);
  for (int64_t i = 0; i < n_blocks; i++) of_blocks[i] = random_unit(state);
  const bsh_dtype dtype = (bsh_dtype)random_below(state, 3);
  const bsh_weight weight = {.packed = packed,
                             .scales = {.absmax = of_blocks},
                             .n = n,
                             .blocksize = blocksize,
                             .format = (bsh_format)random_below(state, 2)};
  bsh_merge_4bit_args args = {.weight = weight,
                              .a = a,
                              .b = b,
                              .scales = scales,
                              .packed = expected,
                              .absmax = expected_absmax,
                              .N = N,
                              .K = K,
                              .R = R,
                              .dtype = dtype};
  use("scalar", 1);
  bsh_cpu_merge_4bit(&args);
  args.packed = merged, args.absmax = absmax;
  for (int i = 0; i < n_isas; i++) {
    use(isas[i], 1 + i);
    bsh_cpu_merge_4bit(&args);
    check_same_bytes("merge_4bit codes", merged, expected, n_bytes);
    check_same_bytes("merge_4bit scales", (uint8_t *)absmax, (uint8_t *)expected_absmax, 4 * n_blocks);
  }
  args.packed = NULL, args.absmax = NULL;
  args.weight.format = (bsh_format)random_below(state, BSH_4BIT_FORMATS);
  compare_merged_values(state, &args);
  free(scales), free(absmax), free(expected_absmax), free(a), free(b), free(of_blocks);
  free(packed), free(merged), free(expected);
}

int main(const int argc, char **const argv) {
  check_seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
  const int rounds = argc > 2 ? atoi(argv[2]) : 150;
  uint64_t state = check_seed;
  bsh_parallel_for = threaded_for;
  n_isas = bsh_cpu_isas(isas, 4);
  CHECK(bsh_cpu_set_isa("sse9") == BSH_BAD_VALUE, "an unknown instruction set");
  conversion_facts();
  grid_facts();
  reciprocal_facts();
  for (int i = 0; i < n_isas; i++) {
    use(isas[i], 1);
    format_facts();
  }
  for (int round = 0; round < rounds; round++) {
    const int64_t blocksize = INT64_C(32) << random_below(&state, 8);
    const int64_t n = round < 4 ? round : random_below(&state, round % 8 ? 5000 : 70000);
    compare_quantize_4bit(&state, n, blocksize);
    compare_quantize_e2m1(&state, n);
    compare_blockwise(&state, n, blocksize);
    compare_dequantize_4bit(&state, 1 + random_below(&state, 40), random_below(&state, 700), blocksize);
    compare_dequantize_4bit(&state, 1, n, blocksize);
    compare_optimizers(&state, n, blocksize, round);
    if (round % 3 == 0) compare_search(&state, n % 5000, blocksize), compare_round(&state);
    if (round % 3 == 1) compare_merge(&state, blocksize);
    const int64_t K = round % 2 ? 64 * (1 + random_below(&state, 12)) : random_below(&state, 700);
    const bsh_dtype dtype = (bsh_dtype)random_below(&state, 3);
    compare_linear(&state, dtype, random_below(&state, 20), random_below(&state, 70), K, blocksize, round % 3 == 0);
    compare_grouped(&state, dtype, round % 2 ? BSH_FORWARD : BSH_INPUT_GRADIENT);
  }
  for (int M = 1; M <= 16; M++)
    for (bsh_dtype dtype = BSH_F32; dtype <= BSH_BF16; dtype++) compare_linear(&state, dtype, M, 5, 1088, 64, M % 2);
  for (int i = 0; i < 12; i++)
    compare_linear(&state, (bsh_dtype)(i % 3), 17 + i, i % 2 ? 150 : 65, 65, 64, i % 4 == 0); /* panels */
  for (int odd_scales = 0; odd_scales < 2; odd_scales++) { /* more rows and columns than a kernel takes at a time */
    compare_linear(&state, BSH_BF16, 3, 517, 64, 64, odd_scales);
    compare_linear(&state, BSH_BF16, 2, 9, 8384, 64, odd_scales);
    compare_linear(&state, BSH_BF16, 13, 6, 4288, 128, odd_scales);
  }
  checksums(&state);
  printf("test_cpu: ok (seed %" PRIu64 ", %d rounds,", check_seed, rounds);
  for (int i = 0; i < n_isas; i++) printf(" %s", isas[i]);
  printf(")\n");
}
