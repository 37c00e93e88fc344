/* plan/any_int8.c - linear_int8_any and linear_int8_dgrad_any of int8.cu: a row of x and of W at a time, for sizes and
 * dtypes that no other kernel takes. */
#include "plan/int8.h"

static const char *refuses(const bsh_facts *const f) {
  enum { MOST_ROWS = 65535 * BSH_INT8_ANY_TOKENS }; /* a grid's second size */
  return f->M > MOST_ROWS ? "more than 262,140 rows" : bsh_int8_sizes_refuse(f);
}

static double cost(const bsh_facts *const f) {
  static const double costs[] = {
      [BSH_MANY] = BSH_ORDER(9), [BSH_FEW] = BSH_ORDER(2), [BSH_FEW_AFTER_CODES] = BSH_ORDER(7)};
  return f->direction == BSH_FORWARD ? costs[bsh_int8_rows_of(f)] : BSH_ORDER(9);
}

static void cut(const bsh_facts *const f, bsh_plan_slice *const slice) {
  static bsh_cuda_kernel forward[3] = BSH_BY_DTYPE(int8, "linear_int8_any_", "");
  static bsh_cuda_kernel dgrad[3] = BSH_BY_DTYPE(int8, "linear_int8_dgrad_any_", "");
  const bool back = f->direction == BSH_INPUT_GRADIENT;
  const int64_t blocks = back ? divide_up(f->K, BSH_INT8_ANY_WARPS * 32) : divide_up(f->N, BSH_INT8_ANY_WARPS);
  slice->product.kernel = &(back ? dgrad : forward)[f->dtype];
  slice->product.shape =
      (bsh_cuda_launch_shape){.grid = {(uint32_t)blocks, (uint32_t)divide_up(f->M, BSH_INT8_ANY_TOKENS), 1},
                              .block = {BSH_INT8_ANY_WARPS * 32, 1, 1},
                              .overlap = true};
}

const bsh_kernel bsh_kernel_any_int8 = {.name = "any",
                                        .operands = BSH_KIND(INT8),
                                        .directions = BSH_BOTH,
                                        .launch = BSH_LAUNCH_ROWS_INT8,
                                        .refuses = refuses,
                                        .cost = cost,
                                        .cut = cut};
