/* gemm_4bit_sm90_wide.h - sizes and arguments of gemm_4bit_sm90_wide.cu, for the kernel, its plan
 * (csrc/plan/gemm_4bit_sm90_wide.c), its launcher (csrc/gpu/wide.c) and tests.
 *
 * C^T[rows, tokens] = A x^T. Forward: A = W, rows = N, depth = K. Input gradient: A = W^T, rows = K, depth = N. A
 * thread block has 128 rows by `tokens` tokens; a pair of blocks, which share what they read of x, 256 rows. A piece is
 * 128 of depth. */
#ifndef BSH_GEMM_4BIT_SM90_WIDE_H
#define BSH_GEMM_4BIT_SM90_WIDE_H

#include <stdint.h>

#include "cuda/sizes/fused.h"

/* X(name, tokens) */
#define BSH_GEMM_WIDE_FORMS(X) X(m128, 128) X(m192, 192) X(m256, 256)
/* Of a stack: in m256 an expert's last tiles are narrower, of 192 or 128 tokens (scheduler_sm90_wide.cuh). */
#define BSH_GEMM_WIDE_GROUPED_FORMS(X) X(m128, 128) X(m256, 256)

enum { BSH_GEMM_WIDE_PAIR = 2, BSH_GEMM_WIDE_ROWS = 128, BSH_GEMM_WIDE_PIECE = 128 };
enum { BSH_GEMM_WIDE_CONSUMERS = 8, BSH_GEMM_WIDE_THREADS = 384 }; /* warps that multiply; threads with producers */
enum { BSH_GEMM_WIDE_STAGES = 3 };                                 /* of W and its scales, a piece each */
enum { BSH_GEMM_WIDE_W_BYTES = BSH_GEMM_WIDE_ROWS * 64 };          /* of a stage */

/* Blocks of W: of `block` elements, 32 (MXFP4) or 16 (NVFP4), whose scales are of 16 bits in shared memory, or of 64
 * and more (block = 64), whose scales are float32. Bytes of a stage of scales, and of a map from their codes. */
BSH_SIZE int32_t bsh_gemm_wide_scale_bytes(int32_t block) { return block == 16 ? 2048 : 1024; }
BSH_SIZE int32_t bsh_gemm_wide_map_bytes(int32_t block) { return block == 64 ? BSH_MAP_BYTES : 0; }

/* Stages of x, 64 of depth each. */
BSH_SIZE int32_t bsh_gemm_wide_x_stages(int32_t tokens) { return tokens == 256 ? 4 : tokens == 192 ? 5 : 6; }
BSH_SIZE int32_t bsh_gemm_wide_x_bytes(int32_t tokens) { return tokens * BSH_UNIT * 2; }

/* Shared addresses: the table of pairs at 1 KiB, where dynamic shared memory begins at the latest (the first KiB is the
 * system's), then [x stages][W stages][scale stages][map of the scales][barriers]. */
enum { BSH_GEMM_WIDE_TABLE_AT = 1024, BSH_GEMM_WIDE_X_AT = BSH_GEMM_WIDE_TABLE_AT + (1 << 16) };
BSH_SIZE int32_t bsh_gemm_wide_w_at(int32_t tokens) {
  return BSH_GEMM_WIDE_X_AT + bsh_gemm_wide_x_stages(tokens) * bsh_gemm_wide_x_bytes(tokens);
}
BSH_SIZE int32_t bsh_gemm_wide_scales_at(int32_t tokens) {
  return bsh_gemm_wide_w_at(tokens) + BSH_GEMM_WIDE_STAGES * BSH_GEMM_WIDE_W_BYTES;
}
BSH_SIZE int32_t bsh_gemm_wide_map_at(int32_t tokens, int32_t block) {
  return bsh_gemm_wide_scales_at(tokens) + BSH_GEMM_WIDE_STAGES * bsh_gemm_wide_scale_bytes(block);
}
BSH_SIZE int32_t bsh_gemm_wide_barriers_at(int32_t tokens, int32_t block) {
  return bsh_gemm_wide_map_at(tokens, block) + bsh_gemm_wide_map_bytes(block);
}
BSH_SIZE int32_t bsh_gemm_wide_shared_bytes(int32_t tokens, int32_t block) {
  return bsh_gemm_wide_barriers_at(tokens, block) + 16 * (bsh_gemm_wide_x_stages(tokens) + BSH_GEMM_WIDE_STAGES);
}
/* Of a stack of experts: behind that, places of tiles, 16 bytes each, and whose rows of x are whose (experts.cuh). A
 * place is left alone until the stages of x of as many tiles behind it are filled, which may be one a tile. */
enum { BSH_GEMM_WIDE_PLACES = 8 };
BSH_SIZE int32_t bsh_gemm_wide_experts_at(int32_t tokens, int32_t block) {
  return bsh_gemm_wide_shared_bytes(tokens, block) + 16 * BSH_GEMM_WIDE_PLACES;
}
enum { BSH_GEMM_WIDE_BOX = 64 }; /* tokens of x that are copied at once */
/* Experts that a stack may have: blocks of 16 leave less space beside tiles of 256. */
enum { BSH_GEMM_WIDE_EXPERTS = 512 };
BSH_SIZE int32_t bsh_gemm_wide_experts(int32_t tokens, int32_t block) {
  return tokens == 256 && block == 16 ? 480 : BSH_GEMM_WIDE_EXPERTS;
}
/* An expert's tiles before it, in one word: those of 256 tokens, and above this bit narrower ones. */
enum { BSH_GEMM_WIDE_NARROW_BIT = 20 };
BSH_SIZE int32_t bsh_gemm_wide_grouped_bytes(int32_t tokens, int32_t block) {
  return bsh_gemm_wide_experts_at(tokens, block) + 8 * bsh_gemm_wide_experts(tokens, block) + 4;
}

/* Partial sums of a thread block: f32 [tokens / 8][256 threads][4]. Flags: [blocks][8 warps], 0 at the start. */
BSH_SIZE int64_t bsh_gemm_wide_partial_bytes(int32_t tokens) { return (int64_t)tokens * BSH_GEMM_WIDE_ROWS * 4; }

/* Which pairs do what. A tile is the 256 rows of a pair by `tokens` tokens; tiles go through the token tiles of 256
 * rows first. Pairs [0, sharing) share all pieces of the tiles [0, shared) evenly and in order, so that a pair has a
 * stretch of neighbouring pieces; then pair i takes tiles shared + i, shared + i + pairs, ... whole. scatter = 2 or 4:
 * all tiles are shared, tile i by the pairs scatter * i on, each of which joins an equal part of its tokens. A cluster
 * is a pair: of 132 multiprocessors clusters of 4 blocks reached 120, of 8 too. */
typedef struct {
  int32_t tokens;                     /* of a tile */
  int32_t token_tiles, tiles, pieces; /* pieces: of a tile */
  int32_t shared, sharing, scatter;
} bsh_gemm_wide_cut;

typedef struct {
  const float *absmax; /* plain scales, else NULL */
  const uint8_t *absmax_code;
  const float *absmax_map, *absmax2, *offset;
  const void *bias; /* or NULL */
  void *y;
  float *partial;
  uint32_t *flags;
  int64_t ldy;
  int32_t M, N, K;
  int32_t format;      /* bsh_format */
  int32_t block_shift; /* log2(blocksize / 64); of shorter blocks 0 */
  int32_t code_pairs;  /* nested, one scale a unit, K a multiple of 128 and codes 2-byte aligned: two codes a load;
                          of blocks below 64: 2, those of a piece's row are one load; 1, those of a unit */
  int32_t store_fours; /* rows of y are 8-byte aligned and a multiple of 4 long */
  bsh_gemm_wide_cut cut;
  /* Of a stack, else 0: where each expert's rows of x end; of an expert blocks and second-level scales. N and K are
   * those of an expert, cut.tiles is known on the GPU only. */
  const int32_t *offs;
  int32_t experts, expert_blocks, expert_scales2;
} bsh_gemm_wide_args;

#endif
