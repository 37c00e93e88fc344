/* core/optimizer.h - the formulas of all optimizers, once, for every form that computes them.
 *
 * Whoever includes this defines before: STEP_FUNCTION (how an inline function starts), the type `value` (one or several
 * fp32 numbers), and on values
 *   v_set(float)  v_add  v_mul  v_div  v_sqrt  v_fma(a, b, c) = RN(a * b + c)
 *   v_sign(a)            1, 0 or -1; 0 for a NaN
 *   v_flush(a)           denormals as zero of the same sign
 *   v_round(dtype, a)    rounded to dtype and back; a itself for fp32
 *   v_if_zero(g, a, b)   a where g is zero, else b
 *   v_if_finite(g, a, b) a where g is neither infinite nor NaN, else b
 *
 * Every product, sum, quotient and root is one rounding to nearest, so that all forms agree bit for bit. Which sums are
 * fused and where a value is rounded to the dtype of the parameter is what bitsandbytes' CUDA kernels do (read from
 * their PTX), 32-bit and blockwise states each in their way; quotients and roots are approximations there. New states
 * are flushed, as there. Decoupled weight decay comes after the update, in Lion before it; what it leaves is rounded
 * once more. */
#ifndef BSH_CORE_OPTIMIZER_H
#define BSH_CORE_OPTIMIZER_H

#include "core/kernels.h"

/* A number of the step as a value. A form that keeps values of them defines these, and step_numbers, itself. */
#ifndef NUMBER
#define NUMBER(k, name) v_set((k)->name)
#define DECAYS(k) ((k)->weight_decay > 0.0f)
typedef bsh_step_numbers step_numbers;
#endif

/* a over a number of the step, one rounding. A form that knows a faster way defines it. */
#ifndef QUOTIENT
#define QUOTIENT(k, a, name) v_div(a, NUMBER(k, name))
#endif

typedef struct {
  value g, p, s1, s2, s3; /* s3: the slow moment of AdEMAMix */
} step_element;

/* Weight decay as part of the gradient. */
STEP_FUNCTION bool has_coupled_decay(const bsh_optimizer algorithm) {
  return algorithm == BSH_MOMENTUM || algorithm == BSH_RMSPROP || algorithm == BSH_ADAGRAD;
}

/* s * beta + g * rest. */
STEP_FUNCTION value first_moment(const value s, const value g, const value beta, const value rest,
                                 const bool blockwise) {
  if (blockwise) return v_fma(rest, g, v_mul(s, beta));
  return v_fma(s, beta, v_mul(rest, g));
}

/* s * beta + g^2 * rest. bitsandbytes' blockwise kernels fuse another sum where p and g have 16 bits. */
STEP_FUNCTION value second_moment(const step_numbers *const k, const bsh_optimizer algorithm, const value s,
                                  const value g, const value beta, const value rest, const bool blockwise) {
  if (blockwise && algorithm == BSH_RMSPROP) return v_fma(rest, v_mul(g, g), v_mul(s, beta));
  if (blockwise && k->round == BSH_F32) return v_fma(g, v_mul(rest, g), v_mul(s, beta));
  if (blockwise) return v_fma(s, beta, v_mul(g, v_mul(rest, g)));
  if (algorithm == BSH_ADAM) return v_fma(s, beta, v_mul(rest, v_mul(g, g)));
  return v_fma(s, beta, v_mul(v_mul(rest, g), g));
}

STEP_FUNCTION value momentum(const step_numbers *const k, const value s, const value g) {
  return k->first ? g : v_fma(s, NUMBER(k, beta1), g);
}

/* ---- parameters: whoever stores the new one rounds it ---- */

/* Decay of what the update left, which is rounded first. */
STEP_FUNCTION value decayed(const step_numbers *const k, const value p) {
  return DECAYS(k) ? v_mul(v_round(k->round, p), NUMBER(k, decay)) : p;
}

/* p - amount * x. */
STEP_FUNCTION value moved(const value p, const float amount, const value x) { return v_fma(v_set(-amount), x, p); }

/* p - lr * x; with max_unorm, which only 32-bit states know, p - update_scale * (lr * x). */
STEP_FUNCTION value moved_by_lr(const step_numbers *const k, const value p, const value x, const bool blockwise) {
  return blockwise ? moved(p, k->lr, x) : moved(p, k->update_scale, v_mul(NUMBER(k, lr), x));
}

/* Of Adam and AdEMAMix: what the root of the second moment makes the update smaller by. */
STEP_FUNCTION value divisor(const step_numbers *const k, const bsh_optimizer algorithm, const value s2) {
  if (algorithm == BSH_ADAM) return v_add(v_sqrt(s2), NUMBER(k, scaled_eps));
  return v_add(QUOTIENT(k, v_sqrt(s2), correction2), NUMBER(k, eps));
}

/* Their update, but for its factor. */
STEP_FUNCTION value divided_update(const step_numbers *const k, const bsh_optimizer algorithm,
                                   const step_element *const e, const value divisor) {
  if (algorithm == BSH_ADAM) return v_div(e->s1, divisor);
  return v_div(v_fma(e->s3, NUMBER(k, alpha), v_div(e->s1, NUMBER(k, correction1))), divisor);
}

STEP_FUNCTION value updated_parameter(const step_numbers *const k, const bsh_optimizer algorithm, const value p,
                                      const value update) {
  return decayed(k, algorithm == BSH_ADAM ? v_fma(NUMBER(k, step_size), update, p) : moved(p, k->lr, update));
}

/* Of RMSprop and Adagrad. */
STEP_FUNCTION value root_ratio(const step_numbers *const k, const value g, const value s) {
  return v_div(g, v_add(v_sqrt(s), NUMBER(k, eps)));
}

STEP_FUNCTION void lion_update(const step_numbers *const k, const value g, step_element *const e,
                               const bool blockwise) {
  const value direction = v_sign(first_moment(e->s1, g, NUMBER(k, beta1), NUMBER(k, rest1), blockwise));
  const value p = v_round(k->round, decayed(k, e->p));
  if (!blockwise && k->round == BSH_F32 && DECAYS(k))
    e->p = v_fma(e->p, NUMBER(k, decay), v_mul(v_set(-k->lr), direction)); /* there decay and update are one sum */
  else e->p = moved(p, blockwise ? k->stored_lr : k->lr, direction);
  e->s1 = v_flush(first_moment(e->s1, g, NUMBER(k, beta2), NUMBER(k, rest2), blockwise));
}

/* ---- one step -------------------------------------------------------------------------------------------------- */

/* What the states see of the gradient. Blockwise kernels keep it in fp32. */
STEP_FUNCTION value step_gradient(const step_numbers *const k, const bsh_optimizer algorithm,
                                  const step_element *const e, const bool decay, const bool blockwise) {
  value g = v_mul(e->g, NUMBER(k, gnorm_scale));
  if (!blockwise) g = v_round(k->round, g);
  if (!decay || !has_coupled_decay(algorithm) || !DECAYS(k)) return g;
  if (!blockwise && k->round == BSH_F32)
    return v_fma(e->g, NUMBER(k, gnorm_scale), v_mul(e->p, NUMBER(k, weight_decay)));
  g = v_fma(e->p, NUMBER(k, weight_decay), g);
  return blockwise ? g : v_round(k->round, g);
}

STEP_FUNCTION void update_states(const step_numbers *const k, const bsh_optimizer algorithm, const value g,
                                 step_element *const e, const bool blockwise) {
  if (algorithm == BSH_MOMENTUM) e->s1 = v_flush(momentum(k, e->s1, g));
  if (algorithm == BSH_RMSPROP)
    e->s1 = v_flush(second_moment(k, algorithm, e->s1, g, NUMBER(k, beta1), NUMBER(k, rest1), blockwise));
  if (algorithm == BSH_ADAGRAD) e->s1 = v_flush(v_fma(g, g, e->s1));
  if (!BSH_HAS_SECOND_STATE(algorithm)) return;
  e->s1 = v_flush(first_moment(e->s1, g, NUMBER(k, beta1), NUMBER(k, rest1), blockwise));
  e->s2 = v_flush(second_moment(k, algorithm, e->s2, g, NUMBER(k, beta2), NUMBER(k, rest2), blockwise));
  if (algorithm == BSH_ADEMAMIX) e->s3 = v_flush(first_moment(e->s3, g, NUMBER(k, beta3), NUMBER(k, rest3), blockwise));
}

STEP_FUNCTION void update_parameter(const step_numbers *const k, const bsh_optimizer algorithm, const value g,
                                    step_element *const e, const bool blockwise) {
  if (BSH_HAS_SECOND_STATE(algorithm))
    e->p = updated_parameter(k, algorithm, e->p, divided_update(k, algorithm, e, divisor(k, algorithm, e->s2)));
  if (algorithm == BSH_MOMENTUM) e->p = moved_by_lr(k, e->p, e->s1, blockwise);
  if (algorithm == BSH_RMSPROP) e->p = moved_by_lr(k, e->p, root_ratio(k, g, e->s1), blockwise);
  if (algorithm == BSH_ADAGRAD) e->p = moved(e->p, k->lr, root_ratio(k, g, e->s1));
}

/* The new states of algorithms with two, whose gradient has no weight decay. */
STEP_FUNCTION void new_states(const step_numbers *const k, const bsh_optimizer algorithm, step_element *const e,
                              const bool blockwise) {
  const step_element old = *e;
  update_states(k, algorithm, step_gradient(k, algorithm, e, true, blockwise), e, blockwise);
  if (!k->skip_zeros) return;
  e->s1 = v_if_zero(old.g, old.s1, e->s1);
  e->s2 = v_if_zero(old.g, old.s2, e->s2);
  e->s3 = v_if_zero(old.g, old.s3, e->s3);
}

/* One step of e, whose gradient is finite or whose states are not blockwise. */
STEP_FUNCTION void step_of_finite(const step_numbers *const k, const bsh_optimizer algorithm, step_element *const e,
                                  const bool blockwise) {
  const step_element old = *e;
  const value g = step_gradient(k, algorithm, e, true, blockwise);
  if (algorithm == BSH_LION) {
    lion_update(k, g, e, blockwise);
  } else {
    update_states(k, algorithm, g, e, blockwise);
    update_parameter(k, algorithm, g, e, blockwise);
  }
  if (!k->skip_zeros) return;
  e->p = v_if_zero(old.g, old.p, e->p);
  e->s1 = v_if_zero(old.g, old.s1, e->s1);
  e->s2 = v_if_zero(old.g, old.s2, e->s2);
  e->s3 = v_if_zero(old.g, old.s3, e->s3);
}

/* One step of e. Blockwise states live in blocks that one infinity would wipe out: there an element whose gradient is
 * infinite or NaN keeps its parameter and loses its states. 32-bit states take what comes. */
STEP_FUNCTION void step(const step_numbers *const k, const bsh_optimizer algorithm, step_element *const e,
                        const bool blockwise) {
  const step_element old = *e;
  step_of_finite(k, algorithm, e, blockwise);
  if (!blockwise) return;
  e->p = v_if_finite(old.g, e->p, old.p);
  e->s1 = v_if_finite(old.g, e->s1, v_set(0.0f));
  e->s2 = v_if_finite(old.g, e->s2, v_set(0.0f));
  e->s3 = v_if_finite(old.g, e->s3, v_set(0.0f));
}

/* Square of the update that max_unorm bounds, for Adam, momentum and RMSprop: without weight decay, lr and states
 * written back. */
STEP_FUNCTION value update_square(const step_numbers *const k, const bsh_optimizer algorithm,
                                  const step_element *const e) {
  const value g = step_gradient(k, algorithm, e, false, false);
  value update = v_set(0.0f);
  if (algorithm == BSH_MOMENTUM) update = momentum(k, e->s1, g);
  if (algorithm == BSH_RMSPROP)
    update = root_ratio(k, g, second_moment(k, algorithm, e->s1, g, NUMBER(k, beta1), NUMBER(k, rest1), false));
  if (algorithm == BSH_ADAM) {
    const value s1 = v_mul(first_moment(e->s1, g, NUMBER(k, beta1), NUMBER(k, rest1), false), NUMBER(k, inverse1));
    const value s2 =
        v_mul(second_moment(k, algorithm, e->s2, g, NUMBER(k, beta2), NUMBER(k, rest2), false), NUMBER(k, inverse2));
    update = root_ratio(k, s1, s2);
  }
  return v_mul(update, update);
}

#endif
