/* tensor.h - torch tensors as C sees them, and the bookkeeping of one op call.
 *
 * A boxed kernel owns one handle per tensor argument and must hand back owned handles. bsh_call keeps every handle of a
 * call in one place, so that leaving an op early never leaks: bsh_call_finish deletes them and moves the outputs out.
 */
#ifndef BSH_TENSOR_H
#define BSH_TENSOR_H

#include "kernels.h"
#include "status.h"
#include "torch_abi.h"

typedef struct {
  AtenTensorHandle handle;
  void *data;
  int64_t numel;
  int64_t dim;
  const int64_t *sizes; /* [dim], borrowed from the handle */
  int64_t itemsize;     /* bytes */
  int32_t dtype;        /* torch's ScalarType number */
  int32_t device_type;
  int32_t device_index;
} bsh_tensor;

enum { BSH_MAX_TENSORS = 8, BSH_MAX_TEMPORARIES = 8, BSH_MAX_OUTPUTS = 2, BSH_MAX_DIM = 16 };

typedef struct {
  const char *op;
  StableIValue *stack;
  int n_tensors; /* every op takes its tensors first: stack[0 .. n_tensors) */
  int n_temporaries;
  int n_outputs;
  AtenTensorHandle temporaries[BSH_MAX_TEMPORARIES];
  bsh_tensor outputs[BSH_MAX_OUTPUTS];
} bsh_call;

/* Tensor argument `index`, described; a copy made contiguous where it is not. */
bsh_status bsh_call_tensor(bsh_call *call, int index, bsh_tensor *tensor);

/* Argument `index` as int64 / ScalarType. */
int64_t bsh_call_int(const bsh_call *call, int index);
int32_t bsh_call_dtype(const bsh_call *call, int index);

/* A new contiguous output on the device of `like`, appended to the outputs. */
bsh_status bsh_call_output(bsh_call *call, const bsh_tensor *like, int64_t dim, const int64_t *sizes, int32_t dtype,
                           bsh_tensor *output);

/* Releases everything; on success moves the outputs to the stack, else raises RuntimeError with the status message. */
void bsh_call_finish(bsh_call *call, bsh_status status);

/* A new contiguous tensor; the caller owns the handle. */
bsh_status bsh_tensor_new(const char *op, const bsh_tensor *like, int64_t dim, const int64_t *sizes, int32_t dtype,
                          bsh_tensor *tensor);

/* Bytes per element of a storage or compute dtype, 0 for any other. */
int64_t bsh_itemsize(int32_t dtype);

/* torch dtype -> fp32, fp16 or bf16, else BSH_BAD_DTYPE naming `argument`. */
bsh_status bsh_compute_dtype(const char *op, const char *argument, int32_t dtype, bsh_dtype *compute);

/* The reverse: torch's number of a compute dtype. */
int32_t bsh_torch_dtype(bsh_dtype compute);

static inline bool bsh_on_cuda(const bsh_tensor *const tensor) {
  return tensor->device_type == bsh_torch.aoti_torch_device_type_cuda();
}

#endif
