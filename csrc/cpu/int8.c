/* cpu/int8.c - the int8 ops on the CPU: threads, tiles, workspace.
 *
 * A layer of many rows, y = x W^T + bias:
 *
 *   all rows       absmax of each row, and the columns that have an outlier in any row
 *   a chunk of x   int8 codes [rows, K], zero in those columns, and x in those columns as fp32
 *   a tile of y    int32 sums [TILE_M, TILE_N] of codes, scaled; plus fp32 products of the outlier columns with W
 *                  dequantized; rounded once
 *
 * Threads share the chunk and take panels of at most TILE_N rows of W. Workspace: CHUNK_BYTES of codes, the outlier
 * columns of a chunk and of a panel of each thread, and the tile. */
#include "cpu/int8.h"

#include <stdlib.h>
#include <string.h>

#include "core/numerics.h"
#include "cpu/cpu.h"

enum { CHUNK_BYTES = 16 << 20, TILE_M = 384, TILE_N = BSH_INT8_PANEL, SMALL_STEP = 64, RUN = 16384 };

const bsh_cpu_int8_kernels *bsh_cpu_int8(void) {
  const bsh_cpu_int8_kernels *const found = bsh_cpu()->int8;
#if BSH_X86_64
  if (found == bsh_cpu_avx512.int8 && bsh_cpu_has()->avx512vnni) return &bsh_cpu_avx512_vnni_int8;
  if (found == bsh_cpu_avx2.int8 && bsh_cpu_has()->avxvnni) return &bsh_cpu_avx_vnni_int8;
#elif BSH_AARCH64
  if (found == bsh_cpu_neon.int8 && bsh_cpu_has()->i8mm) return &bsh_cpu_neon_i8mm_int8;
  if (found == bsh_cpu_neon.int8 && bsh_cpu_has()->dotprod) return &bsh_cpu_neon_dot_int8;
#endif
  return found;
}

static const bsh_cpu_int8_kernels *kernels(void) { return bsh_cpu_int8(); }

static bsh_status no_workspace(const char *const op, const int64_t n_bytes) {
  return bsh_no_memory(op, "a workspace", BSH_DEVICE_CPU, (double)n_bytes);
}

static const void *row_of(const void *const x, const bsh_dtype dtype, const int64_t ld, const int64_t row) {
  return (const char *)x + row * ld * dtype_size(dtype);
}

/* ---- quantize ------------------------------------------------------------------------------------------------- */

static void quantize_rows(const int64_t begin, const int64_t end, void *const ctx) {
  const bsh_quantize_int8_args *const args = ctx;
  for (int64_t m = begin; m < end; m++) {
    const void *const x = row_of(args->x, args->dtype, args->ldx, m);
    const float absmax = kernels()->absmax(x, args->dtype, args->K, args->threshold, args->outliers);
    args->absmax[m] = absmax;
    kernels()->encode(x, args->dtype, args->K, int8_scale(absmax, args->dtype), args->threshold,
                      args->codes + m * args->K);
  }
}

bsh_status bsh_cpu_quantize_int8(const bsh_quantize_int8_args *const args) {
  bsh_quantize_int8_args copy = *args;
  if (args->outliers != NULL) memset(args->outliers, 0, (size_t)args->K);
  bsh_parallel_for(0, args->M, divide_up(RUN, args->K), quantize_rows, &copy);
  for (int64_t k = 0; args->M > 1 && args->outliers != NULL && k < args->K; k++)
    for (int64_t m = 0; args->outliers[k] && m < args->M; m++) args->codes[m * args->K + k] = 0;
  return BSH_OK;
}

/* ---- dequantize ----------------------------------------------------------------------------------------------- */

static void dequantize_rows(const int64_t begin, const int64_t end, void *const ctx) {
  const bsh_dequantize_int8_args *const args = ctx;
  for (int64_t n = begin; n < end; n++)
    kernels()->decode(args->codes + n * args->K, args->absmax[n], args->K, args->dtype,
                      (char *)args->y + n * args->K * dtype_size(args->dtype));
}

bsh_status bsh_cpu_dequantize_int8(const bsh_dequantize_int8_args *const args) {
  bsh_dequantize_int8_args copy = *args;
  bsh_parallel_for(0, args->N, divide_up(RUN, args->K), dequantize_rows, &copy);
  return BSH_OK;
}

/* ---- products ------------------------------------------------------------------------------------------------- */

typedef struct {
  const bsh_product_int8_args *args;
  bool out_of_memory;
} plain_product;

int64_t bsh_cpu_int8_panel(const int64_t N) {
  const int64_t share = divide_up(divide_up(N, 16), 4) * 4;
  return min_i64(share < 32 ? 32 : share, TILE_N);
}

static int64_t panel_rows(const int64_t N) { return bsh_cpu_int8_panel(N); }

/* Panels [begin, end). */
static void multiply_panels(const int64_t begin, const int64_t end, void *const ctx) {
  plain_product *const p = ctx;
  void *const scratch = bsh_cpu_memory_of_thread(BSH_INT8_SCRATCH, &p->out_of_memory);
  if (scratch == NULL) return;
  const int64_t N = p->args->N, rows = panel_rows(N);
  for (int64_t n = begin * rows; n < min_i64(end * rows, N); n += rows) {
    bsh_product_int8_args panel = *p->args;
    panel.b += n * panel.K;
    panel.sums += n;
    panel.N = min_i64(rows, N - n);
    kernels()->product(&panel, N, scratch);
  }
  free(scratch);
}

/* Panels that are worth a thread. */
static int64_t panel_grain(const int64_t M, const int64_t N, const int64_t K) {
  return divide_up(1 << 18, M * K * panel_rows(N));
}

bsh_status bsh_cpu_product_int8(const bsh_product_int8_args *const args) {
  plain_product p = {.args = args};
  bsh_parallel_for(0, divide_up(args->N, panel_rows(args->N)), panel_grain(args->M, args->N, args->K), multiply_panels,
                   &p);
  return p.out_of_memory ? no_workspace("product_int8", BSH_INT8_SCRATCH) : BSH_OK;
}

static void scale_rows(const int64_t begin, const int64_t end, void *const ctx) {
  const bsh_scale_product_int8_args *const args = ctx;
  for (int64_t m = begin; m < end; m++)
    kernels()->scale(args->sums + m * args->N, args->row_absmax[m], args->col_absmax, args->bias, NULL, args->N,
                     args->dtype, (char *)args->y + m * args->N * dtype_size(args->dtype));
}

bsh_status bsh_cpu_scale_product_int8(const bsh_scale_product_int8_args *const args) {
  bsh_scale_product_int8_args copy = *args;
  bsh_parallel_for(0, args->M, divide_up(RUN, args->N), scale_rows, &copy);
  return BSH_OK;
}

/* ---- a layer: few rows ---------------------------------------------------------------------------------------- */

static void multiply_small(const int64_t begin, const int64_t end, void *const ctx) {
  kernels()->linear(ctx, begin, end);
}

static void multiply_small_dgrad(const int64_t begin, const int64_t end, void *const ctx) {
  const bsh_product_args *const args = ctx;
  kernels()->linear_dgrad(args, begin * SMALL_STEP, min_i64(end * SMALL_STEP, args->K));
}

/* Rows or groups of columns that are worth a thread. */
static int64_t small_grain(const int64_t products) { return divide_up(1 << 16, products + 1); }

/* ---- a layer: many rows --------------------------------------------------------------------------------------- */

typedef struct {
  const bsh_product_args *args;
  float *absmax;     /* [M] of rows of x */
  uint8_t *outliers; /* [K], NULL where there is no threshold */
  int64_t *columns;  /* [n_columns]: the outlier columns */
  int8_t *codes;     /* [chunk, K] */
  float *x;          /* [chunk, n_columns] */
  int64_t n_columns, chunk;
  int64_t m0, m_n; /* the chunk at hand */
  bool out_of_memory;
} product;

static void find_absmax(const int64_t begin, const int64_t end, void *const ctx) {
  const product *const p = ctx;
  for (int64_t m = begin; m < end; m++)
    p->absmax[m] = kernels()->absmax(row_of(p->args->x, p->args->dtype, p->args->ldx, m), p->args->dtype, p->args->K,
                                     p->args->threshold, p->outliers);
}

static void encode_chunk(const int64_t begin, const int64_t end, void *const ctx) {
  const product *const p = ctx;
  const bsh_product_args *const args = p->args;
  for (int64_t m = begin; m < end; m++) {
    const void *const x = row_of(args->x, args->dtype, args->ldx, p->m0 + m);
    int8_t *const codes = p->codes + m * args->K;
    kernels()->encode(x, args->dtype, args->K, int8_scale(p->absmax[p->m0 + m], args->dtype), args->threshold, codes);
    for (int64_t i = 0; i < p->n_columns; i++) {
      codes[p->columns[i]] = 0;
      p->x[m * p->n_columns + i] = load_f32(x, args->dtype, p->columns[i]);
    }
  }
}

/* What one thread owns. */
typedef struct {
  void *scratch; /* of the product of codes */
  int32_t *sums; /* [TILE_M, TILE_N] */
  float *w;      /* [n_columns, TILE_N]: outlier columns of the panel's rows of W */
} workspace;

static void decode_columns(const product *const p, const int64_t n0, const int64_t n, float *const w) {
  memset(w, 0, (size_t)(p->n_columns * TILE_N) * sizeof(float));
  for (int64_t i = 0; i < p->n_columns; i++)
    for (int64_t j = 0; j < n; j++) {
      const float code = (float)int8_codes(&p->args->weight)[(n0 + j) * p->args->K + p->columns[i]];
      w[i * TILE_N + j] = code * p->args->weight.scales.absmax[n0 + j] * BSH_INT8_UNIT;
    }
}

static void finish_row(const product *const p, const workspace *const own, const int64_t m, const int64_t tile_row,
                       const int64_t n0, const int64_t n) {
  const bsh_product_args *const args = p->args;
  const int64_t size = dtype_size(args->dtype);
  float sum[TILE_N];
  if (p->n_columns > 0) kernels()->columns(p->x + m * p->n_columns, own->w, p->n_columns, sum);
  kernels()->scale(own->sums + tile_row * TILE_N, p->absmax[p->m0 + m], args->weight.scales.absmax + n0,
                   args->bias != NULL ? (const char *)args->bias + n0 * size : NULL, p->n_columns > 0 ? sum : NULL, n,
                   args->dtype, (char *)args->y + ((p->m0 + m) * args->N + n0) * size);
}

static void multiply_panel(const product *const p, const workspace *const own, const int64_t n0) {
  const bsh_product_args *const args = p->args;
  const int64_t n = min_i64(panel_rows(args->N), args->N - n0);
  decode_columns(p, n0, n, own->w);
  for (int64_t m = 0; m < p->m_n; m += TILE_M) {
    const bsh_product_int8_args tile = {.a = p->codes + m * args->K,
                                        .b = int8_codes(&args->weight) + n0 * args->K,
                                        .sums = own->sums,
                                        .M = min_i64(TILE_M, p->m_n - m),
                                        .N = n,
                                        .K = args->K};
    kernels()->product(&tile, TILE_N, own->scratch);
    for (int64_t row = 0; row < tile.M; row++) finish_row(p, own, m + row, row, n0, n);
  }
}

static int64_t workspace_bytes(const product *const p) {
  return BSH_INT8_SCRATCH + (TILE_M + p->n_columns) * TILE_N * (int64_t)sizeof(float);
}

static void run_panels(const int64_t begin, const int64_t end, void *const ctx) {
  product *const p = ctx;
  char *const memory = bsh_cpu_memory_of_thread(workspace_bytes(p), &p->out_of_memory);
  if (memory == NULL) return;
  int32_t *const sums = (int32_t *)(memory + BSH_INT8_SCRATCH);
  const workspace own = {.scratch = memory, .sums = sums, .w = (float *)(sums + TILE_M * TILE_N)};
  for (int64_t panel = begin; panel < end; panel++) multiply_panel(p, &own, panel * panel_rows(p->args->N));
  free(memory);
}

static void list_columns(product *const p) {
  for (int64_t k = 0; p->outliers != NULL && k < p->args->K; k++)
    if (p->outliers[k]) p->columns[p->n_columns++] = k;
}

static bsh_status run_chunks(product *const p) {
  const int64_t M = p->args->M, N = p->args->N, K = p->args->K;
  const int64_t n_bytes = p->chunk * (K + p->n_columns * (int64_t)sizeof(float));
  p->x = bsh_cpu_memory(n_bytes);
  if (p->x == NULL) return no_workspace("linear_int8", n_bytes);
  p->codes = (int8_t *)(p->x + p->chunk * p->n_columns);
  for (p->m0 = 0; p->m0 < M && !p->out_of_memory; p->m0 += p->chunk) {
    p->m_n = min_i64(p->chunk, M - p->m0);
    bsh_parallel_for(0, p->m_n, divide_up(RUN, K), encode_chunk, p);
    bsh_parallel_for(0, divide_up(N, panel_rows(N)), panel_grain(p->m_n, N, K), run_panels, p);
  }
  free(p->x);
  return p->out_of_memory ? no_workspace("linear_int8", workspace_bytes(p)) : BSH_OK;
}

static int64_t rows_of_chunk(const int64_t M, const int64_t K) {
  const int64_t rows = CHUNK_BYTES / K / TILE_M * TILE_M;
  return min_i64(M, rows < TILE_M ? TILE_M : rows);
}

static bsh_status multiply_many(const bsh_product_args *const args) {
  const bool marks = args->threshold > 0.0f;
  const int64_t n_bytes = args->M * (int64_t)sizeof(float) + (marks ? args->K * ((int64_t)sizeof(int64_t) + 1) : 0);
  int64_t *const memory = bsh_cpu_memory(n_bytes);
  if (memory == NULL) return no_workspace("linear_int8", n_bytes);
  product p = {.args = args, .columns = memory, .chunk = rows_of_chunk(args->M, args->K)};
  p.absmax = (float *)(memory + (marks ? args->K : 0));
  if (marks) p.outliers = memset(p.absmax + args->M, 0, (size_t)args->K);
  bsh_parallel_for(0, args->M, divide_up(RUN, args->K), find_absmax, &p);
  list_columns(&p);
  const bsh_status status = run_chunks(&p);
  free(memory);
  return status;
}

/* ---- the gradient of many rows -------------------------------------------------------------------------------- */

enum { GROUP = BSH_INT8_DGRAD_GROUP };

typedef struct {
  bsh_product_args args; /* of a chunk of rows */
  float *dy;             /* [groups, N, GROUP], as dgrad_panel takes it */
  bool out_of_memory;
} gradient;

static void scale_groups(const int64_t begin, const int64_t end, void *const ctx) {
  const gradient *const p = ctx;
  const bsh_product_args *const args = &p->args;
  for (int64_t group = begin; group < end; group++) {
    float *const out = p->dy + group * args->N * GROUP;
    for (int64_t n = 0; n < args->N; n++) {
      const float unit = args->weight.scales.absmax[n] * BSH_INT8_UNIT;
      for (int64_t m = 0; m < GROUP; m++) {
        const int64_t row = group * GROUP + m;
        out[n * GROUP + m] = row < args->M ? load_f32(args->x, args->dtype, row * args->ldx + n) * unit : 0.0f;
      }
    }
  }
}

static void run_dgrad_panels(const int64_t begin, const int64_t end, void *const ctx) {
  gradient *const p = ctx;
  void *const scratch = bsh_cpu_memory_of_thread(BSH_INT8_SCRATCH, &p->out_of_memory);
  if (scratch == NULL) return;
  for (int64_t panel = begin; panel < end; panel++) {
    const int64_t k = panel * BSH_INT8_COLUMNS;
    kernels()->dgrad_panel(&p->args, p->dy, k, min_i64(BSH_INT8_COLUMNS, p->args.K - k), scratch);
  }
  free(scratch);
}

/* Rows [m, m + rows) of a product. */
static bsh_product_args dgrad_rows(const bsh_product_args *const args, const int64_t m, const int64_t rows) {
  bsh_product_args part = *args;
  part.M = min_i64(rows, args->M - m);
  part.x = row_of(args->x, args->dtype, args->ldx, m);
  part.y = (char *)args->y + m * args->K * dtype_size(args->dtype);
  return part;
}

static bsh_status multiply_many_dgrad(const bsh_product_args *const args) {
  const int64_t most = CHUNK_BYTES / (args->N * (int64_t)sizeof(float)) / GROUP * GROUP;
  const int64_t rows = min_i64(most < GROUP ? GROUP : most, BSH_INT8_DGRAD_ROWS);
  const int64_t n_bytes = divide_up(min_i64(rows, args->M), GROUP) * GROUP * args->N * (int64_t)sizeof(float);
  gradient p = {.dy = bsh_cpu_memory(n_bytes)};
  if (p.dy == NULL) return no_workspace("linear_int8_dgrad", n_bytes);
  for (int64_t m = 0; m < args->M && !p.out_of_memory; m += rows) {
    p.args = dgrad_rows(args, m, rows);
    bsh_parallel_for(0, divide_up(p.args.M, GROUP), divide_up(RUN, args->N * GROUP), scale_groups, &p);
    bsh_parallel_for(0, divide_up(args->K, BSH_INT8_COLUMNS), small_grain(p.args.M * args->N * BSH_INT8_COLUMNS),
                     run_dgrad_panels, &p);
  }
  free(p.dy);
  return p.out_of_memory ? no_workspace("linear_int8_dgrad", BSH_INT8_SCRATCH) : BSH_OK;
}

/* ---- the ops -------------------------------------------------------------------------------------------------- */

bsh_status bsh_cpu_linear_int8(const bsh_product_args *const args) {
  if (args->M > BSH_INT8_FEW) return multiply_many(args);
  bsh_product_args copy = *args;
  bsh_parallel_for(0, args->N, small_grain(args->M * args->K), multiply_small, &copy);
  return BSH_OK;
}

bsh_status bsh_cpu_linear_int8_dgrad(const bsh_product_args *const args) {
  if (args->M > BSH_INT8_FEW_DY) return multiply_many_dgrad(args);
  bsh_product_args copy = *args;
  bsh_parallel_for(0, divide_up(args->K, SMALL_STEP), small_grain(args->M * args->N * SMALL_STEP), multiply_small_dgrad,
                   &copy);
  return BSH_OK;
}
