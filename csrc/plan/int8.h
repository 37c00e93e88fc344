/* plan/int8.h - what the kernels for int8 weights have in common. */
#ifndef BSH_PLAN_INT8_H
#define BSH_PLAN_INT8_H

#include "core/arithmetic.h"
#include "cuda/sizes/gemv_4bit.h"
#include "cuda/sizes/int8.h"
#include "plan/gemv.h"

/* Rows of x up to which it is multiplied as it is, whatever kernel does; twice as many of 16 bits on sm_90 and sm_100.
 */
enum { BSH_INT8_FEW_ROWS = 16 };

/* The same of a GPU. From 17 on a second group of blocks reads W again, out of L2. */
static inline int64_t bsh_int8_few_rows(const bsh_facts *const facts) {
  return bsh_is_wide(facts->image.arch) && facts->dtype != BSH_F32 ? 2 * BSH_INT8_FEW_ROWS : BSH_INT8_FEW_ROWS;
}

/* Whether rows are few, which are multiplied as they are. BSH_FEW_AFTER_CODES: with a large weight and no threshold
 * gemm_int8_sm90 is faster, where it takes them. */
typedef enum { BSH_MANY, BSH_FEW, BSH_FEW_AFTER_CODES } bsh_int8_rows;
static inline bsh_int8_rows bsh_int8_rows_of(const bsh_facts *const facts) {
  const bsh_card *const card = bsh_card_of(facts->sm);
  if (facts->M > bsh_int8_few_rows(facts)) return BSH_MANY;
  const bool large = facts->N * facts->K >= card->int8.large && !facts->threshold;
  return large && facts->M > card->int8.few_rows ? BSH_FEW_AFTER_CODES : BSH_FEW;
}

/* NULL, or that numbers are too large. */
static inline const char *bsh_int8_sizes_refuse(const bsh_facts *const facts) {
  const int64_t M = facts->M, N = facts->N, K = facts->K, most = INT32_MAX / 2;
  const double tiles = (double)divide_up(M, BSH_GEMM_INT8_TILE / 2) * (double)divide_up(N, BSH_GEMM_INT8_TILE);
  return M > most || N > most || K > most || tiles > INT32_MAX ? "too large for 32-bit indices" : NULL;
}

/* What the kernels of sm_90 with tensor maps refuse. `sums`: terms of each sum. */
const char *bsh_int8_maps_refuse(const bsh_facts *facts, int64_t sums);

/* Place of n_bytes more of a slice's scratch memory. */
int64_t bsh_place(bsh_plan_slice *slice, int64_t n_bytes);

/* Scratch memory for codes of x, and for outlier columns where there is a threshold. `finds`: the kernel finds them. */
void bsh_place_codes(const bsh_facts *facts, bool finds, bsh_plan_slice *slice);

/* A product cut into tiles, each of which clusters share among `splits` groups of their blocks. */
typedef struct {
  int32_t form, splits;
  int64_t m_tiles, tiles, clusters; /* clusters: that run at once */
} bsh_tiles;

/* Of tiles with so many stages of depth, from the nanoseconds of a stage, of a tile beside them, and of joining sums.
 * Infinite where blocks would share the depth of a tile, and there are more tiles than clusters. */
double bsh_tiles_nanoseconds(const bsh_tiles *tiles, int64_t stages, double stage, double beside, double join);

/* Fills a slice's tiles and launch, by clusters of `blocks`. */
void bsh_lay_out_tiles(const bsh_tiles *tiles, int32_t blocks, uint32_t shared_bytes, bsh_plan_slice *slice);

#endif
