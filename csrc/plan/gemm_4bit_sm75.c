/* plan/gemm_4bit_sm75.c - what gemm_4bit_sm75.cu takes; its tiles are shared out as those of gemm_4bit_sm80. */
#include "core/arithmetic.h"
#include "plan/sm80.h"

static bsh_cuda_kernel kernels[2] = {BSH_KERNEL(gemm_4bit_sm75, "gemm_sm75_f16_m256"),
                                     BSH_KERNEL(gemm_4bit_sm75, "gemm_sm75_dgrad_f16_m256")};
/* An H100 took 1,300 ns for a stage of 64 rows forward, nearly all of it waiting:
 * benchmarks/results/gemm_sm75_h100_202611.md. */
static const bsh_sm80_tiles tiles = {
    .first_form = 1, .depth = BSH_GEMM_SM75_DEPTH, .round = BSH_GEMM_SM75_ROUND, .least = 1400};

/* By the model of a T4 alone. */
static double cost(const bsh_facts *const facts) {
  return facts->sm == 75 ? bsh_sm80_nanoseconds(facts, &tiles) : BSH_LAST;
}

static void cut(const bsh_facts *const facts, bsh_plan_slice *const slice) {
  const bsh_sm80_way way = bsh_sm80_fastest(facts, &tiles, slice->rows);
  bsh_sm80_lay_out(facts, &way, slice);
  slice->product.kernel = &kernels[facts->direction == BSH_INPUT_GRADIENT];
  slice->product.shape.block[0] = BSH_GEMM_SM75_THREADS;
  slice->product.shape.block[1] = slice->product.shape.block[2] = 1;
  slice->product.shape.shared_bytes = BSH_GEMM_SM75_SHARED_BYTES;
}

const bsh_kernel bsh_kernel_gemm_4bit_sm75 = {.name = "gemm_4bit_sm75",
                                              .operands = BSH_KIND(4BIT),
                                              .directions = BSH_BOTH,
                                              .launch = BSH_LAUNCH_SM75,
                                              .rows = BSH_SM80_SLICE_ROWS,
                                              .refuses = bsh_sm75_refuses,
                                              .cost = cost,
                                              .cut = cut};
