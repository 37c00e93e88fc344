/* cpu/merge.c - adapters merged into a packed weight, a tile at a time: decode, add, quantize, or leave it in fp32. A
 * thread owns tiles. */
#include "core/arithmetic.h"
#include "core/e2m1.h"
#include "cpu/cpu.h"

enum { TILE = 4096, GRAIN = 4 }; /* elements of a tile, a multiple of every block; tiles that are worth a thread */

/* Elements [begin, end) of the sum, in fp32. */
static void add_to_tile(const bsh_merge_4bit_args *const args, const int64_t begin, const int64_t end,
                        float *const values) {
  const bsh_cpu_kernels *const kernels = bsh_cpu();
  kernels->decode_4bit(&(bsh_decode_run){
      .weight = &args->weight, .out = values, .begin = begin, .end = end, .rows = 1, .dtype = BSH_F32});
  kernels->add_adapters(args, begin, end, values);
}

static void merge_tiles(const int64_t tile_begin, const int64_t tile_end, void *const ctx) {
  const bsh_merge_4bit_args *const args = ctx;
  const bsh_weight *const weight = &args->weight;
  float values[TILE];
  for (int64_t tile = tile_begin; tile < tile_end; tile++) {
    const int64_t begin = tile * TILE, end = min_i64(begin + TILE, weight->n);
    const bsh_quantize_4bit_args quantize = {.x = values,
                                             .packed = args->packed + begin / 2,
                                             .absmax = args->absmax + begin / weight->blocksize,
                                             .n = end - begin,
                                             .blocksize = weight->blocksize,
                                             .dtype = BSH_F32,
                                             .format = weight->format};
    add_to_tile(args, begin, end, values);
    bsh_cpu()->quantize_4bit(&quantize, 0, divide_up(end - begin, weight->blocksize));
  }
}

static float mean_of(const float *const scales, const int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; i++) sum += scales[i];
  return (float)(sum * (1.0 / (double)n));
}

bsh_status bsh_cpu_merge_4bit(const bsh_merge_4bit_args *const args) {
  bsh_merge_4bit_args copy = *args;
  bsh_parallel_for(0, divide_up(args->weight.n, TILE), GRAIN, merge_tiles, &copy);
  if (args->map == NULL) return BSH_OK;
  const int64_t n = divide_up(args->weight.n, args->weight.blocksize);
  *args->mean = mean_of(args->absmax, n);
  return bsh_cpu_quantize_blockwise(&(bsh_quantize_blockwise_args){.x = args->absmax,
                                                                   .map = args->map,
                                                                   .offset = args->mean,
                                                                   .code = args->scales8,
                                                                   .absmax = args->second,
                                                                   .n = n,
                                                                   .blocksize = BSH_NESTED_BLOCKSIZE,
                                                                   .dtype = BSH_F32});
}

/* MXFP4 and NVFP4: args->maxima, one number, becomes the largest magnitude as bits, by which a NaN is the largest. */
static void largest_of_tiles(const int64_t tile_begin, const int64_t tile_end, void *const ctx) {
  const bsh_merge_4bit_args *const args = ctx;
  float values[TILE];
  uint32_t most = 0;
  for (int64_t tile = tile_begin; tile < tile_end; tile++) {
    const int64_t begin = tile * TILE, end = min_i64(begin + TILE, args->weight.n);
    add_to_tile(args, begin, end, values);
    for (int64_t i = 0; i < end - begin; i++) {
      const uint32_t bits = float_bits(values[i]) & 0x7FFFFFFFu;
      most = bits > most ? bits : most;
    }
  }
  uint32_t old = __atomic_load_n(args->maxima, __ATOMIC_RELAXED);
  while (old < most &&
         !__atomic_compare_exchange_n(args->maxima, &old, most, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

static void short_tiles(const int64_t tile_begin, const int64_t tile_end, void *const ctx) {
  const bsh_merge_4bit_args *const args = ctx;
  float values[TILE];
  for (int64_t tile = tile_begin; tile < tile_end; tile++) {
    const int64_t begin = tile * TILE, end = min_i64(begin + TILE, args->weight.n);
    const bsh_quantize_e2m1_args quantize = {.x = values,
                                             .packed = args->packed + begin / 2,
                                             .scales = args->scales8 + begin / args->weight.blocksize,
                                             .whole = args->second,
                                             .n = end - begin,
                                             .dtype = BSH_F32};
    add_to_tile(args, begin, end, values);
    bsh_cpu()->quantize_e2m1(&quantize, 0, end - begin);
  }
}

bsh_status bsh_cpu_merge_e2m1(const bsh_merge_4bit_args *const args) {
  const int64_t tiles = divide_up(args->weight.n, TILE);
  const int64_t seconds = divide_up(divide_up(args->weight.n, args->weight.blocksize), BSH_NESTED_BLOCKSIZE);
  bsh_merge_4bit_args copy = *args;
  uint32_t largest = 0;
  copy.maxima = &largest;
  if (args->second) {
    bsh_parallel_for(0, tiles, GRAIN, largest_of_tiles, &copy);
    for (int64_t i = 0; i < seconds; i++) args->second[i] = bsh_global_scale(bits_float(largest));
  }
  bsh_parallel_for(0, tiles, GRAIN, short_tiles, &copy);
  return BSH_OK;
}

typedef struct {
  const bsh_merge_4bit_args *args;
  int64_t begin, end;
  float *values;
} value_run;

static void value_tiles(const int64_t tile_begin, const int64_t tile_end, void *const ctx) {
  const value_run *const run = ctx;
  for (int64_t tile = tile_begin; tile < tile_end; tile++) {
    const int64_t begin = run->begin + tile * TILE;
    add_to_tile(run->args, begin, min_i64(begin + TILE, run->end), run->values + tile * TILE);
  }
}

bsh_status bsh_cpu_merged_values(const bsh_merge_4bit_args *const args, const int64_t begin, const int64_t end,
                                 float *const values) {
  value_run run = {args, begin, end, values};
  bsh_parallel_for(0, divide_up(end - begin, TILE), GRAIN, value_tiles, &run);
  return BSH_OK;
}
