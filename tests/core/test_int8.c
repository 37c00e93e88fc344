/* test_int8.c - the int8 ops on the CPU: every instruction set against the scalar one and against arithmetic written
 * down here, with hostile codes and values, at sizes around those of tiles; one thread against three. */
#include "check.h"

#include <math.h>

#include "cpu/int8.h"
#include "inputs.h"

uint64_t check_seed;

enum { MOST_TABLES = 5 };
static const char *isas[4];
static int n_isas;

static void use(const int isa, const int threads) {
  CHECK(bsh_cpu_set_isa(isas[isa]) == BSH_OK, "%s", isas[isa]);
  n_threads = threads;
}

/* ---- the arithmetic of codes ------------------------------------------------------------------------------------ */

/* Every absmax that fp16 has: codes reach 127 and no further, and are the nearest to even of the fp32 product. */
static void scale_facts(void) {
  for (uint32_t bits = 1; bits < 0x7C00; bits++) {
    const float absmax = f16_to_f32((uint16_t)bits), scale = int8_scale(absmax, BSH_F16);
    CHECK(int8_code(absmax, scale) == 127 && int8_code(-absmax, scale) == -127, "absmax %g", (double)absmax);
    CHECK(fabs((double)scale * (double)absmax - 127) < 127 * 0x1p-22, "scale of %g", (double)absmax);
    for (int part = 1; part < 16; part++) {
      const float value = f16_to_f32((uint16_t)(bits * (uint32_t)part / 16));
      CHECK(int8_code(value, scale) == nearbyintf(value * scale), "%g of %g", (double)value, (double)absmax);
    }
  }
  const float none[] = {0.0f, 0x1p-119f, INFINITY, NAN};
  for (int i = 0; i < 4; i++)
    CHECK(int8_scale(none[i], BSH_F32) == 0.0f && int8_code(1.0f, 0.0f) == 0, "%g", (double)none[i]);
  CHECK(int8_code(NAN, 1.0f) == 0 && int8_code(INFINITY, 1.0f) == 0 && int8_code(2.5f, 1.0f) == 2, "int8_code");
  for (float absmax = 0x1p-118f; absmax < INFINITY; absmax *= 2)
    CHECK(int8_code(absmax, int8_scale(absmax, BSH_BF16)) == 127, "absmax %g", (double)absmax);
}

static int8_t *make_codes(uint64_t *const state, const int64_t n, const bool hostile) {
  int8_t *const codes = buffer(n);
  for (int64_t i = 0; i < n; i++)
    codes[i] = hostile ? (int8_t)(random_below(state, 4) ? -128 : 127) : (int8_t)random_bits(state);
  return codes;
}

static float *make_absmax(uint64_t *const state, const int64_t n) {
  float *const absmax = buffer(4 * n);
  for (int64_t i = 0; i < n; i++) absmax[i] = random_unit(state);
  return absmax;
}

/* ---- quantize_int8 ---------------------------------------------------------------------------------------------- */

/* What core/int8.h says, an element at a time, from the outliers that were found. */
static void check_codes(const bsh_quantize_int8_args *const args) {
  for (int64_t m = 0; m < args->M; m++) {
    float absmax = 0.0f;
    for (int64_t k = 0; k < args->K; k++) {
      const float value = fabsf(load_f32(args->x, args->dtype, m * args->ldx + k));
      const bool outlier = args->outliers != NULL && value >= args->threshold;
      CHECK(!outlier || args->outliers[k] == 1, "an outlier is not marked");
      if (!outlier && !(absmax != absmax) && !(value <= absmax)) absmax = value;
    }
    const uint32_t expected = absmax != absmax ? 0x7FFFFFFFu : float_bits(absmax);
    CHECK(float_bits(args->absmax[m]) == expected, "absmax %08x, expected %08x", float_bits(args->absmax[m]), expected);
    const float scale = int8_scale(absmax, args->dtype);
    for (int64_t k = 0; k < args->K; k++) {
      const float value = load_f32(args->x, args->dtype, m * args->ldx + k);
      const bool zero =
          args->outliers != NULL && (fabsf(value) >= args->threshold || (args->M > 1 && args->outliers[k]));
      const int8_t code = zero ? 0 : int8_code(value, scale);
      CHECK(args->codes[m * args->K + k] == code, "code %d, expected %d", args->codes[m * args->K + k], code);
    }
  }
}

static void compare_quantize(uint64_t *const state, const int64_t M, const int64_t K, const bsh_dtype dtype,
                             const float threshold) {
  const int64_t ldx = K + random_below(state, 3);
  void *const x = make_input(state, M * ldx, dtype, random_below(state, 2));
  for (int64_t i = 0; isfinite(threshold) && i < M * ldx; i += 1 + random_below(state, 30))
    store_f32(x, dtype, i, random_below(state, 2) ? threshold : -threshold); /* exactly there */
  int8_t *const codes = buffer(M * K), *const expected = buffer(M * K);
  float *const absmax = buffer(4 * M), *const expected_absmax = buffer(4 * M);
  uint8_t *const outliers = buffer(K), *const expected_outliers = buffer(K);
  const bool marks = threshold > 0.0f;
  bsh_quantize_int8_args args = {x,         expected, expected_absmax, marks ? expected_outliers : NULL, M, K, ldx,
                                 threshold, dtype};
  use(0, 1);
  CHECK(bsh_cpu_quantize_int8(&args) == BSH_OK, "quantize_int8");
  check_codes(&args);
  args.codes = codes, args.absmax = absmax, args.outliers = marks ? outliers : NULL;
  for (int isa = 0; isa < n_isas; isa++) {
    use(isa, isa % 2 ? 3 : 1);
    CHECK(bsh_cpu_quantize_int8(&args) == BSH_OK, "quantize_int8");
    check_same_bytes("codes", codes, expected, M * K);
    check_same_bytes("absmax", absmax, expected_absmax, 4 * M);
    if (marks) check_same_bytes("outliers", outliers, expected_outliers, K);
  }
  free(x), free(codes), free(expected), free(absmax), free(expected_absmax), free(outliers), free(expected_outliers);
}

static void compare_dequantize(uint64_t *const state, const int64_t N, const int64_t K, const bsh_dtype dtype) {
  int8_t *const codes = make_codes(state, N * K, false);
  float *const absmax = make_absmax(state, N);
  if (random_below(state, 3) == 0) absmax[0] = random_below(state, 2) ? NAN : INFINITY;
  void *const y = buffer(N * K * dtype_size(dtype));
  const bsh_dequantize_int8_args args = {codes, absmax, y, N, K, dtype};
  for (int isa = 0; isa < n_isas; isa++) {
    use(isa, 1 + 2 * (isa % 2));
    CHECK(bsh_cpu_dequantize_int8(&args) == BSH_OK, "dequantize_int8");
    for (int64_t i = 0; i < N * K; i++) {
      const float unit = 7.874015718698502e-3f, value = (float)codes[i] * absmax[i / K];
      char expected[4];
      store_f32(expected, dtype, 0, value * unit);
      check_same_bytes(isas[isa], (char *)y + i * dtype_size(dtype), expected, dtype_size(dtype));
    }
  }
  free(codes), free(absmax), free(y);
}

/* ---- product_int8, scale_product_int8 --------------------------------------------------------------------------- */

static void features(void) {
#if BSH_X86_64
  CHECK(bsh_cpu_has()->avx512vnni == (__builtin_cpu_supports("avx512vnni") != 0), "AVX512-VNNI");
#if !defined(__clang__) /* which does not know the word */
  CHECK(bsh_cpu_has()->avxvnni == (__builtin_cpu_supports("avxvnni") != 0), "AVX-VNNI");
#endif
#endif
}

/* All kernels, also those that this CPU does not choose. */
static int tables(const bsh_cpu_int8_kernels *found[MOST_TABLES]) {
  int n = 0;
  for (; n < n_isas; n++) {
    use(n, 1);
    found[n] = bsh_cpu()->int8;
  }
#if BSH_X86_64
  if (n_isas > 1 && bsh_cpu_has()->avxvnni) found[n++] = &bsh_cpu_avx_vnni_int8;
  if (n_isas > 2 && bsh_cpu_has()->avx512vnni) found[n++] = &bsh_cpu_avx512_vnni_int8;
#elif BSH_AARCH64
  if (bsh_cpu_has()->dotprod) found[n++] = &bsh_cpu_neon_dot_int8;
  if (bsh_cpu_has()->i8mm) found[n++] = &bsh_cpu_neon_i8mm_int8;
#endif
  return n;
}

static void compare_product(uint64_t *const state, const int64_t M, const int64_t N, const int64_t K,
                            const bool hostile) {
  int8_t *const a = make_codes(state, M * K, hostile), *const b = make_codes(state, N * K, hostile);
  int32_t *const sums = buffer(4 * M * N), *const expected = buffer(4 * M * N);
  void *const scratch = aligned_alloc(64, BSH_INT8_SCRATCH);
  CHECK(scratch != NULL, "no memory");
  for (int64_t i = 0; i < M * N; i++) {
    int64_t sum = 0;
    for (int64_t k = 0; k < K; k++) sum += (int64_t)a[i / N * K + k] * b[i % N * K + k];
    expected[i] = (int32_t)sum;
    CHECK(expected[i] == sum, "the sum fits");
  }
  const bsh_product_int8_args args = {a, b, sums, M, N, K};
  const bsh_cpu_int8_kernels *found[MOST_TABLES];
  for (int i = 0; N <= BSH_INT8_PANEL && i < tables(found); i++) {
    memset(sums, 0xA5, (size_t)(4 * M * N));
    found[i]->product(&args, N, scratch);
    check_same_bytes("product", sums, expected, 4 * M * N);
  }
  for (int isa = 0; isa < n_isas; isa++) {
    use(isa, 1 + 2 * (isa % 2));
    memset(sums, 0xA5, (size_t)(4 * M * N));
    CHECK(bsh_cpu_product_int8(&args) == BSH_OK, "product_int8");
    check_same_bytes(isas[isa], sums, expected, 4 * M * N);
  }
  free(a), free(b), free(sums), free(expected), free(scratch);
}

static void compare_scale(uint64_t *const state, const int64_t M, const int64_t N, const bsh_dtype dtype,
                          const bool with_bias) {
  int32_t *const sums = buffer(4 * M * N);
  for (int64_t i = 0; i < M * N; i++) sums[i] = (int32_t)random_bits(state) >> random_below(state, 20);
  float *const rows = make_absmax(state, M), *const columns = make_absmax(state, N);
  void *const bias = make_input(state, N, dtype, true), *const y = buffer(M * N * dtype_size(dtype));
  const bsh_scale_product_int8_args args = {sums, rows, columns, with_bias ? bias : NULL, y, M, N, dtype};
  if (random_below(state, 3) == 0) rows[0] = NAN;
  for (int isa = 0; isa < n_isas; isa++) {
    use(isa, 1 + 2 * (isa % 2));
    CHECK(bsh_cpu_scale_product_int8(&args) == BSH_OK, "scale_product_int8");
    for (int64_t i = 0; i < M * N; i++) {
      const float scaled = (float)sums[i] * rows[i / N] * columns[i % N];
      char expected[4];
      store_f32(expected, dtype, 0, fmaf(scaled, 6.200012e-05f, with_bias ? load_f32(bias, dtype, i % N) : 0.0f));
      check_same_bytes(isas[isa], (char *)y + i * dtype_size(dtype), expected, dtype_size(dtype));
    }
  }
  free(sums), free(rows), free(columns), free(bias), free(y);
}

/* ---- layers ----------------------------------------------------------------------------------------------------- */

typedef struct {
  int64_t M, N, K;
  bsh_dtype dtype;
  int8_t *codes;
  float *absmax;
  void *x, *bias, *y; /* x [M, K], or dy [M, N] */
} layer;

static layer make_layer(uint64_t *const state, const int64_t M, const int64_t N, const int64_t K, const bsh_dtype dtype,
                        const bool dgrad) {
  layer made = {.M = M, .N = N, .K = K, .dtype = dtype};
  made.codes = make_codes(state, N * K, false);
  made.absmax = make_absmax(state, N);
  made.x = make_input(state, M * (dgrad ? N : K), dtype, false);
  made.bias = make_input(state, N, dtype, false);
  made.y = buffer(M * (dgrad ? K : N) * dtype_size(dtype));
  return made;
}

/* y = x W^T + bias of a layer, or dx = dy W. */
static bsh_product_args product_of(const layer *const l, const void *const bias, const float threshold,
                                   const bsh_direction direction) {
  const bool forward = direction == BSH_FORWARD;
  return (bsh_product_args){.weight = {.packed = (const uint8_t *)l->codes,
                                       .scales = {.absmax = l->absmax},
                                       .n = l->N * l->K,
                                       .format = BSH_INT8},
                            .x = l->x,
                            .bias = bias,
                            .y = l->y,
                            .M = l->M,
                            .N = l->N,
                            .K = l->K,
                            .ldx = forward ? l->K : l->N,
                            .ldy = forward ? l->N : l->K,
                            .threshold = threshold,
                            .dtype = l->dtype,
                            .direction = direction};
}

static void free_layer(const layer *const l) { free(l->codes), free(l->absmax), free(l->x), free(l->bias), free(l->y); }

static double weight(const layer *const l, const int64_t n, const int64_t k) {
  return (double)l->codes[n * l->K + k] * (double)l->absmax[n] / 127.0;
}

/* |y - exact| within one rounding, and `terms` fp32 ones of the sum of magnitudes. */
static void check_near(const layer *const l, const char *const what, const int64_t i, const double exact,
                       const double magnitude, const int64_t terms) {
  static const double unit[] = {0x1p-24, 0x1p-11, 0x1p-8};
  const double y = (double)load_f32(l->y, l->dtype, i), smallest = l->dtype == BSH_F16 ? 0x1p-24 : 0x1p-120;
  const double bound = 1.01 * unit[l->dtype] * fabs(exact) + (double)(terms + 8) * 0x1p-24 * magnitude + smallest;
  CHECK(fabs(y - exact) <= bound,
        "%s: element %" PRId64 " of [%" PRId64 ", %" PRId64 ", %" PRId64 "] is %g, expected %g", what, i, l->M, l->N,
        l->K, y, exact);
}

/* x of a coded row, where it is coded. */
static double coded(const layer *const l, const uint8_t *const outliers, const int8_t *const codes,
                    const float *const absmax, const int64_t m, const int64_t k) {
  if (l->M <= BSH_INT8_FEW || outliers[k]) return (double)load_f32(l->x, l->dtype, m * l->K + k);
  return (double)codes[m * l->K + k] * (double)absmax[m] / 127.0;
}

static void compare_linear(uint64_t *const state, const int64_t M, const int64_t N, const int64_t K,
                           const bsh_dtype dtype, const float threshold) {
  const layer l = make_layer(state, M, N, K, dtype, false);
  const bool with_bias = random_below(state, 2);
  const int64_t n_bytes = M * N * dtype_size(dtype);
  void *const one_thread = buffer(n_bytes);
  int8_t *const codes = buffer(M * K);
  float *const absmax = buffer(4 * M);
  uint8_t *const outliers = buffer(K);
  memset(outliers, 0, (size_t)K);
  const bsh_product_args args = product_of(&l, with_bias ? l.bias : NULL, threshold, BSH_FORWARD);
  const bsh_quantize_int8_args quantized = {l.x, codes,     absmax, threshold > 0.0f ? outliers : NULL, M, K,
                                            K,   threshold, dtype};
  use(0, 1);
  bsh_cpu_quantize_int8(&quantized);
  for (int isa = 0; isa < n_isas; isa++) {
    use(isa, 1);
    CHECK(bsh_cpu_linear_int8(&args) == BSH_OK, "linear_int8");
    memcpy(one_thread, l.y, (size_t)n_bytes);
    use(isa, 3);
    CHECK(bsh_cpu_linear_int8(&args) == BSH_OK, "linear_int8");
    check_same_bytes("three threads", l.y, one_thread, n_bytes);
    for (int64_t i = 0; i < M * N; i++) {
      double exact = with_bias ? (double)load_f32(l.bias, dtype, i % N) : 0.0, magnitude = fabs(exact);
      for (int64_t k = 0; k < K; k++) {
        const double term = coded(&l, outliers, codes, absmax, i / N, k) * weight(&l, i % N, k);
        exact += term, magnitude += fabs(term);
      }
      check_near(&l, isas[isa], i, exact, 1.00001 * magnitude, K);
    }
  }
  free(one_thread), free(codes), free(absmax), free(outliers);
  free_layer(&l);
}

/* Many rows without outliers are the three ops, bit for bit. */
static void compare_composition(uint64_t *const state, const int64_t M, const int64_t N, const int64_t K,
                                const bsh_dtype dtype) {
  const layer l = make_layer(state, M, N, K, dtype, false);
  const int64_t n_bytes = M * N * dtype_size(dtype);
  int8_t *const codes = buffer(M * K);
  float *const absmax = buffer(4 * M);
  int32_t *const sums = buffer(4 * M * N);
  void *const expected = buffer(n_bytes);
  const bsh_quantize_int8_args quantized = {l.x, codes, absmax, NULL, M, K, K, 0.0f, dtype};
  const bsh_product_int8_args product = {codes, l.codes, sums, M, N, K};
  const bsh_scale_product_int8_args scaled = {sums, absmax, l.absmax, l.bias, expected, M, N, dtype};
  const bsh_product_args args = product_of(&l, l.bias, 0.0f, BSH_FORWARD);
  use(0, 1);
  CHECK(bsh_cpu_quantize_int8(&quantized) == BSH_OK && bsh_cpu_product_int8(&product) == BSH_OK, "quantize, product");
  CHECK(bsh_cpu_scale_product_int8(&scaled) == BSH_OK, "scale_product_int8");
  for (int isa = 0; isa < n_isas; isa++) {
    use(isa, 1 + 2 * (isa % 2));
    CHECK(bsh_cpu_linear_int8(&args) == BSH_OK, "linear_int8");
    check_same_bytes(isas[isa], l.y, expected, n_bytes);
  }
  free(codes), free(absmax), free(sums), free(expected);
  free_layer(&l);
}

static void compare_dgrad(uint64_t *const state, const int64_t M, const int64_t N, const int64_t K,
                          const bsh_dtype dtype) {
  const layer l = make_layer(state, M, N, K, dtype, true);
  const int64_t n_bytes = M * K * dtype_size(dtype);
  void *const one_thread = buffer(n_bytes);
  const bsh_product_args args = product_of(&l, NULL, 0.0f, BSH_INPUT_GRADIENT);
  for (int isa = 0; isa < n_isas; isa++) {
    use(isa, 1);
    CHECK(bsh_cpu_linear_int8_dgrad(&args) == BSH_OK, "linear_int8_dgrad");
    memcpy(one_thread, l.y, (size_t)n_bytes);
    use(isa, 3);
    CHECK(bsh_cpu_linear_int8_dgrad(&args) == BSH_OK, "linear_int8_dgrad");
    check_same_bytes("three threads", l.y, one_thread, n_bytes);
    for (int64_t i = 0; i < M * K; i++) {
      double exact = 0.0, magnitude = 0.0;
      for (int64_t n = 0; n < N; n++) {
        const double term = (double)load_f32(l.x, dtype, i / K * N + n) * weight(&l, n, i % K);
        exact += term, magnitude += fabs(term);
      }
      check_near(&l, isas[isa], i, exact, 1.00001 * magnitude, N);
    }
  }
  free(one_thread);
  free_layer(&l);
}

/* A NaN or an infinity, which a threshold may make an outlier, is seen in its row and in no other; and a hostile weight
 * is read within its bounds. */
static void compare_hostile(uint64_t *const state, const int64_t M, const float threshold) {
  enum { N = 9, K = 70 };
  const layer l = make_layer(state, M, N, K, BSH_F16, false);
  const int64_t row = random_below(state, M), k = random_below(state, K);
  for (int64_t n = 0; n < N; n++) l.codes[n * K + k] = (int8_t)(1 + random_below(state, 127));
  store_f32(l.x, l.dtype, row * K + k, random_below(state, 2) ? NAN : INFINITY);
  const bsh_product_args args = product_of(&l, NULL, threshold, BSH_FORWARD);
  for (int isa = 0; isa < n_isas; isa++) {
    use(isa, 1);
    CHECK(bsh_cpu_linear_int8(&args) == BSH_OK, "linear_int8");
    for (int64_t i = 0; i < M * N; i++)
      CHECK(!isfinite(load_f32(l.y, l.dtype, i)) == (i / N == row), "%s: element %" PRId64 ", row %" PRId64, isas[isa],
            i, row);
  }
  free_layer(&l);
}

/* ---- all -------------------------------------------------------------------------------------------------------- */

static void fuzz(uint64_t *const state, const int rounds) {
  static const float thresholds[] = {0.0f, 0x1p-24f, 0.25f, 1.0f, 2.5f, INFINITY};
  for (int round = 0; round < rounds; round++) {
    const bsh_dtype dtype = (bsh_dtype)random_below(state, 3);
    const float threshold = thresholds[random_below(state, 6)];
    const int64_t M = 1 + random_below(state, 14), N = 1 + random_below(state, 40), K = 1 + random_below(state, 300);
    compare_quantize(state, round % 3 ? M : 1, K, dtype, threshold);
    compare_dequantize(state, N, K, dtype);
    compare_product(state, M, N, K, round % 4 == 0);
    compare_scale(state, M, N, dtype, round % 2);
    compare_linear(state, M, N, K, dtype, threshold);
    compare_composition(state, BSH_INT8_FEW + M, N, K, dtype);
    compare_dgrad(state, M, N, K, dtype);
    compare_hostile(state, M, threshold);
  }
}

/* More rows and columns than a tile, a panel, a chunk or a step has. */
static void large(uint64_t *const state) {
  compare_product(state, 13, 131, 4096 + 65, true);
  compare_product(state, 1, 128, 8192, true);
  compare_product(state, 7, 128, 1024, false);
  compare_product(state, 3, 259, 64, false);
  compare_product(state, 141, 131, 4096 + 67, true);
  compare_product(state, 128, 64, 130, false);
  compare_product(state, 1, 1, BSH_INT8_MAX_K, true);
  compare_composition(state, 400, 140, 96, BSH_F16);
  compare_linear(state, 99, 130, 65, BSH_BF16, 2.5f);
  for (int M = 1; M <= BSH_INT8_FEW; M++) compare_linear(state, M, 70, 1100, BSH_BF16, 0.0f);
  compare_linear(state, 1, 3, 8192 + 40, BSH_F32, 0.0f);
  compare_dgrad(state, 2, 5, 530, BSH_F32);
  compare_dgrad(state, 255, 9, 65, BSH_BF16);
  compare_dgrad(state, 10, 1027, 66, BSH_F16);
}

int main(const int argc, char **const argv) {
  check_seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
  const int rounds = argc > 2 ? atoi(argv[2]) : 60;
  uint64_t state = check_seed;
  bsh_parallel_for = threaded_for;
  n_isas = bsh_cpu_isas(isas, 4);
  features();
  scale_facts();
  fuzz(&state, rounds);
  large(&state);
  printf("test_int8: ok (seed %" PRIu64 ", %d rounds)\n", check_seed, rounds);
}
