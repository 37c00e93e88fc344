/* plan/mixed_int8_sm90.c - what mixed_int8_sm90.cu and dgrad_int8_sm90.cu take: x, or dy, as it is, in one pass over W
 * by wgmma. Which of their forms, and how pairs share the depth of a tile, is estimated. */
#include "plan/int8.h"

#define MIXED_TOKENS(form, tokens, stages) tokens,
#define MIXED_STAGES(form, tokens, stages) stages,
static const int32_t form_tokens[] = {BSH_MIXED_INT8_FORMS(MIXED_TOKENS)};
static const int32_t form_stages[] = {BSH_MIXED_INT8_FORMS(MIXED_STAGES)};
enum { FORMS = BSH_MIXED_FORMS, PAIR = 2 };
_Static_assert(sizeof form_tokens / sizeof *form_tokens == FORMS, "times for each form");

static const char *refuses(const bsh_facts *const f) {
  const char *const reason = bsh_int8_maps_refuse(f, f->N == 0 ? 0 : f->K);
  if (reason != NULL) return reason;
  return f->x_alignment < 16 ? "x or dy is not 16-byte aligned" : NULL;
}

/* With a threshold, of few rows, and of small weights only where gemm_int8_sm90 does not take them. */
static double mixed_cost(const bsh_facts *const f) {
  const bsh_card *const card = bsh_card_of(f->sm);
  if (!f->threshold || f->M > card->int8.mixed_rows) return BSH_LAST;
  return f->N * f->K < card->int8.small ? BSH_ORDER(5) : BSH_ORDER(3);
}

/* Above these rows after panels. */
static double dgrad_cost(const bsh_facts *const f) {
  return f->M <= bsh_card_of(f->sm)->int8.one_pass_rows ? BSH_ORDER(2) : BSH_ORDER(4);
}

static bsh_tiles cut_into(const bsh_facts *const f, const int32_t form, const int32_t splits) {
  const int64_t rows = f->direction == BSH_FORWARD ? f->N : f->K;
  bsh_tiles t = {.form = form, .splits = splits, .m_tiles = divide_up(f->M, form_tokens[form])};
  t.tiles = t.m_tiles * divide_up(rows, PAIR * BSH_MIXED_INT8_ROWS);
  t.clusters = bsh_clusters_at_once(f->sms, PAIR * splits);
  return t;
}

static double nanoseconds(const bsh_facts *const f, const bsh_tiles *const t) {
  const bsh_card *const card = bsh_card_of(f->sm);
  const int64_t depth = f->direction == BSH_FORWARD ? f->K : f->N;
  const int64_t stages = 2 * divide_up(depth, 2 * BSH_MIXED_INT8_DEPTH);
  if (t->splits > 1 && stages < 4 * t->splits) return HUGE_VAL;
  return bsh_tiles_nanoseconds(t, stages, card->mixed_int8_sm90.stage[f->direction][t->form],
                               card->mixed_int8_sm90.beside, card->mixed_int8_sm90.join[t->form]);
}

static bsh_tiles best_of(const bsh_facts *const f) {
  bsh_tiles best = cut_into(f, 0, 1);
  for (int32_t form = 0; form < FORMS; form++)
    for (int32_t splits = 1; splits <= BSH_MIXED_INT8_SPLITS; splits++) {
      const bsh_tiles other = cut_into(f, form, splits);
      if (nanoseconds(f, &other) < nanoseconds(f, &best)) best = other;
    }
  return best;
}

static void cut(const bsh_facts *const f, bsh_plan_slice *const slice) {
#define MIXED_BF16(form, ...) BSH_KERNEL(mixed_int8_sm90, "mixed_int8_sm90_bf16_" #form),
#define MIXED_F16(form, ...) BSH_KERNEL(mixed_int8_sm90, "mixed_int8_sm90_f16_" #form),
#define DGRAD_BF16(form, ...) BSH_KERNEL(dgrad_int8_sm90, "dgrad_int8_sm90_bf16_" #form),
#define DGRAD_F16(form, ...) BSH_KERNEL(dgrad_int8_sm90, "dgrad_int8_sm90_f16_" #form),
  static bsh_cuda_kernel kernels[2][2][FORMS] = {
      {{BSH_MIXED_INT8_FORMS(MIXED_BF16)}, {BSH_MIXED_INT8_FORMS(MIXED_F16)}},
      {{BSH_MIXED_INT8_FORMS(DGRAD_BF16)}, {BSH_MIXED_INT8_FORMS(DGRAD_F16)}}};
  const bool back = f->direction == BSH_INPUT_GRADIENT;
  const bsh_tiles best = best_of(f);
  const int32_t tokens = form_tokens[best.form];
  if (back) slice->int8.scales_at = bsh_place(slice, bsh_dgrad_int8_pairs(f->N) * (int64_t)sizeof(bsh_int8_scale_pair));
  slice->int8.maps = true;
  slice->stores_together = f->y_alignment >= 4;
  slice->int8.rows = tokens / PAIR;
  slice->product.kernel = &kernels[back][f->dtype == BSH_F16][best.form];
  bsh_lay_out_tiles(&best, PAIR * best.splits, bsh_mixed_int8_shared_bytes(tokens, form_stages[best.form]), slice);
}

const bsh_kernel bsh_kernel_mixed_int8_sm90 = {.name = "mixed_int8_sm90",
                                               .operands = BSH_KIND(INT8),
                                               .directions = BSH_FORWARD_ONLY,
                                               .needs = BSH_SM90A_MAPS,
                                               .launch = BSH_LAUNCH_MIXED_INT8,
                                               .refuses = refuses,
                                               .cost = mixed_cost,
                                               .cut = cut};

const bsh_kernel bsh_kernel_dgrad_int8_sm90 = {.name = "dgrad_int8_sm90",
                                               .operands = BSH_KIND(INT8),
                                               .directions = BSH_GRADIENT_ONLY,
                                               .needs = BSH_SM90A_MAPS,
                                               .launch = BSH_LAUNCH_MIXED_INT8,
                                               .refuses = refuses,
                                               .cost = dgrad_cost,
                                               .cut = cut};
