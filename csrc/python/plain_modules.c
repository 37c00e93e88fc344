/* python/plain_modules.c - see python/plain_modules.h. */
#include "python/plain_modules.h"

#include <stdbool.h>

enum { HOOKS = 4, NAMES = 6 };

/* The first HOOKS are dictionaries in every module, the others are there where somebody has set them. */
static const char *const texts[NAMES] = {
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "forward", "_compiled_call_impl"};
static PyObject *names[NAMES]; /* interned, kept for the process */

static bool intern_names(void) {
  for (int i = 0; i < NAMES; i++)
    if (names[i] == NULL && (names[i] = PyUnicode_InternFromString(texts[i])) == NULL) return false;
  return true;
}

/* A module without one of the dictionaries is no module of this torch. */
static bool plain(PyObject *const dict) {
  for (int i = 0; i < NAMES; i++) {
    PyObject *const value = PyDict_GetItemWithError(dict, names[i]);
    if (value == NULL && i < HOOKS) return false;
    if (value != NULL && (i >= HOOKS || !PyDict_Check(value) || PyDict_Size(value) != 0)) return false;
  }
  return true;
}

PyObject *bsh_plain_modules(PyObject *const module, PyObject *const *const args, const Py_ssize_t n_args) {
  (void)module;
  if (!intern_names()) return NULL;
  for (Py_ssize_t i = 0; i < n_args; i++) {
    if (!PyDict_Check(args[i])) return PyErr_Format(PyExc_TypeError, "plain_modules: argument %zd is no dictionary", i);
    if (!plain(args[i])) {
      if (PyErr_Occurred() != NULL) return NULL;
      Py_RETURN_FALSE;
    }
  }
  Py_RETURN_TRUE;
}
