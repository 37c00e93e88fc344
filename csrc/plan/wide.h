/* plan/wide.h - what gemm_4bit_sm90_wide has in common with its form for stacks. */
#ifndef BSH_PLAN_WIDE_H
#define BSH_PLAN_WIDE_H

#include "core/arithmetic.h"
#include "plan/gemv.h"
#include "plan/kernel.h"

/* What a block of W has, as cuda/sizes/gemm_4bit_sm90_wide.h counts: 16 or 32 elements, or 64 and more. */
static inline int32_t bsh_wide_block(const bsh_facts *const facts) {
  return (int32_t)min_i64(facts->w.blocksize, BSH_UNIT);
}

/* Their kernels by blocks. */
enum { BSH_WIDE_LONG, BSH_WIDE_MX, BSH_WIDE_NV, BSH_WIDE_BLOCKS };
static inline int bsh_wide_kind(const bsh_facts *const facts) {
  const int32_t block = bsh_wide_block(facts);
  return block == 16 ? BSH_WIDE_NV : block == 32 ? BSH_WIDE_MX : BSH_WIDE_LONG;
}

static inline const char *bsh_wide_refuses(const bsh_facts *const facts) {
  enum { LARGEST_SIDE = INT32_MAX / 1024 };
  if (facts->sms < BSH_GEMM_WIDE_PAIR) return "fewer than 2 multiprocessors";
  if (facts->dtype == BSH_F32) return "no float32";
  if (facts->K % BSH_UNIT) return "K is no multiple of 64";
  const bool microscaled = facts->w.table == BSH_E2M1 && facts->w.scales == BSH_SCALES_NESTED;
  if (facts->w.blocksize % BSH_UNIT && !microscaled) return "the blocksize is below 64";
  if (facts->N > LARGEST_SIDE || facts->K > LARGEST_SIDE || facts->N * (facts->K / BSH_UNIT) > INT32_MAX)
    return "W is too large for 32-bit indices";
  if (facts->x_alignment < 16) return "rows of x are not 16-byte aligned";
  return facts->packed_alignment < 16 ? "packed is not 16-byte aligned" : NULL;
}

/* Blocks as a shift; two codes of scales a load, of short blocks those of 64 elements; four rows of y a store. */
static inline void bsh_wide_accesses(const bsh_facts *const facts, bsh_plan_slice *const slice) {
  const int64_t rows = facts->direction == BSH_FORWARD ? facts->N : facts->K;
  slice->block_shift = bsh_block_shift(facts, BSH_UNIT);
  if (facts->w.blocksize < BSH_UNIT) {
    const int32_t of_unit = BSH_UNIT / (int32_t)facts->w.blocksize;
    const bool whole_pieces = facts->K % BSH_GEMM_WIDE_PIECE == 0 && facts->code_alignment >= 2 * of_unit;
    slice->reads_together = whole_pieces ? 2 : facts->code_alignment >= of_unit;
  } else {
    slice->reads_together = facts->w.scales == BSH_SCALES_NESTED && facts->w.blocksize == BSH_UNIT &&
                            facts->K % BSH_GEMM_WIDE_PIECE == 0 && facts->code_alignment >= 2;
  }
  slice->stores_together = rows % 4 == 0 && facts->y_alignment >= 8;
}

/* Of bsh_card's times of a piece. */
static inline int bsh_wide_column(const bsh_facts *const facts) {
  return facts->direction != BSH_FORWARD ? 2 : facts->dtype == BSH_F16;
}

#endif
