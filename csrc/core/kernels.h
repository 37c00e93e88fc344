/* core/kernels.h - the argument structs that travel from an op to a kernel, on CPU and CUDA alike.
 *
 * Plain pointers and sizes only: no torch, no Python. All pointers of one struct live on one device.
 * M: rows of x, N: out features (rows of W), K: in features (columns of W). W is row-major [N, K]; its codes are packed
 * two to a byte in flattened order, the first of a pair in the high nibble. A block is `blocksize` consecutive elements
 * of the flattened tensor and has one scale; the last block may be short. */
#ifndef BSH_CORE_KERNELS_H
#define BSH_CORE_KERNELS_H

#include <stdbool.h>
#include <stdint.h>

#include "core/formats.h"

typedef enum { BSH_F32 = 0, BSH_F16 = 1, BSH_BF16 = 2 } bsh_dtype; /* values of x, y and dequantized weights */

enum { BSH_NESTED_BLOCKSIZE = 256 }; /* scales per second-level scale */

/* Scales of 4-bit blocks. Plain: absmax is set and the rest NULL. Nested: absmax is NULL and
 * scale[b] = RN(RN(absmax_map[absmax_code[b]] * absmax2[b / 256]) + *offset), two roundings, no FMA. */
typedef struct {
  const float *absmax;        /* f32 [n_blocks] */
  const uint8_t *absmax_code; /* u8  [n_blocks] */
  const float *absmax_map;    /* f32 [256] */
  const float *absmax2;       /* f32 [ceil(n_blocks / 256)] */
  const float *offset;        /* f32 [1] */
} bsh_scales;

/* A packed tensor of n elements. 4 bits: packed u8 [ceil(n / 2)]. BSH_INT8: int8 [n], and its blocks are rows: absmax
 * is f32 [N]. Any alignment unless a kernel asks for more. */
typedef struct {
  const uint8_t *packed;
  bsh_scales scales;
  int64_t n;
  int64_t blocksize; /* 4 bits: a power of two, 16 to 4096 */
  bsh_format format;
} bsh_weight;

/* x [n] -> packed u8 [ceil(n / 2)], absmax f32 [ceil(n / blocksize)]. */
typedef struct {
  const void *x;
  uint8_t *packed;
  float *absmax;
  int64_t n;
  int64_t blocksize;
  bsh_dtype dtype;
  bsh_format format;
} bsh_quantize_4bit_args;

/* A rectangle of W [rows, columns]: rows [row0, row0 + n_rows), columns [column0, column0 + n_columns) go to
 * out[r * ld + c]. A whole tensor of n elements is rows = 1, columns = n, ld = n. */
typedef struct {
  bsh_weight weight;
  void *out;
  int64_t columns; /* K: columns of the whole tensor */
  int64_t row0, n_rows;
  int64_t column0, n_columns;
  int64_t ld; /* elements between rows of out */
  bsh_dtype dtype;
} bsh_dequantize_4bit_args;

/* x [n] -> code index u8 [n], absmax f32 [ceil(n / blocksize)]. map: f32 [256], ascending.
 * offset: f32 [1] subtracted from every element first (nested scales), or NULL. */
typedef struct {
  const void *x;
  const float *map;
  const float *offset;
  uint8_t *code;
  float *absmax;
  int64_t n;
  int64_t blocksize;
  bsh_dtype dtype;
} bsh_quantize_blockwise_args;

/* out[i] = RN_T(map[code[i]] * absmax[i / blocksize]); with offset: RN(...) + *offset, two roundings. */
typedef struct {
  const uint8_t *code;
  const float *absmax;
  const float *map;
  const float *offset; /* f32 [1] or NULL */
  void *out;
  int64_t n;
  int64_t blocksize;
  bsh_dtype dtype;
} bsh_dequantize_blockwise_args;

typedef enum { BSH_FORWARD, BSH_INPUT_GRADIENT } bsh_direction; /* y = x W^T + bias; dx = dy W */

/* y[M, N] = x[M, K] W^T + bias. The input gradient: y[M, K] = x[M, N] W, where x is dy, y is dx and bias is NULL. x
 * rows are ldx apart, y rows ldy apart (elements); bias [N] or NULL; all of `dtype`.
 *
 * A stack: E weights [N, K], one after the other in `weight`, each with blocks and nested scales of its own. Rows
 * [offs[e - 1], offs[e]) of x and y belong to expert e, rows from offs[E - 1] on to none: y is zero there. M is the
 * number of all rows, bias [E, N] or NULL. */
typedef struct {
  bsh_weight weight; /* n = N * K, of a stack E * N * K */
  const void *x;
  const void *bias;
  void *y;
  int64_t M, N, K;
  int64_t ldx, ldy;
  const int32_t *offs; /* [E] of a stack, ascending, none above M; else NULL */
  int64_t E;           /* weights of a stack; 0: one weight */
  float threshold;     /* of outliers in x, for BSH_INT8; 0: none */
  bsh_dtype dtype;
  bsh_direction direction;
} bsh_product_args;

/* The pairs of T tokens and the k experts of each, pair t k + i, in the order of their experts, those of one expert in
 * their own order. With `elsewhere` numbers from E on are those of experts elsewhere, whose pairs come behind all.
 * Other numbers that are no expert's are wrong: such a pair comes among those of the nearest expert, so that its row
 * has values, and its place is marked. k divides S. */
typedef struct {
  const int64_t *chosen; /* [S], S = T k */
  int64_t *order;        /* [S]: the pair that comes to each place */
  int64_t *back;         /* [S]: the place of each pair; minus S, so below 0, where its number is wrong */
  int64_t *row;          /* [S]: the token that comes to each place */
  int32_t *offs;         /* [E]: where the pairs of each expert end */
  int64_t S, k;
  int32_t E;
  bool elsewhere;
} bsh_sort_by_expert_args;

/* out[t] = the sum over i < k of counts[t, i] y[back[t k + i]]: fp32 products and sums, each rounded, in the order of
 * i, then rounded to the dtype. NaN where one of its `back` is below 0, which marks a number that was wrong. */
typedef struct {
  const void *y;       /* [T k, H] */
  const int64_t *back; /* [T k], rows of y, or those minus T k */
  const void *counts;  /* [T, k] */
  void *out;           /* [T, H], dtype of y */
  int64_t T, k, H;
  bsh_dtype dtype, counts_dtype;
} bsh_sum_by_token_args;

/* Which of G scales fits a block best: choice[b] = the g with the least sum over the block of
 * weights[i % period] * (x[i] - q)^2, q the nearest value of scales[b, g]; of equal ones the first. fp32, in order. */
typedef struct {
  const float *x;       /* f32 [n] */
  const float *weights; /* f32 [period] */
  const float *scales;  /* f32 [ceil(n / blocksize), G], finite, of either sign */
  uint8_t *choice;      /* u8  [ceil(n / blocksize)] */
  int64_t n, period, blocksize, G;
  bsh_format format;
} bsh_search_4bit_args;

enum { BSH_MAX_SCALES = 256 };   /* that are tried on a block */
enum { BSH_ROUND_COLUMNS = 64 }; /* of a panel, at most */

/* Codes of a panel w [N, P] of columns, each row by itself: for j = 0 .. P - 1 the nearest value q of scales[row, j],
 * e_j = (w_j - q) / u[j, j], and w_k -= e_j u[j, k] for k > j. */
typedef struct {
  const float *w;      /* f32 [N, P] */
  const float *u;      /* f32 [P, P], upper triangle */
  const float *scales; /* f32 [N, P] */
  uint8_t *codes;      /* u8  [N, P], one code a byte */
  float *errors;       /* f32 [N, P]: e_j */
  int64_t N, P;
  bsh_format format;
} bsh_round_4bit_args;

/* W [N, K] with LoRA adapters in it, quantized anew in the format of `weight`. An element is that of W in fp32, then
 * for each adapter value = fma(s, sum, value), where sum = fma(b[n, r], a[r, k], sum) over its ranks r, ascending, from
 * 0. */
typedef struct {
  bsh_weight weight;   /* n = N * K */
  const void *a;       /* [R, K]: A of all adapters, one below the other */
  const void *b;       /* [N, R]: B of all adapters, side by side */
  const float *scales; /* f32 [R]: s at the last rank of each adapter, 0 at the others */
  uint8_t *packed;     /* u8  [ceil(n / 2)] */
  float *absmax;       /* f32 [ceil(n / blocksize)]; NF4 and FP4 */
  int64_t N, K, R;
  bsh_dtype dtype;  /* of a and b */
  const float *map; /* f32 [256]: of nested scales; NULL: they are not nested. NF4 and FP4 */
  float *mean;      /* f32: of absmax, their sum in fp64 times 1 / their number, the offset of nested scales */
  union {           /* of each block of threads, on a GPU */
    double *sums;   /* of absmax */
    uint32_t *maxima;
  };
  uint8_t *scales8; /* u8 [ceil(n / blocksize)]; MXFP4 and NVFP4, and codes of nested scales */
  float *second;    /* f32 [ceil(n / blocksize / 256)]: of nested scales; NVFP4's global scale in each; NULL: MXFP4 */
} bsh_merge_4bit_args;

/* Optimizers by the formulas of core/optimizer.h. LAMB is Adam and LARS is momentum with max_unorm. */
typedef enum {
  BSH_ADAM = 0,
  BSH_MOMENTUM = 1,
  BSH_RMSPROP = 2,
  BSH_ADAGRAD = 3,
  BSH_LION = 4,
  BSH_ADEMAMIX = 5,
  BSH_N_OPTIMIZERS = 6
} bsh_optimizer;

/* Whether there is a second state; the slow moment of AdEMAMix is the second half of the first. */
#define BSH_HAS_SECOND_STATE(algorithm) ((algorithm) == BSH_ADAM || (algorithm) == BSH_ADEMAMIX)

/* The numbers of one step, the same for all elements. Made in ops/optimizer_step.c. */
typedef struct {
  float beta1, beta2, beta3;
  float rest1, rest2, rest3; /* 1 - beta */
  float lr, alpha, eps, weight_decay, gnorm_scale;
  float stored_lr;                /* lr rounded to `round` */
  float decay;                    /* 1 - lr * weight_decay, one rounding */
  float correction1, correction2; /* 1 - beta1^step, sqrt(1 - beta2^step) */
  float inverse1, inverse2;       /* 1 / (1 - beta1^step), 1 / (1 - beta2^step) */
  float step_size;                /* -lr * correction2 / correction1 * update_scale */
  float scaled_eps;               /* eps * correction2 */
  float update_scale;             /* what max_unorm leaves of an update */
  bsh_dtype round;                /* what parts of a step round to: the dtype of p and g; fp32 where they differ */
  bool first;                     /* step 1 */
  bool skip_zeros;                /* an element whose gradient is zero stays as it is */
} bsh_step_numbers;

/* p and its states [n] after a step with gradient g. state2 is NULL for one state. AdEMAMix: state1 is [2, n].
 * unorm: f32 [1], squared norm of the update before it is scaled; NULL without max_unorm. */
typedef struct {
  const void *g;
  void *p;
  float *state1, *state2;
  float *unorm;
  float max_unorm, param_norm;
  int64_t n;
  bsh_dtype g_dtype, p_dtype;
  bsh_optimizer algorithm;
  bsh_step_numbers numbers;
} bsh_optimizer_32bit_args;

/* The same with states as codes u8 [n] of a map f32 [256] and scales f32 [n_blocks]. AdEMAMix: state1 [2, n],
 * absmax1 [2, n_blocks]. */
typedef struct {
  const void *g;
  void *p;
  uint8_t *state1, *state2;
  const float *map1, *map2;
  float *absmax1, *absmax2;
  int64_t n;
  int64_t blocksize; /* a power of two, 32 to 4096 */
  bsh_dtype g_dtype, p_dtype;
  bsh_optimizer algorithm;
  bsh_step_numbers numbers;
} bsh_optimizer_8bit_blockwise_args;

/* What the CUDA kernels of optimizer.cu update in one launch, a kernel parameter of 30 KB (32,764 bytes are the most):
 * parameters of the same dtypes with the same numbers. The blocks of all of them are numbered through. */
enum { BSH_STEP_BLOCK = 256, BSH_STEP_TENSORS = 504, BSH_STEP_THREADS = 1024 };
enum { BSH_STEP_COPIES_BYTES = 64 << 10 }; /* dynamic shared memory of the kernels for 8-bit states, from sm_80 on */

typedef struct {
  const void *g;
  void *p;
  void *state1, *state2;    /* f32 [n] or codes u8 [n]; AdEMAMix: state1 is [2, n] */
  float *absmax1, *absmax2; /* f32 [n_blocks] of codes, else NULL; AdEMAMix: absmax1 is [2, n_blocks] */
  int64_t n;
} bsh_step_tensor;

typedef struct {
  bsh_step_numbers numbers;
  bsh_optimizer algorithm;
  bsh_dtype g_dtype, p_dtype;
  const float *map1, *map2; /* f32 [256] of codes, else NULL */
  const float *unorm;       /* as in bsh_optimizer_32bit_args, of the only tensor; NULL without max_unorm */
  float max_unorm, param_norm;
  uint32_t n_tensors;
  uint32_t first[BSH_STEP_TENSORS + 1]; /* number of each tensor's first block; behind the last one, of all */
  bsh_step_tensor tensors[BSH_STEP_TENSORS];
} bsh_step_list;

#endif
