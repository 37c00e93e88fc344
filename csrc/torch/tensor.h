/* torch/tensor.h - torch tensors as C sees them, and the bookkeeping of one op call.
 *
 * An op reads its arguments and makes its results through bsh_call, whoever called: torch's dispatcher (torch/tensor.c)
 * or Python around it (python/direct.c).
 *
 * A boxed kernel owns one handle per tensor argument and must hand back owned handles. bsh_call keeps every handle of a
 * call in one place, so that leaving an op early never leaks: bsh_call_finish deletes them and moves the outputs out.
 */
#ifndef BSH_TORCH_TENSOR_H
#define BSH_TORCH_TENSOR_H

#include "core/kernels.h"
#include "core/status.h"
#include "plan/product.h"
#include "torch/abi.h"

typedef struct {
  AtenTensorHandle handle; /* NULL in a direct call */
  void *data;
  int64_t numel;
  int64_t dim;
  const int64_t *sizes; /* [dim], borrowed from the handle */
  int64_t itemsize;     /* bytes */
  int32_t dtype;        /* torch's ScalarType number */
  int32_t device_type;
  int32_t device_index;
} bsh_tensor;

enum { BSH_MAX_TEMPORARIES = 8, BSH_MAX_OUTPUTS = 4, BSH_MAX_DIM = 16 };

typedef struct bsh_call bsh_call;

/* Who called. */
typedef struct {
  bsh_status (*tensor)(bsh_call *call, int index, bsh_tensor *tensor);
  bsh_status (*in_place)(bsh_call *call, int index, const char *argument, bsh_tensor *tensor); /* the dispatcher only */
  bsh_status (*output)(bsh_call *call, const bsh_tensor *like, int64_t dim, const int64_t *sizes, int32_t dtype,
                       bsh_tensor *output);
  bsh_vendor vendor; /* who multiplies panels on CUDA */
  /* BSH_NO_KERNEL where that one must not multiply this call; NULL: always may. */
  bsh_status (*may_multiply)(bsh_call *call, bsh_dtype dtype);
  void (*compute)(bsh_call *call); /* NULL: nothing to do */
} bsh_caller;

extern const bsh_caller bsh_dispatcher;

struct bsh_call {
  const char *op;
  const bsh_caller *caller;
  StableIValue *stack; /* numbers, and of the dispatcher handles */
  int n_tensors;       /* every op takes its tensors first: stack[0 .. n_tensors) */
  int n_temporaries;
  int n_outputs;
  AtenTensorHandle temporaries[BSH_MAX_TEMPORARIES];
  bsh_tensor outputs[BSH_MAX_OUTPUTS];
};

/* Tensor argument `index`, described and contiguous: the dispatcher's are copied where they are not. */
bsh_status bsh_call_tensor(bsh_call *call, int index, bsh_tensor *tensor);

/* Tensor argument `index` that the op changes: BSH_BAD_SHAPE naming `argument` where it is not contiguous. */
bsh_status bsh_call_in_place(bsh_call *call, int index, const char *argument, bsh_tensor *tensor);

/* Argument `index` as int64 / float (a double, rounded to fp32) / bool / ScalarType. */
int64_t bsh_call_int(const bsh_call *call, int index);
float bsh_call_float(const bsh_call *call, int index);
bool bsh_call_bool(const bsh_call *call, int index);
int32_t bsh_call_dtype(const bsh_call *call, int index);

/* A new contiguous output on the device of `like`, appended to the outputs. */
bsh_status bsh_call_output(bsh_call *call, const bsh_tensor *like, int64_t dim, const int64_t *sizes, int32_t dtype,
                           bsh_tensor *output);

/* Where a plan has panels: BSH_NO_KERNEL if the caller's vendor must not multiply them. Before the result is made. */
bsh_status bsh_call_may_multiply(bsh_call *call, bsh_dtype dtype);

/* After everything was read and made, before the computation. */
void bsh_call_compute(bsh_call *call);

/* The end of a call by the dispatcher. Releases everything; on success moves the outputs to the stack, else raises
 * RuntimeError with the status message. */
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
  return tensor->device_type == bsh_torch.device_type_cuda;
}

#endif
