/* direct.h - dequantize_4bit and linear_4bit called from Python without torch's dispatcher.
 *
 * Reading eleven arguments costs the dispatcher more than a small product takes to launch. These functions read tensors
 * through torch's DLPack exchange table instead. They return None where they did nothing, whatever the reason: a mode,
 * tracer or profiler that watches the dispatcher, gradients, tensors that are not plain or do not fit, an error. The
 * caller then takes the op, which does it or says what is wrong. */
#ifndef BSH_DIRECT_H
#define BSH_DIRECT_H

#include <Python.h>

/* configure(exchange, tensor, weights, watchers, profiler, grad_enabled): torch.Tensor.__dlpack_c_exchange_api__, the
 * class Tensor, the classes of packed weights, callables that say whether somebody watches, torch.autograd.profiler,
 * torch.is_grad_enabled. Returns whether the exchange table can be used. */
PyObject *bsh_direct_configure(PyObject *module, PyObject *args);

/* linear_4bit(x, packed, absmax, absmax_map, absmax2, offset, bias, blocksize, format, N, K): y [..., N], or None.
 * bias may be None. Up to 64 rows of x; on CUDA for the fused kernels only. */
PyObject *bsh_direct_linear_4bit(PyObject *module, PyObject *const *args, Py_ssize_t n_args);

/* dequantize_4bit(packed, absmax, absmax_map, absmax2, offset, blocksize, format, rows, columns, dtype):
 * [rows, columns] of dtype, or None. Not for a row of packed codes, which stands for the transposed tensor. */
PyObject *bsh_direct_dequantize_4bit(PyObject *module, PyObject *const *args, Py_ssize_t n_args);

#endif
