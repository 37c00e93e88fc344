/* cpu/scalar.c - the CPU kernels in plain C: the reference for every other instruction set, and the fallback.
 *
 * One element at a time, every rounding written out. */
#include "core/numerics.h"
#include "cpu/cpu.h"
#include "core/e2m1.h"

/* ---- quantize_4bit -------------------------------------------------------------------------------------------- */

/* Elements of a block beyond the end of x count as 0; a full block starts below every magnitude, as on the GPU. */
static float block_absmax(const void *const x, const bsh_dtype dtype, const float offset, const int64_t begin,
                          const int64_t end, const int64_t blocksize) {
  float absmax = end - begin < blocksize ? 0.0f : -FLT_MAX;
  for (int64_t i = begin; i < end; i++) absmax = absmax_step(absmax, load_f32(x, dtype, i) - offset);
  return absmax;
}

static void quantize_4bit_scalar(const bsh_quantize_4bit_args *const args, const int64_t block_begin,
                                 const int64_t block_end) {
  for (int64_t b = block_begin; b < block_end; b++) {
    const int64_t begin = b * args->blocksize;
    const int64_t end = min_i64(begin + args->blocksize, args->n);
    const float absmax = block_absmax(args->x, args->dtype, 0.0f, begin, end, args->blocksize);
    const float inverse = reciprocal(absmax);
    args->absmax[b] = absmax;
    for (int64_t i = begin; i < end; i += 2) {
      uint8_t codes[2];
      for (int j = 0; j < 2; j++) {
        const float x = i + j < end ? load_f32(args->x, args->dtype, i + j) : 0.0f;
        const float v = multiply_flush(inverse, x);
        codes[j] = encode_4bit(args->format, v);
      }
      args->packed[i / 2] = (uint8_t)(codes[0] << 4 | codes[1]);
    }
  }
}

/* ---- quantize_e2m1 -------------------------------------------------------------------------------------------- */

/* The larger magnitude of two; NaN is more than infinity. */
static float larger(const float a, const float b) {
  const uint32_t x = float_bits(fabsf(a)), y = float_bits(fabsf(b));
  return bits_float(x > y ? x : y);
}

/* Of a NaN 7, as the vectors have it. */
static uint8_t e2m1_code(const float v) { return v == v ? encode_4bit(BSH_E2M1, v) : 7; }

static void quantize_e2m1_scalar(const bsh_quantize_e2m1_args *const args, const int64_t begin, const int64_t end) {
  const int64_t blocksize = args->whole == NULL ? BSH_MXFP4_BLOCK : BSH_NVFP4_BLOCK;
  for (int64_t first = begin; first < end; first += blocksize) {
    const int64_t last = min_i64(first + blocksize, end);
    float largest = 0.0f, unit;
    for (int64_t i = first; i < last; i++) largest = larger(largest, load_f32(args->x, args->dtype, i));
    args->scales[first / blocksize] = bsh_short_scale(largest, args->whole, &unit);
    for (int64_t i = first; i < last; i += 2) {
      const uint8_t high = e2m1_code(load_f32(args->x, args->dtype, i) / unit);
      const uint8_t low = i + 1 < last ? e2m1_code(load_f32(args->x, args->dtype, i + 1) / unit) : 0;
      args->packed[i / 2] = (uint8_t)(high << 4 | low);
    }
  }
}

/* ---- dequantize_4bit ------------------------------------------------------------------------------------------ */

static void decode_4bit_scalar(const bsh_decode_run *const run) {
  const bsh_weight *const weight = run->weight;
  const bsh_dtype out_dtype = run->as_f32 ? BSH_F32 : run->dtype;
  float values[16];
  int64_t block = -1;
  const int64_t n = run->end - run->begin;
  for (int64_t to = 0; to < run->rows * n; to++) {
    const int64_t i = run->begin + to / n * run->step + to % n;
    if (i / weight->blocksize != block) {
      block = i / weight->blocksize;
      block_values(weight, run->dtype, block, values);
    }
    store_f32(run->out, out_dtype, to, values[packed_code(weight->packed, i)]);
  }
}

/* ---- quantize_blockwise, dequantize_blockwise ----------------------------------------------------------------- */

static void quantize_blockwise_scalar(const bsh_quantize_blockwise_args *const args, const int64_t block_begin,
                                      const int64_t block_end) {
  const float offset = args->offset ? args->offset[0] : 0.0f;
  for (int64_t b = block_begin; b < block_end; b++) {
    const int64_t begin = b * args->blocksize;
    const int64_t end = min_i64(begin + args->blocksize, args->n);
    const float absmax = block_absmax(args->x, args->dtype, offset, begin, end, args->blocksize);
    const float inverse = reciprocal(absmax);
    args->absmax[b] = absmax;
    for (int64_t i = begin; i < end; i++)
      args->code[i] = encode_8bit(args->map, multiply_flush(inverse, load_f32(args->x, args->dtype, i) - offset));
  }
}

static void dequantize_blockwise_scalar(const bsh_dequantize_blockwise_args *const args, const int64_t begin,
                                        const int64_t end) {
  for (int64_t i = begin; i < end; i++) {
    float value = multiply_flush(args->map[args->code[i]], args->absmax[i / args->blocksize]);
    if (args->offset) value += args->offset[0];
    store_f32(args->out, args->dtype, i, value);
  }
}

/* ---- linear_4bit, linear_4bit_dgrad --------------------------------------------------------------------------- */

enum { TILE = 256 }; /* weights decoded at a time, on the stack */

static void decode_tile(const bsh_weight *const weight, const bsh_dtype dtype, const int64_t begin, const int64_t n,
                        float tile[TILE]) {
  decode_4bit_scalar(&(bsh_decode_run){
      .weight = weight, .out = tile, .begin = begin, .end = begin + n, .rows = 1, .dtype = dtype, .as_f32 = true});
}

static void linear_4bit_scalar(const bsh_product_args *const args, const int64_t row_begin, const int64_t row_end) {
  float tile[TILE];
  for (int64_t row = row_begin; row < row_end; row++) {
    double sums[BSH_CPU_SMALL_M] = {0};
    for (int64_t k0 = 0; k0 < args->K; k0 += TILE) {
      const int64_t n = min_i64(TILE, args->K - k0);
      decode_tile(&args->weight, args->dtype, row * args->K + k0, n, tile);
      for (int64_t m = 0; m < args->M; m++)
        for (int64_t k = 0; k < n; k++)
          sums[m] += (double)load_f32(args->x, args->dtype, m * args->ldx + k0 + k) * (double)tile[k];
    }
    const double bias = args->bias ? (double)load_f32(args->bias, args->dtype, row) : 0.0;
    for (int64_t m = 0; m < args->M; m++) store_f32(args->y, args->dtype, m * args->ldy + row, (float)(sums[m] + bias));
  }
}

static void linear_4bit_dgrad_scalar(const bsh_product_args *const args, const int64_t column_begin,
                                     const int64_t column_end) {
  float tile[TILE];
  for (int64_t k0 = column_begin; k0 < column_end; k0 += TILE) {
    const int64_t n = min_i64(TILE, column_end - k0);
    float sums[BSH_CPU_SMALL_M][TILE] = {0};
    for (int64_t row = 0; row < args->N; row++) {
      decode_tile(&args->weight, args->dtype, row * args->K + k0, n, tile);
      for (int64_t m = 0; m < args->M; m++) {
        const float dy = load_f32(args->x, args->dtype, m * args->ldx + row);
        for (int64_t k = 0; k < n; k++) sums[m][k] += dy * tile[k];
      }
    }
    for (int64_t m = 0; m < args->M; m++)
      for (int64_t k = 0; k < n; k++) store_f32(args->y, args->dtype, m * args->ldy + k0 + k, sums[m][k]);
  }
}

/* ---- conversions ---------------------------------------------------------------------------------------------- */

static void to_f32_scalar(const void *const x, const bsh_dtype dtype, float *const out, const int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = load_f32(x, dtype, i);
}

static void from_f32_scalar(const float *const x, const bsh_dtype dtype, void *const out, const int64_t n) {
  for (int64_t i = 0; i < n; i++) store_f32(out, dtype, i, x[i]);
}

/* ---- merge_4bit ----------------------------------------------------------------------------------------------- */

static void add_adapters_scalar(const bsh_merge_4bit_args *const args, const int64_t begin, const int64_t end,
                                float *const values) {
  const int64_t K = args->K, R = args->R;
  for (int64_t i = begin; i < end; i++) {
    const int64_t n = i / K, k = i % K;
    float value = values[i - begin], sum = 0.0f;
    for (int64_t r = 0; r < R; r++) {
      sum = fmaf(load_f32(args->b, args->dtype, n * R + r), load_f32(args->a, args->dtype, r * K + k), sum);
      if (args->scales[r] == 0.0f) continue;
      value = fmaf(args->scales[r], sum, value);
      sum = 0.0f;
    }
    values[i - begin] = value;
  }
}

const bsh_cpu_kernels bsh_cpu_scalar = {
    .isa = "scalar",
    .quantize_4bit = quantize_4bit_scalar,
    .quantize_e2m1 = quantize_e2m1_scalar,
    .decode_4bit = decode_4bit_scalar,
    .quantize_blockwise = quantize_blockwise_scalar,
    .dequantize_blockwise = dequantize_blockwise_scalar,
    .linear_4bit = linear_4bit_scalar,
    .linear_4bit_dgrad = linear_4bit_dgrad_scalar,
    .to_f32 = to_f32_scalar,
    .from_f32 = from_f32_scalar,
    .add_adapters = add_adapters_scalar,
    .optimizers = &bsh_cpu_scalar_optimizers,
    .calibration = &bsh_cpu_scalar_calibration,
    .int8 = &bsh_cpu_scalar_int8,
};
