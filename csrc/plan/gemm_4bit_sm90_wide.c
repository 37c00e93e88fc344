/* plan/gemm_4bit_sm90_wide.c - what gemm_4bit_sm90_wide.cu takes and how its tiles are shared out. */
#include "core/arithmetic.h"
#include "cuda/sizes/gemm_4bit_sm90_wide.h"
#include "plan/cards.h"
#include "plan/wide.h"

enum { SLICE_ROWS = 1 << 16, FLAG_THREADS = 256, SUMS_ALIGNMENT = 256 };

#define LONG_FORM(form, tokens) BSH_TILE_ENTRIES(gemm_4bit_sm90_wide, "gemm_wide_", form),
#define MX_FORM(form, tokens) BSH_TILE_ENTRIES(gemm_4bit_sm90_wide_short, "gemm_wide_mx_", form),
#define NV_FORM(form, tokens) BSH_TILE_ENTRIES(gemm_4bit_sm90_wide_short, "gemm_wide_nv_", form),
/* [blocks][form][dtype][direction] */
static bsh_cuda_kernel kernels[BSH_WIDE_BLOCKS][BSH_WIDE_FORMS][2][2] = {
    [BSH_WIDE_LONG] = {BSH_GEMM_WIDE_FORMS(LONG_FORM)},
    [BSH_WIDE_MX] = {BSH_GEMM_WIDE_FORMS(MX_FORM)},
    [BSH_WIDE_NV] = {BSH_GEMM_WIDE_FORMS(NV_FORM)},
};
static bsh_cuda_kernel clear_flags = BSH_KERNEL(gemm_4bit_sm90_wide, "clear_flags");

/* ---- how long it takes ---- */

#define WIDE_TOKENS(form, tokens) tokens,
static const int32_t form_tokens[] = {BSH_GEMM_WIDE_FORMS(WIDE_TOKENS)};
enum { FORMS = sizeof form_tokens / sizeof *form_tokens };
_Static_assert((int)FORMS == (int)BSH_WIDE_FORMS, "a time for each form");

/* The busiest pair's. A tile that more pairs share in order is joined by one of them. */
static int64_t nanoseconds(const bsh_card *const card, const bsh_gemm_wide_cut *const cut, const int32_t pairs,
                           const int32_t piece) {
  const int64_t ends = card->gemm_4bit_sm90_wide.ends, in_order = card->gemm_4bit_sm90_wide.join_in_order;
  const int64_t join = cut->scatter == 2 ? card->gemm_4bit_sm90_wide.join_2 : card->gemm_4bit_sm90_wide.join_4;
  if (cut->scatter > 0) return ends + join + divide_up(cut->pieces, cut->scatter) * piece;
  if (cut->shared == 0) return ends + divide_up(cut->tiles, pairs) * cut->pieces * piece;
  const int64_t joins = cut->shared < pairs ? divide_up(pairs, cut->shared) : 1;
  return ends + joins * in_order + (int64_t)cut->tiles * cut->pieces * piece / pairs;
}

/* ---- how tiles are shared out ---- */

/* [flags][sums] of the blocks that share tiles, bytes. */
static int64_t flag_bytes(const bsh_gemm_wide_cut *const cut) {
  const int64_t bytes = (int64_t)cut->sharing * BSH_GEMM_WIDE_PAIR * BSH_GEMM_WIDE_CONSUMERS * sizeof(uint32_t);
  return divide_up(bytes, SUMS_ALIGNMENT) * SUMS_ALIGNMENT;
}
static int64_t scratch_bytes(const bsh_gemm_wide_cut *const cut) {
  return flag_bytes(cut) + (int64_t)cut->sharing * BSH_GEMM_WIDE_PAIR * bsh_gemm_wide_partial_bytes(cut->tokens);
}

/* All pairs share the last round of whole tiles and the one before it, or all tiles where they are fewer. */
static bsh_gemm_wide_cut shared_in_order(bsh_gemm_wide_cut cut, const int32_t pairs) {
  cut.shared = cut.tiles < pairs ? cut.tiles : cut.tiles % pairs + pairs;
  cut.sharing = pairs;
  return cut;
}
static bsh_gemm_wide_cut scattered(bsh_gemm_wide_cut cut, const int32_t shares) {
  cut.shared = cut.tiles, cut.sharing = cut.tiles * shares, cut.scatter = shares;
  return cut;
}

typedef struct {
  const bsh_card *card;
  int64_t workspace_bytes; /* that the sums of shared tiles may take */
  int32_t pairs, piece;    /* piece: nanoseconds */
  bsh_gemm_wide_cut cut;
  int64_t ns;
} best_cut;

static void take_faster(best_cut *const best, const bsh_gemm_wide_cut cut) {
  const int64_t ns = nanoseconds(best->card, &cut, best->pairs, best->piece);
  if (ns < best->ns && scratch_bytes(&cut) <= best->workspace_bytes) best->ns = ns, best->cut = cut;
}

/* Of all forms and ways to share the fastest. Tiles stay whole where the sums of shared ones would take more scratch
 * memory than there may be. */
static best_cut cut_rows(const bsh_facts *const facts, const int64_t rows_of_x) {
  enum { LEAST_PIECES = 4 }; /* of a pair that shares in order */
  const bool forward = facts->direction == BSH_FORWARD;
  const int64_t rows = forward ? facts->N : facts->K, depth = forward ? facts->K : facts->N;
  const int32_t pairs = facts->sms / BSH_GEMM_WIDE_PAIR;
  best_cut best = {
      .card = bsh_card_of(facts->sm), .workspace_bytes = facts->workspace_bytes, .pairs = pairs, .ns = INT64_MAX};
  for (int32_t form = 0; form < FORMS; form++) {
    bsh_gemm_wide_cut cut = {.tokens = form_tokens[form]};
    cut.token_tiles = (int32_t)divide_up(rows_of_x, cut.tokens);
    cut.tiles = (int32_t)divide_up(rows, BSH_GEMM_WIDE_ROWS * BSH_GEMM_WIDE_PAIR) * cut.token_tiles;
    cut.pieces = (int32_t)divide_up(depth, BSH_GEMM_WIDE_PIECE);
    best.piece = best.card->gemm_4bit_sm90_wide.piece[form][bsh_wide_column(facts)];
    take_faster(&best, cut);
    for (int32_t shares = 2; shares <= 4; shares += 2)
      if (cut.tiles <= pairs / shares && shares <= cut.pieces) take_faster(&best, scattered(cut, shares));
    if (cut.tiles % pairs > 0 && (int64_t)cut.tiles * cut.pieces >= (int64_t)pairs * LEAST_PIECES)
      take_faster(&best, shared_in_order(cut, pairs));
  }
  return best;
}

/* Forward of few rows gemm_4bit_sm90 reads W once; where that is not of blocks below 64, the estimate says. */
static double cost(const bsh_facts *const facts) {
  const bool few = facts->direction == BSH_FORWARD && facts->M <= bsh_card_of(facts->sm)->gemm_4bit_sm90_wide.rows;
  if (few && facts->w.blocksize >= BSH_UNIT) return BSH_LAST;
  const int64_t rows = min_i64(facts->M, SLICE_ROWS);
  return (double)facts->M / (double)rows * (double)cut_rows(facts, rows).ns;
}

/* ---- the cut ---- */

static void lay_out_scratch(bsh_plan_slice *const slice) {
  if (slice->wide.sharing == 0) return;
  slice->counters = slice->wide.sharing * BSH_GEMM_WIDE_PAIR * BSH_GEMM_WIDE_CONSUMERS;
  slice->partial_at = flag_bytes(&slice->wide);
  slice->scratch_bytes = scratch_bytes(&slice->wide);
  slice->before.kernel = &clear_flags;
  slice->before.shape = bsh_overlapping(1, FLAG_THREADS, 1, 0);
}

static void cut(const bsh_facts *const facts, bsh_plan_slice *const slice) {
  slice->wide = cut_rows(facts, slice->rows).cut;
  int32_t form = 0;
  while (form_tokens[form] != slice->wide.tokens) form++;
  bsh_wide_accesses(facts, slice);
  slice->product.kernel =
      &kernels[bsh_wide_kind(facts)][form][facts->dtype == BSH_F16][facts->direction == BSH_INPUT_GRADIENT];
  const int32_t pairs = facts->sms / BSH_GEMM_WIDE_PAIR;
  const int64_t busy = slice->wide.sharing > 0 ? slice->wide.sharing : min_i64(slice->wide.tiles, pairs);
  slice->product.shape = bsh_overlapping(busy * BSH_GEMM_WIDE_PAIR, BSH_GEMM_WIDE_THREADS, BSH_GEMM_WIDE_PAIR,
                                         bsh_gemm_wide_shared_bytes(slice->wide.tokens, bsh_wide_block(facts)));
  lay_out_scratch(slice);
}

const bsh_kernel bsh_kernel_gemm_4bit_sm90_wide = {.name = "gemm_4bit_sm90_wide",
                                                   .operands = BSH_KIND(4BIT),
                                                   .directions = BSH_BOTH,
                                                   .needs = BSH_SM90A_MAPS,
                                                   .launch = BSH_LAUNCH_WIDE,
                                                   .rows = SLICE_ROWS,
                                                   .refuses = bsh_wide_refuses,
                                                   .cost = cost,
                                                   .cut = cut};
