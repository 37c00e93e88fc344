/* plan/sm80.c - how the tiles of gemm_4bit_sm80 and gemm_4bit_sm75 are shared out, and how long they take by a card's
 * model; panels by the same. */
#include "core/arithmetic.h"
#include "plan/cards.h"
#include "plan/gemv.h"
#include "plan/sm80.h"

enum { SUMS_ALIGNMENT = 256 };
enum { LEAST_DEPTH = 512 }; /* of a block that shares tiles in order */

static const bsh_sm80_tiles dense = {.depth = BSH_UNIT, .dense = true};

#define SM80_ROWS(form, rows) rows,
static const int32_t form_rows[] = {BSH_GEMM_SM80_FORMS(SM80_ROWS)};
enum { FORMS = sizeof form_rows / sizeof *form_rows };
_Static_assert((int)FORMS == (int)BSH_SM80_FORMS, "a share for each form");

/* ---- how long it takes, by the card's model ---- */

static int32_t blocks_of(const bsh_sm80_way *const of) {
  return of->cut.splits > 0 ? of->cut.tiles * of->cut.splits : of->sms;
}

/* Of tiles that are shared. Blocks that share one in order add to its sums one after the other. */
static double join_nanoseconds(const bsh_gemm_sm80_cut *const cut, const bsh_rates *const rates) {
  if (cut->splits > 0) return cut->splits == 2 ? rates->join_2 : rates->join_4;
  return rates->join_in_order + rates->join_part * cut->stages / cut->share;
}

/* A block's time by the multiprocessor's rate, which `resident` blocks share, and what lies around it. */
static double nanoseconds(const bsh_sm80_way *const of, const int32_t resident) {
  const bsh_gemm_sm80_cut *const cut = &of->cut;
  const double flops = 2.0 * of->multiplied * BSH_GEMM_SM80_COLUMNS * of->depth;
  const double alone = resident < of->at_once ? 0.85 : 1; /* a block hides less alone */
  const double stage = fmax(resident * flops / (of->rates->flops_per_ns_sm * of->share * alone), of->least);
  const double ends = of->rates->ends, join = cut->shared > 0 ? join_nanoseconds(cut, of->rates) : 0;
  if (cut->splits > 0) return ends + join + (double)divide_up(cut->stages, cut->splits) * stage;
  const int32_t whole = cut->tiles - cut->shared, slots = of->sms;
  double time = ends + join + (double)divide_up(whole, slots) * cut->stages * stage;
  if (cut->shared > 0) time += (double)(cut->share + (cut->longer > 0)) * stage;
  return time;
}

/* ---- how tiles are shared out ---- */

/* [flags][sums], bytes; 0: nothing is shared. */
static int64_t flag_bytes(const bsh_gemm_sm80_cut *const cut, const int64_t blocks) {
  const int64_t flags = cut->splits > 0 ? cut->tiles : blocks;
  return divide_up(flags * (int64_t)sizeof(uint32_t), SUMS_ALIGNMENT) * SUMS_ALIGNMENT;
}
static int64_t scratch_bytes(const bsh_gemm_sm80_cut *const cut, const int64_t blocks) {
  if (cut->splits == 0 && cut->shared == 0) return 0;
  return flag_bytes(cut, blocks) + blocks * bsh_gemm_sm80_partial_bytes(cut->rows);
}

/* All blocks share the tiles of the last round, which is not full; where that gives them few stages, those of the round
 * before it, too. */
static bsh_gemm_sm80_cut shared_in_order(bsh_gemm_sm80_cut cut, const int32_t blocks, const int32_t least) {
  cut.shared = cut.tiles % blocks;
  if ((int64_t)cut.shared * cut.stages < (int64_t)blocks * least) cut.shared += blocks;
  const int64_t all = (int64_t)cut.shared * cut.stages;
  cut.share = (int32_t)(all / blocks), cut.longer = (int32_t)(all % blocks);
  return cut;
}

static void take_faster(bsh_sm80_way *const best, bsh_sm80_way next, const int32_t resident) {
  next.ns = nanoseconds(&next, resident);
  if (next.ns < best->ns && scratch_bytes(&next.cut, blocks_of(&next)) <= next.workspace_bytes) *best = next;
}

/* Of a form and `resident` blocks on each multiprocessor the fastest way. Blocks that wait for blocks of any index must
 * run together, or time out. */
static void try_form(bsh_sm80_way *const best, bsh_sm80_way next, const int32_t resident) {
  next.sms *= resident;
  take_faster(best, next, resident);
  for (int32_t splits = 2; splits <= 4; splits += 2) {
    bsh_sm80_way split = next;
    split.cut.splits = splits, split.cut.shared = split.cut.tiles;
    const bool fits =
        next.cut.tiles <= next.sms / splits && next.cut.tiles * splits > next.sms / resident * (resident - 1);
    if (fits && splits <= next.cut.stages) take_faster(best, split, resident);
  }
  const int32_t least = LEAST_DEPTH / next.depth; /* stages */
  if (next.cut.tiles % next.sms == 0 || (int64_t)next.cut.tiles * next.cut.stages < (int64_t)next.sms * least) return;
  next.cut = shared_in_order(next.cut, next.sms, least);
  take_faster(best, next, resident);
}

bsh_sm80_way bsh_sm80_fastest(const bsh_facts *const facts, const bsh_sm80_tiles *const of, const int64_t rows_of_x) {
  const bool forward = facts->direction == BSH_FORWARD;
  const int64_t width = forward ? facts->N : facts->K, depth = forward ? facts->K : facts->N;
  bsh_sm80_way best = {.ns = HUGE_VAL};
  for (int32_t form = of->first_form; form < FORMS; form++) {
    if (!of->dense && !bsh_sm80_decodes(facts, form_rows[form])) continue;
    bsh_gemm_sm80_cut cut = {.rows = form_rows[form], .stages = (int32_t)divide_up(depth, of->depth)};
    cut.row_tiles = (int32_t)divide_up(rows_of_x, cut.rows);
    cut.tiles = cut.row_tiles * (int32_t)divide_up(width, BSH_GEMM_SM80_COLUMNS);
    const bsh_rates *const rates = bsh_rates_of(facts->sm);
    const bsh_sm80_way next = {.rates = rates,
                               .share = of->dense ? 1 : rates->share[facts->direction][form],
                               .workspace_bytes = facts->workspace_bytes,
                               .sms = facts->sms,
                               .form = form,
                               .depth = of->depth,
                               .least = of->least,
                               .multiplied = cut.row_tiles > 1 || of->round == 0
                                                 ? cut.rows
                                                 : (int32_t)divide_up(rows_of_x, of->round) * of->round,
                               .at_once = bsh_sm80_at_once(form_rows[form], facts->sm),
                               .cut = cut};
    for (int32_t resident = 1; resident <= next.at_once; resident++) try_form(&best, next, resident);
  }
  return best;
}

double bsh_sm80_nanoseconds(const bsh_facts *const facts, const bsh_sm80_tiles *const of) {
  const bsh_rates *const rates = bsh_rates_of(facts->sm);
  const int64_t rows = min_i64(facts->M, BSH_SM80_SLICE_ROWS);
  const double bytes = (double)facts->N * (double)facts->K * (0.5 + 1.0 / (double)facts->w.blocksize);
  const double reading = rates->ends + bytes / (rates->bytes_per_ns_sm * facts->sms);
  return (double)facts->M / (double)rows * fmax(bsh_sm80_fastest(facts, of, rows).ns, reading);
}

/* The vendor's product is taken to be as fast as these tiles without decoding: measured were 0.92 to 1.19 of its speed.
 * A panel that L2 holds passes memory neither written nor read. */
double bsh_modelled_panels(const bsh_facts *const facts) {
  const bsh_rates *const rates = bsh_rates_of(facts->sm);
  const double weights = (double)facts->N * (double)facts->K;
  const bool kept = fmin(2 * weights, (double)facts->workspace_bytes) <= (double)rates->l2;
  const double moved = 0.5 + 1.0 / (double)facts->w.blocksize + (kept ? 0 : 2);
  const int64_t rows = min_i64(facts->M, BSH_SM80_SLICE_ROWS);
  const double product = (double)facts->M / (double)rows * bsh_sm80_fastest(facts, &dense, rows).ns;
  const double reading = kept ? 0 : rates->ends + 2 * weights / (rates->bytes_per_ns_sm * facts->sms);
  return rates->begin + weights * moved / (rates->dequantized_per_ns_sm * facts->sms) + fmax(product, reading);
}

/* ---- the cut ---- */

void bsh_sm80_lay_out(const bsh_facts *const facts, const bsh_sm80_way *const way, bsh_plan_slice *const slice) {
  const bool shares = way->cut.splits > 0 || way->cut.shared > 0;
  const int64_t blocks = shares ? blocks_of(way) : min_i64(way->cut.tiles, way->sms);
  slice->sm80 = way->cut;
  slice->block_shift = bsh_sm80_block_shift(facts);
  slice->stores_together = facts->y_alignment >= 16;
  slice->product.shape =
      (bsh_cuda_launch_shape){.grid = {(uint32_t)blocks, 1, 1}, .overlap = bsh_is_wide(facts->image.arch)};
  if (!shares) return;
  slice->counters = (int32_t)(flag_bytes(&way->cut, blocks) / (int64_t)sizeof(uint32_t));
  slice->partial_at = flag_bytes(&way->cut, blocks);
  slice->scratch_bytes = scratch_bytes(&way->cut, blocks);
}
