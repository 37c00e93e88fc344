/* test_launch.c - how products are planned (csrc/plan) and launched (gpu/product.c and what it
 * launches), without a GPU: the driver and the vendors' products are replaced by functions that check what a GPU
 * would do with their arguments. What a kernel computes from its arguments is written down here again; its sizes come
 * from its header. */
#include "check.h"

#include "core/arithmetic.h"
#include "cuda/sizes/blockwise.h"
#include "cuda/sizes/gemm_4bit_sm90.h"
#include "cuda/sizes/gemm_4bit_sm90_wide.h"
#include "cuda/sizes/gemv_4bit.h"
#include "cuda/sizes/gemv_4bit_simt.h"
#include "gpu/cublas.h"
#include "gpu/int8.h"
#include "gpu/ops.h"
#include "gpu/product.h"
#include "torch/gemm.h"
#include "torch/tensor.h"

uint64_t check_seed;

/* Scratch memory of the call under test; addresses only, nothing is written there. */
static char *const scratch_begin = (char *)0x7000000000;
static int64_t scratch_bytes;
static bsh_plan plan;
static const void *x_of_product;
static int64_t counters_cleared;
static bool x_ordered;
static int64_t rows_done; /* of x, by a fused kernel */
static bool no_tensor_maps;
static int64_t workspace = 64 << 20;
static bsh_map_of maps[2]; /* the last two: of x, of W */
static const uint32_t *flags_cleared;
static const bsh_weight *weight_of_product;
static int64_t dequantized;         /* lines of W in the panel */
static int64_t lines_done, n_lines; /* of W, by panels */
static int launches;

/* The kernels of an op, and how often each multiplied, by direction. */
static const char *const of_4bit[] = {"gemv_4bit",      "gemv_4bit_simt", "gemm_4bit_sm90", "gemm_4bit_sm90_wide",
                                      "gemm_4bit_sm80", "gemm_4bit_sm75", "panels"};
static const char *const of_int8[] = {
    "gemv_int8",       "any",   "mixed_int8_sm90", "gemm_int8", "gemm_int8_sm90", "dgrad_int8_sm90",
    "gemv_int8_dgrad", "panels"};
enum { OF_4BIT = sizeof of_4bit / sizeof *of_4bit, OF_INT8 = sizeof of_int8 / sizeof *of_int8 };
static int by_4bit[OF_4BIT][2], by_int8[OF_INT8];

static bool is_planned(const char *const name) { return strcmp(bsh_kernel_name(plan.kernel), name) == 0; }

/* The int8 product under test, or NULL, and what of it has been done. */
static const bsh_product_args *int8_product;
static int64_t int8_done; /* rows, or columns by panels */

bsh_status bsh_cuda_scratch_new(const bsh_cuda_context *const context, const int64_t n_bytes,
                                bsh_cuda_scratch *const scratch) {
  (void)context;
  CHECK(n_bytes > 0 && n_bytes <= plan.scratch_bytes && scratch_bytes == 0, "%" PRId64 " bytes of scratch", n_bytes);
  scratch_bytes = n_bytes;
  *scratch = (bsh_cuda_scratch){.data = scratch_begin};
  return BSH_OK;
}
bsh_status bsh_cuda_scratch_of(const bsh_cuda_context *const context, const int64_t n, const int32_t torch_dtype,
                               const int64_t itemsize, bsh_cuda_scratch *const scratch) {
  (void)torch_dtype;
  return bsh_cuda_scratch_new(context, n * itemsize, scratch);
}
void bsh_cuda_scratch_delete(bsh_cuda_scratch *const scratch) {
  *scratch = (bsh_cuda_scratch){0};
  scratch_bytes = 0;
}
bsh_status bsh_cuda_zero(const bsh_cuda_context *const context, void *const data, const int64_t n_bytes) {
  (void)context;
  flags_cleared = data, counters_cleared = n_bytes / (int64_t)sizeof(uint32_t);
  return BSH_OK;
}
bool bsh_cuda_has_tensor_maps(void) { return !no_tensor_maps; }
bsh_status bsh_cuda_tensor_map(const bsh_cuda_context *const context, const bsh_map_of *const what,
                               bsh_tensor_map *const map) {
  (void)context, (void)map;
  const int32_t bytes = what->box_columns * (what->type == BSH_MAP_U8 ? 1 : 2);
  CHECK(((uintptr_t)what->data | (uintptr_t)what->row_bytes) % 16 == 0 && what->row_bytes < (INT64_C(1) << 40),
        "rows of a map are %" PRId64 " bytes apart from %p on", what->row_bytes, what->data);
  CHECK(what->rows > 0 && what->columns > 0 && what->rows <= UINT32_MAX && what->columns <= UINT32_MAX,
        "a map of %" PRId64 " x %" PRId64, what->rows, what->columns);
  CHECK(what->box_rows > 0 && what->box_rows <= 256 && (bytes == 64 || bytes == 128), "boxes of %d x %d",
        (int)what->box_rows, (int)what->box_columns);
  maps[0] = maps[1], maps[1] = *what;
  return BSH_OK;
}
int64_t bsh_cuda_workspace_bytes(void) { return workspace; }
int32_t bsh_torch_dtype(const bsh_dtype dtype) { return (int32_t)dtype; }

#define SHAPE "%s: M %d N %d K %d"
#define SHAPE_OF(name, args) name, (args)->M, (args)->N, (args)->K

static void check_inside(const char *const name, const bsh_fused_args *const args, const void *const from,
                         const int64_t n_bytes) {
  const int64_t begin = (const char *)from - scratch_begin;
  CHECK(from != NULL && begin >= 0 && begin + n_bytes <= scratch_bytes,
        SHAPE ": bytes %" PRId64 " to %" PRId64 " of %" PRId64, SHAPE_OF(name, args), begin, begin + n_bytes,
        scratch_bytes);
}

/* ---- what GPUs can do ---- */

/* Dynamic shared memory of a block, threads of it, and blocks of a cluster, at most. */
static void check_limits(const char *const name, const bsh_cuda_launch_shape *const shape, const int32_t sm) {
  static const int32_t kib[][2] = {{75, 64}, {80, 163}, {86, 99}, {89, 99}, {90, 227}, {100, 227}, {120, 99}};
  int i = 0;
  while (kib[i][0] != sm) i++;
  const uint32_t *const grid = shape->grid, threads = shape->block[0] * shape->block[1] * shape->block[2];
  CHECK(shape->shared_bytes <= kib[i][1] * 1024, "%s: %d bytes of shared memory on sm_%d", name,
        (int)shape->shared_bytes, (int)sm);
  CHECK(threads > 0 && threads <= 1024 && threads % BSH_WARP == 0, "%s: %u threads", name, threads);
  CHECK(grid[0] > 0 && grid[0] <= INT32_MAX && grid[1] > 0 && grid[1] < 65536 && grid[2] == 1, "%s: grid %u x %u", name,
        grid[0], grid[1]);
  CHECK(shape->cluster <= 1 || (sm >= 90 && shape->cluster <= 8 && grid[0] % shape->cluster == 0),
        "%s: clusters of %u on sm_%d", name, shape->cluster, (int)sm);
}

/* The numbers of a form in the name of a kernel: <prefix>_<dtype>_<form>[_any|_mx|_nv]. */
typedef struct {
  const char *name;
  int64_t first, second;
} form;

static form form_of(const char *const kernel, const char *const prefix, const form *const forms, const int n_forms) {
  const char *const dtype = kernel + strlen(prefix) + 1, *const begin = strchr(dtype, '_') + 1;
  for (int i = 0; i < n_forms; i++) {
    const size_t length = strlen(forms[i].name);
    const char *const scales = begin + length;
    if (strncmp(begin, forms[i].name, length) == 0 &&
        (*scales == 0 || strcmp(scales, "_any") == 0 || strcmp(scales, "_mx") == 0 || strcmp(scales, "_nv") == 0))
      return forms[i];
  }
  CHECK(false, "%s has no known form", kernel);
  return forms[0];
}
#define FORM(name, first, second) {#name, first, second},
#define WIDE_FORM(name, tokens) {#name, tokens, 0},

/* ---- what the kernels do with their arguments ---- */

/* gemv_4bit and gemv_int8: row tiles and K are divided without rest. */
static void check_gemv_cut(const char *const name, const bsh_fused_args *const args,
                           const bsh_cuda_launch_shape *const shape, const int32_t arch, const form known) {
  const int64_t tokens = 8 * known.first, units = known.second, tiles = args->N / BSH_ROW_TILE;
  const bsh_fused_cut *const cut = &args->cut;
  const int64_t teams = shape->grid[0] / cut->k_splits, warps = shape->block[0] / BSH_WARP;
  CHECK(teams * cut->k_splits == shape->grid[0] && (shape->cluster <= 1 || (int)shape->cluster == cut->k_splits), SHAPE,
        SHAPE_OF(name, args));
  CHECK(tokens * shape->grid[1] >= args->M && tokens * (shape->grid[1] - 1) < args->M, SHAPE, SHAPE_OF(name, args));
  CHECK(cut->team_tiles * teams + cut->longer_teams == tiles && cut->longer_teams < teams && cut->team_tiles > 0,
        SHAPE ": %d tiles, %d of %" PRId64 " teams with one more", SHAPE_OF(name, args), cut->team_tiles,
        cut->longer_teams, teams);
  CHECK(cut->steps == divide_up(cut->team_tiles, cut->row_groups) &&
            cut->longer_steps == divide_up(cut->team_tiles + 1, cut->row_groups),
        SHAPE, SHAPE_OF(name, args));
  CHECK(warps == cut->k_warps * cut->row_groups && warps <= bsh_gemv_warps(arch), SHAPE ": %" PRId64 " warps",
        SHAPE_OF(name, args), warps);
  for (int64_t w = 0; w < warps; w++)
    CHECK(w * cut->group_of_warp >> 16 == w / cut->k_warps, SHAPE ": warp %" PRId64, SHAPE_OF(name, args), w);
  CHECK(cut->k_splits * cut->k_warps * units * BSH_UNIT >= args->K, SHAPE, SHAPE_OF(name, args));
  if (cut->k_splits > 1)
    check_inside(name, args, args->partial, shape->grid[1] * tiles * cut->k_splits * tokens * BSH_ROW_TILE * 4);
}

static void check_gemv(const char *const name, const bsh_fused_args *const args,
                       const bsh_cuda_launch_shape *const shape, const int32_t sm) {
  static const form forms[] = {BSH_GEMV_FORMS(FORM)};
  const form known = form_of(name, "gemv_4bit", forms, sizeof forms / sizeof *forms);
  const int32_t arch = bsh_image_here(sm).arch;
  check_gemv_cut(name, args, shape, arch, known);
  /* Its rings end where the shared memory does, its sums where they begin or, with wide kernels, the table does. */
  const int64_t rings = bsh_gemv_warps(arch) * bsh_gemv_slots(arch, (int32_t)known.first) * BSH_PIECE_BYTES;
  const int64_t low = BSH_MAP_BYTES + bsh_gemv_sums_bytes(arch, (int32_t)known.first);
  CHECK(shape->shared_bytes == rings + (bsh_is_wide(arch) ? 2 << 16 : (32 << 10) + low) && low <= 63 << 10,
        SHAPE ": %d bytes of shared memory", SHAPE_OF(name, args), (int)shape->shared_bytes);
}

static void check_x_units(const char *const name, const bsh_fused_args *const args, void **const arguments) {
  const int64_t tokens = *(int32_t *)arguments[2], units = *(int32_t *)arguments[3];
  counters_cleared = *(int32_t *)arguments[4];
  check_inside(name, args, args->counters, counters_cleared * 4);
  if (tokens == 0) return;
  CHECK(tokens >= args->M && units * BSH_UNIT >= args->K, SHAPE, SHAPE_OF(name, args));
  CHECK(args->x == x_of_product || rows_done > 0, SHAPE, SHAPE_OF(name, args));
  check_inside(name, args, *(void **)arguments[1], tokens * units * BSH_UNIT * 2);
  CHECK(*(char **)arguments[1] + tokens * units * BSH_UNIT * 2 <= (char *)args->counters, SHAPE, SHAPE_OF(name, args));
  x_ordered = true;
}

/* The blocks of threads that own pieces of a row block leave their sums side by side. */
static void check_joint(const char *const name, const bsh_fused_args *const args, const int64_t parts,
                        const int64_t last_tile, const int64_t tokens, const int64_t k_parts) {
  CHECK(parts <= args->cut.k_splits, SHAPE ": %" PRId64 " parts, room for %d", SHAPE_OF(name, args), parts,
        args->cut.k_splits);
  CHECK(counters_cleared >= (last_tile + 1) * k_parts, SHAPE ": %" PRId64 " counters cleared", SHAPE_OF(name, args),
        counters_cleared);
  check_inside(name, args, args->partial, (last_tile * args->cut.k_splits + parts) * tokens * BSH_ROW_TILE * 4);
}

static int64_t first_piece(const bsh_fused_args *const args, const int64_t blocks, const int64_t i) {
  return i * args->cut.block_pieces + i * args->cut.more_pieces / blocks;
}

/* One part of K: the blocks of threads, in the order of their index, walk through their pieces as the kernel does, last
 * row block first. leaving[b]: owners of row block b that leave their sums; its last owner then finds them all. */
static void check_walk(const char *const name, const bsh_fused_args *const args, const int64_t blocks,
                       const int64_t pieces, const int64_t row_blocks, int64_t *const leaving) {
  const int64_t total = row_blocks * pieces;
  int64_t walked = 0;
  for (int64_t i = 0; i < blocks; i++) {
    const int64_t begin = first_piece(args, blocks, i);
    for (int64_t from, to = first_piece(args, blocks, i + 1); to > begin; to = from) {
      const int64_t b = (to - 1) / pieces, earlier = i - ((b * pieces + 1) * blocks - 1) / total;
      CHECK(to <= total && earlier == leaving[b], SHAPE ": block %" PRId64 " comes as owner %" PRId64 " after %" PRId64,
            SHAPE_OF(name, args), i, earlier, leaving[b]);
      from = b * pieces > begin ? b * pieces : begin;
      walked += to - from;
      if (to < (b + 1) * pieces) leaving[b]++;
    }
  }
  CHECK(walked == total, SHAPE ": %" PRId64 " pieces", SHAPE_OF(name, args), walked);
}

static void check_gemm(const char *const name, const bsh_fused_args *const args,
                       const bsh_cuda_launch_shape *const shape, const int32_t sms) {
  static const form forms[] = {BSH_GEMM_FORMS(FORM)};
  const form known = form_of(name, "gemm_4bit", forms, sizeof forms / sizeof *forms);
  const int64_t tokens = known.first, k_parts = known.second, tiles = args->N / BSH_ROW_TILE;
  const int64_t warps = bsh_gemm_warps((int32_t)tokens, (int32_t)k_parts);
  const bool own_x = bsh_gemm_own_x((int32_t)tokens, (int32_t)k_parts);
  const int64_t row_tiles = k_parts == 2 ? args->cut.row_tiles : warps / k_parts,
                row_blocks = divide_up(tiles, row_tiles);
  const int64_t pieces = divide_up(args->K / BSH_UNIT, BSH_PIECE_UNITS * k_parts), total = row_blocks * pieces;
  const int64_t blocks = shape->grid[0], sharing = k_parts == 2 ? pieces : total; /* blocks that share pieces */
  CHECK(tokens >= args->M && shape->block[0] == (uint32_t)(warps + (own_x ? BSH_GEMM_X_WARPS : 0)) * BSH_WARP, SHAPE,
        SHAPE_OF(name, args));
  CHECK(blocks > 0 && blocks * shape->grid[1] <= sms && total * blocks < INT32_MAX, SHAPE ": %" PRId64 " x %u blocks",
        SHAPE_OF(name, args), blocks, shape->grid[1]);
  CHECK(shape->grid[1] == (k_parts == 2 ? row_blocks : 1), SHAPE ": %u", SHAPE_OF(name, args), shape->grid[1]);
  CHECK(row_tiles > 0 && row_tiles <= warps / k_parts, SHAPE ": %" PRId64 " row tiles", SHAPE_OF(name, args),
        row_tiles);
  CHECK(own_x ? (const char *)args->x != scratch_begin : x_ordered && (const char *)args->x == scratch_begin, SHAPE,
        SHAPE_OF(name, args));
  CHECK(args->cut.block_pieces * blocks + args->cut.more_pieces == sharing && args->cut.more_pieces < blocks &&
            args->cut.block_pieces > 0,
        SHAPE ": %d pieces a block, %d more", SHAPE_OF(name, args), args->cut.block_pieces, args->cut.more_pieces);
  int64_t *const leaving = calloc((size_t)row_blocks, sizeof *leaving); /* owners of a row block that leave sums */
  if (k_parts == 1) check_walk(name, args, blocks, pieces, row_blocks, leaving);
  for (int64_t b = 0; b < row_blocks; b++) {
    if (k_parts == 2 && blocks > 1) leaving[b] = blocks;
    const int64_t end = (b + 1) * row_tiles;
    if (leaving[b] > 0) check_joint(name, args, leaving[b], (end < tiles ? end : tiles) - 1, tokens, k_parts);
  }
  free(leaving);
  CHECK(shape->shared_bytes >= (2 << 16) + warps * BSH_GEMM_SLOTS * BSH_PIECE_BYTES &&
            BSH_GEMM_X_AT + BSH_GEMM_STAGES * bsh_gemm_stage_bytes((int32_t)tokens, (int32_t)k_parts) <= 63 << 10,
        SHAPE ": %d bytes of shared memory", SHAPE_OF(name, args), (int)shape->shared_bytes);
  CHECK(aligned(args->y, 4) && args->ldy % 2 == 0, SHAPE, SHAPE_OF(name, args)); /* two rows of W a store */
  counters_cleared = 0, x_ordered = false;                                       /* the next slice wants its own */
}

static void check_simt(const char *const name, const bsh_fused_args *const args,
                       const bsh_cuda_launch_shape *const shape) {
  const int64_t rows = shape->block[0] / BSH_WARP * BSH_SIMT_ROWS; /* of W, of a block */
  CHECK(args->M <= BSH_SIMT_TOKENS && shape->grid[0] * rows >= args->N && (shape->grid[0] - 1) * rows < args->N, SHAPE,
        SHAPE_OF(name, args));
  CHECK(shape->block[0] == BSH_SIMT_WARPS * BSH_WARP && shape->shared_bytes == 0, SHAPE, SHAPE_OF(name, args));
}

/* The pairs walk through their stretches as the kernel does: every piece of every tile once, a tile's end by the pair
 * that finds all others' sums: those of pairs of lower index or, scattered, of the pairs that share the tile. */
static void check_stretches(const bsh_gemm_wide_cut *const cut, const int64_t pairs) {
  const int64_t total = (int64_t)cut->shared * cut->pieces;
  int64_t walked = 0, whole = 0;
  for (int64_t i = 0; i < pairs; i++) {
    if (i < cut->sharing) {
      const int64_t begin = i * total / cut->sharing, end = (i + 1) * total / cut->sharing;
      CHECK(end > begin, "pair %" PRId64 " of %d that share %" PRId64 " pieces has none", i, cut->sharing, total);
      CHECK(cut->scatter == 0 || begin / cut->pieces == (end - 1) / cut->pieces, "pair %" PRId64 " scatters two tiles",
            i);
      CHECK(cut->scatter == 0 || begin / cut->pieces == i / cut->scatter, "pair %" PRId64 " of another tile", i);
      walked += end - begin;
    }
    for (int64_t tile = cut->shared + i; tile < cut->tiles; tile += pairs) whole++;
  }
  CHECK(walked == total && cut->shared + whole == cut->tiles, "%" PRId64 " of %" PRId64 " pieces, %" PRId64 " tiles",
        walked, total, whole);
}

/* gemm_wide_bf16_m128, gemm_wide_mx_dgrad_bf16_m128, ... */
static int32_t block_of_wide(const char *const name) {
  return strstr(name, "_mx_") != NULL ? 32 : strstr(name, "_nv_") != NULL ? 16 : 64;
}

static void check_wide(const char *const name, void **const arguments, const bsh_cuda_launch_shape *const shape,
                       const int32_t sms) {
  const bsh_gemm_wide_args *const args = arguments[2];
  const bsh_gemm_wide_cut *const cut = &args->cut;
  const bool forward = strstr(name, "dgrad") == NULL;
  const int64_t rows = forward ? args->N : args->K, depth = forward ? args->K : args->N;
  const int64_t pairs = shape->grid[0] / BSH_GEMM_WIDE_PAIR, blocks = (int64_t)cut->sharing * BSH_GEMM_WIDE_PAIR;
  static const form forms[] = {BSH_GEMM_WIDE_FORMS(WIDE_FORM)};
  const int32_t block = block_of_wide(name);
  const char *const prefix = block < 64 ? (forward ? "gemm_wide_mx" : "gemm_wide_mx_dgrad") /* or nv */
                                        : (forward ? "gemm_wide" : "gemm_wide_dgrad");
  const form known = form_of(name, prefix, forms, sizeof forms / sizeof *forms);
  CHECK(cut->tokens == known.first && (strstr(name, "_f16") != NULL) == (maps[0].type == BSH_MAP_F16),
        "%s for tiles of %d tokens", name, cut->tokens);
  CHECK(shape->grid[0] <= (uint32_t)sms && shape->grid[0] % BSH_GEMM_WIDE_PAIR == 0 &&
            shape->cluster == BSH_GEMM_WIDE_PAIR,
        SHAPE ": %u blocks in clusters of %u", SHAPE_OF(name, args), shape->grid[0], shape->cluster);
  CHECK(shape->block[0] == BSH_GEMM_WIDE_THREADS &&
            shape->shared_bytes == bsh_gemm_wide_shared_bytes(cut->tokens, block),
        SHAPE ": %d bytes of shared memory", SHAPE_OF(name, args), (int)shape->shared_bytes);
  CHECK((int64_t)cut->token_tiles * cut->tokens >= args->M && (int64_t)(cut->token_tiles - 1) * cut->tokens < args->M &&
            cut->tiles == divide_up(rows, 256) * cut->token_tiles && cut->pieces == divide_up(depth, 128),
        SHAPE ": %d tiles of %d pieces", SHAPE_OF(name, args), cut->tiles, cut->pieces);
  check_stretches(cut, pairs);
  CHECK(maps[0].rows == args->M && maps[0].columns == depth && maps[0].box_rows * 2 == cut->tokens &&
            maps[0].box_columns == 64 && maps[1].rows == args->N && maps[1].columns == args->K / 2 &&
            maps[1].box_rows == 128 && maps[1].box_columns == 64 && maps[1].row_bytes == args->K / 2,
        SHAPE ": maps", SHAPE_OF(name, args));
  CHECK(!args->store_fours || (aligned(args->y, 8) && args->ldy % 4 == 0 && rows % 4 == 0), SHAPE ": stores of 8 bytes",
        SHAPE_OF(name, args));
  const bool whole = args->K % 128 == 0, pairs_of_codes = block == 64 && whole && aligned(args->absmax_code, 2);
  const bool together =
      block < 64 && args->code_pairs > 0 && aligned(args->absmax_code, (64 / block) * args->code_pairs);
  CHECK(args->code_pairs == 0 || (args->absmax == NULL && args->block_shift == 0 &&
                                  (together ? args->code_pairs == 1 || whole : pairs_of_codes)),
        SHAPE ": codes read together", SHAPE_OF(name, args));
  CHECK(block == 64 || (args->absmax == NULL && args->format == BSH_E2M1), SHAPE ": short blocks",
        SHAPE_OF(name, args));
  if (blocks == 0) return;
  CHECK(flags_cleared == args->flags && counters_cleared == blocks * BSH_GEMM_WIDE_CONSUMERS &&
            (char *)(args->flags + counters_cleared) <= (char *)args->partial && aligned(args->partial, 16),
        SHAPE ": %" PRId64 " flags cleared", SHAPE_OF(name, args), counters_cleared);
  const int64_t begin = (char *)args->partial - scratch_begin;
  CHECK(begin + blocks * bsh_gemm_wide_partial_bytes(cut->tokens) <= scratch_bytes && scratch_bytes <= workspace,
        SHAPE ": %" PRId64 " bytes of scratch", SHAPE_OF(name, args), scratch_bytes);
  counters_cleared = 0, flags_cleared = NULL; /* the next slice wants its own */
}

#include "launch_sm80.h"

/* Lines that lie one behind the other come as one stretch, cut into rows that end with the weight. */
static void check_dequantize(const bsh_dequantize_4bit_args *const args, const int64_t itemsize) {
  const int64_t left = args->weight.n - args->row0 * args->columns - args->column0;
  const int64_t elements = left < args->n_rows * args->ld ? left : args->n_rows * args->ld;
  CHECK(args->out == scratch_begin && elements * itemsize <= plan.panel_bytes && plan.panel_bytes <= scratch_bytes,
        "a panel of %" PRId64 " elements in %" PRId64 " bytes", elements, plan.panel_bytes);
  dequantized = plan.panel_lines < n_lines - lines_done ? plan.panel_lines : n_lines - lines_done;
}

static bsh_status check_product(const bsh_torch_matrix *const c, const bsh_torch_matrix *const b) {
  CHECK(dequantized > 0 && c->offset == lines_done && c->columns == dequantized && b->data == scratch_begin,
        "columns %" PRId64 " to %" PRId64 " of %" PRId64 " behind %" PRId64, c->offset, c->offset + c->columns, n_lines,
        lines_done);
  lines_done += c->columns, dequantized = 0;
  return BSH_OK;
}

bsh_status bsh_torch_cuda_gemm(const bsh_torch_matrix *const c, const bsh_torch_matrix *const a,
                               const bsh_torch_matrix *const b, const bsh_torch_matrix *const bias) {
  (void)a, (void)bias;
  CHECK(plan.vendor == BSH_VENDOR_TORCH && plan.vendor_bytes == 0, "torch multiplies");
  return check_product(c, b);
}

/* ---- what the int8 kernels do with their arguments ---- */

/* Of the scratch memory, bytes that a launch uses: inside, 16-byte aligned, and nobody else's. */
static struct {
  const char *begin[10];
  int64_t bytes[10];
  int n;
} used;
static void use_scratch(const char *const name, const void *const from, const int64_t n_bytes) {
  const char *const begin = from;
  CHECK(n_bytes == 0 || (begin >= scratch_begin && begin + n_bytes <= scratch_begin + scratch_bytes),
        "%s: %" PRId64 " bytes of %" PRId64 " at %p", name, n_bytes, scratch_bytes, from);
  CHECK(n_bytes == 0 || aligned(from, 16), "%s: %p", name, from);
  for (int i = 0; i < used.n; i++)
    CHECK(begin + n_bytes <= used.begin[i] || begin >= used.begin[i] + used.bytes[i], "%s: bytes of %p twice", name,
          from);
  used.begin[used.n] = begin, used.bytes[used.n++] = n_bytes;
}

static void check_codes(const char *const name, const bsh_int8_gemm_args *const args) {
  const bsh_int8_outliers *const of = &args->outliers;
  used.n = 0;
  use_scratch(name, args->a, (int64_t)args->M * args->K);
  use_scratch(name, args->row_absmax, args->M * (int64_t)sizeof(float));
  CHECK((of->count != NULL || args->claims != NULL) == (int8_product->threshold > 0), "%s: outliers", name);
  CHECK(of->count == NULL || args->claims == NULL, "%s: outliers gathered and found", name);
  CHECK(args->fast == (aligned(args->b, 16) && args->K % 16 == 0), "%s: %d", name, args->fast);
  if (of->count == NULL) return;
  CHECK(of->capacity % BSH_INT8_CHUNK == 0 && of->capacity < args->K + BSH_INT8_CHUNK &&
            2 * (args->M + (int64_t)args->N) * of->capacity <= workspace,
        "%s: %d columns gathered of %d", name, of->capacity, args->K);
  use_scratch(name, of->flags, args->K);
  use_scratch(name, of->count, (int64_t)sizeof(int32_t));
  use_scratch(name, of->list, args->K * (int64_t)sizeof(int32_t));
  use_scratch(name, of->x, 2 * (int64_t)args->M * of->capacity);
  use_scratch(name, of->w, 2 * (int64_t)args->N * of->capacity);
}

/* Clusters of `size` blocks that run at once; where its blocks share the depth of a tile each has at most one. */
static void check_clusters(const char *const name, const bsh_cuda_launch_shape *const shape, const int64_t size,
                           const int64_t tiles, const int64_t splits, const int64_t stages, const int32_t sms) {
  CHECK(shape->cluster == (uint32_t)size && shape->grid[0] % size == 0 && shape->grid[1] == 1 &&
            (shape->grid[0] <= (uint32_t)sms || shape->grid[0] == (uint32_t)size),
        "%s: %u blocks in clusters of %u", name, shape->grid[0], shape->cluster);
  CHECK(splits == 1 || (tiles * size <= shape->grid[0] && splits <= stages),
        "%s: %" PRId64 " blocks share %" PRId64 " stages", name, splits, stages);
  CHECK(shape->grid[0] <= tiles * size && shape->block[0] == BSH_GEMM_INT8_SM90_THREADS && shape->overlap,
        "%s: %u blocks for %" PRId64 " tiles", name, shape->grid[0], tiles);
}

/* Outlier columns that the product finds: of one tile, or pair of tiles, a block, or pair of blocks. */
static void check_found(const char *const name, const bsh_int8_gemm_args *const args, const int64_t columns) {
  if (args->claims == NULL) return;
  CHECK(bsh_gemm_int8_sm90_finds((int32_t)columns) && args->splits == 1 && args->M <= BSH_INT8_FOUND_ROWS &&
            args->K <= BSH_INT8_FOUND_K && args->threshold == int8_product->threshold,
        "%s: cannot find outliers of %d x %d", name, args->M, args->K);
  use_scratch(name, args->claims, args->K * (int64_t)sizeof(uint16_t));
  use_scratch(name, args->shares, (int64_t)sizeof(uint32_t));
  use_scratch(name, args->found_x, 2 * (int64_t)args->M * BSH_INT8_CHUNK);
  use_scratch(name, args->found_codes, (int64_t)args->M * BSH_INT8_CHUNK);
}

static void check_gemm_int8_sm90(const char *const name, const bsh_int8_gemm_args *const args,
                                 const bsh_cuda_launch_shape *const shape, const int32_t sms) {
#define ROWS_FORM(name, rows, columns, stages, cluster) {#name, rows, columns},
#define RING_FORM(name, rows, columns, stages, cluster) {#name, stages, cluster},
  static const form forms[] = {BSH_GEMM_INT8_SM90_FORMS(ROWS_FORM)}, rings[] = {BSH_GEMM_INT8_SM90_FORMS(RING_FORM)};
  const char *const form_name = strchr(name + strlen("gemm_int8_sm90_"), '_') + 1;
  int i = 0;
  while (strcmp(forms[i].name, form_name) != 0) i++; /* one name begins with another */
  const int64_t rows = forms[i].first * rings[i].second, columns = forms[i].second;
  CHECK(args->m_tiles == divide_up(args->M, rows) && args->tiles == args->m_tiles * divide_up(args->N, columns),
        "%s: %d of %d tiles", name, args->m_tiles, args->tiles);
  CHECK(args->splits == 1 || rings[i].second == 1, "%s: %d splits", name, args->splits);
  check_clusters(name, shape, rings[i].second * args->splits, args->tiles, args->splits,
                 divide_up(args->K, BSH_GEMM_INT8_DEPTH), sms);
  const int32_t shared =
      bsh_gemm_int8_sm90_shared_bytes((int32_t)forms[i].first, (int32_t)columns, (int32_t)rings[i].first);
  CHECK(shape->shared_bytes == shared, "%s: %d bytes", name, (int)shape->shared_bytes);
  use_scratch(name, args->partial, args->tiles * (args->splits - 1) * forms[i].first * columns * 4);
  check_found(name, args, columns);
  if (args->outliers.capacity > 0)
    CHECK(maps[0].data == args->outliers.x && maps[1].data == args->outliers.w && maps[0].box_rows == forms[i].first &&
              maps[1].box_rows * bsh_gemm_int8_sm90_readers((int32_t)rings[i].second) == columns &&
              maps[0].columns == args->outliers.capacity && maps[1].rows == args->N,
          "%s: maps of gathered columns", name);
}

static void check_mixed(const char *const name, const bsh_int8_mixed_args *const args,
                        const bsh_cuda_launch_shape *const shape, const int32_t sms) {
#define TOKENS_FORM(name, tokens, stages) {#name, tokens, stages},
  static const form forms[] = {BSH_MIXED_INT8_FORMS(TOKENS_FORM)};
  const bool dgrad = name[0] == 'd';
  const form known = form_of(name, dgrad ? "dgrad_int8_sm90" : "mixed_int8_sm90", forms, sizeof forms / sizeof *forms);
  const int64_t N = int8_product->N, K = int8_product->K;
  used.n = 0;
  CHECK(args->rows == (dgrad ? K : N) && args->depth == (dgrad ? N : K), "%s: %d x %d", name, args->rows, args->depth);
  CHECK(args->token_tiles == divide_up(args->M, known.first) &&
            args->tiles == args->token_tiles * divide_up(args->rows, 2 * BSH_MIXED_INT8_ROWS),
        "%s: %d of %d tiles", name, args->token_tiles, args->tiles);
  CHECK(args->splits <= BSH_MIXED_INT8_SPLITS, "%s: %d pairs of blocks", name, args->splits);
  check_clusters(name, shape, 2 * args->splits, args->tiles, args->splits, divide_up(args->depth, 128), sms);
  CHECK(shape->shared_bytes == bsh_mixed_int8_shared_bytes((int32_t)known.first, (int32_t)known.second), "%s: %d bytes",
        name, (int)shape->shared_bytes);
  CHECK(maps[0].data == int8_product->x && maps[0].columns == args->depth && maps[0].box_rows * 2 == known.first &&
            maps[0].box_columns == BSH_MIXED_INT8_DEPTH && maps[0].row_bytes == int8_product->ldx * 2,
        "%s: map of x", name);
  CHECK(maps[1].rows == N && maps[1].columns == K && maps[1].box_rows == (dgrad ? 64 : 128) &&
            maps[1].box_rows * maps[1].box_columns == BSH_MIXED_INT8_DEPTH * BSH_MIXED_INT8_ROWS,
        "%s: map of W", name);
  CHECK(args->store_pairs == (aligned(args->y, 4) && args->rows % 2 == 0), "%s: pairs", name);
  if (dgrad) use_scratch(name, args->scales, bsh_dgrad_int8_pairs(N) * (int64_t)sizeof *args->scales);
}

/* Whether `name` is of an int8 kernel. */
static bool check_int8(const bsh_cuda_context *const context, const char *const name, void **const arguments,
                       const bsh_cuda_launch_shape *const shape) {
  if (int8_product == NULL) return false;
  if (strncmp(name, "gemm_int8_sm90", 14) == 0) {
    check_codes(name, arguments[4]);
    check_gemm_int8_sm90(name, arguments[4], shape, context->sms);
  } else if (strncmp(name, "gemm_int8", 9) == 0) {
    const bsh_int8_gemm_args *const args = arguments[0];
    check_codes(name, args);
    CHECK(args->m_tiles == divide_up(args->M, BSH_GEMM_INT8_TILE) && shape->grid[0] == (uint32_t)args->tiles &&
              args->tiles == args->m_tiles * divide_up(args->N, BSH_GEMM_INT8_TILE),
          "%s: %d of %d tiles", name, args->m_tiles, args->tiles);
  } else if (strncmp(name, "mixed_int8", 10) == 0 || strncmp(name, "dgrad_int8", 10) == 0) {
    check_mixed(name, arguments[2], shape, context->sms);
  } else if (strncmp(name, "gemv_int8_dgrad", 15) == 0) {
    const bsh_int8_gemv_dgrad_args *const args = arguments[0];
    const int64_t slabs = divide_up(args->K, BSH_GEMV_DGRAD_COLUMNS);
    const int64_t tokens = 8 * (strstr(name, "m8") ? 1 : strstr(name, "m16") ? 2 : 4);
    CHECK(shape->grid[0] == (uint32_t)(slabs * args->splits) && shape->grid[1] == (uint32_t)divide_up(args->M, tokens),
          "%s: %u x %u blocks", name, shape->grid[0], shape->grid[1]);
    used.n = 0;
    const int64_t sums = shape->grid[1] * slabs * args->splits * tokens * BSH_GEMV_DGRAD_COLUMNS;
    use_scratch(name, args->partial, args->splits == 1 ? 0 : sums * (int64_t)sizeof(float));
  } else if (strncmp(name, "gemv_int8", 9) == 0) {
    static const form forms[] = {BSH_GEMV_INT8_FORMS(FORM)};
    const form known = form_of(name, "gemv_int8", forms, sizeof forms / sizeof *forms);
    check_gemv_cut(name, arguments[0], shape, bsh_image_here(context->sm).arch, known);
  } else if (strncmp(name, "linear_int8", 11) == 0) {
    CHECK(shape->grid[1] * (uint64_t)BSH_INT8_ANY_TOKENS >= (uint64_t)int8_product->M, "%s: %u", name, shape->grid[1]);
  } else {
    return true; /* before or after a product */
  }
  int8_done += int8_product->M;
  return true;
}

bool bsh_cublas_usable(void) { return true; }
bsh_status bsh_cublas_gemm(const bsh_cuda_context *const context, const bsh_dtype dtype,
                           const bsh_torch_matrix *const c, const bsh_torch_matrix *const a,
                           const bsh_torch_matrix *const b, const bsh_torch_matrix *const bias, void *const workspace,
                           const int64_t workspace_bytes) {
  (void)context, (void)dtype, (void)a, (void)bias;
  const char *const begin = workspace;
  if (int8_product != NULL) {
    CHECK(c->offset == int8_done && c->columns == b->columns && b->data == scratch_begin &&
              begin >= scratch_begin + b->rows * b->columns * 2 &&
              begin + workspace_bytes <= scratch_begin + scratch_bytes,
          "columns %" PRId64 " to %" PRId64, c->offset, c->offset + c->columns);
    int8_done += c->columns;
    return BSH_OK;
  }
  CHECK(plan.vendor == BSH_VENDOR_CUBLAS && begin >= scratch_begin + b->rows * b->columns * dtype_size(dtype) &&
            begin + workspace_bytes <= scratch_begin + scratch_bytes,
        "%" PRId64 " bytes behind a panel", workspace_bytes);
  return check_product(c, b);
}

bsh_status bsh_cuda_launch(const bsh_cuda_context *const context, bsh_cuda_kernel *const kernel,
                           const bsh_cuda_launch_shape *const shape, void **const arguments) {
  const bsh_fused_args *const args = arguments[0];
  const char *const name = kernel->name;
  launches++;
  check_limits(name, shape, context->sm);
  if (check_int8(context, name, arguments, shape)) return BSH_OK;
  if (strncmp(name, "dequantize_4bit", 15) == 0) {
    CHECK(lines_done > 0 || (kernel == plan.panel.kernel && shape->grid[0] == plan.panel.shape.grid[0]),
          "%s: %u blocks, not as planned", name, shape->grid[0]);
    check_dequantize(arguments[0], strstr(name, "f32") != NULL ? 4 : 2);
    return BSH_OK;
  }
  if (strcmp(name, "x_units") == 0) {
    check_x_units(name, args, arguments);
    return BSH_OK;
  }
  if (strncmp(name, "join_splits", 11) == 0) return BSH_OK;
  if (strcmp(name, "clear_flags") == 0) {
    flags_cleared = *(uint32_t **)arguments[0], counters_cleared = *(int32_t *)arguments[1];
    return BSH_OK;
  }
  if (strncmp(name, "gemm_sm80_grouped", 17) == 0 || strncmp(name, "gemm_sm75_grouped", 17) == 0) {
    check_sm80_grouped(name, arguments[0], shape, weight_of_product, context->sms);
    rows_done += ((const bsh_gemm_sm80_args *)arguments[0])->M;
    return BSH_OK;
  }
  if (strncmp(name, "gemm_sm80", 9) == 0 || strncmp(name, "gemm_sm75", 9) == 0) {
    check_sm80(name, arguments[0], shape, context->sm, context->sms);
    check_scales(name, arguments[0], weight_of_product);
    rows_done += ((const bsh_gemm_sm80_args *)arguments[0])->M;
    return BSH_OK;
  }
  if (strncmp(name, "gemm_wide", 9) == 0) {
    check_wide(name, arguments, shape, context->sms);
    rows_done += ((const bsh_gemm_wide_args *)arguments[2])->M;
    return BSH_OK;
  }
  if (strncmp(name, "gemv_4bit_simt", 14) == 0) check_simt(name, args, shape);
  else if (strncmp(name, "gemv_4bit", 9) == 0) check_gemv(name, args, shape, context->sm);
  else check_gemm(name, args, shape, context->sms);
  rows_done += args->M;
  return BSH_OK;
}

/* ---- products ---- */

static void forget(const bsh_product_args *const args, const int64_t lines) {
  x_of_product = args->x, weight_of_product = &args->weight, n_lines = lines;
  rows_done = lines_done = dequantized = counters_cleared = scratch_bytes = 0, x_ordered = false;
}

static void check_done(const char *const op, const int64_t M, const int64_t N, const int64_t K,
                       const bsh_direction direction) {
  const bool panels = is_planned("panels");
  for (int i = 0; i < OF_4BIT; i++) by_4bit[i][direction] += is_planned(of_4bit[i]);
  CHECK(panels ? lines_done == n_lines && rows_done == 0 : lines_done == 0 && rows_done == M,
        "%s: M %" PRId64 " N %" PRId64 " K %" PRId64 " by %s: %" PRId64 " rows, %" PRId64 " lines done", op, M, N, K,
        bsh_kernel_name(plan.kernel), rows_done, lines_done);
  CHECK(!panels || plan.scratch_bytes <= bsh_cuda_workspace_bytes() || plan.panel_lines == 1,
        "%" PRId64 " bytes of scratch", plan.scratch_bytes);
}

/* By the kernel of this name, or NULL. Whether there is a plan. */
static bool forward(const bsh_product_args *const args, const char *const name, const bsh_vendor vendor,
                    const int32_t sm, const int32_t sms) {
  const bsh_cuda_context context = {.op = "linear_4bit", .sm = sm, .sms = sms};
  const bsh_torch_operands operands = {(void *)8, (void *)8, (void *)8};
  CHECK(bsh_force_kernel("linear_4bit", name) == BSH_OK, "%s", bsh_status_message());
  const bsh_status status = bsh_cuda_plan("linear_4bit", args, sm, sms, vendor, &plan);
  CHECK(status == BSH_OK || (status == BSH_NO_KERNEL && (name != NULL || vendor == BSH_VENDOR_NONE)), "%s",
        bsh_status_message());
  if (status != BSH_OK) return false;
  CHECK(name == NULL || is_planned(name), "%s was forced", name);
  forget(args, args->N);
  CHECK(bsh_cuda_product(args, &plan, &operands, &context) == BSH_OK, "%s", bsh_status_message());
  check_done("linear_4bit", args->M, args->N, args->K, BSH_FORWARD);
  return true;
}

/* By the kernel of this name, or NULL. Whether there is a plan. */
static bool gradient(const bsh_product_args *const args, const char *const name, const bsh_vendor vendor,
                     const int32_t sm, const int32_t sms) {
  bsh_product_args back = *args;
  back.x = args->y, back.y = (void *)(uintptr_t)args->x, back.bias = NULL;
  back.ldx = args->N, back.ldy = args->K, back.direction = BSH_INPUT_GRADIENT;
  const bsh_cuda_context context = {.op = "linear_4bit_dgrad", .sm = sm, .sms = sms};
  const bsh_torch_operands operands = {(void *)8, (void *)8, NULL};
  CHECK(bsh_force_kernel("linear_4bit_dgrad", name) == BSH_OK, "%s", bsh_status_message());
  const bsh_status status = bsh_cuda_plan("linear_4bit_dgrad", &back, sm, sms, vendor, &plan);
  CHECK(status == BSH_OK || (status == BSH_NO_KERNEL && (name != NULL || vendor == BSH_VENDOR_NONE)), "%s",
        bsh_status_message());
  if (status != BSH_OK) return false;
  forget(&back, args->K);
  CHECK(bsh_cuda_product(&back, &plan, &operands, &context) == BSH_OK, "%s", bsh_status_message());
  check_done("linear_4bit_dgrad", args->M, args->N, args->K, BSH_INPUT_GRADIENT);
  return true;
}

static bsh_product_args random_product(uint64_t *const state) {
  char *const memory = (char *)0x1000;
  const bool plain = random_below(state, 2), odd = random_below(state, 8) == 0;
  bsh_product_args args = {.x = memory, .y = memory, .dtype = (bsh_dtype)random_below(state, 3)};
  args.M = 1 + random_below(state, random_below(state, 2) ? 64 : 300);
  args.N = BSH_ROW_TILE * (1 + random_below(state, random_below(state, 4) ? 1100 : 10000)) - odd;
  args.K = BSH_UNIT * (1 + random_below(state, random_below(state, 4) ? 150 : 500)) - 32 * odd;
  args.ldx = args.K, args.ldy = args.N;
  args.bias = random_below(state, 2) ? memory : NULL;
  args.weight = (bsh_weight){.packed = (uint8_t *)memory, .n = args.N * args.K, .format = BSH_NF4};
  args.weight.blocksize = random_below(state, 4) ? 64 : 32 << random_below(state, 8);
  if (random_below(state, 4) == 0) args.weight.format = BSH_E2M1, args.weight.blocksize = 16 << random_below(state, 3);
  if (plain) args.weight.scales.absmax = (float *)memory;
  else args.weight.scales.absmax_code = (uint8_t *)memory + random_below(state, 5);
  if (random_below(state, 16) == 0) args.y = memory + dtype_size(args.dtype);
  if (random_below(state, 16) == 0) args.x = memory + 8;
  if (random_below(state, 16) == 0) args.weight.packed += 1 << random_below(state, 4);
  return args;
}

static void products(uint64_t *const state, const int rounds) {
  static const int32_t gpus[][2] = {{90, 132}, {90, 132}, {90, 132}, {90, 114},  {90, 78},  {80, 108},
                                    {75, 40},  {89, 128}, {86, 82},  {100, 148}, {120, 170}};
  for (int round = 0; round < rounds; round++) {
    const int32_t *const gpu = gpus[random_below(state, 11)];
    const bsh_product_args args = random_product(state);
    const bsh_vendor vendor = random_below(state, 2) ? BSH_VENDOR_TORCH : BSH_VENDOR_CUBLAS;
    int taken = 0;
    workspace = random_below(state, 4) ? 64 << 20 : 1 << (20 + random_below(state, 6));
    for (int kernel = 0; kernel < OF_4BIT; kernel++)
      if (forward(&args, of_4bit[kernel], vendor, gpu[0], gpu[1])) taken++;
    CHECK(taken > 0 && forward(&args, NULL, vendor, gpu[0], gpu[1]), "panels take anything");
    CHECK(forward(&args, NULL, BSH_VENDOR_NONE, gpu[0], gpu[1]) == (taken > 1), "%d kernels take it", taken);
    CHECK(gradient(&args, NULL, vendor, gpu[0], gpu[1]), "panels take any gradient");
    gradient(&args, "panels", vendor, gpu[0], gpu[1]);
    const bool wide = gradient(&args, "gemm_4bit_sm90_wide", vendor, gpu[0], gpu[1]);
    const bool sm80 = gradient(&args, "gemm_4bit_sm80", vendor, gpu[0], gpu[1]);
    const bool sm75 = gradient(&args, "gemm_4bit_sm75", vendor, gpu[0], gpu[1]);
    CHECK(gradient(&args, NULL, BSH_VENDOR_NONE, gpu[0], gpu[1]) == (wide || sm80 || sm75),
          "three kernels know the gradient");
  }
  workspace = 64 << 20;
}

#include "launch_stacks.h"

/* ---- int8 ---- */

/* By the kernel of this name, or NULL. Whether it takes the product. */
static bool run_int8(const bsh_product_args *const args, const bool dgrad, const char *const name, const int32_t sm,
                     const int32_t sms) {
  const char *const op = dgrad ? "linear_int8_dgrad" : "linear_int8";
  const bsh_cuda_context context = {.op = op, .sm = sm, .sms = sms};
  const bsh_torch_operands none = {0};
  bsh_product_args product = *args;
  if (dgrad) product.ldx = args->N + args->ldx - args->K, product.ldy = args->K, product.bias = NULL;
  product.direction = dgrad ? BSH_INPUT_GRADIENT : BSH_FORWARD;
  CHECK(bsh_force_kernel(op, name) == BSH_OK, "%s", bsh_status_message());
  scratch_bytes = int8_done = 0, int8_product = &product;
  bsh_status status = bsh_cuda_plan(op, &product, sm, sms, BSH_VENDOR_CUBLAS, &plan);
  if (status == BSH_OK) status = bsh_cuda_product(&product, &plan, &none, &context);
  const int64_t M = args->M;
  const bool panels = dgrad && int8_done == args->K && (name == NULL || strcmp(name, "panels") == 0);
  CHECK(status == BSH_NO_KERNEL ? name != NULL : status == BSH_OK && (int8_done == M || panels),
        "%s M %" PRId64 " N %" PRId64 " K %" PRId64 ": %" PRId64 " done, %s", name ? name : "chosen", M, args->N,
        args->K, int8_done, bsh_status_message());
  int8_product = NULL;
  return status == BSH_OK;
}

static void int8_products(uint64_t *const state, const int rounds) {
  static const int32_t gpus[][2] = {{90, 132}, {90, 132}, {90, 132}, {90, 114}, {90, 78},
                                    {80, 108}, {75, 40},  {89, 128}, {100, 148}};
  char *const memory = (char *)0x1000;
  for (int round = 0; round < rounds; round++) {
    const int32_t *const gpu = gpus[random_below(state, 9)];
    const bool odd = random_below(state, 8) == 0;
    bsh_product_args args = {.x = memory, .y = memory};
    args.weight = (bsh_weight){.packed = (uint8_t *)memory, .scales = {.absmax = (float *)memory}, .format = BSH_INT8};
    args.dtype = (bsh_dtype)random_below(state, 3), args.threshold = random_below(state, 2) ? 6.f : 0.f;
    args.M = 1 + random_below(state, random_below(state, 2) ? 130 : 1200);
    args.N = 16 * (1 + random_below(state, random_below(state, 4) ? 300 : 2000)) - odd;
    args.K = 64 * (1 + random_below(state, random_below(state, 4) ? 80 : 300)) - 8 * odd;
    args.ldx = args.K + 8 * random_below(state, 3), args.ldy = args.N, args.weight.n = args.N * args.K;
    if (random_below(state, 16) == 0) args.y = memory + dtype_size(args.dtype);
    if (random_below(state, 16) == 0) args.x = memory + 8;
    if (random_below(state, 16) == 0) args.weight.packed += 1 << random_below(state, 4);
    workspace = random_below(state, 4) ? 64 << 20 : 1 << (16 + random_below(state, 8));
    no_tensor_maps = random_below(state, 16) == 0;
    for (int dgrad = 0; dgrad < 2; dgrad++) {
      for (int kernel = 0; kernel < OF_INT8; kernel++)
        if (run_int8(&args, dgrad, of_int8[kernel], gpu[0], gpu[1])) by_int8[kernel]++;
      CHECK(run_int8(&args, dgrad, NULL, gpu[0], gpu[1]), "some kernel takes anything");
    }
  }
  workspace = 64 << 20, no_tensor_maps = false;
}

/* A result that lies elsewhere than planned is refused: the kernels would store beyond what the GPU can. */
static void another_address(void) {
  char *const memory = (char *)0x1000;
  bsh_product_args args = {.x = memory, .M = 1, .N = 4096, .K = 4096, .ldx = 4096, .ldy = 4096, .dtype = BSH_BF16};
  args.weight = (bsh_weight){.packed = (uint8_t *)memory, .n = 1 << 24, .blocksize = 64};
  const bsh_cuda_context context = {.op = "linear_4bit", .sm = 90, .sms = 132};
  const bsh_torch_operands none = {0};
  CHECK(bsh_cuda_plan("linear_4bit", &args, 90, 132, BSH_VENDOR_TORCH, &plan) == BSH_OK, "%s", bsh_status_message());
  const int before = launches;
  args.y = memory + 2;
  CHECK(bsh_cuda_product(&args, &plan, &none, &context) == BSH_BAD_VALUE && launches == before, "y moved");
}

/* Many rows of a large weight; where the driver makes no tensor maps, panels take over; forced, the refusal says why.
 */
static void old_driver(void) {
  char *const memory = (char *)0x1000;
  bsh_product_args args = {
      .x = memory, .y = memory, .M = 256, .N = 8192, .K = 8192, .ldx = 8192, .ldy = 8192, .dtype = BSH_BF16};
  args.weight = (bsh_weight){.packed = (uint8_t *)memory, .n = 1 << 26, .blocksize = 64};
  no_tensor_maps = true;
  CHECK(!forward(&args, "gemm_4bit_sm90_wide", BSH_VENDOR_TORCH, 90, 132) &&
            strstr(bsh_status_message(), "no tensor maps") != NULL,
        "%s", bsh_status_message());
  CHECK(forward(&args, NULL, BSH_VENDOR_TORCH, 90, 132) && is_planned("panels"), "panels");
  CHECK(gradient(&args, NULL, BSH_VENDOR_TORCH, 90, 132) && is_planned("panels"), "panels");
  no_tensor_maps = false;
  CHECK(forward(&args, NULL, BSH_VENDOR_TORCH, 90, 132) && is_planned("gemm_4bit_sm90_wide"), "by default");
  CHECK(gradient(&args, NULL, BSH_VENDOR_TORCH, 90, 132) && is_planned("gemm_4bit_sm90_wide"), "by default");
}

static void wrong_names(void) {
  CHECK(bsh_force_kernel("linear_4bit", "gemv") == BSH_BAD_VALUE, "gemv is no kernel");
  CHECK(bsh_force_kernel("linear_4bit", "gemv_int8") == BSH_BAD_VALUE, "gemv_int8 is none of 4-bit weights");
  CHECK(bsh_force_kernel("linear", "panels") == BSH_BAD_VALUE, "linear is no op");
  CHECK(bsh_forced_kernel(BSH_OF_4BIT, BSH_FORWARD) == NULL, "nothing is forced");
}

int main(const int argc, char **const argv) {
  check_seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
  const int rounds = argc > 2 ? atoi(argv[2]) : 60;
  uint64_t state = check_seed;
  products(&state, 100 * rounds);
  stacks(&state, 20 * rounds);
  int8_products(&state, 20 * rounds);
  another_address();
  old_driver();
  wrong_names();
  for (int kernel = 0; kernel < OF_4BIT; kernel++) CHECK(by_4bit[kernel][BSH_FORWARD] > rounds, "%s", of_4bit[kernel]);
  for (int kernel = 3; kernel < OF_4BIT; kernel++)
    CHECK(by_4bit[kernel][BSH_INPUT_GRADIENT] > rounds, "gradients by %s", of_4bit[kernel]);
  for (int kernel = 0; kernel < OF_INT8; kernel++) CHECK(by_int8[kernel] > rounds, "%s", of_int8[kernel]);
  printf("test_launch: ok, seed %" PRIu64 ", %d launches\n", check_seed, launches);
  return 0;
}
