/* plan/gemm_4bit_sm80.c - what gemm_4bit_sm80.cu takes. */
#include "core/arithmetic.h"
#include "plan/cards.h"
#include "plan/sm80.h"

static const bsh_sm80_tiles tiles = {.depth = BSH_UNIT};

#define SM80_FORM(form, rows) BSH_TILE_ENTRIES(gemm_4bit_sm80, "gemm_sm80_", form),
static bsh_cuda_kernel kernels[][2][2] = {BSH_GEMM_SM80_FORMS(SM80_FORM)}; /* [form][dtype][direction] */
static bsh_cuda_kernel nv_kernels[2][2] = BSH_TILE_ENTRIES(gemm_4bit_sm80_short, "gemm_sm80_", m256_nv);

/* On Hopper: where gemm_4bit_sm90_wide refuses blocks below 64, or is slower than panels. */
static double cost_of_short_blocks(const bsh_facts *const facts) {
  const bsh_card *const card = bsh_card_of(facts->sm);
  const bool large = facts->N * facts->K >= card->gemm_4bit_sm80.short_blocks_weights;
  const bool chosen = facts->w.blocksize < BSH_UNIT && large && facts->M <= card->gemm_4bit_sm80.short_blocks_rows;
  return chosen ? bsh_before_panels(facts) : BSH_LAST;
}

/* Where there is a model of the card. */
static double cost(const bsh_facts *const facts) {
  return bsh_rates_of(facts->sm)->chosen ? bsh_sm80_nanoseconds(facts, &tiles) : cost_of_short_blocks(facts);
}

static void cut(const bsh_facts *const facts, bsh_plan_slice *const slice) {
  const bsh_sm80_way way = bsh_sm80_fastest(facts, &tiles, slice->rows);
  bsh_sm80_lay_out(facts, &way, slice);
  const bool f16 = facts->dtype == BSH_F16, gradient = facts->direction == BSH_INPUT_GRADIENT;
  slice->product.kernel =
      bsh_sm80_has_short_blocks(facts) ? &nv_kernels[f16][gradient] : &kernels[way.form][f16][gradient];
  slice->product.shape.block[0] = (uint32_t)bsh_gemm_sm80_threads(way.cut.rows);
  slice->product.shape.block[1] = slice->product.shape.block[2] = 1;
  slice->product.shape.shared_bytes = bsh_gemm_sm80_shared_bytes(way.cut.rows);
}

const bsh_kernel bsh_kernel_gemm_4bit_sm80 = {.name = "gemm_4bit_sm80",
                                              .operands = BSH_KIND(4BIT),
                                              .directions = BSH_BOTH,
                                              .launch = BSH_LAUNCH_SM80,
                                              .rows = BSH_SM80_SLICE_ROWS,
                                              .refuses = bsh_sm80_refuses,
                                              .cost = cost,
                                              .cut = cut};
