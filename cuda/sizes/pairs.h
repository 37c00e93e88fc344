/* pairs.h - sizes of pairs.cu, for the kernels and their host (csrc/gpu/pairs.c). C and CUDA. */
#ifndef BSH_PAIRS_H
#define BSH_PAIRS_H

/* sort_by_expert: warps of a block, at least and at most, and the pairs that each should have; blocks at most, and the
 * pairs of each; 32-bit counters in dynamic shared memory, all that a block has without asking for more. */
enum { BSH_SORT_LEAST_WARPS = 8, BSH_SORT_WARPS = 32, BSH_SORT_WARP_PAIRS = 32 };
enum { BSH_SORT_BLOCKS = 64, BSH_SORT_BLOCK_PAIRS = 512 };
enum { BSH_SORT_COUNTERS = 12 << 10 };

/* sum_by_token */
enum { BSH_SUM_THREADS = 128 };

#endif
