/* cpu/optimizer.inc.h - the loops over 32-bit states in vectors of any width; the scalar form has a width of one.
 *
 * Included after an instruction set's header (cpu/isa/vectors.h); or, with LANES 1, after what core/optimizer.h asks
 * for, v_load and v_store.
 * What does not fill a value is left to the scalar form. The algorithm is a constant in each loop; dtypes are not.
 * 8-bit states: cpu/optimizer_blocks.inc.h. */
#ifndef BSH_CPU_OPTIMIZER_INC_H
#define BSH_CPU_OPTIMIZER_INC_H

#include "core/numerics.h"
#include "cpu/cpu.h"

#if LANES > 1
#define STEP_FUNCTION ALWAYS_INLINE
typedef floats value;

STEP_FUNCTION value v_if_zero(const value g, const value a, const value b) {
  return v_choose(v_equal(g, v_set(0.0f)), a, b);
}

STEP_FUNCTION value v_if_finite(const value g, const value a, const value b) {
  return v_choose(v_at_most(v_abs(g), v_set(FLT_MAX)), a, b);
}

/* 1 / number as a sum, and -number: see quotient(). */
typedef struct {
  value high, low, negative;
} reciprocal_of;

/* The numbers of a step in every lane, once for a loop: compilers spread them anew for each element, which takes ports
 * that gathers and shuffles wait for. */
typedef struct {
  struct {
    value beta1, beta2, beta3, rest1, rest2, rest3, lr, alpha, eps, weight_decay, gnorm_scale, decay;
    value correction1, correction2, inverse1, inverse2, step_size, scaled_eps;
  } values;
  struct {
    reciprocal_of correction2;
  } reciprocals;
  float lr, stored_lr, update_scale;
  bsh_dtype round;
  bool decays, first, skip_zeros;
  bool multiplies; /* where quotient() can: numbers are as it wants them */
} step_numbers;
#define NUMBER(k, name) ((k)->values.name)
#define DECAYS(k) ((k)->decays)
#define QUOTIENT(k, a, name) quotient(a, NUMBER(k, name), &(k)->reciprocals.name, (k)->multiplies)

/* a / number, rounded once. A divider is busy for 10 cycles with what products take 2 for. The first quotient is within
 * one unit of its last place, since high + low is 1 / number to 47 bits; the remainder then is a number of fp32, and
 * with it the sum rounds as a division does, high being the nearest of 1 / number (Markstein's theorem). a: zero, or
 * 2^-64 to 2^64, as roots are; number: 2^-24 to 1. */
STEP_FUNCTION value quotient(const value a, const value number, const reciprocal_of *const r, const bool multiplies) {
  if (!multiplies) return v_div(a, number);
  const value near = v_fma(a, r->high, v_mul(a, r->low));
  return v_fma(v_fma(near, r->negative, a), r->high, near);
}
#endif

#include "core/optimizer.h"

#if LANES > 1
/* No longer known to be one number. */
STEP_FUNCTION value keep(const float number) { return v_hold(v_set(number)); }

STEP_FUNCTION reciprocal_of spread_reciprocal(const float number) {
  const float high = 1.0f / number;
  const float low = (float)((1.0 - (double)high * (double)number) / (double)number);
  return (reciprocal_of){keep(high), keep(low), keep(-number)};
}

STEP_FUNCTION step_numbers spread(const bsh_step_numbers *const k) {
  return (step_numbers){.values = {.beta1 = keep(k->beta1),
                                   .beta2 = keep(k->beta2),
                                   .beta3 = keep(k->beta3),
                                   .rest1 = keep(k->rest1),
                                   .rest2 = keep(k->rest2),
                                   .rest3 = keep(k->rest3),
                                   .lr = keep(k->lr),
                                   .alpha = keep(k->alpha),
                                   .eps = keep(k->eps),
                                   .weight_decay = keep(k->weight_decay),
                                   .gnorm_scale = keep(k->gnorm_scale),
                                   .decay = keep(k->decay),
                                   .correction1 = keep(k->correction1),
                                   .correction2 = keep(k->correction2),
                                   .inverse1 = keep(k->inverse1),
                                   .inverse2 = keep(k->inverse2),
                                   .step_size = keep(k->step_size),
                                   .scaled_eps = keep(k->scaled_eps)},
                        .reciprocals = {.correction2 = spread_reciprocal(k->correction2)},
                        .lr = k->lr,
                        .stored_lr = k->stored_lr,
                        .update_scale = k->update_scale,
                        .decays = k->weight_decay > 0.0f,
                        .round = k->round,
                        .first = k->first,
                        .skip_zeros = k->skip_zeros};
}
#else
STEP_FUNCTION step_numbers spread(const bsh_step_numbers *const k) { return *k; }
#endif

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
  step_element e = {v_load(args->g, args->g_dtype, i), v_load(args->p, args->p_dtype, i),
                    v_load(args->state1, BSH_F32, i), v_set(0.0f), v_set(0.0f)};
  if (BSH_HAS_SECOND_STATE(algorithm)) e.s2 = v_load(args->state2, BSH_F32, i);
  if (algorithm == BSH_ADEMAMIX) e.s3 = v_load(args->state1, BSH_F32, args->n + i);
  return e;
}

STEP_FUNCTION void step_32bit(const bsh_optimizer algorithm, const bsh_optimizer_32bit_args *const args,
                              const int64_t begin, const int64_t end) {
  const step_numbers numbers = spread(&args->numbers);
  int64_t i = begin;
  for (; i + LANES <= end; i += LANES) {
    step_element e = load_element(algorithm, args, i);
    step(&numbers, algorithm, &e, false);
    v_store(args->p, args->p_dtype, i, e.p);
    v_store(args->state1, BSH_F32, i, e.s1);
    if (BSH_HAS_SECOND_STATE(algorithm)) v_store(args->state2, BSH_F32, i, e.s2);
    if (algorithm == BSH_ADEMAMIX) v_store(args->state1, BSH_F32, args->n + i, e.s3);
  }
  if (i < end) bsh_cpu_scalar_optimizers.optimizer_32bit(args, i, end);
}

static void optimizer_32bit(const bsh_optimizer_32bit_args *const args, const int64_t begin, const int64_t end) {
  BY_ALGORITHM(step_32bit, args->algorithm, args, begin, end);
}

STEP_FUNCTION void squares_32bit(const bsh_optimizer algorithm, const bsh_optimizer_32bit_args *const args,
                                 const int64_t begin, const int64_t end, float *const out) {
  const step_numbers numbers = spread(&args->numbers);
  int64_t i = begin;
  for (; i + LANES <= end; i += LANES) {
    const step_element e = load_element(algorithm, args, i);
    v_store(out, BSH_F32, i - begin, update_square(&numbers, algorithm, &e));
  }
  if (i < end) bsh_cpu_scalar_optimizers.optimizer_squares(args, i, end, out + (i - begin));
}

static void optimizer_squares(const bsh_optimizer_32bit_args *const args, const int64_t begin, const int64_t end,
                              float *const out) {
  BY_ALGORITHM(squares_32bit, args->algorithm, args, begin, end, out);
}

#endif
