/* plan/grouped.c - see plan/grouped.h. */
#include "plan/grouped.h"

#include <math.h>

#include "core/arithmetic.h"
#include "cuda/gemm_4bit_sm90_wide.h"
#include "cuda/gemv_4bit_grouped.h"
#include "plan/kernel.h"

#define KERNEL_NAME(name) #name,
static const char *const names[BSH_GROUPED_COUNT] = {BSH_GROUPED_KERNELS(KERNEL_NAME)};

const char *bsh_grouped_kernel_name(const bsh_grouped_kernel kernel) { return names[kernel]; }

/* ---- few rows ---- */

/* Groups of 16 rows where experts have that many. */
static int32_t token_tiles_of(const bsh_facts *const facts, const int64_t E) {
  enum { ROWS_FOR_16 = 10 };
  return facts->M > ROWS_FOR_16 * E ? 2 : 1;
}

/* How K is cut: units of a warp, warps of a block, parts that a block multiplies one after the other. */
typedef struct {
  int32_t units, k_warps, k_splits;
} k_cut;

static k_cut cut_k(const bsh_facts *const facts, const int32_t token_tiles) {
  const int64_t units = facts->K / BSH_UNIT, warps = bsh_gemv_warps(facts->image.arch);
  k_cut cut = {.units = token_tiles == 1 && units > BSH_PIECE_UNITS * warps ? 2 * BSH_PIECE_UNITS : BSH_PIECE_UNITS};
  const int64_t all_warps = divide_up(units, cut.units);
  cut.k_splits = (int32_t)divide_up(all_warps, warps);
  cut.k_warps = (int32_t)divide_up(all_warps, cut.k_splits);
  return cut;
}

static const char *gemv_refuses(const bsh_facts *const facts, const int64_t E) {
  const int32_t arch = facts->image.arch;
  if (!bsh_is_wide(arch)) return "needs code for sm_90 or newer";
  const char *const reason = bsh_plan_gemv_4bit.refuses(facts);
  if (reason != NULL) return reason;
  if (E > BSH_GROUPED_EXPERTS) return "more than 2048 experts";
  if (facts->y_alignment < 16) return "rows of y are not 16-byte aligned";
  const int64_t groups = facts->M / 8 + min_i64(facts->M, E);
  return groups > INT32_MAX / (facts->N / BSH_ROW_TILE) ? "more tiles than 32-bit numbers" : NULL;
}

#define GROUPED_KERNEL(NAME) {.fatbin = BSH_FATBIN_gemv_4bit_grouped, .name = NAME}
#define GROUPED_BF16(form, tiles, units)                                                                               \
  {GROUPED_KERNEL("gemv_4bit_grouped_bf16_" #form), GROUPED_KERNEL("gemv_4bit_grouped_bf16_" #form "_any")},
#define GROUPED_F16(form, tiles, units)                                                                                \
  {GROUPED_KERNEL("gemv_4bit_grouped_f16_" #form), GROUPED_KERNEL("gemv_4bit_grouped_f16_" #form "_any")},
#define GROUPED_TILES(form, tiles, units) {tiles, units},
enum { FORMS = 3 };
static const int32_t forms[FORMS][2] = {BSH_GROUPED_GEMV_FORMS(GROUPED_TILES)};
static bsh_cuda_kernel kernels[2][FORMS][2] = {{BSH_GROUPED_GEMV_FORMS(GROUPED_BF16)},
                                               {BSH_GROUPED_GEMV_FORMS(GROUPED_F16)}};

static bsh_cuda_kernel *kernel_of(const bsh_facts *const facts, const int32_t token_tiles, const int32_t units) {
  int form = 0;
  while (forms[form][0] != token_tiles || forms[form][1] != units) form++;
  return &kernels[facts->dtype == BSH_F16][form][!bsh_gemv_reads_codes_together(facts, units)];
}

static void cut_gemv(const bsh_facts *const facts, const int64_t E, bsh_fused_slice *const slice) {
  const int32_t arch = facts->image.arch, token_tiles = token_tiles_of(facts, E);
  const k_cut k = cut_k(facts, token_tiles);
  const int64_t tiles = facts->N / BSH_ROW_TILE;
  const int32_t row_groups = (int32_t)min_i64(bsh_gemv_warps(arch) / k.k_warps, tiles);
  slice->rows = facts->M;
  slice->block_shift = __builtin_ctzll((uint64_t)facts->blocksize / BSH_UNIT);
  slice->cut = (bsh_fused_cut){.k_splits = k.k_splits,
                               .k_warps = k.k_warps,
                               .row_groups = row_groups,
                               .group_of_warp = (int32_t)divide_up(1 << 16, k.k_warps)};
  slice->product.kernel = kernel_of(facts, token_tiles, k.units);
  slice->product.shape = (bsh_cuda_launch_shape){.grid = {(uint32_t)facts->sms, 1, 1},
                                                 .block = {(uint32_t)(BSH_WARP * k.k_warps * row_groups), 1, 1},
                                                 .shared_bytes = bsh_gemv_shared_bytes(arch, token_tiles),
                                                 .overlap = true};
}

/* ---- many rows ---- */

static const char *wide_refuses(const bsh_facts *const facts, const int64_t E) {
  const char *const reason = bsh_plan_gemm_4bit_sm90_wide.refuses(facts);
  if (reason != NULL) return reason;
  if (E > BSH_GEMM_WIDE_EXPERTS) return "more than 512 experts";
  if (facts->N % 8 || facts->y_alignment < 16) return "rows of y are not 16-byte aligned";
  const int64_t token_tiles = facts->M / 128 + min_i64(facts->M, E);
  const int64_t tiles = token_tiles * divide_up(facts->N + facts->K, BSH_GEMM_WIDE_ROWS);
  const bool counted = token_tiles < 1 << BSH_GEMM_WIDE_NARROW_BIT && tiles <= INT32_MAX && E * facts->N <= INT32_MAX;
  return counted ? NULL : "more than 32-bit numbers count";
}

#define WIDE_KERNEL(NAME) {.fatbin = BSH_FATBIN_gemm_4bit_sm90_wide_grouped, .name = NAME}
#define WIDE_FORM(form, tokens)                                                                                        \
  {{WIDE_KERNEL("gemm_wide_grouped_bf16_" #form), WIDE_KERNEL("gemm_wide_grouped_dgrad_bf16_" #form)},                 \
   {WIDE_KERNEL("gemm_wide_grouped_f16_" #form), WIDE_KERNEL("gemm_wide_grouped_dgrad_f16_" #form)}},
/* [form][dtype][direction] */
static bsh_cuda_kernel wide_kernels[][2][2] = {BSH_GEMM_WIDE_GROUPED_FORMS(WIDE_FORM)};
#define WIDE_TOKENS(form, tokens) tokens,
static const int32_t form_tokens[] = {BSH_GEMM_WIDE_GROUPED_FORMS(WIDE_TOKENS)};
enum { WIDE_FORMS = sizeof form_tokens / sizeof *form_tokens };

/* The share of experts that have more than `tokens` rows, where every row chooses among the experts alike: a Poisson
 * number, which a normal one stands for. */
static double more_than(const double rows, const int32_t tokens) {
  return 0.5 * erfc(((double)tokens + 0.5 - rows) / sqrt(2 * rows));
}

/* Nanoseconds of an expert's tiles for a piece of depth, on average: what the next tokens add, as often as an expert
 * has them. Tiles of 256 tokens, and narrower ones, as cuda/scheduler_sm90_wide.cuh makes them. */
static double time_of_expert(const bsh_facts *const facts, const double rows, const int32_t tokens) {
  enum { STEP = 64, ROUND = 256 };
  const double n128 = bsh_plan_wide_piece_nanoseconds(128, facts), n192 = bsh_plan_wide_piece_nanoseconds(192, facts);
  const double n256 = bsh_plan_wide_piece_nanoseconds(256, facts);
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

/* The form whose tiles take least. */
static int32_t wide_form_of(const bsh_facts *const facts, const int64_t E) {
  const double rows = (double)facts->M / (double)E;
  int32_t best = 0;
  for (int32_t form = 1; form < WIDE_FORMS; form++)
    if (time_of_expert(facts, rows, form_tokens[form]) < time_of_expert(facts, rows, form_tokens[best])) best = form;
  return best;
}

static void cut_wide(const bsh_facts *const facts, const int64_t E, bsh_fused_slice *const slice) {
  const bool gradient = facts->direction == BSH_INPUT_GRADIENT;
  const int32_t form = wide_form_of(facts, E);
  slice->rows = facts->M;
  slice->block_shift = __builtin_ctzll((uint64_t)facts->blocksize / BSH_UNIT);
  slice->wide = (bsh_gemm_wide_cut){
      .tokens = form_tokens[form],
      .pieces = (int32_t)divide_up(gradient ? facts->N : facts->K, BSH_GEMM_WIDE_PIECE),
  };
  slice->product.kernel = &wide_kernels[form][facts->dtype == BSH_F16][gradient];
  slice->product.shape =
      (bsh_cuda_launch_shape){.grid = {(uint32_t)(facts->sms / BSH_GEMM_WIDE_PAIR * BSH_GEMM_WIDE_PAIR), 1, 1},
                              .block = {BSH_GEMM_WIDE_THREADS, 1, 1},
                              .cluster = BSH_GEMM_WIDE_PAIR,
                              .shared_bytes = bsh_gemm_wide_grouped_bytes(form_tokens[form], BSH_GEMM_WIDE_EXPERTS),
                              .overlap = true};
}

/* ---- which ---- */

const char *bsh_grouped_refuses(const bsh_grouped_kernel kernel, const bsh_facts *const facts, const int64_t E) {
  return kernel == BSH_GROUPED_gemv_4bit_grouped ? gemv_refuses(facts, E) : wide_refuses(facts, E);
}

void bsh_cut_grouped(const bsh_grouped_kernel kernel, const bsh_facts *const facts, const int64_t E,
                     bsh_fused_slice *const slice) {
  if (kernel == BSH_GROUPED_gemv_4bit_grouped) cut_gemv(facts, E, slice);
  else cut_wide(facts, E, slice);
}

/* Rows of an expert, on average, up to which gemv_4bit_grouped is faster than gemm_4bit_sm90_wide_grouped: rows of
 * benchmarks/results/experts_h200_202611.md. */
enum { GEMV_ROWS = 24 };

void bsh_plan_grouped_linear_4bit(const bsh_facts *const facts, const int64_t E, bsh_grouped_plan *const plan) {
  const int64_t expert_bytes = facts->N * facts->K * dtype_size(facts->dtype);
  *plan = (bsh_grouped_plan){.kernel = BSH_GROUPED_panels};
  plan->panel_experts = min_i64(E, facts->workspace_bytes > expert_bytes ? facts->workspace_bytes / expert_bytes : 1);
  if (facts->M <= GEMV_ROWS * E && gemv_refuses(facts, E) == NULL) plan->kernel = BSH_GROUPED_gemv_4bit_grouped;
  else if (wide_refuses(facts, E) == NULL) plan->kernel = BSH_GROUPED_gemm_4bit_sm90_wide_grouped;
  if (plan->kernel != BSH_GROUPED_panels) bsh_cut_grouped(plan->kernel, facts, E, &plan->slice);
}
