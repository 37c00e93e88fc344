/* torch/tensor.c - see torch/tensor.h. */
#include "torch/tensor.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define TORCH_TRY(op, expression)                                                                                      \
  do {                                                                                                                 \
    if ((expression) != 0) return bsh_fail(BSH_TORCH_ERROR, "%s: torch refused %s", op, #expression);                  \
  } while (0)

int64_t bsh_itemsize(const int32_t dtype) {
  if (dtype == bsh_torch.dtype_uint8 || dtype == bsh_torch.dtype_int8) return 1;
  if (dtype == bsh_torch.dtype_bfloat16 || dtype == bsh_torch.dtype_float16) return 2;
  if (dtype == bsh_torch.dtype_float32) return 4;
  if (dtype == bsh_torch.dtype_float64 || dtype == bsh_torch.dtype_int64) return 8;
  return 0;
}

bsh_status bsh_compute_dtype(const char *const op, const char *const argument, const int32_t dtype,
                             bsh_dtype *const compute) {
  const bsh_dtype candidates[] = {BSH_F32, BSH_F16, BSH_BF16};
  for (size_t i = 0; i < sizeof candidates / sizeof *candidates; i++) {
    *compute = candidates[i];
    if (dtype == bsh_torch_dtype(candidates[i])) return BSH_OK;
  }
  return bsh_fail(BSH_BAD_DTYPE, "%s: %s must be float32, float16 or bfloat16, got ScalarType %" PRId32, op, argument,
                  dtype);
}

int32_t bsh_torch_dtype(const bsh_dtype compute) {
  if (compute == BSH_F32) return bsh_torch.dtype_float32;
  if (compute == BSH_F16) return bsh_torch.dtype_float16;
  return bsh_torch.dtype_bfloat16;
}

static bsh_status describe(const char *const op, const AtenTensorHandle handle, bsh_tensor *const tensor) {
  int64_t *sizes = NULL;
  *tensor = (bsh_tensor){.handle = handle};
  TORCH_TRY(op, bsh_torch.aoti_torch_get_data_ptr(handle, &tensor->data));
  TORCH_TRY(op, bsh_torch.aoti_torch_get_numel(handle, &tensor->numel));
  TORCH_TRY(op, bsh_torch.aoti_torch_get_dim(handle, &tensor->dim));
  TORCH_TRY(op, bsh_torch.aoti_torch_get_sizes(handle, &sizes));
  TORCH_TRY(op, bsh_torch.aoti_torch_get_dtype(handle, &tensor->dtype));
  TORCH_TRY(op, bsh_torch.aoti_torch_get_device_type(handle, &tensor->device_type));
  TORCH_TRY(op, bsh_torch.aoti_torch_get_device_index(handle, &tensor->device_index));
  tensor->sizes = sizes;
  tensor->itemsize = bsh_itemsize(tensor->dtype);
  return BSH_OK;
}

/* FSDP2 frees a gathered tensor by resizing its storage to nothing while Python still holds it. */
static bsh_status check_storage(const char *const op, const bsh_tensor *const tensor) {
  int64_t storage_bytes = 0, offset = 0;
  TORCH_TRY(op, bsh_torch.aoti_torch_get_storage_size(tensor->handle, &storage_bytes));
  TORCH_TRY(op, bsh_torch.aoti_torch_get_storage_offset(tensor->handle, &offset));
  if (tensor->numel == 0 || (offset + tensor->numel) * tensor->itemsize <= storage_bytes) return BSH_OK;
  return bsh_fail(BSH_BAD_SHAPE,
                  "%s: a tensor of %" PRId64 " elements has only %" PRId64
                  " bytes of storage: it was freed, as FSDP does after a module's forward",
                  op, tensor->numel, storage_bytes);
}

static void contiguous_strides(const int64_t dim, const int64_t *const sizes, int64_t *const strides) {
  int64_t step = 1;
  for (int64_t i = dim - 1; i >= 0; i--) {
    strides[i] = step;
    step *= sizes[i] > 0 ? sizes[i] : 1;
  }
}

static bsh_status allocation_failed(const char *const op, const bsh_tensor *const like, const int64_t dim,
                                    const int64_t *const sizes, const int64_t itemsize) {
  double bytes = (double)itemsize;
  for (int64_t i = 0; i < dim; i++) bytes *= (double)sizes[i];
  return bsh_no_memory(op, "a tensor", bsh_on_cuda(like) ? like->device_index : BSH_DEVICE_CPU, bytes);
}

bsh_status bsh_tensor_new(const char *const op, const bsh_tensor *const like, const int64_t dim,
                          const int64_t *const sizes, const int32_t dtype, bsh_tensor *const tensor) {
  int64_t strides[BSH_MAX_DIM];
  AtenTensorHandle handle = NULL;
  contiguous_strides(dim, sizes, strides);
  if (bsh_torch.aoti_torch_empty_strided(dim, sizes, strides, dtype, like->device_type, like->device_index, &handle))
    return allocation_failed(op, like, dim, sizes, bsh_itemsize(dtype));
  const bsh_status status = describe(op, handle, tensor);
  if (status != BSH_OK) bsh_torch.aoti_torch_delete_tensor_object(handle);
  return status;
}

static bsh_status make_contiguous(bsh_call *const call, bsh_tensor *const tensor) {
  if (tensor->dim > BSH_MAX_DIM)
    return bsh_fail(BSH_BAD_SHAPE, "%s: %" PRId64 " dimensions, at most %d are supported", call->op, tensor->dim,
                    BSH_MAX_DIM);
  if (call->n_temporaries == BSH_MAX_TEMPORARIES)
    return bsh_fail(BSH_TORCH_ERROR, "%s: more than %d temporaries", call->op, BSH_MAX_TEMPORARIES);
  bsh_tensor copy;
  BSH_TRY(bsh_tensor_new(call->op, tensor, tensor->dim, tensor->sizes, tensor->dtype, &copy));
  call->temporaries[call->n_temporaries++] = copy.handle;
  TORCH_TRY(call->op, bsh_torch.aoti_torch_copy_(copy.handle, tensor->handle, 0));
  *tensor = copy;
  return BSH_OK;
}

/* The tensor at stack[index], as it is; whether it is contiguous, and then with all of its storage. */
static bsh_status read_stack(const bsh_call *const call, const int index, bsh_tensor *const tensor,
                             bool *const contiguous) {
  const AtenTensorHandle handle = (AtenTensorHandle)(uintptr_t)call->stack[index];
  BSH_TRY(describe(call->op, handle, tensor));
  TORCH_TRY(call->op, bsh_torch.aoti_torch_is_contiguous(handle, contiguous));
  return *contiguous ? check_storage(call->op, tensor) : BSH_OK;
}

static bsh_status stack_tensor(bsh_call *const call, const int index, bsh_tensor *const tensor) {
  bool contiguous = true;
  BSH_TRY(read_stack(call, index, tensor, &contiguous));
  return contiguous ? BSH_OK : make_contiguous(call, tensor);
}

static bsh_status stack_in_place(bsh_call *const call, const int index, const char *const argument,
                                 bsh_tensor *const tensor) {
  bool contiguous = true;
  BSH_TRY(read_stack(call, index, tensor, &contiguous));
  if (contiguous) return BSH_OK;
  return bsh_fail(BSH_BAD_SHAPE,
                  "%s: %s, %" PRId64 " elements in %" PRId64
                  " dimensions, is not contiguous: it is changed in place and a copy would be lost",
                  call->op, argument, tensor->numel, tensor->dim);
}

static bsh_status stack_output(bsh_call *const call, const bsh_tensor *const like, const int64_t dim,
                               const int64_t *const sizes, const int32_t dtype, bsh_tensor *const output) {
  if (call->n_outputs == BSH_MAX_OUTPUTS)
    return bsh_fail(BSH_TORCH_ERROR, "%s: more than %d outputs", call->op, BSH_MAX_OUTPUTS);
  BSH_TRY(bsh_tensor_new(call->op, like, dim, sizes, dtype, output));
  call->outputs[call->n_outputs++] = *output;
  return BSH_OK;
}

const bsh_caller bsh_dispatcher = {
    .tensor = stack_tensor, .in_place = stack_in_place, .output = stack_output, .vendor = BSH_VENDOR_TORCH};

bsh_status bsh_call_tensor(bsh_call *const call, const int index, bsh_tensor *const tensor) {
  return call->caller->tensor(call, index, tensor);
}

bsh_status bsh_call_in_place(bsh_call *const call, const int index, const char *const argument,
                             bsh_tensor *const tensor) {
  return call->caller->in_place(call, index, argument, tensor);
}

int64_t bsh_call_int(const bsh_call *const call, const int index) { return (int64_t)call->stack[index]; }

float bsh_call_float(const bsh_call *const call, const int index) {
  double value = 0;
  memcpy(&value, &call->stack[index], sizeof value);
  return (float)value;
}

bool bsh_call_bool(const bsh_call *const call, const int index) { return (call->stack[index] & 0xFF) != 0; }

int32_t bsh_call_dtype(const bsh_call *const call, const int index) { return (int32_t)call->stack[index]; }

bsh_status bsh_call_output(bsh_call *const call, const bsh_tensor *const like, const int64_t dim,
                           const int64_t *const sizes, const int32_t dtype, bsh_tensor *const output) {
  if (dim > BSH_MAX_DIM)
    return bsh_fail(BSH_BAD_SHAPE, "%s: %" PRId64 " dimensions, at most %d are supported", call->op, dim, BSH_MAX_DIM);
  return call->caller->output(call, like, dim, sizes, dtype, output);
}

bsh_status bsh_call_may_multiply(bsh_call *const call, const bsh_dtype dtype) {
  return call->caller->may_multiply != NULL ? call->caller->may_multiply(call, dtype) : BSH_OK;
}

void bsh_call_compute(bsh_call *const call) {
  if (call->caller->compute != NULL) call->caller->compute(call);
}

void bsh_call_finish(bsh_call *const call, const bsh_status status) {
  for (int i = 0; i < call->n_temporaries; i++) bsh_torch.aoti_torch_delete_tensor_object(call->temporaries[i]);
  for (int i = 0; i < call->n_tensors; i++)
    bsh_torch.aoti_torch_delete_tensor_object((AtenTensorHandle)(uintptr_t)call->stack[i]);
  if (status == BSH_OK) {
    for (int i = 0; i < call->n_outputs; i++) call->stack[i] = (StableIValue)(uintptr_t)call->outputs[i].handle;
    return;
  }
  for (int i = 0; i < call->n_outputs; i++) bsh_torch.aoti_torch_delete_tensor_object(call->outputs[i].handle);
  bsh_torch.aoti_torch_check(false, call->op, __FILE__, __LINE__, bsh_status_message());
}
