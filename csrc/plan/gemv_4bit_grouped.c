/* plan/gemv_4bit_grouped.c - what gemv_4bit_grouped.cu takes of a stack, and its launch: all experts in one, few rows
 * of each. How many rows an expert has is known on the GPU only: the plan goes by the average. */
#include "core/arithmetic.h"
#include "cuda/sizes/gemv_4bit.h"
#include "cuda/sizes/gemv_4bit_grouped.h"
#include "plan/cards.h"
#include "plan/gemv.h"

/* Groups of 16 rows where experts have that many. */
static int32_t token_tiles_of(const bsh_facts *const facts) {
  return facts->M > bsh_card_of(facts->sm)->gemv_4bit_grouped.rows_16 * facts->E ? 2 : 1;
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

static const char *refuses(const bsh_facts *const facts) {
  if (!bsh_is_wide(facts->image.arch)) return "needs code for sm_90 or newer";
  const char *const reason = bsh_gemv_4bit_refuses(facts);
  if (reason != NULL) return reason;
  if (facts->E > BSH_GROUPED_EXPERTS) return "more than 2048 experts";
  if (facts->y_alignment < 16) return "rows of y are not 16-byte aligned";
  const int64_t groups = facts->M / 8 + min_i64(facts->M, facts->E);
  return groups > INT32_MAX / (facts->N / BSH_ROW_TILE) ? "more tiles than 32-bit numbers" : NULL;
}

/* gemm_4bit_sm90_wide_grouped takes short blocks from fewer rows on. Without it none does that is faster. */
static double cost(const bsh_facts *const facts) {
  const bool wide = facts->sm == 90 && facts->image.this_gpu_only && facts->tensor_maps;
  const bsh_card *const card = bsh_card_of(facts->sm);
  const bool early = wide && facts->w.blocksize < 64;
  const int64_t rows = early ? card->gemv_4bit_grouped.rows_short : card->gemv_4bit_grouped.rows;
  return facts->M <= rows * facts->E ? BSH_ORDER(1) : BSH_LAST;
}

#define GROUPED_KERNEL(NAME) BSH_KERNEL(gemv_4bit_grouped, NAME)
#define GROUPED_BF16(form, tiles, units)                                                                               \
  {GROUPED_KERNEL("gemv_4bit_grouped_bf16_" #form), GROUPED_KERNEL("gemv_4bit_grouped_bf16_" #form "_any")},
#define GROUPED_F16(form, tiles, units)                                                                                \
  {GROUPED_KERNEL("gemv_4bit_grouped_f16_" #form), GROUPED_KERNEL("gemv_4bit_grouped_f16_" #form "_any")},
#define GROUPED_TILES(form, tiles, units) {tiles, units},
enum { FORMS = 3 };
static const int32_t forms[FORMS][2] = {BSH_GROUPED_GEMV_FORMS(GROUPED_TILES)};
static bsh_cuda_kernel kernels[2][FORMS][2] = {{BSH_GROUPED_GEMV_FORMS(GROUPED_BF16)},
                                               {BSH_GROUPED_GEMV_FORMS(GROUPED_F16)}};

#define SHORT_FORM(form, tiles, units) BSH_SHORT_ENTRIES(gemv_4bit_grouped_short, "gemv_4bit_grouped_", form),
static bsh_cuda_kernel short_kernels[FORMS][BSH_SHORT_FORMS] = {BSH_GROUPED_GEMV_FORMS(SHORT_FORM)};

static bsh_cuda_kernel *kernel_of(const bsh_facts *const facts, const int32_t token_tiles, const int32_t units) {
  const int form = bsh_form_of(forms, token_tiles, units);
  if (bsh_has_short_blocks(facts)) return &short_kernels[form][bsh_short_form(facts)];
  return &kernels[facts->dtype == BSH_F16][form][!bsh_gemv_reads_codes_together(facts, units)];
}

static void cut(const bsh_facts *const facts, bsh_plan_slice *const slice) {
  const int32_t arch = facts->image.arch, token_tiles = token_tiles_of(facts);
  const k_cut k = cut_k(facts, token_tiles);
  const int64_t tiles = facts->N / BSH_ROW_TILE;
  const int32_t row_groups = (int32_t)min_i64(bsh_gemv_warps(arch) / k.k_warps, tiles);
  slice->block_shift = bsh_block_shift(facts, BSH_UNIT);
  slice->cut = (bsh_fused_cut){.k_splits = k.k_splits,
                               .k_warps = k.k_warps,
                               .row_groups = row_groups,
                               .group_of_warp = (int32_t)divide_up(1 << 16, k.k_warps)};
  slice->product.kernel = kernel_of(facts, token_tiles, k.units);
  slice->product.shape =
      bsh_overlapping(facts->sms, BSH_WARP * k.k_warps * row_groups, 1, bsh_gemv_shared_bytes(arch, token_tiles));
}

const bsh_kernel bsh_kernel_gemv_4bit_grouped = {.name = "gemv_4bit_grouped",
                                                 .operands = BSH_KIND(STACK),
                                                 .directions = BSH_FORWARD_ONLY,
                                                 .launch = BSH_LAUNCH_STACK,
                                                 .refuses = refuses,
                                                 .cost = cost,
                                                 .cut = cut};
