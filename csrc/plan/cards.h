/* plan/cards.h - what was measured on a card: from it follows which kernel is the fastest for a product. */
#ifndef BSH_PLAN_CARDS_H
#define BSH_PLAN_CARDS_H

#include <stdbool.h>
#include <stdint.h>

/* `value` from `from` weights (N * K) on. Lists end with from = 0. */
typedef struct {
  int64_t from, value;
} bsh_border;

enum { BSH_SM80_FORMS = 2, BSH_WIDE_FORMS = 3, BSH_CODES_FORMS = 9, BSH_MIXED_FORMS = 3, BSH_LARGEST_CLUSTER = 8 };

/* Times are nanoseconds. Tables have a column for each form of a kernel (cuda/sizes). */
typedef struct {
  int32_t sms;                               /* of the card that was measured */
  int32_t clusters[BSH_LARGEST_CLUSTER + 1]; /* of so many blocks, one a multiprocessor, that run at once */
  struct {
    double begin, weights_per_ns, bytes_per_ns, flops_per_ns; /* dequantizing; the vendor's product, by all `sms` */
    double least;                                             /* of the vendor's product */
  } panels;
  struct {
    int64_t weights[3];     /* from which it is faster than gemv_4bit: up to 16, 32 and 64 rows */
    bsh_border rows[4];     /* up to which launches of 64 rows each are faster than panels */
    int64_t two_parts[2];   /* weights up to which blocks take K in two parts: of up to 32 rows, of 64 */
    int64_t two_parts_busy; /* the same of 64 rows where 5 of 6 warps get rows */
  } gemm_4bit_sm90;
  struct {
    int64_t rows_16bit;        /* up to which it is faster than panels */
    int64_t rows_short_blocks; /* the same of blocks below 64 */
    bsh_border rows_32bit[3];
  } gemv_4bit_simt;
  struct {
    int64_t short_blocks_weights; /* from so many on it is faster than panels, blocks being below 64, */
    int64_t short_blocks_rows;    /* up to so many rows */
  } gemm_4bit_sm80;
  struct {
    /* A piece of a tile: forward in bf16, in fp16, where W is rounded exactly from 192 tokens on, and the gradient. */
    int32_t piece[BSH_WIDE_FORMS][3];
    /* Until the first products run and from the last one on; and where the sums of a tile are joined: by two pairs one
     * after the other, by 2 and by 4 at once. */
    int32_t ends, join_in_order, join_2, join_4;
    int64_t rows; /* forward from more on; up to them gemm_4bit_sm90 reads W once */
  } gemm_4bit_sm90_wide;
  struct {
    int64_t rows;       /* of an expert, on average, up to which it is faster than gemm_4bit_sm90_wide_grouped */
    int64_t rows_short; /* the same of blocks below 64 */
    int64_t rows_16;    /* from more than these on in groups of 16 */
  } gemv_4bit_grouped;
  struct {
    int64_t large, small; /* codes of a weight */
    int64_t few_rows;     /* that gemv_int8 multiplies of a large weight without a threshold */
    int64_t mixed_rows;   /* up to which mixed_int8_sm90 is faster with a threshold, but for small weights */
    int64_t dgrad_rows, large_dgrad_rows; /* up to which gemv_int8_dgrad is the fastest gradient */
    int64_t one_pass_rows;                /* up to which dgrad_int8_sm90 is faster than panels */
  } int8;
  struct {
    double stage[BSH_CODES_FORMS], beside[BSH_CODES_FORMS]; /* of 128 of depth; of a tile beside its stages */
    double join, half_empty, no_space, gather, gather_row;  /* beside: plan/gemm_int8_sm90.c */
    int32_t threes, most_blocks;
  } gemm_int8_sm90;
  struct {
    double stage[2][BSH_MIXED_FORMS], beside, join[BSH_MIXED_FORMS]; /* forward, gradient: of 64 of depth */
  } mixed_int8_sm90;
} bsh_card;

/* The card whose numbers stand for a GPU (10 * major + minor). */
const bsh_card *bsh_card_of(int32_t sm);

/* What a GPU was counted to do, from its data sheet: a model, unless its owner has measured it. Of one multiprocessor,
 * per nanosecond: the vendor's products of 16 bits with fp32 sums; bytes that a product reads; bytes that dequantizing
 * reads and writes. */
typedef struct {
  bool chosen; /* by it gemm_4bit_sm80 or gemm_4bit_sm75 is compared to panels; else it only cuts tiles where that is
                  forced */
  double flops_per_ns_sm, bytes_per_ns_sm, dequantized_per_ns_sm;
  double share[2]
              [BSH_SM80_FORMS]; /* of the vendor's products that gemm_4bit_sm80 reaches: by direction, of each form */
  double begin;                 /* nanoseconds: of panels, until dequantizing begins */
  double ends;                  /* of a product before its first and behind its last stage */
  /* More where sums of a tile are joined: by 2 or 4 blocks at once; in order, and for each block that has a part. */
  double join_2, join_4, join_in_order, join_part;
  int64_t l2; /* bytes that hold a panel; 0: as if none */
} bsh_rates;
const bsh_rates *bsh_rates_of(int32_t sm);

/* From now on these, which were measured on a GPU of `sm`, instead of the counted ones; NULL: the counted ones again.
 * Each architecture has its own. Not while another thread plans. */
void bsh_set_rates(int32_t sm, const bsh_rates *rates);

/* What a list says for so many weights; `least` below all of its borders. */
int64_t bsh_border_value(const bsh_border *list, int64_t weights, int64_t least);

#endif
