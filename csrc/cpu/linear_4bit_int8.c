/* cpu/linear_4bit_int8.c - linear_4bit_int8 on the CPU: threads, tiles, workspace. Formulas: core/linear_4bit_int8.h.
 *
 *   a chunk of x    int8 codes [group][row][64] and their scales [group][row]
 *   a panel of W    at most BSH_INT8_PANEL rows: int8 codes [group][row][64] and scales [group][row], once a chunk
 *   a tile of y     fp32 sums [TILE_M, BSH_INT8_PANEL]: of each group the int32 sums of codes, scaled and added
 *
 * Threads share the chunk and take panels. A sum is added in the order of its groups, whatever the tiles. */
#include <stdlib.h>
#include <string.h>

#include "core/linear_4bit_int8.h"
#include "core/numerics.h"
#include "cpu/cpu.h"

enum {
  GROUP = BSH_GROUP_INT8,
  CHUNK_BYTES = 16 << 20,
  TILE_M = 128, /* rows of x whose sums stay in the second-level cache */
  MOST_M = 2 * TILE_M,
  PAIRS = 256
};

typedef struct {
  const bsh_product_args *args;
  int8_t *codes;         /* [groups][m_n][GROUP] */
  float *scales;         /* [groups][m_n] */
  int64_t groups;        /* of a row */
  int64_t m0, m_n;       /* the chunk at hand */
  uint16_t pairs[PAIRS]; /* the two codes of each byte of W */
  bool out_of_memory;
} product;

/* What one thread owns. */
typedef struct {
  void *scratch;
  int8_t *codes; /* [groups][n][GROUP] */
  float *scales; /* [groups][n] */
  int32_t *sums; /* [MOST_M, BSH_INT8_PANEL] */
  float *y;      /* the same */
} workspace;

static bsh_status no_workspace(const int64_t n_bytes) {
  return bsh_no_memory("linear_4bit_int8", "a workspace", BSH_DEVICE_CPU, (double)n_bytes);
}

static void fill_pairs(product *const p) {
  const int8_t *const codes = codes_int8(p->args->weight.format);
  for (int byte = 0; byte < PAIRS; byte++) {
    const int8_t pair[2] = {codes[byte >> 4], codes[byte & 15]};
    memcpy(p->pairs + byte, pair, sizeof pair);
  }
}

static void encode_rows(const int64_t begin, const int64_t end, void *const ctx) {
  const product *const p = ctx;
  const bsh_product_args *const args = p->args;
  for (int64_t m = begin; m < end; m++)
    for (int64_t g = 0; g < p->groups; g++) {
      const int64_t first = (p->m0 + m) * args->ldx + g * GROUP, at = g * p->m_n + m;
      const void *const x = (const char *)args->x + first * dtype_size(args->dtype);
      const float absmax = bsh_cpu_int8()->absmax(x, args->dtype, GROUP, 0.0f, NULL);
      p->scales[at] = absmax * BSH_INT8_UNIT;
      bsh_cpu_int8()->encode(x, args->dtype, GROUP, int8_scale(absmax, args->dtype), 0.0f, p->codes + at * GROUP);
    }
}

/* Rows [n0, n0 + n) of W. */
static void decode_panel(const product *const p, const int64_t n0, const int64_t n, const workspace *const own) {
  const bsh_weight *const weight = &p->args->weight;
  const float unit = unit_int8(weight->format);
  for (int64_t row = 0; row < n; row++)
    for (int64_t g = 0; g < p->groups; g++) {
      const int64_t first = (n0 + row) * p->args->K + g * GROUP, at = g * n + row;
      int8_t *const codes = own->codes + at * GROUP;
      for (int64_t i = 0; i < GROUP / 2; i++)
        memcpy(codes + 2 * i, p->pairs + weight->packed[first / 2 + i], sizeof p->pairs[0]);
      own->scales[at] = block_scale(&weight->scales, first / weight->blocksize) * unit;
    }
}

static void store_row(const product *const p, const int64_t m, const int64_t n0, const int64_t n, float *const sums) {
  const bsh_product_args *const args = p->args;
  const int64_t size = dtype_size(args->dtype), first = (p->m0 + m) * args->ldy + n0;
  for (int64_t j = 0; args->bias && j < n; j++) sums[j] += load_f32(args->bias, args->dtype, n0 + j);
  bsh_cpu()->from_f32(sums, args->dtype, (char *)args->y + first * size, n);
}

/* Rows [m, m + rows) of the chunk by the panel. */
static void multiply_tile(const product *const p, const workspace *const own, const int64_t m, const int64_t rows,
                          const int64_t n0, const int64_t n) {
  memset(own->y, 0, (size_t)(rows * BSH_INT8_PANEL) * sizeof(float));
  for (int64_t g = 0; g < p->groups; g++) {
    const int64_t at = g * p->m_n + m;
    const bsh_product_int8_args codes = {
        .a = p->codes + at * GROUP, .b = own->codes + g * n * GROUP, .sums = own->sums, .M = rows, .N = n, .K = GROUP};
    bsh_cpu_int8()->product(&codes, BSH_INT8_PANEL, own->scratch);
    for (int64_t row = 0; row < rows; row++)
      bsh_cpu_int8()->add_scaled(own->sums + row * BSH_INT8_PANEL, p->scales[at + row], own->scales + g * n, n,
                                 own->y + row * BSH_INT8_PANEL);
  }
  for (int64_t row = 0; row < rows; row++) store_row(p, m + row, n0, n, own->y + row * BSH_INT8_PANEL);
}

/* Rows of the next tile: the product of codes is slow for a few. */
static int64_t tile_rows(const int64_t left) { return left < MOST_M ? left : TILE_M; }

static int64_t panel_bytes(const product *const p) {
  return p->groups * BSH_INT8_PANEL * (GROUP + (int64_t)sizeof(float));
}

static int64_t workspace_bytes(const product *const p) {
  return BSH_INT8_SCRATCH + panel_bytes(p) + 2 * MOST_M * BSH_INT8_PANEL * (int64_t)sizeof(float);
}

static void run_panels(const int64_t begin, const int64_t end, void *const ctx) {
  product *const p = ctx;
  const int64_t N = p->args->N, step = bsh_cpu_int8_panel(N);
  char *const memory = bsh_cpu_memory_of_thread(workspace_bytes(p), &p->out_of_memory);
  if (memory == NULL) return;
  float *const scales = (float *)(memory + BSH_INT8_SCRATCH), *const y = scales + p->groups * BSH_INT8_PANEL;
  int32_t *const sums = (int32_t *)(y + MOST_M * BSH_INT8_PANEL);
  const workspace own = {
      .scratch = memory, .scales = scales, .y = y, .sums = sums, .codes = (int8_t *)(sums + MOST_M * BSH_INT8_PANEL)};
  for (int64_t n0 = begin * step; n0 < min_i64(end * step, N); n0 += step) {
    const int64_t n = min_i64(step, N - n0);
    decode_panel(p, n0, n, &own);
    for (int64_t m = 0, rows; m < p->m_n; m += rows) {
      rows = tile_rows(p->m_n - m);
      multiply_tile(p, &own, m, rows, n0, n);
    }
  }
  free(memory);
}

bsh_status bsh_cpu_linear_4bit_int8(const bsh_product_args *const args) {
  const int64_t M = args->M, most = CHUNK_BYTES / args->K / TILE_M * TILE_M;
  const int64_t chunk = min_i64(M, most < TILE_M ? TILE_M : most), groups = args->K / GROUP;
  const int64_t n_bytes = chunk * groups * (GROUP + (int64_t)sizeof(float));
  product p = {.args = args, .groups = groups, .scales = bsh_cpu_memory(n_bytes)};
  if (p.scales == NULL) return no_workspace(n_bytes);
  p.codes = (int8_t *)(p.scales + chunk * groups);
  fill_pairs(&p);
  for (p.m0 = 0; p.m0 < M && !p.out_of_memory; p.m0 += chunk) {
    p.m_n = min_i64(chunk, M - p.m0);
    bsh_parallel_for(0, p.m_n, divide_up(1 << 14, args->K), encode_rows, &p);
    bsh_parallel_for(0, divide_up(args->N, bsh_cpu_int8_panel(args->N)),
                     divide_up(1 << 18, p.m_n * args->K * bsh_cpu_int8_panel(args->N)), run_panels, &p);
  }
  free(p.scales);
  return p.out_of_memory ? no_workspace(workspace_bytes(&p)) : BSH_OK;
}
