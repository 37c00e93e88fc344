/* cuda_linear.h - what the fused linear kernels are told; one layout for the C host and the CUDA files.
 *
 * A unit is 64 consecutive elements of a row of W: 32 packed bytes, one mma group, at most one block scale. A row tile
 * is 16 rows of W. A piece is what a warp's ring takes at a time: a row tile by 4 units. K is a multiple of 64, so a
 * row has K / 64 units. X_WARPS: of a gemm_4bit_sm90 that orders x itself. */
#ifndef BSH_CUDA_LINEAR_H
#define BSH_CUDA_LINEAR_H

#include <stdint.h>

#include "kernels.h"

enum { BSH_UNIT = 64, BSH_ROW_TILE = 16, BSH_PIECE_UNITS = 4, BSH_X_WARPS = 4 };

typedef struct {
  const uint8_t *packed;
  const float *absmax; /* plain scales, else NULL */
  const uint8_t *absmax_code;
  const float *absmax_map;
  const float *absmax2;
  const float *offset;
  const void *x;
  const void *bias; /* or NULL */
  void *y;
  float *partial;     /* scratch of split K: f32 [token groups][row tiles][k_splits][tokens * 16], or NULL */
  uint32_t *counters; /* gemm_4bit_sm90: [row tiles][parts of K], 0 at the start */
  int64_t ldx, ldy;
  int32_t M, N, K;
  int32_t format;      /* bsh_format */
  int32_t block_shift; /* log2(blocksize / 64); gemv_4bit_simt: log2(blocksize / 32) */
  int32_t k_splits;    /* thread blocks that share the K of a row tile (gemm_4bit_sm90: that leave sums, at most) */
  int32_t k_warps;     /* warps of a thread block that share its part of K */
  int32_t row_groups;  /* groups of k_warps warps, each on its own row tiles */
  /* What a block would otherwise find by division before its first load.
   * gemm_4bit_sm90: */
  int32_t row_tiles;    /* of a row block, two parts of K */
  int32_t block_pieces; /* of each of the gridDim.x blocks of threads; more_pieces of them have one more */
  int32_t more_pieces;
  /* gemv_4bit; a team: k_splits blocks that share row tiles. */
  int32_t group_of_warp; /* ceil(2^16 / k_warps): warp w is in group w * group_of_warp >> 16 */
  int32_t team_tiles;    /* row tiles of a team; the first longer_teams teams have one more */
  int32_t longer_teams;
  int32_t steps, longer_steps; /* ceil(row tiles / row_groups) of either kind of team */
} bsh_fused_args;

#ifndef __CUDACC__
#include <stdbool.h>

/* What select.c may give to gemv_4bit.cu or gemv_4bit_simt.cu, and to gemm_4bit_sm90.cu. Pure. */
bool bsh_gemv_takes(int64_t M, int64_t N, int64_t K, bsh_dtype dtype, int32_t sm, int64_t blocksize);
bool bsh_gemm_sm90_takes(int64_t M, int64_t N, int64_t K, bsh_dtype dtype, int32_t sm, int64_t blocksize);
#endif

#endif
