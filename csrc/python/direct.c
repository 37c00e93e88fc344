/* python/direct.c - see python/direct.h. */
#include "python/direct.h"

#include <stdint.h>
#include <string.h>

#include "ops/ops.h"
#include "python/direct_call.h"

/* ---- DLPack 1.x, as far as it is used here ---- */

enum { DL_CPU = 1, DL_CUDA = 2, DL_FLOAT = 2, DL_MAJOR = 1 };
#define DL_TYPE(code, bits) ((code) << 8 | (bits))
enum {
  DL_I8 = DL_TYPE(0, 8),
  DL_U8 = DL_TYPE(1, 8),
  DL_F16 = DL_TYPE(2, 16),
  DL_F32 = DL_TYPE(2, 32),
  DL_F64 = DL_TYPE(2, 64),
  DL_BF16 = DL_TYPE(4, 16)
};

typedef struct {
  void *data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t type_code, bits;
  uint16_t lanes;
  int64_t *shape;
  int64_t *strides; /* elements; NULL: contiguous */
  uint64_t byte_offset;
} dl_tensor;

typedef struct {
  struct {
    uint32_t major, minor;
    void *previous;
  } header;
  void (*allocate)(void), (*from_object)(void), (*to_object)(void);
  int (*describe)(void *object, dl_tensor *tensor); /* 0, or -1 with a Python exception set */
  int (*current_stream)(int32_t device_type, int32_t device, void **stream);
} dl_exchange;

static const dl_exchange *exchange;

/* tuple of callables by bsh_direct_op.fallback, or None: what a call gives to whom where it does nothing itself. */
static PyObject *fallbacks;

/* Set for good once a storage was made smaller than it was, but not empty. */
static bool storages_shrink;

/* ---- who else might want to see a call ---- */

/* Set once by Python, kept for the process. */
static struct {
  PyObject *tensor;   /* the class of plain tensors */
  PyObject *weights;  /* tuple of the classes a packed weight may have; plain tensors and parameters come first */
  PyObject *dtypes;   /* tuple of torch.float32, float16, bfloat16: by bsh_dtype */
  PyObject *watchers; /* tuple of callables: whether a mode or tracer is active */
  PyObject *settings; /* tuple of (callable, what it gives where products are torch's default), ... by bsh_dtype */
  PyObject *profiler; /* module with the flag _is_profiler_enabled */
  PyObject *grad_enabled;
  PyObject *storage_address; /* callable: where a tensor's storage begins, 0 where it has no memory */
  PyObject *storage_holds;   /* callable: whether a tensor's storage holds all its elements */
  PyObject *profiler_flag, *requires_grad, *dtype_keyword; /* interned names */
  PyObject *is_neg, *new_empty_strided;                    /* methods of the class */
} python;

PyObject *bsh_direct_configure(PyObject *const module, PyObject *const args) {
  (void)module;
  PyObject *capsule, *tensor, *weights, *dtypes, *watchers, *settings, *profiler, *grad_enabled, *address, *holds;
  if (!PyArg_ParseTuple(args, "OOO!O!O!O!OOOO", &capsule, &tensor, &PyTuple_Type, &weights, &PyTuple_Type, &dtypes,
                        &PyTuple_Type, &watchers, &PyTuple_Type, &settings, &profiler, &grad_enabled, &address, &holds))
    return NULL;
  const dl_exchange *const table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  if (table == NULL) return NULL;
  if (table->header.major != DL_MAJOR || table->describe == NULL) Py_RETURN_FALSE;
  PyObject *const all[] = {tensor, weights, dtypes, watchers, settings, profiler, grad_enabled, address, holds};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) Py_INCREF(all[i]);
  python.tensor = tensor, python.weights = weights, python.dtypes = dtypes, python.watchers = watchers;
  python.settings = settings, python.profiler = profiler, python.grad_enabled = grad_enabled;
  python.storage_address = address, python.storage_holds = holds;
  python.profiler_flag = PyUnicode_InternFromString("_is_profiler_enabled");
  python.requires_grad = PyUnicode_InternFromString("requires_grad");
  python.dtype_keyword = PyUnicode_InternFromString("dtype");
  python.is_neg = PyObject_GetAttrString(tensor, "is_neg");
  python.new_empty_strided = PyObject_GetAttrString(tensor, "new_empty_strided");
  if (python.dtype_keyword == NULL || python.is_neg == NULL || python.new_empty_strided == NULL) return NULL;
  exchange = table;
  Py_RETURN_TRUE;
}

PyObject *bsh_direct_fall_back(PyObject *const module, PyObject *const given) {
  (void)module;
  if (given != Py_None && (!PyTuple_Check(given) || PyTuple_Size(given) != BSH_DIRECT_FALLBACKS))
    return PyErr_Format(PyExc_TypeError, "fall_back: expected None or a tuple of %d callables", BSH_DIRECT_FALLBACKS);
  PyObject *const before = fallbacks != NULL ? fallbacks : Py_None;
  if (fallbacks == NULL) Py_INCREF(before);
  Py_INCREF(given);
  fallbacks = given;
  return before;
}

PyObject *bsh_direct_doubt_storages(PyObject *const module, PyObject *const unused) {
  (void)module, (void)unused;
  storages_shrink = true;
  Py_RETURN_NONE;
}

void bsh_direct_forget(void) {
  if (PyErr_Occurred() != NULL && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear();
}

PyObject *bsh_direct_declined(void) {
  bsh_direct_forget();
  if (PyErr_Occurred() != NULL) return NULL;
  Py_RETURN_NONE;
}

/* Takes over `object`. An exception counts as true: the op is always right. */
static bool truth(PyObject *const object) {
  const int value = object != NULL ? PyObject_IsTrue(object) : -1;
  Py_XDECREF(object);
  if (value < 0) bsh_direct_forget();
  return value != 0;
}

static bool watched(void) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(python.watchers); i++)
    if (truth(PyObject_CallNoArgs(PyTuple_GetItem(python.watchers, i)))) return true;
  return truth(PyObject_GetAttr(python.profiler, python.profiler_flag));
}

bool bsh_direct_default_products(const bsh_dtype dtype) {
  if (!bsh_torch.has_cublas || dtype == BSH_F32) return false;
  PyObject *const settings = PyTuple_GetItem(python.settings, (Py_ssize_t)dtype);
  for (Py_ssize_t i = 0; i + 1 < PyTuple_Size(settings); i += 2) {
    PyObject *const value = PyObject_CallNoArgs(PyTuple_GetItem(settings, i));
    const int same = value != NULL ? PyObject_RichCompareBool(value, PyTuple_GetItem(settings, i + 1), Py_EQ) : -1;
    Py_XDECREF(value);
    if (same < 0) bsh_direct_forget();
    if (same != 1) return false;
  }
  return true;
}

static bool weight_class(PyObject *const object) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(python.weights); i++)
    if ((PyObject *)Py_TYPE(object) == PyTuple_GetItem(python.weights, i)) return true;
  return false;
}

bool bsh_direct_wants_gradient(PyObject *const *const tensors, const int n_tensors) {
  if (!truth(PyObject_CallNoArgs(python.grad_enabled))) return false;
  if (PyErr_Occurred() != NULL) return true;
  for (int i = 0; i < n_tensors; i++)
    if (tensors[i] != Py_None && truth(PyObject_GetAttr(tensors[i], python.requires_grad))) return true;
  return false;
}

/* ---- tensors: BSH_NO_KERNEL where the op must decide ---- */

/* A freed storage leaves a null pointer, or what a view's offset adds to it. Above 2^40 bytes no offset reaches. Below
 * lies the heap of an interpreter that is not position-independent, so there torch is asked where the storage is. */
static bool has_memory(PyObject *const object, const dl_tensor *const t) {
  if (t->data == NULL || ((uintptr_t)t->data >> 40 != 0 && !storages_shrink)) return t->data != NULL;
  PyObject *const asked = storages_shrink ? python.storage_holds : python.storage_address;
  PyObject *const answer = PyObject_CallFunctionObjArgs(asked, object, NULL);
  if (answer != NULL) return truth(answer) && PyErr_Occurred() == NULL;
  bsh_direct_forget();
  return false;
}

static bool contiguous(const dl_tensor *const t) {
  int64_t step = 1;
  for (int32_t i = t->ndim - 1; i >= 0 && t->strides != NULL; i--) {
    if (t->shape[i] != 1 && t->strides[i] != step) return false;
    step *= t->shape[i];
  }
  return true;
}

bool bsh_direct_is_negated(PyObject *const tensor) {
  return truth(PyObject_CallFunctionObjArgs(python.is_neg, tensor, NULL));
}

/* torch's number of a storage or compute dtype. */
static bool torch_dtype(const dl_tensor *const t, int32_t *const dtype) {
  switch (DL_TYPE(t->type_code, t->bits)) {
  case DL_U8:
    *dtype = bsh_torch.dtype_uint8;
    return true;
  case DL_I8:
    *dtype = bsh_torch.dtype_int8;
    return true;
  case DL_F16:
    *dtype = bsh_torch.dtype_float16;
    return true;
  case DL_BF16:
    *dtype = bsh_torch.dtype_bfloat16;
    return true;
  case DL_F32:
    *dtype = bsh_torch.dtype_float32;
    return true;
  case DL_F64:
    *dtype = bsh_torch.dtype_float64;
    return true;
  }
  return false;
}

static bool torch_device(const dl_tensor *const t, int32_t *const type) {
  *type = t->device_type == DL_CUDA ? bsh_torch.device_type_cuda : bsh_torch.device_type_cpu;
  return t->device_type == DL_CUDA || t->device_type == DL_CPU;
}

bool bsh_direct_known(void) { return exchange != NULL; }

bool bsh_direct_possible(void) { return exchange != NULL && !watched(); }

bool bsh_direct_is_plain(PyObject *const object) {
  return (PyObject *)Py_TYPE(object) == python.tensor ||
         (PyObject *)Py_TYPE(object) == PyTuple_GetItem(python.weights, 1);
}

bsh_status bsh_direct_describe(PyObject *const object, bsh_tensor *const tensor) {
  dl_tensor t = {0};
  *tensor = (bsh_tensor){.numel = 1};
  if (exchange->describe(object, &t) != 0) {
    bsh_direct_forget();
    return BSH_NO_KERNEL;
  }
  if (t.lanes != 1 || t.byte_offset != 0 || t.ndim > BSH_MAX_DIM || !contiguous(&t) ||
      !torch_dtype(&t, &tensor->dtype) || !torch_device(&t, &tensor->device_type) || !has_memory(object, &t))
    return BSH_NO_KERNEL;
  for (int32_t i = 0; i < t.ndim; i++) tensor->numel *= t.shape[i];
  tensor->data = t.data;
  tensor->dim = t.ndim;
  tensor->sizes = t.shape;
  tensor->itemsize = t.bits / 8;
  tensor->device_index = t.device_id;
  return tensor->numel > 0 ? BSH_OK : BSH_NO_KERNEL;
}

/* A tensor of floating-point numbers may be lazily negated. */
static bsh_status describe_values(PyObject *const object, bsh_tensor *const tensor) {
  BSH_TRY(bsh_direct_describe(object, tensor));
  const bool codes = tensor->dtype == bsh_torch.dtype_uint8 || tensor->dtype == bsh_torch.dtype_int8;
  return !codes && bsh_direct_is_negated(object) ? BSH_NO_KERNEL : BSH_OK;
}

static bsh_status read_tensor(bsh_call *const call, const int index, bsh_tensor *const tensor) {
  PyObject *const object = ((bsh_direct_call *)call)->objects[index];
  if (object != Py_None) return describe_values(object, tensor);
  *tensor = (bsh_tensor){0};
  return BSH_OK;
}

/* like.new_empty_strided(shape, strides[, dtype=dtype]) */
static PyObject *new_empty_strided(PyObject *const like, PyObject *const shape, PyObject *const strides,
                                   PyObject *const dtype) {
  PyObject *const method = python.new_empty_strided;
  if (dtype == NULL) return PyObject_CallFunctionObjArgs(method, like, shape, strides, NULL);
  PyObject *const arguments = PyTuple_Pack(3, like, shape, strides), *const keywords = PyDict_New();
  PyObject *made = NULL;
  if (arguments != NULL && keywords != NULL && PyDict_SetItem(keywords, python.dtype_keyword, dtype) == 0)
    made = PyObject_Call(method, arguments, keywords);
  Py_XDECREF(arguments), Py_XDECREF(keywords);
  return made;
}

PyObject *bsh_direct_new(PyObject *const like, PyObject *const dtype, const int64_t dim, const int64_t *const sizes) {
  PyObject *const shape = PyTuple_New((Py_ssize_t)dim), *const strides = PyTuple_New((Py_ssize_t)dim);
  PyObject *made = NULL;
  int64_t step = 1;
  for (int64_t i = dim - 1; i >= 0 && shape != NULL && strides != NULL; i--) {
    PyTuple_SetItem(shape, (Py_ssize_t)i, PyLong_FromLongLong(sizes[i]));
    PyTuple_SetItem(strides, (Py_ssize_t)i, PyLong_FromLongLong(step));
    step *= sizes[i];
  }
  if (shape != NULL && strides != NULL) made = new_empty_strided(like, shape, strides, dtype);
  Py_XDECREF(shape), Py_XDECREF(strides);
  return made;
}

static bsh_status new_output(bsh_call *const call, const bsh_tensor *const like, const int64_t dim,
                             const int64_t *const sizes, const int32_t dtype, bsh_tensor *const output) {
  bsh_direct_call *const direct = (bsh_direct_call *)call;
  const bsh_direct_op *const what = direct->what;
  (void)like, (void)dtype; /* of direct->objects, where the op has them from */
  direct->made = bsh_direct_new(direct->objects[what->like],
                                what->dtype != BSH_DIRECT_NONE ? direct->objects[what->dtype] : NULL, dim, sizes);
  if (direct->made == NULL) return BSH_OUT_OF_MEMORY;
  BSH_TRY(bsh_direct_describe(direct->made, output));
  direct->result = output->data;
  return BSH_OK;
}

static bsh_status may_multiply(bsh_call *const call, const bsh_dtype dtype) {
  (void)call;
  return bsh_direct_default_products(dtype) ? BSH_OK : BSH_NO_KERNEL;
}

/* A launch waits where the queue of the GPU is full. */
static void release_gil(bsh_call *const call) { ((bsh_direct_call *)call)->released = PyEval_SaveThread(); }

static const bsh_caller caller = {.tensor = read_tensor,
                                  .output = new_output,
                                  .vendor = BSH_VENDOR_CUBLAS,
                                  .may_multiply = may_multiply,
                                  .compute = release_gil};

/* ---- the functions ---- */

static bool read_integer(PyObject *const object, StableIValue *const integer) {
  const long long value = PyLong_AsLongLong(object);
  *integer = (StableIValue)value;
  return value != -1 || PyErr_Occurred() == NULL;
}

/* As bsh_call_float reads it. */
static bool read_number(PyObject *const object, StableIValue *const number) {
  const double value = PyFloat_AsDouble(object);
  memcpy(number, &value, sizeof value);
  return value != -1.0 || PyErr_Occurred() == NULL;
}

static bool read_dtype(PyObject *const object, StableIValue *const number) {
  for (int dtype = BSH_F32; dtype <= BSH_BF16; dtype++)
    if (object == PyTuple_GetItem(python.dtypes, dtype)) {
      *number = (StableIValue)bsh_torch_dtype((bsh_dtype)dtype);
      return true;
    }
  return false;
}

/* An argument that is no tensor. */
static bool read_setting(const bsh_direct_op *const what, const int index, PyObject *const object,
                         StableIValue *const setting) {
  if (index == what->dtype) return read_dtype(object, setting);
  return index == what->number ? read_number(object, setting) : read_integer(object, setting);
}

static bool takes(bsh_direct_call *const direct) {
  const bsh_direct_op *const what = direct->what;
  PyObject *const *const objects = direct->objects;
  if ((PyObject *)Py_TYPE(objects[what->like]) != python.tensor || !weight_class(objects[what->weight])) return false;
  for (int i = what->n_tensors; i < what->n_arguments; i++)
    if (!read_setting(what, i, objects[i], &direct->integers[i])) return false;
  PyObject *const inputs[] = {objects[0], what->bias != BSH_DIRECT_NONE ? objects[what->bias] : Py_None};
  return !bsh_direct_wants_gradient(inputs, 2) && !watched();
}

bsh_status bsh_direct_begin(bsh_direct_call *const direct, const bsh_direct_op *const what,
                            PyObject *const *const objects) {
  direct->what = what, direct->objects = objects;
  direct->call =
      (bsh_call){.op = what->name, .caller = &caller, .stack = direct->integers, .n_tensors = what->n_tensors};
  return takes(direct) ? what->op(&direct->call) : BSH_NO_KERNEL;
}

void bsh_direct_end(bsh_direct_call *const direct) {
  if (direct->released != NULL) PyEval_RestoreThread(direct->released);
  direct->released = NULL;
}

/* What the op gives for the same arguments; None without one. */
static PyObject *fall_back(const bsh_direct_op *const what, PyObject *const *const objects, const Py_ssize_t n) {
  if (fallbacks == NULL || fallbacks == Py_None) Py_RETURN_NONE;
  PyObject *const arguments = PyTuple_New(n);
  if (arguments == NULL) return NULL;
  for (Py_ssize_t i = 0; i < n; i++) Py_INCREF(objects[i]), PyTuple_SetItem(arguments, i, objects[i]);
  PyObject *const made = PyObject_CallObject(PyTuple_GetItem(fallbacks, what->fallback), arguments);
  Py_DECREF(arguments);
  return made;
}

/* The result, or NULL. */
static PyObject *call_op(const bsh_direct_op *const what, PyObject *const *const objects, const Py_ssize_t n_objects) {
  bsh_direct_call direct = {0};
  bsh_status status = BSH_NO_KERNEL;
  if (n_objects == what->n_arguments && bsh_direct_known()) status = bsh_direct_begin(&direct, what, objects);
  bsh_direct_end(&direct);
  if (status == BSH_OK) return direct.made;
  Py_XDECREF(direct.made);
  bsh_direct_forget();
  return PyErr_Occurred() == NULL ? fall_back(what, objects, n_objects) : NULL;
}

#define NONE BSH_DIRECT_NONE
/* Fall-back; tensors, arguments; which argument is the weight, what the result is like, the bias, its dtype, a number.
 */
#define DIRECT_OPS(X)                                                                                                  \
  X(linear_4bit, 0, 7, 11, 1, 0, 6, NONE, NONE)                                                                        \
  X(linear_4bit_dgrad, 1, 6, 10, 1, 0, NONE, NONE, NONE)                                                               \
  X(dequantize_4bit, 2, 5, 10, 0, 1, NONE, 9, NONE)                                                                    \
  X(linear_int8, 3, 4, 7, 1, 0, 3, NONE, 4)                                                                            \
  X(linear_int8_dgrad, 4, 3, 5, 1, 0, NONE, NONE, NONE)
#define DIRECT_OP(OP, FALLBACK, TENSORS, ARGUMENTS, WEIGHT, LIKE, BIAS, DTYPE, NUMBER)                                 \
  const bsh_direct_op bsh_direct_op_##OP = {.name = #OP,                                                               \
                                            .op = bsh_op_##OP,                                                         \
                                            .fallback = FALLBACK,                                                      \
                                            .n_tensors = TENSORS,                                                      \
                                            .n_arguments = ARGUMENTS,                                                  \
                                            .weight = WEIGHT,                                                          \
                                            .like = LIKE,                                                              \
                                            .bias = BIAS,                                                              \
                                            .dtype = DTYPE,                                                            \
                                            .number = NUMBER};                                                         \
  PyObject *bsh_direct_##OP(PyObject *const module, PyObject *const *const objects, const Py_ssize_t n_objects) {      \
    (void)module;                                                                                                      \
    return call_op(&bsh_direct_op_##OP, objects, n_objects);                                                           \
  }
DIRECT_OPS(DIRECT_OP)
