/* merge.h - sizes of merge.cu, for the kernels and their host (csrc/gpu/merge.c). C and CUDA. */
#ifndef BSH_MERGE_H
#define BSH_MERGE_H

enum { BSH_MERGE_WARPS = 8, BSH_MERGE_THREADS = 32 * BSH_MERGE_WARPS }; /* of a block of threads, all kernels */
enum { BSH_MERGE_ROWS = 8, BSH_MERGE_COLUMNS = 64 };                    /* a warp's tile, fast kernels: a block a row */
enum { BSH_MERGE_RANKS = 64 };                                          /* of B in shared memory at a time */

#endif
