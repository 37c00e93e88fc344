/* gpu/merge.c - chooses and launches the kernels of cuda/elementwise/merge.cu. */
#include "gpu/ops.h"

#include "core/arithmetic.h"
#include "cuda/sizes/merge.h"

bsh_status bsh_cuda_merge_4bit(const bsh_merge_4bit_args *const args, const bsh_cuda_context *const context) {
  static bsh_cuda_kernel fast[2][BSH_DTYPES] = {BSH_BY_DTYPE(merge, "merge_4bit_", "_nf4"),
                                                BSH_BY_DTYPE(merge, "merge_4bit_", "_fp4")};
  static bsh_cuda_kernel any[2][BSH_DTYPES] = {BSH_BY_DTYPE(merge, "merge_4bit_any_", "_nf4"),
                                               BSH_BY_DTYPE(merge, "merge_4bit_any_", "_fp4")};
  const bsh_weight *const weight = &args->weight;
  if (weight->blocksize != BSH_MERGE_COLUMNS || args->K % BSH_MERGE_COLUMNS != 0 || !aligned(args->a, 16) ||
      !aligned(weight->packed, 4) || !aligned(args->packed, 4))
    return bsh_cuda_launch_blocks(context, &any[weight->format][args->dtype],
                                  divide_up(divide_up(weight->n, weight->blocksize), BSH_MERGE_WARPS),
                                  BSH_MERGE_THREADS, true, args);
  return bsh_cuda_launch_blocks(context, &fast[weight->format][args->dtype],
                                divide_up(args->N, BSH_MERGE_TILE_ROWS) * divide_up(args->K, BSH_MERGE_TILE_COLUMNS),
                                BSH_MERGE_THREADS, true, args);
}
