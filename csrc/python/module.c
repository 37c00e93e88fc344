/* python/module.c - the CPython extension bitshard._C: registers the torch ops and answers questions about the build.
 *
 * Limited API 3.10, multi-phase init. Importing looks up libtorch and registers ops; it never touches CUDA. */
#include <Python.h>

#include <inttypes.h>
#include <string.h>

#include "core/packed.h"
#include "cpu/cpu.h"
#include "gpu/driver.h"
#include "ops/ops.h"
#include "plan/product.h"
#include "python/direct.h"
#include "python/direct_lora.h"
#include "python/module_plan.h"
#include "python/module_states.h"
#include "python/optimizer_list.h"
#include "python/plain_modules.h"
#include "torch/abi.h"

static PyObject *raise_status(PyObject *const type) {
  PyErr_SetString(type, bsh_status_message());
  return NULL;
}

/* ---- sizes ---- */

static PyObject *storage_elements(PyObject *const module, PyObject *const args) {
  (void)module;
  long long n, itemsize;
  if (!PyArg_ParseTuple(args, "LL", &n, &itemsize)) return NULL;
  if (n < 0 || itemsize < 1)
    return PyErr_Format(PyExc_ValueError, "n is %lld and itemsize %lld, expected >= 0 and >= 1", n, itemsize);
  return PyLong_FromLongLong(bsh_storage_elements(n, itemsize));
}

static PyObject *block_count(PyObject *const module, PyObject *const args) {
  (void)module;
  long long n, blocksize;
  if (!PyArg_ParseTuple(args, "LL", &n, &blocksize)) return NULL;
  if (n < 0 || blocksize < 1)
    return PyErr_Format(PyExc_ValueError, "n is %lld and blocksize %lld, expected >= 0 and >= 1", n, blocksize);
  return PyLong_FromLongLong(bsh_block_count(n, blocksize));
}

static PyObject *rank_slice(PyObject *const module, PyObject *const args) {
  (void)module;
  long long total, world, rank;
  if (!PyArg_ParseTuple(args, "LLL", &total, &world, &rank)) return NULL;
  if (total < 0 || world < 1 || rank < 0 || rank >= world)
    return PyErr_Format(PyExc_ValueError, "total %lld, world %lld, rank %lld: expected 0 <= rank < world", total, world,
                        rank);
  const bsh_slice slice = bsh_rank_slice(total, world, rank);
  return Py_BuildValue("LL", (long long)slice.begin, (long long)slice.length);
}

/* ---- tables ---- */

static const float nf4_values[16] = {BSH_NF4_VALUES};
static const float fp4_values[16] = {BSH_FP4_VALUES};
static const float e2m1_values[16] = {BSH_E2M1_VALUES};
static const uint32_t e2m1_borders_bits[7] = {BSH_E2M1_THRESHOLD_BITS};
static const uint32_t dynamic_map_bits[256] = {BSH_DYNAMIC_MAP_BITS};

static PyObject *table(PyObject *const module, PyObject *const args) {
  (void)module;
  const char *name;
  if (!PyArg_ParseTuple(args, "s", &name)) return NULL;
  if (strcmp(name, "nf4") == 0) return PyBytes_FromStringAndSize((const char *)nf4_values, sizeof nf4_values);
  if (strcmp(name, "fp4") == 0) return PyBytes_FromStringAndSize((const char *)fp4_values, sizeof fp4_values);
  if (strcmp(name, "e2m1") == 0) return PyBytes_FromStringAndSize((const char *)e2m1_values, sizeof e2m1_values);
  if (strcmp(name, "e2m1_borders") == 0)
    return PyBytes_FromStringAndSize((const char *)e2m1_borders_bits, sizeof e2m1_borders_bits);
  if (strcmp(name, "dynamic") == 0)
    return PyBytes_FromStringAndSize((const char *)dynamic_map_bits, sizeof dynamic_map_bits);
  return PyErr_Format(PyExc_ValueError, "no table '%s': expected nf4, fp4, e2m1, e2m1_borders or dynamic", name);
}

/* ---- what runs here ---- */

static PyObject *isa(PyObject *const module, PyObject *const unused) {
  (void)module, (void)unused;
  return PyUnicode_FromString(bsh_cpu_isa());
}

static PyObject *isas(PyObject *const module, PyObject *const unused) {
  (void)module, (void)unused;
  const char *names[8];
  const int count = bsh_cpu_isas(names, 8);
  PyObject *const tuple = PyTuple_New(count);
  for (int i = 0; tuple != NULL && i < count; i++) PyTuple_SetItem(tuple, i, PyUnicode_FromString(names[i]));
  return tuple;
}

static PyObject *set_isa(PyObject *const module, PyObject *const args) {
  (void)module;
  const char *name;
  if (!PyArg_ParseTuple(args, "s", &name)) return NULL;
  if (bsh_cpu_set_isa(name) != BSH_OK) return raise_status(PyExc_ValueError);
  Py_RETURN_NONE;
}

static PyObject *cuda_state(PyObject *const module, PyObject *const unused) {
  (void)module, (void)unused;
  bsh_cuda_state state;
  bsh_cuda_describe(&state);
  return Py_BuildValue("{s:O,s:s,s:s,s:s}", "built", state.built ? Py_True : Py_False, "architectures",
                       state.architectures, "driver", state.driver, "error", state.error);
}

static PyMethodDef methods[] = {
    {"storage_elements", storage_elements, METH_VARARGS,
     "storage_elements(n, itemsize): storage elements that hold n 4-bit codes, zero-padded."},
    {"block_count", block_count, METH_VARARGS, "block_count(n, blocksize): blocks of n elements."},
    {"rank_slice", rank_slice, METH_VARARGS,
     "rank_slice(total, world, rank): (begin, length) of a rank's chunk of ceil(total / world)."},
    {"table", table, METH_VARARGS,
     "table(name): float32 bytes of the tables 'nf4', 'fp4', 'e2m1', 'e2m1_borders' or 'dynamic'."},
    {"isa", isa, METH_NOARGS, "isa(): instruction set of the CPU kernels in use."},
    {"isas", isas, METH_NOARGS, "isas(): instruction sets usable on this CPU, worst first."},
    {"set_isa", set_isa, METH_VARARGS, "set_isa(name): use the CPU kernels of another instruction set of isas()."},
    {"cuda_state", cuda_state, METH_NOARGS, "cuda_state(): what the CUDA half was built for and what the driver says."},
    {"plan_grouped_linear_4bit", (PyCFunction)(void (*)(void))bsh_module_plan_grouped, METH_VARARGS | METH_KEYWORDS,
     "The kernel of a grouped product on a GPU; see _C.pyi."},
    {"plan_linear_4bit", (PyCFunction)(void (*)(void))bsh_module_plan, METH_VARARGS | METH_KEYWORDS,
     "plan_linear_4bit(M, N, K, dtype, sm, sms, *, ...): how a GPU would compute the product, a dict."},
    {"plan_linear_int8", (PyCFunction)(void (*)(void))bsh_module_plan_int8, METH_VARARGS | METH_KEYWORDS,
     "plan_linear_int8(M, N, K, dtype, sm, sms, *, ...): how a GPU would compute the product, a dict."},
    {"card_rates", bsh_module_card_rates, METH_VARARGS,
     "card_rates(sm): what the plan takes a card to do; see _C.pyi."},
    {"set_card_rates", bsh_module_set_card_rates, METH_VARARGS,
     "set_card_rates(sm, ...): what a card was measured to do; see _C.pyi."},
    {"force_kernel", bsh_module_force_kernel, METH_VARARGS,
     "force_kernel(op, name): every later product of this op on a GPU by this kernel; see _C.pyi."},
    {"kernel_image", bsh_module_kernel_image, METH_VARARGS,
     "kernel_image(architectures, sm): (architecture, for this GPU only) of the kernels that would be loaded there."},
    {"configure_direct", bsh_direct_configure, METH_VARARGS,
     "configure_direct(exchange, tensor, weights, dtypes, watchers, settings, profiler, grad_enabled, "
     "storage_address, storage_holds): whether direct calls are possible."},
    {"fall_back", bsh_direct_fall_back, METH_O,
     "fall_back((linear_4bit, linear_4bit_dgrad, dequantize_4bit, linear_int8, linear_int8_dgrad) or None): who is "
     "called where the functions below do nothing themselves; what was set before."},
    {"doubt_storages", bsh_direct_doubt_storages, METH_NOARGS,
     "doubt_storages(): direct calls ask from now on whether a tensor's storage holds all of it."},
    {"linear_4bit", (PyCFunction)(void (*)(void))bsh_direct_linear_4bit, METH_FASTCALL,
     "linear_4bit(x, packed, absmax, absmax_map, absmax2, offset, bias, blocksize, format, N, K): y, by the op "
     "where it must be."},
    {"linear_4bit_dgrad", (PyCFunction)(void (*)(void))bsh_direct_linear_4bit_dgrad, METH_FASTCALL,
     "linear_4bit_dgrad(dy, packed, absmax, absmax_map, absmax2, offset, blocksize, format, N, K): dx, by the op "
     "where it must be."},
    {"dequantize_4bit", (PyCFunction)(void (*)(void))bsh_direct_dequantize_4bit, METH_FASTCALL,
     "dequantize_4bit(packed, absmax, absmax_map, absmax2, offset, blocksize, format, rows, columns, dtype): values, "
     "by the op where it must be."},
    {"linear_int8", (PyCFunction)(void (*)(void))bsh_direct_linear_int8, METH_FASTCALL,
     "linear_int8(x, packed, absmax, bias, threshold, N, K): y, by the op where it must be."},
    {"linear_int8_dgrad", (PyCFunction)(void (*)(void))bsh_direct_linear_int8_dgrad, METH_FASTCALL,
     "linear_int8_dgrad(dy, packed, absmax, N, K): dx, by the op where it must be."},
    {"lora_4bit", (PyCFunction)(void (*)(void))bsh_direct_lora_4bit, METH_FASTCALL,
     "lora_4bit(x, packed, absmax, absmax_map, absmax2, offset, bias, blocksize, format, N, K, A, B, scale[, keep[, "
     "dropped]]): (y, xa), or None if Python must do it; keep(xa) is called before the product with W; A multiplies "
     "dropped in the place of x."},
    {"lora_4bit_backward", (PyCFunction)(void (*)(void))bsh_direct_lora_4bit_backward, METH_FASTCALL,
     "lora_4bit_backward(dy, packed, absmax, absmax_map, absmax2, offset, blocksize, format, N, K, x, A, B, xa, scale, "
     "needs_x[, apart]): (dx, dA, dB), or None if Python must do it; apart: (dy W, dA, dB, scale (dy B) A)."},
    {"plain_modules", (PyCFunction)(void (*)(void))bsh_plain_modules, METH_FASTCALL,
     "plain_modules(dict, ...): of modules given by their __dict__, whether none has hooks, its own forward, or was "
     "compiled."},
    {"module_states", bsh_module_states, METH_O,
     "module_states([dict, ...]): of modules given by their __dict__, bytes that are equal while their modes, hooks, "
     "settings, modules, parameters and buffers, and the addresses of their values, are the same."},
    {"optimizer_steps", bsh_optimizer_steps, METH_O,
     "optimizer_steps([(settings, parameters), ...]): one step of all parameters; whether it was done, else the ops "
     "must do it."},
    {"optimizer_fits", bsh_optimizer_fits, METH_O,
     "optimizer_fits([(settings, parameters), ...]): whether a step of these could be done if their paged states were "
     "where the parameters are."},
    {NULL, NULL, 0, NULL},
};

/* The core's state (torch's functions, registered ops, the chosen instruction set) is one per process. */
static const char *in_main_interpreter(void) {
  return PyInterpreterState_GetID(PyInterpreterState_Get()) == 0
             ? NULL
             : "bitshard works in the main interpreter only, not in a subinterpreter";
}

static int execute(PyObject *const module) {
  const char *trouble = in_main_interpreter();
  if (trouble == NULL) trouble = bsh_torch_load();
  if (trouble == NULL && bsh_cpu_set_isa(NULL) != BSH_OK) trouble = bsh_status_message();
  if (trouble == NULL && bsh_read_forced_kernels() != BSH_OK) trouble = bsh_status_message();
  if (trouble == NULL) trouble = bsh_ops_register();
  if (trouble != NULL) {
    PyErr_SetString(PyExc_ImportError, trouble);
    return -1;
  }
  return PyModule_AddStringConstant(module, "version", BSH_VERSION);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)(uintptr_t)execute}, {0, NULL}};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "bitshard._C",
    .m_doc = "C core of bitshard: registers torch.ops.bitshard.*",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__C(void);
PyMODINIT_FUNC PyInit__C(void) { return PyModuleDef_Init(&definition); }
