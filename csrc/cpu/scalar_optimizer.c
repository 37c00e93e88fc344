/* cpu/scalar_optimizer.c - the optimizers in plain C: the reference for every other instruction set. */
#include "core/numerics.h"
#include "core/packed.h"
#include "cpu/cpu.h"

#define STEP_FUNCTION static inline __attribute__((always_inline))
#define LANES 1

typedef float value;

STEP_FUNCTION value v_set(const float a) { return a; }
STEP_FUNCTION value v_add(const value a, const value b) { return a + b; }
STEP_FUNCTION value v_mul(const value a, const value b) { return a * b; }
STEP_FUNCTION value v_div(const value a, const value b) { return a / b; }
STEP_FUNCTION value v_sqrt(const value a) { return sqrtf(a); }
STEP_FUNCTION value v_fma(const value a, const value b, const value c) { return fmaf(a, b, c); }
STEP_FUNCTION value v_sign(const value a) { return (float)((a > 0.0f) - (a < 0.0f)); }
STEP_FUNCTION value v_flush(const value a) { return flush_denormal(a); }
STEP_FUNCTION value v_if_zero(const value g, const value a, const value b) { return g == 0.0f ? a : b; }
STEP_FUNCTION value v_if_finite(const value g, const value a, const value b) { return fabsf(g) <= FLT_MAX ? a : b; }

STEP_FUNCTION value v_round(const bsh_dtype dtype, const value a) {
  return dtype == BSH_F32 ? a : round_to_dtype(a, dtype);
}

STEP_FUNCTION value v_load(const void *const x, const bsh_dtype dtype, const int64_t i) {
  return load_f32(x, dtype, i);
}

STEP_FUNCTION void v_store(void *const out, const bsh_dtype dtype, const int64_t i, const value v) {
  store_f32(out, dtype, i, v);
}

#include "cpu/optimizer.inc.h"

uint8_t bsh_cpu_encode_state(const float *const map, const bool keep_sign, const float v, const float state) {
  const uint8_t code = encode_8bit(map, v);
  if (!keep_sign || !signbit(map[code]) == !signbit(state)) return code;
  return (uint8_t)(state > 0.0f ? code + 1 : code - 1);
}

void bsh_cpu_requantize(const float *const states, const int64_t n, const float *const map, const bool keep_sign,
                        uint8_t *const code, float *const absmax) {
  float most = 0.0f;
  for (int64_t i = 0; i < n; i++) most = absmax_step(most, states[i]);
  const float inverse = reciprocal(most);
  for (int64_t i = 0; i < n; i++)
    code[i] = bsh_cpu_encode_state(map, keep_sign, multiply_flush(inverse, states[i]), states[i]);
  *absmax = most;
}

/* The state of element i of a block: the product of two numbers without denormals. */
STEP_FUNCTION float decode_state(const float *const map, const uint8_t *const code, const int64_t i,
                                 const float absmax) {
  return multiply_flush(map[code[i]], absmax);
}

STEP_FUNCTION void step_block(const bsh_optimizer algorithm, const bsh_optimizer_8bit_blockwise_args *const args,
                              const int64_t b) {
  const int64_t begin = b * args->blocksize, n = min_i64(args->blocksize, args->n - begin);
  const int64_t slow_b = b + divide_up(args->n, args->blocksize);
  const bool two = BSH_HAS_SECOND_STATE(algorithm), three = algorithm == BSH_ADEMAMIX;
  uint8_t *const code1 = args->state1 + begin, *const code2 = two ? args->state2 + begin : NULL;
  uint8_t *const code3 = code1 + args->n;
  float s1[BSH_MAX_BLOCKSIZE], s2[BSH_MAX_BLOCKSIZE], s3[BSH_MAX_BLOCKSIZE];
  for (int64_t i = 0; i < n; i++) {
    step_element e = {load_f32(args->g, args->g_dtype, begin + i), load_f32(args->p, args->p_dtype, begin + i),
                      decode_state(args->map1, code1, i, args->absmax1[b]), 0.0f, 0.0f};
    if (two) e.s2 = decode_state(args->map2, code2, i, args->absmax2[b]);
    if (three) e.s3 = decode_state(args->map1, code3, i, args->absmax1[slow_b]);
    step(&args->numbers, algorithm, &e, true);
    store_f32(args->p, args->p_dtype, begin + i, e.p);
    store_f32(s1, BSH_F32, i, e.s1);
    store_f32(s2, BSH_F32, i, e.s2);
    store_f32(s3, BSH_F32, i, e.s3);
  }
  bsh_cpu_requantize(s1, n, args->map1, true, code1, args->absmax1 + b);
  if (two) bsh_cpu_requantize(s2, n, args->map2, false, code2, args->absmax2 + b);
  if (three) bsh_cpu_requantize(s3, n, args->map1, true, code3, args->absmax1 + slow_b);
}

STEP_FUNCTION void step_8bit(const bsh_optimizer algorithm, const bsh_optimizer_8bit_blockwise_args *const args,
                             const int64_t block_begin, const int64_t block_end) {
  for (int64_t b = block_begin; b < block_end; b++) step_block(algorithm, args, b);
}

static void optimizer_8bit_blockwise(const bsh_optimizer_8bit_blockwise_args *const args,
                                     const bsh_state_search *const search1, const bsh_state_search *const search2,
                                     const int64_t block_begin, const int64_t block_end) {
  (void)search1, (void)search2;
  BY_ALGORITHM(step_8bit, args->algorithm, args, block_begin, block_end);
}

const bsh_cpu_optimizers bsh_cpu_scalar_optimizers = {
    .optimizer_32bit = optimizer_32bit,
    .optimizer_squares = optimizer_squares,
    .optimizer_8bit_blockwise = optimizer_8bit_blockwise,
};
