/* select.h - which kernel computes linear_4bit on CUDA. Pure: numbers in, a decision out, no CUDA call. */
#ifndef BSH_SELECT_H
#define BSH_SELECT_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels.h"

typedef enum {
  BSH_LINEAR_GEMV,      /* gemv_4bit.cu: few rows, any dtype, any sm */
  BSH_LINEAR_GEMM_SM90, /* gemm_4bit_sm90.cu: fused, 64 rows a launch, sm_90 */
  BSH_LINEAR_DENSE,     /* dequantize by panels, then the vendor GEMM */
} bsh_linear_kernel;

/* sm: 10 * major + minor; sms: multiprocessors. */
bsh_linear_kernel bsh_select_linear_4bit(int64_t M, int64_t N, int64_t K, bsh_dtype dtype, int sm, int sms,
                                         int64_t blocksize, bool nested);

/* "gemv_4bit", "gemm_4bit_sm90", "dense". */
const char *bsh_linear_kernel_name(bsh_linear_kernel kernel);

/* Which of a build's kernel images the driver loads on a GPU. `architectures`: what the build was made for, as nvcc
 * numbers it: "80,90a,compute_80". Machine code is taken before PTX: the newest of the GPU's major version, not above
 * it; else the newest PTX not above it. Code for 90a and the like has instructions of that one GPU generation. */
typedef struct {
  int32_t arch;       /* 10 * major + minor that the image was compiled for, 0: none loads */
  bool this_gpu_only; /* of an architecture with an "a", no plain one beside it */
} bsh_kernel_image;
bsh_kernel_image bsh_image_for(const char *architectures, int32_t sm);

/* Lines of W (rows forward, columns backward; each `line` elements of `itemsize` bytes) to dequantize at a time, so
 * that a panel takes at most workspace_bytes: all n_lines, or the most that fit as a multiple of 1024, 256 or 64, the
 * widths at which the vendor GEMM loses least; at least one line. */
int64_t bsh_panel_lines(int64_t n_lines, int64_t line, int64_t itemsize, int64_t workspace_bytes);

#endif
