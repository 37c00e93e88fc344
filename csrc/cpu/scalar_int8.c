/* cpu/scalar_int8.c - the int8 kernels in plain C: the reference for every other instruction set, and the fallback. */
#include "core/numerics.h"
#include "cpu/cpu.h"
#include "cpu/int8.h"

static float absmax_scalar(const void *const x, const bsh_dtype dtype, const int64_t n, const float threshold,
                           uint8_t *const outliers) {
  float absmax = 0.0f;
  bool nan = false;
  for (int64_t i = 0; i < n; i++) {
    const float magnitude = fabsf(load_f32(x, dtype, i));
    if (outliers != NULL && magnitude >= threshold) {
      __atomic_store_n(&outliers[i], 1, __ATOMIC_RELAXED); /* other rows' threads mark too */
      continue;
    }
    nan |= magnitude != magnitude;
    if (magnitude > absmax) absmax = magnitude;
  }
  return nan ? bits_float(0x7FFFFFFFu) : absmax;
}

static void encode_scalar(const void *const x, const bsh_dtype dtype, const int64_t n, const float scale,
                          const float threshold, int8_t *const codes) {
  for (int64_t i = 0; i < n; i++) {
    const float value = load_f32(x, dtype, i);
    codes[i] = threshold > 0.0f && fabsf(value) >= threshold ? 0 : int8_code(value, scale);
  }
}

static void decode_scalar(const int8_t *const codes, const float absmax, const int64_t n, const bsh_dtype dtype,
                          void *const y) {
  for (int64_t i = 0; i < n; i++) store_f32(y, dtype, i, (float)codes[i] * absmax * BSH_INT8_UNIT);
}

static void product_scalar(const bsh_product_int8_args *const args, const int64_t ld, void *const scratch) {
  (void)scratch;
  for (int64_t m = 0; m < args->M; m++)
    for (int64_t n = 0; n < args->N; n++) {
      const int8_t *const a = args->a + m * args->K, *const b = args->b + n * args->K;
      int32_t sum = 0;
      for (int64_t k = 0; k < args->K; k++) sum += a[k] * b[k];
      args->sums[m * ld + n] = sum;
    }
}

static void scale_scalar(const int32_t *const sums, const float row_absmax, const float *const col_absmax,
                         const void *const bias, const float *const more, const int64_t n, const bsh_dtype dtype,
                         void *const y) {
  for (int64_t i = 0; i < n; i++) {
    const float scaled = (float)sums[i] * row_absmax * col_absmax[i];
    const float sum = fmaf(scaled, BSH_INT8_PRODUCT_SCALE, bias != NULL ? load_f32(bias, dtype, i) : 0.0f);
    store_f32(y, dtype, i, more != NULL ? sum + more[i] : sum);
  }
}

static void add_scaled_scalar(const int32_t *const sums, const float x_scale, const float *const w_scales,
                              const int64_t n, float *const y) {
  for (int64_t i = 0; i < n; i++) y[i] = fmaf((float)sums[i], x_scale * w_scales[i], y[i]);
}

static void columns_scalar(const float *const x, const float *const w, const int64_t n, float *const sum) {
  memset(sum, 0, BSH_INT8_PANEL * sizeof(float));
  for (int64_t i = 0; i < n; i++)
    for (int64_t j = 0; j < BSH_INT8_PANEL; j++) sum[j] += x[i] * w[i * BSH_INT8_PANEL + j];
}

static void linear_scalar(const bsh_product_args *const args, const int64_t n_begin, const int64_t n_end) {
  for (int64_t n = n_begin; n < n_end; n++) {
    const int8_t *const codes = int8_codes(&args->weight) + n * args->K;
    const double unit = (double)(args->weight.scales.absmax[n] * BSH_INT8_UNIT);
    const double bias = args->bias ? (double)load_f32(args->bias, args->dtype, n) : 0.0;
    for (int64_t m = 0; m < args->M; m++) {
      double sum = 0.0;
      for (int64_t k = 0; k < args->K; k++)
        sum += (double)load_f32(args->x, args->dtype, m * args->ldx + k) * (double)codes[k];
      store_f32(args->y, args->dtype, m * args->N + n, (float)(sum * unit + bias));
    }
  }
}

static void linear_dgrad_scalar(const bsh_product_args *const args, const int64_t k_begin, const int64_t k_end) {
  enum { TILE = 256 };
  for (int64_t k0 = k_begin; k0 < k_end; k0 += TILE) {
    const int64_t columns = min_i64(TILE, k_end - k0);
    for (int64_t m = 0; m < args->M; m++) {
      float sums[TILE] = {0};
      for (int64_t n = 0; n < args->N; n++) {
        const float dy =
            load_f32(args->x, args->dtype, m * args->ldx + n) * (args->weight.scales.absmax[n] * BSH_INT8_UNIT);
        const int8_t *const codes = int8_codes(&args->weight) + n * args->K + k0;
        for (int64_t k = 0; k < columns; k++) sums[k] += dy * (float)codes[k];
      }
      for (int64_t k = 0; k < columns; k++) store_f32(args->y, args->dtype, m * args->K + k0 + k, sums[k]);
    }
  }
}

static void dgrad_panel_scalar(const bsh_product_args *const args, const float *const dy, const int64_t k0,
                               const int64_t n, void *const scratch) {
  enum { GROUP = BSH_INT8_DGRAD_GROUP };
  (void)scratch;
  for (int64_t m = 0; m < args->M; m++) {
    float sums[BSH_INT8_COLUMNS] = {0};
    for (int64_t row = 0; row < args->N; row++)
      for (int64_t k = 0; k < n; k++)
        sums[k] += dy[(m / GROUP * args->N + row) * GROUP + m % GROUP] *
                   (float)int8_codes(&args->weight)[row * args->K + k0 + k];
    for (int64_t k = 0; k < n; k++) store_f32(args->y, args->dtype, m * args->K + k0 + k, sums[k]);
  }
}

const bsh_cpu_int8_kernels bsh_cpu_scalar_int8 = {
    .absmax = absmax_scalar,
    .encode = encode_scalar,
    .decode = decode_scalar,
    .product = product_scalar,
    .scale = scale_scalar,
    .add_scaled = add_scaled_scalar,
    .columns = columns_scalar,
    .linear = linear_scalar,
    .linear_dgrad = linear_dgrad_scalar,
    .dgrad_panel = dgrad_panel_scalar,
};
