/* cpu/grid.h - 4-bit encoding by a uniform grid, for the vector kernels.
 *
 * The thresholds of a format are further apart than a cell of the grid, so a cell holds one at most: the cell of v
 * gives a threshold and the codes on either side of it. The comparison with v itself stays exact; the rounding of the
 * cell number does not matter, because no threshold lies near the border of a cell (tests/core checks both).
 *
 *   cell(v) = (int)(v * GRID_SCALE[format] + GRID_SHIFT[format]), v = x / absmax in [-1, 1] (FP4: |v|)
 *   code    = v > threshold[cell] ? codes[cell] >> 4 : codes[cell] & 15 */
#ifndef BSH_CPU_GRID_H
#define BSH_CPU_GRID_H

#include "core/numerics.h"

enum { GRID_CELLS = 32 };

typedef struct {
  float threshold[GRID_CELLS]; /* +inf where the cell has none */
  uint32_t codes[GRID_CELLS];  /* code up to the threshold | code beyond it << 4 */
  float scale, shift;
} encode_grid;

static inline void make_grid(const bsh_format format, encode_grid *const grid) {
  static const uint32_t nf4[15] = {BSH_NF4_THRESHOLD_BITS};
  static const uint32_t fp4[7] = {BSH_FP4_THRESHOLD_BITS};
  static const uint8_t fp4_order[8] = {BSH_FP4_ORDER};
  const uint32_t *const thresholds = format == BSH_NF4 ? nf4 : fp4;
  const int n_thresholds = format == BSH_NF4 ? 15 : 7;
  grid->scale = format == BSH_NF4 ? 15.9f : 31.9f;
  grid->shift = format == BSH_NF4 ? 15.95f : 0.0f;
  int rank = 0;
  for (int cell = 0; cell < GRID_CELLS; cell++) {
    const int below = rank;
    grid->threshold[cell] = INFINITY;
    if (rank < n_thresholds && (int)(bits_float(thresholds[rank]) * grid->scale + grid->shift) == cell)
      grid->threshold[cell] = bits_float(thresholds[rank++]);
    const uint32_t low = format == BSH_NF4 ? (uint32_t)below : fp4_order[below];
    const uint32_t high = format == BSH_NF4 ? (uint32_t)rank : fp4_order[rank];
    grid->codes[cell] = low | high << 4;
  }
}

/* Blocks whose maximum is in this range need no flushing and hold no NaN: the vector path. The scalar kernels do the
 * others: below it denormal elements could count, above it are infinity and NaN. */
static inline bool ordinary_absmax(const float absmax) { return absmax >= 0x1p-100f && absmax <= FLT_MAX; }

/* The same for scales, which may be negative in a checkpoint: products with any code value are normal numbers. */
static inline bool ordinary_scale(const float scale) { return ordinary_absmax(fabsf(scale)); }

#endif
