/* python/module_states.h - what of torch modules a recorded graph has inside. */
#ifndef BSH_PYTHON_MODULE_STATES_H
#define BSH_PYTHON_MODULE_STATES_H

#include <Python.h>

/* module_states([dict, ...]): of modules given by their __dict__, bytes that are equal as long as these are the same:
 * modes, numbers, truth values and texts among their attributes, modules inside, hooks, and parameters and buffers with
 * the address of their values (of a DTensor, this process's part) and whether they want a gradient. TypeError for
 * anything but a list of dictionaries; KeyError where one is not that of a module. */
PyObject *bsh_module_states(PyObject *module, PyObject *dicts);

#endif
