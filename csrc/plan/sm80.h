/* plan/sm80.h - what gemm_4bit_sm80 has in common with its form for stacks. */
#ifndef BSH_PLAN_SM80_H
#define BSH_PLAN_SM80_H

#include "cuda/sizes/gemm_4bit_sm80.h"
#include "plan/gemv.h"
#include "plan/kernel.h"

enum { BSH_SM80_HALF_UNIT = BSH_UNIT / 2 }; /* the least blocksize, but for NVFP4 */

/* Kernels of their own: forms of 256 rows for blocks of 16, codes E2M1 and nested scales. */
static inline bool bsh_sm80_has_short_blocks(const bsh_facts *const facts) {
  return facts->w.blocksize < BSH_SM80_HALF_UNIT;
}
static inline int32_t bsh_sm80_block_shift(const bsh_facts *const facts) {
  return bsh_sm80_has_short_blocks(facts) ? -1 : bsh_block_shift(facts, BSH_SM80_HALF_UNIT);
}

static inline const char *bsh_sm80_refuses(const bsh_facts *const facts) {
  enum { LARGEST_SIDE = INT32_MAX / 1024 };
  if (facts->image.arch < 80) return "no code for sm_80 or later";
  if (facts->dtype == BSH_F32) return "no float32";
  if (facts->K % BSH_UNIT) return "K is no multiple of 64";
  const char *const blocks = bsh_sm80_has_short_blocks(facts) ? bsh_short_blocks_refuse(facts) : NULL;
  if (blocks != NULL) return blocks;
  if (facts->direction == BSH_INPUT_GRADIENT && facts->N % 8) return "N is no multiple of 8";
  const int64_t units = facts->K / BSH_UNIT, weights = facts->E > 0 ? facts->E : 1;
  if (facts->N > LARGEST_SIDE || facts->K > LARGEST_SIDE || facts->N * units > INT32_MAX / weights)
    return "W is too large for 32-bit indices";
  if (facts->x_alignment < 16) return "rows of x are not 16-byte aligned";
  return facts->packed_alignment < 16 ? "packed is not 16-byte aligned" : NULL;
}

/* Blocks that a multiprocessor holds, by shared memory: tiles of `rows` rows. */
static inline int32_t bsh_sm80_at_once(const int32_t rows, const int32_t sm) {
  const bool small = sm != 80 && sm != 87 && !bsh_is_wide(sm); /* 100 KiB */
  return rows == 128 && !small ? 2 : 1;
}

/* Blocks of 32 weights have scales of their own, and a thread has one scale, or of blocks of 16 two: the form in which
 * it decodes 32. */
static inline bool bsh_sm80_decodes(const bsh_facts *const facts, const int32_t rows) {
  return facts->w.blocksize >= BSH_UNIT || rows == 256;
}

#endif
