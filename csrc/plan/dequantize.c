/* plan/dequantize.c - see plan/dequantize.h. */
#include "plan/dequantize.h"

#include "core/arithmetic.h"
#include "cuda/sizes/blockwise.h"

enum { BLOCKS_PER_SM = 16 }; /* for kernels whose threads loop */

int64_t bsh_looping_blocks(const int64_t n, const int32_t sms) {
  return min_i64(divide_up(n, BSH_BLOCK_THREADS), (int64_t)sms * BLOCKS_PER_SM);
}

/* A run of whole rows is one flat stretch: as rows of one span each, ended by weight.n. Needs a start at a span. */
static void flatten(bsh_dequantize_4bit_args *const args, const int64_t span) {
  const int64_t begin = args->row0 * args->columns + args->column0, n = args->n_rows * args->n_columns;
  const bool whole_rows = args->n_columns == args->columns && (args->ld == args->columns || args->n_rows == 1);
  if ((!whole_rows && args->n_rows != 1) || begin % span != 0) return;
  args->weight.n = begin + n;
  args->columns = args->n_columns = args->ld = span;
  args->row0 = begin / span;
  args->column0 = 0;
  args->n_rows = divide_up(n, span);
}

/* What the fast kernel needs: see dequantize_4bit in blockwise.cu. */
static bool fast_dequantize(const bsh_dequantize_4bit_args *const args, const int64_t span) {
  const int64_t width = span / 32, blocksize = args->weight.blocksize;
  const int64_t border = blocksize < span ? blocksize : span;
  return aligned(args->weight.packed, 4) && aligned(args->out, BSH_VECTOR_BYTES) && args->columns % border == 0 &&
         args->column0 % border == 0 && args->ld % width == 0;
}

static bsh_cuda_kernel plain[BSH_DTYPES] = BSH_BY_DTYPE(blockwise, "dequantize_4bit_", "_plain");
static bsh_cuda_kernel nested[BSH_DTYPES] = BSH_BY_DTYPE(blockwise, "dequantize_4bit_", "_nested");
static bsh_cuda_kernel exact[BSH_DTYPES] = BSH_BY_DTYPE(blockwise, "dequantize_4bit_", "_exact"); /* E2M1 */
static bsh_cuda_kernel any[BSH_DTYPES] = BSH_BY_DTYPE(blockwise, "dequantize_4bit_any_", "");

bsh_dequantize_plan bsh_plan_dequantize_4bit(const bsh_dequantize_4bit_args *const args, const int32_t sms) {
  const int64_t span = 32 * BSH_VECTOR_BYTES / dtype_size(args->dtype);
  bsh_dequantize_4bit_args tiled = *args;
  flatten(&tiled, span);
  if (!fast_dequantize(&tiled, span))
    return (bsh_dequantize_plan){&any[args->dtype], bsh_looping_blocks(args->n_rows * args->n_columns, sms), *args};
  const int64_t warps = divide_up(tiled.n_rows, BSH_WARP_TILE / span) * divide_up(tiled.n_columns, span);
  bsh_cuda_kernel *const kernel = args->weight.format == BSH_E2M1      ? exact
                                  : args->weight.scales.absmax != NULL ? plain
                                                                       : nested;
  return (bsh_dequantize_plan){&kernel[args->dtype], divide_up(warps, BSH_BLOCK_WARPS), tiled};
}
