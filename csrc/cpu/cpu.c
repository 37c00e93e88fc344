/* cpu/cpu.c - the CPU backend: chooses an instruction set once, and splits the elementwise ops over threads. */
#include "cpu/cpu.h"

#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "core/numerics.h"

static void serial_for(const int64_t begin, const int64_t end, const int64_t grain, const bsh_range_function fn,
                       void *const ctx) {
  (void)grain;
  if (begin < end) fn(begin, end, ctx);
}

bsh_parallel_for_function bsh_parallel_for = serial_for;

/* ---- choosing an instruction set ------------------------------------------------------------------------------ */

typedef struct {
  const bsh_cpu_kernels *kernels;
  bool (*usable)(const bsh_cpu_features *cpu);
} candidate;

static bool always(const bsh_cpu_features *const cpu) {
  (void)cpu;
  return true;
}

#if BSH_X86_64
#define NAMES "scalar, avx2 or avx512"
static bool has_avx2(const bsh_cpu_features *const cpu) { return cpu->avx2 && cpu->fma && cpu->f16c; }

static bool has_avx512(const bsh_cpu_features *const cpu) {
  return has_avx2(cpu) && cpu->avx512f && cpu->avx512bw && cpu->avx512vl && cpu->avx512dq && cpu->avx512vbmi;
}
#elif BSH_AARCH64
#define NAMES "scalar or neon"
#else
#define NAMES "scalar"
#endif

static const candidate candidates[] = {
    {&bsh_cpu_scalar, always},
#if BSH_X86_64
    {&bsh_cpu_avx2, has_avx2},
    {&bsh_cpu_avx512, has_avx512},
#elif BSH_AARCH64
    {&bsh_cpu_neon, always},
#endif
};
enum { N_CANDIDATES = sizeof candidates / sizeof candidates[0] };

static const bsh_cpu_kernels *chosen;

const bsh_cpu_kernels *bsh_cpu(void) {
  const bsh_cpu_kernels *const kernels = __atomic_load_n(&chosen, __ATOMIC_ACQUIRE);
  if (kernels) return kernels;
  if (bsh_cpu_set_isa(NULL) != BSH_OK) __atomic_store_n(&chosen, &bsh_cpu_scalar, __ATOMIC_RELEASE);
  return __atomic_load_n(&chosen, __ATOMIC_ACQUIRE);
}

const char *bsh_cpu_isa(void) { return bsh_cpu()->isa; }

int bsh_cpu_isas(const char **const names, const int capacity) {
  int n = 0;
  for (int i = 0; i < N_CANDIDATES; i++) {
    if (!candidates[i].usable(bsh_cpu_has())) continue;
    if (n < capacity) names[n] = candidates[i].kernels->isa;
    n++;
  }
  return n;
}

static bsh_status find_isa(const char *const name, const bsh_cpu_kernels **const found) {
  for (int i = 0; i < N_CANDIDATES; i++) {
    if (strcmp(candidates[i].kernels->isa, name) != 0) continue;
    if (!candidates[i].usable(bsh_cpu_has()))
      return bsh_fail(BSH_BAD_VALUE, "this CPU does not have the instruction set %s", name);
    *found = candidates[i].kernels;
    return BSH_OK;
  }
  return bsh_fail(BSH_BAD_VALUE, "unknown instruction set \"%.32s\" (BITSHARD_ISA): use " NAMES, name);
}

bsh_status bsh_cpu_set_isa(const char *name) {
  const bsh_cpu_kernels *best = &bsh_cpu_scalar;
  for (int i = 0; i < N_CANDIDATES; i++)
    if (candidates[i].usable(bsh_cpu_has())) best = candidates[i].kernels;
  if (!name) name = getenv("BITSHARD_ISA");
  if (name && name[0]) BSH_TRY(find_isa(name, &best));
  __atomic_store_n(&chosen, best, __ATOMIC_RELEASE);
  return BSH_OK;
}

/* ---- elementwise ops: whole blocks, or runs of RUN elements, per thread ----------------------------------------- */

enum { RUN = 16384, STREAM_BYTES = 4 << 20 };

/* A large result comes as untouched memory: 8 us of page faults per 32 KiB written would be most of the time that
 * dequantizing takes. Asks for huge pages in its interior; only a hint, without effect on memory in use. */
static void advise_huge_pages(void *const out, const int64_t n_bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  if (n_bytes < STREAM_BYTES) return;
  const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
  const uintptr_t begin = ((uintptr_t)out + page - 1) / page * page;
  const uintptr_t end = ((uintptr_t)out + (uintptr_t)n_bytes) / page * page;
  (void)madvise((void *)begin, end - begin, MADV_HUGEPAGE);
#else
  (void)out, (void)n_bytes;
#endif
}

static int64_t block_grain(const int64_t blocksize) { return blocksize < RUN ? RUN / blocksize : 1; }

static void quantize_4bit_blocks(const int64_t begin, const int64_t end, void *const ctx) {
  bsh_cpu()->quantize_4bit(ctx, begin, end);
}

bsh_status bsh_cpu_quantize_4bit(const bsh_quantize_4bit_args *const args) {
  bsh_quantize_4bit_args copy = *args;
  bsh_parallel_for(0, divide_up(args->n, args->blocksize), block_grain(args->blocksize), quantize_4bit_blocks, &copy);
  return BSH_OK;
}

static void quantize_e2m1_groups(const int64_t begin, const int64_t end, void *const ctx) {
  const bsh_quantize_e2m1_args *const args = ctx;
  bsh_cpu()->quantize_e2m1(args, 32 * begin, min_i64(32 * end, args->n));
}

bsh_status bsh_cpu_quantize_e2m1(const bsh_quantize_e2m1_args *const args) {
  bsh_quantize_e2m1_args copy = *args;
  bsh_parallel_for(0, divide_up(args->n, 32), block_grain(32), quantize_e2m1_groups, &copy);
  return BSH_OK;
}

static void quantize_blockwise_blocks(const int64_t begin, const int64_t end, void *const ctx) {
  bsh_cpu()->quantize_blockwise(ctx, begin, end);
}

bsh_status bsh_cpu_quantize_blockwise(const bsh_quantize_blockwise_args *const args) {
  bsh_quantize_blockwise_args copy = *args;
  bsh_parallel_for(0, divide_up(args->n, args->blocksize), block_grain(args->blocksize), quantize_blockwise_blocks,
                   &copy);
  return BSH_OK;
}

static void dequantize_blockwise_runs(const int64_t begin, const int64_t end, void *const ctx) {
  const bsh_dequantize_blockwise_args *const args = ctx;
  bsh_cpu()->dequantize_blockwise(args, begin * RUN, min_i64(end * RUN, args->n));
}

bsh_status bsh_cpu_dequantize_blockwise(const bsh_dequantize_blockwise_args *const args) {
  bsh_dequantize_blockwise_args copy = *args;
  advise_huge_pages(args->out, args->n * dtype_size(args->dtype));
  bsh_parallel_for(0, divide_up(args->n, RUN), 1, dequantize_blockwise_runs, &copy);
  return BSH_OK;
}

/* Whole rows: runs of the flattened tensor. */
static void dequantize_4bit_runs(const int64_t begin, const int64_t end, void *const ctx) {
  const bsh_dequantize_4bit_args *const args = ctx;
  const int64_t first = args->row0 * args->columns, n = args->n_rows * args->columns;
  bsh_cpu()->decode_4bit(&(bsh_decode_run){
      .weight = &args->weight,
      .out = (char *)args->out + begin * RUN * dtype_size(args->dtype),
      .begin = first + begin * RUN,
      .end = first + min_i64(end * RUN, n),
      .rows = 1,
      .dtype = args->dtype,
      .stream = n * dtype_size(args->dtype) >= STREAM_BYTES,
  });
}

static void dequantize_4bit_rows(const int64_t begin, const int64_t end, void *const ctx) {
  const bsh_dequantize_4bit_args *const args = ctx;
  for (int64_t row = begin; row < end; row++) {
    const int64_t first = (args->row0 + row) * args->columns + args->column0;
    bsh_cpu()->decode_4bit(&(bsh_decode_run){
        .weight = &args->weight,
        .out = (char *)args->out + row * args->ld * dtype_size(args->dtype),
        .begin = first,
        .end = first + args->n_columns,
        .rows = 1,
        .dtype = args->dtype,
    });
  }
}

bsh_status bsh_cpu_dequantize_4bit(const bsh_dequantize_4bit_args *const args) {
  bsh_dequantize_4bit_args copy = *args;
  if (args->n_columns == args->columns && (args->ld == args->columns || args->n_rows == 1)) {
    advise_huge_pages(args->out, args->n_rows * args->columns * dtype_size(args->dtype));
    bsh_parallel_for(0, divide_up(args->n_rows * args->columns, RUN), 1, dequantize_4bit_runs, &copy);
  } else {
    bsh_parallel_for(0, args->n_rows, divide_up(RUN, args->n_columns + 1), dequantize_4bit_rows, &copy);
  }
  return BSH_OK;
}

/* ---- checksum ------------------------------------------------------------------------------------------------- */

enum { CHECKSUM_WORDS = 1 << 16 };

typedef struct {
  const uint8_t *bytes;
  int64_t n_bytes;
  uint64_t sum;
} checksum_task;

static uint64_t mix_word(const uint64_t word, const int64_t i) {
  uint64_t z = word + (uint64_t)(i + 1) * 0x9E3779B97F4A7C15u;
  z ^= z >> 32;
  z *= 0xD6E8FEB86659FD93u;
  return z ^ (z >> 32);
}

static void checksum_words(const int64_t begin, const int64_t end, void *const ctx) {
  checksum_task *const task = ctx;
  const int64_t n_whole = task->n_bytes / 8;
  const int64_t first = begin * CHECKSUM_WORDS;
  const int64_t last = min_i64(end * CHECKSUM_WORDS, n_whole);
  uint64_t sum = 0, word = 0;
  for (int64_t i = first; i < last; i++) {
    memcpy(&word, task->bytes + 8 * i, 8);
    sum += mix_word(word, i);
  }
  if (task->n_bytes % 8 && first <= n_whole && n_whole < end * CHECKSUM_WORDS) {
    word = 0;
    memcpy(&word, task->bytes + 8 * n_whole, (size_t)(task->n_bytes % 8));
    sum += mix_word(word, n_whole);
  }
  __atomic_fetch_add(&task->sum, sum, __ATOMIC_RELAXED);
}

uint64_t bsh_cpu_checksum(const uint8_t *const bytes, const int64_t n_bytes) {
  checksum_task task = {.bytes = bytes, .n_bytes = n_bytes};
  bsh_parallel_for(0, divide_up(divide_up(n_bytes, 8), CHECKSUM_WORDS), 1, checksum_words, &task);
  return task.sum;
}
