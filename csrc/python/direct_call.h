/* python/direct_call.h - a call around the dispatcher, for the files that make one (python/direct.c,
 * python/direct_lora.c). */
#ifndef BSH_PYTHON_DIRECT_CALL_H
#define BSH_PYTHON_DIRECT_CALL_H

#include <Python.h>
#include <stdbool.h>

#include "torch/tensor.h"

enum { BSH_DIRECT_ARGUMENTS = 11, BSH_DIRECT_NONE = -1, BSH_DIRECT_FALLBACKS = 5 };

/* What is particular to an op; its arguments are those of its schema. */
typedef struct {
  const char *name;
  bsh_status (*op)(bsh_call *call);
  int n_tensors, n_arguments;
  int weight;   /* index of the packed codes */
  int like;     /* index of a plain tensor, whose class and device the result gets */
  int bias;     /* index, or BSH_DIRECT_NONE */
  int dtype;    /* index of a torch.dtype, or BSH_DIRECT_NONE */
  int number;   /* index of a float, or BSH_DIRECT_NONE; other arguments that are no tensors are integers */
  int fallback; /* index among those of bsh_direct_fall_back */
} bsh_direct_op;

extern const bsh_direct_op bsh_direct_op_linear_4bit, bsh_direct_op_linear_4bit_dgrad, bsh_direct_op_dequantize_4bit,
    bsh_direct_op_linear_int8, bsh_direct_op_linear_int8_dgrad;

typedef struct {
  bsh_call call; /* first: what bsh_caller's functions get */
  const bsh_direct_op *what;
  PyObject *const *objects;
  PyObject *made;          /* the result, owned by whoever began the call; may be there without success */
  void *result;            /* its memory */
  PyThreadState *released; /* while computing */
  StableIValue integers[BSH_DIRECT_ARGUMENTS];
} bsh_direct_call;

/* Whether there is an exchange table; without one nothing below may be called. */
bool bsh_direct_known(void);

/* Runs an op on its n_arguments objects, unless somebody watches the dispatcher. The GIL may then be released, and is
 * where the status is BSH_OK: Python waits for bsh_direct_end. A Python exception may be set where the status is not
 * BSH_OK. */
bsh_status bsh_direct_begin(bsh_direct_call *direct, const bsh_direct_op *what, PyObject *const *objects);
void bsh_direct_end(bsh_direct_call *direct);

/* A new contiguous tensor on the device of `like`, of its dtype or another (NULL: its own). NULL with an exception. */
PyObject *bsh_direct_new(PyObject *like, PyObject *dtype, int64_t dim, const int64_t *sizes);

/* Whether gradients are on and one of the tensors, which may be None, wants one: the op then gives a result that raises
 * in backward. */
bool bsh_direct_wants_gradient(PyObject *const *tensors, int n_tensors);

/* Whether cuBLAS may stand in for torch's products of this dtype: nobody has changed what those do. */
bool bsh_direct_default_products(bsh_dtype dtype);

#endif
