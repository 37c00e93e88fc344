/* blockwise.h - sizes of blockwise.cu, for the kernels and their host (csrc/gpu/blockwise.c). C and CUDA. */
#ifndef BSH_BLOCKWISE_H
#define BSH_BLOCKWISE_H

enum { BSH_BLOCK_WARPS = 8, BSH_BLOCK_THREADS = 32 * BSH_BLOCK_WARPS }; /* of a block of threads, all kernels */
enum { BSH_SEARCH_BLOCKS_PER_SM = 4 }; /* blocks that fill a search table first: as many as run at once */
enum { BSH_WARP_TILE = 1024 };         /* elements of a warp, fast kernels */
enum { BSH_VECTOR_BYTES = 16 };        /* of the wide tensor, a lane and step */

#endif
