/* python/optimizer_list.h - a step of many parameters in one call from Python, around torch's dispatcher. */
#ifndef BSH_PYTHON_OPTIMIZER_LIST_H
#define BSH_PYTHON_OPTIMIZER_LIST_H

#include <Python.h>

/* optimizer_steps([(settings, [(g, p, state1, state2, qmap1, qmap2, absmax1, absmax2), ...]), ...]): True, or False
 * where nothing was done because the ops (ops/ops.c) must decide: somebody watches the dispatcher, or a tensor is not
 * plain, not contiguous, empty, does not fit the others of its parameter, or shares memory with one of them where
 * either is written. settings: (algorithm, lr, beta1, beta2, beta3, alpha, eps, weight_decay, step, gnorm_scale,
 * skip_zeros). uint8 states are codes with maps and scales of blocks of 256, fp32 states have None for those; state2
 * and its are None where the algorithm has one state. RuntimeError where a GPU fails says how many parameters were
 * updated, and which in its list `done`, in the order of the batches. */
PyObject *bsh_optimizer_steps(PyObject *module, PyObject *batches);

/* optimizer_fits(batches): whether optimizer_steps would update these parameters if their states, which are in the
 * memory of the host, were on the device of the parameters. Changes nothing. */
PyObject *bsh_optimizer_fits(PyObject *module, PyObject *batches);

#endif
