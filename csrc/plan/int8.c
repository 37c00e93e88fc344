/* plan/int8.c - see plan/int8.h. Which kernel, form and cut computes a product where several can is estimated. The
 * numbers of gemm_int8_sm90 are from an H100, of other kernels of sm_90 from an H200
 * (benchmarks/results/int8_h100_202611.md, int8_h200_202611.md); others are what its tensor cores and memory can do. */
#include "plan/int8.h"

#include <inttypes.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "core/arithmetic.h"
#include "cuda/gemv_4bit.h"
#include "plan/kernel.h"

#define KERNEL_NAME(name) #name,
static const char *const names[BSH_INT8_COUNT] = {BSH_INT8_KERNELS(KERNEL_NAME)};
const char *bsh_int8_kernel_name(const bsh_int8_kernel kernel) { return names[kernel]; }

#define FORM(name, rows, columns, stages, cluster) {rows, columns, stages, cluster},
const bsh_int8_form bsh_int8_forms[] = {BSH_GEMM_INT8_SM90_FORMS(FORM)};
enum { FORMS = sizeof bsh_int8_forms / sizeof *bsh_int8_forms };
enum { MOST_ROWS = 65535 * BSH_INT8_ANY_TOKENS }; /* a grid's second size, of `any` */
enum { LARGE = 150000000 };                       /* codes of a weight */

/* ---- what a kernel refuses ---- */

/* Rows of x up to which it is multiplied as it is. From 17 on a second group of blocks reads W again, out of L2. */
static int64_t few_rows(const bsh_int8_facts *const f) {
  return bsh_is_wide(f->image.arch) && f->dtype != BSH_F32 ? 2 * BSH_INT8_FEW_ROWS : BSH_INT8_FEW_ROWS;
}

static const char *gemv_refuses(const bsh_int8_facts *const f) {
  const int32_t arch = f->image.arch;
  if (f->dgrad) return "no input gradient";
  /* Forced, twice as many; code of sm_80 to sm_89 and sm_120 has no form for the second 16. */
  const bool twice = f->forced == BSH_INT8_gemv_int8 && (bsh_is_wide(arch) || arch < 80);
  if (f->M > (twice ? 2 : 1) * few_rows(f)) return "too many rows";
  if (f->dtype == BSH_F32) return "no float32";
  if (arch < (f->dtype == BSH_BF16 ? 80 : 75)) return "no tensor cores for the dtype in this code";
  if (bsh_is_wide(arch) && !bsh_is_wide(f->sm)) return "code for more shared memory than the GPU has";
  if (f->N % BSH_ROW_TILE) return "N is no multiple of 16";
  if (f->K % BSH_UNIT || f->K == 0) return "K is no multiple of 64";
  if (f->x_alignment < 16 || f->packed_alignment < 16) return "x or W is not 16-byte aligned";
  if (bsh_is_wide(arch) && bsh_gemv_divide(f->M, f->N, f->K, arch, f->sms).k_splits > BSH_GEMV_CLUSTER)
    return "K is longer than a cluster of blocks holds";
  return NULL;
}

static const char *sm90_refuses(const bsh_int8_facts *const f) {
  if (f->dgrad) return "no input gradient";
  if (f->image.arch != 90 || !f->image.this_gpu_only) return "only for sm_90a";
  if (!f->tensor_maps) return "the driver makes no tensor maps";
  if (f->dtype == BSH_F32) return "no float32";
  if (f->K % 16 || f->K == 0) return "K is no multiple of 16";
  return f->packed_alignment < 16 ? "W is not 16-byte aligned" : NULL;
}

/* mixed_int8_sm90, and dgrad_int8_sm90. */
static const char *mixed_refuses(const bsh_int8_facts *const f, const bool dgrad) {
  if (f->dgrad != dgrad) return dgrad ? "only of the input gradient" : "no input gradient";
  if (f->image.arch != 90 || !f->image.this_gpu_only) return "only for sm_90a";
  if (!f->tensor_maps) return "the driver makes no tensor maps";
  if (f->dtype == BSH_F32) return "no float32";
  if (f->K % 16 || f->K == 0 || f->N == 0) return "K is no multiple of 16";
  return f->packed_alignment < 16 || f->x_alignment < 16 ? "x, dy or W is not 16-byte aligned" : NULL;
}

static const char *gemv_dgrad_refuses(const bsh_int8_facts *const f) {
  if (!f->dgrad) return "only of the input gradient";
  if (!bsh_is_wide(f->image.arch) || !bsh_is_wide(f->sm)) return "only for sm_90 and sm_100";
  if (f->M > BSH_GEMV_DGRAD_ROWS) return "more than 64 rows";
  if (f->dtype == BSH_F32) return "no float32";
  if (f->K % 16 || f->N % 2 || f->N == 0) return "K is no multiple of 16 or N is odd";
  return f->packed_alignment < 16 || f->x_alignment < 4 ? "dy or W is not aligned" : NULL;
}

static const char *refuses(const bsh_int8_kernel kernel, const bsh_int8_facts *const f) {
  switch (kernel) {
  case BSH_INT8_gemv_int8:
    return gemv_refuses(f);
  case BSH_INT8_gemm_int8:
    return f->dgrad ? "no input gradient" : f->K == 0 ? "K is 0" : NULL;
  case BSH_INT8_gemm_int8_sm90:
    return sm90_refuses(f);
  case BSH_INT8_gemv_int8_dgrad:
    return gemv_dgrad_refuses(f);
  case BSH_INT8_mixed_int8_sm90:
  case BSH_INT8_dgrad_int8_sm90:
    return mixed_refuses(f, kernel == BSH_INT8_dgrad_int8_sm90);
  case BSH_INT8_panels:
    if (!f->dgrad) return "only of the input gradient";
    if (!f->cublas) return "no cuBLAS";
    return f->dtype == BSH_F32 ? "no float32" : f->N == 0 ? "N is 0" : NULL;
  default:
    return f->M > MOST_ROWS ? "more than 262,140 rows" : NULL;
  }
}

/* On an H200, at 4096 x 4096, 14336 x 4096 and 28672 x 8192: gemv_int8_dgrad was the fastest at 1 row, and of the last
 * of these at 16 and 32; else dgrad_int8_sm90 up to 1,024 rows; panels at 4,096. */
static bsh_int8_kernel choose_dgrad(const bsh_int8_facts *const f) {
  enum { LEAST_ROWS = 8, FEW_ROWS = 32, ONE_PASS_ROWS = 1024 };
  const int64_t few = f->N * f->K >= LARGE ? FEW_ROWS : LEAST_ROWS;
  if (f->M <= few && !refuses(BSH_INT8_gemv_int8_dgrad, f)) return BSH_INT8_gemv_int8_dgrad;
  const bool one_pass = !refuses(BSH_INT8_dgrad_int8_sm90, f), panels = !refuses(BSH_INT8_panels, f);
  if (one_pass && (f->M <= ONE_PASS_ROWS || !panels)) return BSH_INT8_dgrad_int8_sm90;
  return panels ? BSH_INT8_panels : BSH_INT8_any;
}

/* On an H200. A weight of 28672 x 8192: gemv_int8 took 99 us at 24 and 32 rows, gemm_int8_sm90 without a threshold 73
 * and 71. With a threshold, on an H100, mixed_int8_sm90, and gemm_int8_sm90 with 0, 8 and 64 columns that it finds: 14
 * and 12, 13, 15 us at 33 rows of 4096 x 4096, 17 and 12, 13, 16 at 128; 29 and 28, 30, 32 at 64 of 14336 x 4096, 34
 * and 31, 33, 34 at 128; 93 and 92, 94, 97 at 64 of 28672 x 8192. */
static bsh_int8_kernel choose(const bsh_int8_facts *const f) {
  enum { MIXED_ROWS = 64, SMALL = 32000000 };
  if (f->forced != BSH_INT8_COUNT) return f->forced;
  if (f->dgrad) return choose_dgrad(f);
  if (f->K == 0) return BSH_INT8_any;
  const bool large = f->N * f->K >= LARGE, small = f->N * f->K < SMALL, codes = !refuses(BSH_INT8_gemm_int8_sm90, f);
  const bool few = f->M <= (large && codes && !f->outliers ? BSH_INT8_FEW_ROWS : few_rows(f));
  if (few) return refuses(BSH_INT8_gemv_int8, f) ? BSH_INT8_any : BSH_INT8_gemv_int8;
  const bool mixed = f->outliers && f->M <= MIXED_ROWS && !(small && codes);
  if (mixed && !refuses(BSH_INT8_mixed_int8_sm90, f)) return BSH_INT8_mixed_int8_sm90;
  return codes ? BSH_INT8_gemm_int8_sm90 : BSH_INT8_gemm_int8;
}

/* ---- scratch memory ---- */

/* Place of n_bytes more. */
static int64_t place(bsh_int8_scratch *const at, const int64_t n_bytes) {
  enum { ALIGNMENT = 256 };
  const int64_t here = at->bytes;
  at->bytes += divide_up(n_bytes, ALIGNMENT) * ALIGNMENT;
  return here;
}

/* Outlier columns that are gathered: what fits, whole chunks, not more than there are columns. */
static int32_t capacity_of(const bsh_int8_facts *const f) {
  const bool tensor_cores = f->dtype == BSH_F16 || (f->dtype == BSH_BF16 && f->image.arch >= 80);
  if (!f->outliers || !tensor_cores) return 0;
  const int64_t fit = f->workspace_bytes / (2 * (f->M + f->N)) / BSH_INT8_CHUNK;
  return (int32_t)(min_i64(fit, divide_up(f->K, BSH_INT8_CHUNK)) * BSH_INT8_CHUNK);
}

static void place_codes(const bsh_int8_facts *const f, bsh_int8_plan *const plan) {
  bsh_int8_scratch *const at = &plan->at;
  plan->codes = true;
  at->codes = place(at, f->M * f->K);
  at->absmax = place(at, f->M * (int64_t)sizeof(float));
  if (!f->outliers) return;
  if (plan->finds) {
    at->claims = place(at, f->K * (int64_t)sizeof(uint16_t));
    at->shares = place(at, (int64_t)sizeof(uint32_t));
    at->x = place(at, f->M * BSH_INT8_CHUNK * 3); /* and their codes */
    return;
  }
  plan->capacity = capacity_of(f);
  at->flags = place(at, f->K);
  at->count = place(at, (int64_t)sizeof(int32_t));
  at->list = place(at, f->K * (int64_t)sizeof(int32_t));
  at->x = place(at, f->M * plan->capacity * 2);
  at->w = place(at, f->N * plan->capacity * 2);
}

/* ---- few rows ---- */

#define KERNEL(file, NAME) {.fatbin = BSH_FATBIN_##file, .name = NAME}
#define GEMV_BF16(form, tiles, units) KERNEL(gemv_int8, "gemv_int8_bf16_" #form),
#define GEMV_F16(form, tiles, units) KERNEL(gemv_int8, "gemv_int8_f16_" #form),
#define GEMV_TILES(form, tiles, units) {tiles, units},
static const int32_t gemv_forms[][2] = {BSH_GEMV_INT8_FORMS(GEMV_TILES)};
static bsh_cuda_kernel gemvs[2][3] = {{BSH_GEMV_INT8_FORMS(GEMV_BF16)}, {BSH_GEMV_INT8_FORMS(GEMV_F16)}};
static bsh_cuda_kernel joins[2][2] = {
    {KERNEL(gemv_int8, "join_codes_bf16_m8"), KERNEL(gemv_int8, "join_codes_bf16_m16")},
    {KERNEL(gemv_int8, "join_codes_f16_m8"), KERNEL(gemv_int8, "join_codes_f16_m16")}};

static void plan_gemv(const bsh_int8_facts *const f, bsh_int8_plan *const plan) {
  const int32_t arch = f->image.arch;
  const bool wide = bsh_is_wide(arch), f16 = f->dtype == BSH_F16;
  const bsh_gemv_division d = bsh_gemv_divide(f->M, f->N, f->K, arch, f->sms);
  const int32_t warps = bsh_gemv_warps(arch), tile_sums = bsh_gemv_tile_sums(d.token_tiles);
  int form = 0;
  while (gemv_forms[form][0] != d.token_tiles || gemv_forms[form][1] != d.units) form++;
  plan->cut = bsh_gemv_cut(&d, f->N);
  plan->product.kernel = &gemvs[f16][form];
  plan->product.shape = (bsh_cuda_launch_shape){
      .grid = {(uint32_t)(d.teams * d.k_splits), (uint32_t)d.token_groups, 1},
      .block = {(uint32_t)(BSH_WARP * d.k_warps * d.row_groups), 1, 1},
      .cluster = wide ? (uint32_t)d.k_splits : 1,
      .shared_bytes = bsh_gemv_int8_shared_bytes(warps, bsh_gemv_slots(arch, d.token_tiles), 2 * warps * tile_sums * 4),
      .overlap = wide};
  if (d.k_splits == 1) return;
  const int64_t sums = f->N / BSH_ROW_TILE * tile_sums;
  plan->at.partial = place(&plan->at, sums * d.token_groups * d.k_splits * (int64_t)sizeof(float));
  if (wide) return; /* the cluster joins */
  plan->after.kernel = &joins[f16][d.token_tiles / 2];
  plan->after.shape =
      (bsh_cuda_launch_shape){.grid = {(uint32_t)divide_up(sums, BSH_GEMV_JOIN_THREADS), (uint32_t)d.token_groups, 1},
                              .block = {BSH_GEMV_JOIN_THREADS, 1, 1}};
}

#define BY_DTYPE(file, stem) {KERNEL(file, stem "f32"), KERNEL(file, stem "f16"), KERNEL(file, stem "bf16")}

static void plan_any(const bsh_int8_facts *const f, bsh_int8_plan *const plan) {
  static bsh_cuda_kernel forward[3] = BY_DTYPE(int8, "linear_int8_any_");
  static bsh_cuda_kernel dgrad[3] = BY_DTYPE(int8, "linear_int8_dgrad_any_");
  const int64_t blocks = f->dgrad ? divide_up(f->K, BSH_INT8_ANY_WARPS * 32) : divide_up(f->N, BSH_INT8_ANY_WARPS);
  plan->product.kernel = &(f->dgrad ? dgrad : forward)[f->dtype];
  plan->product.shape =
      (bsh_cuda_launch_shape){.grid = {(uint32_t)blocks, (uint32_t)divide_up(f->M, BSH_INT8_ANY_TOKENS), 1},
                              .block = {BSH_INT8_ANY_WARPS * 32, 1, 1},
                              .overlap = true};
}

/* ---- many rows ---- */

static void cut_gemm(bsh_cuda_kernel *const kernel, const int64_t M, const int64_t N, const int32_t arch,
                     bsh_int8_plan *const plan) {
  plan->m_tiles = (int32_t)divide_up(M, BSH_GEMM_INT8_TILE);
  plan->tiles = (int32_t)(plan->m_tiles * divide_up(N, BSH_GEMM_INT8_TILE));
  plan->product.kernel = kernel;
  plan->product.shape = (bsh_cuda_launch_shape){.grid = {(uint32_t)plan->tiles, 1, 1},
                                                .block = {BSH_GEMM_INT8_THREADS, 1, 1},
                                                .shared_bytes = bsh_gemm_int8_shared_bytes(arch),
                                                .overlap = true};
}

static void plan_gemm(const bsh_int8_facts *const f, bsh_int8_plan *const plan) {
  static bsh_cuda_kernel kernels[3] = BY_DTYPE(gemm_int8, "gemm_int8_");
  place_codes(f, plan);
  cut_gemm(&kernels[f->dtype], f->M, f->N, f->image.arch, plan);
}

typedef struct {
  int32_t form, splits;
  int64_t m_tiles, tiles, clusters; /* clusters: that run at once */
} sm90_cut;

static sm90_cut cut_sm90(const bsh_int8_facts *const f, const int32_t form, const int32_t splits) {
  const bsh_int8_form *const s = &bsh_int8_forms[form];
  sm90_cut c = {.form = form, .splits = splits, .m_tiles = divide_up(f->M, s->rows * s->cluster)};
  c.tiles = c.m_tiles * divide_up(f->N, s->columns);
  c.clusters = bsh_gemv_clusters_at_once(f->sms, s->cluster * splits);
  return c;
}

/* Of a cut with so many stages of depth, from the nanoseconds of a stage, of a tile beside them, and of joining sums.
 * Infinite where blocks would share the depth of a tile, and there are more tiles than clusters. */
static double nanoseconds(const sm90_cut *const c, const int64_t stages, const double stage, const double beside,
                          const double join) {
  const bool shared = c->splits > 1;
  if (shared && c->tiles > c->clusters) return HUGE_VAL;
  const double of_tile = stage * (double)divide_up(stages, c->splits) + beside + (shared ? join : 0);
  return (double)divide_up(c->tiles, c->clusters) * of_tile;
}

/* What a plan says of its cut; `blocks` in a cluster. */
static void take_cut(bsh_int8_plan *const plan, const sm90_cut *const c, const int32_t blocks,
                     const uint32_t shared_bytes) {
  plan->form = c->form, plan->splits = c->splits;
  plan->m_tiles = (int32_t)c->m_tiles, plan->tiles = (int32_t)c->tiles;
  plan->product.shape = (bsh_cuda_launch_shape){.grid = {(uint32_t)(min_i64(c->tiles, c->clusters) * blocks), 1, 1},
                                                .block = {BSH_GEMM_INT8_SM90_THREADS, 1, 1},
                                                .cluster = (uint32_t)blocks,
                                                .shared_bytes = shared_bytes,
                                                .overlap = true};
}

/* Whether gemm_int8_sm90 finds outlier columns itself. */
static bool finds_columns(const bsh_int8_facts *const f, const sm90_cut *const c) {
  const bool can = f->outliers && c->splits == 1 && bsh_gemm_int8_sm90_finds(bsh_int8_forms[c->form].columns);
  return can && f->M <= BSH_INT8_FOUND_ROWS && f->K <= BSH_INT8_FOUND_K;
}

/* Nanoseconds, which order the forms as an H100 did at 32 sizes (benchmarks/results/int8_h100_202611.md), to 4 %: of a
 * stage of 128 of depth; of a tile beside them; of joining sums; where one of a cluster's blocks has no rows; where
 * quantize_int8 of the next product finds no room; of gathering columns of a W of N rows. Infinite for a cut that there
 * is not, and for clusters of three where they may not run at once. */
static double sm90_nanoseconds(const bsh_int8_facts *const f, const sm90_cut *const c) {
  static const double stage[FORMS] = {190, 185, 255, 240, 215, 280, 400, 385, 740};
  static const double beside[FORMS] = {1400, 1500, 1300, 1500, 1500, 3300, 2000, 1900, 2000};
  static const double join = 5500, half_empty = 6800, no_room = 6000, gather = 2600, gather_row = 0.6;
  enum { THREES = 32, MOST_BLOCKS = 105 }; /* on 132 multiprocessors */
  const bsh_int8_form *const s = &bsh_int8_forms[c->form];
  const int64_t stages = divide_up(f->K, BSH_GEMM_INT8_DEPTH), blocks = min_i64(c->tiles, c->clusters) * s->cluster;
  if (c->splits > 1 && (s->cluster > 1 || stages < 2 * c->splits)) return HUGE_VAL;
  if (s->cluster == 3 && c->tiles * 132 > THREES * f->sms) return HUGE_VAL;
  const bool full = bsh_gemm_int8_sm90_registers(s->columns) == BSH_GEMM_INT8_SM90_REGISTERS &&
                    blocks * c->splits * 132 > MOST_BLOCKS * f->sms;
  const double empty = divide_up(f->M, s->rows) % s->cluster != 0 ? half_empty : 0;
  const double gathered = f->outliers && !finds_columns(f, c) ? gather + gather_row * (double)f->N : 0;
  return nanoseconds(c, stages, stage[c->form], beside[c->form], join) + empty + (full ? no_room : 0) + gathered;
}

static sm90_cut best_sm90(const bsh_int8_facts *const f) {
  sm90_cut best = cut_sm90(f, 0, 1);
  for (int32_t form = 0; form < FORMS; form++)
    for (int32_t splits = 1; splits * bsh_int8_forms[form].cluster <= BSH_GEMV_CLUSTER; splits++) {
      const sm90_cut other = cut_sm90(f, form, splits);
      if (sm90_nanoseconds(f, &other) < sm90_nanoseconds(f, &best)) best = other;
    }
  return best;
}

static void plan_sm90(const bsh_int8_facts *const f, bsh_int8_plan *const plan) {
#define SM90_BF16(form, ...) KERNEL(gemm_int8_sm90, "gemm_int8_sm90_bf16_" #form),
#define SM90_F16(form, ...) KERNEL(gemm_int8_sm90, "gemm_int8_sm90_f16_" #form),
  static bsh_cuda_kernel kernels[2][FORMS] = {{BSH_GEMM_INT8_SM90_FORMS(SM90_BF16)},
                                              {BSH_GEMM_INT8_SM90_FORMS(SM90_F16)}};
  const sm90_cut best = best_sm90(f);
  const bsh_int8_form *const s = &bsh_int8_forms[best.form];
  const int32_t blocks = s->cluster * best.splits; /* of a cluster */
  plan->finds = finds_columns(f, &best);
  place_codes(f, plan);
  plan->at.partial = place(&plan->at, best.tiles * (best.splits - 1) * s->rows * s->columns * (int64_t)sizeof(int32_t));
  plan->product.kernel = &kernels[f->dtype == BSH_F16][best.form];
  take_cut(plan, &best, blocks, bsh_gemm_int8_sm90_shared_bytes(s->rows, s->columns, s->stages));
}

/* ---- x, or dy, as it is, in one pass over W ---- */

#define MIXED_TOKENS(form, tokens, stages) tokens,
#define MIXED_STAGES(form, tokens, stages) stages,
const int32_t bsh_mixed_int8_tokens[] = {BSH_MIXED_INT8_FORMS(MIXED_TOKENS)};
static const int32_t mixed_stages[] = {BSH_MIXED_INT8_FORMS(MIXED_STAGES)};
enum { MIXED_FORMS = 3, PAIR = 2 };

static sm90_cut cut_mixed(const bsh_int8_facts *const f, const int32_t form, const int32_t splits) {
  sm90_cut c = {.form = form, .splits = splits, .m_tiles = divide_up(f->M, bsh_mixed_int8_tokens[form])};
  c.tiles = c.m_tiles * divide_up(f->dgrad ? f->K : f->N, PAIR * BSH_MIXED_INT8_ROWS);
  c.clusters = bsh_gemv_clusters_at_once(f->sms, PAIR * splits);
  return c;
}

/* As sm90_nanoseconds: of a stage of 64 of depth. */
static double mixed_nanoseconds(const bsh_int8_facts *const f, const sm90_cut *const c) {
  static const double stage[2][MIXED_FORMS] = {{240, 350, 620}, {390, 495, 700}};
  static const double beside = 4000, join[MIXED_FORMS] = {4000, 4300, 7300};
  const int64_t stages = 2 * divide_up(f->dgrad ? f->N : f->K, 2 * BSH_MIXED_INT8_DEPTH);
  if (c->splits > 1 && stages < 4 * c->splits) return HUGE_VAL;
  return nanoseconds(c, stages, stage[f->dgrad][c->form], beside, join[c->form]);
}

static sm90_cut best_mixed(const bsh_int8_facts *const f) {
  sm90_cut best = cut_mixed(f, 0, 1);
  for (int32_t form = 0; form < MIXED_FORMS; form++)
    for (int32_t splits = 1; splits <= BSH_MIXED_INT8_SPLITS; splits++) {
      const sm90_cut other = cut_mixed(f, form, splits);
      if (mixed_nanoseconds(f, &other) < mixed_nanoseconds(f, &best)) best = other;
    }
  return best;
}

static void plan_mixed(const bsh_int8_facts *const f, bsh_int8_plan *const plan) {
#define MIXED_BF16(form, ...) KERNEL(mixed_int8_sm90, "mixed_int8_sm90_bf16_" #form),
#define MIXED_F16(form, ...) KERNEL(mixed_int8_sm90, "mixed_int8_sm90_f16_" #form),
#define DGRAD_BF16(form, ...) KERNEL(dgrad_int8_sm90, "dgrad_int8_sm90_bf16_" #form),
#define DGRAD_F16(form, ...) KERNEL(dgrad_int8_sm90, "dgrad_int8_sm90_f16_" #form),
  static bsh_cuda_kernel kernels[2][2][MIXED_FORMS] = {
      {{BSH_MIXED_INT8_FORMS(MIXED_BF16)}, {BSH_MIXED_INT8_FORMS(MIXED_F16)}},
      {{BSH_MIXED_INT8_FORMS(DGRAD_BF16)}, {BSH_MIXED_INT8_FORMS(DGRAD_F16)}}};
  const sm90_cut best = best_mixed(f);
  const int32_t tokens = bsh_mixed_int8_tokens[best.form], blocks = PAIR * best.splits;
  if (f->dgrad) plan->at.scales = place(&plan->at, bsh_dgrad_int8_pairs(f->N) * (int64_t)sizeof(bsh_int8_scale_pair));
  plan->product.kernel = &kernels[f->dgrad][f->dtype == BSH_F16][best.form];
  take_cut(plan, &best, blocks, bsh_mixed_int8_shared_bytes(tokens, mixed_stages[best.form]));
}

/* ---- the same of few rows ---- */

static void plan_gemv_dgrad(const bsh_int8_facts *const f, bsh_int8_plan *const plan) {
#define GEMV_DGRAD_BF16(form, ...) KERNEL(gemv_int8_dgrad, "gemv_int8_dgrad_bf16_" #form),
#define GEMV_DGRAD_F16(form, ...) KERNEL(gemv_int8_dgrad, "gemv_int8_dgrad_f16_" #form),
#define GEMV_DGRAD_SIZES(form, tiles, slots, blocks) {tiles, slots, blocks},
  static bsh_cuda_kernel kernels[2][3] = {{BSH_GEMV_DGRAD_FORMS(GEMV_DGRAD_BF16)},
                                          {BSH_GEMV_DGRAD_FORMS(GEMV_DGRAD_F16)}};
  static const int32_t sizes[][3] = {BSH_GEMV_DGRAD_FORMS(GEMV_DGRAD_SIZES)};
  const int form = f->M <= 8 ? 0 : f->M <= 16 ? 1 : 2;
  const int64_t tokens = 8 * sizes[form][0], groups = divide_up(f->M, tokens);
  const int64_t slabs = divide_up(f->K, BSH_GEMV_DGRAD_COLUMNS), at_once = f->sms * sizes[form][2];
  /* As many blocks as run at once, each with a piece of N for every warp. */
  const int64_t pieces = divide_up(f->N, 32 * BSH_GEMV_DGRAD_WARPS);
  int64_t splits = min_i64(at_once / (slabs * groups), min_i64(BSH_GEMV_CLUSTER, pieces));
  if (splits < 1) splits = 1;
  plan->splits = (int32_t)splits;
  plan->at.partial =
      splits == 1
          ? 0
          : place(&plan->at, groups * slabs * splits * tokens * BSH_GEMV_DGRAD_COLUMNS * (int64_t)sizeof(float));
  plan->product.kernel = &kernels[f->dtype == BSH_F16][form];
  plan->product.shape = (bsh_cuda_launch_shape){.grid = {(uint32_t)(slabs * splits), (uint32_t)groups, 1},
                                                .block = {BSH_GEMV_DGRAD_WARPS * BSH_WARP, 1, 1},
                                                .cluster = (uint32_t)splits,
                                                .shared_bytes = bsh_gemv_dgrad_shared_bytes(sizes[form][1]),
                                                .overlap = true};
}

/* ---- panels ---- */

static void plan_panels(const bsh_int8_facts *const f, bsh_int8_plan *const plan) {
  static const int64_t steps[] = {1024, 256, 64, 1};
  const int64_t column_bytes = f->N * dtype_size(f->dtype), most = f->workspace_bytes / column_bytes;
  plan->panel_columns = most >= f->K ? f->K : 1;
  for (int i = 0; i < 4 && most < f->K; i++)
    if (most >= steps[i]) {
      plan->panel_columns = most / steps[i] * steps[i];
      break;
    }
  plan->panel_bytes = place(&plan->at, plan->panel_columns * column_bytes);
  plan->panel_bytes = plan->at.bytes;
  const int64_t left = f->workspace_bytes - plan->panel_bytes;
  plan->vendor_bytes = left > 0 ? min_i64(left, BSH_CUBLAS_WORKSPACE) : 0;
  plan->at.bytes += plan->vendor_bytes;
}

/* ---- all ---- */

static bool too_large(const int64_t M, const int64_t N, const int64_t K) {
  return M > INT32_MAX / 2 || N > INT32_MAX / 2 || K > INT32_MAX / 2 ||
         (double)divide_up(M, BSH_GEMM_INT8_TILE / 2) * (double)divide_up(N, BSH_GEMM_INT8_TILE) > INT32_MAX;
}

static bsh_status cannot(const char *const op, const bsh_int8_facts *const f, const char *const what,
                         const char *const why) {
  return bsh_fail(BSH_NO_KERNEL, "%s: %s M = %" PRId64 ", N = %" PRId64 ", K = %" PRId64 " on sm_%d: %s", op, what,
                  f->M, f->N, f->K, (int)f->sm, why);
}

bsh_status bsh_plan_linear_int8(const char *const op, const bsh_int8_facts *const f, bsh_int8_plan *const plan) {
  if (too_large(f->M, f->N, f->K)) return cannot(op, f, "nothing multiplies", "too large for 32-bit indices");
  *plan = (bsh_int8_plan){.kernel = choose(f)};
  const char *const why = refuses(plan->kernel, f);
  if (why != NULL) return cannot(op, f, "the kernel that was forced cannot multiply", why);
  switch (plan->kernel) {
  case BSH_INT8_gemv_int8:
    plan_gemv(f, plan);
    break;
  case BSH_INT8_gemm_int8:
    plan_gemm(f, plan);
    break;
  case BSH_INT8_gemm_int8_sm90:
    plan_sm90(f, plan);
    break;
  case BSH_INT8_gemv_int8_dgrad:
    plan_gemv_dgrad(f, plan);
    break;
  case BSH_INT8_mixed_int8_sm90:
  case BSH_INT8_dgrad_int8_sm90:
    plan_mixed(f, plan);
    break;
  case BSH_INT8_panels:
    plan_panels(f, plan);
    break;
  default:
    plan_any(f, plan);
  }
  return BSH_OK;
}

bsh_status bsh_plan_product_int8(const char *const op, const int64_t M, const int64_t N, const int64_t K,
                                 const int32_t arch, bsh_int8_plan *const plan) {
  static bsh_cuda_kernel kernel = KERNEL(gemm_int8, "gemm_int8_i32");
  const bsh_int8_facts sizes = {.M = M, .N = N, .K = K, .sm = arch};
  if (too_large(M, N, K)) return cannot(op, &sizes, "nothing multiplies", "too large for 32-bit indices");
  *plan = (bsh_int8_plan){.kernel = BSH_INT8_gemm_int8};
  cut_gemm(&kernel, M, N, arch, plan);
  return BSH_OK;
}

/* ---- forced kernels ---- */

static _Atomic(int) forced_kernels[2] = {BSH_INT8_COUNT, BSH_INT8_COUNT};

bsh_status bsh_int8_kernel_of(const char *const name, bsh_int8_kernel *const kernel) {
  for (int i = 0; i < BSH_INT8_COUNT; i++)
    if (strcmp(names[i], name) == 0) {
      *kernel = (bsh_int8_kernel)i;
      return BSH_OK;
    }
  return bsh_fail(BSH_BAD_VALUE,
                  "no kernel '%s': expected gemv_int8, any, mixed_int8_sm90, gemm_int8, gemm_int8_sm90, "
                  "dgrad_int8_sm90, gemv_int8_dgrad or panels",
                  name);
}

bsh_status bsh_force_int8_kernel(const bool dgrad, const char *const name) {
  bsh_int8_kernel kernel = BSH_INT8_COUNT;
  if (name != NULL) BSH_TRY(bsh_int8_kernel_of(name, &kernel));
  atomic_store_explicit(&forced_kernels[dgrad], (int)kernel, memory_order_relaxed);
  return BSH_OK;
}

bsh_int8_kernel bsh_forced_int8_kernel(const bool dgrad) {
  return (bsh_int8_kernel)atomic_load_explicit(&forced_kernels[dgrad], memory_order_relaxed);
}

bsh_status bsh_read_forced_int8(void) {
  const char *const forward = getenv("BITSHARD_LINEAR_INT8"), *const dgrad = getenv("BITSHARD_LINEAR_INT8_DGRAD");
  if (forward != NULL) BSH_TRY(bsh_force_int8_kernel(false, forward));
  return dgrad != NULL ? bsh_force_int8_kernel(true, dgrad) : BSH_OK;
}
