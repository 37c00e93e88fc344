/* plan/sm80.h - what gemm_4bit_sm80 has in common with its form for stacks, and with both for sm_75. */
#ifndef BSH_PLAN_SM80_H
#define BSH_PLAN_SM80_H

#include "cuda/sizes/gemm_4bit_sm75.h"
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

/* Of sizes and addresses. */
static inline const char *bsh_sm80_sizes_refuse(const bsh_facts *const facts) {
  enum { LARGEST_SIDE = INT32_MAX / 1024 };
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

static inline const char *bsh_sm80_refuses(const bsh_facts *const facts) {
  if (facts->image.arch < 80) return "no code for sm_80 or later";
  return facts->dtype == BSH_F32 ? "no float32" : bsh_sm80_sizes_refuse(facts);
}

/* sm_75 has tensor cores for fp16, with fp32 sums. Stages of 32 are counted in 16 bits. */
static inline const char *bsh_sm75_refuses(const bsh_facts *const facts) {
  enum { MOST_STAGES = 65535 };
  if (facts->image.arch != 75) return "no code of sm_75";
  if (facts->dtype != BSH_F16) return "only float16";
  if (bsh_sm80_has_short_blocks(facts)) return "the blocksize is below 32";
  const int64_t depth = facts->direction == BSH_FORWARD ? facts->K : facts->N;
  if (depth > (int64_t)MOST_STAGES * BSH_GEMM_SM75_DEPTH) return "more stages than 16 bits count";
  return bsh_sm80_sizes_refuse(facts);
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

/* The tiles of a kernel. */
typedef struct {
  int32_t first_form; /* 0: of 128 and of 256 rows; 1: of 256 */
  int32_t depth;      /* of a stage */
  int32_t round;      /* a tile with fewer rows takes as long as its rows, rounded up to so many; 0: as long as any */
  int32_t least;      /* nanoseconds of a stage, however few rows: until loads are there */
  bool dense;         /* W is there in 16 bits */
} bsh_sm80_tiles;

/* A way to share out tiles. */
typedef struct {
  const bsh_rates *rates;
  double share;            /* of the rates */
  int64_t workspace_bytes; /* that the sums of shared tiles may take */
  int32_t sms, form, depth;
  int32_t at_once;    /* blocks that a multiprocessor holds */
  int32_t multiplied; /* rows of a tile that take time */
  int32_t least;      /* as above */
  bsh_gemm_sm80_cut cut;
  double ns; /* of the busiest block */
} bsh_sm80_way;

/* The fastest way for so many rows of x. */
bsh_sm80_way bsh_sm80_fastest(const bsh_facts *facts, const bsh_sm80_tiles *tiles, int64_t rows_of_x);
/* Nanoseconds by the card's model; not below what reading W takes. */
double bsh_sm80_nanoseconds(const bsh_facts *facts, const bsh_sm80_tiles *tiles);
/* All of a slice but the kernel, threads and shared memory. */
void bsh_sm80_lay_out(const bsh_facts *facts, const bsh_sm80_way *way, bsh_plan_slice *slice);

enum { BSH_SM80_SLICE_ROWS = 1 << 16 };

#endif
