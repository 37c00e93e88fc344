/* python/module_states.c - see python/module_states.h. */
#include "python/module_states.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum {
  TRAINING,
  MODULES,
  PARAMETERS,
  BUFFERS,
  HOOKS,
  N_KEYS = HOOKS + 4,
  DATA_PTR = N_KEYS,
  REQUIRES_GRAD,
  LOCAL,
  NAME,
  SAME,
  NAMES
};

static const char *const texts[NAMES] = {"training",
                                         "_modules",
                                         "_parameters",
                                         "_buffers",
                                         "_forward_pre_hooks",
                                         "_forward_hooks",
                                         "_backward_pre_hooks",
                                         "_backward_hooks",
                                         "data_ptr",
                                         "requires_grad",
                                         "_local_tensor",
                                         "__name__",
                                         "make_inputs_require_grads"};
static PyObject *names[NAMES]; /* interned, kept for the process */

/* Words written so far; grows. `seen` and `is_dtensor` keep what is known of the class of the last tensor. */
typedef struct {
  uint64_t *words;
  size_t n, capacity;
  PyTypeObject *seen;
  bool is_dtensor;
} states;

static bool put(states *const s, const uint64_t word) {
  if (s->n == s->capacity) {
    const size_t capacity = s->capacity ? 2 * s->capacity : 16384;
    uint64_t *const words = realloc(s->words, capacity * sizeof *words);
    if (words == NULL) return PyErr_NoMemory() != NULL;
    s->words = words, s->capacity = capacity;
  }
  s->words[s->n++] = word;
  return true;
}

static bool put_object(states *const s, PyObject *const object) { return put(s, (uint64_t)(uintptr_t)object); }

static bool intern_names(void) {
  for (int i = 0; i < NAMES; i++)
    if (names[i] == NULL && (names[i] = PyUnicode_InternFromString(texts[i])) == NULL) return false;
  return true;
}

/* Where the values of a plain tensor are. */
static bool put_address(states *const s, PyObject *const tensor) {
  PyObject *const address = PyObject_CallMethodObjArgs(tensor, names[DATA_PTR], NULL);
  if (address == NULL) return false;
  const uint64_t word = PyLong_AsUnsignedLongLongMask(address);
  Py_DECREF(address);
  return put(s, word);
}

/* Of a class that has `_local_tensor`, the address of that. */
static bool put_values(states *const s, PyObject *const tensor) {
  if (Py_TYPE(tensor) != s->seen) {
    s->seen = Py_TYPE(tensor);
    s->is_dtensor = PyObject_HasAttr((PyObject *)s->seen, names[LOCAL]) == 1;
  }
  if (!s->is_dtensor) return put_address(s, tensor);
  PyObject *const local = PyObject_GetAttr(tensor, names[LOCAL]);
  if (local == NULL) return false;
  const bool done = put_address(s, local);
  Py_DECREF(local);
  return done;
}

static bool put_tensor(states *const s, PyObject *const tensor) {
  PyObject *const graded = PyObject_GetAttr(tensor, names[REQUIRES_GRAD]);
  if (graded == NULL) return false;
  const bool done = put_object(s, tensor) && put_object(s, graded) && put_values(s, tensor);
  Py_DECREF(graded);
  return done;
}

/* The values of a dictionary behind their number. */
static bool put_all(states *const s, PyObject *const dict, const bool tensors) {
  PyObject *key, *value;
  Py_ssize_t at = 0;
  if (!put(s, (uint64_t)PyDict_Size(dict))) return false;
  while (PyDict_Next(dict, &at, &key, &value))
    if (!(tensors && value != Py_None ? put_tensor(s, value) : put_object(s, value))) return false;
  return true;
}

/* Whether a hook is the one by which transformers makes embeddings want a gradient: its trainers add it in each step.
 */
static bool same_hook(PyObject *const hook) {
  PyObject *const name = PyObject_GetAttr(hook, names[NAME]);
  if (name == NULL) PyErr_Clear();
  const bool same = name != NULL && PyUnicode_Check(name) && PyUnicode_Compare(name, names[SAME]) == 0;
  Py_XDECREF(name);
  return same;
}

/* The hooks of a dictionary; however many of those that are the same as one. */
static bool put_hooks(states *const s, PyObject *const dict) {
  PyObject *key, *value;
  Py_ssize_t at = 0;
  uint64_t same = 0;
  while (PyDict_Next(dict, &at, &key, &value)) {
    if (same_hook(value)) same = 1;
    else if (!put_object(s, value)) return false;
  }
  return put(s, same);
}

/* A number, a truth value or a text that a forward may read; false for anything else. */
static bool is_setting(PyObject *const value, uint64_t *const word) {
  double number;
  if (PyUnicode_Check(value)) {
    *word = (uint64_t)PyObject_Hash(value);
  } else if (PyFloat_Check(value)) {
    number = PyFloat_AsDouble(value);
    memcpy(word, &number, sizeof number);
  } else if (PyLong_Check(value)) {
    *word = (uint64_t)PyLong_AsUnsignedLongLongMask(value);
  } else {
    return false;
  }
  return true;
}

/* The module's own settings in the order in which it has them, behind them how many there are. */
static bool put_settings(states *const s, PyObject *const dict) {
  PyObject *key, *value;
  Py_ssize_t at = 0;
  uint64_t n = 0, word;
  while (PyDict_Next(dict, &at, &key, &value))
    if (is_setting(value, &word)) {
      if (!put(s, word)) return false;
      n++;
    }
  return put(s, n);
}

static bool put_module(states *const s, PyObject *const dict) {
  for (int i = 0; i < N_KEYS; i++) {
    PyObject *const value = PyDict_GetItemWithError(dict, names[i]);
    if (value == NULL) {
      if (PyErr_Occurred() == NULL) PyErr_SetObject(PyExc_KeyError, names[i]);
      return false;
    }
    if (i == TRAINING || !PyDict_Check(value)) {
      if (!put_object(s, value)) return false;
    } else if (!(i >= HOOKS ? put_hooks(s, value) : put_all(s, value, i == PARAMETERS || i == BUFFERS))) {
      return false;
    }
  }
  return put_settings(s, dict);
}

PyObject *bsh_module_states(PyObject *const module, PyObject *const dicts) {
  (void)module;
  if (!PyList_Check(dicts)) return PyErr_Format(PyExc_TypeError, "module_states: the argument is no list");
  if (!intern_names()) return NULL;
  states s = {0};
  bool done = true;
  for (Py_ssize_t i = 0; done && i < PyList_Size(dicts); i++) {
    PyObject *const dict = PyList_GetItem(dicts, i);
    if (!PyDict_Check(dict)) {
      PyErr_Format(PyExc_TypeError, "module_states: element %zd is no dictionary", i);
      done = false;
    } else {
      done = put_module(&s, dict);
    }
  }
  PyObject *const found = done ? PyBytes_FromStringAndSize((const char *)s.words, (Py_ssize_t)(s.n * 8)) : NULL;
  free(s.words);
  return found;
}
