/* direct.c - see direct.h. */
#include "direct.h"

#include <stdbool.h>
#include <stdint.h>

#include "cpu.h"
#include "cuda_ops.h"
#include "packed.h"
#include "torch_gemm.h"

/* ---- DLPack 1.x, as far as it is used here ---- */

enum { DL_CPU = 1, DL_CUDA = 2, DL_MAJOR = 1 };
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

/* ---- who else might want to see a call ---- */

/* Set once by Python, kept for the process. */
static struct {
  PyObject *tensor;   /* the class of plain tensors */
  PyObject *weights;  /* tuple of the classes a packed weight may have */
  PyObject *watchers; /* tuple of callables: whether a mode or tracer is active */
  PyObject *profiler; /* module with the flag _is_profiler_enabled */
  PyObject *grad_enabled;
  PyObject *profiler_flag, *requires_grad, *is_neg, *new_empty_strided, *dtype_keyword; /* interned names */
} python;

PyObject *bsh_direct_configure(PyObject *const module, PyObject *const args) {
  (void)module;
  PyObject *capsule, *tensor, *weights, *watchers, *profiler, *grad_enabled;
  if (!PyArg_ParseTuple(args, "OOO!O!OO", &capsule, &tensor, &PyTuple_Type, &weights, &PyTuple_Type, &watchers,
                        &profiler, &grad_enabled))
    return NULL;
  const dl_exchange *const table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  if (table == NULL) return NULL;
  if (table->header.major != DL_MAJOR || table->describe == NULL) Py_RETURN_FALSE;
  PyObject *const all[] = {tensor, weights, watchers, profiler, grad_enabled};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) Py_INCREF(all[i]);
  python.tensor = tensor, python.weights = weights, python.watchers = watchers;
  python.profiler = profiler, python.grad_enabled = grad_enabled;
  python.profiler_flag = PyUnicode_InternFromString("_is_profiler_enabled");
  python.requires_grad = PyUnicode_InternFromString("requires_grad");
  python.is_neg = PyUnicode_InternFromString("is_neg");
  python.new_empty_strided = PyUnicode_InternFromString("new_empty_strided");
  python.dtype_keyword = PyUnicode_InternFromString("dtype");
  if (python.dtype_keyword == NULL) return NULL;
  exchange = table;
  Py_RETURN_TRUE;
}

/* Takes over `object`. An exception counts as true: the op is always right. */
static bool truth(PyObject *const object) {
  const int value = object != NULL ? PyObject_IsTrue(object) : -1;
  Py_XDECREF(object);
  if (value < 0) PyErr_Clear();
  return value != 0;
}

static bool watched(void) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(python.watchers); i++)
    if (truth(PyObject_CallNoArgs(PyTuple_GetItem(python.watchers, i)))) return true;
  return truth(PyObject_GetAttr(python.profiler, python.profiler_flag));
}

static bool plain_tensor(PyObject *const object) { return (PyObject *)Py_TYPE(object) == python.tensor; }

static bool weight_class(PyObject *const object) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(python.weights); i++)
    if ((PyObject *)Py_TYPE(object) == PyTuple_GetItem(python.weights, i)) return true;
  return false;
}

/* With gradients on, the op gives a result that raises in backward. */
static bool wants_gradient(PyObject *const tensor) {
  return truth(PyObject_GetAttr(tensor, python.requires_grad)) && truth(PyObject_CallNoArgs(python.grad_enabled));
}

/* ---- reading arguments: false where the op must decide ---- */

enum { MAX_DIM = 8 };

typedef struct {
  void *data;
  const int64_t *shape; /* [ndim], borrowed */
  int64_t numel;
  int64_t itemsize; /* bytes */
  int32_t ndim;
  int32_t type; /* DL_... */
  int32_t device_type, device;
} plain;

/* A freed storage leaves a null pointer, or what a view's offset adds to it. Real addresses lie far above; one that
 * does not costs a detour through the op. */
static bool plausible(const void *const data) { return (uintptr_t)data >> 40 != 0; }

static bool contiguous(const dl_tensor *const t) {
  int64_t step = 1;
  for (int32_t i = t->ndim - 1; i >= 0 && t->strides != NULL; i--) {
    if (t->shape[i] != 1 && t->strides[i] != step) return false;
    step *= t->shape[i];
  }
  return true;
}

/* A lazily negated tensor, whose memory holds other numbers. */
static bool negated(PyObject *const tensor) { return truth(PyObject_CallMethodObjArgs(tensor, python.is_neg, NULL)); }

static bool read_tensor(PyObject *const object, plain *const tensor) {
  dl_tensor t = {0};
  if (negated(object)) return false;
  if (exchange->describe(object, &t) != 0) {
    PyErr_Clear();
    return false;
  }
  if (t.ndim > MAX_DIM || t.lanes != 1 || t.byte_offset != 0 || t.bits % 8 != 0 || !contiguous(&t)) return false;
  *tensor = (plain){.data = t.data,
                    .numel = 1,
                    .ndim = t.ndim,
                    .shape = t.shape,
                    .itemsize = t.bits / 8,
                    .type = DL_TYPE(t.type_code, t.bits),
                    .device_type = t.device_type,
                    .device = t.device_id};
  for (int32_t i = 0; i < t.ndim; i++) tensor->numel *= t.shape[i];
  return tensor->numel > 0 && plausible(t.data) && (t.device_type == DL_CPU || t.device_type == DL_CUDA);
}

static bool read_vector(PyObject *const object, const int32_t type, const int64_t numel, const plain *const like,
                        void **const data) {
  plain tensor;
  if (!read_tensor(object, &tensor) || tensor.type != type || tensor.numel != numel) return false;
  *data = tensor.data;
  return tensor.device_type == like->device_type && tensor.device == like->device;
}

static bool read_dtype(const plain *const tensor, bsh_dtype *const dtype) {
  if (tensor->type != DL_F32 && tensor->type != DL_F16 && tensor->type != DL_BF16) return false;
  *dtype = tensor->type == DL_F32 ? BSH_F32 : tensor->type == DL_F16 ? BSH_F16 : BSH_BF16;
  return true;
}

static bool is_storage(const int32_t type) {
  return type == DL_U8 || type == DL_I8 || type == DL_BF16 || type == DL_F16 || type == DL_F32 || type == DL_F64;
}

static bool read_int(PyObject *const object, int64_t *const value) {
  *value = PyLong_AsLongLong(object);
  if (*value != -1 || PyErr_Occurred() == NULL) return true;
  PyErr_Clear();
  return false;
}

/* packed, absmax, absmax_map, absmax2, offset at objects[0 .. 5): a weight of n elements on the device of `like`. */
static bool read_weight(PyObject *const *const objects, const int64_t n, const plain *const like,
                        bsh_weight *const weight) {
  plain packed, absmax;
  if (bsh_check_blocksize("", weight->blocksize, BSH_MAX_BLOCKSIZE) != BSH_OK) return false;
  if (weight->format != BSH_NF4 && weight->format != BSH_FP4) return false;
  if (!read_tensor(objects[0], &packed) || !is_storage(packed.type) || packed.device_type != like->device_type ||
      packed.device != like->device)
    return false;
  if (bsh_check_packed_bytes("", packed.numel * packed.itemsize, packed.itemsize, n) != BSH_OK) return false;
  weight->packed = packed.data;
  weight->n = n;
  const int64_t n_blocks = bsh_block_count(n, weight->blocksize);
  bsh_scales *const scales = &weight->scales;
  if (!read_tensor(objects[1], &absmax)) return false;
  if (absmax.type == DL_F32) return read_vector(objects[1], DL_F32, n_blocks, like, (void **)&scales->absmax);
  return read_vector(objects[1], DL_U8, n_blocks, like, (void **)&scales->absmax_code) &&
         read_vector(objects[2], DL_F32, 256, like, (void **)&scales->absmax_map) &&
         read_vector(objects[3], DL_F32, bsh_block_count(n_blocks, BSH_NESTED_BLOCKSIZE), like,
                     (void **)&scales->absmax2) &&
         read_vector(objects[4], DL_F32, 1, like, (void **)&scales->offset);
}

static bool read_format(PyObject *const *const objects, bsh_weight *const weight) {
  int64_t format = 0;
  if (!read_int(objects[0], &weight->blocksize) || !read_int(objects[1], &format)) return false;
  weight->format = (bsh_format)format;
  return format == BSH_NF4 || format == BSH_FP4;
}

/* ---- computing, without the GIL: a launch waits where the queue of the GPU is full ---- */

static const bsh_cpu_gemm cpu_gemm = {.mm = bsh_torch_cpu_gemm};

static bsh_status compute_linear(const bsh_linear_4bit_args *const args, const plain *const x) {
  if (x->device_type == DL_CPU) return bsh_cpu_linear_4bit(args, &cpu_gemm);
  bsh_cuda_context context;
  BSH_TRY(bsh_cuda_enter(&context, "linear_4bit", x->device, args->M, args->N, args->K));
  const bsh_status status = bsh_cuda_linear_4bit(args, &context);
  bsh_cuda_leave(&context);
  return status;
}

static bsh_status compute_dequantize(const bsh_dequantize_4bit_args *const args, const plain *const out) {
  if (out->device_type == DL_CPU) return bsh_cpu_dequantize_4bit(args);
  bsh_cuda_context context;
  BSH_TRY(bsh_cuda_enter(&context, "dequantize_4bit", out->device, args->n_rows, args->columns, 0));
  const bsh_status status = bsh_cuda_dequantize_4bit(args, &context);
  bsh_cuda_leave(&context);
  return status;
}

/* ---- results ---- */

static PyObject *call_with_dtype(PyObject *const like, PyObject *const shape, PyObject *const strides,
                                 PyObject *const dtype) {
  PyObject *const method = PyObject_GetAttr(like, python.new_empty_strided);
  PyObject *const arguments = PyTuple_Pack(2, shape, strides), *const keywords = PyDict_New();
  PyObject *made = NULL;
  if (method != NULL && arguments != NULL && keywords != NULL &&
      PyDict_SetItem(keywords, python.dtype_keyword, dtype) == 0)
    made = PyObject_Call(method, arguments, keywords);
  Py_XDECREF(method), Py_XDECREF(arguments), Py_XDECREF(keywords);
  return made;
}

/* like.new_empty_strided(sizes, contiguous strides[, dtype=dtype]), or NULL without exception. */
static PyObject *new_tensor(PyObject *const like, const int32_t ndim, const int64_t *const sizes,
                            PyObject *const dtype) {
  PyObject *const shape = PyTuple_New(ndim), *const strides = PyTuple_New(ndim);
  int64_t step = 1;
  for (int32_t i = ndim - 1; i >= 0 && shape != NULL && strides != NULL; i--) {
    PyTuple_SetItem(shape, i, PyLong_FromLongLong(sizes[i]));
    PyTuple_SetItem(strides, i, PyLong_FromLongLong(step));
    step *= sizes[i];
  }
  PyObject *made = NULL;
  if (shape != NULL && strides != NULL && dtype == NULL)
    made = PyObject_CallMethodObjArgs(like, python.new_empty_strided, shape, strides, NULL);
  else if (shape != NULL && strides != NULL) made = call_with_dtype(like, shape, strides, dtype);
  Py_XDECREF(shape), Py_XDECREF(strides);
  if (made == NULL) PyErr_Clear();
  return made;
}

/* `made` where the computation succeeded, else None. */
static PyObject *result(PyObject *const made, const bsh_status status) {
  if (status == BSH_OK) return made;
  Py_DECREF(made);
  Py_RETURN_NONE;
}

/* ---- the two functions ---- */

enum { LINEAR_ARGUMENTS = 11, MAX_ROWS = 64, DEQUANTIZE_ARGUMENTS = 10 };

static bool read_linear(PyObject *const *const objects, bsh_linear_4bit_args *const args, plain *const x) {
  int64_t n = 0;
  if (!plain_tensor(objects[0]) || !weight_class(objects[1]) || !read_tensor(objects[0], x) || x->ndim == 0)
    return false;
  if (!read_dtype(x, &args->dtype) || !read_format(objects + 7, &args->weight)) return false;
  if (!read_int(objects[9], &args->N) || !read_int(objects[10], &args->K) || args->N <= 0 || args->K <= 0) return false;
  args->M = x->numel / args->K;
  args->ldx = args->K;
  args->ldy = args->N;
  args->x = x->data;
  if (x->shape[x->ndim - 1] != args->K || args->M > MAX_ROWS) return false;
  if (bsh_checked_product("", args->N, args->K, &n) != BSH_OK || !read_weight(objects + 1, n, x, &args->weight))
    return false;
  PyObject *const bias = objects[6];
  if (bias != Py_None && (!read_vector(bias, x->type, args->N, x, (void **)&args->bias) || wants_gradient(bias)))
    return false;
  return !wants_gradient(objects[0]) && !watched();
}

PyObject *bsh_direct_linear_4bit(PyObject *const module, PyObject *const *const args, const Py_ssize_t n_args) {
  (void)module;
  bsh_linear_4bit_args linear = {0};
  plain x, y;
  if (exchange == NULL || n_args != LINEAR_ARGUMENTS || !read_linear(args, &linear, &x)) Py_RETURN_NONE;
  int64_t sizes[MAX_DIM];
  for (int32_t i = 0; i < x.ndim; i++) sizes[i] = x.shape[i];
  sizes[x.ndim - 1] = linear.N;
  PyObject *const made = new_tensor(args[0], x.ndim, sizes, NULL);
  if (made == NULL) Py_RETURN_NONE;
  if (!read_tensor(made, &y)) return result(made, BSH_NO_KERNEL);
  linear.y = y.data;
  PyThreadState *const thread = PyEval_SaveThread();
  const bsh_status status = compute_linear(&linear, &x);
  PyEval_RestoreThread(thread);
  return result(made, status);
}

/* bitsandbytes gives the transposed result for packed codes [1, n]. */
static bool is_row(const plain *const packed) {
  return packed->ndim == 2 && packed->shape[0] == 1 && packed->shape[1] > 1;
}

PyObject *bsh_direct_dequantize_4bit(PyObject *const module, PyObject *const *const args, const Py_ssize_t n_args) {
  (void)module;
  bsh_dequantize_4bit_args dequantize = {0};
  plain packed, out;
  int64_t sizes[2], n = 0;
  if (exchange == NULL || n_args != DEQUANTIZE_ARGUMENTS || !weight_class(args[0]) || !plain_tensor(args[1]) ||
      !read_tensor(args[0], &packed) || !read_format(args + 5, &dequantize.weight) || !read_int(args[7], &sizes[0]) ||
      !read_int(args[8], &sizes[1]) || bsh_checked_product("", sizes[0], sizes[1], &n) != BSH_OK || n == 0 ||
      !read_weight(args, n, &packed, &dequantize.weight) || is_row(&packed) || wants_gradient(args[0]) || watched())
    Py_RETURN_NONE;
  PyObject *const made = new_tensor(args[1], 2, sizes, args[9]);
  if (made == NULL) Py_RETURN_NONE;
  if (!read_tensor(made, &out) || !read_dtype(&out, &dequantize.dtype)) return result(made, BSH_BAD_DTYPE);
  dequantize.out = out.data;
  dequantize.n_rows = sizes[0];
  dequantize.columns = dequantize.n_columns = dequantize.ld = sizes[1];
  PyThreadState *const thread = PyEval_SaveThread();
  const bsh_status status = compute_dequantize(&dequantize, &out);
  PyEval_RestoreThread(thread);
  return result(made, status);
}
