/* cpu_scalar_optimizer.c - the optimizers in plain C: the reference for every other instruction set. */
#include "cpu.h"
#include "cpu_numerics.h"

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

STEP_FUNCTION value load_values(const void *const x, const bsh_dtype dtype, const int64_t i) {
  return load_f32(x, dtype, i);
}

STEP_FUNCTION void store_values(void *const out, const bsh_dtype dtype, const int64_t i, const value v) {
  store_f32(out, dtype, i, v);
}

STEP_FUNCTION value map_values(const float *const map, const uint8_t *const code, const int64_t i) {
  return map[code[i]];
}

STEP_FUNCTION const bsh_state_search *find_search(const float *const map, const bool keep_sign) {
  (void)map, (void)keep_sign;
  return NULL;
}

STEP_FUNCTION void requantize(const bsh_state_search *const search, const float *const states, const int64_t n,
                              const float *const map, const bool keep_sign, uint8_t *const code, float *const absmax) {
  (void)search;
  bsh_cpu_requantize(states, n, map, keep_sign, code, absmax);
}

#include "cpu_optimizer.h"

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

const bsh_cpu_optimizers bsh_cpu_scalar_optimizers = {
    .optimizer_32bit = optimizer_32bit,
    .optimizer_squares = optimizer_squares,
    .optimizer_8bit_blockwise = optimizer_8bit_blockwise,
};
