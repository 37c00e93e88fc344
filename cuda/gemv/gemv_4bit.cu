// gemv_4bit.cu - y[M, N] = x[M, K] W^T + bias for few rows of x, W decoded on the way to the tensor cores.
//
//   W, packed [N, K / 2]                          x [M, K]
//     | cp.async: 16 rows x 256 of K                | once
//     v                                             v
//   ring of 2 or 3 slots, one for each warp       registers: the warp's UNITS of K of 8 to 32 tokens
//     | 8 bytes of two rows a lane                  |
//     v                                             v
//   table of pairs -> A operand -----> mma m16n8k16, four a unit
//                                         | x scale of row and unit
//                                         v
//   warp's sums -> shared memory -> added over the k_warps of a block --> y
//                                                                     '-> args.partial -> added over k_splits --> y
//
// W is the mma A operand (16 rows), tokens are its n8. A thread block takes 8, 16 or 32 tokens (8 * TOKEN_TILES; 32 not
// where WIDE); blockIdx.y counts such groups of tokens, each of which decodes W for itself. A warp owns UNITS units of
// K for the whole kernel, keeps x for them in registers and walks over row tiles of 16; k_warps warps span the block's
// part of K, row_groups groups of them take different row tiles. The packed bytes come through a ring in shared memory
// that belongs to one warp, so the stream has no block barrier. Codes go to the tensor cores unscaled; the fp32 sums of
// a unit are multiplied by its fp32 scale. The warps' sums meet in shared memory every TILES_PER_SYNC row tiles and
// are added in a fixed order. Where K is longer than a block holds, k_splits blocks share a row tile: their sums meet
// in args.partial, behind a cluster barrier (sm_90 on) or in a second kernel, again in a fixed order. Nothing is added
// atomically: equal inputs give equal bits.
#include "cuda/gemv/gemv_4bit_dense.cuh"

// gemv_4bit_<dtype>_m<tokens>_k<units per warp>[_any]; launched with WARPS * 32 threads or fewer.
#define GEMV_PAIR(T, NAME, TOKEN_TILES, UNITS)                                                                         \
  BSH_GEMV_4BIT(T, NAME, TOKEN_TILES, UNITS, NESTED_64) BSH_GEMV_4BIT(T, NAME##_any, TOKEN_TILES, UNITS, ANY_SCALES)
#define GEMV_BF16(FORM, TOKEN_TILES, UNITS) GEMV_PAIR(__nv_bfloat16, gemv_4bit_bf16_##FORM, TOKEN_TILES, UNITS)
#define GEMV_F16(FORM, TOKEN_TILES, UNITS) GEMV_PAIR(__half, gemv_4bit_f16_##FORM, TOKEN_TILES, UNITS)
#define JOIN(T, NAME, TOKEN_TILES)                                                                                     \
  extern "C" __global__ void NAME(const __grid_constant__ bsh_fused_args args) {                                       \
    bsh::join<TOKEN_TILES>(args, bsh::store_sum<T>{args});                                                             \
  }
#define JOIN_BF16(FORM, TOKEN_TILES) JOIN(__nv_bfloat16, join_splits_bf16_##FORM, TOKEN_TILES)
#define JOIN_F16(FORM, TOKEN_TILES) JOIN(__half, join_splits_f16_##FORM, TOKEN_TILES)
BSH_GEMV_FORMS(GEMV_BF16)
BSH_GEMV_JOINS(JOIN_BF16)
BSH_GEMV_FORMS(GEMV_F16)
BSH_GEMV_JOINS(JOIN_F16)
