/* plan/gemm_4bit_sm75_grouped.c - what gemm_4bit_sm75_grouped.cu takes of a stack, and its launch: all experts in one.
 * How many rows an expert has is known on the GPU only: the plan goes by the average. */
#include "core/arithmetic.h"
#include "plan/gemv.h"
#include "plan/sm80.h"

enum { MOST_TILES = (1 << 16) - 8 }; /* of a thread block, which counts in 16 bits and looks a few ahead */

static bsh_cuda_kernel kernels[2] = {BSH_KERNEL(gemm_4bit_sm75_grouped, "gemm_sm75_grouped_f16_m256"),
                                     BSH_KERNEL(gemm_4bit_sm75_grouped, "gemm_sm75_grouped_dgrad_f16_m256")};

static int64_t tiles_at_most(const bsh_facts *const facts) {
  const int64_t width = facts->direction == BSH_FORWARD ? facts->N : facts->K;
  const int64_t row_tiles = facts->M / BSH_GEMM_SM75_ROWS + min_i64(facts->M, facts->E);
  return row_tiles * divide_up(width, BSH_GEMM_SM80_COLUMNS);
}

static const char *refuses(const bsh_facts *const facts) {
  const char *const reason = bsh_sm75_refuses(facts);
  if (reason != NULL) return reason;
  if (facts->N % 8 || facts->y_alignment < 16) return "rows of y are not 16-byte aligned";
  const bool counted = facts->M <= INT32_MAX && tiles_at_most(facts) <= (int64_t)facts->sms * MOST_TILES;
  return counted ? NULL : "more tiles than a thread block counts";
}

/* By the model of a T4: all experts have as many rows, and those of a last tile are rounded up, by half of what that
 * can add. Panels: all experts are dequantized, and each is multiplied with all rows
 * (python/bitshard/functions/grouped.py: torch multiplies groups of rows in bfloat16 only, and from sm_80 on). */
static double cost(const bsh_facts *const facts) {
  const bsh_rates *const rates = bsh_rates_of(facts->sm);
  if (facts->sm != 75) return BSH_LAST;
  const double weights = (double)facts->N * (double)facts->K, M = (double)facts->M;
  const double experts = (double)min_i64(facts->M, facts->E), flops = rates->flops_per_ns_sm * facts->sms;
  const double rounded = fmax(M + experts * BSH_GEMM_SM75_ROUND / 2, experts * BSH_GEMM_SM75_ROUND);
  const double one_pass = 2 * weights * rounded / (flops * rates->share[facts->direction][1]);
  const double moved = 2.5 + 1.0 / (double)facts->w.blocksize; /* bytes of a weight */
  const double panels = (double)facts->E * weights * moved / (rates->dequantized_per_ns_sm * facts->sms) +
                        (double)facts->E * 2 * weights * M / flops;
  return one_pass < panels ? BSH_ORDER(2) : BSH_LAST;
}

static void cut(const bsh_facts *const facts, bsh_plan_slice *const slice) {
  const bool gradient = facts->direction == BSH_INPUT_GRADIENT;
  const int64_t blocks = min_i64(facts->sms, tiles_at_most(facts)), depth = gradient ? facts->N : facts->K;
  slice->sm80 =
      (bsh_gemm_sm80_cut){.rows = BSH_GEMM_SM75_ROWS, .stages = (int32_t)divide_up(depth, BSH_GEMM_SM75_DEPTH)};
  slice->block_shift = bsh_block_shift(facts, BSH_SM80_HALF_UNIT);
  slice->stores_together = true;
  slice->product.kernel = &kernels[gradient];
  slice->product.shape = bsh_overlapping(blocks, BSH_GEMM_SM75_THREADS, 1, BSH_GEMM_SM75_GROUPED_BYTES);
  slice->product.shape.overlap = false; /* in its code nothing waits */
}

const bsh_kernel bsh_kernel_gemm_4bit_sm75_grouped = {.name = "gemm_4bit_sm75_grouped",
                                                      .operands = BSH_KIND(STACK),
                                                      .directions = BSH_BOTH,
                                                      .launch = BSH_LAUNCH_SM75,
                                                      .refuses = refuses,
                                                      .cost = cost,
                                                      .cut = cut};
