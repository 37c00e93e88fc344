/* cpu_linear.c - linear_4bit and its input gradient on the CPU: threads, panels, workspace.
 *
 * Small M: every thread decodes its own rows (forward) or columns (gradient) of W and multiplies at once.
 * Large M: W is decoded panel by panel into a bounded workspace and multiplied by the vendor GEMM, rows of x a chunk at
 * a time, so that the workspace does not grow with M, N or K:
 *
 *   forward   y[m, panel] = x[m, :] W[panel, :]^T     panel: rows of W, [rows, K]
 *   gradient  dx[m, panel] = dy[m, :] W[:, panel]     panel: columns of W, [N, columns]; no accumulation over panels
 *
 * Workspace: panel and x chunk at most PANEL_BYTES and CHUNK_BYTES, one result tile below that. All of it is fp32,
 * unless this CPU multiplies 16-bit floats faster. */
#include <stdlib.h>

#include "cpu.h"
#include "cpu_numerics.h"

enum { PANEL_BYTES = 8 << 20, CHUNK_BYTES = 16 << 20, PANEL_STEP = 16 };

/* ---- small M -------------------------------------------------------------------------------------------------- */

enum { SMALL_STEP = 64 }; /* columns a thread owns come in groups of this many */

static void linear_rows(const int64_t begin, const int64_t end, void *const ctx) {
  bsh_cpu()->linear_4bit(ctx, begin, end);
}

static void dgrad_columns(const int64_t begin, const int64_t end, void *const ctx) {
  const bsh_linear_4bit_dgrad_args *const args = ctx;
  bsh_cpu()->linear_4bit_dgrad(args, begin * SMALL_STEP, min_i64(end * SMALL_STEP, args->K));
}

/* Units of `work` multiplications each that make a task worth a thread. */
static int64_t small_grain(const int64_t work) { return divide_up(1 << 16, work + 1); }

/* ---- large M: the workspace ----------------------------------------------------------------------------------- */

/* One product out[M, outer] = in[M, inner] W', W' decoded by panels of the `outer` dimension. */
typedef struct {
  const bsh_weight *weight;
  const bsh_cpu_gemm *gemm;
  const void *in, *bias;
  void *out;
  int64_t M, inner, outer, ld_in, ld_out, K;
  bsh_dtype dtype, compute; /* of in and out; of the panel */
  bool transposed;          /* the panel holds rows of W (forward), not columns (gradient) */

  int64_t chunk_M, panel_outer; /* sizes of a step */
  void *panel, *in_compute;
  float *out_compute; /* the last two are unused where compute == dtype */

  int64_t m0, m_n, outer0, outer_n; /* the step at hand */
} product;

/* Rows of x per chunk and outer elements per panel: equal steps below the byte limits. */
static int64_t equal_step(const int64_t total, const int64_t most) {
  const int64_t limit = most < PANEL_STEP ? PANEL_STEP : most / PANEL_STEP * PANEL_STEP;
  const int64_t step = divide_up(total, divide_up(total, limit));
  return min_i64(total, divide_up(step, PANEL_STEP) * PANEL_STEP);
}

static void free_workspace(product *const p) {
  free(p->panel);
  free(p->in_compute);
  free(p->out_compute);
}

static void *allocate_aligned(const int64_t n_bytes) { return aligned_alloc(64, (size_t)((n_bytes + 63) / 64 * 64)); }

static bsh_status allocate_workspace(product *const p) {
  const int64_t size = dtype_size(p->compute);
  p->panel_outer = equal_step(p->outer, PANEL_BYTES / (size * p->inner));
  p->chunk_M = equal_step(p->M, CHUNK_BYTES / (size * (p->inner + p->panel_outer)));
  p->panel = allocate_aligned(p->panel_outer * p->inner * size);
  if (p->compute != p->dtype) {
    p->in_compute = allocate_aligned(p->chunk_M * p->inner * size);
    p->out_compute = allocate_aligned(p->chunk_M * p->panel_outer * size);
  }
  if (p->panel && (p->compute == p->dtype || (p->in_compute && p->out_compute))) return BSH_OK;
  free_workspace(p);
  return bsh_fail(BSH_OUT_OF_MEMORY, "linear_4bit: no memory for a panel of %lld bytes",
                  (long long)(p->panel_outer * p->inner * size));
}

/* ---- large M: the stages of a step ---------------------------------------------------------------------------- */

static void convert_in_rows(const int64_t begin, const int64_t end, void *const ctx) {
  const product *const p = ctx;
  for (int64_t m = begin; m < end; m++)
    bsh_cpu()->to_f32((const char *)p->in + (p->m0 + m) * p->ld_in * dtype_size(p->dtype), p->dtype,
                      (float *)p->in_compute + m * p->inner, p->inner);
}

static void decode_panel_rows(const int64_t begin, const int64_t end, void *const ctx) {
  const product *const p = ctx;
  const int64_t columns = p->transposed ? p->inner : p->outer_n;
  for (int64_t row = begin; row < end; row++) {
    const int64_t first = p->transposed ? (p->outer0 + row) * p->K : row * p->K + p->outer0;
    bsh_cpu()->decode_4bit(&(bsh_decode_run){
        .weight = p->weight,
        .out = (char *)p->panel + row * columns * dtype_size(p->compute),
        .begin = first,
        .end = first + columns,
        .dtype = p->dtype,
        .wide = p->compute != p->dtype,
    });
  }
}

/* Bias of rows of `out` that the GEMM wrote in their final dtype. */
static void add_bias_rows(const int64_t begin, const int64_t end, void *const ctx) {
  const product *const p = ctx;
  for (int64_t m = begin; m < end; m++) {
    const int64_t first = (p->m0 + m) * p->ld_out + p->outer0;
    for (int64_t j = 0; j < p->outer_n; j++)
      store_f32(p->out, p->dtype, first + j,
                load_f32(p->out, p->dtype, first + j) + load_f32(p->bias, p->dtype, p->outer0 + j));
  }
}

/* Bias and rounding of one fp32 tile. */
static void finish_out_rows(const int64_t begin, const int64_t end, void *const ctx) {
  const product *const p = ctx;
  for (int64_t m = begin; m < end; m++) {
    float *const tile = p->out_compute + m * p->outer_n;
    const int64_t first = (p->m0 + m) * p->ld_out + p->outer0;
    for (int64_t j = 0; p->bias && j < p->outer_n; j++) tile[j] += load_f32(p->bias, p->dtype, p->outer0 + j);
    bsh_cpu()->from_f32(tile, p->dtype, (char *)p->out + first * dtype_size(p->dtype), p->outer_n);
  }
}

static bsh_status plain_mm(const bsh_dtype dtype, void *const c, const int64_t ldc, const void *const a,
                           const int64_t lda, const void *const b, const int64_t ldb_row, const int64_t ldb_col,
                           const int64_t m, const int64_t n, const int64_t k) {
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = 0; j < n; j++) {
      float sum = 0;
      for (int64_t l = 0; l < k; l++)
        sum += load_f32(a, dtype, i * lda + l) * load_f32(b, dtype, l * ldb_row + j * ldb_col);
      store_f32(c, dtype, i * ldc + j, sum);
    }
  return BSH_OK;
}

static bsh_status multiply_panel(const product *const p) {
  const bool converted = p->compute != p->dtype;
  const int64_t size = dtype_size(p->dtype);
  const void *const a = converted ? p->in_compute : (const char *)p->in + p->m0 * p->ld_in * size;
  const int64_t lda = converted ? p->inner : p->ld_in;
  void *const c = converted ? (char *)p->out_compute : (char *)p->out + (p->m0 * p->ld_out + p->outer0) * size;
  const int64_t ldc = converted ? p->outer_n : p->ld_out;
  const int64_t ldb_row = p->transposed ? 1 : p->outer_n, ldb_col = p->transposed ? p->inner : 1;
  if (!p->gemm) return plain_mm(p->compute, c, ldc, a, lda, p->panel, ldb_row, ldb_col, p->m_n, p->outer_n, p->inner);
  return p->gemm->mm(p->gemm->ctx, p->compute, c, ldc, a, lda, p->panel, ldb_row, ldb_col, p->m_n, p->outer_n,
                     p->inner);
}

static bsh_status run_steps(product *const p) {
  for (p->m0 = 0; p->m0 < p->M; p->m0 += p->chunk_M) {
    p->m_n = min_i64(p->chunk_M, p->M - p->m0);
    if (p->compute != p->dtype) bsh_parallel_for(0, p->m_n, 1, convert_in_rows, p);
    for (p->outer0 = 0; p->outer0 < p->outer; p->outer0 += p->panel_outer) {
      p->outer_n = min_i64(p->panel_outer, p->outer - p->outer0);
      bsh_parallel_for(0, p->transposed ? p->outer_n : p->inner, 8, decode_panel_rows, p);
      BSH_TRY(multiply_panel(p));
      if (p->compute != p->dtype) bsh_parallel_for(0, p->m_n, 1, finish_out_rows, p);
      else if (p->bias) bsh_parallel_for(0, p->m_n, 1, add_bias_rows, p);
    }
  }
  return BSH_OK;
}

static bsh_status run_product(product *const p) {
  p->compute = p->dtype == BSH_BF16 && bsh_cpu_fast_bf16() ? BSH_BF16 : BSH_F32;
  BSH_TRY(allocate_workspace(p));
  const bsh_status status = run_steps(p);
  free_workspace(p);
  return status;
}

/* An empty inner sum: y = bias, or zero. */
static void fill_with_bias(void *const out, const void *const bias, const bsh_dtype dtype, const int64_t rows,
                           const int64_t columns, const int64_t ld) {
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < columns; j++) store_f32(out, dtype, i * ld + j, bias ? load_f32(bias, dtype, j) : 0.0f);
}

/* ---- the ops -------------------------------------------------------------------------------------------------- */

bsh_status bsh_cpu_linear_4bit(const bsh_linear_4bit_args *const args, const bsh_cpu_gemm *const gemm) {
  bsh_linear_4bit_args copy = *args;
  if (args->K == 0) fill_with_bias(args->y, args->bias, args->dtype, args->M, args->N, args->ldy);
  if (args->M == 0 || args->N == 0 || args->K == 0) return BSH_OK;
  if (args->M <= BSH_CPU_SMALL_M) {
    bsh_parallel_for(0, args->N, small_grain(args->M * args->K), linear_rows, &copy);
    return BSH_OK;
  }
  return run_product(&(product){
      .weight = &args->weight,
      .gemm = gemm,
      .in = args->x,
      .bias = args->bias,
      .out = args->y,
      .M = args->M,
      .inner = args->K,
      .outer = args->N,
      .ld_in = args->ldx,
      .ld_out = args->ldy,
      .K = args->K,
      .dtype = args->dtype,
      .transposed = true,
  });
}

bsh_status bsh_cpu_linear_4bit_dgrad(const bsh_linear_4bit_dgrad_args *const args, const bsh_cpu_gemm *const gemm) {
  bsh_linear_4bit_dgrad_args copy = *args;
  if (args->N == 0) fill_with_bias(args->dx, NULL, args->dtype, args->M, args->K, args->lddx);
  if (args->M == 0 || args->N == 0 || args->K == 0) return BSH_OK;
  if (args->M <= BSH_CPU_SMALL_M) {
    bsh_parallel_for(0, divide_up(args->K, SMALL_STEP), small_grain(args->M * args->N * SMALL_STEP), dgrad_columns,
                     &copy);
    return BSH_OK;
  }
  return run_product(&(product){
      .weight = &args->weight,
      .gemm = gemm,
      .in = args->dy,
      .out = args->dx,
      .M = args->M,
      .inner = args->N,
      .outer = args->K,
      .ld_in = args->lddy,
      .ld_out = args->lddx,
      .K = args->K,
      .dtype = args->dtype,
  });
}
