/* optimizer_ops.c - the ops that change parameters and optimizer states in place. Schemas: ops.c. Formulas:
 * optimizer.h.
 *
 * Everything is checked before anything is written: a call that is refused has changed nothing. */
#include <inttypes.h>
#include <math.h>

#include "cpu.h"
#include "cpu_numerics.h"
#include "ops.h"
#include "packed.h"

/* ---- numbers ---- */

/* Arguments from `algorithm` at stack[first] to `step`. */
static bsh_status read_numbers(const bsh_call *const call, const int first, bsh_optimizer *const algorithm,
                               bsh_step_numbers *const k) {
  const int64_t number = bsh_call_int(call, first), step = bsh_call_int(call, first + 8);
  if (number < 0 || number >= BSH_N_OPTIMIZERS)
    return bsh_fail(BSH_BAD_VALUE, "%s: there is no algorithm %" PRId64 ": they are numbered 0 to %d", call->op, number,
                    BSH_N_OPTIMIZERS - 1);
  if (step < 1) return bsh_fail(BSH_BAD_VALUE, "%s: step is %" PRId64 ": the first step is 1", call->op, step);
  *algorithm = (bsh_optimizer)number;
  *k = (bsh_step_numbers){.lr = bsh_call_float(call, first + 1),
                          .beta1 = bsh_call_float(call, first + 2),
                          .beta2 = bsh_call_float(call, first + 3),
                          .beta3 = bsh_call_float(call, first + 4),
                          .alpha = bsh_call_float(call, first + 5),
                          .eps = bsh_call_float(call, first + 6),
                          .weight_decay = bsh_call_float(call, first + 7),
                          .update_scale = 1.0f,
                          .first = step == 1};
  const double unbiased1 = 1.0 - pow(k->beta1, (double)step), unbiased2 = 1.0 - pow(k->beta2, (double)step);
  k->correction1 = (float)unbiased1;
  k->correction2 = (float)sqrt(unbiased2);
  k->inverse1 = (float)(1.0 / unbiased1);
  k->inverse2 = (float)(1.0 / unbiased2);
  return BSH_OK;
}

/* The rest of the numbers, once the dtypes, gnorm_scale and skip_zeros are known. */
static void derive_numbers(bsh_step_numbers *const k, const bsh_dtype g_dtype, const bsh_dtype p_dtype) {
  k->round = g_dtype == p_dtype ? p_dtype : BSH_F32;
  k->rest1 = 1.0f - k->beta1;
  k->rest2 = 1.0f - k->beta2;
  k->rest3 = 1.0f - k->beta3;
  k->decay = fmaf(-k->lr, k->weight_decay, 1.0f);
  k->step_size = -k->lr * k->correction2 / k->correction1;
  k->scaled_eps = k->eps * k->correction2;
  k->stored_lr = round_to_dtype(k->lr, k->round);
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
static bsh_status read_pair(bsh_call *const call, bsh_tensor *const g, bsh_tensor *const p, bsh_dtype *const g_dtype,
                            bsh_dtype *const p_dtype) {
  BSH_TRY(bsh_call_tensor(call, 0, g));
  BSH_TRY(bsh_call_in_place(call, 1, "p", p));
  BSH_TRY(bsh_compute_dtype(call->op, "g", g->dtype, g_dtype));
  BSH_TRY(bsh_compute_dtype(call->op, "p", p->dtype, p_dtype));
  BSH_TRY(check_numel(call, p, "p", g->numel));
  return check_device(call, p, "p", g);
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
  if (algorithm == BSH_ADAM || algorithm == BSH_ADEMAMIX)
    return read_vector(call, index, argument, in_place, dtype, numel, g, data);
  bsh_tensor tensor;
  *data = NULL;
  BSH_TRY(bsh_call_tensor(call, index, &tensor));
  return check_numel(call, &tensor, argument, 0);
}

typedef struct {
  const char *argument;
  const void *data; /* NULL where there is none */
  int64_t bytes;
} span;

/* The first n_changed of n spans are written to: none of them may share memory with another, for kernels read and write
 * several elements at a time. */
static bsh_status check_apart(const bsh_call *const call, const span *const spans, const int n_changed, const int n) {
  for (int i = 0; i < n_changed; i++) {
    for (int j = i + 1; j < n; j++) {
      const uintptr_t a = (uintptr_t)spans[i].data, b = (uintptr_t)spans[j].data;
      if (!a || !b || a + (uintptr_t)spans[i].bytes <= b || b + (uintptr_t)spans[j].bytes <= a) continue;
      return bsh_fail(BSH_BAD_VALUE, "%s: %s and %s share memory, and %s is changed in place", call->op,
                      spans[i].argument, spans[j].argument, spans[i].argument);
    }
  }
  return BSH_OK;
}

static int64_t n_first_moments(const bsh_optimizer algorithm) { return algorithm == BSH_ADEMAMIX ? 2 : 1; }

static bsh_status no_cuda_yet(const bsh_call *const call) {
  return bsh_fail(BSH_NO_KERNEL,
                  "%s: optimizer kernels for CUDA are not there yet: keep parameters and states on the CPU", call->op);
}

/* ---- the ops ---- */

/* max_unorm bounds the updates of Adam, momentum and RMSprop, where bitsandbytes' kernels apply it. */
static bsh_status read_norm(bsh_call *const call, const bsh_tensor *const g, bsh_optimizer_32bit_args *const args) {
  const bsh_optimizer algorithm = args->algorithm;
  args->max_unorm = bsh_call_float(call, 14);
  args->param_norm = bsh_call_float(call, 15);
  if (!(args->max_unorm > 0.0f)) return BSH_OK;
  if (algorithm != BSH_ADAM && algorithm != BSH_MOMENTUM && algorithm != BSH_RMSPROP) return BSH_OK;
  return read_vector(call, 4, "unorm", true, bsh_torch.dtype_float32, 1, g, (void **)&args->unorm);
}

bsh_status bsh_op_optimizer_32bit(bsh_call *const call) {
  const int32_t f32 = bsh_torch.dtype_float32;
  bsh_optimizer_32bit_args args = {0};
  bsh_tensor g, p;
  int64_t n_first = 0;
  BSH_TRY(read_numbers(call, 5, &args.algorithm, &args.numbers));
  BSH_TRY(read_pair(call, &g, &p, &args.g_dtype, &args.p_dtype));
  BSH_TRY(bsh_checked_product(call->op, n_first_moments(args.algorithm), g.numel, &n_first));
  BSH_TRY(read_vector(call, 2, "state1", true, f32, n_first, &g, (void **)&args.state1));
  BSH_TRY(read_second(call, 3, "state2", true, args.algorithm, f32, g.numel, &g, (void **)&args.state2));
  BSH_TRY(read_norm(call, &g, &args));
  if (g.numel == 0) return BSH_OK;
  args.numbers.gnorm_scale = bsh_call_float(call, 16);
  args.numbers.skip_zeros = bsh_call_bool(call, 17);
  derive_numbers(&args.numbers, args.g_dtype, args.p_dtype);
  args.g = g.data;
  args.p = p.data;
  args.n = g.numel;
  const span spans[] = {{"p", p.data, p.numel * dtype_size(args.p_dtype)},
                        {"state1", args.state1, n_first * 4},
                        {"state2", args.state2, g.numel * 4},
                        {"unorm", args.unorm, 4},
                        {"g", g.data, g.numel * dtype_size(args.g_dtype)}};
  BSH_TRY(check_apart(call, spans, 4, 5));
  return bsh_on_cuda(&g) ? no_cuda_yet(call) : bsh_cpu_optimizer_32bit(&args);
}

bsh_status bsh_op_optimizer_8bit_blockwise(bsh_call *const call) {
  const int32_t f32 = bsh_torch.dtype_float32, u8 = bsh_torch.dtype_uint8;
  bsh_optimizer_8bit_blockwise_args args = {.blocksize = bsh_call_int(call, 19)};
  bsh_tensor g, p;
  int64_t n_first = 0;
  BSH_TRY(read_numbers(call, 8, &args.algorithm, &args.numbers));
  BSH_TRY(bsh_check_blocksize(call->op, args.blocksize, BSH_MAX_BLOCKSIZE));
  BSH_TRY(read_pair(call, &g, &p, &args.g_dtype, &args.p_dtype));
  const int64_t n_blocks = bsh_block_count(g.numel, args.blocksize), n_moments = n_first_moments(args.algorithm);
  BSH_TRY(bsh_checked_product(call->op, n_moments, g.numel, &n_first));
  BSH_TRY(read_vector(call, 2, "state1", true, u8, n_first, &g, (void **)&args.state1));
  BSH_TRY(read_second(call, 3, "state2", true, args.algorithm, u8, g.numel, &g, (void **)&args.state2));
  BSH_TRY(read_vector(call, 4, "qmap1", false, f32, 256, &g, (void **)(uintptr_t)&args.map1));
  BSH_TRY(read_second(call, 5, "qmap2", false, args.algorithm, f32, 256, &g, (void **)(uintptr_t)&args.map2));
  BSH_TRY(read_vector(call, 6, "absmax1", true, f32, n_moments * n_blocks, &g, (void **)&args.absmax1));
  BSH_TRY(read_second(call, 7, "absmax2", true, args.algorithm, f32, n_blocks, &g, (void **)&args.absmax2));
  if (g.numel == 0) return BSH_OK;
  args.numbers.gnorm_scale = bsh_call_float(call, 17);
  args.numbers.skip_zeros = bsh_call_bool(call, 18);
  derive_numbers(&args.numbers, args.g_dtype, args.p_dtype);
  args.g = g.data;
  args.p = p.data;
  args.n = g.numel;
  const span spans[] = {{"p", p.data, p.numel * dtype_size(args.p_dtype)},
                        {"state1", args.state1, n_first},
                        {"state2", args.state2, g.numel},
                        {"absmax1", args.absmax1, n_moments * n_blocks * 4},
                        {"absmax2", args.absmax2, n_blocks * 4},
                        {"g", g.data, g.numel * dtype_size(args.g_dtype)},
                        {"qmap1", args.map1, 256 * 4},
                        {"qmap2", args.map2, 256 * 4}};
  BSH_TRY(check_apart(call, spans, 5, 8));
  return bsh_on_cuda(&g) ? no_cuda_yet(call) : bsh_cpu_optimizer_8bit_blockwise(&args);
}
