/* gpu/merge.c - chooses and launches the kernels of cuda/elementwise/merge.cu and merge_short.cu. */
#include "gpu/ops.h"

#include "core/arithmetic.h"
#include "cuda/sizes/blockwise.h"
#include "cuda/sizes/merge.h"

typedef struct {
  bsh_cuda_kernel *kernel;
  int64_t blocks; /* of threads */
} launch;

static int64_t tiles_of(const bsh_merge_4bit_args *const args) {
  return divide_up(args->N, BSH_MERGE_TILE_ROWS) * divide_up(args->K, BSH_MERGE_TILE_COLUMNS);
}

static launch launch_of(const bsh_merge_4bit_args *const args) {
  static bsh_cuda_kernel fast[2][BSH_DTYPES] = {BSH_BY_DTYPE(merge, "merge_4bit_", "_nf4"),
                                                BSH_BY_DTYPE(merge, "merge_4bit_", "_fp4")};
  static bsh_cuda_kernel any[2][BSH_DTYPES] = {BSH_BY_DTYPE(merge, "merge_4bit_any_", "_nf4"),
                                               BSH_BY_DTYPE(merge, "merge_4bit_any_", "_fp4")};
  const bsh_weight *const weight = &args->weight;
  if (weight->blocksize != BSH_MERGE_COLUMNS || args->K % BSH_MERGE_COLUMNS != 0 || !aligned(weight->packed, 4) ||
      !aligned(args->packed, 4))
    return (launch){&any[weight->format][args->dtype],
                    divide_up(divide_up(weight->n, weight->blocksize), BSH_MERGE_WARPS)};
  return (launch){&fast[weight->format][args->dtype], tiles_of(args)};
}

/* Nested scales of what a launch of `count` blocks of threads has merged. */
static bsh_status launch_nest(const bsh_merge_4bit_args *const args, int64_t count,
                              const bsh_cuda_context *const context) {
  static bsh_cuda_kernel kernel = BSH_KERNEL(merge, "merge_4bit_nest");
  const int64_t scales = divide_up(args->weight.n, args->weight.blocksize);
  const int64_t blocks = bsh_cuda_search_blocks(scales, BSH_NESTED_BLOCKSIZE, context);
  const bsh_cuda_launch_shape shape = bsh_overlapping(blocks, BSH_BLOCK_THREADS, 1, 0);
  return bsh_cuda_launch(context, &kernel, &shape, (void *[]){(void *)(uintptr_t)args, &count});
}

static bsh_status launch_4bit(const bsh_merge_4bit_args *const args, const bsh_cuda_context *const context) {
  const launch found = launch_of(args);
  BSH_TRY(bsh_cuda_launch_blocks(context, found.kernel, found.blocks, BSH_MERGE_THREADS, true, args));
  return args->map == NULL ? BSH_OK : launch_nest(args, found.blocks, context);
}

/* `launches` with memory for the numbers of blocks of threads. */
static bsh_status with_numbers(const bsh_merge_4bit_args *const args, const int64_t n_bytes,
                               bsh_status (*const launches)(const bsh_merge_4bit_args *, const bsh_cuda_context *),
                               const bsh_cuda_context *const context) {
  bsh_cuda_scratch scratch;
  BSH_TRY(bsh_cuda_scratch_new(context, n_bytes, &scratch));
  bsh_merge_4bit_args with = *args;
  with.sums = scratch.data;
  const bsh_status status = launches(&with, context);
  bsh_cuda_scratch_delete(&scratch);
  return status;
}

bsh_status bsh_cuda_merge_4bit(const bsh_merge_4bit_args *const args, const bsh_cuda_context *const context) {
  if (args->map == NULL) return launch_4bit(args, context);
  return with_numbers(args, (int64_t)sizeof(*args->sums) * launch_of(args).blocks, launch_4bit, context);
}

static bsh_status launch_nvfp4(const bsh_merge_4bit_args *const args, const bsh_cuda_context *const context) {
  static bsh_cuda_kernel maxima[BSH_DTYPES] = BSH_BY_DTYPE(merge_short, "merge_nvfp4_maxima_", "");
  static bsh_cuda_kernel codes[BSH_DTYPES] = BSH_BY_DTYPE(merge_short, "merge_nvfp4_", "");
  static bsh_cuda_kernel scale = BSH_KERNEL(merge_short, "merge_nvfp4_scale");
  const bsh_cuda_launch_shape shape = bsh_overlapping(1, BSH_MERGE_MEAN_THREADS, 1, 0);
  int64_t tiles = tiles_of(args);
  int64_t seconds = divide_up(divide_up(args->weight.n, args->weight.blocksize), BSH_NESTED_BLOCKSIZE);
  void *arguments[] = {(void *)(uintptr_t)&args->maxima, &tiles, (void *)(uintptr_t)&args->second, &seconds};
  BSH_TRY(bsh_cuda_launch_blocks(context, &maxima[args->dtype], tiles, BSH_MERGE_THREADS, true, args));
  BSH_TRY(bsh_cuda_launch(context, &scale, &shape, arguments));
  return bsh_cuda_launch_blocks(context, &codes[args->dtype], tiles, BSH_MERGE_THREADS, true, args);
}

/* K is a multiple of 64, packed bytes are aligned to words. */
bsh_status bsh_cuda_merge_e2m1(const bsh_merge_4bit_args *const args, const bsh_cuda_context *const context) {
  static bsh_cuda_kernel mxfp4[BSH_DTYPES] = BSH_BY_DTYPE(merge_short, "merge_mxfp4_", "");
  if (args->second == NULL)
    return bsh_cuda_launch_blocks(context, &mxfp4[args->dtype], tiles_of(args), BSH_MERGE_THREADS, true, args);
  return with_numbers(args, (int64_t)sizeof(*args->maxima) * tiles_of(args), launch_nvfp4, context);
}

/* Rows decoded by the kernels of cuda/elementwise/blockwise.cu; then the adapters are added in place. */
bsh_status bsh_cuda_merged_values(const bsh_merge_4bit_args *const args, const int64_t begin, const int64_t end,
                                  float *const values, const bsh_cuda_context *const context) {
  static bsh_cuda_kernel kernels[BSH_DTYPES] = BSH_BY_DTYPE(merge, "add_adapters_", "");
  const int64_t blocks = divide_up(end - begin, BSH_MERGE_THREADS);
  const bsh_dequantize_4bit_args decode = {.weight = args->weight,
                                           .out = values,
                                           .columns = args->K,
                                           .row0 = begin / args->K,
                                           .n_rows = (end - begin) / args->K,
                                           .n_columns = args->K,
                                           .ld = args->K,
                                           .dtype = BSH_F32};
  if (blocks > INT32_MAX)
    return bsh_fail(BSH_BAD_SHAPE, "%s: %lld rows of %lld are too many for one launch", context->op,
                    (long long)decode.n_rows, (long long)args->K);
  BSH_TRY(bsh_cuda_dequantize_4bit(&decode, context));
  const bsh_cuda_launch_shape shape = bsh_overlapping(blocks, BSH_MERGE_THREADS, 1, 0);
  void *const of = (void *)(uintptr_t)args;
  return bsh_cuda_launch(
      context, &kernels[args->dtype], &shape,
      (void *[]){of, (void *)(uintptr_t)&begin, (void *)(uintptr_t)&end, (void *)(uintptr_t)&values});
}
