/* python/direct_lora.h - a LoRA layer on a 4-bit weight in one call from Python, without torch's dispatcher.
 *
 * As in python/direct.h: None where nothing was done, whatever the reason. x, dy, A, B and x A^T are contiguous, of one
 * device and one dtype (float32 on the CPU only), and nobody wants a gradient. On the CPU the bits are those of torch's
 * own products in the same order; on CUDA the products are cuBLAS'. */
#ifndef BSH_PYTHON_DIRECT_LORA_H
#define BSH_PYTHON_DIRECT_LORA_H

#include <Python.h>

/* lora_4bit(x, packed, absmax, absmax_map, absmax2, offset, bias, blocksize, format, N, K, A, B, scale[, keep[,
 * dropped]]): (y [..., N], x A^T [M, r]), or None. The first eleven are those of linear_4bit; A [r, K], B [N, r], M the
 * rows of x. y = W x + bias + scale B (A x). keep, if any and not None, is called with x A^T before the product with W;
 * what it raises is raised. dropped, if any and not None, has the shape of x and is what A multiplies in its place. */
PyObject *bsh_direct_lora_4bit(PyObject *module, PyObject *const *args, Py_ssize_t n_args);

/* lora_4bit_backward(dy, packed, absmax, absmax_map, absmax2, offset, blocksize, format, N, K, x, A, B, xa, scale,
 * needs_x[, apart]): (dx, dA, dB), or None. The first ten are those of linear_4bit_dgrad; x is what A multiplied. dx is
 * None unless needs_x, dA where x is None, dB where xa is. apart True: (dx, dA, dB, scale (dy B) A [M, K]) with dx = dy
 * W, for whoever has something to do before the two are added. */
PyObject *bsh_direct_lora_4bit_backward(PyObject *module, PyObject *const *args, Py_ssize_t n_args);

#endif
