/* python/direct_lora.c - see python/direct_lora.h. */
#include "python/direct_lora.h"

#include "ops/lora.h"
#include "python/direct.h"
#include "python/direct_call.h"

/* Places of arguments. */
enum { F_X = 0, F_N = 9, F_K = 10, F_A = 11, F_B = 12, F_SCALE = 13, F_KEEP = 14, F_DROPPED = 15, F_COUNT };
enum { B_DY = 0, B_N = 8, B_K = 9, B_X = 10, B_A = 11, B_B = 12, B_XA = 13, B_SCALE = 14 };
enum { B_NEEDS_X = 15, B_APART = 16, B_COUNT };

/* ---- reading: false where Python must decide ---- */

static bool read_values(PyObject *const object, bsh_tensor *const tensor) {
  return bsh_direct_is_plain(object) && bsh_direct_describe(object, tensor) == BSH_OK && !bsh_direct_is_negated(object);
}

static bool same_kind(const bsh_tensor *const a, const bsh_tensor *const b) {
  return a->dtype == b->dtype && a->device_type == b->device_type && a->device_index == b->device_index;
}

static bool read_matrix(PyObject *const object, const int64_t rows, const int64_t columns, const bsh_tensor *const like,
                        const void **const data) {
  bsh_tensor tensor;
  if (!read_values(object, &tensor) || tensor.dim != 2) return false;
  *data = tensor.data;
  return tensor.sizes[0] == rows && tensor.sizes[1] == columns && same_kind(&tensor, like);
}

/* An activation [..., width]; where there is none before it, M is its number of rows. */
static bool read_activation(PyObject *const object, const int64_t width, const bsh_tensor *const like,
                            bsh_lora_args *const lora, bsh_tensor *const tensor) {
  if (!read_values(object, tensor) || tensor->dim < 1 || tensor->sizes[tensor->dim - 1] != width) return false;
  if (like != NULL) return tensor->numel / width == lora->M && same_kind(tensor, like);
  lora->M = tensor->numel / width;
  return bsh_compute_dtype("lora_4bit", "x", tensor->dtype, &lora->dtype) == BSH_OK &&
         (!bsh_on_cuda(tensor) || bsh_direct_default_products(lora->dtype));
}

static bool read_sizes(PyObject *const N, PyObject *const K, PyObject *const scale, bsh_lora_args *const lora) {
  lora->N = PyLong_AsLongLong(N), lora->K = PyLong_AsLongLong(K);
  lora->scale = PyFloat_AsDouble(scale);
  return PyErr_Occurred() == NULL && lora->N > 0 && lora->K > 0;
}

/* A [r, K] says the rank, which B [N, r] must have. */
static bool read_factors(PyObject *const A, PyObject *const B, const bsh_tensor *const like,
                         bsh_lora_args *const lora) {
  bsh_tensor tensor;
  if (!read_values(A, &tensor) || tensor.dim != 2 || tensor.sizes[1] != lora->K || !same_kind(&tensor, like))
    return false;
  lora->A = tensor.data;
  lora->r = tensor.sizes[0];
  return read_matrix(B, lora->N, lora->r, like, &lora->B);
}

/* A result [rows, columns] of the kind of `like`; NULL where torch has no memory for it. */
static PyObject *new_matrix(PyObject *const like, const int64_t rows, const int64_t columns, void **const data) {
  const int64_t sizes[2] = {rows, columns};
  PyObject *const made = bsh_direct_new(like, NULL, 2, sizes);
  bsh_tensor tensor;
  if (made == NULL || bsh_direct_describe(made, &tensor) != BSH_OK) {
    Py_XDECREF(made);
    return NULL;
  }
  *data = tensor.data;
  return made;
}

/* ---- computing ---- */

static bsh_status compute(const bsh_lora_args *const lora, const bsh_tensor *const like, const bool back) {
  bsh_cuda_context context;
  if (!bsh_on_cuda(like)) return back ? bsh_cpu_lora_backward(lora) : bsh_cpu_lora(lora);
  BSH_TRY(bsh_cuda_enter(&context, "lora_4bit", like->device_index, lora->M, lora->N, lora->K));
  const bsh_status status = back ? bsh_cuda_lora_backward(lora, &context) : bsh_cuda_lora(lora, &context);
  bsh_cuda_leave(&context);
  return status;
}

/* What a call returns whose results, if any, are given up. */
static PyObject *declined(PyObject *const *const made, const int n_made) {
  for (int i = 0; i < n_made; i++) Py_XDECREF(made[i]);
  return bsh_direct_declined();
}

/* ---- forward ---- */

/* An argument at the end; NULL where it is left out or None. */
static PyObject *optional(PyObject *const *const objects, const Py_ssize_t n_objects, const int place) {
  return n_objects > place && objects[place] != Py_None ? objects[place] : NULL;
}

static bool read_forward(PyObject *const *const objects, PyObject *const dropped, bsh_lora_args *const lora,
                         bsh_tensor *const x) {
  PyObject *const factors[] = {objects[F_A], objects[F_B]};
  bsh_tensor other;
  if (!read_sizes(objects[F_N], objects[F_K], objects[F_SCALE], lora) ||
      !read_activation(objects[F_X], lora->K, NULL, lora, x) || !read_factors(factors[0], factors[1], x, lora))
    return false;
  if (dropped != NULL && !read_activation(dropped, lora->K, x, lora, &other)) return false;
  lora->x = dropped != NULL ? other.data : x->data;
  return !bsh_direct_wants_gradient(factors, 2) && (dropped == NULL || !bsh_direct_wants_gradient(&dropped, 1));
}

/* x A^T, of which `keep` is told. False: it has raised an exception, or none is set and it was not called. */
static bool keep_inner(PyObject *const keep, PyObject *const xa, bsh_lora_args *const lora, const bsh_tensor *const x) {
  if (!bsh_direct_possible()) return false;
  PyThreadState *const released = PyEval_SaveThread();
  const bsh_status status = compute(lora, x, false);
  PyEval_RestoreThread(released);
  if (status != BSH_OK) return false;
  lora->has_xa = true;
  PyObject *const kept = PyObject_CallFunctionObjArgs(keep, xa, NULL);
  Py_XDECREF(kept);
  return kept != NULL;
}

PyObject *bsh_direct_lora_4bit(PyObject *const module, PyObject *const *const objects, const Py_ssize_t n_objects) {
  (void)module;
  bsh_lora_args lora = {0};
  bsh_direct_call base = {0};
  bsh_tensor x;
  if (n_objects < F_KEEP || n_objects > F_COUNT || !bsh_direct_known() ||
      !read_forward(objects, optional(objects, n_objects, F_DROPPED), &lora, &x))
    return declined(NULL, 0);
  PyObject *const keep = optional(objects, n_objects, F_KEEP);
  PyObject *const xa = new_matrix(objects[F_X], lora.M, lora.r, &lora.xa);
  if (xa == NULL) return declined(NULL, 0);
  if (keep != NULL && !keep_inner(keep, xa, &lora, &x)) {
    if (!PyErr_Occurred()) return declined(&xa, 1);
    Py_DECREF(xa);
    return NULL;
  }
  bsh_status status = bsh_direct_begin(&base, &bsh_direct_op_linear_4bit, objects);
  lora.y = base.result;
  if (status == BSH_OK) status = compute(&lora, &x, false);
  bsh_direct_end(&base);
  PyObject *const made[] = {base.made, xa};
  PyObject *const results = status == BSH_OK ? PyTuple_New(2) : NULL;
  if (results == NULL) return declined(made, 2);
  for (int i = 0; i < 2; i++) PyTuple_SetItem(results, i, made[i]);
  return results;
}

/* ---- backward ---- */

typedef struct {
  bsh_lora_args lora;
  bsh_tensor dy;
  PyObject *dA, *dB, *dx_apart; /* NULL where not needed */
  bool needs_x;
} gradients;

static bool read_backward(PyObject *const *const objects, gradients *const g) {
  PyObject *const inputs[] = {objects[B_DY], objects[B_X], objects[B_A], objects[B_B], objects[B_XA]};
  bsh_lora_args *const lora = &g->lora;
  bsh_tensor x;
  g->needs_x = objects[B_NEEDS_X] == Py_True;
  if (!read_sizes(objects[B_N], objects[B_K], objects[B_SCALE], lora) ||
      !read_activation(objects[B_DY], lora->N, NULL, lora, &g->dy) ||
      !read_factors(objects[B_A], objects[B_B], &g->dy, lora))
    return false;
  lora->dy = g->dy.data;
  const void *xa = NULL;
  if (objects[B_X] != Py_None && !read_activation(objects[B_X], lora->K, &g->dy, lora, &x)) return false;
  if (objects[B_XA] != Py_None && !read_matrix(objects[B_XA], lora->M, lora->r, &g->dy, &xa)) return false;
  lora->x = objects[B_X] != Py_None ? x.data : NULL;
  lora->xa = (void *)(uintptr_t)xa;
  return !bsh_direct_wants_gradient(inputs, 5);
}

static bool new_gradients(PyObject *const like, const bool apart, gradients *const g) {
  bsh_lora_args *const lora = &g->lora;
  if (lora->x != NULL) g->dA = new_matrix(like, lora->r, lora->K, &lora->dA);
  if (lora->xa != NULL) g->dB = new_matrix(like, lora->N, lora->r, &lora->dB);
  if (apart) g->dx_apart = new_matrix(like, lora->M, lora->K, &lora->dx_apart);
  return (lora->x == NULL || g->dA != NULL) && (lora->xa == NULL || g->dB != NULL) && (!apart || g->dx_apart != NULL);
}

static PyObject *or_none(PyObject *const object) {
  if (object != NULL) return object;
  Py_INCREF(Py_None);
  return Py_None;
}

PyObject *bsh_direct_lora_4bit_backward(PyObject *const module, PyObject *const *const objects,
                                        const Py_ssize_t n_objects) {
  (void)module;
  gradients g = {0};
  bsh_direct_call base = {0};
  bsh_status status = BSH_NO_KERNEL;
  const bool apart = n_objects == B_COUNT && objects[B_APART] == Py_True;
  if (n_objects >= B_APART && n_objects <= B_COUNT && bsh_direct_known() && read_backward(objects, &g) &&
      (g.needs_x || bsh_direct_possible()) && new_gradients(objects[B_DY], apart && g.needs_x, &g))
    status = BSH_OK;
  if (status == BSH_OK && g.needs_x) status = bsh_direct_begin(&base, &bsh_direct_op_linear_4bit_dgrad, objects);
  if (status == BSH_OK && !g.needs_x) base.released = PyEval_SaveThread();
  g.lora.dx = base.result;
  if (status == BSH_OK) status = compute(&g.lora, &g.dy, true);
  bsh_direct_end(&base);
  PyObject *const made[] = {base.made, g.dA, g.dB, g.dx_apart};
  PyObject *const results = status == BSH_OK ? PyTuple_New(apart ? 4 : 3) : NULL;
  if (results == NULL) return declined(made, 4);
  for (int i = 0; i < (apart ? 4 : 3); i++) PyTuple_SetItem(results, i, or_none(made[i]));
  return results;
}
