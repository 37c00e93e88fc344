/* cpu/optimizer_blocks.inc.h - the loops over 8-bit states, in vectors of any width (cpu/isa/vectors.h).
 *
 * All new states of a block are known before anything of it is written. Where one is infinite or NaN, which it is where
 * a gradient is, or where a state without sign has one, the block is left to the scalar form. */
#ifndef BSH_CPU_OPTIMIZER_BLOCKS_INC_H
#define BSH_CPU_OPTIMIZER_BLOCKS_INC_H

#include "core/packed.h"
#include "cpu/optimizer.inc.h"
#include "cpu/state_search.h"

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
  k.multiplies = true;
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

STEP_FUNCTION value decode(const state_stream *const s, const ints at, const mask all, const bool flush_products) {
  const value v = v_mul(v_gather(s->map, at, all), s->scale);
  return flush_products ? v_flush(v) : v;
}

/* The new states, and the new parameters as fp32 of algorithms with one state. Codes are loaded one turn ahead: gathers
 * whose places are known do not hold up those behind them. */
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
  const mask all = m_all();
  ints most1 = {0}, most2 = {0}, most3 = {0};
  ints next1 = i_load_bytes(s1.code), next2 = i_load_bytes(s2.code), next3 = i_load_bytes(s3.code);
  for (int64_t i = 0; i < n; i += LANES) {
    const ints at1 = two ? next1 : i_load_bytes(s1.code + i), at2 = next2, at3 = next3;
    const int64_t next = i + LANES < n ? i + LANES : i;
    if (two) next1 = i_load_bytes(s1.code + next);
    if (two) next2 = i_load_bytes(s2.code + next);
    if (three) next3 = i_load_bytes(s3.code + next);
    step_element e = {v_load(g, g_dtype, i), v_set(0.0f), decode(&s1, at1, all, flush), v_set(0.0f), v_set(0.0f)};
    if (two) e.s2 = decode(&s2, at2, all, flush);
    if (three) e.s3 = decode(&s3, at3, all, flush);
    if (two) {
      new_states(&k, algorithm, &e, true);
      v_write(out + i, divisor(&k, algorithm, e.s2));
    } else {
      e.p = v_load(p, p_dtype, i);
      step_of_finite(&k, algorithm, &e, true);
      v_write(out + i, e.p);
    }
    v_write(s1.out + i, e.s1);
    most1 = i_max(most1, (ints)v_abs(e.s1));
    if (two) v_write(s2.out + i, e.s2);
    if (two) most2 = i_max(most2, (ints)e.s2);
    if (three) v_write(s3.out + i, e.s3);
    if (three) most3 = i_max(most3, (ints)v_abs(e.s3));
  }
  states[0].most = i_reduce_max(most1);
  if (two) states[1].most = i_reduce_max(most2);
  if (three) states[2].most = i_reduce_max(most3);
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
  value inverse; /* zero where all states are */
} code_stream;

STEP_FUNCTION code_stream open_codes(const block_states *const s) {
  const float most = bits_float(s->most);
  *s->absmax = most;
  return (code_stream){.cells = s->search->cells,
                       .states = s->states,
                       .code = s->code,
                       .inverse = v_set(s->most == 0 ? 0.0f : reciprocal(most))};
}

/* Behind the last code. */
STEP_FUNCTION void close_codes(const block_states *const s, const int64_t n) {
  if (s->most == 0) encode_zeros(s, n);
}

STEP_FUNCTION value scaled(const code_stream *const s, const int64_t i) {
  return v_mul(s->inverse, v_read(s->states + i));
}

/* Of LANES states: the sums of cpu/state_search.h. */
STEP_FUNCTION ints search(const uint32_t *const cells, const value v, const mask all) {
  return (ints)((unsigneds)i_gather(cells, (ints)((unsigneds)v >> 16), all) + (unsigneds)v);
}

/* Their codes: what is in bits 16 to 23, without the sign in those above. */
STEP_FUNCTION words join(const ints a, const ints b) {
  const words sums = i_upper_halves(a, b);
  return (sums ^ sums >> 8) & 0xFF;
}

STEP_FUNCTION void store_codes(uint8_t *const code, const ints a) {
  i_store_bytes(code, (ints)((unsigneds)a >> 16 ^ (unsigneds)a >> 24));
}

enum { UNIT = 4 };

STEP_FUNCTION void finish_codes(const block_states *const states, const int64_t n) {
  const mask all = m_all();
  const code_stream s = open_codes(states);
  int64_t i = 0;
  for (; i + UNIT * LANES <= n; i += UNIT * LANES) {
    ints c[UNIT];
    for (int j = 0; j < UNIT; j++) c[j] = search(s.cells, scaled(&s, i + j * LANES), all);
    w_store_bytes(s.code + i, join(c[0], c[1]), join(c[2], c[3]));
  }
  for (; i < n; i += LANES) store_codes(s.code + i, search(s.cells, scaled(&s, i), all));
  close_codes(states, n);
}

/* The loop over a block of an algorithm with two states: its parameters and codes. */
typedef struct {
  bsh_optimizer algorithm;
  bool three;
  bsh_dtype g_dtype, p_dtype;
  const char *g, *p;
  int64_t n;
  float *out; /* divisors, which become parameters */
  code_stream s1, s2, s3;
  mask all;
} finish_loop;

/* What is computed one turn ahead: what waits for divisions and what gathers wait for. A core holds a hundred
 * instructions that wait; those of four divided parameters alone would fill it, and keep gathers from starting. */
typedef struct {
  value update, v1, v2, v3;
} ahead;

STEP_FUNCTION ahead ahead_of(const finish_loop *const loop, const step_numbers *const k, const int64_t i) {
  step_element e = {.s1 = v_read(loop->s1.states + i)};
  if (loop->three) e.s3 = v_read(loop->s3.states + i);
  return (ahead){.update = divided_update(k, loop->algorithm, &e, v_read(loop->out + i)),
                 .v1 = scaled(&loop->s1, i),
                 .v2 = scaled(&loop->s2, i),
                 .v3 = loop->three ? scaled(&loop->s3, i) : v_set(0.0f)};
}

/* Stores the parameters i ...; codes of the three states in found[0 ... 2]. */
STEP_FUNCTION void finish_values(const finish_loop *const loop, const step_numbers *const k, const int64_t i,
                                 ahead *const next, ints found[3]) {
  const ahead now = *next;
  *next = ahead_of(loop, k, i + LANES < loop->n ? i + LANES : i);
  const value old = v_load(loop->p, loop->p_dtype, i);
  const value p = updated_parameter(k, loop->algorithm, old, now.update);
  v_write(loop->out + i, k->skip_zeros ? v_if_zero(v_load(loop->g, loop->g_dtype, i), old, p) : p);
  found[0] = search(loop->s1.cells, now.v1, loop->all);
  found[1] = search(loop->s2.cells, now.v2, loop->all);
  if (loop->three) found[2] = search(loop->s3.cells, now.v3, loop->all);
}

/* The same of UNIT * LANES, and stores the codes. */
STEP_FUNCTION void finish_unit(const finish_loop *const loop, const step_numbers *const k, const int64_t i,
                               ahead *const next) {
  words pairs[2][3];
  for (int j = 0; j < 2; j++) {
    ints a[3], b[3];
    finish_values(loop, k, i + 2 * j * LANES, next, a);
    finish_values(loop, k, i + (2 * j + 1) * LANES, next, b);
    for (int state = 0; state < (loop->three ? 3 : 2); state++) pairs[j][state] = join(a[state], b[state]);
  }
  w_store_bytes(loop->s1.code + i, pairs[0][0], pairs[1][0]);
  w_store_bytes(loop->s2.code + i, pairs[0][1], pairs[1][1]);
  if (loop->three) w_store_bytes(loop->s3.code + i, pairs[0][2], pairs[1][2]);
}

STEP_FUNCTION finish_loop open_loop(const bsh_optimizer algorithm, const kind kind,
                                    const bsh_optimizer_8bit_blockwise_args *const args, const block *const block,
                                    float *const out) {
  const bool three = algorithm == BSH_ADEMAMIX;
  const bsh_dtype g_dtype = kind == MIXED ? args->g_dtype : (bsh_dtype)kind;
  const bsh_dtype p_dtype = kind == MIXED ? args->p_dtype : (bsh_dtype)kind;
  const code_stream s1 = open_codes(block->states);
  return (finish_loop){.algorithm = algorithm,
                       .three = three,
                       .g_dtype = g_dtype,
                       .p_dtype = p_dtype,
                       .g = (const char *)args->g + block->begin * dtype_size(g_dtype),
                       .p = (const char *)args->p + block->begin * dtype_size(p_dtype),
                       .n = block->n,
                       .out = out,
                       .s1 = s1,
                       .s2 = open_codes(block->states + 1),
                       .s3 = three ? open_codes(block->states + 2) : s1,
                       .all = m_all()};
}

STEP_FUNCTION void finish_block(const bsh_optimizer algorithm, const kind kind,
                                const bsh_optimizer_8bit_blockwise_args *const args, const block *const block,
                                float *const out) {
  const finish_loop loop = open_loop(algorithm, kind, args, block, out);
  const step_numbers k = numbers_of(args, kind);
  ahead next = ahead_of(&loop, &k, 0);
  int64_t i = 0;
  for (; i + UNIT * LANES <= loop.n; i += UNIT * LANES) finish_unit(&loop, &k, i, &next);
  for (; i < loop.n; i += LANES) {
    ints found[3];
    finish_values(&loop, &k, i, &next, found);
    store_codes(loop.s1.code + i, found[0]);
    store_codes(loop.s2.code + i, found[1]);
    if (loop.three) store_codes(loop.s3.code + i, found[2]);
  }
  for (int state = 0; state < (loop.three ? 3 : 2); state++) close_codes(block->states + state, loop.n);
}

/* fp32 rounded; n is a multiple of LANES. */
STEP_FUNCTION void write_run(const float *const values, const int64_t n, void *const out, const bsh_dtype dtype) {
  int64_t i = 0;
  for (; i + 2 * LANES <= n; i += 2 * LANES) v_store_two(out, dtype, i, v_read(values + i), v_read(values + i + LANES));
  if (i < n) v_store(out, dtype, i, v_read(values + i));
}

static __attribute__((noinline)) void finish(const bsh_optimizer_8bit_blockwise_args *const args, block *const block,
                                             float *const out) {
  if (block->n == 0) return;
  if (args->algorithm == BSH_ADAM) BY_KIND(finish_block, BSH_ADAM, kind_of(args), args, block, out);
  else if (args->algorithm == BSH_ADEMAMIX) BY_KIND(finish_block, BSH_ADEMAMIX, kind_of(args), args, block, out);
  else finish_codes(block->states, block->n);
  BY_DTYPE(write_run, args->p_dtype, out, block->n, (char *)args->p + block->begin * dtype_size(args->p_dtype));
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

/* Whether quotient() may multiply: always so where beta2 is at least 0 and below 1. */
static bool has_reciprocals(const bsh_optimizer_8bit_blockwise_args *const args) {
  const float number = args->numbers.correction2;
  return args->algorithm != BSH_ADEMAMIX || (number >= 0x1p-24f && number <= 1.0f);
}

static void optimizer_8bit_blockwise(const bsh_optimizer_8bit_blockwise_args *const args,
                                     const bsh_state_search *const search1, const bsh_state_search *const search2,
                                     const int64_t block_begin, const int64_t block_end) {
  const bsh_state_search *const searches[2] = {search1, search2};
  const bool searched = search1 != NULL && (search2 != NULL || !BSH_HAS_SECOND_STATE(args->algorithm));
  if (!searched || !has_reciprocals(args))
    bsh_cpu_scalar_optimizers.optimizer_8bit_blockwise(args, search1, search2, block_begin, block_end);
  else step_8bit(args, searches, block_begin, block_end);
}

#endif
