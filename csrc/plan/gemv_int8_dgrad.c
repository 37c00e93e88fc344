/* plan/gemv_int8_dgrad.c - what gemv_int8_dgrad.cu takes: the input gradient of few rows, in one pass over W. */
#include "plan/int8.h"

static const char *refuses(const bsh_facts *const f) {
  if (!bsh_is_wide(f->image.arch) || !bsh_is_wide(f->sm)) return "only for sm_90 and sm_100";
  if (f->M > BSH_GEMV_DGRAD_ROWS) return "more than 64 rows";
  if (f->dtype == BSH_F32) return "no float32";
  if (f->K % 16 || f->N % 2 || f->N == 0) return "K is no multiple of 16 or N is odd";
  if (f->packed_alignment < 16 || f->x_alignment < 4) return "dy or W is not aligned";
  return bsh_int8_sizes_refuse(f);
}

static double cost(const bsh_facts *const f) {
  const bsh_card *const card = bsh_card_of(f->sm);
  const bool large = f->N * f->K >= card->int8.large;
  return f->M <= (large ? card->int8.large_dgrad_rows : card->int8.dgrad_rows) ? BSH_ORDER(1) : BSH_LAST;
}

static void cut(const bsh_facts *const f, bsh_plan_slice *const slice) {
#define GEMV_DGRAD_BF16(form, ...) BSH_KERNEL(gemv_int8_dgrad, "gemv_int8_dgrad_bf16_" #form),
#define GEMV_DGRAD_F16(form, ...) BSH_KERNEL(gemv_int8_dgrad, "gemv_int8_dgrad_f16_" #form),
#define GEMV_DGRAD_SIZES(form, tiles, slots, blocks) {tiles, slots, blocks},
  static bsh_cuda_kernel kernels[2][3] = {{BSH_GEMV_DGRAD_FORMS(GEMV_DGRAD_BF16)},
                                          {BSH_GEMV_DGRAD_FORMS(GEMV_DGRAD_F16)}};
  static const int32_t sizes[][3] = {BSH_GEMV_DGRAD_FORMS(GEMV_DGRAD_SIZES)};
  const int form = f->M <= 8 ? 0 : f->M <= 16 ? 1 : 2;
  const int64_t tokens = 8 * sizes[form][0], groups = divide_up(f->M, tokens);
  const int64_t slabs = divide_up(f->K, BSH_GEMV_DGRAD_COLUMNS), at_once = f->sms * sizes[form][2];
  /* As many blocks as run at once, each with a piece of N for every warp. */
  const int64_t pieces = divide_up(f->N, 32 * BSH_GEMV_DGRAD_WARPS);
  int64_t splits = min_i64(at_once / (slabs * groups), min_i64(BSH_GEMV_CLUSTER, pieces));
  if (splits < 1) splits = 1;
  const int64_t sums = splits == 1 ? 0 : groups * slabs * splits * tokens * BSH_GEMV_DGRAD_COLUMNS;
  slice->int8.splits = (int32_t)splits;
  slice->partial_at = bsh_place(slice, sums * (int64_t)sizeof(float));
  slice->product.kernel = &kernels[f->dtype == BSH_F16][form];
  slice->product.shape = bsh_overlapping(slabs * splits, BSH_GEMV_DGRAD_WARPS * BSH_WARP, splits,
                                         bsh_gemv_dgrad_shared_bytes(sizes[form][1]));
  slice->product.shape.grid[1] = (uint32_t)groups;
}

const bsh_kernel bsh_kernel_gemv_int8_dgrad = {.name = "gemv_int8_dgrad",
                                               .operands = BSH_KIND(INT8),
                                               .directions = BSH_GRADIENT_ONLY,
                                               .launch = BSH_LAUNCH_DGRAD_INT8,
                                               .refuses = refuses,
                                               .cost = cost,
                                               .cut = cut};
