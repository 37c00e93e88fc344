/* python/direct.h - dequantize_4bit, and the products with 4-bit and int8 weights, called from Python without torch's
 * dispatcher.
 *
 * Reading eleven arguments costs the dispatcher more than a small product takes to launch. These functions run the ops
 * (ops/ops.c) on tensors that they read through torch's DLPack exchange table instead. Where they cannot, whatever the
 * reason - a mode, tracer or profiler that watches the dispatcher, gradients, tensors that are not plain or do not fit,
 * an error - they have done nothing and call the op, which does it or says what is wrong.
 *
 * On CUDA, products by dequantized panels go to cuBLAS (gpu/cublas.h), not to torch's product: fp16 and bf16 only, and
 * only while torch's settings for products have their defaults. torch.backends.cuda.preferred_blas_library is not
 * asked. */
#ifndef BSH_PYTHON_DIRECT_H
#define BSH_PYTHON_DIRECT_H

#include <Python.h>
#include <stdbool.h>

#include "torch/tensor.h"

/* configure(ten arguments): whether the exchange table can be used.
 *
 *   exchange          torch.Tensor.__dlpack_c_exchange_api__
 *   tensor            the class Tensor
 *   weights           the classes of packed weights
 *   dtypes            torch.float32, torch.float16, torch.bfloat16
 *   watchers          callables: is a profiler or a dispatch mode active?
 *   settings          for each dtype pairs (callable, what it returns while products are torch's default)
 *   profiler          torch.autograd.profiler
 *   grad_enabled      torch.is_grad_enabled
 *   storage_address   callable: address of a tensor's storage; 0 if it was freed
 *   holds             callable: does the storage hold all elements of a tensor? */
PyObject *bsh_direct_configure(PyObject *module, PyObject *args);

/* fall_back((linear_4bit, linear_4bit_dgrad, dequantize_4bit, linear_int8, linear_int8_dgrad) or None): callables with
 * the arguments of the functions below, which call the ops; without them these return None. Returns what was set
 * before. */
PyObject *bsh_direct_fall_back(PyObject *module, PyObject *callables);

/* doubt_storages(): some storage was made smaller than the tensors in it, so each tensor is asked from now on. */
PyObject *bsh_direct_doubt_storages(PyObject *module, PyObject *unused);

/* linear_4bit(x, packed, absmax, absmax_map, absmax2, offset, bias, blocksize, format, N, K): y [..., N].
 * bias may be None. */
PyObject *bsh_direct_linear_4bit(PyObject *module, PyObject *const *args, Py_ssize_t n_args);

/* dequantize_4bit(packed, absmax, absmax_map, absmax2, offset, blocksize, format, rows, columns, dtype):
 * [rows, columns] of dtype. */
PyObject *bsh_direct_dequantize_4bit(PyObject *module, PyObject *const *args, Py_ssize_t n_args);

/* linear_4bit_dgrad(dy, packed, absmax, absmax_map, absmax2, offset, blocksize, format, N, K): dx [..., K]. */
PyObject *bsh_direct_linear_4bit_dgrad(PyObject *module, PyObject *const *args, Py_ssize_t n_args);

/* linear_int8(x, packed, absmax, bias, threshold, N, K): y [..., N]. bias may be None. */
PyObject *bsh_direct_linear_int8(PyObject *module, PyObject *const *args, Py_ssize_t n_args);

/* linear_int8_dgrad(dy, packed, absmax, N, K): dx [..., K]. */
PyObject *bsh_direct_linear_int8_dgrad(PyObject *module, PyObject *const *args, Py_ssize_t n_args);

/* Forgets an exception that is set, for the op to say what is wrong. KeyboardInterrupt, SystemExit and whatever else is
 * no Exception stays set: what is asked then answers so that the call declines, without calling Python again. */
void bsh_direct_forget(void);

/* What a call returns that did nothing: None, or NULL where such an exception stayed set. */
PyObject *bsh_direct_declined(void);

/* For other calls around the dispatcher (python/optimizer_list.c). Whether they are possible, and nobody watches it. */
bool bsh_direct_possible(void);

/* Whether an object is a tensor or parameter of no subclass. */
bool bsh_direct_is_plain(PyObject *object);

/* A contiguous tensor with elements, without a handle; BSH_NO_KERNEL where the op must decide. */
bsh_status bsh_direct_describe(PyObject *object, bsh_tensor *tensor);

/* Whether a tensor is lazily negated: its memory holds other numbers. */
bool bsh_direct_is_negated(PyObject *tensor);

#endif
