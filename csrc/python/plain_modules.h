/* python/plain_modules.h - whether the forward of torch modules may be gone around. */
#ifndef BSH_PYTHON_PLAIN_MODULES_H
#define BSH_PYTHON_PLAIN_MODULES_H

#include <Python.h>

/* plain_modules(dict, ...): of modules given by their __dict__, whether none has hooks, a forward of its own, or was
 * compiled. TypeError for anything but dictionaries. */
PyObject *bsh_plain_modules(PyObject *module, PyObject *const *args, Py_ssize_t n_args);

#endif
