/* ops/optimizer_step.h - one step of parameters whose tensors were read and checked, on the CPU or on a GPU. */
#ifndef BSH_OPS_OPTIMIZER_STEP_H
#define BSH_OPS_OPTIMIZER_STEP_H

#include "core/kernels.h"
#include "core/status.h"

/* What a step is told about itself. */
typedef struct {
  int64_t algorithm, step; /* step: 1 is the first */
  float lr, beta1, beta2, beta3, alpha, eps, weight_decay, gnorm_scale;
  bool skip_zeros;
} bsh_step_settings;

/* BSH_BAD_VALUE where there is no such algorithm or step. */
bsh_status bsh_step_check(const char *op, const bsh_step_settings *settings);

/* How many moments of one tensor state1 and absmax1 hold. */
int64_t bsh_first_moments(bsh_optimizer algorithm);

enum { BSH_ON_CPU = -1 };

/* A step of one parameter. */
typedef struct {
  bsh_step_tensor tensor;
  const bsh_step_settings *settings;
  const float *map1, *map2; /* f32 [256] of 8-bit states, else NULL */
  int64_t blocksize;        /* of 8-bit states; of a GPU's 256 */
  float *unorm;             /* as in bsh_optimizer_32bit_args */
  float max_unorm, param_norm;
  bsh_dtype g_dtype, p_dtype;
  int32_t device; /* a GPU or BSH_ON_CPU */
  int64_t end;    /* used by bsh_step_items: runs of elements of this one and of those before it */
  bool done;
} bsh_step_item;

/* BSH_BAD_VALUE where something that a step writes shares memory with another of its tensors: kernels read and write
 * several elements at a time. */
bsh_status bsh_step_apart(const char *op, const bsh_step_item *item);

/* All items, those alike in few launches, on the CPU in one parallel loop; one after the other where a parameter shares
 * memory with another or its gradient. Sets `done`: on an error they tell which
 * parameters were updated. BSH_NO_KERNEL for another blocksize on a GPU. */
bsh_status bsh_step_items(const char *op, bsh_step_item *items, int64_t n_items);

#endif
