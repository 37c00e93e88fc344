/* merge.h - sizes of merge.cu, for the kernels and their host (csrc/gpu/merge.c). C and CUDA. */
#ifndef BSH_MERGE_H
#define BSH_MERGE_H

/* Fast kernels: a warp has 32 rows of a block of the weight; a block of threads a tile of ACROSS x DOWN warps. */
enum { BSH_MERGE_ROWS = 32, BSH_MERGE_COLUMNS = 64 };
enum { BSH_MERGE_ACROSS = 2, BSH_MERGE_DOWN = 2, BSH_MERGE_WARPS = BSH_MERGE_ACROSS * BSH_MERGE_DOWN };
enum {
  BSH_MERGE_THREADS = 32 * BSH_MERGE_WARPS, /* of a block of threads, all kernels */
  BSH_MERGE_TILE_ROWS = BSH_MERGE_ROWS * BSH_MERGE_DOWN,
  BSH_MERGE_TILE_COLUMNS = BSH_MERGE_COLUMNS * BSH_MERGE_ACROSS,
  BSH_MERGE_MEAN_THREADS = 1024,                /* of the kernel that makes one number of what others have found */
  BSH_MERGE_CHUNK = 32,                         /* ranks in shared memory at a time */
  BSH_MERGE_RESIDENT = 512 / BSH_MERGE_THREADS, /* blocks of threads of a multiprocessor, 128 registers a thread */
};

#endif
