/* int8.h - sizes and arguments of the int8 kernels (int8.cu, gemv_int8.cu, gemm_int8.cu, gemm_int8_sm90.cu, ...), for
 * the kernels, their plan (csrc/plan/int8.c), their host (csrc/gpu/int8.c) and tests. C and CUDA. */
#ifndef BSH_INT8_KERNELS_H
#define BSH_INT8_KERNELS_H

#include <stdint.h>

#include "core/int8.h"
#include "cuda/sizes/fused.h"

enum { BSH_INT8_THREADS = 256 };      /* of a block, int8.cu */
enum { BSH_INT8_OUTLIER_ROWS = 8 };   /* of x or W that a block of outliers_int8 gathers at a time, a warp each */
enum { BSH_INT8_OUTLIER_BLOCKS = 8 }; /* of it, for each multiprocessor, at most */
enum { BSH_INT8_ANY_WARPS = 4, BSH_INT8_ANY_TOKENS = 4 };

/* A chunk: 64 outlier columns, gathered in 16 bits: rows of 128 bytes, as 128 columns of codes. */
enum { BSH_INT8_CHUNK = 64 };

/* Outlier columns of x, found on the GPU: `count` of them, listed in order. The first `capacity` are gathered, as
 * 16-bit x and as 16-bit codes of W, with zeros up to a whole chunk; the others are multiplied one by one. */
typedef struct {
  const uint8_t *flags; /* [K] */
  int32_t *count;       /* NULL: there are none */
  int32_t *list;        /* [K] */
  void *x, *w;          /* of dtype, [M, capacity] and [N, capacity] */
  int32_t capacity;     /* a multiple of BSH_INT8_CHUNK, or 0 */
} bsh_int8_outliers;

/* clear_int8: flags before quantize_int8 sets some. */
typedef struct {
  uint8_t *flags; /* [n] */
  int64_t n;
} bsh_int8_clear_args;

/* quantize_int8. claims: in the place of rows.outliers. A column that has an outlier gets the complement of the number
 * of a row in which it has one; what was in memory before stays where there is none, so that nothing has to be cleared
 * first. Who reads a claim looks it up: it names a row of x, which reaches the threshold there, or it says nothing. */
typedef struct {
  bsh_quantize_int8_args rows;
  uint16_t *claims; /* [K] or NULL */
  uint32_t *shares; /* with claims: set to 0, for gemm_int8_sm90 */
} bsh_int8_rows_args;

/* outliers_int8: clears the codes of outlier columns of x, and gathers those of x and W where capacity > 0. With
 * count NULL it only clears. */
typedef struct {
  bsh_int8_outliers outliers;
  const void *x;   /* [M, K], rows ldx elements apart */
  int8_t *codes;   /* of x, [M, K] */
  const int8_t *w; /* [N, K] */
  int64_t ldx;
  int32_t M, N, K;
} bsh_int8_gather_args;

/* dequantize_int8: a rectangle of W. */
typedef struct {
  const int8_t *codes; /* rows `pitch` bytes apart */
  const float *absmax; /* [rows] */
  void *y;             /* [rows, columns] of dtype */
  int64_t rows, columns, pitch;
} bsh_int8_rectangle_args;

/* gemm_int8 and gemm_int8_sm90: the product of codes a [M, K] and b [N, K]. gemm_int8 of int32 stores the sums and
 * reads no scales. */
typedef struct {
  const int8_t *a, *b;
  void *y; /* [M, N] */
  const float *row_absmax, *col_absmax;
  const void *bias; /* or NULL */
  const void *x;    /* [M, K], rows ldx elements apart: for outlier columns beyond the capacity */
  int64_t ldx;
  bsh_int8_outliers outliers;
  int32_t M, N, K;
  int32_t fast;        /* rows of a and b are 16-byte aligned */
  int32_t store_fours; /* y and its rows are 16-byte aligned: 16 bytes a store (gemm_int8_sm90) */
  int32_t m_tiles, tiles;
  /* gemm_int8_sm90: blocks of a cluster that share the depth of a tile, of forms that have no other clusters; their
   * sums, int32 [tiles][splits - 1][sums of a thread / 4][256 threads][4]. More than 1: a cluster has one tile. */
  int32_t splits;
  int32_t *partial;
  /* gemm_int8_sm90: of outlier columns that it finds itself; the codes of these are still in a. Or NULL. */
  const uint16_t *claims; /* [K] */
  float threshold;        /* of claims, as in bsh_quantize_int8_args */
  void *found_x;          /* of dtype, [M, BSH_INT8_CHUNK]: x at the first of them, gathered by all blocks */
  int8_t *found_codes;    /* [M, BSH_INT8_CHUNK]: the codes of these, negated */
  uint32_t *shares;       /* blocks that have gathered their rows: 0 before the kernel */
} bsh_int8_gemm_args;

/* gemm_int8: a block of threads has 128 x 128 of y; a stage is 128 codes of 256 rows, with 128-byte swizzle. */
enum { BSH_GEMM_INT8_TILE = 128, BSH_GEMM_INT8_DEPTH = 128, BSH_GEMM_INT8_THREADS = 256 };
enum { BSH_GEMM_INT8_STAGE_BYTES = 2 * BSH_GEMM_INT8_TILE * BSH_GEMM_INT8_DEPTH };
BSH_SIZE int32_t bsh_gemm_int8_stages(int32_t arch) { return arch >= 80 ? 3 : 2; }
BSH_SIZE int32_t bsh_gemm_int8_shared_bytes(int32_t arch) {
  return bsh_gemm_int8_stages(arch) * BSH_GEMM_INT8_STAGE_BYTES;
}

/* gemm_int8_sm90. X(name, rows of x of a tile, rows of W, stages, blocks of a cluster). The blocks of a cluster have
 * neighbouring rows of x and the same rows of W, of which each reads its part for all; of three blocks two do. */
#define BSH_GEMM_INT8_SM90_FORMS(X)                                                                                    \
  X(m64_n64, 64, 64, 12, 1)                                                                                            \
  X(m64_n64_c2, 64, 64, 12, 2)                                                                                         \
  X(m64_n128, 64, 128, 8, 1)                                                                                           \
  X(m64_n128_c2, 64, 128, 8, 2)                                                                                        \
  X(m64_n128_c3, 64, 128, 8, 3)                                                                                        \
  X(m128_n96_c2, 128, 96, 7, 2)                                                                                        \
  X(m128_n128, 128, 128, 6, 1)                                                                                         \
  X(m128_n128_c2, 128, 128, 6, 2)                                                                                      \
  X(m128_n256, 128, 256, 4, 2)
/* Blocks of a cluster that read W. */
BSH_SIZE int32_t bsh_gemm_int8_sm90_readers(int32_t cluster) { return cluster == 3 ? 2 : cluster; }
enum { BSH_GEMM_INT8_SM90_THREADS = 384, BSH_GEMM_INT8_SM90_SHARED = 227 << 10 };
/* With which a thread begins: a multiprocessor's, shared by a block's. */
enum { BSH_GEMM_INT8_SM90_REGISTERS = 65536 / BSH_GEMM_INT8_SM90_THREADS / 8 * 8 };
/* Of a thread of a form. With 112, quantize_int8 of the next product has room beside it. */
BSH_SIZE int32_t bsh_gemm_int8_sm90_registers(int32_t columns) {
  return columns == 64 ? 112 : BSH_GEMM_INT8_SM90_REGISTERS;
}
enum { BSH_GEMM_INT8_SM90_STATE = 1024 }; /* bytes: barriers, a list of outlier columns */
/* With scale and bias of a tile's columns, twice. */
BSH_SIZE int32_t bsh_gemm_int8_sm90_state_bytes(int32_t columns) { return BSH_GEMM_INT8_SM90_STATE + 16 * columns; }
/* Where outlier columns are found: most rows and columns of x, of which a claim says one, and there is a bit each. */
enum { BSH_INT8_FOUND_ROWS = 65535, BSH_INT8_FOUND_K = 32768 };
/* Whether a form finds them. */
BSH_SIZE int32_t bsh_gemm_int8_sm90_finds(int32_t columns) { return columns <= 128; }
/* Bytes of operands of 64 columns: x and W in 16 bits, and codes; and of the bits. */
BSH_SIZE int32_t bsh_gemm_int8_sm90_found_bytes(int32_t rows, int32_t columns) {
  return (rows + 64 + 2 * columns) * 128 + BSH_INT8_FOUND_K / 8;
}
/* Of the ring, of at most `stages`, where outlier columns are found. */
BSH_SIZE int32_t bsh_gemm_int8_sm90_found_stages(int32_t rows, int32_t columns, int32_t stages) {
  const int32_t left = BSH_GEMM_INT8_SM90_SHARED - 1024 - bsh_gemm_int8_sm90_state_bytes(columns) -
                       bsh_gemm_int8_sm90_found_bytes(rows, columns);
  const int32_t fit = left / ((rows + columns) * BSH_GEMM_INT8_DEPTH);
  return fit < stages ? fit : stages;
}
/* Of a block, with found outlier columns or without: a kernel has one size. */
BSH_SIZE int32_t bsh_gemm_int8_sm90_shared_bytes(int32_t rows, int32_t columns, int32_t stages) {
  const int32_t stage = (rows + columns) * BSH_GEMM_INT8_DEPTH, plain = stages * stage;
  const int32_t found =
      bsh_gemm_int8_sm90_found_stages(rows, columns, stages) * stage + bsh_gemm_int8_sm90_found_bytes(rows, columns);
  return 1024 + bsh_gemm_int8_sm90_state_bytes(columns) +
         (bsh_gemm_int8_sm90_finds(columns) && found > plain ? found : plain);
}

/* mixed_int8_sm90 and dgrad_int8_sm90: a pair of blocks has 256 rows, of W, or for dx of its transpose, by `tokens`
 * rows of x or dy. X(name, tokens, stages of 64 of depth). */
#define BSH_MIXED_INT8_FORMS(X) X(m64, 64, 12) X(m128, 128, 8) X(m256, 256, 5)
enum { BSH_MIXED_INT8_ROWS = 128, BSH_MIXED_INT8_DEPTH = 64, BSH_MIXED_INT8_SPLITS = 4 /* at most */ };
BSH_SIZE int32_t bsh_mixed_int8_shared_bytes(int32_t tokens, int32_t stages) {
  return 1024 + stages * ((tokens + BSH_MIXED_INT8_DEPTH) * 128 + 16);
}
/* split_scales_int8: the scale absmax / 127 of two neighbouring rows of W as a sum of two pairs of T; zeros beyond N,
 * up to a multiple of twice BSH_MIXED_INT8_DEPTH, and a stage more. */
typedef struct {
  uint32_t high, low;
} bsh_int8_scale_pair;
typedef struct {
  const float *absmax;        /* [N] */
  bsh_int8_scale_pair *pairs; /* [n_pairs] */
  int32_t N, n_pairs;
} bsh_int8_split_args;

BSH_SIZE int32_t bsh_dgrad_int8_pairs(int64_t N) {
  return (int32_t)((N + 2 * BSH_MIXED_INT8_DEPTH - 1) / (2 * BSH_MIXED_INT8_DEPTH) * BSH_MIXED_INT8_DEPTH +
                   BSH_MIXED_INT8_DEPTH / 2);
}

typedef struct {
  const bsh_int8_scale_pair *scales; /* of dgrad_int8_sm90 */
  const float *absmax;               /* of mixed_int8_sm90: [rows] */
  const void *bias;                  /* likewise, or NULL */
  void *y;                           /* y or dx, [M, rows] */
  int32_t M, rows, depth;            /* rows, depth: N and K of W; for dx K and N */
  int32_t store_pairs;               /* y and its rows are 4-byte aligned */
  int32_t token_tiles, tiles;
  int32_t splits; /* pairs of blocks that share the depth. More than 1: a cluster has one tile */
} bsh_int8_mixed_args;

/* gemv_int8_dgrad: a block has 128 columns of W. X(name, token tiles: 8 rows of dy each, slots of a warp's ring, blocks
 * of a multiprocessor). */
#define BSH_GEMV_DGRAD_FORMS(X) X(m8, 1, 3, 2) X(m16, 2, 4, 1) X(m32, 4, 4, 1)
enum { BSH_GEMV_DGRAD_WARPS = 8, BSH_GEMV_DGRAD_COLUMNS = 128, BSH_GEMV_DGRAD_ROWS = 64 /* of dy, of a launch */ };
BSH_SIZE int32_t bsh_gemv_dgrad_shared_bytes(int32_t slots) {
  return BSH_GEMV_DGRAD_WARPS * slots * 32 * BSH_GEMV_DGRAD_COLUMNS;
}
typedef struct {
  const int8_t *packed; /* [N, K] */
  const float *absmax;  /* [N] */
  const void *dy;       /* [M, N], rows ldy elements apart */
  void *dx;             /* [M, K] */
  float *partial;       /* f32 [groups of tokens][K / 128][splits][tokens of a group][128] */
  int64_t ldy;
  int32_t M, N, K;
  int32_t splits; /* blocks, a cluster, that share N */
} bsh_int8_gemv_dgrad_args;

/* gemv_int8. X(name, token tiles: 8 rows of x each, units of K a warp). */
#define BSH_GEMV_INT8_FORMS(X) X(m8_k4, 1, 4) X(m8_k8, 1, 8) X(m16_k4, 2, 4)

/* A ring of pieces of 16 rows x 128 codes for each warp, and two sets of sums. */
BSH_SIZE int32_t bsh_gemv_int8_shared_bytes(int32_t warps, int32_t slots, int32_t sums_bytes) {
  return warps * slots * BSH_PIECE_BYTES + sums_bytes;
}

/* linear_int8_any, linear_int8_dgrad_any: y = x W^T + bias; dx [M, K] = dy [M, N] W, no bias, no threshold. */
typedef struct {
  const void *x;        /* [M, K] of dtype (dgrad: dy [M, N]), rows ldx elements apart */
  const int8_t *packed; /* [N, K] */
  const float *absmax;  /* [N] */
  const void *bias;     /* [N] of dtype, or NULL */
  void *y;              /* [M, N] of dtype (dgrad: dx [M, K]) */
  int64_t M, N, K, ldx;
  float threshold;
  bsh_dtype dtype;
} bsh_int8_any_args;

#endif
