/* python/optimizer_list.c - see python/optimizer_list.h.
 *
 * Tensors are read as in python/direct.c. Everything is read and checked before anything is written. */
#include "python/optimizer_list.h"

#include "core/packed.h"
#include "ops/optimizer_step.h"
#include "python/direct.h"
#include "torch/tensor.h"

enum { N_SETTINGS = 11, N_TENSORS = 8 };
enum { G, P, STATE1, STATE2, MAP1, MAP2, ABSMAX1, ABSMAX2 }; /* places in a parameter's tuple */

static const char op[] = "optimizer_steps";

/* ---- reading ---- */

static bool read_float(PyObject *const tuple, const Py_ssize_t index, float *const out) {
  const double value = PyFloat_AsDouble(PyTuple_GetItem(tuple, index));
  *out = (float)value;
  return !(value == -1.0 && PyErr_Occurred());
}

/* (algorithm, lr, beta1, beta2, beta3, alpha, eps, weight_decay, step, gnorm_scale, skip_zeros). */
static bool read_settings(PyObject *const tuple, bsh_step_settings *const s) {
  if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != N_SETTINGS) {
    PyErr_Format(PyExc_TypeError, "%s: settings are no tuple of %d", op, N_SETTINGS);
    return false;
  }
  float *const floats[] = {NULL,      &s->lr,  &s->beta1,        &s->beta2, &s->beta3,
                           &s->alpha, &s->eps, &s->weight_decay, NULL,      &s->gnorm_scale};
  for (Py_ssize_t i = 0; i < N_SETTINGS - 1; i++)
    if (floats[i] != NULL && !read_float(tuple, i, floats[i])) return false;
  s->algorithm = PyLong_AsLongLong(PyTuple_GetItem(tuple, 0));
  s->step = PyLong_AsLongLong(PyTuple_GetItem(tuple, 8));
  s->skip_zeros = PyObject_IsTrue(PyTuple_GetItem(tuple, N_SETTINGS - 1)) == 1;
  if (PyErr_Occurred()) return false;
  if (bsh_step_check(op, s) == BSH_OK) return true;
  PyErr_SetString(PyExc_ValueError, bsh_status_message());
  return false;
}

static bool same_device(const bsh_tensor *const a, const bsh_tensor *const b) {
  return a->device_type == b->device_type && a->device_index == b->device_index;
}

/* NULL in `data` where the tuple has None, which must be so without `expected`. States are nobody's views: they are not
 * asked whether they are lazily negated. Paged ones are on the CPU. */
static bool read_vector(PyObject *const tuple, const Py_ssize_t index, const bool expected, const bool paged,
                        const int32_t dtype, const int64_t numel, const bsh_tensor *const like, void **const data) {
  PyObject *const object = PyTuple_GetItem(tuple, index);
  bsh_tensor tensor;
  *data = NULL;
  if (!expected) return object == Py_None;
  if (!bsh_direct_is_plain(object) || bsh_direct_describe(object, &tensor) != BSH_OK) return false;
  *data = tensor.data;
  return tensor.dtype == dtype && tensor.numel == numel && (paged ? !bsh_on_cuda(&tensor) : same_device(&tensor, like));
}

/* A map, which parameters share: known from the one before. */
typedef struct {
  PyObject *object; /* borrowed from a tuple of the same call */
  const float *data;
  bsh_tensor like;
} known_map;

static bool read_map(PyObject *const tuple, const Py_ssize_t index, const bool expected, const bsh_tensor *const like,
                     known_map *const known, const float **const data) {
  PyObject *const object = PyTuple_GetItem(tuple, index);
  if (expected && object == known->object && same_device(like, &known->like)) {
    *data = known->data;
    return true;
  }
  if (!read_vector(tuple, index, expected, false, bsh_torch.dtype_float32, 256, like, (void **)(uintptr_t)data))
    return false;
  *known = (known_map){.object = object, .data = *data, .like = *like};
  return true;
}

static bool read_gradient(PyObject *const object, bsh_tensor *const tensor) {
  return bsh_direct_is_plain(object) && bsh_direct_describe(object, tensor) == BSH_OK && !bsh_direct_is_negated(object);
}

static bool read_pair(PyObject *const tuple, bsh_tensor *const g, bsh_step_item *const item) {
  bsh_tensor p;
  if (!read_gradient(PyTuple_GetItem(tuple, G), g) || !read_gradient(PyTuple_GetItem(tuple, P), &p)) return false;
  if (p.numel != g->numel || !same_device(&p, g)) return false;
  if (bsh_compute_dtype(op, "g", g->dtype, &item->g_dtype) != BSH_OK) return false;
  if (bsh_compute_dtype(op, "p", p.dtype, &item->p_dtype) != BSH_OK) return false;
  item->tensor.g = g->data;
  item->tensor.p = p.data;
  item->tensor.n = g->numel;
  item->device = bsh_on_cuda(g) ? g->device_index : BSH_ON_CPU;
  return true;
}

/* False: this parameter is nothing for this function. States with a scale are codes. */
static bool read_item(PyObject *const tuple, const bsh_step_settings *const settings, const bool paged,
                      known_map known[2], bsh_step_item *const item) {
  bsh_tensor g;
  *item = (bsh_step_item){.settings = settings, .blocksize = BSH_STEP_BLOCK};
  if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != N_TENSORS || !read_pair(tuple, &g, item)) return false;
  const bsh_optimizer algorithm = (bsh_optimizer)settings->algorithm;
  const bool codes = PyTuple_GetItem(tuple, ABSMAX1) != Py_None, second = BSH_HAS_SECOND_STATE(algorithm);
  const int64_t n = g.numel, moments = bsh_first_moments(algorithm), n_blocks = bsh_block_count(n, BSH_STEP_BLOCK);
  const int32_t f32 = bsh_torch.dtype_float32, dtype = codes ? bsh_torch.dtype_uint8 : f32;
  bsh_step_tensor *const t = &item->tensor;
  return read_vector(tuple, STATE1, true, paged, dtype, moments * n, &g, &t->state1) &&
         read_vector(tuple, STATE2, second, paged, dtype, n, &g, &t->state2) &&
         read_map(tuple, MAP1, codes, &g, known, &item->map1) &&
         read_map(tuple, MAP2, codes && second, &g, known + 1, &item->map2) &&
         read_vector(tuple, ABSMAX1, codes, false, f32, moments * n_blocks, &g, (void **)&t->absmax1) &&
         read_vector(tuple, ABSMAX2, codes && second, false, f32, n_blocks, &g, (void **)&t->absmax2) &&
         bsh_step_apart(op, item) == BSH_OK;
}

/* ---- all batches ---- */

typedef struct {
  bsh_step_settings *settings; /* [n_batches] */
  bsh_step_item *items;        /* [n_items] */
  Py_ssize_t n_batches, n_items;
} request;

/* The list of parameters of batch i; NULL with an exception. */
static PyObject *parameters_of(PyObject *const batches, const Py_ssize_t i) {
  PyObject *const batch = PyList_GetItem(batches, i);
  if (PyTuple_Check(batch) && PyTuple_Size(batch) == 2 && PyList_Check(PyTuple_GetItem(batch, 1)))
    return PyTuple_GetItem(batch, 1);
  PyErr_Format(PyExc_TypeError, "%s: batch %zd is no tuple of settings and a list", op, i);
  return NULL;
}

static bool allocate(PyObject *const batches, request *const r) {
  r->n_batches = PyList_Size(batches);
  for (Py_ssize_t i = 0; i < r->n_batches; i++) {
    PyObject *const parameters = parameters_of(batches, i);
    if (parameters == NULL) return false;
    r->n_items += PyList_Size(parameters);
  }
  r->settings = PyMem_Calloc((size_t)r->n_batches + 1, sizeof *r->settings);
  r->items = PyMem_Calloc((size_t)r->n_items + 1, sizeof *r->items);
  if (r->settings != NULL && r->items != NULL) return true;
  PyErr_NoMemory();
  return false;
}

/* False: an exception, or without one a parameter that is nothing for this function. */
static bool read_batches(PyObject *const batches, const bool paged, request *const r) {
  Py_ssize_t n = 0;
  known_map known[2] = {{0}};
  for (Py_ssize_t i = 0; i < r->n_batches; i++) {
    PyObject *const parameters = parameters_of(batches, i);
    if (!read_settings(PyTuple_GetItem(PyList_GetItem(batches, i), 0), r->settings + i)) return false;
    for (Py_ssize_t j = 0; j < PyList_Size(parameters); j++, n++)
      if (n == r->n_items || !read_item(PyList_GetItem(parameters, j), r->settings + i, paged, known, r->items + n))
        return false;
  }
  r->n_items = n;
  return true;
}

/* Raises an error of `words`, whose attribute `done` is a list: which of the parameters were updated. */
static void raise_with_done(const request *const r, PyObject *const words) {
  PyObject *const error = words != NULL ? PyObject_CallFunctionObjArgs(PyExc_RuntimeError, words, NULL) : NULL;
  PyObject *const done = error != NULL ? PyList_New(r->n_items) : NULL;
  for (Py_ssize_t i = 0; done != NULL && i < r->n_items; i++)
    PyList_SetItem(done, i, PyBool_FromLong(r->items[i].done));
  if (done != NULL && PyObject_SetAttrString(error, "done", done) == 0) PyErr_SetObject(PyExc_RuntimeError, error);
  Py_XDECREF(done);
  Py_XDECREF(error);
}

static PyObject *step(const request *const r) {
  bsh_status status;
  Py_BEGIN_ALLOW_THREADS;
  status = bsh_step_items(op, r->items, r->n_items);
  Py_END_ALLOW_THREADS;
  if (status == BSH_OK) Py_RETURN_TRUE;
  Py_ssize_t done = 0;
  for (Py_ssize_t i = 0; i < r->n_items; i++) done += r->items[i].done;
  PyObject *const words =
      PyUnicode_FromFormat("%s (%zd of %zd parameters were updated)", bsh_status_message(), done, r->n_items);
  raise_with_done(r, words);
  Py_XDECREF(words);
  return NULL;
}

/* Reads all, and updates it unless it is paged. */
static PyObject *read_and_step(PyObject *const batches, const bool paged) {
  if (!PyList_Check(batches)) return PyErr_Format(PyExc_TypeError, "%s: batches are no list", op);
  if (!bsh_direct_possible()) Py_RETURN_FALSE;
  request r = {0};
  PyObject *result = NULL;
  if (allocate(batches, &r)) {
    if (read_batches(batches, paged, &r)) result = paged ? Py_NewRef(Py_True) : step(&r);
    else if (!PyErr_Occurred()) result = Py_NewRef(Py_False);
  }
  PyMem_Free(r.settings);
  PyMem_Free(r.items);
  return result;
}

PyObject *bsh_optimizer_steps(PyObject *const module, PyObject *const batches) {
  (void)module;
  return read_and_step(batches, false);
}

PyObject *bsh_optimizer_fits(PyObject *const module, PyObject *const batches) {
  (void)module;
  return read_and_step(batches, true);
}
