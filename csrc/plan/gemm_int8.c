/* plan/gemm_int8.c - what gemm_int8.cu takes: x in codes, on any card. */
#include <inttypes.h>

#include "plan/int8.h"

static const char *refuses(const bsh_facts *const f) { return f->K == 0 ? "K is 0" : bsh_int8_sizes_refuse(f); }

static double cost(const bsh_facts *const f) {
  (void)f;
  return BSH_ORDER(8);
}

static void cut_tiles(bsh_cuda_kernel *const kernel, const int64_t M, const int64_t N, const int32_t arch,
                      bsh_plan_slice *const slice) {
  slice->int8.m_tiles = (int32_t)divide_up(M, BSH_GEMM_INT8_TILE);
  slice->int8.tiles = (int32_t)(slice->int8.m_tiles * divide_up(N, BSH_GEMM_INT8_TILE));
  slice->product.kernel = kernel;
  slice->product.shape = bsh_overlapping(slice->int8.tiles, BSH_GEMM_INT8_THREADS, 1, bsh_gemm_int8_shared_bytes(arch));
}

static void cut(const bsh_facts *const f, bsh_plan_slice *const slice) {
  static bsh_cuda_kernel kernels[3] = BSH_BY_DTYPE(gemm_int8, "gemm_int8_", "");
  bsh_place_codes(f, false, slice);
  cut_tiles(&kernels[f->dtype], f->M, f->N, f->image.arch, slice);
}

bsh_status bsh_plan_product_int8(const char *const op, const int64_t M, const int64_t N, const int64_t K,
                                 const int32_t alignment, const int32_t arch, bsh_plan_slice *const slice) {
  static bsh_cuda_kernel kernel = BSH_KERNEL(gemm_int8, "gemm_int8_i32");
  const bsh_facts sizes = {.M = M, .N = N, .K = K};
  const char *const why = bsh_int8_sizes_refuse(&sizes);
  if (why != NULL)
    return bsh_fail(BSH_NO_KERNEL, "%s: nothing multiplies M = %" PRId64 ", N = %" PRId64 ", K = %" PRId64 ": %s", op,
                    M, N, K, why);
  *slice = (bsh_plan_slice){.rows = M, .reads_together = alignment == 16};
  cut_tiles(&kernel, M, N, arch, slice);
  return BSH_OK;
}

const bsh_kernel bsh_kernel_gemm_int8 = {.name = "gemm_int8",
                                         .operands = BSH_KIND(INT8),
                                         .directions = BSH_FORWARD_ONLY,
                                         .launch = BSH_LAUNCH_CODES_INT8,
                                         .refuses = refuses,
                                         .cost = cost,
                                         .cut = cut};
