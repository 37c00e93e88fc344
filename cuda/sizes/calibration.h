/* calibration.h - sizes of calibration.cu, for the kernels and their host (csrc/gpu/calibration.c). C and CUDA. */
#ifndef BSH_CALIBRATION_H
#define BSH_CALIBRATION_H

enum { BSH_SEARCH_WARPS = 8 };   /* of a block of threads: a warp has a block of weights, a lane a scale */
enum { BSH_ROUND_THREADS = 64 }; /* a thread has a row */

#endif
