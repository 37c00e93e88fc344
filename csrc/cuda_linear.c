/* cuda_linear.c - how the fused linear kernels are cut into thread blocks, and their launches. */
#include "cuda_linear.h"

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include "cuda_ops.h"

#ifndef BSH_CUDA_ARCHS
#define BSH_CUDA_ARCHS "90,100" /* a build without kernels chooses like one with all of them */
#endif

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- gemv_4bit.cu ---- */

enum { WIDE_SHARED = 224 * 1024, MAX_CLUSTER = 8 };

/* How one product is cut; the words are those of bsh_fused_args. */
typedef struct {
  int32_t token_tiles, units; /* template arguments of the kernel: tokens / 8, units of K per warp */
  int32_t k_splits, k_warps, row_groups;
  int32_t teams; /* groups of k_splits blocks */
} gemv_plan;

/* Kernels made for 227 KiB of shared memory, clusters and dependent launch: machine code for this very GPU generation
 * was built in. PTX of an older one, compiled by the driver, has none of them. */
static bool is_wide(int32_t sm) {
  if (sm == 90) return strstr(BSH_CUDA_ARCHS, "90") != NULL;
  return sm >= 100 && sm < 110 && strstr(BSH_CUDA_ARCHS, "100") != NULL;
}

static int32_t gemv_warps(int32_t sm) { return is_wide(sm) ? 16 : sm >= 80 ? 8 : 4; }

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

static gemv_plan plan_gemv(int64_t M, int64_t N, int64_t K, int32_t sm, int32_t sms) {
  const int64_t units = K / BSH_UNIT, tiles = N / BSH_ROW_TILE, warps = gemv_warps(sm);
  gemv_plan plan = {.token_tiles = M <= 8 ? 1 : 2};
  plan.units = plan.token_tiles == 1 && units > 4 * warps ? 8 : 4;
  const int64_t all_warps = ceil_div(units, plan.units);
  plan.k_splits = (int32_t)ceil_div(all_warps, warps);
  plan.k_warps = (int32_t)ceil_div(all_warps, plan.k_splits);
  plan.row_groups = (int32_t)(warps / plan.k_warps);
  plan.teams = (int32_t)smaller(teams_at_once(sms, plan.k_splits, is_wide(sm)), ceil_div(tiles, plan.row_groups));
  return plan;
}

/* What gemv_4bit.cu takes. */
static bool tensor_cores_take(int64_t M, int64_t N, int64_t K, bsh_dtype dtype, int32_t sm, int64_t blocksize) {
  if (dtype == BSH_F32 || (dtype == BSH_BF16 && sm < 80) || sm < 75) return false;
  if (M < 1 || M > 16 || N % BSH_ROW_TILE || K % BSH_UNIT || blocksize % BSH_UNIT) return false;
  if (K > INT32_MAX / BSH_ROW_TILE || N > INT32_MAX / 16 || N * (K / BSH_UNIT) > UINT32_MAX) return false;
  return !is_wide(sm) || plan_gemv(M, N, K, sm, 1).k_splits <= MAX_CLUSTER;
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
   GEMV_SCALES("gemv_4bit_" DTYPE "_m16_k4", SHARED)}
#define GEMV_DTYPES(SHARED) {GEMV_SHAPES("bf16", SHARED), GEMV_SHAPES("f16", SHARED)}

/* Table + map + sums + rings, as gemv_4bit.cu lays them out: [sm_75, sm_80.., wide][dtype][shape][any scales] */
enum { SHARED_75 = 32768 + 1024 + 8192 + 4 * 2 * 2048, SHARED_80 = 32768 + 1024 + 16384 + 8 * 3 * 2048 };
static bsh_cuda_kernel gemv_kernels[3][2][3][2] = {GEMV_DTYPES(SHARED_75), GEMV_DTYPES(SHARED_80),
                                                   GEMV_DTYPES(WIDE_SHARED)};
static bsh_cuda_kernel join_kernels[2][2] = {
    {GEMV_KERNEL("join_splits_bf16_m8", 0), GEMV_KERNEL("join_splits_bf16_m16", 0)},
    {GEMV_KERNEL("join_splits_f16_m8", 0), GEMV_KERNEL("join_splits_f16_m16", 0)}};

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

static bool aligned(const void *p, uintptr_t bytes) { return (uintptr_t)p % bytes == 0; }

static bsh_status launch_gemv(const bsh_linear_4bit_args *args, const bsh_cuda_context *context) {
  const int dtype = args->dtype == BSH_F16, generation = is_wide(context->sm) ? 2 : context->sm >= 80;
  const gemv_plan plan = plan_gemv(args->M, args->N, args->K, context->sm, context->sms);
  const bool nested_64 =
      !args->weight.scales.absmax && args->weight.blocksize == 64 &&
      (plan.units == 4 || (args->K / BSH_UNIT % 2 == 0 && aligned(args->weight.scales.absmax_code, 2)));
  bsh_fused_args kernel_args = fused_args(args);
  kernel_args.k_splits = plan.k_splits, kernel_args.k_warps = plan.k_warps, kernel_args.row_groups = plan.row_groups;

  bsh_cuda_scratch scratch = {0};
  if (plan.k_splits > 1) {
    const int64_t sums = args->N * plan.token_tiles * 8 * plan.k_splits;
    BSH_TRY(bsh_cuda_scratch_new(context, sums * (int64_t)sizeof(float), &scratch));
    kernel_args.partial = scratch.data;
  }
  const int shape_index = plan.token_tiles == 2 ? 2 : plan.units == 8;
  const bsh_cuda_launch_shape shape = {
      .grid = {(uint32_t)(plan.teams * plan.k_splits), 1, 1},
      .block = {(uint32_t)(32 * plan.k_warps * plan.row_groups), 1, 1},
      .cluster = generation == 2 ? (uint32_t)plan.k_splits : 1,
      .overlap = generation == 2,
  };
  void *arguments[] = {&kernel_args};
  bsh_status status =
      bsh_cuda_launch(context, &gemv_kernels[generation][dtype][shape_index][!nested_64], &shape, arguments);
  if (status == BSH_OK && plan.k_splits > 1 && generation != 2) {
    const bsh_cuda_launch_shape join = {.grid = {(uint32_t)ceil_div(args->N * plan.token_tiles * 8, 256), 1, 1},
                                        .block = {256, 1, 1}};
    status = bsh_cuda_launch(context, &join_kernels[dtype][plan.token_tiles - 1], &join, arguments);
  }
  bsh_cuda_scratch_delete(&scratch);
  return status;
}

/* ---- gemv_4bit_simt.cu ---- */

static bsh_status launch_simt(const bsh_linear_4bit_args *args, const bsh_cuda_context *context) {
#define SIMT_KERNELS(DTYPE)                                                                                            \
  {                                                                                                                    \
    {.fatbin = BSH_FATBIN_gemv_4bit_simt, .name = "gemv_4bit_simt_" DTYPE "_plain"},                                   \
        {.fatbin = BSH_FATBIN_gemv_4bit_simt, .name = "gemv_4bit_simt_" DTYPE "_nested"}                               \
  }
  static bsh_cuda_kernel kernels[3][2] = {SIMT_KERNELS("f32"), SIMT_KERNELS("f16"), SIMT_KERNELS("bf16")};
  const int64_t itemsize = args->dtype == BSH_F32 ? 4 : 2;
  const bsh_cuda_launch_shape shape = {
      .grid = {(uint32_t)ceil_div(args->N, SIMT_ROWS), 1, 1}, .block = {SIMT_THREADS, 1, 1}, .overlap = true};
  bsh_fused_args kernel_args = fused_args(args);
  kernel_args.block_shift = __builtin_ctzll((uint64_t)args->weight.blocksize / SIMT_BLOCKSIZE);
  void *arguments[] = {&kernel_args};
  for (int64_t m = 0; m < args->M; m += SIMT_TOKENS) {
    kernel_args.M = (int32_t)smaller(SIMT_TOKENS, args->M - m);
    kernel_args.x = (const char *)args->x + m * args->ldx * itemsize;
    kernel_args.y = (char *)args->y + m * args->ldy * itemsize;
    BSH_TRY(bsh_cuda_launch(context, &kernels[args->dtype][!args->weight.scales.absmax], &shape, arguments));
  }
  return BSH_OK;
}

/* ---- gemm_4bit_sm90.cu ---- */

enum { PIECE_UNITS = 4 };

bool bsh_gemm_sm90_takes(int64_t M, int64_t N, int64_t K, bsh_dtype dtype, int32_t sm, int64_t blocksize) {
  if (sm != 90 || !is_wide(sm) || dtype == BSH_F32) return false;
  if (M < 1 || M > 64 || N % BSH_ROW_TILE || K % BSH_UNIT || blocksize % BSH_UNIT) return false;
  /* 32-bit block indices; fewer than 2^22 pieces of 192 x 256 weights, times up to 512 multiprocessors. */
  return K <= INT32_MAX / BSH_ROW_TILE && N <= INT32_MAX / 2 && N * (K / BSH_UNIT) <= INT32_MAX;
}

#define GEMM_KERNEL(NAME, SHARED) {.fatbin = BSH_FATBIN_gemm_4bit_sm90, .name = NAME, .shared_bytes = (SHARED)}
#define GEMM_SCALES(NAME) {GEMM_KERNEL(NAME, WIDE_SHARED), GEMM_KERNEL(NAME "_any", WIDE_SHARED)}
#define GEMM_TOKENS(DTYPE)                                                                                             \
  {GEMM_SCALES("gemm_4bit_" DTYPE "_m8"), GEMM_SCALES("gemm_4bit_" DTYPE "_m16"),                                      \
   GEMM_SCALES("gemm_4bit_" DTYPE "_m32"), GEMM_SCALES("gemm_4bit_" DTYPE "_m64")}
static bsh_cuda_kernel gemm_kernels[2][4][2] = {GEMM_TOKENS("bf16"), GEMM_TOKENS("f16")};
static bsh_cuda_kernel x_units_kernel = GEMM_KERNEL("x_units", 0);

/* x in the kernel's order, its tickets, the partial sums: one piece of scratch memory. */
typedef struct {
  int64_t tokens, x_units; /* padded */
  int64_t blocks, splits;  /* of threads; that share a row block, at most */
  int64_t x_bytes, ticket_bytes, bytes;
  int32_t size, warps; /* log2(tokens / 8) */
} gemm_plan;

static gemm_plan plan_gemm(int64_t M, int64_t N, int64_t K, int32_t sms) {
  gemm_plan plan = {.size = M <= 8 ? 0 : M <= 16 ? 1 : M <= 32 ? 2 : 3};
  plan.tokens = 8 << plan.size, plan.warps = plan.tokens == 64 ? 12 : 16;
  const int64_t pieces = ceil_div(K / BSH_UNIT, PIECE_UNITS);
  const int64_t all_pieces = ceil_div(N, plan.warps * BSH_ROW_TILE) * pieces;
  plan.blocks = smaller(sms, all_pieces);
  plan.splits = smaller(pieces / (all_pieces / plan.blocks) + 2, plan.blocks);
  plan.x_units = pieces * PIECE_UNITS;
  plan.x_bytes = plan.x_units * plan.tokens * BSH_UNIT * 2;
  plan.ticket_bytes = ceil_div(N / BSH_ROW_TILE * 4, 256) * 256;
  plan.bytes = plan.x_bytes + plan.ticket_bytes + N * plan.tokens * plan.splits * (int64_t)sizeof(float);
  return plan;
}

static bsh_status launch_gemm(const bsh_linear_4bit_args *args, const bsh_cuda_context *context) {
  const gemm_plan plan = plan_gemm(args->M, args->N, args->K, context->sms);
  const bool nested_64 = !args->weight.scales.absmax && args->weight.blocksize == 64 && args->K % 256 == 0 &&
                         aligned(args->weight.scales.absmax_code, 4);
  bsh_cuda_scratch scratch;
  BSH_TRY(bsh_cuda_scratch_new(context, plan.bytes, &scratch));
  char *const memory = scratch.data;
  bsh_fused_args kernel_args = fused_args(args);
  kernel_args.tickets = (uint32_t *)(memory + plan.x_bytes);
  kernel_args.partial = (float *)(memory + plan.x_bytes + plan.ticket_bytes);
  kernel_args.k_splits = (int32_t)plan.splits;

  const int32_t tokens = (int32_t)plan.tokens;
  void *order_arguments[] = {&kernel_args, &scratch.data, (void *)(uintptr_t)&tokens};
  const bsh_cuda_launch_shape order = {
      .grid = {(uint32_t)ceil_div(plan.x_units * plan.tokens * 8, 256), 1, 1}, .block = {256, 1, 1}, .overlap = true};
  bsh_status status = bsh_cuda_launch(context, &x_units_kernel, &order, order_arguments);
  if (status == BSH_OK) {
    kernel_args.x = memory;
    void *arguments[] = {&kernel_args};
    const bsh_cuda_launch_shape shape = {
        .grid = {(uint32_t)plan.blocks, 1, 1}, .block = {(uint32_t)plan.warps * 32, 1, 1}, .overlap = true};
    status = bsh_cuda_launch(context, &gemm_kernels[args->dtype == BSH_F16][plan.size][!nested_64], &shape, arguments);
  }
  bsh_cuda_scratch_delete(&scratch);
  return status;
}

/* ---- the door ---- */

bsh_status bsh_cuda_linear_4bit_fused(const bsh_linear_4bit_args *args, bsh_linear_kernel kernel,
                                      const bsh_cuda_context *context) {
  const int64_t itemsize = args->dtype == BSH_F32 ? 4 : 2, blocksize = args->weight.blocksize;
  if (!aligned(args->weight.packed, 4) || !aligned(args->x, 16) || args->ldx * itemsize % 16) return BSH_NO_KERNEL;
  const bool bulk = aligned(args->weight.packed, 16); /* 16-byte copies of packed rows */
  if (kernel == BSH_LINEAR_GEMM_SM90 && bulk &&
      bsh_gemm_sm90_takes(args->M, args->N, args->K, args->dtype, context->sm, blocksize))
    return launch_gemm(args, context);
  if (kernel != BSH_LINEAR_GEMV) return BSH_NO_KERNEL;
  if (bulk && tensor_cores_take(args->M, args->N, args->K, args->dtype, context->sm, blocksize))
    return launch_gemv(args, context);
  return simt_takes(args->M, args->N, args->K) ? launch_simt(args, context) : BSH_NO_KERNEL;
}
