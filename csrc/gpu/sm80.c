/* gpu/sm80.c - launches of the kernels whose parameters are bsh_gemm_sm80_args. */
#include "core/arithmetic.h"
#include "core/formats.h"
#include "core/stack.h"
#include "cuda/sizes/gemm_4bit_sm75.h"
#include "gpu/product.h"

#include <string.h>

enum { HALF_UNIT = BSH_UNIT / 2 };

/* Nested: a block's code is in the map; plain: see bsh_gemm_sm80_args. */
static void set_weight(const bsh_weight *const weight, const bsh_plan_slice *const slice,
                       bsh_gemm_sm80_args *const of_kernel) {
  static const float values[BSH_4BIT_FORMATS][16] = BSH_4BIT_VALUES;
  const bsh_scales *const scales = &weight->scales;
  const bool nested = scales->absmax == NULL;
  of_kernel->packed = weight->packed;
  of_kernel->codes = nested ? scales->absmax_code : weight->packed;
  of_kernel->map = nested ? scales->absmax_map : NULL;
  of_kernel->absmax = nested ? scales->absmax2 : scales->absmax;
  of_kernel->offset = scales->offset;
  of_kernel->block_shift = slice->block_shift;
  of_kernel->absmax_shift = slice->block_shift + (nested ? __builtin_ctz(BSH_NESTED_BLOCKSIZE) : 0);
  of_kernel->last_half = (uint32_t)(weight->n / HALF_UNIT - 1);
  memcpy(of_kernel->values, values[weight->format], sizeof of_kernel->values);
}

static void set_stack(const bsh_product_args *const args, bsh_gemm_sm80_args *const of_kernel) {
  const bsh_weight *const stack = &args->weight;
  const int64_t blocks = stack->n / args->E / stack->blocksize;
  const bool nested = stack->scales.absmax == NULL;
  of_kernel->offs = args->offs;
  of_kernel->experts = (int32_t)args->E;
  of_kernel->expert_absmax = (int32_t)(nested ? bsh_expert_scales2(stack->n, args->E, stack->blocksize) : blocks);
}

/* step: rows between those of which a thread loads x. */
static bsh_status launch(const bsh_product_args *const args, const bsh_plan_slice *const slice, char *const memory,
                         const bsh_cuda_context *const context, const int64_t step) {
  const int64_t size = dtype_size(args->dtype);
  bsh_gemm_sm80_args of_kernel = {
      .x = args->x,
      .bias = args->bias,
      .y = args->y,
      .ldx = args->ldx,
      .ldy = args->ldy,
      .x_step = step * args->ldx * size,
      .M = (int32_t)args->M,
      .N = (int32_t)args->N,
      .K = (int32_t)args->K,
      .store_eights = slice->stores_together,
      .cut = slice->sm80,
  };
  set_weight(&args->weight, slice, &of_kernel);
  if (args->E > 0) set_stack(args, &of_kernel);
  void *arguments[] = {&of_kernel};
  if (memory != NULL) {
    of_kernel.flags = (uint32_t *)memory;
    of_kernel.partial = (float *)(memory + slice->partial_at);
    BSH_TRY(bsh_cuda_zero(context, memory, slice->counters * (int64_t)sizeof(uint32_t)));
  }
  return bsh_cuda_launch(context, slice->product.kernel, &slice->product.shape, arguments);
}

bsh_status bsh_launch_sm80(const bsh_product_args *const args, const bsh_plan_slice *const slice, char *const memory,
                           const bsh_cuda_context *const context) {
  return launch(args, slice, memory, context, bsh_gemm_sm80_x_step(slice->sm80.rows));
}

bsh_status bsh_launch_sm75(const bsh_product_args *const args, const bsh_plan_slice *const slice, char *const memory,
                           const bsh_cuda_context *const context) {
  return launch(args, slice, memory, context, BSH_GEMM_SM75_X_STEP);
}
