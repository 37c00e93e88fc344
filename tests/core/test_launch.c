/* test_launch.c - how csrc/cuda_linear.c cuts products into launches, without a GPU: the driver is replaced by
 * functions that check what a kernel would do with its arguments. What a kernel computes from them is written down here
 * again. */
#include "check.h"

#include "arithmetic.h"
#include "cuda_linear.h"
#include "cuda_ops.h"

uint64_t check_seed;

/* Scratch memory of the call under test; addresses only, nothing is written there. */
static char *const scratch_begin = (char *)0x7000000000;
static int64_t scratch_bytes;
static const bsh_linear_4bit_args *product;
static int64_t counters_cleared;
static bool x_ordered;
static int64_t rows_done; /* of x */
static int launches;

bsh_status bsh_cuda_scratch_new(const bsh_cuda_context *const context, const int64_t n_bytes,
                                bsh_cuda_scratch *const scratch) {
  (void)context;
  CHECK(n_bytes > 0, "%" PRId64 " bytes of scratch", n_bytes);
  scratch_bytes = n_bytes;
  *scratch = (bsh_cuda_scratch){.data = scratch_begin};
  return BSH_OK;
}
void bsh_cuda_scratch_delete(bsh_cuda_scratch *const scratch) {
  *scratch = (bsh_cuda_scratch){0};
  scratch_bytes = 0;
}

#define SHAPE "%s: M %d N %d K %d"
#define SHAPE_OF(name, args) name, (args)->M, (args)->N, (args)->K

static void check_inside(const char *const name, const bsh_fused_args *const args, const void *const from,
                         const int64_t n_bytes) {
  const int64_t begin = (const char *)from - scratch_begin;
  CHECK(from != NULL && begin >= 0 && begin + n_bytes <= scratch_bytes,
        SHAPE ": bytes %" PRId64 " to %" PRId64 " of %" PRId64, SHAPE_OF(name, args), begin, begin + n_bytes,
        scratch_bytes);
}

static int64_t number_after(const char *const name, const char *const mark) {
  const char *const at = strstr(name, mark);
  return at != NULL ? strtol(at + strlen(mark), NULL, 10) : 0;
}

static void check_gemv(const char *const name, const bsh_fused_args *const args,
                       const bsh_cuda_launch_shape *const shape) {
  const int64_t tokens = number_after(name, "_m"), units = number_after(name, "_k"), tiles = args->N / BSH_ROW_TILE;
  const int64_t teams = shape->grid[0] / args->k_splits, warps = shape->block[0] / 32;
  CHECK(teams * args->k_splits == shape->grid[0] && (shape->cluster <= 1 || (int)shape->cluster == args->k_splits),
        SHAPE, SHAPE_OF(name, args));
  CHECK(tokens * shape->grid[1] >= args->M && tokens * (shape->grid[1] - 1) < args->M, SHAPE, SHAPE_OF(name, args));
  CHECK(args->team_tiles * teams + args->longer_teams == tiles && args->longer_teams < teams && args->team_tiles > 0,
        SHAPE ": %d tiles, %d of %" PRId64 " teams with one more", SHAPE_OF(name, args), args->team_tiles,
        args->longer_teams, teams);
  CHECK(args->steps == divide_up(args->team_tiles, args->row_groups) &&
            args->longer_steps == divide_up(args->team_tiles + 1, args->row_groups),
        SHAPE, SHAPE_OF(name, args));
  CHECK(warps == args->k_warps * args->row_groups && warps <= 16, SHAPE ": %" PRId64 " warps", SHAPE_OF(name, args),
        warps);
  for (int64_t w = 0; w < warps; w++)
    CHECK(w * args->group_of_warp >> 16 == w / args->k_warps, SHAPE ": warp %" PRId64, SHAPE_OF(name, args), w);
  CHECK(args->k_splits * args->k_warps * units * BSH_UNIT >= args->K, SHAPE, SHAPE_OF(name, args));
  if (args->k_splits > 1)
    check_inside(name, args, args->partial, shape->grid[1] * tiles * args->k_splits * tokens * BSH_ROW_TILE * 4);
}

static void check_x_units(const char *const name, const bsh_fused_args *const args, void **const arguments) {
  const int64_t tokens = *(int32_t *)arguments[2], units = *(int32_t *)arguments[3];
  counters_cleared = *(int32_t *)arguments[4];
  check_inside(name, args, args->counters, counters_cleared * 4);
  if (tokens == 0) return;
  CHECK(tokens >= args->M && units * BSH_UNIT >= args->K, SHAPE, SHAPE_OF(name, args));
  CHECK(args->x == product->x || rows_done > 0, SHAPE, SHAPE_OF(name, args));
  check_inside(name, args, *(void **)arguments[1], tokens * units * BSH_UNIT * 2);
  CHECK(*(char **)arguments[1] + tokens * units * BSH_UNIT * 2 <= (char *)args->counters, SHAPE, SHAPE_OF(name, args));
  x_ordered = true;
}

/* The blocks of threads that own pieces of a row block leave their sums side by side. */
static void check_joint(const char *const name, const bsh_fused_args *const args, const int64_t parts,
                        const int64_t last_tile, const int64_t tokens, const int64_t k_parts) {
  CHECK(parts <= args->k_splits, SHAPE ": %" PRId64 " parts, room for %d", SHAPE_OF(name, args), parts, args->k_splits);
  CHECK(counters_cleared >= (last_tile + 1) * k_parts, SHAPE ": %" PRId64 " counters cleared", SHAPE_OF(name, args),
        counters_cleared);
  check_inside(name, args, args->partial, (last_tile * args->k_splits + parts) * tokens * BSH_ROW_TILE * 4);
}

static int64_t first_piece(const bsh_fused_args *const args, const int64_t blocks, const int64_t i) {
  return i * args->block_pieces + i * args->more_pieces / blocks;
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
  const int64_t tokens = number_after(name, "_m"), k_parts = strstr(name, "_p2") != NULL ? 2 : 1;
  const bool own_x = tokens == 32 && k_parts == 2;
  const int64_t warps = tokens == 64 && k_parts == 1 ? 12 : 16, tiles = args->N / BSH_ROW_TILE;
  const int64_t row_tiles = k_parts == 2 ? args->row_tiles : warps / k_parts, row_blocks = divide_up(tiles, row_tiles);
  const int64_t pieces = divide_up(args->K / BSH_UNIT, BSH_PIECE_UNITS * k_parts), total = row_blocks * pieces;
  const int64_t blocks = shape->grid[0], sharing = k_parts == 2 ? pieces : total; /* blocks that share pieces */
  CHECK(tokens >= args->M && shape->block[0] == (uint32_t)(warps + (own_x ? 4 : 0)) * 32, SHAPE, SHAPE_OF(name, args));
  CHECK(blocks > 0 && blocks * shape->grid[1] <= sms && total * blocks < INT32_MAX, SHAPE ": %" PRId64 " x %u blocks",
        SHAPE_OF(name, args), blocks, shape->grid[1]);
  CHECK(shape->grid[1] == (k_parts == 2 ? row_blocks : 1), SHAPE ": %u", SHAPE_OF(name, args), shape->grid[1]);
  CHECK(row_tiles > 0 && row_tiles <= warps / k_parts, SHAPE ": %" PRId64 " row tiles", SHAPE_OF(name, args),
        row_tiles);
  CHECK(own_x ? (const char *)args->x != scratch_begin : x_ordered && (const char *)args->x == scratch_begin, SHAPE,
        SHAPE_OF(name, args));
  CHECK(args->block_pieces * blocks + args->more_pieces == sharing && args->more_pieces < blocks &&
            args->block_pieces > 0,
        SHAPE ": %d pieces a block, %d more", SHAPE_OF(name, args), args->block_pieces, args->more_pieces);
  int64_t *const leaving = calloc((size_t)row_blocks, sizeof *leaving); /* owners of a row block that leave sums */
  if (k_parts == 1) check_walk(name, args, blocks, pieces, row_blocks, leaving);
  for (int64_t b = 0; b < row_blocks; b++) {
    if (k_parts == 2 && blocks > 1) leaving[b] = blocks;
    const int64_t end = (b + 1) * row_tiles;
    if (leaving[b] > 0) check_joint(name, args, leaving[b], (end < tiles ? end : tiles) - 1, tokens, k_parts);
  }
  free(leaving);
  CHECK(aligned(args->y, 4) && args->ldy % 2 == 0, SHAPE, SHAPE_OF(name, args)); /* two rows of W a store */
  counters_cleared = 0, x_ordered = false;                                       /* the next slice wants its own */
}

bsh_status bsh_cuda_launch(const bsh_cuda_context *const context, bsh_cuda_kernel *const kernel,
                           const bsh_cuda_launch_shape *const shape, void **const arguments) {
  const bsh_fused_args *const args = arguments[0];
  launches++;
  if (strcmp(kernel->name, "x_units") == 0) {
    check_x_units(kernel->name, args, arguments);
    return BSH_OK;
  }
  if (strncmp(kernel->name, "join_splits", 11) == 0) return BSH_OK;
  if (strncmp(kernel->name, "gemv_4bit_simt", 14) != 0) {
    if (strncmp(kernel->name, "gemv_4bit", 9) == 0) check_gemv(kernel->name, args, shape);
    else check_gemm(kernel->name, args, shape, context->sms);
  }
  rows_done += args->M;
  return BSH_OK;
}

static void launch(const bsh_linear_4bit_args *const args, const bsh_linear_kernel kernel, const int32_t sm,
                   const int32_t sms) {
  const bsh_cuda_context context = {.op = "linear_4bit", .sm = sm, .sms = sms};
  product = args, rows_done = 0, counters_cleared = 0, x_ordered = false, scratch_bytes = 0;
  const bsh_status status = bsh_cuda_linear_4bit_fused(args, kernel, &context);
  const int64_t rows = status == BSH_OK ? args->M : 0;
  CHECK(rows_done == rows, "M %" PRId64 " N %" PRId64 " K %" PRId64 ": %" PRId64 " rows done", args->M, args->N,
        args->K, rows_done);
}

static void products(uint64_t *const state, const int rounds) {
  static const int32_t gpus[][2] = {{90, 132}, {90, 132}, {90, 132}, {90, 114},
                                    {90, 78},  {80, 108}, {75, 40},  {89, 128}};
  void *const memory = (void *)0x1000;
  for (int round = 0; round < rounds; round++) {
    const int32_t *const gpu = gpus[random_below(state, 8)];
    const bool plain = random_below(state, 2);
    bsh_linear_4bit_args args = {.x = memory, .y = memory, .dtype = random_below(state, 2) ? BSH_BF16 : BSH_F16};
    args.M = 1 + random_below(state, random_below(state, 2) ? 64 : 300);
    args.N = BSH_ROW_TILE * (1 + random_below(state, random_below(state, 4) ? 1100 : 10000));
    args.K = BSH_UNIT * (1 + random_below(state, random_below(state, 4) ? 150 : 500));
    args.ldx = args.K, args.ldy = args.N;
    if (random_below(state, 16) == 0) args.y = (char *)memory + 2;
    if (random_below(state, 16) == 0) args.ldy++;
    args.weight = (bsh_weight){.packed = memory, .n = args.N * args.K, .blocksize = 64, .format = BSH_NF4};
    if (plain) args.weight.scales.absmax = memory;
    else args.weight.scales.absmax_code = memory;
    launch(&args, BSH_LINEAR_GEMV, gpu[0], gpu[1]);
    launch(&args, BSH_LINEAR_GEMM_SM90, gpu[0], gpu[1]);
  }
}

int main(const int argc, char **const argv) {
  check_seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
  const int rounds = argc > 2 ? atoi(argv[2]) : 60;
  uint64_t state = check_seed;
  products(&state, 300 * rounds);
  printf("test_launch: ok, seed %" PRIu64 ", %d launches\n", check_seed, launches);
  return 0;
}
