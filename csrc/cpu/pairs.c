/* cpu/pairs.c - the pairs of tokens and experts of a layer: in the order of their experts, and the sums of a token's.
 */
#include <inttypes.h>
#include <string.h>

#include "core/arithmetic.h"
#include "core/numerics.h"
#include "cpu/cpu.h"

/* The expert among whose pairs this one comes; E: behind all. */
static int64_t expert_of(const bsh_sort_by_expert_args *const args, const int64_t pair) {
  const int64_t expert = args->chosen[pair], most = args->elsewhere ? args->E : args->E - 1;
  return expert < 0 ? 0 : min_i64(expert, most);
}

static bool is_wrong(const bsh_sort_by_expert_args *const args, const int64_t pair) {
  return args->chosen[pair] < 0 || (args->chosen[pair] >= args->E && !args->elsewhere);
}

/* offs[e] is first the number of e's pairs, then where the next of them goes, which in the end is where they end. */
bsh_status bsh_cpu_sort_by_expert(const bsh_sort_by_expert_args *const args) {
  memset(args->offs, 0, (size_t)args->E * sizeof *args->offs);
  for (int64_t i = 0; i < args->S; i++) {
    const int64_t expert = expert_of(args, i);
    if (expert < args->E) args->offs[expert]++;
  }
  int64_t rest = 0;
  for (int32_t e = 0; e < args->E; e++) {
    const int32_t pairs = args->offs[e];
    args->offs[e] = (int32_t)rest;
    rest += pairs;
  }
  for (int64_t i = 0; i < args->S; i++) {
    const int64_t expert = expert_of(args, i), at = expert < args->E ? args->offs[expert]++ : rest++;
    args->order[at] = i;
    args->back[i] = is_wrong(args, i) ? at - args->S : at;
    args->row[at] = i / args->k;
  }
  return BSH_OK;
}

/* ---- sums ---- */

enum { COLUMNS = 256 }; /* whose sums are made together */

/* sum[j] += count * y[j], the dtype known where this is inlined. */
static inline void add_row(float *const sum, const float count, const void *const y, const bsh_dtype dtype,
                           const int64_t first, const int64_t n) {
  for (int64_t j = 0; j < n; j++) sum[j] += count * load_f32(y, dtype, first + j);
}

static void sum_columns(const bsh_sum_by_token_args *const args, const int64_t token, const int64_t column) {
  const int64_t n = min_i64(COLUMNS, args->H - column);
  float sum[COLUMNS] = {0};
  for (int64_t pair = token * args->k; pair < (token + 1) * args->k; pair++) {
    const int64_t back = args->back[pair], row = back < 0 ? back + args->T * args->k : back;
    const float count = back < 0 ? NAN : load_f32(args->counts, args->counts_dtype, pair);
    const int64_t first = row * args->H + column;
    if (args->dtype == BSH_F32) add_row(sum, count, args->y, BSH_F32, first, n);
    else if (args->dtype == BSH_F16) add_row(sum, count, args->y, BSH_F16, first, n);
    else add_row(sum, count, args->y, BSH_BF16, first, n);
  }
  for (int64_t j = 0; j < n; j++) store_f32(args->out, args->dtype, token * args->H + column + j, sum[j]);
}

static void sum_tokens(const int64_t begin, const int64_t end, void *const ctx) {
  const bsh_sum_by_token_args *const args = ctx;
  for (int64_t token = begin; token < end; token++)
    for (int64_t column = 0; column < args->H; column += COLUMNS) sum_columns(args, token, column);
}

bsh_status bsh_cpu_sum_by_token(const bsh_sum_by_token_args *const args) {
  enum { GRAIN = 1 << 15 }; /* elements that a thread should have */
  const int64_t pairs = args->T * args->k;
  for (int64_t i = 0; i < pairs; i++)
    if (args->back[i] < -pairs || args->back[i] >= pairs)
      return bsh_fail(BSH_BAD_VALUE, "sum_by_token: back[%" PRId64 "] is %" PRId64 " of %" PRId64 " rows", i,
                      args->back[i], pairs);
  const int64_t each = args->k * args->H;
  bsh_parallel_for(0, args->T, 1 + GRAIN / (each > 0 ? each : 1), sum_tokens, (void *)(uintptr_t)args);
  return BSH_OK;
}
