/* merge.h - sizes of merge.cu, for the kernels and their host (csrc/gpu/merge.c). C and CUDA. */
#ifndef BSH_MERGE_H
#define BSH_MERGE_H

#include <stdint.h>

enum { BSH_MERGE_WARPS = 8, BSH_MERGE_THREADS = 32 * BSH_MERGE_WARPS }; /* of a block of threads, all kernels */

/* Fast kernels: a warp's tile, a block of the weight in each row. A panel has `rows` rows and the columns of 8 warps;
 * its part of B is [R][rows + PAD] numbers in shared memory. */
enum { BSH_MERGE_ROWS = 8, BSH_MERGE_COLUMNS = 64, BSH_MERGE_PAD = 4, BSH_MERGE_PANEL = 64 };
enum { BSH_MERGE_RANKS = 512, BSH_MERGE_FACTORS = BSH_MERGE_RANKS * (BSH_MERGE_ROWS + BSH_MERGE_PAD) };

/* As many as fit, a multiple of a tile's. R: at most BSH_MERGE_RANKS. */
#ifdef __CUDACC__
__host__ __device__
#endif
    static inline int bsh_merge_panel_rows(const int64_t R) {
  int rows = BSH_MERGE_PANEL;
  while (rows > BSH_MERGE_ROWS && R * (rows + BSH_MERGE_PAD) > BSH_MERGE_FACTORS) rows -= BSH_MERGE_ROWS;
  return rows;
}

#endif
