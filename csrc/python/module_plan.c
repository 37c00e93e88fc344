/* python/module_plan.c - see python/module_plan.h. */
#include "python/module_plan.h"

#include <string.h>

#include "core/packed.h"
#include "plan/grouped.h"
#include "plan/int8.h"
#include "plan/plan.h"

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

/* NULL: as in the environment. */
static bool read_kernel(const char *const name, bsh_facts *const facts) {
  facts->forced = bsh_forced_kernel(facts->direction);
  if (name == NULL) return true;
  int kernel = 0;
  while (kernel < BSH_LINEAR_COUNT && strcmp(bsh_linear_kernel_name((bsh_linear_kernel)kernel), name) != 0) kernel++;
  facts->forced = (bsh_linear_kernel)kernel;
  if (kernel == BSH_LINEAR_COUNT) PyErr_Format(PyExc_ValueError, "no kernel '%s'", name);
  return kernel < BSH_LINEAR_COUNT;
}

static bool is_power_of_two(const int32_t bytes) { return bytes > 0 && bytes <= 16 && (bytes & (bytes - 1)) == 0; }

static bool check_facts(const bsh_facts *const f) {
  int64_t product;
  if (f->dtype < BSH_F32 || f->dtype > BSH_BF16) {
    PyErr_Format(PyExc_ValueError, "dtype %d is none of float32 (%d), float16 (%d), bfloat16 (%d)", f->dtype, BSH_F32,
                 BSH_F16, BSH_BF16);
    return false;
  }
  if (f->M < 1 || f->N < 1 || f->K < 1 || f->sms < 1 || f->workspace_bytes < 1 || !is_power_of_two(f->x_alignment) ||
      !is_power_of_two(f->y_alignment) || !is_power_of_two(f->packed_alignment) ||
      !is_power_of_two(f->code_alignment) || (f->bias_alignment != 0 && !is_power_of_two(f->bias_alignment))) {
    PyErr_SetString(PyExc_ValueError, "M, N, K, sms and workspace must be positive, alignments 1, 2, 4, 8 or 16");
    return false;
  }
  if (bsh_check_blocksize("plan_linear_4bit", f->blocksize, BSH_MAX_BLOCKSIZE) == BSH_OK &&
      bsh_checked_product("plan_linear_4bit", f->N, f->K, &product) == BSH_OK &&
      bsh_checked_product("plan_linear_4bit", f->M, f->N, &product) == BSH_OK &&
      bsh_checked_product("plan_linear_4bit", f->M, f->K, &product) == BSH_OK)
    return true;
  return raise_status() != NULL;
}

static bool read_facts(PyObject *const args, PyObject *const keywords, bsh_facts *const facts) {
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
                                      NULL};
  long long M, N, K, blocksize = 64, workspace = 64 << 20;
  int dtype, sm, sms, nested = 1, format = BSH_NF4, gradient = 0, x = 16, y = 16, packed = 16, codes = 16, bias = 0,
                      maps = 1;
  const char *vendor = "torch", *kernel = NULL, *architectures = NULL;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "LLLiii|$LpipiiiiisLzzp", (char **)(uintptr_t)names, &M, &N, &K,
                                   &dtype, &sm, &sms, &blocksize, &nested, &format, &gradient, &x, &y, &packed, &codes,
                                   &bias, &vendor, &workspace, &kernel, &architectures, &maps))
    return false;
  *facts = (bsh_facts){.M = M,
                       .N = N,
                       .K = K,
                       .blocksize = blocksize,
                       .workspace_bytes = workspace,
                       .direction = gradient ? BSH_INPUT_GRADIENT : BSH_FORWARD,
                       .dtype = (bsh_dtype)dtype,
                       .format = (bsh_format)format,
                       .nested = nested != 0,
                       .x_alignment = x,
                       .y_alignment = y,
                       .packed_alignment = packed,
                       .code_alignment = codes,
                       .bias_alignment = bias,
                       .sm = sm,
                       .sms = sms,
                       .tensor_maps = maps != 0,
                       .image = architectures != NULL ? bsh_image_for(architectures, sm) : bsh_image_here(sm)};
  return read_vendor(vendor, &facts->vendor) && read_kernel(kernel, facts) && check_facts(facts);
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

static PyObject *slice_dict(const bsh_fused_slice *const slice, const int64_t times) {
  const bsh_planned_launch *const all[] = {&slice->before, &slice->product, &slice->after};
  PyObject *const launches = PyList_New(0);
  bool done = launches != NULL;
  for (int i = 0; i < 3 && done; i++) done = all[i]->kernel == NULL || append(launches, launch_dict(all[i]));
  if (done)
    return Py_BuildValue("{s:L,s:L,s:L,s:N}", "rows", (long long)slice->rows, "times", (long long)times,
                         "scratch_bytes", (long long)slice->scratch_bytes, "launches", launches);
  Py_XDECREF(launches);
  return NULL;
}

PyObject *bsh_module_plan(PyObject *const module, PyObject *const args, PyObject *const keywords) {
  (void)module;
  bsh_facts facts;
  bsh_plan plan;
  if (!read_facts(args, keywords, &facts)) return NULL;
  if (bsh_plan_linear_4bit(facts.direction == BSH_FORWARD ? "linear_4bit" : "linear_4bit_dgrad", &facts, &plan) !=
      BSH_OK)
    return raise_status();
  PyObject *const slices = PyList_New(0);
  bool done = slices != NULL;
  if (done && plan.n_slices > 0) done = append(slices, slice_dict(&plan.slice, plan.n_slices));
  if (done && plan.rest.rows > 0) done = append(slices, slice_dict(&plan.rest, 1));
  if (done)
    return Py_BuildValue("{s:s,s:s,s:L,s:L,s:N,s:L,s:N}", "kernel", bsh_linear_kernel_name(plan.kernel), "vendor",
                         vendors[plan.vendor], "scratch_bytes", (long long)plan.scratch_bytes, "panel_lines",
                         (long long)plan.panel_lines, "panel", launch_dict(&plan.panel), "vendor_bytes",
                         (long long)plan.vendor_bytes, "slices", slices);
  Py_XDECREF(slices);
  return NULL;
}

/* The arguments of a plan, E before them. */
PyObject *bsh_module_plan_grouped(PyObject *const module, PyObject *const args, PyObject *const keywords) {
  (void)module;
  bsh_facts facts;
  bsh_grouped_plan plan;
  const Py_ssize_t count = PyTuple_Size(args);
  const long long E = count > 0 ? PyLong_AsLongLong(PyTuple_GetItem(args, 0)) : 0;
  if (E == -1 && PyErr_Occurred() != NULL) return NULL;
  if (E < 1 || E > INT32_MAX) return PyErr_Format(PyExc_ValueError, "%lld experts, expected 1 to 2^31 - 1", E);
  PyObject *const others = PyTuple_GetSlice(args, 1, count);
  const bool read = others != NULL && read_facts(others, keywords, &facts);
  Py_XDECREF(others);
  if (!read) return NULL;
  bsh_plan_grouped_linear_4bit(&facts, E, &plan);
  return Py_BuildValue("{s:s,s:i,s:L,s:N}", "kernel", bsh_grouped_kernel_name(plan.kernel), "index", (int)plan.kernel,
                       "panel_experts", (long long)plan.panel_experts, "launch", launch_dict(&plan.slice.product));
}

/* ---- int8 ---- */

static bool read_int8_facts(PyObject *const args, PyObject *const keywords, bsh_int8_facts *const facts) {
  static const char *const names[] = {"",
                                      "",
                                      "",
                                      "",
                                      "",
                                      "",
                                      "outliers",
                                      "gradient",
                                      "x_alignment",
                                      "packed_alignment",
                                      "workspace",
                                      "kernel",
                                      "architectures",
                                      "tensor_maps",
                                      "cublas",
                                      NULL};
  long long M, N, K, workspace = 64 << 20;
  int dtype, sm, sms, outliers = 0, gradient = 0, x = 16, packed = 16, maps = 1, cublas = 1;
  const char *kernel = NULL, *architectures = NULL;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "LLLiii|$ppiiLzzpp", (char **)(uintptr_t)names, &M, &N, &K, &dtype,
                                   &sm, &sms, &outliers, &gradient, &x, &packed, &workspace, &kernel, &architectures,
                                   &maps, &cublas))
    return false;
  *facts = (bsh_int8_facts){.M = M,
                            .N = N,
                            .K = K,
                            .workspace_bytes = workspace,
                            .dgrad = gradient != 0,
                            .outliers = outliers != 0,
                            .dtype = (bsh_dtype)dtype,
                            .x_alignment = x,
                            .packed_alignment = packed,
                            .sm = sm,
                            .sms = sms,
                            .image = architectures != NULL ? bsh_image_for(architectures, sm) : bsh_image_here(sm),
                            .tensor_maps = maps != 0,
                            .cublas = cublas != 0,
                            .forced = bsh_forced_int8_kernel(gradient != 0)};
  if (kernel != NULL && bsh_int8_kernel_of(kernel, &facts->forced) != BSH_OK) return raise_status() != NULL;
  if (M > 0 && N >= 0 && K >= 0 && sms > 0 && workspace > 0 && dtype >= BSH_F32 && dtype <= BSH_BF16 &&
      is_power_of_two(x) && is_power_of_two(packed))
    return true;
  PyErr_SetString(PyExc_ValueError, "M, sms and workspace must be positive, dtype 0 to 2, alignments 1, 2, 4, 8 or 16");
  return false;
}

PyObject *bsh_module_plan_int8(PyObject *const module, PyObject *const args, PyObject *const keywords) {
  (void)module;
  bsh_int8_facts facts;
  bsh_int8_plan plan;
  if (!read_int8_facts(args, keywords, &facts)) return NULL;
  if (bsh_plan_linear_int8(facts.dgrad ? "linear_int8_dgrad" : "linear_int8", &facts, &plan) != BSH_OK)
    return raise_status();
  return Py_BuildValue("{s:s,s:O,s:L,s:i,s:O,s:L,s:N,s:N}", "kernel", bsh_int8_kernel_name(plan.kernel), "codes",
                       plan.codes ? Py_True : Py_False, "scratch_bytes", (long long)plan.at.bytes, "capacity",
                       (int)plan.capacity, "finds", plan.finds ? Py_True : Py_False, "panel_columns",
                       (long long)plan.panel_columns, "launch", launch_dict(&plan.product), "after",
                       launch_dict(&plan.after));
}

/* ---- forced kernels ---- */

PyObject *bsh_module_force_kernel(PyObject *const module, PyObject *const args) {
  static const char *const ops[] = {"linear_4bit", "linear_4bit_dgrad", "linear_int8", "linear_int8_dgrad"};
  (void)module;
  const char *op, *name;
  int which = 0;
  if (!PyArg_ParseTuple(args, "sz", &op, &name)) return NULL;
  while (which < 4 && strcmp(ops[which], op) != 0) which++;
  if (which == 4)
    return PyErr_Format(PyExc_ValueError,
                        "no kernels of '%s': expected linear_4bit, linear_4bit_dgrad, linear_int8 or linear_int8_dgrad",
                        op);
  const bsh_direction direction = which == 0 ? BSH_FORWARD : BSH_INPUT_GRADIENT;
  const bsh_status status = which < 2 ? bsh_force_kernel(direction, name) : bsh_force_int8_kernel(which == 3, name);
  if (status != BSH_OK) return raise_status();
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
