/* python/module_plan.h - Python's questions about plans (plan/product.h): which kernel, how it is launched, and forcing
 * one. */
#ifndef BSH_PYTHON_MODULE_PLAN_H
#define BSH_PYTHON_MODULE_PLAN_H

#include <Python.h>

/* plan_linear_4bit(M, N, K, dtype, sm, sms, ...): see _C.pyi. */
PyObject *bsh_module_plan(PyObject *module, PyObject *args, PyObject *keywords);
PyObject *bsh_module_plan_grouped(PyObject *module, PyObject *args, PyObject *keywords);
PyObject *bsh_module_plan_int8(PyObject *module, PyObject *args, PyObject *keywords);

/* force_kernel(op, name): op "linear_4bit", "linear_int8" or these with "_dgrad", name of a kernel or None. */
PyObject *bsh_module_force_kernel(PyObject *module, PyObject *args);

/* card_rates(sm), set_card_rates(sm, ...): see _C.pyi. */
PyObject *bsh_module_card_rates(PyObject *module, PyObject *args);
PyObject *bsh_module_set_card_rates(PyObject *module, PyObject *args);

/* kernel_image(architectures, sm): (architecture, for this GPU only) of the kernels that would be loaded there. */
PyObject *bsh_module_kernel_image(PyObject *module, PyObject *args);

#endif
