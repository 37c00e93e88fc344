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
  int32_t fast;  /* packed is 8-byte aligned */
  int32_t pairs; /* y may be stored by twos: N is even, y aligned to two elements */
  int32_t m_tiles;
} bsh_gemm_4bit_int8_args;

/* A tile of y. A stage: codes of a group of its rows of x and of W, and scales of x. Behind the stages: packed bytes of
 * W, half a byte a code, and scales of W of eight groups. Two blocks fit where a multiprocessor has 100 KiB. */
enum {
  BSH_GEMM_4BIT_INT8_ROWS = 128,
  BSH_GEMM_4BIT_INT8_COLUMNS = 64,
  BSH_GEMM_4BIT_INT8_THREADS = 256,
  BSH_GEMM_4BIT_INT8_STAGES = 3,
  BSH_GEMM_4BIT_INT8_PACKED_STAGES = 4,
  BSH_GEMM_4BIT_INT8_STAGE_BYTES = (BSH_GEMM_4BIT_INT8_ROWS + BSH_GEMM_4BIT_INT8_COLUMNS) * BSH_GROUP_INT8 +
      BSH_GEMM_4BIT_INT8_ROWS * 4,
  BSH_GEMM_4BIT_INT8_SHARED = BSH_GEMM_4BIT_INT8_STAGES * BSH_GEMM_4BIT_INT8_STAGE_BYTES +
      BSH_GEMM_4BIT_INT8_PACKED_STAGES * BSH_GEMM_4BIT_INT8_COLUMNS * BSH_GROUP_INT8 / 2 +
      8 * BSH_GEMM_4BIT_INT8_COLUMNS * 4
};

#endif
