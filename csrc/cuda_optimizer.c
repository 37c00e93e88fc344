/* cuda_optimizer.c - chooses and launches the kernels of cuda/optimizer.cu. */
#include "arithmetic.h"
#include "cuda_ops.h"

enum { THREADS = 1024, WARPS = THREADS / 32, SUM_THREADS = 256 }; /* of optimizer.cu */

#define KERNEL(text, bytes) {.fatbin = BSH_FATBIN_optimizer, .name = text, .shared_bytes = bytes}
#define BY_DTYPE(prefix, bytes)                                                                                        \
  {KERNEL(prefix "f32", bytes), KERNEL(prefix "f16", bytes), KERNEL(prefix "bf16", bytes),                             \
   KERNEL(prefix "mixed", bytes)}
/* `bytes` of shared memory for each map. */
#define BY_ALGORITHM(prefix, bytes)                                                                                    \
  {BY_DTYPE(prefix "adam_", 2 * (bytes)), BY_DTYPE(prefix "momentum_", bytes),                                         \
   BY_DTYPE(prefix "rmsprop_", bytes),    BY_DTYPE(prefix "adagrad_", bytes),                                          \
   BY_DTYPE(prefix "lion_", bytes),       BY_DTYPE(prefix "ademamix_", 2 * (bytes))}

/* One block of threads for each multiprocessor, which then takes block after block: it fills its tables once. */
static uint32_t grid_of(const bsh_step_list *const list, const bsh_cuda_context *const context) {
  return (uint32_t)min_i64(divide_up(list->first[list->n_tensors], WARPS), context->sms);
}

bsh_status bsh_cuda_optimizer_step(const bsh_step_list *const list, const bsh_cuda_context *const context) {
  static bsh_cuda_kernel kernels[3][BSH_N_OPTIMIZERS][4] = {
      BY_ALGORITHM("optimizer_32bit_", 0), BY_ALGORITHM("optimizer_8bit_", BSH_STEP_TABLE_BYTES(BSH_STEP_COPIES_SM75)),
      BY_ALGORITHM("optimizer_8bit_", BSH_STEP_TABLE_BYTES(BSH_STEP_COPIES))};
  const int kind = list->map1 == NULL ? 0 : context->sm < 80 ? 1 : 2;
  const int pair = list->g_dtype == list->p_dtype ? (int)list->p_dtype : 3;
  const bsh_cuda_launch_shape shape = {
      .grid = {grid_of(list, context), 1, 1}, .block = {THREADS, 1, 1}, .overlap = true};
  void *arguments[] = {(void *)(uintptr_t)list};
  return bsh_cuda_launch(context, &kernels[kind][list->algorithm][pair], &shape, arguments);
}

static bsh_cuda_kernel *squares_kernel(const bsh_optimizer algorithm) {
  static bsh_cuda_kernel adam = KERNEL("optimizer_squares_adam", 0), momentum = KERNEL("optimizer_squares_momentum", 0);
  static bsh_cuda_kernel rmsprop = KERNEL("optimizer_squares_rmsprop", 0);
  if (algorithm == BSH_ADAM) return &adam;
  return algorithm == BSH_MOMENTUM ? &momentum : &rmsprop;
}

static bsh_status launch_norm(const bsh_step_list *const list, double *sums, float *unorm,
                              const bsh_cuda_context *const context) {
  static bsh_cuda_kernel sum = KERNEL("optimizer_sum", 0);
  int32_t n = (int32_t)grid_of(list, context);
  const bsh_cuda_launch_shape squares_shape = {.grid = {(uint32_t)n, 1, 1}, .block = {THREADS, 1, 1}, .overlap = true};
  const bsh_cuda_launch_shape sum_shape = {.grid = {1, 1, 1}, .block = {SUM_THREADS, 1, 1}, .overlap = true};
  void *squares_arguments[] = {(void *)(uintptr_t)list, &sums};
  void *sum_arguments[] = {&sums, &n, &unorm};
  BSH_TRY(bsh_cuda_launch(context, squares_kernel(list->algorithm), &squares_shape, squares_arguments));
  return bsh_cuda_launch(context, &sum, &sum_shape, sum_arguments);
}

bsh_status bsh_cuda_optimizer_norm(const bsh_step_list *const list, float *const unorm,
                                   const bsh_cuda_context *const context) {
  bsh_cuda_scratch scratch;
  BSH_TRY(bsh_cuda_scratch_new(context, (int64_t)sizeof(double) * grid_of(list, context), &scratch));
  const bsh_status status = launch_norm(list, scratch.data, unorm, context);
  bsh_cuda_scratch_delete(&scratch);
  return status;
}
