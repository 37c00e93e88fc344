/* test_ops.c - in which order the ops of products on a GPU plan, ask, allocate and compute (csrc/ops/ops.c), whoever
 * calls and whatever fails, without torch and without a GPU: both are replaced by functions that note that they were
 * called.
 */
#include "check.h"

#include "core/arithmetic.h"
#include "gpu/cublas.h"
#include "ops/ops.h"
#include "plan/product.h"
#include "torch/gemm.h"

uint64_t check_seed;

enum { F32 = 6, F16 = 5, BF16 = 15, U8 = 0, CPU = 0, CUDA = 1 };
bsh_torch_api bsh_torch = {.dtype_float32 = F32,
                           .dtype_float16 = F16,
                           .dtype_bfloat16 = BF16,
                           .dtype_uint8 = U8,
                           .dtype_int8 = 1,
                           .dtype_int64 = 4,
                           .dtype_float64 = 7,
                           .device_type_cpu = CPU,
                           .device_type_cuda = CUDA};

static char events[400];     /* of the call under test */
static const char *fails_at; /* the event that fails, or NULL */
static bool declines;        /* the caller's vendor must not multiply */
static int open_scratch, entered;

static bsh_status note(const char *const event, const bsh_status failure) {
  const size_t length = strlen(events);
  CHECK(length + strlen(event) + 2 < sizeof events, "%s", events);
  snprintf(events + length, sizeof events - length, "%s%s", length > 0 ? " " : "", event);
  if (fails_at == NULL || strcmp(fails_at, event) != 0) return BSH_OK;
  return bsh_fail(failure, "%s fails", event);
}

/* ---- the driver ---- */

bsh_status bsh_cuda_gpu(const char *const op, const int32_t device, int32_t *const sm, int32_t *const sms) {
  (void)op, (void)device;
  *sm = 90, *sms = 132;
  return note("gpu", BSH_CUDA_ERROR);
}
bsh_status bsh_cuda_enter(bsh_cuda_context *const context, const char *const op, const int32_t device,
                          const int64_t size0, const int64_t size1, const int64_t size2) {
  *context = (bsh_cuda_context){.op = op, .sizes = {size0, size1, size2}, .device = device, .sm = 90, .sms = 132};
  const bsh_status status = note("enter", BSH_CUDA_ERROR);
  entered += status == BSH_OK;
  return status;
}
void bsh_cuda_leave(bsh_cuda_context *const context) {
  (void)context;
  entered--;
  note("leave", BSH_OK);
}
bsh_status bsh_cuda_scratch_of(const bsh_cuda_context *const context, const int64_t n, const int32_t torch_dtype,
                               const int64_t itemsize, bsh_cuda_scratch *const scratch) {
  (void)context, (void)torch_dtype;
  CHECK(n * itemsize > 0, "%" PRId64 " bytes", n * itemsize);
  const bsh_status status = note("scratch", BSH_OUT_OF_MEMORY);
  *scratch = (bsh_cuda_scratch){.data = (void *)0x7000000000};
  open_scratch += status == BSH_OK;
  return status;
}
bsh_status bsh_cuda_scratch_new(const bsh_cuda_context *const context, const int64_t n_bytes,
                                bsh_cuda_scratch *const scratch) {
  return bsh_cuda_scratch_of(context, n_bytes, U8, 1, scratch);
}
void bsh_cuda_scratch_delete(bsh_cuda_scratch *const scratch) {
  open_scratch -= scratch->data != NULL;
  *scratch = (bsh_cuda_scratch){0};
}
bsh_status bsh_cuda_launch(const bsh_cuda_context *const context, bsh_cuda_kernel *const kernel,
                           const bsh_cuda_launch_shape *const shape, void **const arguments) {
  (void)context, (void)shape, (void)arguments;
  return note(strncmp(kernel->name, "dequantize", 10) == 0 ? "dequantize" : "fused", BSH_CUDA_ERROR);
}
bool bsh_cuda_has_tensor_maps(void) { return true; }
bsh_status bsh_cuda_tensor_map(const bsh_cuda_context *const context, const bsh_map_of *const what,
                               bsh_tensor_map *const map) {
  (void)context, (void)what, (void)map;
  return BSH_OK;
}
bsh_status bsh_cuda_zero(const bsh_cuda_context *const context, void *const data, const int64_t n_bytes) {
  (void)context, (void)data, (void)n_bytes;
  return BSH_OK;
}
int64_t bsh_cuda_workspace_bytes(void) { return 64 << 20; }

/* ---- vendors ---- */

bool bsh_cublas_usable(void) { return true; }
bsh_status bsh_cublas_gemm(const bsh_cuda_context *const context, const bsh_dtype dtype,
                           const bsh_torch_matrix *const c, const bsh_torch_matrix *const a,
                           const bsh_torch_matrix *const b, const bsh_torch_matrix *const bias, void *const workspace,
                           const int64_t workspace_bytes) {
  (void)context, (void)dtype, (void)c, (void)a, (void)b, (void)bias, (void)workspace, (void)workspace_bytes;
  return note("cublas", BSH_NO_KERNEL);
}
bsh_status bsh_torch_cuda_gemm(const bsh_torch_matrix *const c, const bsh_torch_matrix *const a,
                               const bsh_torch_matrix *const b, const bsh_torch_matrix *const bias) {
  (void)b, (void)bias;
  CHECK(c->tensor != NULL && a->tensor != NULL, "torch multiplies tensors");
  return note("torch", BSH_TORCH_ERROR);
}
bsh_status bsh_torch_cpu_gemm(void *const context, const bsh_dtype dtype, const bool add, void *const c,
                              const int64_t ldc, const void *const a, const int64_t lda, const void *const b,
                              const int64_t ldb_row, const int64_t ldb_col, const int64_t m, const int64_t n,
                              const int64_t k) {
  (void)context, (void)dtype, (void)add, (void)c, (void)ldc, (void)a, (void)lda, (void)b, (void)ldb_row, (void)ldb_col;
  (void)m, (void)n, (void)k;
  return note("torch on the CPU", BSH_TORCH_ERROR);
}

static AOTITorchError zero(const AtenTensorHandle tensor) {
  CHECK(tensor != NULL, "torch fills tensors");
  return note("zero", BSH_OK) != BSH_OK;
}

/* ---- who calls ---- */

static bsh_tensor tensors[8];
static int64_t shape[2];

static bsh_status read_tensor(bsh_call *const call, const int index, bsh_tensor *const tensor) {
  (void)call;
  *tensor = tensors[index];
  return BSH_OK;
}
static bsh_status new_output(bsh_call *const call, const bsh_tensor *const like, const int64_t dim,
                             const int64_t *const sizes, const int32_t dtype, bsh_tensor *const output) {
  (void)call;
  *output = *like;
  output->numel = 1, output->dim = dim, output->dtype = dtype, output->sizes = sizes;
  for (int64_t i = 0; i < dim; i++) output->numel *= sizes[i];
  return note("output", BSH_OUT_OF_MEMORY);
}
static bsh_status may_multiply(bsh_call *const call, const bsh_dtype dtype) {
  (void)call, (void)dtype;
  note("ask", BSH_OK);
  return declines ? BSH_NO_KERNEL : BSH_OK;
}
static void compute(bsh_call *const call) {
  (void)call;
  note("compute", BSH_OK);
}
static const bsh_caller dispatcher = {.tensor = read_tensor, .output = new_output, .vendor = BSH_VENDOR_TORCH};
static const bsh_caller around = {.tensor = read_tensor,
                                  .output = new_output,
                                  .vendor = BSH_VENDOR_CUBLAS,
                                  .may_multiply = may_multiply,
                                  .compute = compute};

static bsh_tensor tensor_of(const int64_t numel, const int32_t dtype, const int64_t *const sizes, const int64_t dim) {
  static char handle;
  return (bsh_tensor){.handle = (AtenTensorHandle)&handle,
                      .data = (void *)0x10000,
                      .numel = numel,
                      .dim = dim,
                      .sizes = sizes,
                      .itemsize = bsh_itemsize(dtype),
                      .dtype = dtype,
                      .device_type = CUDA};
}

/* One call of an op with bf16 [M, columns] and a weight [N, K] of plain scales; what happened is in `events`. */
static bsh_status run(const bsh_caller *const caller, const bsh_direction direction, const int64_t M, const int64_t N,
                      const int64_t K) {
  const bool forward = direction == BSH_FORWARD;
  StableIValue stack[11] = {0};
  const int first = forward ? 7 : 6;
  const int64_t numbers[] = {64, BSH_NF4, N, K};
  for (int i = 0; i < 4; i++) stack[first + i] = (StableIValue)numbers[i];
  shape[0] = M, shape[1] = forward ? K : N;
  memset(tensors, 0, sizeof tensors);
  tensors[0] = tensor_of(M * shape[1], BF16, shape, 2);
  tensors[1] = tensor_of(divide_up(N * K, 2), U8, NULL, 0);
  tensors[2] = tensor_of(divide_up(N * K, 64), F32, NULL, 0);
  bsh_call call = {.op = forward ? "linear_4bit" : "linear_4bit_dgrad", .caller = caller, .stack = stack};
  events[0] = 0;
  const bsh_status status = forward ? bsh_op_linear_4bit(&call) : bsh_op_linear_4bit_dgrad(&call);
  CHECK(open_scratch == 0 && entered == 0, "%s: left open", events);
  return status;
}

/* The same with a weight in int8, without a threshold. */
static bsh_status run_int8(const bsh_caller *const caller, const bsh_direction direction, const int64_t M,
                           const int64_t N, const int64_t K) {
  const bool forward = direction == BSH_FORWARD;
  StableIValue stack[7] = {0};
  const int first = forward ? 5 : 3;
  stack[first] = (StableIValue)N, stack[first + 1] = (StableIValue)K;
  shape[0] = M, shape[1] = forward ? K : N;
  memset(tensors, 0, sizeof tensors);
  tensors[0] = tensor_of(M * shape[1], BF16, shape, 2);
  tensors[1] = tensor_of(N * K, U8, NULL, 0);
  tensors[2] = tensor_of(N, F32, NULL, 0);
  bsh_call call = {.op = forward ? "linear_int8" : "linear_int8_dgrad", .caller = caller, .stack = stack};
  events[0] = 0;
  const bsh_status status = forward ? bsh_op_linear_int8(&call) : bsh_op_linear_int8_dgrad(&call);
  CHECK(open_scratch == 0 && entered == 0, "%s: left open", events);
  return status;
}

static void expect(const bsh_status status, const bsh_status expected, const char *const sequence) {
  CHECK(status == expected && strcmp(events, sequence) == 0, "status %d, '%s', expected %d, '%s' (%s)", status, events,
        expected, sequence, bsh_status_message());
}

int main(const int argc, char **const argv) {
  check_seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
  const bsh_direction forward = BSH_FORWARD, gradient = BSH_INPUT_GRADIENT;
  bsh_torch.aoti_torch_zero_ = zero;

  /* Planned first, allocated then, computed last; a fused product asks nobody whether it may multiply. */
  expect(run(&dispatcher, forward, 1, 4096, 4096), BSH_OK, "gpu output enter fused leave");
  expect(run(&around, forward, 1, 4096, 4096), BSH_OK, "gpu output compute enter fused leave");
  expect(run(&around, forward, 64, 14336, 4096), BSH_OK, "gpu output compute enter scratch fused fused leave");
  expect(run(&dispatcher, forward, 3, 98, 130), BSH_OK, "gpu output enter scratch dequantize torch leave");
  expect(run(&around, forward, 3, 98, 130), BSH_OK, "gpu ask output compute enter scratch dequantize cublas leave");
  expect(run(&dispatcher, gradient, 1, 98, 130), BSH_OK, "gpu output enter scratch dequantize torch leave");
  expect(run(&around, gradient, 1, 98, 130), BSH_OK, "gpu ask output compute enter scratch dequantize cublas leave");
  for (int direction = 0; direction < 2; direction++) {
    const bsh_direction which = (bsh_direction)direction;
    expect(run(&dispatcher, which, 256, 8192, 8192), BSH_OK, "gpu output enter scratch fused fused leave");
    expect(run(&around, which, 256, 8192, 8192), BSH_OK, "gpu output compute enter scratch fused fused leave");
  }
  expect(run(&dispatcher, forward, 0, 98, 130), BSH_OK, "output");
  expect(run(&around, gradient, 0, 98, 130), BSH_OK, "output");
  expect(run(&dispatcher, forward, 3, 98, 0), BSH_OK, "output zero");
  expect(run(&dispatcher, gradient, 3, 0, 130), BSH_OK, "output zero");
  for (int direction = 0; direction < 2; direction++) {
    expect(run(&dispatcher, (bsh_direction)direction, 3, direction == BSH_FORWARD ? 0 : 98, 0), BSH_OK, "output");
    expect(run(&dispatcher, (bsh_direction)direction, INT64_MAX, 0, 0), BSH_OK, "output");
  }

  /* int8 weights: codes of x, then their product; the gradient's panels are multiplied by the caller's vendor. */
  expect(run_int8(&dispatcher, forward, 1, 4096, 4096), BSH_OK, "gpu output enter fused leave");
  expect(run_int8(&around, forward, 512, 4096, 4096), BSH_OK, "gpu output compute enter scratch fused fused leave");
  expect(run_int8(&dispatcher, gradient, 4096, 4096, 4096), BSH_OK, "gpu output enter scratch dequantize torch leave");
  expect(run_int8(&around, gradient, 4096, 4096, 4096), BSH_OK,
         "gpu ask output compute enter scratch dequantize cublas leave");
  expect(run_int8(&dispatcher, forward, 3, 98, 0), BSH_OK, "output zero");
  expect(run_int8(&dispatcher, gradient, 3, 0, 96), BSH_OK, "output zero");
  expect(run_int8(&around, forward, 0, 96, 96), BSH_OK, "output");

  /* What is declined or cannot be has allocated nothing. */
  declines = true;
  expect(run(&around, forward, 3, 98, 130), BSH_NO_KERNEL, "gpu ask");
  expect(run(&around, forward, 1000, 98, 130), BSH_NO_KERNEL, "gpu ask");
  expect(run(&around, gradient, 3, 98, 130), BSH_NO_KERNEL, "gpu ask");
  expect(run(&around, forward, 1, 4096, 4096), BSH_OK, "gpu output compute enter fused leave");
  expect(run(&around, gradient, 3, 8192, 8192), BSH_OK, "gpu output compute enter scratch fused fused leave");
  expect(run_int8(&around, gradient, 4096, 4096, 4096), BSH_NO_KERNEL, "gpu ask");
  declines = false;
  CHECK(bsh_force_kernel("linear_int8", "gemv_int8") == BSH_OK, "%s", bsh_status_message());
  expect(run_int8(&dispatcher, forward, 100, 4096, 4096), BSH_NO_KERNEL, "gpu");
  CHECK(bsh_force_kernel("linear_int8", NULL) == BSH_OK, "%s", bsh_status_message());
  CHECK(bsh_force_kernel("linear_4bit", "gemv_4bit") == BSH_OK, "%s", bsh_status_message());
  expect(run(&dispatcher, forward, 3, 98, 130), BSH_NO_KERNEL, "gpu");
  expect(run(&dispatcher, forward, 100, 4096, 4096), BSH_OK, "gpu output enter fused fused leave");
  CHECK(bsh_force_kernel("linear_4bit", NULL) == BSH_OK, "%s", bsh_status_message());

  /* After a failure everything is given back, and the next call works. */
  static const struct {
    const char *event;
    bsh_status status;
    const char *sequence;
  } failures[] = {{"gpu", BSH_CUDA_ERROR, "gpu"},
                  {"output", BSH_OUT_OF_MEMORY, "gpu ask output"},
                  {"enter", BSH_CUDA_ERROR, "gpu ask output compute enter"},
                  {"scratch", BSH_OUT_OF_MEMORY, "gpu ask output compute enter scratch leave"},
                  {"dequantize", BSH_CUDA_ERROR, "gpu ask output compute enter scratch dequantize leave"},
                  {"cublas", BSH_NO_KERNEL, "gpu ask output compute enter scratch dequantize cublas leave"}};
  for (size_t i = 0; i < sizeof failures / sizeof *failures; i++)
    for (int direction = 0; direction < 2; direction++) {
      fails_at = failures[i].event;
      expect(run(&around, (bsh_direction)direction, 3, 98, 130), failures[i].status, failures[i].sequence);
      fails_at = NULL;
      expect(run(&around, (bsh_direction)direction, 3, 98, 130), BSH_OK,
             "gpu ask output compute enter scratch dequantize cublas leave");
    }
  fails_at = "fused";
  expect(run(&around, forward, 64, 14336, 4096), BSH_CUDA_ERROR, "gpu output compute enter scratch fused leave");
  expect(run(&around, gradient, 3, 8192, 8192), BSH_CUDA_ERROR, "gpu output compute enter scratch fused leave");
  fails_at = "scratch";
  expect(run(&around, gradient, 3, 8192, 8192), BSH_OUT_OF_MEMORY, "gpu output compute enter scratch leave");
  printf("test_ops: ok\n");
  return 0;
}
