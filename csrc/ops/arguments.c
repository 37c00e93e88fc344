/* ops/arguments.c - see ops/arguments.h. */
#include "ops/arguments.h"

#include <inttypes.h>

#include "core/numerics.h"
#include "core/packed.h"

bsh_status bsh_same_device(const bsh_call *const call, const bsh_tensor *const tensor, const char *const argument,
                           const bsh_tensor *const other, const char *const other_argument) {
  if (tensor->device_type == other->device_type && tensor->device_index == other->device_index) return BSH_OK;
  return bsh_fail(BSH_BAD_DEVICE,
                  "%s: %s is on device type %" PRId32 " index %" PRId32 ", %s on %" PRId32 " index %" PRId32, call->op,
                  argument, tensor->device_type, tensor->device_index, other_argument, other->device_type,
                  other->device_index);
}

bsh_status bsh_data_of(const bsh_call *const call, const bsh_tensor *const tensor, const char *const argument,
                       const int32_t dtype, const int64_t numel, const bsh_tensor *const like, void **const data) {
  if (tensor->dtype != dtype)
    return bsh_fail(BSH_BAD_DTYPE, "%s: %s has ScalarType %" PRId32 ", expected %" PRId32, call->op, argument,
                    tensor->dtype, dtype);
  if (tensor->numel != numel)
    return bsh_fail(BSH_BAD_SHAPE, "%s: %s has %" PRId64 " elements, expected %" PRId64, call->op, argument,
                    tensor->numel, numel);
  *data = tensor->data;
  return bsh_same_device(call, tensor, argument, like, "the data");
}

bsh_status bsh_vector_argument(bsh_call *const call, const int index, const char *const argument, const int32_t dtype,
                               const int64_t numel, const bsh_tensor *const like, void **const data) {
  bsh_tensor tensor;
  BSH_TRY(bsh_call_tensor(call, index, &tensor));
  return bsh_data_of(call, &tensor, argument, dtype, numel, like, data);
}

bsh_status bsh_read_activation(bsh_call *const call, const char *const argument, const int64_t width,
                               bsh_tensor *const x, bsh_dtype *const dtype, int64_t *const M) {
  BSH_TRY(bsh_call_tensor(call, 0, x));
  BSH_TRY(bsh_compute_dtype(call->op, argument, x->dtype, dtype));
  if (x->dim < 1)
    return bsh_fail(BSH_BAD_SHAPE, "%s: %s has no dimension, the weight needs %" PRId64 " columns", call->op, argument,
                    width);
  if (x->sizes[x->dim - 1] != width)
    return bsh_fail(BSH_BAD_SHAPE, "%s: last dimension of %s is %" PRId64 ", the weight needs %" PRId64, call->op,
                    argument, x->sizes[x->dim - 1], width);
  *M = 1;
  for (int64_t i = 0; i < x->dim - 1; i++) BSH_TRY(bsh_checked_product(call->op, *M, x->sizes[i], M));
  return BSH_OK;
}

bsh_status bsh_empty_sums(const bsh_call *const call, const bsh_tensor *const y, const bsh_tensor *const bias) {
  const AOTITorchError failed =
      bias != NULL ? bsh_torch.aoti_torch_copy_(y->handle, bias->handle, 0) : bsh_torch.aoti_torch_zero_(y->handle);
  return failed ? bsh_fail(BSH_TORCH_ERROR, "%s: could not fill the result of an empty sum", call->op) : BSH_OK;
}

bsh_status bsh_new_activation(bsh_call *const call, const bsh_tensor *const x, const int64_t width, const int32_t dtype,
                              bsh_tensor *const y) {
  int64_t sizes[BSH_MAX_DIM];
  if (x->dim > BSH_MAX_DIM)
    return bsh_fail(BSH_BAD_SHAPE, "%s: %" PRId64 " dimensions, at most %d are supported", call->op, x->dim,
                    BSH_MAX_DIM);
  for (int64_t i = 0; i < x->dim; i++) sizes[i] = x->sizes[i];
  sizes[x->dim - 1] = width;
  return bsh_call_output(call, x, x->dim, sizes, dtype, y);
}

bsh_status bsh_int8_threshold(const char *const op, const float given, const bsh_dtype dtype, float *const threshold) {
  static const float least[] = {[BSH_F32] = 0x1p-149f, [BSH_F16] = 0x1p-24f, [BSH_BF16] = 0x1p-133f};
  if (!(given >= 0.0f))
    return bsh_fail(BSH_BAD_VALUE, "%s: threshold %g, expected a number from 0 (no outliers) on", op, (double)given);
  const float rounded = round_to_dtype(given, dtype);
  *threshold = given > 0.0f && rounded == 0.0f ? least[dtype] : rounded;
  return BSH_OK;
}
