/* plan/dequantize.h - which kernel of blockwise.cu dequantizes a rectangle of W, and in how many blocks. Pure. */
#ifndef BSH_PLAN_DEQUANTIZE_H
#define BSH_PLAN_DEQUANTIZE_H

#include "core/cuda_kernel.h"
#include "core/kernels.h"

typedef struct {
  bsh_cuda_kernel *kernel;
  int64_t blocks;                /* of BSH_BLOCK_THREADS threads; more than a grid holds: too large */
  bsh_dequantize_4bit_args args; /* as this kernel takes them */
} bsh_dequantize_plan;

/* Of the addresses only whether they are there and what they are multiples of. */
bsh_dequantize_plan bsh_plan_dequantize_4bit(const bsh_dequantize_4bit_args *args, int32_t sms);

/* Blocks of a kernel whose threads loop over n elements. */
int64_t bsh_looping_blocks(int64_t n, int32_t sms);

#endif
