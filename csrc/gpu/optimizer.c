/* gpu/optimizer.c - chooses and launches the kernels of cuda/elementwise/optimizer.cu. */
#include "core/arithmetic.h"
#include "gpu/ops.h"

enum { THREADS = BSH_STEP_THREADS, WARPS = THREADS / 32, SUM_THREADS = 256 }; /* of optimizer.cu */

#define KERNEL(text) BSH_KERNEL(optimizer, text)
#define BY_DTYPE(prefix) {KERNEL(prefix "f32"), KERNEL(prefix "f16"), KERNEL(prefix "bf16"), KERNEL(prefix "mixed")}
#define BY_ALGORITHM(prefix)                                                                                           \
  {BY_DTYPE(prefix "adam_"),    BY_DTYPE(prefix "momentum_"), BY_DTYPE(prefix "rmsprop_"),                             \
   BY_DTYPE(prefix "adagrad_"), BY_DTYPE(prefix "lion_"),     BY_DTYPE(prefix "ademamix_")}

/* One block of threads for each multiprocessor, which then takes block after block: it fills its tables once. */
static uint32_t grid_of(const bsh_step_list *const list, const bsh_cuda_context *const context) {
  return (uint32_t)min_i64(divide_up(list->first[list->n_tensors], WARPS), context->sms);
}

bsh_status bsh_cuda_optimizer_step(const bsh_step_list *const list, const bsh_cuda_context *const context) {
  static bsh_cuda_kernel kernels[2][BSH_N_OPTIMIZERS][4] = {BY_ALGORITHM("optimizer_32bit_"),
                                                            BY_ALGORITHM("optimizer_8bit_")};
  const bool blockwise = list->map1 != NULL;
  const int pair = list->g_dtype == list->p_dtype ? (int)list->p_dtype : 3;
  const bsh_cuda_launch_shape shape = {.grid = {grid_of(list, context), 1, 1},
                                       .block = {THREADS, 1, 1},
                                       .shared_bytes = blockwise && context->sm >= 80 ? BSH_STEP_COPIES_BYTES : 0,
                                       .overlap = true};
  void *arguments[] = {(void *)(uintptr_t)list};
  return bsh_cuda_launch(context, &kernels[blockwise][list->algorithm][pair], &shape, arguments);
}

static bsh_cuda_kernel *squares_kernel(const bsh_optimizer algorithm) {
  static bsh_cuda_kernel adam = KERNEL("optimizer_squares_adam"), momentum = KERNEL("optimizer_squares_momentum");
  static bsh_cuda_kernel rmsprop = KERNEL("optimizer_squares_rmsprop");
  if (algorithm == BSH_ADAM) return &adam;
  return algorithm == BSH_MOMENTUM ? &momentum : &rmsprop;
}

static bsh_status launch_norm(const bsh_step_list *const list, double *sums, float *unorm,
                              const bsh_cuda_context *const context) {
  static bsh_cuda_kernel sum = KERNEL("optimizer_sum");
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
