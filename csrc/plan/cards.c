/* plan/cards.c - see plan/cards.h. */
#include "plan/cards.h"

#include <stddef.h>

/* An H200, and an H100 for gemm_int8_sm90 and int8.mixed_rows. */
static const bsh_card hopper = {
    .sms = 132,
    /* In GPCs of 14 to 18 multiprocessors. A guess too high costs a second wave, nothing else. */
    .clusters = {0, 132, 66, 42, 30, 22, 20, 16, 14},
    /* benchmarks/results/wide_h200_202611.md */
    .panels = {.begin = 1500, .weights_per_ns = 1180, .bytes_per_ns = 4200, .flops_per_ns = 680e3, .least = 5000},
    .gemm_4bit_sm90_wide = {.piece = {{1050, 1050, 1050}, {1320, 1580, 1350}, {1620, 1900, 1670}},
                            .ends = 4000,
                            .join_in_order = 3000,
                            .join_2 = 4500,
                            .join_4 = 6000,
                            .rows = 64},
    /* benchmarks/results/small_m_h200_202611.md; with 16 rows slower at 68 M weights, faster at 71 M */
    .gemm_4bit_sm90 = {.weights = {70000000, 16000000, 12000000},
                       .rows = {{150000000, 256}, {40000000, 192}, {30000000, 128}},
                       .two_parts = {70000000, 40000000},
                       .two_parts_busy = 90000000},
    /* Short blocks: benchmarks/results/microscaled_h100_202611.md */
    .gemv_4bit_simt = {.rows_16bit = 16, .rows_short_blocks = 4, .rows_32bit = {{40000000, 16}, {10000000, 8}}},
    /* The same file: blocks below 64, which no kernel for wgmma takes. */
    .gemm_4bit_sm80 = {.short_blocks_weights = 40000000, .short_blocks_rows = 256},
    /* benchmarks/results/experts_h200_202611.md; short blocks: microscaled_h100_202611.md, 24 rows of an expert took
     * 349 and 378 us by it, and 65 by the other 265 and 290. */
    .gemv_4bit_grouped = {.rows = 24, .rows_short = 16, .rows_16 = 10},
    /* benchmarks/results/int8_h200_202611.md. A weight of 28672 x 8192: gemv_int8 took 99 us at 24 and 32 rows,
     * gemm_int8_sm90 without a threshold 73 and 71. Gradients, at 4096 x 4096, 14336 x 4096 and 28672 x 8192:
     * gemv_int8_dgrad was the fastest at 1 row, and of the last of these at 16 and 32; else dgrad_int8_sm90 up to 1,024
     * rows; panels at 4,096. benchmarks/results/int8_h100_202611.md: with a threshold, mixed_int8_sm90, and
     * gemm_int8_sm90 with 0, 8 and 64 columns that it finds: 14 and 12, 13, 15 us at 33 rows of 4096 x 4096, 17 and 12,
     * 13, 16 at 128; 29 and 28, 30, 32 at 64 of 14336 x 4096, 34 and 31, 33, 34 at 128; 93 and 92, 94, 97 at 64 of
     * 28672 x 8192. */
    .int8 = {.large = 150000000,
             .small = 32000000,
             .few_rows = 16,
             .mixed_rows = 64,
             .dgrad_rows = 8,
             .large_dgrad_rows = 32,
             .one_pass_rows = 1024},
    /* The same file: they order the forms as an H100 did at 32 sizes, to 4 %. */
    .gemm_int8_sm90 = {.stage = {190, 185, 255, 240, 215, 280, 400, 385, 740},
                       .beside = {1400, 1500, 1300, 1500, 1500, 3300, 2000, 1900, 2000},
                       .join = 5500,
                       .half_empty = 6800,
                       .no_space = 6000,
                       .gather = 2600,
                       .gather_row = 0.6,
                       .threes = 32,
                       .most_blocks = 105},
    .mixed_int8_sm90 = {.stage = {{240, 350, 620}, {390, 495, 700}}, .beside = 4000, .join = {4000, 4300, 7300}},
};

const bsh_card *bsh_card_of(const int32_t sm) {
  (void)sm; /* no other was measured */
  return &hopper;
}

/* Multiprocessors, TFLOP/s of 16 bits with fp32 sums, GB/s of memory, and shares of them that are reached: of products,
 * 0.85 of a read, 0.80 of what dequantizing moves. The shares of gemm_4bit_sm80 were measured on an H200, whose
 * mma.sync has an A100's ratio of tensor cores to the rest, and, before its loop had a fifth fewer instructions, on an
 * H100 with each product issued four times, GeForce's ratio: benchmarks/results/gemm_sm80_h{2,1}00_202611.md. What
 * joins take is an H200's: benchmarks/results/gemm_sm80_cuts_h200_202611.md. */
#define RATES(sms, tflops, products, gb)                                                                               \
  .flops_per_ns_sm = tflops * 1e3 * (products) / (sms), .bytes_per_ns_sm = (gb) * 0.85 / (sms),                        \
  .dequantized_per_ns_sm = (gb) * 0.80 / (sms), .begin = 1500, .ends = 4000, .join_2 = 6000, .join_4 = 8000,           \
  .join_in_order = 8000, .join_part = 2000

#define LIKE_GEFORCE {{0.94, 0.96}, {0.92, 0.95}}
#define LIKE_A100 {{0.75, 0.91}, {0.72, 0.89}}

/* gemm_4bit_sm75 decodes for half as fast tensor cores as an A100's, with a barrier every 32 of depth: a guess between
 * the two above, which no card has confirmed. Its tiles have 256 rows. */
#define LIKE_T4 {{0.88, 0.88}, {0.86, 0.86}}

enum { ARCHITECTURES = 200 };
static bsh_rates measured[ARCHITECTURES]; /* by sm; not chosen: none */

static bool is_known(const int32_t sm) { return sm >= 0 && sm < ARCHITECTURES; }

void bsh_set_rates(const int32_t sm, const bsh_rates *const rates) {
  if (is_known(sm)) measured[sm] = rates != NULL ? *rates : (bsh_rates){0};
}

const bsh_rates *bsh_rates_of(const int32_t sm) {
  static const bsh_rates t4 = {RATES(40, 65, 0.60, 320), .share = LIKE_T4, .l2 = 4 << 20, .chosen = true};
  static const bsh_rates a100 = {RATES(108, 312, 0.85, 2039), .share = LIKE_A100, .chosen = true};
  static const bsh_rates rtx3090 = {RATES(82, 71, 0.90, 936), .share = LIKE_GEFORCE, .l2 = 6 << 20, .chosen = true};
  static const bsh_rates rtx4090 = {RATES(128, 165, 0.90, 1008), .share = LIKE_GEFORCE, .l2 = 72 << 20, .chosen = true};
  static const bsh_rates rtx5090 = {RATES(170, 210, 0.90, 1792), .share = LIKE_GEFORCE, .l2 = 96 << 20, .chosen = true};
  static const bsh_rates h100 = {RATES(132, 480, 1.0, 3350), .share = LIKE_A100};
  if (is_known(sm) && measured[sm].chosen) return &measured[sm];
  switch (sm) {
  case 75:
    return &t4;
  case 80:
    return &a100;
  case 86:
    return &rtx3090;
  case 89:
    return &rtx4090;
  case 120:
    return &rtx5090;
  default:
    return &h100; /* mma.sync of sm_90, where wgmma is faster */
  }
}

int64_t bsh_border_value(const bsh_border *list, const int64_t weights, const int64_t least) {
  for (; list->from != 0; list++)
    if (weights >= list->from) return list->value;
  return least;
}
