/* gemm_4bit_int8.h - sizes and arguments of gemm_4bit_int8.cu and of quantize_groups_int8 (int8.cu), for the kernels,
 * their host (csrc/gpu/linear_4bit_int8.c) and tests. C and CUDA. Formulas: core/linear_4bit_int8.h. */
#ifndef BSH_GEMM_4BIT_INT8_KERNELS_H
#define BSH_GEMM_4BIT_INT8_KERNELS_H

#include "core/linear_4bit_int8.h"
#include "cuda/sizes/int8.h"

/* Rows of x as int8 by groups: a thread takes 4 elements. */
enum { BSH_GROUP_INT8_LANES = BSH_GROUP_INT8 / 4 };

typedef struct {
  const void *x; /* [M, K], rows ldx elements apart */
  int8_t *codes; /* [M, K] */
  float *scales; /* [K / 64][M] */
  int64_t M, K, ldx;
  int32_t fast; /* x and its rows are aligned to 4 elements */
} bsh_groups_int8_args;

typedef struct {
  const int8_t *codes;   /* of x, [M, K] */
  const float *x_scales; /* [K / 64][M] */
  bsh_weight weight;     /* [N, K] */
  const void *bias;      /* [N] of the dtype, or NULL */
  void *y;               /* [M, N] */
  int32_t M, N, K;
  int32_t fast; /* packed is 16-byte aligned */
  int32_t m_tiles;
} bsh_gemm_4bit_int8_args;

/* A stage: codes as in gemm_int8.cu, and scales of two groups of the rows of x and of W. Two stages: with three, cards
 * with 99 KiB for a block would have none. */
enum {
  BSH_GEMM_4BIT_INT8_STAGES = 2,
  BSH_GEMM_4BIT_INT8_SCALES = 2 * 2 * BSH_GEMM_INT8_TILE * 4, /* bytes */
  BSH_GEMM_4BIT_INT8_SHARED = BSH_GEMM_4BIT_INT8_STAGES * (BSH_GEMM_INT8_STAGE_BYTES + BSH_GEMM_4BIT_INT8_SCALES)
};

#endif
