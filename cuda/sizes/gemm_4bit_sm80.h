/* gemm_4bit_sm80.h - sizes and arguments of gemm_4bit_sm80.cu and gemm_4bit_sm80_grouped.cu, for the kernels, their
 * plans (csrc/plan), their launcher (csrc/gpu/sm80.c) and tests.
 *
 * y[M, width] = x[M, depth] B. Forward: B = W^T, width = N, depth = K. Input gradient: B = W, width = K, depth = N. A
 * tile is `rows` rows of x by 128 columns of y; a stage is 64 of depth. */
#ifndef BSH_GEMM_4BIT_SM80_H
#define BSH_GEMM_4BIT_SM80_H

#include <stdint.h>

#include "cuda/sizes/fused.h"

/* X(name, rows of a tile) */
#define BSH_GEMM_SM80_FORMS(X) X(m128, 128) X(m256, 256)

enum { BSH_GEMM_SM80_COLUMNS = 128, BSH_GEMM_SM80_STAGES = 2 };        /* of a tile; in shared memory, of x and of W */
enum { BSH_GEMM_SM80_W_BYTES = BSH_GEMM_SM80_COLUMNS * BSH_UNIT * 2 }; /* of a stage, decoded */
/* Pieces of work that a block knows ahead (scheduler_sm80.cuh). */
enum { BSH_GEMM_SM80_PIECES = 8, BSH_GEMM_SM80_PIECE_BYTES = 32 };
/* Of a stack: words that say which tiles the 32 experts have that the block is at. */
enum { BSH_GEMM_SM80_WINDOW_WORDS = 1 + 2 * (BSH_WARP + 1) };

/* A warp has 64 x 64 of y. */
BSH_SIZE int32_t bsh_gemm_sm80_threads(int32_t rows) { return rows; }
/* Rows of x between two of which a thread copies 16 bytes. */
BSH_SIZE int32_t bsh_gemm_sm80_x_step(int32_t rows) { return bsh_gemm_sm80_threads(rows) / 8; }
BSH_SIZE int32_t bsh_gemm_sm80_x_bytes(int32_t rows) { return rows * BSH_UNIT * 2; }

/* Shared memory: [x stages][W stages][map of the scales][pieces][a word for all threads], and of a stack the window. */
BSH_SIZE int32_t bsh_gemm_sm80_w_at(int32_t rows) { return BSH_GEMM_SM80_STAGES * bsh_gemm_sm80_x_bytes(rows); }
BSH_SIZE int32_t bsh_gemm_sm80_map_at(int32_t rows) {
  return bsh_gemm_sm80_w_at(rows) + BSH_GEMM_SM80_STAGES * BSH_GEMM_SM80_W_BYTES;
}
BSH_SIZE int32_t bsh_gemm_sm80_pieces_at(int32_t rows) { return bsh_gemm_sm80_map_at(rows) + BSH_MAP_BYTES; }
BSH_SIZE int32_t bsh_gemm_sm80_words_at(int32_t rows) {
  return bsh_gemm_sm80_pieces_at(rows) + BSH_GEMM_SM80_PIECE_BYTES * BSH_GEMM_SM80_PIECES;
}
BSH_SIZE int32_t bsh_gemm_sm80_shared_bytes(int32_t rows) { return bsh_gemm_sm80_words_at(rows) + 16; }
BSH_SIZE int32_t bsh_gemm_sm80_grouped_bytes(int32_t rows) {
  return bsh_gemm_sm80_shared_bytes(rows) + 4 * BSH_GEMM_SM80_WINDOW_WORDS;
}

/* Partial sums of a block: f32 [4][8][threads][4]. */
BSH_SIZE int64_t bsh_gemm_sm80_partial_bytes(int32_t rows) { return (int64_t)rows * BSH_GEMM_SM80_COLUMNS * 4; }

/* Which blocks do what. Tiles go through the tiles of rows first. All blocks share the stages of the tiles [0, shared)
 * evenly and in order; then block i takes tiles shared + i, shared + i + blocks, ... whole. splits = 2 or 4: tile i is
 * shared by the blocks splits * i on, each of which joins an equal part of its rows. Each block has some stages. */
typedef struct {
  int32_t rows;                     /* of a tile */
  int32_t row_tiles, tiles, stages; /* stages: of a tile */
  int32_t shared, splits;
  int32_t share, longer; /* stages of the shared tiles of a block; the first `longer` blocks have one more */
} bsh_gemm_sm80_cut;

typedef struct {
  const uint8_t *packed;
  /* A block's scale: map[codes[block]] * absmax[block >> 8] + offset. Plain scales: map is NULL and stands for ones,
   * codes are any bytes, and absmax has one for each block. */
  const uint8_t *codes;
  const float *map, *absmax, *offset;
  const void *x;
  const void *bias; /* or NULL */
  void *y;
  float *partial;
  uint32_t *flags; /* 0 at the start: of each block; splits: of each tile */
  int64_t ldx, ldy;
  int64_t x_step; /* bytes from a thread's row of x to its next one */
  int32_t M, N, K;
  int32_t block_shift, absmax_shift; /* from 32 weights to their block, and to their place in absmax */
  uint32_t last_half;                /* the last 32 weights of W */
  int32_t store_eights;              /* rows of y are 16-byte aligned */
  /* Of a stack, else 0: where each expert's rows of x end; of an expert what lies in absmax. N and K are an expert's,
   * of the cut rows and stages count: how many tiles there are is known on the GPU only. */
  const int32_t *offs;
  int32_t experts, expert_absmax;
  bsh_gemm_sm80_cut cut;
  float values[16]; /* of the format's codes */
} bsh_gemm_sm80_args;

#endif
