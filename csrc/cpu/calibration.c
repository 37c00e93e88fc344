/* cpu/calibration.c - splits the work of calibration over threads: whole blocks, or whole rows. */
#include "core/arithmetic.h"
#include "cpu/cpu.h"

enum { TILE = 16 };         /* rows or blocks that stay together: a multiple of every instruction set's lanes */
enum { WEIGHTS = 1 << 15 }; /* products that are worth a thread */

static void search_blocks(const int64_t begin, const int64_t end, void *const ctx) {
  const bsh_search_4bit_args *const args = ctx;
  const int64_t n_blocks = divide_up(args->n, args->blocksize);
  bsh_cpu()->calibration->search_4bit(args, begin * TILE, min_i64(end * TILE, n_blocks));
}

bsh_status bsh_cpu_search_4bit(const bsh_search_4bit_args *const args) {
  bsh_search_4bit_args copy = *args;
  const int64_t tiles = divide_up(divide_up(args->n, args->blocksize), TILE);
  bsh_parallel_for(0, tiles, divide_up(WEIGHTS, args->blocksize * args->G * TILE), search_blocks, &copy);
  return BSH_OK;
}

static void round_rows(const int64_t begin, const int64_t end, void *const ctx) {
  const bsh_round_4bit_args *const args = ctx;
  bsh_cpu()->calibration->round_4bit(args, begin * TILE, min_i64(end * TILE, args->N));
}

bsh_status bsh_cpu_round_4bit(const bsh_round_4bit_args *const args) {
  bsh_round_4bit_args copy = *args;
  bsh_parallel_for(0, divide_up(args->N, TILE), divide_up(WEIGHTS, args->P * args->P * TILE), round_rows, &copy);
  return BSH_OK;
}
