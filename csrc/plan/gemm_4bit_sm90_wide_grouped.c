/* plan/gemm_4bit_sm90_wide_grouped.c - what gemm_4bit_sm90_wide_grouped.cu takes of a stack, and its launch: all
 * experts in one. How many rows an expert has is known on the GPU only: the plan goes by the average. */
#include <math.h>

#include "core/arithmetic.h"
#include "cuda/sizes/gemm_4bit_sm90_wide.h"
#include "plan/cards.h"
#include "plan/wide.h"

static const char *refuses(const bsh_facts *const facts) {
  const char *const reason = bsh_wide_refuses(facts);
  if (reason != NULL) return reason;
  if (facts->E > BSH_GEMM_WIDE_EXPERTS) return "more than 512 experts";
  if (facts->N % 8 || facts->y_alignment < 16) return "rows of y are not 16-byte aligned";
  const int64_t token_tiles = facts->M / 128 + min_i64(facts->M, facts->E);
  const int64_t tiles = token_tiles * divide_up(facts->N + facts->K, BSH_GEMM_WIDE_ROWS);
  const bool counted =
      token_tiles < 1 << BSH_GEMM_WIDE_NARROW_BIT && tiles <= INT32_MAX && facts->E * facts->N <= INT32_MAX;
  return counted ? NULL : "more than 32-bit numbers count";
}

/* Faster than panels wherever it was measured. */
static double cost(const bsh_facts *const facts) {
  (void)facts;
  return BSH_ORDER(2);
}

#define WIDE_TOKENS(form, tokens) tokens,
static const int32_t form_tokens[] = {BSH_GEMM_WIDE_GROUPED_FORMS(WIDE_TOKENS)};
enum { FORMS = sizeof form_tokens / sizeof *form_tokens };
#define LONG_FORM(form, tokens) BSH_TILE_ENTRIES(gemm_4bit_sm90_wide_grouped, "gemm_wide_grouped_", form),
#define MX_FORM(form, tokens) BSH_TILE_ENTRIES(gemm_4bit_sm90_wide_grouped_short, "gemm_wide_grouped_mx_", form),
#define NV_FORM(form, tokens) BSH_TILE_ENTRIES(gemm_4bit_sm90_wide_grouped_short, "gemm_wide_grouped_nv_", form),
/* [blocks][form][dtype][direction] */
static bsh_cuda_kernel kernels[BSH_WIDE_BLOCKS][FORMS][2][2] = {
    [BSH_WIDE_LONG] = {BSH_GEMM_WIDE_GROUPED_FORMS(LONG_FORM)},
    [BSH_WIDE_MX] = {BSH_GEMM_WIDE_GROUPED_FORMS(MX_FORM)},
    [BSH_WIDE_NV] = {BSH_GEMM_WIDE_GROUPED_FORMS(NV_FORM)},
};

/* The share of experts that have more than `tokens` rows, where every row chooses among the experts alike: a Poisson
 * number, which a normal one stands for. */
static double more_than(const double rows, const int32_t tokens) {
  return 0.5 * erfc(((double)tokens + 0.5 - rows) / sqrt(2 * rows));
}

/* Nanoseconds of an expert's tiles for a piece of depth, on average: what the next tokens add, as often as an expert
 * has them. Tiles of 256 tokens, and narrower ones, as cuda/schedulers/scheduler_sm90_wide.cuh makes them. */
static double time_of_expert(const bsh_facts *const facts, const double rows, const int32_t tokens) {
  enum { STEP = 64, ROUND = 256 };
  const int32_t (*const piece)[3] = bsh_card_of(facts->sm)->gemm_4bit_sm90_wide.piece;
  const int column = bsh_wide_column(facts);
  const double n128 = piece[0][column], n192 = piece[1][column], n256 = piece[2][column];
  /* What token 1, 65, 129 and 193 adds: of the first 256, and of all further ones. */
  const double first[] = {n128, 0, n192 - n128, n256 - n192};
  const double next[] = {n128 + n192 - n256, n192 - n128, n256 - n192, n256 - n192};
  const double of_128[] = {n128, 0, n128, 0};
  const int32_t certain = (int32_t)fmax(0, (rows - 8 * sqrt(rows)) / ROUND); /* rounds that each expert has */
  double time = certain * (tokens == 128 ? 2 * n128 : n256), more = 1;
  for (int32_t i = certain * (ROUND / STEP); more > 1e-3; i++) {
    const double *const adds = tokens == 128 ? of_128 : i < ROUND / STEP ? first : next;
    more = more_than(rows, i * STEP);
    time += more * adds[i % (ROUND / STEP)];
  }
  return time;
}

/* The form whose tiles take least, of those that hold so many experts; the first one does. */
static int32_t form_of(const bsh_facts *const facts) {
  const double rows = (double)facts->M / (double)facts->E;
  int32_t best = 0;
  for (int32_t form = 1; form < FORMS; form++)
    if (facts->E <= bsh_gemm_wide_experts(form_tokens[form], bsh_wide_block(facts)) &&
        time_of_expert(facts, rows, form_tokens[form]) < time_of_expert(facts, rows, form_tokens[best]))
      best = form;
  return best;
}

/* The tiles of all experts, by all multiprocessors alike, which reach 0.88 of that on average (4,096 tokens of Qwen3,
 * gpt-oss, Mixtral and DeepSeek, benchmarks/results/experts_h100_202611.md); not below what reading the stack takes. */
static double estimate(const bsh_facts *const facts) {
  const bsh_card *const card = bsh_card_of(facts->sm);
  const double E = (double)facts->E, weights = E * (double)facts->N * (double)facts->K;
  const double pieces = weights / (BSH_GEMM_WIDE_ROWS * BSH_GEMM_WIDE_PIECE) / E;
  const double rows = (double)facts->M / E;
  const double tiles = E * pieces * time_of_expert(facts, rows, form_tokens[form_of(facts)]) / (0.88 * facts->sms);
  return card->gemm_4bit_sm90_wide.ends + fmax(tiles, weights * 0.52 / card->panels.bytes_per_ns);
}

static void cut(const bsh_facts *const facts, bsh_plan_slice *const slice) {
  const bool gradient = facts->direction == BSH_INPUT_GRADIENT;
  const int32_t form = form_of(facts);
  bsh_wide_accesses(facts, slice);
  slice->wide = (bsh_gemm_wide_cut){
      .tokens = form_tokens[form],
      .pieces = (int32_t)divide_up(gradient ? facts->N : facts->K, BSH_GEMM_WIDE_PIECE),
  };
  slice->product.kernel = &kernels[bsh_wide_kind(facts)][form][facts->dtype == BSH_F16][gradient];
  slice->product.shape =
      bsh_overlapping(facts->sms / BSH_GEMM_WIDE_PAIR * BSH_GEMM_WIDE_PAIR, BSH_GEMM_WIDE_THREADS, BSH_GEMM_WIDE_PAIR,
                      bsh_gemm_wide_grouped_bytes(form_tokens[form], bsh_wide_block(facts)));
}

const bsh_kernel bsh_kernel_gemm_4bit_sm90_wide_grouped = {.name = "gemm_4bit_sm90_wide_grouped",
                                                           .operands = BSH_KIND(STACK),
                                                           .directions = BSH_BOTH,
                                                           .needs = BSH_SM90A_MAPS,
                                                           .launch = BSH_LAUNCH_WIDE,
                                                           .refuses = refuses,
                                                           .cost = cost,
                                                           .estimate = estimate,
                                                           .cut = cut};
