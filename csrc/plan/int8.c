/* plan/int8.c - see plan/int8.h. */
#include "plan/int8.h"

const char *bsh_int8_maps_refuse(const bsh_facts *const facts, const int64_t sums) {
  if (facts->dtype == BSH_F32) return "no float32";
  if (facts->K % 16 || sums == 0) return "K is no multiple of 16, or there are no terms";
  if (facts->packed_alignment < 16) return "W is not 16-byte aligned";
  return bsh_int8_sizes_refuse(facts);
}

int64_t bsh_place(bsh_plan_slice *const slice, const int64_t n_bytes) {
  enum { ALIGNMENT = 256 };
  const int64_t here = slice->scratch_bytes;
  slice->scratch_bytes += divide_up(n_bytes, ALIGNMENT) * ALIGNMENT;
  return here;
}

/* Outlier columns that are gathered: what fits, whole chunks, not more than there are columns. */
static int32_t capacity_of(const bsh_facts *const f) {
  const bool tensor_cores = f->dtype == BSH_F16 || (f->dtype == BSH_BF16 && f->image.arch >= 80);
  if (!f->threshold || !tensor_cores) return 0;
  const int64_t fit = f->workspace_bytes / (2 * (f->M + f->N)) / BSH_INT8_CHUNK;
  return (int32_t)(min_i64(fit, divide_up(f->K, BSH_INT8_CHUNK)) * BSH_INT8_CHUNK);
}

void bsh_place_codes(const bsh_facts *const f, const bool finds, bsh_plan_slice *const slice) {
  bsh_int8_cut *const cut = &slice->int8;
  cut->codes = true;
  slice->reads_together = f->packed_alignment == 16, slice->stores_together = f->y_alignment == 16;
  cut->finds = finds;
  cut->codes_at = bsh_place(slice, f->M * f->K);
  cut->absmax_at = bsh_place(slice, f->M * (int64_t)sizeof(float));
  if (!f->threshold) return;
  if (finds) {
    cut->claims_at = bsh_place(slice, f->K * (int64_t)sizeof(uint16_t));
    cut->shares_at = bsh_place(slice, (int64_t)sizeof(uint32_t));
    cut->x_at = bsh_place(slice, f->M * BSH_INT8_CHUNK * 3); /* and their codes */
    return;
  }
  cut->capacity = capacity_of(f);
  cut->flags_at = bsh_place(slice, f->K);
  cut->count_at = bsh_place(slice, (int64_t)sizeof(int32_t));
  cut->list_at = bsh_place(slice, f->K * (int64_t)sizeof(int32_t));
  cut->x_at = bsh_place(slice, f->M * cut->capacity * 2);
  cut->w_at = bsh_place(slice, f->N * cut->capacity * 2);
}

double bsh_tiles_nanoseconds(const bsh_tiles *const t, const int64_t stages, const double stage, const double beside,
                             const double join) {
  const bool shared = t->splits > 1;
  if (shared && t->tiles > t->clusters) return HUGE_VAL;
  const double of_tile = stage * (double)divide_up(stages, t->splits) + beside + (shared ? join : 0);
  return (double)divide_up(t->tiles, t->clusters) * of_tile;
}

void bsh_lay_out_tiles(const bsh_tiles *const t, const int32_t blocks, const uint32_t shared_bytes,
                       bsh_plan_slice *const slice) {
  slice->int8.splits = t->splits;
  slice->int8.m_tiles = (int32_t)t->m_tiles, slice->int8.tiles = (int32_t)t->tiles;
  slice->product.shape = bsh_overlapping(min_i64(t->tiles, t->clusters) * blocks, BSH_GEMM_INT8_SM90_THREADS, blocks,
                                         (int32_t)shared_bytes);
}
