/* plan/gemm_int8_sm90.c - what gemm_int8_sm90.cu takes: x in codes, by wgmma. Which of its forms, and how blocks share
 * the depth of a tile, is estimated. */
#include "plan/int8.h"

typedef struct {
  int32_t rows, columns, stages, cluster;
} form;
#define FORM(name, rows, columns, stages, cluster) {rows, columns, stages, cluster},
static const form forms[] = {BSH_GEMM_INT8_SM90_FORMS(FORM)};
enum { FORMS = sizeof forms / sizeof *forms };
_Static_assert((int)FORMS == (int)BSH_CODES_FORMS, "times for each form");

static const char *refuses(const bsh_facts *const f) { return bsh_int8_maps_refuse(f, f->K); }

static double cost(const bsh_facts *const f) {
  (void)f;
  return BSH_ORDER(4);
}

static bsh_tiles cut_into(const bsh_facts *const f, const int32_t number, const int32_t splits) {
  const form *const s = &forms[number];
  bsh_tiles t = {.form = number, .splits = splits, .m_tiles = divide_up(f->M, s->rows * s->cluster)};
  t.tiles = t.m_tiles * divide_up(f->N, s->columns);
  t.clusters = bsh_clusters_at_once(f->sms, s->cluster * splits);
  return t;
}

/* Whether the kernel finds outlier columns itself. */
static bool finds_columns(const bsh_facts *const f, const bsh_tiles *const t) {
  const bool can = f->threshold && t->splits == 1 && bsh_gemm_int8_sm90_finds(forms[t->form].columns);
  return can && f->M <= BSH_INT8_FOUND_ROWS && f->K <= BSH_INT8_FOUND_K;
}

/* With what is lost where one of a cluster's blocks has no rows; where quantize_int8 of the next product finds no
 * space; of gathering columns of a W of N rows. Infinite for a cut that there is not, and for clusters of three where
 * they may not run at once. */
static double nanoseconds(const bsh_facts *const f, const bsh_tiles *const t) {
  const bsh_card *const card = bsh_card_of(f->sm);
  const form *const s = &forms[t->form];
  const int64_t stages = divide_up(f->K, BSH_GEMM_INT8_DEPTH), blocks = min_i64(t->tiles, t->clusters) * s->cluster;
  if (t->splits > 1 && (s->cluster > 1 || stages < 2 * t->splits)) return HUGE_VAL;
  if (s->cluster == 3 && t->tiles * card->sms > card->gemm_int8_sm90.threes * f->sms) return HUGE_VAL;
  const bool full = bsh_gemm_int8_sm90_registers(s->columns) == BSH_GEMM_INT8_SM90_REGISTERS &&
                    blocks * t->splits * card->sms > card->gemm_int8_sm90.most_blocks * f->sms;
  const bool gathers = f->threshold && !finds_columns(f, t);
  const double gathered = card->gemm_int8_sm90.gather + card->gemm_int8_sm90.gather_row * (double)f->N;
  const double empty = divide_up(f->M, s->rows) % s->cluster != 0 ? card->gemm_int8_sm90.half_empty : 0;
  return bsh_tiles_nanoseconds(t, stages, card->gemm_int8_sm90.stage[t->form], card->gemm_int8_sm90.beside[t->form],
                               card->gemm_int8_sm90.join) +
         empty + (full ? card->gemm_int8_sm90.no_space : 0) + (gathers ? gathered : 0);
}

static bsh_tiles best_of(const bsh_facts *const f) {
  bsh_tiles best = cut_into(f, 0, 1);
  for (int32_t number = 0; number < FORMS; number++)
    for (int32_t splits = 1; splits * forms[number].cluster <= BSH_GEMV_CLUSTER; splits++) {
      const bsh_tiles other = cut_into(f, number, splits);
      if (nanoseconds(f, &other) < nanoseconds(f, &best)) best = other;
    }
  return best;
}

static void cut(const bsh_facts *const f, bsh_plan_slice *const slice) {
#define SM90_BF16(form, ...) BSH_KERNEL(gemm_int8_sm90, "gemm_int8_sm90_bf16_" #form),
#define SM90_F16(form, ...) BSH_KERNEL(gemm_int8_sm90, "gemm_int8_sm90_f16_" #form),
  static bsh_cuda_kernel kernels[2][FORMS] = {{BSH_GEMM_INT8_SM90_FORMS(SM90_BF16)},
                                              {BSH_GEMM_INT8_SM90_FORMS(SM90_F16)}};
  const bsh_tiles best = best_of(f);
  const form *const s = &forms[best.form];
  const int64_t sums = best.tiles * (best.splits - 1) * s->rows * s->columns;
  bsh_place_codes(f, finds_columns(f, &best), slice);
  slice->partial_at = bsh_place(slice, sums * (int64_t)sizeof(int32_t));
  slice->int8.maps = true;
  slice->int8.rows = s->rows;
  slice->int8.columns = s->columns / bsh_gemm_int8_sm90_readers(s->cluster);
  slice->product.kernel = &kernels[f->dtype == BSH_F16][best.form];
  bsh_lay_out_tiles(&best, s->cluster * best.splits, bsh_gemm_int8_sm90_shared_bytes(s->rows, s->columns, s->stages),
                    slice);
}

const bsh_kernel bsh_kernel_gemm_int8_sm90 = {.name = "gemm_int8_sm90",
                                              .operands = BSH_KIND(INT8),
                                              .directions = BSH_FORWARD_ONLY,
                                              .needs = BSH_SM90A_MAPS,
                                              .launch = BSH_LAUNCH_CODES_INT8,
                                              .refuses = refuses,
                                              .cost = cost,
                                              .cut = cut};
