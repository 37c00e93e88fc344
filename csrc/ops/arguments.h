/* ops/arguments.h - what the ops share: reading and checking tensors of a call, and leaving it to compute. */
#ifndef BSH_OPS_ARGUMENTS_H
#define BSH_OPS_ARGUMENTS_H

#include "core/kernels.h"
#include "core/status.h"
#include "gpu/driver.h"
#include "torch/tensor.h"

/* BSH_BAD_DEVICE where two tensors are not on one device. */
bsh_status bsh_same_device(const bsh_call *call, const bsh_tensor *tensor, const char *argument,
                           const bsh_tensor *other, const char *other_argument);

/* The data of a tensor that must have a given dtype and number of elements and lie on the device of `like`. */
bsh_status bsh_data_of(const bsh_call *call, const bsh_tensor *tensor, const char *argument, int32_t dtype,
                       int64_t numel, const bsh_tensor *like, void **data);

/* The same for tensor argument `index`. */
bsh_status bsh_vector_argument(bsh_call *call, int index, const char *argument, int32_t dtype, int64_t numel,
                               const bsh_tensor *like, void **data);

/* The activation at stack[0], [..., width]; *M = product of the leading sizes. */
bsh_status bsh_read_activation(bsh_call *call, const char *argument, int64_t width, bsh_tensor *x, bsh_dtype *dtype,
                               int64_t *M);

/* The output [..., width] of torch's `dtype`, leading sizes those of x. */
bsh_status bsh_new_activation(bsh_call *call, const bsh_tensor *x, int64_t width, int32_t dtype, bsh_tensor *y);

/* Sums of no terms: y [..., N] = bias, or zero where bias is NULL. */
bsh_status bsh_empty_sums(const bsh_call *call, const bsh_tensor *y, const bsh_tensor *bias);

/* The threshold of outliers as a number of x's dtype, in which torch compares; a positive one stays positive. */
bsh_status bsh_int8_threshold(const char *op, float given, bsh_dtype dtype, float *threshold);

/* Leaves the op: computes with args on the device of `like`. The sizes are for messages. */
#define BSH_COMPUTE(name, like, size0, size1, size2, ...)                                                              \
  do {                                                                                                                 \
    bsh_call_compute(call);                                                                                            \
    if (!bsh_on_cuda(like)) return bsh_cpu_##name(__VA_ARGS__);                                                        \
    bsh_cuda_context context;                                                                                          \
    BSH_TRY(bsh_cuda_enter(&context, #name, (like)->device_index, size0, size1, size2));                               \
    const bsh_status computed = bsh_cuda_##name(__VA_ARGS__, &context);                                                \
    bsh_cuda_leave(&context);                                                                                          \
    return computed;                                                                                                   \
  } while (0)

#endif
