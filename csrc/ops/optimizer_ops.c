/* ops/optimizer_ops.c - the ops that change parameters and optimizer states in place. Schemas: ops/ops.c. Formulas:
 * core/optimizer.h.
 *
 * Everything is checked before anything is written: a call that is refused has changed nothing. */
#include <inttypes.h>

#include "core/packed.h"
#include "ops/ops.h"
#include "ops/optimizer_step.h"

/* Arguments from `algorithm` at stack[first] to `step`, and gnorm_scale and skip_zeros from stack[last] on. */
static bsh_status read_settings(const bsh_call *const call, const int first, const int last,
                                bsh_step_settings *const settings) {
  *settings = (bsh_step_settings){.algorithm = bsh_call_int(call, first),
                                  .step = bsh_call_int(call, first + 8),
                                  .lr = bsh_call_float(call, first + 1),
                                  .beta1 = bsh_call_float(call, first + 2),
                                  .beta2 = bsh_call_float(call, first + 3),
                                  .beta3 = bsh_call_float(call, first + 4),
                                  .alpha = bsh_call_float(call, first + 5),
                                  .eps = bsh_call_float(call, first + 6),
                                  .weight_decay = bsh_call_float(call, first + 7),
                                  .gnorm_scale = bsh_call_float(call, last),
                                  .skip_zeros = bsh_call_bool(call, last + 1)};
  return bsh_step_check(call->op, settings);
}

/* ---- tensors ---- */

static bsh_status check_device(const bsh_call *const call, const bsh_tensor *const tensor, const char *const argument,
                               const bsh_tensor *const like) {
  if (tensor->device_type == like->device_type && tensor->device_index == like->device_index) return BSH_OK;
  return bsh_fail(BSH_BAD_DEVICE,
                  "%s: %s is on device type %" PRId32 " index %" PRId32 ", g on %" PRId32 " index %" PRId32, call->op,
                  argument, tensor->device_type, tensor->device_index, like->device_type, like->device_index);
}

static bsh_status check_numel(const bsh_call *const call, const bsh_tensor *const tensor, const char *const argument,
                              const int64_t numel) {
  if (tensor->numel == numel) return BSH_OK;
  return bsh_fail(BSH_BAD_SHAPE, "%s: %s has %" PRId64 " elements, expected %" PRId64, call->op, argument,
                  tensor->numel, numel);
}

/* g at stack[0] and p at stack[1]. */
static bsh_status read_pair(bsh_call *const call, bsh_tensor *const g, bsh_step_item *const item) {
  bsh_tensor p;
  BSH_TRY(bsh_call_tensor(call, 0, g));
  BSH_TRY(bsh_call_in_place(call, 1, "p", &p));
  BSH_TRY(bsh_compute_dtype(call->op, "g", g->dtype, &item->g_dtype));
  BSH_TRY(bsh_compute_dtype(call->op, "p", p.dtype, &item->p_dtype));
  BSH_TRY(check_numel(call, &p, "p", g->numel));
  item->tensor.g = g->data;
  item->tensor.p = p.data;
  item->tensor.n = g->numel;
  item->device = bsh_on_cuda(g) ? g->device_index : BSH_ON_CPU;
  return check_device(call, &p, "p", g);
}

/* Tensor argument `index` of a given dtype and number of elements on the device of g; changed in place or only read. */
static bsh_status read_vector(bsh_call *const call, const int index, const char *const argument, const bool in_place,
                              const int32_t dtype, const int64_t numel, const bsh_tensor *const g, void **const data) {
  bsh_tensor tensor;
  if (in_place) BSH_TRY(bsh_call_in_place(call, index, argument, &tensor));
  else BSH_TRY(bsh_call_tensor(call, index, &tensor));
  if (tensor.dtype != dtype)
    return bsh_fail(BSH_BAD_DTYPE, "%s: %s has ScalarType %" PRId32 ", expected %" PRId32, call->op, argument,
                    tensor.dtype, dtype);
  BSH_TRY(check_numel(call, &tensor, argument, numel));
  *data = tensor.data;
  return check_device(call, &tensor, argument, g);
}

/* The same where the algorithm has one state only: then it must be empty. */
static bsh_status read_second(bsh_call *const call, const int index, const char *const argument, const bool in_place,
                              const bsh_optimizer algorithm, const int32_t dtype, const int64_t numel,
                              const bsh_tensor *const g, void **const data) {
  if (BSH_HAS_SECOND_STATE(algorithm)) return read_vector(call, index, argument, in_place, dtype, numel, g, data);
  bsh_tensor tensor;
  *data = NULL;
  BSH_TRY(bsh_call_tensor(call, index, &tensor));
  return check_numel(call, &tensor, argument, 0);
}

/* ---- the ops ---- */

static bsh_status step(const bsh_call *const call, bsh_step_item *const item) {
  if (item->tensor.n == 0) return BSH_OK;
  BSH_TRY(bsh_step_apart(call->op, item));
  return bsh_step_items(call->op, item, 1);
}

/* max_unorm bounds the updates of Adam, momentum and RMSprop, where bitsandbytes' kernels apply it. */
static bsh_status read_norm(bsh_call *const call, const bsh_tensor *const g, bsh_step_item *const item) {
  const int64_t algorithm = item->settings->algorithm;
  item->max_unorm = bsh_call_float(call, 14);
  item->param_norm = bsh_call_float(call, 15);
  if (!(item->max_unorm > 0.0f)) return BSH_OK;
  if (algorithm != BSH_ADAM && algorithm != BSH_MOMENTUM && algorithm != BSH_RMSPROP) return BSH_OK;
  return read_vector(call, 4, "unorm", true, bsh_torch.dtype_float32, 1, g, (void **)&item->unorm);
}

bsh_status bsh_op_optimizer_32bit(bsh_call *const call) {
  const int32_t f32 = bsh_torch.dtype_float32;
  bsh_step_settings settings;
  bsh_step_item item = {.settings = &settings};
  bsh_step_tensor *const t = &item.tensor;
  bsh_tensor g;
  int64_t n_first = 0;
  BSH_TRY(read_settings(call, 5, 16, &settings));
  const bsh_optimizer algorithm = (bsh_optimizer)settings.algorithm;
  BSH_TRY(read_pair(call, &g, &item));
  BSH_TRY(bsh_checked_product(call->op, bsh_first_moments(algorithm), g.numel, &n_first));
  BSH_TRY(read_vector(call, 2, "state1", true, f32, n_first, &g, &t->state1));
  BSH_TRY(read_second(call, 3, "state2", true, algorithm, f32, g.numel, &g, &t->state2));
  BSH_TRY(read_norm(call, &g, &item));
  return step(call, &item);
}

bsh_status bsh_op_optimizer_8bit_blockwise(bsh_call *const call) {
  const int32_t f32 = bsh_torch.dtype_float32, u8 = bsh_torch.dtype_uint8;
  bsh_step_settings settings;
  bsh_step_item item = {.settings = &settings, .blocksize = bsh_call_int(call, 19)};
  bsh_step_tensor *const t = &item.tensor;
  bsh_tensor g;
  int64_t n_first = 0;
  BSH_TRY(read_settings(call, 8, 17, &settings));
  const bsh_optimizer algorithm = (bsh_optimizer)settings.algorithm;
  BSH_TRY(bsh_check_blocksize(call->op, item.blocksize, BSH_MAX_BLOCKSIZE));
  BSH_TRY(read_pair(call, &g, &item));
  const int64_t n_blocks = bsh_block_count(g.numel, item.blocksize), n_moments = bsh_first_moments(algorithm);
  BSH_TRY(bsh_checked_product(call->op, n_moments, g.numel, &n_first));
  BSH_TRY(read_vector(call, 2, "state1", true, u8, n_first, &g, &t->state1));
  BSH_TRY(read_second(call, 3, "state2", true, algorithm, u8, g.numel, &g, &t->state2));
  BSH_TRY(read_vector(call, 4, "qmap1", false, f32, 256, &g, (void **)(uintptr_t)&item.map1));
  BSH_TRY(read_second(call, 5, "qmap2", false, algorithm, f32, 256, &g, (void **)(uintptr_t)&item.map2));
  BSH_TRY(read_vector(call, 6, "absmax1", true, f32, n_moments * n_blocks, &g, (void **)&t->absmax1));
  BSH_TRY(read_second(call, 7, "absmax2", true, algorithm, f32, n_blocks, &g, (void **)&t->absmax2));
  return step(call, &item);
}
