/* plan/gemv_4bit.c - what gemv_4bit.cu takes and how a product is cut into its thread blocks. */
#include "core/arithmetic.h"
#include "cuda/sizes/gemv_4bit.h"
#include "plan/gemv.h"

#define GEMV_KERNEL(NAME) BSH_KERNEL(gemv_4bit, NAME)
#define GEMV_BF16(form, tiles, units)                                                                                  \
  {GEMV_KERNEL("gemv_4bit_bf16_" #form), GEMV_KERNEL("gemv_4bit_bf16_" #form "_any")},
#define GEMV_F16(form, tiles, units) {GEMV_KERNEL("gemv_4bit_f16_" #form), GEMV_KERNEL("gemv_4bit_f16_" #form "_any")},
#define GEMV_TILES(form, tiles, units) {tiles, units},
#define JOIN_BF16(form, tiles) GEMV_KERNEL("join_splits_bf16_" #form),
#define JOIN_F16(form, tiles) GEMV_KERNEL("join_splits_f16_" #form),
enum { FORMS = 4, JOINS = 3 };
static const int32_t forms[FORMS][2] = {BSH_GEMV_FORMS(GEMV_TILES)};
static bsh_cuda_kernel kernels[2][FORMS][2] = {{BSH_GEMV_FORMS(GEMV_BF16)}, {BSH_GEMV_FORMS(GEMV_F16)}};
#define SHORT_FORM(form, tiles, units) BSH_SHORT_ENTRIES(gemv_4bit_short, "gemv_4bit_", form),
static bsh_cuda_kernel short_kernels[FORMS][BSH_SHORT_FORMS] = {BSH_GEMV_FORMS(SHORT_FORM)};
static bsh_cuda_kernel joins[2][JOINS] = {{BSH_GEMV_JOINS(JOIN_BF16)}, {BSH_GEMV_JOINS(JOIN_F16)}};

/* Measured as faster than panels at every size; some of them gemm_4bit_sm90 takes faster. */
static double cost(const bsh_facts *const facts) { return facts->M <= BSH_GEMV_TOKENS ? BSH_ORDER(2) : BSH_LAST; }

static bsh_cuda_kernel *kernel_of(const bsh_facts *const facts, const int32_t token_tiles, const int32_t units) {
  const int form = bsh_form_of(forms, token_tiles, units);
  if (bsh_has_short_blocks(facts)) return &short_kernels[form][bsh_short_form(facts)];
  return &kernels[facts->dtype == BSH_F16][form][!bsh_gemv_reads_codes_together(facts, units)];
}

static void cut(const bsh_facts *const facts, bsh_plan_slice *const slice) {
  const int32_t arch = facts->image.arch;
  const bool f16 = facts->dtype == BSH_F16;
  const bsh_gemv_division d = bsh_gemv_divide(slice->rows, facts->N, facts->K, arch, facts->sms);
  bsh_gemv_lay_out(&d, facts, joins[f16], slice);
  slice->block_shift = bsh_block_shift(facts, BSH_UNIT);
  slice->product.kernel = kernel_of(facts, d.token_tiles, d.units);
  slice->product.shape.shared_bytes = bsh_gemv_shared_bytes(arch, d.token_tiles);
}

const bsh_kernel bsh_kernel_gemv_4bit = {.name = "gemv_4bit",
                                         .operands = BSH_KIND(4BIT),
                                         .directions = BSH_FORWARD_ONLY,
                                         .launch = BSH_LAUNCH_FUSED,
                                         .rows = BSH_GEMV_TOKENS,
                                         .refuses = bsh_gemv_4bit_refuses,
                                         .cost = cost,
                                         .cut = cut};
