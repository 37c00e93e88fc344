/* cuda_blockwise.c - chooses and launches the kernels of cuda/blockwise.cu. */
#include "cuda_ops.h"

#include "arithmetic.h"
#include "blockwise.h"

enum { BLOCKS_PER_SM = 16 };       /* for kernels whose threads loop */
enum { SEARCH_BLOCKS_PER_SM = 4 }; /* blocks that fill a search table first: as many as run at once */

#define DTYPES 3 /* kernels below are indexed by bsh_dtype: f32, f16, bf16 */
#define BY_DTYPE(prefix, suffix)                                                                                       \
  {                                                                                                                    \
      {.fatbin = BSH_FATBIN_blockwise, .name = prefix "f32" suffix},                                                   \
      {.fatbin = BSH_FATBIN_blockwise, .name = prefix "f16" suffix},                                                   \
      {.fatbin = BSH_FATBIN_blockwise, .name = prefix "bf16" suffix},                                                  \
  }

/* Launches `blocks` blocks of BSH_BLOCK_THREADS threads; the only kernel parameter is the argument struct. */
static bsh_status launch(const bsh_cuda_context *const context, bsh_cuda_kernel *const kernel, const int64_t blocks,
                         const void *const args) {
  if (blocks > INT32_MAX)
    return bsh_fail(BSH_BAD_SHAPE, "%s: tensor too large: %lld blocks of threads", context->op, (long long)blocks);
  const bsh_cuda_launch_shape shape = {
      .grid = {(uint32_t)blocks, 1, 1}, .block = {BSH_BLOCK_THREADS, 1, 1}, .overlap = true};
  void *arguments[] = {(void *)(uintptr_t)args};
  return bsh_cuda_launch(context, kernel, &shape, arguments);
}

/* Blocks for a kernel whose threads loop over `n` elements. */
static int64_t looping_blocks(const bsh_cuda_context *const context, const int64_t n) {
  return min_i64(divide_up(n, BSH_BLOCK_THREADS), (int64_t)context->sms * BLOCKS_PER_SM);
}

/* ---- dequantize_4bit ---- */

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

bsh_status bsh_cuda_dequantize_4bit(const bsh_dequantize_4bit_args *const args, const bsh_cuda_context *const context) {
  static bsh_cuda_kernel plain[DTYPES] = BY_DTYPE("dequantize_4bit_", "_plain");
  static bsh_cuda_kernel nested[DTYPES] = BY_DTYPE("dequantize_4bit_", "_nested");
  static bsh_cuda_kernel any[DTYPES] = BY_DTYPE("dequantize_4bit_any_", "");
  const int64_t span = 32 * BSH_VECTOR_BYTES / dtype_size(args->dtype);
  bsh_dequantize_4bit_args tiled = *args;
  flatten(&tiled, span);
  if (!fast_dequantize(&tiled, span))
    return launch(context, &any[args->dtype], looping_blocks(context, args->n_rows * args->n_columns), args);
  const int64_t warps = divide_up(tiled.n_rows, BSH_WARP_TILE / span) * divide_up(tiled.n_columns, span);
  bsh_cuda_kernel *const kernel = args->weight.scales.absmax != NULL ? plain : nested;
  return launch(context, &kernel[args->dtype], divide_up(warps, BSH_BLOCK_WARPS), &tiled);
}

/* ---- quantize_4bit ---- */

bsh_status bsh_cuda_quantize_4bit(const bsh_quantize_4bit_args *const args, const bsh_cuda_context *const context) {
  static bsh_cuda_kernel fast[2][DTYPES] = {BY_DTYPE("quantize_4bit_", "_nf4"), BY_DTYPE("quantize_4bit_", "_fp4")};
  static bsh_cuda_kernel any[2][DTYPES] = {BY_DTYPE("quantize_4bit_any_", "_nf4"),
                                           BY_DTYPE("quantize_4bit_any_", "_fp4")};
  if (args->blocksize <= BSH_WARP_TILE && aligned(args->x, BSH_VECTOR_BYTES) && aligned(args->packed, 4))
    return launch(context, &fast[args->format][args->dtype], divide_up(args->n, BSH_BLOCK_WARPS * BSH_WARP_TILE), args);
  return launch(context, &any[args->format][args->dtype],
                divide_up(divide_up(args->n, args->blocksize), BSH_BLOCK_WARPS), args);
}

/* ---- 8-bit blocks ---- */

bsh_status bsh_cuda_quantize_blockwise(const bsh_quantize_blockwise_args *const args,
                                       const bsh_cuda_context *const context) {
  static bsh_cuda_kernel kernels[DTYPES] = BY_DTYPE("quantize_blockwise_", "");
  const int64_t all = divide_up(divide_up(args->n, args->blocksize), BSH_BLOCK_WARPS);
  const int64_t most = (int64_t)context->sms * SEARCH_BLOCKS_PER_SM;
  return launch(context, &kernels[args->dtype], min_i64(all, most), args);
}

bsh_status bsh_cuda_dequantize_blockwise(const bsh_dequantize_blockwise_args *const args,
                                         const bsh_cuda_context *const context) {
  static bsh_cuda_kernel fast[DTYPES] = BY_DTYPE("dequantize_blockwise_", "");
  static bsh_cuda_kernel any[DTYPES] = BY_DTYPE("dequantize_blockwise_any_", "");
  if (aligned(args->code, 8) && aligned(args->out, BSH_VECTOR_BYTES))
    return launch(context, &fast[args->dtype], divide_up(args->n, BSH_BLOCK_WARPS * BSH_WARP_TILE), args);
  return launch(context, &any[args->dtype], looping_blocks(context, args->n), args);
}

/* ---- checksum ---- */

bsh_status bsh_cuda_checksum(const uint8_t *const bytes, const int64_t n_bytes, uint64_t *const sum,
                             const bsh_cuda_context *const context) {
  static bsh_cuda_kernel kernel = {.fatbin = BSH_FATBIN_blockwise, .name = "checksum"};
  BSH_TRY(bsh_cuda_zero(context, sum, sizeof *sum));
  if (n_bytes == 0) return BSH_OK;
  const bsh_cuda_launch_shape shape = {.grid = {(uint32_t)looping_blocks(context, divide_up(n_bytes, 8)), 1, 1},
                                       .block = {BSH_BLOCK_THREADS, 1, 1}};
  void *arguments[] = {(void *)(uintptr_t)&bytes, (void *)(uintptr_t)&n_bytes, (void *)(uintptr_t)&sum};
  return bsh_cuda_launch(context, &kernel, &shape, arguments);
}
