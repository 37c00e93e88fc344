/* plan/gemm_4bit_sm80_grouped.c - what gemm_4bit_sm80_grouped.cu takes of a stack, and its launch: all experts in one.
 * How many rows an expert has is known on the GPU only: the plan goes by the average. */
#include "core/arithmetic.h"
#include "plan/gemv.h"
#include "plan/sm80.h"

/* Average rows of an expert where tiles of 256 rows were faster with rows spread as a router spreads them, in bf16, and
 * up to which the gradient by one loop was, on an H200, whose mma.sync is an A100's:
 * benchmarks/results/gemm_sm80_h200_202611.md. */
enum { WIDER_FROM = 144, WIDER_TO = 224, WIDER_AGAIN_FROM = 432, FEW_ROWS = 80 };
enum { MOST_TILES = (1 << 16) - 8 }; /* of a thread block, which counts in 16 bits and looks a few ahead */

#define GROUPED_FORM(form, rows) BSH_TILE_ENTRIES(gemm_4bit_sm80_grouped, "gemm_sm80_grouped_", form),
static bsh_cuda_kernel kernels[][2][2] = {BSH_GEMM_SM80_FORMS(GROUPED_FORM)}; /* [form][dtype][direction] */
static bsh_cuda_kernel nv_kernels[2][2] = BSH_TILE_ENTRIES(gemm_4bit_sm80_grouped_short, "gemm_sm80_grouped_", m256_nv);
static bsh_cuda_kernel few_kernels[2] = {/* [dtype] */
                                         BSH_KERNEL(gemm_4bit_sm80_grouped, "gemm_sm80_grouped_dgrad_bf16_m128_few"),
                                         BSH_KERNEL(gemm_4bit_sm80_grouped, "gemm_sm80_grouped_dgrad_f16_m128_few")};

static int64_t tiles_at_most(const bsh_facts *const facts, const int32_t rows) {
  const int64_t width = facts->direction == BSH_FORWARD ? facts->N : facts->K;
  return (facts->M / rows + min_i64(facts->M, facts->E)) * divide_up(width, BSH_GEMM_SM80_COLUMNS);
}

static const char *refuses(const bsh_facts *const facts) {
  const char *const reason = bsh_sm80_refuses(facts);
  if (reason != NULL) return reason;
  if (facts->N % 8 || facts->y_alignment < 16) return "rows of y are not 16-byte aligned";
  const bool counted = facts->M <= INT32_MAX && tiles_at_most(facts, 128) <= (int64_t)facts->sms * MOST_TILES;
  return counted ? NULL : "more tiles than a thread block counts";
}

/* Before panels on cards that have a model, and on Hopper for blocks below 64 where its own kernels, which come first,
 * refuse them: benchmarks/results/microscaled_h100_202611.md. */
static double cost(const bsh_facts *const facts) {
  return bsh_rates_of(facts->sm)->chosen || facts->w.blocksize < BSH_UNIT ? BSH_ORDER(2) : BSH_LAST;
}

/* Where a multiprocessor holds one block of either form, the one with more warps hides more. */
static int32_t tile_rows(const bsh_facts *const facts) {
  const int64_t average = facts->M / facts->E;
  const bool wider = (average > WIDER_FROM && average < WIDER_TO) || average >= WIDER_AGAIN_FROM;
  return !wider && bsh_sm80_at_once(128, facts->sm) > 1 && bsh_sm80_decodes(facts, 128) ? 128 : 256;
}

static bsh_cuda_kernel *kernel_of(const bsh_facts *const facts, const int32_t rows) {
  const bool f16 = facts->dtype == BSH_F16, gradient = facts->direction == BSH_INPUT_GRADIENT;
  if (bsh_sm80_has_short_blocks(facts)) return &nv_kernels[f16][gradient];
  if (gradient && rows == 128 && facts->M <= FEW_ROWS * facts->E) return &few_kernels[f16];
  return &kernels[rows == 256][f16][gradient];
}

static void cut(const bsh_facts *const facts, bsh_plan_slice *const slice) {
  const bool gradient = facts->direction == BSH_INPUT_GRADIENT;
  const int32_t rows = tile_rows(facts);
  const int64_t blocks = min_i64(facts->sms * bsh_sm80_at_once(rows, facts->sm), tiles_at_most(facts, rows));
  slice->sm80 =
      (bsh_gemm_sm80_cut){.rows = rows, .stages = (int32_t)divide_up(gradient ? facts->N : facts->K, BSH_UNIT)};
  slice->block_shift = bsh_sm80_block_shift(facts);
  slice->stores_together = true;
  slice->product.kernel = kernel_of(facts, rows);
  slice->product.shape = bsh_overlapping(blocks, bsh_gemm_sm80_threads(rows), 1, bsh_gemm_sm80_grouped_bytes(rows));
  slice->product.shape.overlap = bsh_is_wide(facts->image.arch);
}

const bsh_kernel bsh_kernel_gemm_4bit_sm80_grouped = {.name = "gemm_4bit_sm80_grouped",
                                                      .operands = BSH_KIND(STACK),
                                                      .directions = BSH_BOTH,
                                                      .launch = BSH_LAUNCH_SM80,
                                                      .refuses = refuses,
                                                      .cost = cost,
                                                      .cut = cut};
