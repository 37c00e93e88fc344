/* cpu/calibration.inc.h - search_4bit and round_4bit with a row (or block) in each lane.
 *
 * Each lane computes what cpu/scalar_calibration.c does, in its order. Padding lanes compute with zeros. */
#ifndef BSH_CPU_CALIBRATION_INC_H
#define BSH_CPU_CALIBRATION_INC_H

#include "cpu/calibration.h"

/* NF4: thresholds, units and codes by ascending value; the others: 7 and 8 of them by ascending magnitude, then again.
 */
typedef struct {
  float thresholds[15], units[16];
  uint8_t codes[16];
} ranks;

static ranks ranks_of(const bsh_format format) {
  static const uint32_t nf4[15] = {BSH_NF4_THRESHOLD_BITS};
  const magnitude_codes *const signless = magnitude_codes_of(format);
  ranks found = {0};
  for (int i = 0; i < 15; i++)
    found.thresholds[i] = bits_float(format == BSH_NF4 ? nf4[i] : signless->thresholds[i % 7]);
  for (int i = 0; i < 16; i++) {
    found.codes[i] = format == BSH_NF4 ? (uint8_t)i : signless->order[i & 7];
    found.units[i] = format_values(format)[found.codes[i]];
  }
  return found;
}

/* The unit nearest to v in each lane, and its rank; of the others with 8 added where v is negative. */
ALWAYS_INLINE floats nearest(const ranks *const format, const bool is_nf4, const floats v, ints *const rank) {
  const ints sign = (ints)v & (int32_t)0x80000000;
  const floats compared = is_nf4 ? v : (floats)((ints)v ^ sign);
  floats unit = v_set(format->units[0]);
  *rank = (ints){0};
  for (int i = 0; i < (is_nf4 ? 15 : 7); i++) {
    const mask above = v_above(compared, v_set(format->thresholds[i]));
    unit = v_choose(above, v_set(format->units[i + 1]), unit);
    *rank = i_count(*rank, above);
  }
  if (is_nf4) return unit;
  *rank += (v < 0.0f) & 8;
  return (floats)((ints)unit ^ ((ints)(v < 0.0f) & (int32_t)0x80000000));
}

ALWAYS_INLINE floats inverse_scales(const floats scale) {
  return v_choose(v_at_most(v_set(FLT_MIN), v_abs(scale)), 1.0f / scale, v_set(0.0f));
}

/* Up to LANES numbers that lie `stride` apart; zeros behind them. */
ALWAYS_INLINE floats gather(const float *const from, const int64_t stride, const int64_t lanes) {
  floats found = {0};
  for (int64_t lane = 0; lane < lanes; lane++) found[lane] = from[lane * stride];
  return found;
}

/* ---- search_4bit ---- */

enum { CHUNK = 64 }; /* elements of a block that every scale is tried on before the next ones are looked at */

/* Adds the errors of elements [first, first + n) of each block. */
ALWAYS_INLINE void add_errors(const bsh_search_4bit_args *const args, const ranks *const format, const bool is_nf4,
                              const int64_t block, const int64_t lanes, const int64_t first, const int64_t n,
                              floats *const sums) {
  floats x[CHUNK], weights[CHUNK] = {0};
  ints rank;
  for (int64_t i = 0; i < n; i++) {
    const int64_t place = block * args->blocksize + first + i;
    x[i] = gather(args->x + place, args->blocksize, lanes);
    for (int64_t lane = 0; lane < lanes; lane++)
      weights[i][lane] = args->weights[(place + lane * args->blocksize) % args->period];
  }
  for (int64_t g = 0; g < args->G; g++) {
    const floats scale = gather(args->scales + block * args->G + g, args->G, lanes), inverse = inverse_scales(scale);
    for (int64_t i = 0; i < n; i++) {
      const floats error = x[i] - nearest(format, is_nf4, x[i] * inverse, &rank) * scale;
      sums[g] += weights[i] * (error * error);
    }
  }
}

/* `lanes` full blocks, or one short block. */
ALWAYS_INLINE void search_tile(const bsh_search_4bit_args *const args, const ranks *const format, const bool is_nf4,
                               const int64_t block, const int64_t lanes, const int64_t length) {
  floats sums[BSH_MAX_SCALES] = {0}, least = v_set(INFINITY);
  ints choice = {0};
  for (int64_t first = 0; first < length; first += CHUNK)
    add_errors(args, format, is_nf4, block, lanes, first, min_i64(CHUNK, length - first), sums);
  for (int64_t g = 0; g < args->G; g++) {
    const mask better = v_above(least, sums[g]);
    least = v_choose(better, sums[g], least);
    choice = (ints)v_choose(better, (floats)((ints){0} + (int32_t)g), (floats)choice);
  }
  for (int64_t lane = 0; lane < lanes; lane++) args->choice[block + lane] = (uint8_t)choice[lane];
}

static void search_4bit_lanes(const bsh_search_4bit_args *const args, const int64_t block_begin,
                              const int64_t block_end) {
  const ranks format = ranks_of(args->format);
  const int64_t full = args->n / args->blocksize;
  for (int64_t block = block_begin; block < block_end;) {
    const int64_t lanes = block < full ? min_i64(LANES, min_i64(full, block_end) - block) : 1;
    const int64_t length = block < full ? args->blocksize : args->n % args->blocksize;
    if (args->format == BSH_NF4) search_tile(args, &format, true, block, lanes, length);
    else search_tile(args, &format, false, block, lanes, length);
    block += lanes;
  }
}

/* ---- round_4bit ---- */

/* Up to LANES rows of a panel. */
ALWAYS_INLINE void round_rows(const bsh_round_4bit_args *const args, const ranks *const format, const bool is_nf4,
                              const int64_t row, const int64_t lanes) {
  const int64_t P = args->P;
  floats w[BSH_ROUND_COLUMNS];
  for (int64_t j = 0; j < P; j++) w[j] = gather(args->w + row * P + j, P, lanes);
  for (int64_t j = 0; j < P; j++) {
    const float *const u = args->u + j * P;
    const floats scale = gather(args->scales + row * P + j, P, lanes);
    ints rank;
    const floats q = nearest(format, is_nf4, w[j] * inverse_scales(scale), &rank) * scale;
    const floats error = (w[j] - q) * (1.0f / u[j]);
    for (int64_t k = j + 1; k < P; k++) w[k] -= error * u[k];
    for (int64_t lane = 0; lane < lanes; lane++) {
      const int64_t place = (row + lane) * P + j;
      args->errors[place] = error[lane];
      args->codes[place] = (uint8_t)(is_nf4 ? rank[lane] : format->codes[rank[lane] & 7] | (rank[lane] & 8));
    }
  }
}

static void round_4bit_lanes(const bsh_round_4bit_args *const args, const int64_t row_begin, const int64_t row_end) {
  const ranks format = ranks_of(args->format);
  for (int64_t row = row_begin; row < row_end; row += LANES) {
    const int64_t lanes = min_i64(LANES, row_end - row);
    if (args->format == BSH_NF4) round_rows(args, &format, true, row, lanes);
    else round_rows(args, &format, false, row, lanes);
  }
}

#endif
