/* fused.h - what the fused linear kernels share with their host: sizes, and the arguments of a launch. C and CUDA.
 *
 * A unit is 64 consecutive elements of a row of W: 32 packed bytes, one mma group, at most one block scale. A row tile
 * is 16 rows of W. A piece is what a warp's ring takes at a time: a row tile by 4 units. K is a multiple of 64, so a
 * row has K / 64 units.
 *
 * The sizes of each kernel are in the header of its name, written once: the kernel takes them as template constants,
 * the host adds up shared memory from them, tests/core/test_launch.c checks launches against them. */
#ifndef BSH_FUSED_H
#define BSH_FUSED_H

#include <stdint.h>

#include "core/kernels.h"

#ifdef __CUDACC__
#define BSH_SIZE constexpr __host__ __device__
#else
#define BSH_SIZE static inline
#endif

enum { BSH_UNIT = 64, BSH_ROW_TILE = 16, BSH_PIECE_UNITS = 4, BSH_WARP = 32 };
enum { BSH_PIECE_BYTES = BSH_ROW_TILE * BSH_PIECE_UNITS * BSH_UNIT / 2, BSH_MAP_BYTES = 256 * 4 };

/* Architectures are 10 * major + minor of what a kernel was compiled for. Wide ones have 227 KiB of shared memory for a
 * block, clusters and dependent launch. */
BSH_SIZE bool bsh_is_wide(int32_t arch) { return arch >= 90 && arch < 120; }

/* The table of pairs (decode.cuh). Wide: its rows lie 256 bytes apart at a multiple of 64 KiB, so that one byte
 * permutation builds an address (row in byte 1, lane in byte 0), and the rings of packed bytes begin 64 KiB behind it.
 * Elsewhere rows lie 128 bytes apart and an address takes two instructions. */
enum { BSH_WIDE_TABLE_AT = 1 << 16, BSH_WIDE_RING_AT = 2 << 16 };
BSH_SIZE int32_t bsh_table_row(int32_t arch) { return bsh_is_wide(arch) ? 256 : 128; }
BSH_SIZE int32_t bsh_table_bytes(int32_t arch) { return 256 * bsh_table_row(arch); }

/* How one launch is cut into thread blocks. */
typedef struct {
  int32_t k_splits;   /* thread blocks that share the K of a row tile (gemm_4bit_sm90: that leave sums, at most) */
  int32_t k_warps;    /* warps of a thread block that share its part of K */
  int32_t row_groups; /* groups of k_warps warps, each on its own row tiles */
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
} bsh_fused_cut;

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
  bsh_fused_cut cut;
} bsh_fused_args;

#endif
