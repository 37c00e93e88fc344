/* gemv_4bit_simt.h - sizes of gemv_4bit_simt.cu, for the kernel, its plan (csrc/plan/gemv_4bit_simt.c) and tests. */
#ifndef BSH_GEMV_4BIT_SIMT_H
#define BSH_GEMV_4BIT_SIMT_H

#include "cuda/sizes/fused.h"

enum { BSH_SIMT_TOKENS = 8 };                                         /* rows of x, of a launch */
enum { BSH_SIMT_WARPS = 8 };                                          /* of a block */
enum { BSH_SIMT_ROWS = 4 };                                           /* rows of W, of a warp */
enum { BSH_SIMT_BLOCKSIZE = 16, BSH_SIMT_K = 32 };                    /* the smallest block; K is a multiple of that */
enum { BSH_SIMT_LANE = 8, BSH_SIMT_STEP = BSH_WARP * BSH_SIMT_LANE }; /* elements of K, of a lane and a warp */

#endif
