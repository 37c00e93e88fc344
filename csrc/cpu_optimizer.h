/* cpu_optimizer.h - the loops of the optimizers over vectors of any width; the scalar form has a width of one.
 *
 * Included by each instruction set, which defines before what optimizer.h asks for, and
 *   LANES                             numbers in a value
 *   load_values(x, dtype, i)          x[i ...] as fp32
 *   store_values(out, dtype, i, v)    out[i ...], rounded; NaN as in cpu_numerics.h
 *   map_values(map, code, i)          map[code[i ...]]
 *   find_search(map, keep_sign)       a table for requantize, or NULL
 *   requantize(search, states, n, map, keep_sign, code, absmax)  one block, as bsh_cpu_requantize does it
 * What does not fill a value is left to the scalar form. The algorithm is a constant in each loop; dtypes are not. */
#ifndef BSH_CPU_OPTIMIZER_H
#define BSH_CPU_OPTIMIZER_H

#include "cpu.h"
#include "cpu_numerics.h"
#include "optimizer.h"
#include "packed.h"

#define BY_ALGORITHM(function, algorithm, ...)                                                                         \
  do {                                                                                                                 \
    switch (algorithm) {                                                                                               \
    case BSH_ADAM:                                                                                                     \
      return function(BSH_ADAM, __VA_ARGS__);                                                                          \
    case BSH_MOMENTUM:                                                                                                 \
      return function(BSH_MOMENTUM, __VA_ARGS__);                                                                      \
    case BSH_RMSPROP:                                                                                                  \
      return function(BSH_RMSPROP, __VA_ARGS__);                                                                       \
    case BSH_ADAGRAD:                                                                                                  \
      return function(BSH_ADAGRAD, __VA_ARGS__);                                                                       \
    case BSH_LION:                                                                                                     \
      return function(BSH_LION, __VA_ARGS__);                                                                          \
    default:                                                                                                           \
      return function(BSH_ADEMAMIX, __VA_ARGS__);                                                                      \
    }                                                                                                                  \
  } while (0)

/* ---- 32-bit states ---------------------------------------------------------------------------------------------- */

STEP_FUNCTION step_element load_element(const bsh_optimizer algorithm, const bsh_optimizer_32bit_args *const args,
                                        const int64_t i) {
  step_element e = {load_values(args->g, args->g_dtype, i), load_values(args->p, args->p_dtype, i),
                    load_values(args->state1, BSH_F32, i), v_set(0.0f), v_set(0.0f)};
  if (BSH_HAS_SECOND_STATE(algorithm)) e.s2 = load_values(args->state2, BSH_F32, i);
  if (algorithm == BSH_ADEMAMIX) e.s3 = load_values(args->state1, BSH_F32, args->n + i);
  return e;
}

STEP_FUNCTION void step_32bit(const bsh_optimizer algorithm, const bsh_optimizer_32bit_args *const args,
                              const int64_t begin, const int64_t end) {
  const bsh_step_numbers numbers = args->numbers;
  int64_t i = begin;
  for (; i + LANES <= end; i += LANES) {
    step_element e = load_element(algorithm, args, i);
    step(&numbers, algorithm, &e, false);
    store_values(args->p, args->p_dtype, i, e.p);
    store_values(args->state1, BSH_F32, i, e.s1);
    if (BSH_HAS_SECOND_STATE(algorithm)) store_values(args->state2, BSH_F32, i, e.s2);
    if (algorithm == BSH_ADEMAMIX) store_values(args->state1, BSH_F32, args->n + i, e.s3);
  }
  if (i < end) bsh_cpu_scalar_optimizers.optimizer_32bit(args, i, end);
}

static void optimizer_32bit(const bsh_optimizer_32bit_args *const args, const int64_t begin, const int64_t end) {
  BY_ALGORITHM(step_32bit, args->algorithm, args, begin, end);
}

STEP_FUNCTION void squares_32bit(const bsh_optimizer algorithm, const bsh_optimizer_32bit_args *const args,
                                 const int64_t begin, const int64_t end, float *const out) {
  int64_t i = begin;
  for (; i + LANES <= end; i += LANES) {
    const step_element e = load_element(algorithm, args, i);
    store_values(out, BSH_F32, i - begin, update_square(&args->numbers, algorithm, &e));
  }
  if (i < end) bsh_cpu_scalar_optimizers.optimizer_squares(args, i, end, out + (i - begin));
}

static void optimizer_squares(const bsh_optimizer_32bit_args *const args, const int64_t begin, const int64_t end,
                              float *const out) {
  BY_ALGORITHM(squares_32bit, args->algorithm, args, begin, end, out);
}

/* ---- 8-bit states ----------------------------------------------------------------------------------------------- */

/* What is the same for all blocks of a call. */
typedef struct {
  bsh_step_numbers numbers;
  float map1[256], map2[256]; /* denormals flushed */
  const bsh_state_search *search1, *search2;
} block_tables;

STEP_FUNCTION void flush_map(const float *const map, float *const flushed) {
  for (int i = 0; i < 256; i++) flushed[i] = flush_denormal(map[i]);
}

STEP_FUNCTION void step_block(const bsh_optimizer algorithm, const bsh_optimizer_8bit_blockwise_args *const args,
                              const block_tables *const tables, const int64_t b, const int64_t begin, const int64_t n) {
  const bsh_dtype g_dtype = args->g_dtype, p_dtype = args->p_dtype;
  const bsh_step_numbers numbers = tables->numbers;
  const int64_t slow_b = b + divide_up(args->n, args->blocksize);
  const bool two = BSH_HAS_SECOND_STATE(algorithm), three = algorithm == BSH_ADEMAMIX;
  const void *const g = args->g;
  void *const p = args->p;
  uint8_t *const code1 = args->state1 + begin, *const code2 = two ? args->state2 + begin : NULL;
  uint8_t *const code3 = code1 + args->n;
  const value scale1 = v_set(flush_denormal(args->absmax1[b]));
  const value scale2 = v_set(two ? flush_denormal(args->absmax2[b]) : 0.0f);
  const value scale3 = v_set(three ? flush_denormal(args->absmax1[slow_b]) : 0.0f);
  /* Apart by no multiple of 4 KiB: a load would seem to need the store before it. */
  float s1[BSH_MAX_BLOCKSIZE + 256], s2[BSH_MAX_BLOCKSIZE + 272], s3[BSH_MAX_BLOCKSIZE];
  for (int64_t i = 0; i < n; i += LANES) {
    step_element e = {load_values(g, g_dtype, begin + i), load_values(p, p_dtype, begin + i),
                      v_flush(v_mul(map_values(tables->map1, code1, i), scale1)), v_set(0.0f), v_set(0.0f)};
    if (two) e.s2 = v_flush(v_mul(map_values(tables->map2, code2, i), scale2));
    if (three) e.s3 = v_flush(v_mul(map_values(tables->map1, code3, i), scale3));
    step(&numbers, algorithm, &e, true);
    store_values(p, p_dtype, begin + i, e.p);
    store_values(s1, BSH_F32, i, e.s1);
    if (two) store_values(s2, BSH_F32, i, e.s2);
    if (three) store_values(s3, BSH_F32, i, e.s3);
  }
  requantize(tables->search1, s1, n, args->map1, true, code1, args->absmax1 + b);
  if (two) requantize(tables->search2, s2, n, args->map2, false, code2, args->absmax2 + b);
  if (three) requantize(tables->search1, s3, n, args->map1, true, code3, args->absmax1 + slow_b);
}

STEP_FUNCTION void step_8bit(const bsh_optimizer algorithm, const bsh_optimizer_8bit_blockwise_args *const args,
                             const int64_t block_begin, const int64_t block_end) {
  block_tables tables = {.numbers = args->numbers, .search1 = find_search(args->map1, true)};
  flush_map(args->map1, tables.map1);
  if (BSH_HAS_SECOND_STATE(algorithm)) {
    tables.search2 = find_search(args->map2, false);
    flush_map(args->map2, tables.map2);
  }
  for (int64_t b = block_begin; b < block_end; b++) {
    const int64_t begin = b * args->blocksize;
    const int64_t n = min_i64(args->blocksize, args->n - begin);
    if (n % LANES != 0) bsh_cpu_scalar_optimizers.optimizer_8bit_blockwise(args, b, b + 1);
    else step_block(algorithm, args, &tables, b, begin, n);
  }
}

static void optimizer_8bit_blockwise(const bsh_optimizer_8bit_blockwise_args *const args, const int64_t block_begin,
                                     const int64_t block_end) {
  BY_ALGORITHM(step_8bit, args->algorithm, args, block_begin, block_end);
}

#endif
