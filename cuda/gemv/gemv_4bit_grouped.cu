// gemv_4bit_grouped.cu - y[s] = x[s] W_e^T + bias_e for rows of x sorted by expert, few of each, on sm_90 and newer.
//
//   offs [E] ----> each block: where the rows of each expert end, and how many groups of 8 or 16 rows that makes
//                     |
//                     v   groups x row tiles of W, in this order, cut evenly among the blocks
//   a segment: one group of rows of one expert, some of its row tiles
//                     |   gemv_4bit.cuh: x in registers, W through rings, sums meet in shared memory; where K is longer
//                     |   than a block holds, its parts one after the other: the sums of a segment wait for the next
//                     |   part beside the table, where there is room for 32 tiles of 16 rows of x, 64 of 8
//                     v
//   y                     rows behind the last expert's: zero
//
// How many rows an expert has is known on the device only: the host launches a block for each multiprocessor, whatever
// they are. An expert without rows costs nothing. Ends that are not sorted, or beyond x, are clamped. A row's sums are
// added in an order that depends on N and K alone: neither on other rows nor on the number of blocks.
#include "cuda/gemv/gemv_4bit_grouped.cuh"

// gemv_4bit_grouped_<dtype>_m<rows>_k<units per warp>[_any].
#define GROUPED_PAIR(T, NAME, TOKEN_TILES, UNITS)                                                                      \
  BSH_GEMV_4BIT_GROUPED(T, NAME, TOKEN_TILES, UNITS, NESTED_64)                                                        \
  BSH_GEMV_4BIT_GROUPED(T, NAME##_any, TOKEN_TILES, UNITS, ANY_SCALES)
#define GROUPED_BF16(FORM, TOKEN_TILES, UNITS)                                                                         \
  GROUPED_PAIR(__nv_bfloat16, gemv_4bit_grouped_bf16_##FORM, TOKEN_TILES, UNITS)
#define GROUPED_F16(FORM, TOKEN_TILES, UNITS) GROUPED_PAIR(__half, gemv_4bit_grouped_f16_##FORM, TOKEN_TILES, UNITS)
BSH_GROUPED_GEMV_FORMS(GROUPED_BF16)
BSH_GROUPED_GEMV_FORMS(GROUPED_F16)
