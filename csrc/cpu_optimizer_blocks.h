/* cpu_optimizer_blocks.h - the loops over 8-bit states, in vectors.
 *
 * Included by each instruction set behind cpu_optimizer.h, which defines before
 *   peak                               unsigned integers of 32 bits, as many as a value has lanes
 *   p_zero()  p_bits(p, v)  p_magnitude(p, v)  the larger of p and the bits of v, all or without the sign; by lane
 *   reduce_peak(p)                     the largest lane
 *   load_plain(x)  store_plain(out, v) fp32 as it is
 *   all_lanes()                        a mask for what gathers
 *   decode_values(map, code, all)      map[code[0 ... LANES - 1]]
 *   encode_values(cells, inverse, states, code, all)  codes of LANES states by cpu_state_search.h
 *   encode_unit(...)                   the same of UNIT * LANES
 *   write_run(values, n, out, dtype)   fp32 rounded, NaN as in cpu_numerics.h; n is a multiple of LANES
 *
 * All new states of a block are known before anything of it is written. Where one is infinite or NaN, which it is where
 * a gradient is, or where a state without sign has one, the block is left to the scalar form. */
#ifndef BSH_CPU_OPTIMIZER_BLOCKS_H
#define BSH_CPU_OPTIMIZER_BLOCKS_H

#include "cpu_optimizer.h"
#include "cpu_state_search.h"
#include "packed.h"

/* New states of a block: fp32 numbers, their scale and where both belong. */
typedef struct {
  const bsh_state_search *search;
  uint8_t *code; /* [n] */
  float *absmax; /* [1] */
  float *states; /* [n] */
  uint32_t most; /* bits of the largest magnitude; more than those of infinity for a NaN */
} block_states;

/* Arrays of a block: what becomes its parameters, and up to three states. Those of a block of 256 are apart by no
 * multiple of 4 KiB, where a load would seem to need the store before it. */
enum { N_RUNS = 4, RUN_GAP = 16 };

/* What is constant in a loop beside the algorithm: the dtype of g and p where they have one, gradients are not scaled
 * and zeros are not skipped. */
typedef enum { ALL_F32 = BSH_F32, ALL_F16 = BSH_F16, ALL_BF16 = BSH_BF16, MIXED } kind;

static kind kind_of(const bsh_optimizer_8bit_blockwise_args *const args) {
  const bsh_step_numbers *const k = &args->numbers;
  const bool one_dtype = args->g_dtype == args->p_dtype && k->round == args->p_dtype;
  return one_dtype && !k->skip_zeros && k->gnorm_scale == 1.0f ? (kind)args->p_dtype : MIXED;
}

STEP_FUNCTION step_numbers numbers_of(const bsh_optimizer_8bit_blockwise_args *const args, const kind kind) {
  step_numbers k = spread(&args->numbers);
  if (kind == MIXED) return k;
  k.round = (bsh_dtype)kind;
  k.skip_zeros = false;
  k.values.gnorm_scale = v_set(1.0f);
  return k;
}

#define BY_KIND(function, algorithm, kind, ...)                                                                        \
  do {                                                                                                                 \
    if ((kind) == ALL_BF16) function(algorithm, ALL_BF16, __VA_ARGS__);                                                \
    else if ((kind) == ALL_F32) function(algorithm, ALL_F32, __VA_ARGS__);                                             \
    else if ((kind) == ALL_F16) function(algorithm, ALL_F16, __VA_ARGS__);                                             \
    else function(algorithm, MIXED, __VA_ARGS__);                                                                      \
  } while (0)

/* What a loop reads and writes of a state: copies, which no store in the loop can change. */
typedef struct {
  const float *map;
  const uint8_t *code;
  float *out;
  value scale;
  bool flush; /* products of codes and scale may be denormal */
} state_stream;

STEP_FUNCTION state_stream open_stream(const block_states *const s) {
  const float scale = flush_denormal(*s->absmax);
  const bool normal = scale == 0.0f || (fabsf(scale) * s->search->least >= FLT_MIN && fabsf(scale) <= FLT_MAX);
  return (state_stream){
      .map = s->search->flushed, .code = s->code, .out = s->states, .scale = v_set(scale), .flush = !normal};
}

STEP_FUNCTION value decode(const state_stream *const s, const int64_t i, const lanes all, const bool flush_products) {
  const value v = v_mul(decode_values(s->map, s->code + i, all), s->scale);
  return flush_products ? v_flush(v) : v;
}

/* The new states, and the new parameters as fp32 of algorithms with one state. */
STEP_FUNCTION void step_run(const bsh_optimizer algorithm, const kind kind,
                            const bsh_optimizer_8bit_blockwise_args *const args, const int64_t begin, const int64_t n,
                            float *const out, block_states states[3]) {
  const bool two = BSH_HAS_SECOND_STATE(algorithm), three = algorithm == BSH_ADEMAMIX;
  const state_stream s1 = open_stream(states), s2 = two ? open_stream(states + 1) : s1;
  const state_stream s3 = three ? open_stream(states + 2) : s1;
  const bool flush = s1.flush || s2.flush || s3.flush;
  const bsh_dtype g_dtype = kind == MIXED ? args->g_dtype : (bsh_dtype)kind;
  const bsh_dtype p_dtype = kind == MIXED ? args->p_dtype : (bsh_dtype)kind;
  const char *const g = (const char *)args->g + begin * dtype_size(g_dtype);
  const char *const p = (const char *)args->p + begin * dtype_size(p_dtype);
  const step_numbers k = numbers_of(args, kind);
  const lanes all = all_lanes();
  peak most1 = p_zero(), most2 = p_zero(), most3 = p_zero();
  for (int64_t i = 0; i < n; i += LANES) {
    step_element e = {load_values(g, g_dtype, i), v_set(0.0f), decode(&s1, i, all, flush), v_set(0.0f), v_set(0.0f)};
    if (two) e.s2 = decode(&s2, i, all, flush);
    if (three) e.s3 = decode(&s3, i, all, flush);
    if (two) {
      new_states(&k, algorithm, &e, true);
      store_plain(out + i, divisor(&k, algorithm, e.s2));
    } else {
      e.p = load_values(p, p_dtype, i);
      step_of_finite(&k, algorithm, &e, true);
      store_plain(out + i, e.p);
    }
    store_plain(s1.out + i, e.s1);
    most1 = p_magnitude(most1, e.s1);
    if (two) store_plain(s2.out + i, e.s2);
    if (two) most2 = p_bits(most2, e.s2);
    if (three) store_plain(s3.out + i, e.s3);
    if (three) most3 = p_magnitude(most3, e.s3);
  }
  states[0].most = reduce_peak(most1);
  if (two) states[1].most = reduce_peak(most2);
  if (three) states[2].most = reduce_peak(most3);
}

STEP_FUNCTION void step_kind(const bsh_optimizer algorithm, const bsh_optimizer_8bit_blockwise_args *const args,
                             const int64_t begin, const int64_t n, float *const out, block_states states[3]) {
  BY_KIND(step_run, algorithm, kind_of(args), args, begin, n, out, states);
}

static __attribute__((noinline)) void step_by_algorithm(const bsh_optimizer_8bit_blockwise_args *const args,
                                                        const int64_t begin, const int64_t n, float *const out,
                                                        block_states states[3]) {
  BY_ALGORITHM(step_kind, args->algorithm, args, begin, n, out, states);
}

/* No NaN and no infinity, and a reciprocal. States are flushed: one that is not zero is normal. */
STEP_FUNCTION bool is_ordinary(const block_states *const s) { return s->most < 0x7F800000u; }

/* All states are zero: the products that the codes are searched for are then NaN. */
static void encode_zeros(const block_states *const s, const int64_t n) {
  const bsh_state_search *const search = s->search;
  const uint8_t positive = bsh_cpu_encode_state(search->map, search->keep_sign, bits_float(0x7FFFFFFFu), 0.0f);
  const uint8_t negative = bsh_cpu_encode_state(search->map, search->keep_sign, bits_float(0x7FFFFFFFu), -0.0f);
  for (int64_t i = 0; i < n; i++) s->code[i] = signbit(s->states[i]) ? negative : positive;
}

/* A block whose states are known and are still to be written. */
typedef struct {
  int64_t begin, n; /* n 0: none */
  block_states states[3];
} block;

/* Codes from new states. */
typedef struct {
  const uint32_t *cells;
  const float *states;
  uint8_t *code;
  value inverse;
  bool zeros;
} code_stream;

STEP_FUNCTION code_stream open_codes(const block_states *const s, const int64_t n) {
  const float most = bits_float(s->most);
  *s->absmax = most;
  if (s->most == 0) encode_zeros(s, n);
  return (code_stream){.cells = s->search->cells,
                       .states = s->states,
                       .code = s->code,
                       .inverse = v_set(reciprocal(most)),
                       .zeros = s->most == 0};
}

STEP_FUNCTION void write_codes(const code_stream *const s, const int64_t i, const int n_values, const lanes all) {
  if (s->zeros) return;
  if (n_values == UNIT) encode_unit(s->cells, s->inverse, s->states + i, s->code + i, all);
  else encode_values(s->cells, s->inverse, s->states + i, s->code + i, all);
}

STEP_FUNCTION void finish_codes(const block_states *const states, const int64_t n) {
  const lanes all = all_lanes();
  const code_stream s = open_codes(states, n);
  int64_t i = 0;
  for (; i + UNIT * LANES <= n; i += UNIT * LANES) write_codes(&s, i, UNIT, all);
  for (; i < n; i += LANES) write_codes(&s, i, 1, all);
}

/* Of algorithms with two states: parameters and codes in one loop, since the former wait for divisions and the latter
 * for memory. */
STEP_FUNCTION void finish_block(const bsh_optimizer algorithm, const kind kind,
                                const bsh_optimizer_8bit_blockwise_args *const args, const block *const block,
                                float *const out) {
  const bool three = algorithm == BSH_ADEMAMIX;
  const int64_t n = block->n;
  const code_stream s1 = open_codes(block->states, n), s2 = open_codes(block->states + 1, n);
  const code_stream s3 = three ? open_codes(block->states + 2, n) : s1;
  const bsh_dtype g_dtype = kind == MIXED ? args->g_dtype : (bsh_dtype)kind;
  const bsh_dtype p_dtype = kind == MIXED ? args->p_dtype : (bsh_dtype)kind;
  const char *const g = (const char *)args->g + block->begin * dtype_size(g_dtype);
  const char *const p = (const char *)args->p + block->begin * dtype_size(p_dtype);
  const step_numbers k = numbers_of(args, kind);
  const lanes all = all_lanes();
  for (int64_t i = 0; i < n;) {
    const int n_values = i + UNIT * LANES <= n ? UNIT : 1;
    for (int j = 0; j < n_values; j++, i += LANES) {
      const value old = load_values(p, p_dtype, i);
      step_element e = {v_set(0.0f), old, load_plain(s1.states + i), v_set(0.0f), v_set(0.0f)};
      if (three) e.s3 = load_plain(s3.states + i);
      e.p = divided_parameter(&k, algorithm, &e, load_plain(out + i));
      if (k.skip_zeros) e.p = v_if_zero(load_values(g, g_dtype, i), old, e.p);
      store_plain(out + i, e.p);
    }
    const int64_t first = i - n_values * LANES;
    write_codes(&s1, first, n_values, all);
    write_codes(&s2, first, n_values, all);
    if (three) write_codes(&s3, first, n_values, all);
  }
}

static __attribute__((noinline)) void finish(const bsh_optimizer_8bit_blockwise_args *const args, block *const block,
                                             float *const out) {
  if (block->n == 0) return;
  if (args->algorithm == BSH_ADAM) BY_KIND(finish_block, BSH_ADAM, kind_of(args), args, block, out);
  else if (args->algorithm == BSH_ADEMAMIX) BY_KIND(finish_block, BSH_ADEMAMIX, kind_of(args), args, block, out);
  else finish_codes(block->states, block->n);
  write_run(out, block->n, (char *)args->p + block->begin * dtype_size(args->p_dtype), args->p_dtype);
  block->n = 0;
}

/* False: the block is left to the scalar form. runs: of new states. */
static bool start(const bsh_optimizer_8bit_blockwise_args *const args, const bsh_state_search *const searches[2],
                  const int64_t b, float *const out, float *const runs, block *const block) {
  const int64_t begin = b * args->blocksize, n = min_i64(args->blocksize, args->n - begin);
  if (n % LANES != 0) return false;
  const bool two = BSH_HAS_SECOND_STATE(args->algorithm), three = args->algorithm == BSH_ADEMAMIX;
  const int64_t slow_b = b + divide_up(args->n, args->blocksize), stride = n + RUN_GAP;
  block_states *const s = block->states;
  s[0] =
      (block_states){.search = searches[0], .code = args->state1 + begin, .absmax = args->absmax1 + b, .states = runs};
  if (two)
    s[1] = (block_states){
        .search = searches[1], .code = args->state2 + begin, .absmax = args->absmax2 + b, .states = runs + stride};
  if (three)
    s[2] = (block_states){.search = searches[0],
                          .code = args->state1 + args->n + begin,
                          .absmax = args->absmax1 + slow_b,
                          .states = runs + 2 * stride};
  step_by_algorithm(args, begin, n, out, s);
  if (!is_ordinary(s) || (two && !is_ordinary(s + 1)) || (three && !is_ordinary(s + 2))) return false;
  block->begin = begin;
  block->n = n;
  return true;
}

/* A block is finished behind the start of the next one, which hides how long its scale takes. */
static void step_8bit(const bsh_optimizer_8bit_blockwise_args *const args, const bsh_state_search *const searches[2],
                      const int64_t block_begin, const int64_t block_end) {
  float runs[2][N_RUNS * (BSH_MAX_BLOCKSIZE + RUN_GAP)] __attribute__((aligned(64)));
  const int64_t stride = min_i64(args->blocksize, args->n) + RUN_GAP;
  block blocks[2] = {{0}};
  for (int64_t b = block_begin; b < block_end; b++) {
    const int64_t now = b % 2, before = 1 - now;
    const bool started = start(args, searches, b, runs[now], runs[now] + stride, blocks + now);
    finish(args, blocks + before, runs[before]);
    if (!started) bsh_cpu_scalar_optimizers.optimizer_8bit_blockwise(args, NULL, NULL, b, b + 1);
  }
  finish(args, blocks + (block_end + 1) % 2, runs[(block_end + 1) % 2]);
}

static void optimizer_8bit_blockwise(const bsh_optimizer_8bit_blockwise_args *const args,
                                     const bsh_state_search *const search1, const bsh_state_search *const search2,
                                     const int64_t block_begin, const int64_t block_end) {
  const bsh_state_search *const searches[2] = {search1, search2};
  if (search1 == NULL || (BSH_HAS_SECOND_STATE(args->algorithm) && search2 == NULL))
    bsh_cpu_scalar_optimizers.optimizer_8bit_blockwise(args, search1, search2, block_begin, block_end);
  else step_8bit(args, searches, block_begin, block_end);
}

#endif
