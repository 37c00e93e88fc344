/* optimizer_step.h - one step of parameters whose tensors were read and checked, on the CPU or on a GPU. */
#ifndef BSH_OPTIMIZER_STEP_H
#define BSH_OPTIMIZER_STEP_H

#include "kernels.h"
#include "status.h"

/* What a step is told about itself. */
typedef struct {
  int64_t algorithm, step; /* step: 1 is the first */
  float lr, beta1, beta2, beta3, alpha, eps, weight_decay, gnorm_scale;
  bool skip_zeros;
} bsh_step_settings;

/* BSH_BAD_VALUE where there is no such algorithm or step. */
bsh_status bsh_step_check(const char *op, const bsh_step_settings *settings);

/* The numbers of a checked step for gradients and parameters of these dtypes. */
bsh_step_numbers bsh_step_numbers_of(const bsh_step_settings *settings, bsh_dtype g_dtype, bsh_dtype p_dtype);

/* How many moments of one tensor state1 and absmax1 hold, and whether there is a second state. */
int64_t bsh_first_moments(bsh_optimizer algorithm);
bool bsh_has_second_state(bsh_optimizer algorithm);

/* Memory of an argument. */
typedef struct {
  const char *argument;
  const void *data; /* NULL where there is none */
  int64_t bytes;
} bsh_span;

/* BSH_BAD_VALUE where one of the first n_changed of n spans, which are written to, shares memory with another: kernels
 * read and write several elements at a time. */
bsh_status bsh_check_apart(const char *op, const bsh_span *spans, int n_changed, int n);

enum { BSH_ON_CPU = -1 };

/* One parameter. `device` is a GPU or BSH_ON_CPU. Blocks of a GPU have 256 elements: else BSH_NO_KERNEL. */
bsh_status bsh_step_32bit(const char *op, const bsh_optimizer_32bit_args *args, int32_t device);
bsh_status bsh_step_8bit_blockwise(const char *op, const bsh_optimizer_8bit_blockwise_args *args, int32_t device);

/* A parameter among many. */
typedef struct {
  bsh_step_tensor tensor;
  const bsh_step_settings *settings;
  const float *map1, *map2; /* f32 [256] of 8-bit states, else NULL */
  bsh_dtype g_dtype, p_dtype;
  int32_t device;
  bool done;
} bsh_step_item;

/* All items, those alike in few launches. Sets `done`: on an error they tell which parameters were updated. */
bsh_status bsh_step_items(const char *op, bsh_step_item *items, int64_t n_items);

#endif
