/* gemm_4bit_sm75.h - sizes of gemm_4bit_sm75.cu and gemm_4bit_sm75_grouped.cu, for the kernels, their plans
 * (csrc/plan), their launcher (csrc/gpu/sm80.c) and tests. Arguments and all words are those of gemm_4bit_sm80.h.
 *
 * A tile is 256 rows of x by 128 columns of y; a stage is 32 of depth: with 64 two stages do not fit in 64 KiB. */
#ifndef BSH_GEMM_4BIT_SM75_H
#define BSH_GEMM_4BIT_SM75_H

#include "cuda/sizes/gemm_4bit_sm80.h"

enum { BSH_GEMM_SM75_ROWS = 256, BSH_GEMM_SM75_THREADS = 256, BSH_GEMM_SM75_DEPTH = 32 };
enum { BSH_GEMM_SM75_X_BYTES = BSH_GEMM_SM75_ROWS * BSH_GEMM_SM75_DEPTH * 2 };
enum { BSH_GEMM_SM75_W_BYTES = BSH_GEMM_SM80_COLUMNS * BSH_GEMM_SM75_DEPTH * 2 }; /* of a stage, decoded */
/* Rows of x between two of which a thread copies 16 bytes. */
enum { BSH_GEMM_SM75_X_STEP = BSH_GEMM_SM75_THREADS / (BSH_GEMM_SM75_DEPTH / 8) };
/* Row groups of 16 in which warps take turns: a tile with fewer rows takes as long as its rows, rounded up to so many.
 */
enum { BSH_GEMM_SM75_ROUND = BSH_GEMM_SM75_ROWS / 4 };

/* Shared memory, as in gemm_4bit_sm80.h. */
enum { BSH_GEMM_SM75_W_AT = BSH_GEMM_SM80_STAGES * BSH_GEMM_SM75_X_BYTES };
enum { BSH_GEMM_SM75_MAP_AT = BSH_GEMM_SM75_W_AT + BSH_GEMM_SM80_STAGES * BSH_GEMM_SM75_W_BYTES };
enum { BSH_GEMM_SM75_PIECES_AT = BSH_GEMM_SM75_MAP_AT + BSH_MAP_BYTES };
enum { BSH_GEMM_SM75_WORDS_AT = BSH_GEMM_SM75_PIECES_AT + BSH_GEMM_SM80_PIECE_BYTES * BSH_GEMM_SM80_PIECES };
enum { BSH_GEMM_SM75_SHARED_BYTES = BSH_GEMM_SM75_WORDS_AT + 16 };
enum { BSH_GEMM_SM75_GROUPED_BYTES = BSH_GEMM_SM75_SHARED_BYTES + 4 * BSH_GEMM_SM80_WINDOW_WORDS };

#endif
