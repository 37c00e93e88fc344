/* cpu/linear.c - linear_4bit and its input gradient on the CPU: threads, panels, workspace.
 *
 * Small M: every thread decodes its own rows (forward) or columns (gradient) of W and multiplies at once.
 * Large M: W is decoded panel by panel into a bounded workspace and multiplied by the vendor GEMM, rows of x a chunk at
 * a time, so that the workspace does not grow with M, N or K:
 *
 *   forward   y[m, panel] = x[m, :] W[panel, :]^T     panel: rows of W, [rows, K]
 *   gradient  dx[m, panel] = dy[m, :] W[:, panel]     panel: columns of W, [N, columns]; no accumulation over panels
 *
 * A thread decodes a panel and multiplies it itself (the GEMM, called by a worker, stays on that thread): the panel is
 * read from the cache of the core that wrote it, twice as fast as from another core's, and no sum depends on the number
 * of threads. Panels are fp32, unless this CPU multiplies bf16 faster and x is bf16. Workspace: at most CHUNK_BYTES for
 * converted rows of x, and for each of at most WORKERS threads PANEL_BYTES for a panel and half of that for a tile of
 * the result: 60 MiB in all, while a panel of PANEL_STEP fits (inner sizes up to 32,768). */
#include <stdlib.h>
#include <string.h>

#include "core/numerics.h"
#include "cpu/cpu.h"

enum { PANEL_BYTES = 2 << 20, CHUNK_BYTES = 12 << 20, WORKERS = 16, MIN_PANEL = 64, PANEL_STEP = 16 };

/* ---- small M -------------------------------------------------------------------------------------------------- */

enum { SMALL_STEP = 64 }; /* columns a thread owns come in groups of this many */

/* Rows of W forward, groups of SMALL_STEP columns for the gradient. */
int64_t bsh_cpu_small_units(const bsh_product_args *const args) {
  return args->direction == BSH_FORWARD ? args->N : divide_up(args->K, SMALL_STEP);
}

/* At least 2^16 multiplications. */
int64_t bsh_cpu_small_grain(const bsh_product_args *const args, const int64_t M) {
  return divide_up(1 << 16, M * (args->direction == BSH_FORWARD ? args->K : args->N * SMALL_STEP) + 1);
}

void bsh_cpu_multiply_small(const bsh_product_args *const args, const int64_t begin, const int64_t end) {
  if (args->direction == BSH_FORWARD) bsh_cpu()->linear_4bit(args, begin, end);
  else bsh_cpu()->linear_4bit_dgrad(args, begin * SMALL_STEP, min_i64(end * SMALL_STEP, args->K));
}

static void multiply_small(const int64_t begin, const int64_t end, void *const ctx) {
  bsh_cpu_multiply_small(ctx, begin, end);
}

/* ---- large M -------------------------------------------------------------------------------------------------- */

/* One product out[M, outer] = in[M, inner] W', W' decoded by panels of the `outer` dimension. */
typedef struct {
  const bsh_weight *weight;
  const bsh_cpu_gemm *gemm;
  const void *in, *bias;
  void *out;
  int64_t M, inner, outer, ld_in, ld_out, K;
  bsh_dtype dtype, compute; /* of in and out; of the panel */
  bool by_rows;             /* the panel holds rows of W (forward), not columns (gradient) */

  int64_t chunk_M, panel_outer, n_panels; /* sizes of a step */
  float *in_f32;                          /* [chunk_M, inner], where compute differs from dtype */
  int64_t m0, m_n;                        /* the chunk at hand */
  int status;                             /* first failure of a worker; a bsh_status */
} product;

/* What one worker owns: a decoded panel, and the fp32 tile of the result where that is converted afterwards. */
typedef struct {
  void *panel;
  float *tile;
} workspace;

/* Steps of equal length: multiples of PANEL_STEP, where there is room of two, which are whole blocks of MXFP4 and
 * NVFP4; none above `most` unless that is less than PANEL_STEP. */
static int64_t equal_step(const int64_t total, const int64_t most) {
  const int64_t unit = most < 2 * PANEL_STEP ? PANEL_STEP : 2 * PANEL_STEP;
  const int64_t limit = most < unit ? unit : most / unit * unit;
  const int64_t step = divide_up(total, divide_up(total, limit));
  return min_i64(total, divide_up(step, unit) * unit);
}

static bool converts(const product *const p) { return p->compute != p->dtype; }

static void choose_steps(product *const p) {
  const int64_t size = dtype_size(p->compute);
  const int64_t share = divide_up(p->outer, WORKERS); /* enough panels for many threads, wide enough for the GEMM */
  p->panel_outer =
      equal_step(p->outer, min_i64(PANEL_BYTES / (size * p->inner), share < MIN_PANEL ? MIN_PANEL : share));
  p->n_panels = divide_up(p->outer, p->panel_outer);
  p->chunk_M = p->M;
  if (!converts(p)) return;
  const int64_t in_rows = CHUNK_BYTES / (size * p->inner), tile_rows = PANEL_BYTES / 2 / (size * p->panel_outer);
  p->chunk_M = equal_step(p->M, min_i64(in_rows, tile_rows));
}

static void convert_in_rows(const int64_t begin, const int64_t end, void *const ctx) {
  const product *const p = ctx;
  for (int64_t m = begin; m < end; m++)
    bsh_cpu()->to_f32((const char *)p->in + (p->m0 + m) * p->ld_in * dtype_size(p->dtype), p->dtype,
                      p->in_f32 + m * p->inner, p->inner);
}

static void decode_panel(const product *const p, const int64_t outer0, const int64_t outer_n, void *const panel) {
  const int64_t columns = p->by_rows ? p->inner : outer_n, first = p->by_rows ? outer0 * p->K : outer0;
  bsh_cpu()->decode_4bit(&(bsh_decode_run){
      .weight = p->weight,
      .out = panel,
      .begin = first,
      .end = first + columns,
      .rows = p->by_rows ? outer_n : p->inner,
      .step = p->K,
      .dtype = p->dtype,
      .as_f32 = converts(p),
  });
}

static bsh_status plain_mm(const bsh_dtype dtype, const bool add, void *const c, const int64_t ldc, const void *const a,
                           const int64_t lda, const void *const b, const int64_t ldb_row, const int64_t ldb_col,
                           const int64_t m, const int64_t n, const int64_t k) {
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = 0; j < n; j++) {
      float sum = add ? load_f32(c, dtype, i * ldc + j) : 0;
      for (int64_t l = 0; l < k; l++)
        sum += load_f32(a, dtype, i * lda + l) * load_f32(b, dtype, l * ldb_row + j * ldb_col);
      store_f32(c, dtype, i * ldc + j, sum);
    }
  return BSH_OK;
}

static bsh_status multiply_panel(const product *const p, const int64_t outer0, const int64_t outer_n,
                                 const workspace *const own) {
  const int64_t size = dtype_size(p->dtype);
  const void *const a = converts(p) ? (const void *)p->in_f32 : (const char *)p->in + p->m0 * p->ld_in * size;
  const int64_t lda = converts(p) ? p->inner : p->ld_in;
  void *const c = converts(p) ? (void *)own->tile : (char *)p->out + (p->m0 * p->ld_out + outer0) * size;
  const int64_t ldc = converts(p) ? outer_n : p->ld_out;
  const int64_t ldb_row = p->by_rows ? 1 : outer_n, ldb_col = p->by_rows ? p->inner : 1;
  const bool add = p->bias && !converts(p);
  if (!p->gemm)
    return plain_mm(p->compute, add, c, ldc, a, lda, own->panel, ldb_row, ldb_col, p->m_n, outer_n, p->inner);
  return p->gemm->mm(p->gemm->ctx, p->compute, add, c, ldc, a, lda, own->panel, ldb_row, ldb_col, p->m_n, outer_n,
                     p->inner);
}

/* Where the GEMM writes the result itself, it adds to the bias: a sum with a rounded product would be rounded twice. */
static void start_panel(const product *const p, const int64_t outer0, const int64_t outer_n) {
  const int64_t size = dtype_size(p->dtype);
  if (!p->bias || converts(p)) return;
  for (int64_t m = p->m0; m < p->m0 + p->m_n; m++)
    memcpy((char *)p->out + (m * p->ld_out + outer0) * size, (const char *)p->bias + outer0 * size,
           (size_t)(outer_n * size));
}

/* Bias and rounding of an fp32 tile. */
static void finish_panel(const product *const p, const int64_t outer0, const int64_t outer_n, float *tile) {
  if (!converts(p)) return;
  for (int64_t m = p->m0; m < p->m0 + p->m_n; m++) {
    const int64_t first = m * p->ld_out + outer0;
    for (int64_t j = 0; p->bias && j < outer_n; j++) tile[j] += load_f32(p->bias, p->dtype, outer0 + j);
    bsh_cpu()->from_f32(tile, p->dtype, (char *)p->out + first * dtype_size(p->dtype), outer_n);
    tile += outer_n;
  }
}

/* Where a panel begins; at n_panels, where the last one ends. None but an only one is a single column: torch 2.10
 * stores a bf16 result of one column without regard to the distance of its rows. */
static int64_t panel_begin(const product *const p, const int64_t panel) {
  const int64_t first = panel * p->panel_outer;
  return panel > 0 && first == p->outer - 1 ? first - 1 : min_i64(first, p->outer);
}

static bsh_status run_panels(const product *const p, const int64_t begin, const int64_t end,
                             const workspace *const own) {
  for (int64_t panel = begin; panel < end; panel++) {
    const int64_t outer0 = panel_begin(p, panel), outer_n = panel_begin(p, panel + 1) - outer0;
    decode_panel(p, outer0, outer_n, own->panel);
    start_panel(p, outer0, outer_n);
    BSH_TRY(multiply_panel(p, outer0, outer_n, own));
    finish_panel(p, outer0, outer_n, own->tile);
  }
  return BSH_OK;
}

/* Shares [begin, end) of `WORKERS` equal shares of the panels. */
static void run_worker(const int64_t begin, const int64_t end, void *const ctx) {
  product *const p = ctx;
  const int64_t size = dtype_size(p->compute);
  const workspace own = {
      .panel = bsh_cpu_memory(p->panel_outer * p->inner * size),
      .tile = converts(p) ? bsh_cpu_memory(p->chunk_M * p->panel_outer * size) : NULL,
  };
  bsh_status status = BSH_OUT_OF_MEMORY;
  if (own.panel && (own.tile || !converts(p)))
    status = run_panels(p, begin * p->n_panels / WORKERS, end * p->n_panels / WORKERS, &own);
  free(own.panel);
  free(own.tile);
  int none = BSH_OK;
  if (status != BSH_OK)
    __atomic_compare_exchange_n(&p->status, &none, status, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

/* Messages are kept per thread: the caller's thread repeats what a worker met. */
static bsh_status worker_status(const product *const p) {
  if (p->status == BSH_OK) return BSH_OK;
  if (p->status == BSH_OUT_OF_MEMORY)
    return bsh_no_memory("linear_4bit", "a panel of W", BSH_DEVICE_CPU,
                         (double)p->panel_outer * (double)(p->inner + p->chunk_M) * (double)dtype_size(p->compute));
  return bsh_fail((bsh_status)p->status, "linear_4bit: torch's matrix product of a panel failed");
}

static bsh_status run_product(product *const p) {
  p->compute = p->dtype == BSH_BF16 && bsh_cpu_fast_bf16() ? BSH_BF16 : BSH_F32;
  choose_steps(p);
  if (converts(p)) {
    p->in_f32 = bsh_cpu_memory(p->chunk_M * p->inner * (int64_t)sizeof(float));
    if (!p->in_f32)
      return bsh_no_memory("linear_4bit", "rows of x in float32", BSH_DEVICE_CPU,
                           (double)p->chunk_M * (double)p->inner * (double)sizeof(float));
  }
  for (p->m0 = 0; p->m0 < p->M && p->status == BSH_OK; p->m0 += p->chunk_M) {
    p->m_n = min_i64(p->chunk_M, p->M - p->m0);
    if (converts(p)) bsh_parallel_for(0, p->m_n, 1, convert_in_rows, p);
    bsh_parallel_for(0, WORKERS, 1, run_worker, p);
  }
  free(p->in_f32);
  return worker_status(p);
}

/* An empty inner sum: y = bias, or zero. */
static void fill_with_bias(const bsh_product_args *const args, const int64_t columns) {
  for (int64_t i = 0; i < args->M; i++)
    for (int64_t j = 0; j < columns; j++)
      store_f32(args->y, args->dtype, i * args->ldy + j, args->bias ? load_f32(args->bias, args->dtype, j) : 0.0f);
}

/* ---- the op --------------------------------------------------------------------------------------------------- */

bsh_status bsh_cpu_linear_4bit(const bsh_product_args *const args, const bsh_cpu_gemm *const gemm) {
  const bool forward = args->direction == BSH_FORWARD;
  const int64_t M = args->M, inner = forward ? args->K : args->N, outer = forward ? args->N : args->K;
  if (inner == 0) fill_with_bias(args, outer);
  if (M == 0 || inner == 0 || outer == 0) return BSH_OK;
  if (M <= BSH_CPU_SMALL_M) {
    bsh_product_args copy = *args;
    bsh_parallel_for(0, bsh_cpu_small_units(args), bsh_cpu_small_grain(args, M), multiply_small, &copy);
    return BSH_OK;
  }
  return run_product(&(product){
      .weight = &args->weight,
      .gemm = gemm,
      .in = args->x,
      .bias = args->bias,
      .out = args->y,
      .M = M,
      .inner = inner,
      .outer = outer,
      .ld_in = args->ldx,
      .ld_out = args->ldy,
      .K = args->K,
      .dtype = args->dtype,
      .by_rows = forward,
  });
}
