/* cuda_linear.c - how the fused linear kernels are cut into thread blocks, and their launches. */
#include "cuda_linear.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "arithmetic.h"
#include "cuda_ops.h"
#include "select.h"

#ifndef BSH_CUDA_ARCHS
#define BSH_CUDA_ARCHS "75,80,90a,100,120,compute_120" /* a build without kernels chooses like one with all of them */
#endif

/* What this build's kernels were compiled for as the driver loads them on GPU `sm`; the last answer is kept. */
static bsh_kernel_image image_for(int32_t sm) {
  static _Atomic(uint32_t) last; /* sm << 16 | arch << 1 | this_gpu_only */
  const uint32_t known = atomic_load_explicit(&last, memory_order_relaxed);
  if (known >> 16 == (uint32_t)sm) return (bsh_kernel_image){(int32_t)(known >> 1 & 0x7FFF), known & 1};
  const bsh_kernel_image image = bsh_image_for(BSH_CUDA_ARCHS, sm);
  if (sm > 0 && sm < 0x8000)
    atomic_store_explicit(&last, (uint32_t)sm << 16 | (uint32_t)image.arch << 1 | image.this_gpu_only,
                          memory_order_relaxed);
  return image;
}

/* ---- gemv_4bit.cu ---- */

enum { WIDE_SHARED = 224 * 1024, MAX_CLUSTER = 8, MAX_TOKENS = 64 };

/* How one product is cut; the words are those of bsh_fused_args. */
typedef struct {
  int32_t token_tiles, units; /* template arguments of the kernel: tokens / 8, units of K per warp */
  int32_t token_groups;       /* of token_tiles * 8 tokens, each with blocks of its own */
  int32_t k_splits, k_warps, row_groups;
  int32_t teams; /* groups of k_splits blocks, for each token group */
} gemv_plan;

/* Kernels made for 227 KiB of shared memory, clusters and dependent launch (WIDE in cuda/decode.cuh). */
static bool is_wide(int32_t arch) { return arch >= 90 && arch < 120; }

/* WARPS in gemv_4bit.cu. */
static int32_t gemv_warps(int32_t arch) { return is_wide(arch) ? 16 : arch >= 80 ? 8 : 4; }

/* Clusters of k blocks, one block per multiprocessor, that run at once. A cluster lies in one GPC; an H200 has 132
 * multiprocessors in GPCs of 14 to 18. A guess too high costs a second wave, nothing else. */
static int64_t clusters_at_once(int64_t sms, int64_t k) {
  static const int32_t of_132[MAX_CLUSTER + 1] = {0, 132, 66, 42, 30, 22, 20, 16, 14};
  const int64_t clusters = of_132[k] * sms / 132;
  return clusters > 0 ? clusters : 1;
}
static int64_t teams_at_once(int64_t sms, int64_t k_splits, bool wide) {
  if (wide) return clusters_at_once(sms, k_splits);
  return sms / k_splits > 0 ? sms / k_splits : 1;
}

/* Groups of 16 tokens decode W again for each group, yet beat 32 tokens a block where blocks have 16 warps: x of 32
 * tokens takes the registers of 8 of them (benchmarks/results/small_m_h200_202611.md). */
static int32_t gemv_token_tiles(int64_t M, int32_t arch) {
  if (M <= 8) return 1;
  return M <= 16 || is_wide(arch) || arch < 80 ? 2 : 4;
}

static gemv_plan plan_gemv(int64_t M, int64_t N, int64_t K, int32_t arch, int32_t sms) {
  const int64_t units = K / BSH_UNIT, tiles = N / BSH_ROW_TILE, warps = gemv_warps(arch);
  gemv_plan plan = {.token_tiles = gemv_token_tiles(M, arch)};
  plan.token_groups = (int32_t)divide_up(M, plan.token_tiles * 8);
  plan.units = plan.token_tiles == 1 && units > 4 * warps ? 8 : 4;
  const int64_t all_warps = divide_up(units, plan.units);
  plan.k_splits = (int32_t)divide_up(all_warps, warps);
  plan.k_warps = (int32_t)divide_up(all_warps, plan.k_splits);
  const int64_t most = teams_at_once(sms, plan.k_splits, is_wide(arch)) / plan.token_groups;
  const int64_t teams = most > 0 ? most : 1;
  plan.row_groups = (int32_t)min_i64(warps / plan.k_warps, divide_up(tiles, teams));
  plan.teams = (int32_t)min_i64(teams, divide_up(tiles, plan.row_groups));
  return plan;
}

/* What gemv_4bit.cu takes. */
static bool tensor_cores_take(int64_t M, int64_t N, int64_t K, bsh_dtype dtype, int32_t sm, int64_t blocksize) {
  const int32_t arch = image_for(sm).arch;
  if (dtype == BSH_F32 || arch < 75 || (dtype == BSH_BF16 && arch < 80)) return false;
  if (is_wide(arch) && !is_wide(sm)) return false; /* the memory is missing */
  if (M < 1 || M > MAX_TOKENS || N % BSH_ROW_TILE || K % BSH_UNIT || blocksize % BSH_UNIT) return false;
  if (K > INT32_MAX / BSH_ROW_TILE || N > INT32_MAX / 16 || N * (K / BSH_UNIT) > UINT32_MAX) return false;
  return !is_wide(arch) || plan_gemv(M, N, K, arch, 1).k_splits <= MAX_CLUSTER;
}

/* What gemv_4bit_simt.cu takes: 8 rows of x a launch; two launches still read less than dequantizing does. */
enum { SIMT_TOKENS = 8, SIMT_BLOCKSIZE = 32, SIMT_ROWS = 32, SIMT_THREADS = 256 };
static bool simt_takes(int64_t M, int64_t N, int64_t K) {
  return M >= 1 && M <= 2 * SIMT_TOKENS && K % SIMT_BLOCKSIZE == 0 && K <= INT32_MAX - 256 &&
         N <= INT32_MAX - SIMT_ROWS;
}

bool bsh_gemv_takes(int64_t M, int64_t N, int64_t K, bsh_dtype dtype, int32_t sm, int64_t blocksize) {
  return tensor_cores_take(M, N, K, dtype, sm, blocksize) || simt_takes(M, N, K);
}

#define GEMV_KERNEL(NAME, SHARED) {.fatbin = BSH_FATBIN_gemv_4bit, .name = NAME, .shared_bytes = (SHARED)}
#define GEMV_SCALES(NAME, SHARED) {GEMV_KERNEL(NAME, SHARED), GEMV_KERNEL(NAME "_any", SHARED)}
#define GEMV_SHAPES(DTYPE, SHARED)                                                                                     \
  {GEMV_SCALES("gemv_4bit_" DTYPE "_m8_k4", SHARED), GEMV_SCALES("gemv_4bit_" DTYPE "_m8_k8", SHARED),                 \
   GEMV_SCALES("gemv_4bit_" DTYPE "_m16_k4", SHARED), GEMV_SCALES("gemv_4bit_" DTYPE "_m32_k4", SHARED_80_M32)}
#define GEMV_DTYPES(SHARED) {GEMV_SHAPES("bf16", SHARED), GEMV_SHAPES("f16", SHARED)}

/* Table + map + sums + rings, as gemv_4bit.cu lays them out: [sm_75, sm_80.., wide][dtype][shape][any scales] */
enum { SHARED_75 = 32768 + 1024 + 8192 + 4 * 2 * 2048, SHARED_80 = 32768 + 1024 + 16384 + 8 * 3 * 2048 };
enum { SHARED_80_M32 = 32768 + 1024 + 32768 + 8 * 2 * 2048 }; /* only sm_80.. has this form */
static bsh_cuda_kernel gemv_kernels[3][2][4][2] = {GEMV_DTYPES(SHARED_75), GEMV_DTYPES(SHARED_80),
                                                   GEMV_DTYPES(WIDE_SHARED)};
#define JOIN_KERNELS(DTYPE)                                                                                            \
  {GEMV_KERNEL("join_splits_" DTYPE "_m8", 0), GEMV_KERNEL("join_splits_" DTYPE "_m16", 0),                            \
   GEMV_KERNEL("join_splits_" DTYPE "_m32", 0)}
static bsh_cuda_kernel join_kernels[2][3] = {JOIN_KERNELS("bf16"), JOIN_KERNELS("f16")}; /* [dtype][token tiles / 2] */

static bsh_fused_args fused_args(const bsh_linear_4bit_args *args) {
  const bsh_weight *weight = &args->weight;
  const bsh_scales *scales = &weight->scales;
  return (bsh_fused_args){
      .packed = weight->packed,
      .absmax = scales->absmax,
      .absmax_code = scales->absmax_code,
      .absmax_map = scales->absmax_map,
      .absmax2 = scales->absmax2,
      .offset = scales->offset,
      .x = args->x,
      .bias = args->bias,
      .y = args->y,
      .ldx = args->ldx,
      .ldy = args->ldy,
      .M = (int32_t)args->M,
      .N = (int32_t)args->N,
      .K = (int32_t)args->K,
      .format = (int32_t)weight->format,
      .block_shift = weight->blocksize < BSH_UNIT ? 0 : __builtin_ctzll((uint64_t)weight->blocksize / BSH_UNIT),
  };
}

static bsh_status launch_gemv(const bsh_linear_4bit_args *args, const bsh_cuda_context *context) {
  const int32_t arch = image_for(context->sm).arch;
  const int dtype = args->dtype == BSH_F16, generation = is_wide(arch) ? 2 : arch >= 80;
  const gemv_plan plan = plan_gemv(args->M, args->N, args->K, arch, context->sms);
  const bool nested_64 =
      !args->weight.scales.absmax && args->weight.blocksize == 64 &&
      (plan.units == 4 || (args->K / BSH_UNIT % 2 == 0 && aligned(args->weight.scales.absmax_code, 2)));
  bsh_fused_args kernel_args = fused_args(args);
  const int32_t tiles = (int32_t)(args->N / BSH_ROW_TILE), team_tiles = tiles / plan.teams;
  kernel_args.k_splits = plan.k_splits, kernel_args.k_warps = plan.k_warps, kernel_args.row_groups = plan.row_groups;
  kernel_args.group_of_warp = (int32_t)divide_up(1 << 16, plan.k_warps);
  kernel_args.team_tiles = team_tiles, kernel_args.longer_teams = tiles % plan.teams;
  kernel_args.steps = (int32_t)divide_up(team_tiles, plan.row_groups);
  kernel_args.longer_steps = (int32_t)divide_up(team_tiles + 1, plan.row_groups);

  bsh_cuda_scratch scratch = {0};
  if (plan.k_splits > 1) {
    const int64_t sums = args->N * plan.token_groups * plan.token_tiles * 8 * plan.k_splits;
    BSH_TRY(bsh_cuda_scratch_new(context, sums * (int64_t)sizeof(float), &scratch));
    kernel_args.partial = scratch.data;
  }
  const int shape_index = plan.token_tiles == 1 ? plan.units == 8 : plan.token_tiles == 2 ? 2 : 3;
  const bsh_cuda_launch_shape shape = {
      .grid = {(uint32_t)(plan.teams * plan.k_splits), (uint32_t)plan.token_groups, 1},
      .block = {(uint32_t)(32 * plan.k_warps * plan.row_groups), 1, 1},
      .cluster = generation == 2 ? (uint32_t)plan.k_splits : 1,
      .overlap = generation == 2,
  };
  void *arguments[] = {&kernel_args};
  bsh_status status =
      bsh_cuda_launch(context, &gemv_kernels[generation][dtype][shape_index][!nested_64], &shape, arguments);
  if (status == BSH_OK && plan.k_splits > 1 && generation != 2) {
    const bsh_cuda_launch_shape join = {
        .grid = {(uint32_t)divide_up(args->N * plan.token_tiles * 8, 256), (uint32_t)plan.token_groups, 1},
        .block = {256, 1, 1}};
    status = bsh_cuda_launch(context, &join_kernels[dtype][plan.token_tiles / 2], &join, arguments);
  }
  bsh_cuda_scratch_delete(&scratch);
  return status;
}

/* Rows [m, m + most) of the product, or what is left of them. */
static bsh_linear_4bit_args slice_of(const bsh_linear_4bit_args *args, int64_t m, int64_t most) {
  const int64_t itemsize = dtype_size(args->dtype);
  bsh_linear_4bit_args slice = *args;
  slice.M = min_i64(most, args->M - m);
  slice.x = (const char *)args->x + m * args->ldx * itemsize;
  slice.y = (char *)args->y + m * args->ldy * itemsize;
  return slice;
}

/* ---- gemv_4bit_simt.cu ---- */

static bsh_status launch_simt(const bsh_linear_4bit_args *args, const bsh_cuda_context *context) {
#define SIMT_KERNELS(DTYPE)                                                                                            \
  {                                                                                                                    \
    {.fatbin = BSH_FATBIN_gemv_4bit_simt, .name = "gemv_4bit_simt_" DTYPE "_plain"},                                   \
        {.fatbin = BSH_FATBIN_gemv_4bit_simt, .name = "gemv_4bit_simt_" DTYPE "_nested"}                               \
  }
  static bsh_cuda_kernel kernels[3][2] = {SIMT_KERNELS("f32"), SIMT_KERNELS("f16"), SIMT_KERNELS("bf16")};
  const bsh_cuda_launch_shape shape = {
      .grid = {(uint32_t)divide_up(args->N, SIMT_ROWS), 1, 1}, .block = {SIMT_THREADS, 1, 1}, .overlap = true};
  for (int64_t m = 0; m < args->M; m += SIMT_TOKENS) {
    const bsh_linear_4bit_args slice = slice_of(args, m, SIMT_TOKENS);
    bsh_fused_args kernel_args = fused_args(&slice);
    kernel_args.block_shift = __builtin_ctzll((uint64_t)args->weight.blocksize / SIMT_BLOCKSIZE);
    void *arguments[] = {&kernel_args};
    BSH_TRY(bsh_cuda_launch(context, &kernels[args->dtype][!args->weight.scales.absmax], &shape, arguments));
  }
  return BSH_OK;
}

/* ---- gemm_4bit_sm90.cu ---- */

bool bsh_gemm_sm90_takes(int64_t M, int64_t N, int64_t K, bsh_dtype dtype, int32_t sm, int64_t blocksize) {
  const bsh_kernel_image image = image_for(sm);
  if (sm != 90 || image.arch != 90 || !image.this_gpu_only || dtype == BSH_F32) return false;
  if (M < 1 || N % BSH_ROW_TILE || K % BSH_UNIT || blocksize % BSH_UNIT) return false;
  /* 32-bit block indices; fewer than 2^22 pieces of 192 x 256 weights, times up to 512 multiprocessors. */
  return K <= INT32_MAX / BSH_ROW_TILE && N <= INT32_MAX / 2 && N * (K / BSH_UNIT) <= INT32_MAX;
}

#define GEMM_KERNEL(NAME, SHARED) {.fatbin = BSH_FATBIN_gemm_4bit_sm90, .name = NAME, .shared_bytes = (SHARED)}
#define GEMM_SCALES(NAME) {GEMM_KERNEL(NAME, WIDE_SHARED), GEMM_KERNEL(NAME "_any", WIDE_SHARED)}
#define GEMM_TOKENS(DTYPE)                                                                                             \
  {                                                                                                                    \
    {GEMM_SCALES("gemm_4bit_" DTYPE "_m16"), GEMM_SCALES("gemm_4bit_" DTYPE "_m16")},                                  \
        {GEMM_SCALES("gemm_4bit_" DTYPE "_m32"), GEMM_SCALES("gemm_4bit_" DTYPE "_m32_p2")}, {                         \
      GEMM_SCALES("gemm_4bit_" DTYPE "_m64"), GEMM_SCALES("gemm_4bit_" DTYPE "_m64_p2")                                \
    }                                                                                                                  \
  }
/* [dtype][tokens][two parts of K][any scales] */
static bsh_cuda_kernel gemm_kernels[2][3][2][2] = {GEMM_TOKENS("bf16"), GEMM_TOKENS("f16")};
static bsh_cuda_kernel x_units_kernel = GEMM_KERNEL("x_units", 0);

/* x in the kernel's order, its counters, the partial sums: one piece of scratch memory. Where a product that orders x
 * itself has nothing to join, there is none of it, and no kernel in front. */
typedef struct {
  int64_t tokens, x_units; /* padded */
  int64_t x_bytes, counter_bytes, bytes;
  int32_t grid[2];        /* blocks of threads: that share `pieces`, and how often (two parts of K: row blocks) */
  int32_t pieces, splits; /* splits: blocks of threads that leave sums of a row block, at most */
  int32_t counters;       /* one for each row tile and part of K, if any leave sums */
  int32_t size;           /* log2(tokens / 16) */
  int32_t k_parts, warps; /* template arguments of the kernel; warps: those that multiply */
  int32_t row_tiles;      /* of a row block */
  bool own_x;             /* the kernel orders x itself (OWN_X) */
} gemm_plan;

/* Row tiles of a row block: one for each warp, or, for two parts of K, as few as leave each multiprocessor one row
 * block where it would have no more anyway. */
static int64_t row_tiles_of(int64_t tiles, int64_t warps, int64_t k_parts, int32_t sms) {
  const int64_t most = warps / k_parts;
  if (k_parts == 1 || 2 * divide_up(tiles, most) <= sms) return most;
  return divide_up(tiles, sms);
}

enum { GEMM_WARPS = 16, TWO_PARTS_32 = 70000000, TWO_PARTS_64 = 40000000, TWO_PARTS_64_BUSY = 90000000 }; /* weights */

/* Two parts of K in a block of threads halve its rows. Then every block has one share of one row block, whole or cut
 * along K. For larger weights, sharing all pieces out evenly is faster; at 64 rows that depends on whether 5 of 6 warps
 * would get rows (benchmarks/results/small_m_h200_202611.md). */
static bool two_parts(int64_t M, int64_t N, int64_t K, int32_t sms) {
  const int64_t tiles = N / BSH_ROW_TILE;
  if (M <= 16 || tiles > (int64_t)sms * GEMM_WARPS / 2) return false;
  if (M <= 32) return N * K <= TWO_PARTS_32;
  if (N * K <= TWO_PARTS_64) return true;
  const int64_t row_blocks = divide_up(tiles, row_tiles_of(tiles, GEMM_WARPS, 2, sms));
  return N * K <= TWO_PARTS_64_BUSY && 6 * tiles * (sms / row_blocks) >= 5 * sms * GEMM_WARPS / 2;
}

static gemm_plan plan_gemm(int64_t M, int64_t N, int64_t K, int32_t sms) {
  gemm_plan plan = {.size = M <= 16 ? 0 : M <= 32 ? 1 : 2, .k_parts = two_parts(M, N, K, sms) ? 2 : 1};
  plan.tokens = 16 << plan.size, plan.warps = plan.tokens == 64 && plan.k_parts == 1 ? 12 : GEMM_WARPS;
  plan.own_x = plan.tokens == 32 && plan.k_parts == 2;
  const int64_t tiles = N / BSH_ROW_TILE, pieces = divide_up(K / BSH_UNIT, BSH_PIECE_UNITS * plan.k_parts);
  plan.row_tiles = (int32_t)row_tiles_of(tiles, plan.warps, plan.k_parts, sms);
  const int64_t row_blocks = divide_up(tiles, plan.row_tiles), all_pieces = row_blocks * pieces;
  if (plan.k_parts == 2) { /* at most as many row blocks as multiprocessors */
    const int32_t shares = (int32_t)min_i64(sms / row_blocks, pieces);
    plan.grid[0] = shares, plan.grid[1] = (int32_t)row_blocks;
    plan.pieces = (int32_t)pieces, plan.splits = shares > 1 ? shares : 0;
  } else {
    const int64_t blocks = min_i64(sms, all_pieces);
    plan.grid[0] = (int32_t)blocks, plan.grid[1] = 1;
    plan.pieces = (int32_t)all_pieces, plan.splits = (int32_t)min_i64(pieces / (all_pieces / blocks) + 1, blocks - 1);
  }
  plan.x_units = pieces * BSH_PIECE_UNITS * plan.k_parts;
  plan.x_bytes = plan.own_x ? 0 : plan.x_units * plan.tokens * BSH_UNIT * 2;
  plan.counters = plan.splits > 0 ? (int32_t)tiles * plan.k_parts : 0;
  plan.counter_bytes = divide_up(plan.counters * (int64_t)sizeof(uint32_t), 256) * 256;
  plan.bytes = plan.x_bytes + plan.counter_bytes + N * plan.tokens * plan.splits * (int64_t)sizeof(float);
  return plan;
}

/* The kernel in front: x in order, and the counters cleared; only the latter where the product orders x itself. */
static bsh_status launch_x_units(const gemm_plan *plan, bsh_fused_args *kernel_args, void *x,
                                 const bsh_cuda_context *context) {
  int32_t tokens = plan->own_x ? 0 : (int32_t)plan->tokens, x_units = (int32_t)plan->x_units, counters = plan->counters;
  void *arguments[] = {kernel_args, &x, &tokens, &x_units, &counters};
  const bsh_cuda_launch_shape shape = {
      .grid = {(uint32_t)(tokens == 0 ? 1 : divide_up(plan->x_units * plan->tokens * 8, 256)), 1, 1},
      .block = {256, 1, 1},
      .overlap = true};
  return bsh_cuda_launch(context, &x_units_kernel, &shape, arguments);
}

static bsh_status launch_gemm(const bsh_linear_4bit_args *args, const bsh_cuda_context *context) {
  const gemm_plan plan = plan_gemm(args->M, args->N, args->K, context->sms);
  const bool nested_64 = !args->weight.scales.absmax && args->weight.blocksize == 64 && args->K % 256 == 0 &&
                         aligned(args->weight.scales.absmax_code, 4);
  bsh_cuda_scratch scratch = {0};
  bsh_status status = BSH_OK;
  bsh_fused_args kernel_args = fused_args(args);
  kernel_args.k_splits = plan.splits, kernel_args.row_tiles = plan.row_tiles;
  kernel_args.block_pieces = plan.pieces / plan.grid[0], kernel_args.more_pieces = plan.pieces % plan.grid[0];
  if (plan.bytes > 0) {
    BSH_TRY(bsh_cuda_scratch_new(context, plan.bytes, &scratch));
    char *const memory = scratch.data;
    kernel_args.counters = (uint32_t *)(memory + plan.x_bytes);
    kernel_args.partial = (float *)(memory + plan.x_bytes + plan.counter_bytes);
    status = launch_x_units(&plan, &kernel_args, memory, context);
  }
  if (status == BSH_OK) {
    if (!plan.own_x) kernel_args.x = scratch.data;
    void *arguments[] = {&kernel_args};
    const uint32_t warps = (uint32_t)plan.warps + (plan.own_x ? BSH_X_WARPS : 0);
    const bsh_cuda_launch_shape shape = {
        .grid = {(uint32_t)plan.grid[0], (uint32_t)plan.grid[1], 1}, .block = {warps * 32, 1, 1}, .overlap = true};
    status = bsh_cuda_launch(context, &gemm_kernels[args->dtype == BSH_F16][plan.size][plan.k_parts - 1][!nested_64],
                             &shape, arguments);
  }
  bsh_cuda_scratch_delete(&scratch);
  return status;
}

/* A launch takes MAX_TOKENS rows of x; more go one after the other. */
static bsh_status launch_gemm_slices(const bsh_linear_4bit_args *args, const bsh_cuda_context *context) {
  for (int64_t m = 0; m < args->M; m += MAX_TOKENS) {
    const bsh_linear_4bit_args slice = slice_of(args, m, MAX_TOKENS);
    BSH_TRY(launch_gemm(&slice, context));
  }
  return BSH_OK;
}

/* ---- the door ---- */

bsh_status bsh_cuda_linear_4bit_fused(const bsh_linear_4bit_args *args, bsh_linear_kernel kernel,
                                      const bsh_cuda_context *context) {
  const int64_t itemsize = dtype_size(args->dtype), blocksize = args->weight.blocksize;
  if (!aligned(args->weight.packed, 4) || !aligned(args->x, 16) || args->ldx * itemsize % 16) return BSH_NO_KERNEL;
  const bool bulk = aligned(args->weight.packed, 16); /* 16-byte copies of packed rows */
  const bool pairs = aligned(args->y, 4) && args->ldy * itemsize % 4 == 0;
  if (kernel == BSH_LINEAR_GEMM_SM90 && bulk && pairs &&
      bsh_gemm_sm90_takes(args->M, args->N, args->K, args->dtype, context->sm, blocksize))
    return launch_gemm_slices(args, context);
  if (kernel != BSH_LINEAR_GEMV) return BSH_NO_KERNEL;
  if (bulk && tensor_cores_take(args->M, args->N, args->K, args->dtype, context->sm, blocksize))
    return launch_gemv(args, context);
  return simt_takes(args->M, args->N, args->K) ? launch_simt(args, context) : BSH_NO_KERNEL;
}
