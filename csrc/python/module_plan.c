/* python/module_plan.c - see python/module_plan.h. */
#include "python/module_plan.h"

#include <string.h>

#include "core/packed.h"
#include "plan/cards.h"
#include "plan/product.h"

static const char *const vendors[] = {
    [BSH_VENDOR_NONE] = "", [BSH_VENDOR_TORCH] = "torch", [BSH_VENDOR_CUBLAS] = "cublas"};
enum { VENDORS = sizeof vendors / sizeof *vendors };

static PyObject *raise_status(void) {
  PyErr_SetString(PyExc_ValueError, bsh_status_message());
  return NULL;
}

/* ---- what is asked ---- */

static bool read_vendor(const char *const name, bsh_vendor *const vendor) {
  for (int i = 0; i < VENDORS; i++)
    if (strcmp(vendors[i], name) == 0) {
      *vendor = (bsh_vendor)i;
      return true;
    }
  PyErr_Format(PyExc_ValueError, "no vendor '%s': expected torch, cublas or ''", name);
  return false;
}

static bool is_power_of_two(const int32_t bytes) { return bytes > 0 && bytes <= 16 && (bytes & (bytes - 1)) == 0; }

/* Sizes of a sum may be 0 of int8 weights. */
static bool check_sizes(const bsh_facts *const f, const char *const op) {
  const int64_t least = f->w.bits == 8 ? 0 : 1;
  int64_t product;
  if (f->M < 1 || f->N < least || f->K < least || f->sms < 1 || f->workspace_bytes < 1 ||
      !is_power_of_two(f->x_alignment) || !is_power_of_two(f->y_alignment) || !is_power_of_two(f->packed_alignment) ||
      !is_power_of_two(f->code_alignment) || (f->bias_alignment != 0 && !is_power_of_two(f->bias_alignment))) {
    PyErr_SetString(PyExc_ValueError, "M, N, K, sms and workspace must be positive, alignments 1, 2, 4, 8 or 16");
    return false;
  }
  if ((f->w.bits == 8 || bsh_check_blocksize_weight(op, f->w.blocksize) == BSH_OK) &&
      bsh_checked_product(op, f->N, f->K, &product) == BSH_OK &&
      bsh_checked_product(op, f->M, f->N, &product) == BSH_OK &&
      bsh_checked_product(op, f->M, f->K, &product) == BSH_OK)
    return true;
  return raise_status() != NULL;
}

static bool check_facts(const bsh_facts *const f, const char *const op) {
  if (f->dtype >= BSH_F32 && f->dtype <= BSH_BF16) return check_sizes(f, op);
  PyErr_Format(PyExc_ValueError, "dtype %d is none of float32 (%d), float16 (%d), bfloat16 (%d)", f->dtype, BSH_F32,
               BSH_F16, BSH_BF16);
  return false;
}

/* (M, N, K, dtype, sm, sms, *, ...) of a product with operands of a kind, and the op that it is. */
static bool read_facts(PyObject *const args, PyObject *const keywords, const bsh_operand_kind kind,
                       bsh_facts *const facts, const char **const op) {
  static const char *const names[] = {"",
                                      "",
                                      "",
                                      "",
                                      "",
                                      "",
                                      "blocksize",
                                      "nested",
                                      "format",
                                      "gradient",
                                      "x_alignment",
                                      "y_alignment",
                                      "packed_alignment",
                                      "code_alignment",
                                      "bias_alignment",
                                      "vendor",
                                      "workspace",
                                      "kernel",
                                      "architectures",
                                      "tensor_maps",
                                      "outliers",
                                      NULL};
  long long M, N, K, blocksize = 64, workspace = BSH_WORKSPACE_BYTES;
  int dtype, sm, sms, nested = 1, format = BSH_NF4, gradient = 0, x = 16, y = 16, packed = 16, codes = 16, bias = 0,
                      maps = 1, outliers = 0;
  const char *vendor = "torch", *kernel = NULL, *architectures = NULL;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "LLLiii|$LpipiiiiisLzzpp", (char **)(uintptr_t)names, &M, &N, &K,
                                   &dtype, &sm, &sms, &blocksize, &nested, &format, &gradient, &x, &y, &packed, &codes,
                                   &bias, &vendor, &workspace, &kernel, &architectures, &maps, &outliers))
    return false;
  const bool int8 = kind == BSH_OF_INT8;
  *facts = (bsh_facts){.w = {.bits = int8 ? 8 : 4,
                             .table = int8 ? BSH_INT8 : (bsh_format)format,
                             .scales = int8     ? BSH_SCALES_ROWS
                                       : nested ? BSH_SCALES_NESTED
                                                : BSH_SCALES_BLOCKS,
                             .blocksize = blocksize},
                       .M = M,
                       .N = N,
                       .K = K,
                       .workspace_bytes = workspace,
                       .direction = gradient ? BSH_INPUT_GRADIENT : BSH_FORWARD,
                       .dtype = (bsh_dtype)dtype,
                       .threshold = outliers != 0,
                       .x_alignment = x,
                       .y_alignment = y,
                       .packed_alignment = packed,
                       .code_alignment = codes,
                       .bias_alignment = bias,
                       .sm = sm,
                       .sms = sms,
                       .tensor_maps = maps != 0,
                       .image = architectures != NULL ? bsh_image_for(architectures, sm) : bsh_image_here(sm)};
  *op = bsh_op_name(kind, facts->direction);
  facts->forced = bsh_forced_kernel(kind, facts->direction);
  if (kernel != NULL && bsh_kernel_named(*op, kernel, &facts->forced) != BSH_OK) return raise_status() != NULL;
  return read_vendor(vendor, &facts->vendor) && check_facts(facts, *op);
}

/* ---- what is answered ---- */

/* None for no kernel. */
static PyObject *launch_dict(const bsh_planned_launch *const launch) {
  if (launch->kernel == NULL) Py_RETURN_NONE;
  const bsh_cuda_launch_shape *const shape = &launch->shape;
  return Py_BuildValue("{s:s,s:(III),s:I,s:I,s:i}", "entry", launch->kernel->name, "grid", shape->grid[0],
                       shape->grid[1], shape->grid[2], "block", shape->block[0], "cluster",
                       shape->cluster > 1 ? shape->cluster : 1u, "shared_bytes", (int)shape->shared_bytes);
}

/* Takes over `item`. */
static bool append(PyObject *const list, PyObject *const item) {
  const bool done = item != NULL && PyList_Append(list, item) == 0;
  Py_XDECREF(item);
  return done;
}

/* Of one of a plan's slices, which is used `times` times. */
static PyObject *slice_dict(const bsh_plan_slice *const slice, const int64_t times) {
  const bsh_planned_launch *const all[] = {&slice->before, &slice->product, &slice->after};
  PyObject *const launches = PyList_New(0);
  bool done = launches != NULL;
  for (int i = 0; i < 3 && done; i++) done = all[i]->kernel == NULL || append(launches, launch_dict(all[i]));
  if (done)
    return Py_BuildValue("{s:L,s:L,s:L,s:N,s:O,s:i,s:O,s:i,s:i}", "rows", (long long)slice->rows, "times",
                         (long long)times, "scratch_bytes", (long long)slice->scratch_bytes, "launches", launches,
                         "codes", slice->int8.codes ? Py_True : Py_False, "capacity", (int)slice->int8.capacity,
                         "finds", slice->int8.finds ? Py_True : Py_False, "splits", (int)slice->sm80.splits,
                         "shared_tiles", (int)slice->sm80.shared);
  Py_XDECREF(launches);
  return NULL;
}

static PyObject *plan_dict(const bsh_plan *const plan, const bsh_facts *const facts) {
  PyObject *const slices = PyList_New(0);
  bool done = slices != NULL;
  if (done && plan->n_slices > 0) done = append(slices, slice_dict(&plan->slice, plan->n_slices));
  if (done && plan->rest.rows > 0) done = append(slices, slice_dict(&plan->rest, 1));
  if (done)
    return Py_BuildValue("{s:s,s:d,s:s,s:L,s:L,s:N,s:L,s:N}", "kernel", bsh_kernel_name(plan->kernel), "ns",
                         bsh_kernel_cost(plan->kernel, facts), "vendor", vendors[plan->vendor], "scratch_bytes",
                         (long long)plan->scratch_bytes, "panel_lines", (long long)plan->panel_lines, "panel",
                         launch_dict(&plan->panel), "vendor_bytes", (long long)plan->vendor_bytes, "slices", slices);
  Py_XDECREF(slices);
  return NULL;
}

/* Of E experts, or 0. */
static PyObject *plan_of(PyObject *const args, PyObject *const keywords, const bsh_operand_kind kind, const int64_t E) {
  const char *op;
  bsh_facts facts;
  bsh_plan plan;
  if (!read_facts(args, keywords, kind, &facts, &op)) return NULL;
  facts.E = E;
  return bsh_plan_product(op, &facts, &plan) == BSH_OK ? plan_dict(&plan, &facts) : raise_status();
}

PyObject *bsh_module_plan(PyObject *const module, PyObject *const args, PyObject *const keywords) {
  (void)module;
  return plan_of(args, keywords, BSH_OF_4BIT, 0);
}

PyObject *bsh_module_plan_int8(PyObject *const module, PyObject *const args, PyObject *const keywords) {
  (void)module;
  return plan_of(args, keywords, BSH_OF_INT8, 0);
}

/* The arguments of a plan, E before them. */
PyObject *bsh_module_plan_grouped(PyObject *const module, PyObject *const args, PyObject *const keywords) {
  (void)module;
  const Py_ssize_t count = PyTuple_Size(args);
  const long long E = count > 0 ? PyLong_AsLongLong(PyTuple_GetItem(args, 0)) : 0;
  if (E == -1 && PyErr_Occurred() != NULL) return NULL;
  if (E < 1 || E > INT32_MAX) return PyErr_Format(PyExc_ValueError, "%lld experts, expected 1 to 2^31 - 1", E);
  PyObject *const others = PyTuple_GetSlice(args, 1, count);
  PyObject *const plan = others != NULL ? plan_of(others, keywords, BSH_OF_STACK, E) : NULL;
  Py_XDECREF(others);
  return plan;
}

/* ---- rates of a card ---- */

PyObject *bsh_module_card_rates(PyObject *const module, PyObject *const args) {
  (void)module;
  int sm;
  if (!PyArg_ParseTuple(args, "i", &sm)) return NULL;
  const bsh_rates *const r = bsh_rates_of(sm);
  return Py_BuildValue("{s:O,s:d,s:d,s:d,s:((dd)(dd)),s:L}", "chosen", r->chosen ? Py_True : Py_False,
                       "flops_per_ns_sm", r->flops_per_ns_sm, "bytes_per_ns_sm", r->bytes_per_ns_sm,
                       "dequantized_per_ns_sm", r->dequantized_per_ns_sm, "share", r->share[0][0], r->share[0][1],
                       r->share[1][0], r->share[1][1], "l2", (long long)r->l2);
}

PyObject *bsh_module_set_card_rates(PyObject *const module, PyObject *const args) {
  (void)module;
  enum { RATES = 7 };
  int sm;
  long long l2 = 0;
  double r[RATES] = {0};
  if (!PyArg_ParseTuple(args, "i|ddd((dd)(dd))L", &sm, &r[0], &r[1], &r[2], &r[3], &r[4], &r[5], &r[6], &l2))
    return NULL;
  bsh_set_rates(sm, NULL);
  if (PyTuple_Size(args) == 1) Py_RETURN_NONE;
  for (int i = 0; i < RATES; i++)
    if (!(r[i] > 0 && r[i] < 1e9))
      return PyErr_Format(PyExc_ValueError, "rate %d of the card is no positive number", i);
  bsh_rates rates = *bsh_rates_of(sm);
  rates.chosen = true, rates.l2 = l2;
  rates.flops_per_ns_sm = r[0], rates.bytes_per_ns_sm = r[1], rates.dequantized_per_ns_sm = r[2];
  memcpy(rates.share, r + 3, sizeof rates.share);
  bsh_set_rates(sm, &rates);
  Py_RETURN_NONE;
}

/* ---- forced kernels ---- */

PyObject *bsh_module_force_kernel(PyObject *const module, PyObject *const args) {
  (void)module;
  const char *op, *name;
  if (!PyArg_ParseTuple(args, "sz", &op, &name)) return NULL;
  if (bsh_force_kernel(op, name) != BSH_OK) return raise_status();
  Py_RETURN_NONE;
}

PyObject *bsh_module_kernel_image(PyObject *const module, PyObject *const args) {
  (void)module;
  const char *architectures;
  int sm;
  if (!PyArg_ParseTuple(args, "si", &architectures, &sm)) return NULL;
  const bsh_kernel_image image = bsh_image_for(architectures, sm);
  return Py_BuildValue("iO", (int)image.arch, image.this_gpu_only ? Py_True : Py_False);
}
