/* driver.c - in the place of csrc/gpu/driver.c and of cuBLAS: launches go to a callback, which runs the kernel on the
 * machine of machine.h, memory is the host's. Everything between an op and its launches is the product's own code. */
#include <stdlib.h>
#include <string.h>

#include "core/numerics.h"
#include "cpu/cpu.h"
#include "cpu/state_search.h"
#include "gpu/cublas.h"
#include "gpu/int8.h"
#include "gpu/ops.h"
#include "gpu/product.h"
#include "ops/optimizer_step.h"
#include "torch/gemm.h"
#include "torch/tensor.h"

#define EXPORT __attribute__((visibility("default")))

/* Runs a kernel of cuda/<file>.cu; 0, or 1 where it failed. */
typedef int (*gpu_launch)(const char *file, const char *kernel, const uint32_t *grid, const uint32_t *block,
                          uint32_t cluster, uint32_t shared, void **arguments);

EXPORT struct {
  gpu_launch launch;
  int32_t sm, sms;
  int64_t workspace_bytes;
  uint64_t scratch_begin, scratch_end; /* of the op that runs, for the machine's checks */
  int32_t ones_each; /* 16-bit words of new scratch memory, of which the first has ones; 0: all have */
} gpu_state;

static bsh_cuda_context context_of(const char *const op) {
  return (bsh_cuda_context){.op = op, .sm = gpu_state.sm, .sms = gpu_state.sms};
}

/* ---- the driver ---- */

bsh_status bsh_cuda_launch(const bsh_cuda_context *const context, bsh_cuda_kernel *const kernel,
                           const bsh_cuda_launch_shape *const shape, void **const arguments) {
#define NAME(stem) #stem,
  static const char *const files[] = {BSH_FATBINS(NAME)};
  const uint32_t cluster = shape->cluster > 1 ? shape->cluster : 1;
  if (gpu_state.launch(files[kernel->fatbin], kernel->name, shape->grid, shape->block, cluster,
                       (uint32_t)shape->shared_bytes, arguments))
    return bsh_fail(BSH_CUDA_ERROR, "%s: %s failed", context->op, kernel->name);
  return BSH_OK;
}

/* A map is its description: as machine.c reads it. */
bool bsh_cuda_has_tensor_maps(void) { return gpu_state.sm >= 90; }
bsh_status bsh_cuda_tensor_map(const bsh_cuda_context *const context, const bsh_map_of *const what,
                               bsh_tensor_map *const map) {
  (void)context;
  _Static_assert(sizeof *what <= sizeof *map, "a map's description must fit in its place");
  memcpy(map, what, sizeof *what);
  return BSH_OK;
}

bsh_status bsh_cuda_zero(const bsh_cuda_context *const context, void *const data, const int64_t n_bytes) {
  (void)context;
  memset(data, 0, (size_t)n_bytes);
  return BSH_OK;
}

/* Filled with NaN: what is read before it is written shows. Or as gpu_state says, with zeros between. */
bsh_status bsh_cuda_scratch_new(const bsh_cuda_context *const context, const int64_t n_bytes,
                                bsh_cuda_scratch *const scratch) {
  (void)context;
  const size_t rounded = ((size_t)n_bytes + 255) / 256 * 256;
  *scratch = (bsh_cuda_scratch){.data = aligned_alloc(256, rounded)};
  memset(scratch->data, gpu_state.ones_each ? 0 : 0xFF, rounded);
  for (size_t i = 0; gpu_state.ones_each && i < rounded / 2; i += (size_t)gpu_state.ones_each)
    ((uint16_t *)scratch->data)[i] = 0xFFFF;
  gpu_state.scratch_begin = (uint64_t)(uintptr_t)scratch->data;
  gpu_state.scratch_end = gpu_state.scratch_begin + (uint64_t)n_bytes;
  return BSH_OK;
}
bsh_status bsh_cuda_scratch_of(const bsh_cuda_context *const context, const int64_t n, const int32_t torch_dtype,
                               const int64_t itemsize, bsh_cuda_scratch *const scratch) {
  (void)torch_dtype;
  return bsh_cuda_scratch_new(context, n * itemsize, scratch);
}
void bsh_cuda_scratch_delete(bsh_cuda_scratch *const scratch) {
  free(scratch->data);
  *scratch = (bsh_cuda_scratch){0};
  gpu_state.scratch_begin = gpu_state.scratch_end = 0;
}

int64_t bsh_cuda_workspace_bytes(void) { return gpu_state.workspace_bytes; }
int32_t bsh_torch_dtype(const bsh_dtype dtype) { return (int32_t)dtype; }

/* ---- the vendor's product, in double ---- */

static double element(const bsh_torch_matrix *const m, const int64_t row, const int64_t column, const bsh_dtype dtype) {
  const int64_t at = m->offset + row * m->row_stride + column * m->column_stride;
  if (dtype == BSH_F32) return ((const float *)m->data)[at];
  const uint16_t *const half = (const uint16_t *)m->data + at;
  return dtype == BSH_F16 ? f16_to_f32(*half) : bf16_to_f32(*half);
}

static void store(const bsh_torch_matrix *const m, const int64_t row, const int64_t column, const bsh_dtype dtype,
                  const float value) {
  const int64_t at = m->offset + row * m->row_stride + column * m->column_stride;
  if (dtype == BSH_F32) ((float *)(uintptr_t)m->data)[at] = value;
  else ((uint16_t *)(uintptr_t)m->data)[at] = dtype == BSH_F16 ? f32_to_f16(value) : f32_to_bf16(value);
}

bool bsh_cublas_usable(void) { return true; }

bsh_status bsh_cublas_gemm(const bsh_cuda_context *const context, const bsh_dtype dtype,
                           const bsh_torch_matrix *const c, const bsh_torch_matrix *const a,
                           const bsh_torch_matrix *const b, const bsh_torch_matrix *const bias, void *const workspace,
                           const int64_t workspace_bytes) {
  (void)context, (void)workspace, (void)workspace_bytes;
  for (int64_t i = 0; i < c->rows; i++)
    for (int64_t j = 0; j < c->columns; j++) {
      double sum = bias != NULL ? element(bias, 0, j, dtype) : 0;
      for (int64_t k = 0; k < a->columns; k++) sum += element(a, i, k, dtype) * element(b, k, j, dtype);
      store(c, i, j, dtype, (float)sum);
    }
  return BSH_OK;
}

bsh_status bsh_torch_cuda_gemm(const bsh_torch_matrix *const c, const bsh_torch_matrix *const a,
                               const bsh_torch_matrix *const b, const bsh_torch_matrix *const bias) {
  (void)c, (void)a, (void)b, (void)bias;
  return bsh_fail(BSH_NO_KERNEL, "torch's product is not modelled");
}

/* ---- for Python: ops on one GPU ---- */

EXPORT const char *gpu_error(void) { return bsh_status_message(); }

/* Sizes of the structs that Python mirrors. */
EXPORT int64_t gpu_size(const int which) {
  static const size_t sizes[] = {sizeof(bsh_weight),
                                 sizeof(bsh_quantize_4bit_args),
                                 sizeof(bsh_dequantize_4bit_args),
                                 sizeof(bsh_quantize_blockwise_args),
                                 sizeof(bsh_dequantize_blockwise_args),
                                 sizeof(bsh_sort_by_expert_args),
                                 sizeof(bsh_sum_by_token_args),
                                 sizeof(bsh_search_4bit_args),
                                 sizeof(bsh_round_4bit_args),
                                 sizeof(bsh_merge_4bit_args),
                                 sizeof(bsh_product_args),
                                 sizeof(bsh_step_tensor),
                                 sizeof(bsh_quantize_int8_args),
                                 sizeof(bsh_dequantize_int8_args),
                                 sizeof(bsh_product_int8_args),
                                 sizeof(bsh_scale_product_int8_args)};
  return (int64_t)sizes[which];
}

#define OP(name)                                                                                                       \
  EXPORT int gpu_##name(const bsh_##name##_args *const args) {                                                         \
    const bsh_cuda_context context = context_of(#name);                                                                \
    return bsh_cuda_##name(args, &context);                                                                            \
  }
OP(quantize_4bit)
OP(dequantize_4bit)
OP(quantize_blockwise)
OP(dequantize_blockwise)
OP(search_4bit)
OP(sort_by_expert)
OP(sum_by_token)
OP(round_4bit)
OP(merge_4bit)
EXPORT int gpu_merge_e2m1(const bsh_merge_4bit_args *const args) {
  const bsh_cuda_context context = context_of("merge_e2m1");
  return bsh_cuda_merge_e2m1(args, &context);
}
EXPORT int gpu_merged_values(const bsh_merge_4bit_args *const args, const int64_t begin, const int64_t end,
                             float *const values) {
  const bsh_cuda_context context = context_of("merged_values");
  return bsh_cuda_merged_values(args, begin, end, values, &context);
}
OP(quantize_int8)
OP(dequantize_int8)
OP(product_int8)
OP(scale_product_int8)

EXPORT int gpu_linear_4bit_int8(const bsh_product_args *const args) {
  const bsh_cuda_context context = context_of("linear_4bit_int8");
  return bsh_cuda_linear_4bit_int8(args, &context);
}

EXPORT int gpu_checksum(const uint8_t *const bytes, const int64_t n_bytes, uint64_t *const sum) {
  const bsh_cuda_context context = context_of("checksum");
  return bsh_cuda_checksum(bytes, n_bytes, sum, &context);
}

/* A product of the op. `kernel`: forced, or NULL; `chosen` gets the name of the one that ran. */
EXPORT int gpu_product(const bsh_product_args *const args, const char *const op, const char *const kernel,
                       const char **const chosen) {
  bsh_plan plan;
  const bsh_cuda_context context = context_of(op);
  BSH_TRY(bsh_force_kernel(op, kernel));
  BSH_TRY(bsh_cuda_plan(op, args, gpu_state.sm, gpu_state.sms, BSH_VENDOR_CUBLAS, &plan));
  *chosen = bsh_kernel_name(plan.kernel);
  return bsh_cuda_product(args, &plan, &(bsh_torch_operands){0}, &context);
}

bsh_status bsh_cuda_enter(bsh_cuda_context *const context, const char *const op, const int32_t device,
                          const int64_t size0, const int64_t size1, const int64_t size2) {
  (void)device, (void)size0, (void)size1, (void)size2;
  *context = context_of(op);
  return BSH_OK;
}
void bsh_cuda_leave(bsh_cuda_context *const context) { (void)context; }

/* numbers: lr, beta1, beta2, beta3, alpha, eps, weight_decay, gnorm_scale, max_unorm, param_norm. */
EXPORT int gpu_optimizer_step(const bsh_step_tensor *const tensors, const int64_t n_tensors, const int64_t *const what,
                              const float *const numbers, const float *const map1, const float *const map2,
                              float *const unorm) {
  const bsh_step_settings settings = {what[0],    what[1],    numbers[0], numbers[1], numbers[2],  numbers[3],
                                      numbers[4], numbers[5], numbers[6], numbers[7], what[2] != 0};
  bsh_step_item *const items = calloc((size_t)n_tensors, sizeof *items);
  for (int64_t i = 0; i < n_tensors; i++)
    items[i] = (bsh_step_item){.tensor = tensors[i],
                               .settings = &settings,
                               .map1 = map1,
                               .map2 = map2,
                               .blocksize = BSH_STEP_BLOCK,
                               .unorm = unorm,
                               .max_unorm = numbers[8],
                               .param_norm = numbers[9],
                               .g_dtype = (bsh_dtype)what[3],
                               .p_dtype = (bsh_dtype)what[4]};
  const bsh_status status = bsh_step_items("optimizer_step", items, n_tensors);
  free(items);
  return status;
}

/* No step here is on the CPU. */
bsh_status bsh_cpu_optimizer_32bit(const bsh_optimizer_32bit_args *const args) {
  (void)args;
  return bsh_fail(BSH_NO_KERNEL, "a step on the CPU");
}
bsh_parallel_for_function bsh_parallel_for;
const bsh_cpu_kernels *bsh_cpu(void) { return NULL; }
const bsh_state_search *bsh_state_search_get(const float *const map, const bool keep_sign) {
  (void)map, (void)keep_sign;
  return NULL;
}
void bsh_state_search_put(const bsh_state_search *const search) { (void)search; }
