/* plan/gemv_int8.c - what gemv_int8.cu takes: few rows of x as they are. */
#include "plan/int8.h"

static const char *refuses(const bsh_facts *const f) {
  const int32_t arch = f->image.arch;
  /* Forced, twice as many; code of sm_80 to sm_89 and sm_120 has no form for the second 16. */
  const bool twice = f->forced == &bsh_kernel_gemv_int8 && (bsh_is_wide(arch) || arch < 80);
  if (f->M > (twice ? 2 : 1) * bsh_int8_few_rows(f)) return "too many rows";
  if (f->dtype == BSH_F32) return "no float32";
  if (arch < (f->dtype == BSH_BF16 ? 80 : 75)) return "no tensor cores for the dtype in this code";
  if (bsh_is_wide(arch) && !bsh_is_wide(f->sm)) return "code for more shared memory than the GPU has";
  if (f->N % BSH_ROW_TILE) return "N is no multiple of 16";
  if (f->K % BSH_UNIT || f->K == 0) return "K is no multiple of 64";
  if (f->x_alignment < 16 || f->packed_alignment < 16) return "x or W is not 16-byte aligned";
  if (bsh_is_wide(arch) && bsh_gemv_divide(f->M, f->N, f->K, arch, f->sms).k_splits > BSH_GEMV_CLUSTER)
    return "K is longer than a cluster of blocks holds";
  return bsh_int8_sizes_refuse(f);
}

static double cost(const bsh_facts *const f) {
  static const double costs[] = {[BSH_MANY] = BSH_LAST, [BSH_FEW] = BSH_ORDER(1), [BSH_FEW_AFTER_CODES] = BSH_ORDER(6)};
  return costs[bsh_int8_rows_of(f)];
}

#define GEMV_BF16(form, tiles, units) BSH_KERNEL(gemv_int8, "gemv_int8_bf16_" #form),
#define GEMV_F16(form, tiles, units) BSH_KERNEL(gemv_int8, "gemv_int8_f16_" #form),
#define GEMV_TILES(form, tiles, units) {tiles, units},
static const int32_t forms[][2] = {BSH_GEMV_INT8_FORMS(GEMV_TILES)};
static bsh_cuda_kernel kernels[2][3] = {{BSH_GEMV_INT8_FORMS(GEMV_BF16)}, {BSH_GEMV_INT8_FORMS(GEMV_F16)}};
static bsh_cuda_kernel joins[2][2] = {
    {BSH_KERNEL(gemv_int8, "join_codes_bf16_m8"), BSH_KERNEL(gemv_int8, "join_codes_bf16_m16")},
    {BSH_KERNEL(gemv_int8, "join_codes_f16_m8"), BSH_KERNEL(gemv_int8, "join_codes_f16_m16")}};

static void cut(const bsh_facts *const f, bsh_plan_slice *const slice) {
  const int32_t arch = f->image.arch, warps = bsh_gemv_warps(arch);
  const bsh_gemv_division d = bsh_gemv_divide(f->M, f->N, f->K, arch, f->sms);
  const int32_t sums_bytes = 2 * warps * bsh_gemv_tile_sums(d.token_tiles) * (int32_t)sizeof(float);
  bsh_gemv_lay_out(&d, f, joins[f->dtype == BSH_F16], slice);
  slice->product.kernel = &kernels[f->dtype == BSH_F16][bsh_form_of(forms, d.token_tiles, d.units)];
  slice->product.shape.shared_bytes =
      bsh_gemv_int8_shared_bytes(warps, bsh_gemv_slots(arch, d.token_tiles), sums_bytes);
}

const bsh_kernel bsh_kernel_gemv_int8 = {.name = "gemv_int8",
                                         .operands = BSH_KIND(INT8),
                                         .directions = BSH_FORWARD_ONLY,
                                         .launch = BSH_LAUNCH_FUSED,
                                         .refuses = refuses,
                                         .cost = cost,
                                         .cut = cut};
