/* cpu/scalar_calibration.c - scales and codes of calibration in plain C: the reference for every other instruction set,
 * and the fallback. One row, one scale, one element at a time. */
#include "core/numerics.h"
#include "cpu/calibration.h"
#include "cpu/cpu.h"

static void search_4bit_scalar(const bsh_search_4bit_args *const args, const int64_t block_begin,
                               const int64_t block_end) {
  const float *const units = format_values(args->format);
  for (int64_t b = block_begin; b < block_end; b++) {
    const int64_t begin = b * args->blocksize, end = min_i64(begin + args->blocksize, args->n);
    float least = INFINITY;
    args->choice[b] = 0;
    for (int64_t g = 0; g < args->G; g++) {
      const float scale = args->scales[b * args->G + g], inverse = inverse_scale(scale);
      float sum = 0;
      for (int64_t i = begin; i < end; i++) {
        const float error = args->x[i] - units[encode_4bit(args->format, args->x[i] * inverse)] * scale;
        sum += args->weights[i % args->period] * (error * error);
      }
      if (!(sum < least)) continue;
      least = sum;
      args->choice[b] = (uint8_t)g;
    }
  }
}

static void round_4bit_scalar(const bsh_round_4bit_args *const args, const int64_t row_begin, const int64_t row_end) {
  const float *const units = format_values(args->format);
  const int64_t P = args->P;
  float w[BSH_ROUND_COLUMNS];
  for (int64_t row = row_begin; row < row_end; row++) {
    memcpy(w, args->w + row * P, (size_t)P * sizeof *w);
    for (int64_t j = 0; j < P; j++) {
      const float scale = args->scales[row * P + j], *const u = args->u + j * P;
      const uint8_t code = encode_4bit(args->format, w[j] * inverse_scale(scale));
      const float error = (w[j] - units[code] * scale) * (1.0f / u[j]);
      for (int64_t k = j + 1; k < P; k++) w[k] -= error * u[k];
      args->codes[row * P + j] = code;
      args->errors[row * P + j] = error;
    }
  }
}

const bsh_cpu_calibration bsh_cpu_scalar_calibration = {
    .search_4bit = search_4bit_scalar,
    .round_4bit = round_4bit_scalar,
};
