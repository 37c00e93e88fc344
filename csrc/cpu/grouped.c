/* cpu/grouped.c - products of a stack of weights on the CPU: an expert's rows get the bits of linear_4bit of these
 * rows.
 *
 * Experts with few rows, which is most of them while tokens are generated, share one parallel loop over the rows (or
 * columns) of all their weights. Those with many rows go one after the other, each on all threads. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "core/arithmetic.h"
#include "core/stack.h"
#include "cpu/cpu.h"

static bsh_product_args of_expert(const bsh_product_args *const args, const int64_t expert) {
  const int64_t begin = expert == 0 ? 0 : args->offs[expert - 1];
  bsh_product_args own = rows_of(args, begin, args->offs[expert] - begin);
  own.weight = bsh_expert(&args->weight, args->E, expert);
  own.offs = NULL, own.E = 0;
  if (own.bias != NULL) own.bias = (const char *)own.bias + expert * own.N * dtype_size(own.dtype);
  return own;
}

/* ---- experts of few rows ---- */

typedef struct {
  const bsh_product_args *args;
  int64_t *experts;           /* those with 1 to BSH_CPU_SMALL_M rows */
  int64_t count, rows, units; /* experts, their rows, units of work of each (bsh_cpu_small_units) */
} small_experts;

static void multiply_units(int64_t begin, const int64_t end, void *const ctx) {
  const small_experts *const small = ctx;
  while (begin < end) {
    const int64_t first = begin / small->units * small->units, last = min_i64(end, first + small->units);
    const bsh_product_args args = of_expert(small->args, small->experts[begin / small->units]);
    bsh_cpu_multiply_small(&args, begin - first, last - first);
    begin = last;
  }
}

static void find_small(small_experts *const small) {
  const int32_t *const offs = small->args->offs;
  for (int64_t e = 0; e < small->args->E; e++) {
    const int64_t M = offs[e] - (e == 0 ? 0 : offs[e - 1]);
    if (M == 0 || M > BSH_CPU_SMALL_M) continue;
    small->experts[small->count++] = e;
    small->rows += M;
  }
}

static bsh_status multiply_small_experts(const bsh_product_args *const args) {
  small_experts small = {.args = args, .units = bsh_cpu_small_units(args)};
  small.experts = malloc((size_t)args->E * sizeof *small.experts);
  if (small.experts == NULL)
    return bsh_no_memory("grouped_linear_4bit", "a list of experts", BSH_DEVICE_CPU,
                         (double)args->E * (double)sizeof *small.experts);
  find_small(&small);
  if (small.count > 0)
    bsh_parallel_for(0, small.count * small.units, bsh_cpu_small_grain(args, divide_up(small.rows, small.count)),
                     multiply_units, &small);
  free(small.experts);
  return BSH_OK;
}

/* ---- the op ---- */

static bsh_status check_offs(const bsh_product_args *const args) {
  for (int64_t e = 0; e < args->E; e++) {
    const int64_t begin = e == 0 ? 0 : args->offs[e - 1], end = args->offs[e];
    if (end < begin || end > args->M)
      return bsh_fail(BSH_BAD_VALUE,
                      "grouped_linear_4bit: offs[%" PRId64 "] is %" PRId64 " after %" PRId64
                      ": they must ascend from 0 to at most the %" PRId64 " rows of x",
                      e, end, begin, args->M);
  }
  return BSH_OK;
}

bsh_status bsh_cpu_grouped_linear_4bit(const bsh_product_args *const args, const bsh_cpu_gemm *const gemm) {
  const bool forward = args->direction == BSH_FORWARD;
  const int64_t inner = forward ? args->K : args->N, outer = forward ? args->N : args->K;
  const int64_t size = dtype_size(args->dtype), used = args->E == 0 ? 0 : args->offs[args->E - 1];
  BSH_TRY(check_offs(args));
  for (int64_t row = used; row < args->M; row++)
    memset((char *)args->y + row * args->ldy * size, 0, (size_t)(outer * size));
  if (inner > 0 && outer > 0 && args->E > 0) BSH_TRY(multiply_small_experts(args));
  for (int64_t e = 0; e < args->E; e++) {
    const bsh_product_args own = of_expert(args, e);
    if (own.M > BSH_CPU_SMALL_M || inner == 0) BSH_TRY(bsh_cpu_linear_4bit(&own, gemm));
  }
  return BSH_OK;
}
