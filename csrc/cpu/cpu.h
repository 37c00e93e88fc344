/* cpu/cpu.h - the CPU backend: one function per op, and the table of kernels behind them.
 *
 *   ops/ops.c -> bsh_cpu_<op>() (cpu.c, linear.c: threads, panels) -> bsh_cpu_kernels of one instruction set
 *
 * Arguments were checked in ops/ops.c. Results never depend on the number of threads: a thread owns whole blocks, rows
 * or columns. */
#ifndef BSH_CPU_H
#define BSH_CPU_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

#include "core/kernels.h"
#include "core/status.h"
#include "cpu/features.h"
#include "cpu/int8.h"
#include "cpu/state_search.h"

/* Calls fn on disjoint ranges that cover [begin, end), each of at least `grain` where possible, perhaps at the same
 * time, and returns when all are done. Serial until ops/ops.c sets it to torch_parallel_for. */
typedef void (*bsh_range_function)(int64_t begin, int64_t end, void *ctx);
typedef void (*bsh_parallel_for_function)(int64_t begin, int64_t end, int64_t grain, bsh_range_function fn, void *ctx);
extern bsh_parallel_for_function bsh_parallel_for;

/* The vendor GEMM: c[m, n] = a[m, k] b[k, n], all of one dtype, with `add` c += a b; c is rounded once. Rows of c are
 * ldc and rows of a lda elements apart; element (i, j) of b is b[i * ldb_row + j * ldb_col]. A NULL pointer instead of
 * this struct means plain loops. */
typedef struct {
  bsh_status (*mm)(void *ctx, bsh_dtype dtype, bool add, void *c, int64_t ldc, const void *a, int64_t lda,
                   const void *b, int64_t ldb_row, int64_t ldb_col, int64_t m, int64_t n, int64_t k);
  void *ctx;
} bsh_cpu_gemm;

bsh_status bsh_cpu_quantize_4bit(const bsh_quantize_4bit_args *args);

/* x [n] to MXFP4, or where `whole` is its global scale to NVFP4 (docs/formats.md): packed u8 [ceil(n / 2)], scales u8
 * [ceil(n / 32)] (E8M0) or [ceil(n / 16)] (E4M3). A block with a value that is not finite has the scale NaN. */
typedef struct {
  const void *x;
  const float *whole; /* f32 [1], or NULL */
  uint8_t *packed, *scales;
  int64_t n;
  bsh_dtype dtype;
} bsh_quantize_e2m1_args;
bsh_status bsh_cpu_quantize_e2m1(const bsh_quantize_e2m1_args *args);
bsh_status bsh_cpu_dequantize_4bit(const bsh_dequantize_4bit_args *args);
bsh_status bsh_cpu_quantize_blockwise(const bsh_quantize_blockwise_args *args);
bsh_status bsh_cpu_dequantize_blockwise(const bsh_dequantize_blockwise_args *args);

/* M up to 16 decodes as it multiplies and allocates nothing. Larger M goes through panels of W and `gemm`, with at most
 * 60 MiB of workspace (cpu/linear.c). */
bsh_status bsh_cpu_linear_4bit(const bsh_product_args *args, const bsh_cpu_gemm *gemm);

/* The same for a stack of weights. BSH_BAD_VALUE where offs do not ascend, or end beyond the rows. */
bsh_status bsh_cpu_grouped_linear_4bit(const bsh_product_args *args, const bsh_cpu_gemm *gemm);

/* Any product, by one of these or of cpu/int8.h. No size is zero but the terms of a 4-bit sum. */
bsh_status bsh_cpu_product(const bsh_product_args *args, const bsh_cpu_gemm *gemm);

/* Pairs of tokens and experts. BSH_BAD_VALUE where `back` is no place of a row of y. */
bsh_status bsh_cpu_sort_by_expert(const bsh_sort_by_expert_args *args);
bsh_status bsh_cpu_sum_by_token(const bsh_sum_by_token_args *args);

/* One step in place. The norm that max_unorm needs is added in double, in an order that depends on n alone. */
bsh_status bsh_cpu_optimizer_32bit(const bsh_optimizer_32bit_args *args);
bsh_status bsh_cpu_optimizer_8bit_blockwise(const bsh_optimizer_8bit_blockwise_args *args);

/* Scales and codes of calibration (docs/calibration.md). */
bsh_status bsh_cpu_search_4bit(const bsh_search_4bit_args *args);
bsh_status bsh_cpu_round_4bit(const bsh_round_4bit_args *args);

/* Adapters merged into a weight (docs/merging.md). */
bsh_status bsh_cpu_merge_4bit(const bsh_merge_4bit_args *args);
bsh_status bsh_cpu_merge_e2m1(const bsh_merge_4bit_args *args);
/* Elements [begin, end) of the sum in fp32, not quantized. The weight may be E2M1; packed and absmax are not used. */
bsh_status bsh_cpu_merged_values(const bsh_merge_4bit_args *args, int64_t begin, int64_t end, float *values);

/* Bytes, zero-padded to 8, as little-endian words w_i: sum mod 2^64 of mix(w_i + (i + 1) * 0x9E3779B97F4A7C15) with
 * mix(z): z ^= z >> 32; z *= 0xD6E8FEB86659FD93; z ^= z >> 32. Equal on CPU and CUDA. */
uint64_t bsh_cpu_checksum(const uint8_t *bytes, int64_t n_bytes);

/* The instruction set in use: "scalar", "avx2", "avx512" or "neon"; the best one this CPU has, or what BITSHARD_ISA
 * names. */
const char *bsh_cpu_isa(void);

/* Number of instruction sets usable here; names[i], worst first, are written for i < capacity. */
int bsh_cpu_isas(const char **names, int capacity);

/* Chooses an instruction set by name; NULL chooses as at start-up. A name unknown or not usable here is an error and
 * changes nothing. Call once at import, so that a wrong BITSHARD_ISA is reported there. */
bsh_status bsh_cpu_set_isa(const char *name);

/* ---- below: for csrc/cpu and tests ---------------------------------------------------------------------------------
 */

/* Memory from a multiple of 64 on; NULL where there is none. */
static inline void *bsh_cpu_memory(const int64_t n_bytes) {
  return aligned_alloc(64, (size_t)((n_bytes + 64) / 64 * 64));
}

/* The same for one of several threads: where there is none, `missing` tells all of them. */
static inline void *bsh_cpu_memory_of_thread(const int64_t n_bytes, bool *const missing) {
  void *const memory = bsh_cpu_memory(n_bytes);
  if (memory == NULL) __atomic_store_n(missing, true, __ATOMIC_RELAXED);
  return memory;
}

enum { BSH_CPU_SMALL_M = 16 }; /* rows of x up to which linear_4bit decodes in registers */

/* A product of few rows in units that any thread may take: how many there are, how many of M rows each make a task
 * worth a thread, and the product of units [begin, end). */
int64_t bsh_cpu_small_units(const bsh_product_args *args);
int64_t bsh_cpu_small_grain(const bsh_product_args *args, int64_t M);
void bsh_cpu_multiply_small(const bsh_product_args *args, int64_t begin, int64_t end);

/* Runs of the flattened W, [begin, end) and rows - 1 more, each `step` elements after the one before, decoded one after
 * the other to out[0 ...]. Each value is rounded to `dtype`; with `as_f32` it is then stored as fp32. `stream`: out is
 * large and not read soon, bypass the cache. */
typedef struct {
  const bsh_weight *weight;
  void *out;
  int64_t begin, end, rows, step;
  bsh_dtype dtype;
  bool as_f32, stream;
} bsh_decode_run;

/* Single-threaded optimizers of one instruction set, equal bit for bit. search1 and search2 are of
 * map1 and map2; NULL where there is none. */
typedef struct {
  void (*optimizer_32bit)(const bsh_optimizer_32bit_args *args, int64_t begin, int64_t end);
  void (*optimizer_squares)(const bsh_optimizer_32bit_args *args, int64_t begin, int64_t end, float *out);
  void (*optimizer_8bit_blockwise)(const bsh_optimizer_8bit_blockwise_args *args, const bsh_state_search *search1,
                                   const bsh_state_search *search2, int64_t block_begin, int64_t block_end);
} bsh_cpu_optimizers;

extern const bsh_cpu_optimizers bsh_cpu_scalar_optimizers;

/* Single-threaded calibration of one instruction set, equal bit for bit. */
typedef struct {
  void (*search_4bit)(const bsh_search_4bit_args *args, int64_t block_begin, int64_t block_end);
  void (*round_4bit)(const bsh_round_4bit_args *args, int64_t row_begin, int64_t row_end);
} bsh_cpu_calibration;

extern const bsh_cpu_calibration bsh_cpu_scalar_calibration;

/* Code of a state for v = state / absmax: the nearest entry of the map, and with keep_sign its neighbour where that has
 * the other sign (the neighbour of 255 is 0): a small negative moment does not become zero. */
uint8_t bsh_cpu_encode_state(const float *map, bool keep_sign, float v, float state);

/* The codes and the scale of a block of n new states. */
void bsh_cpu_requantize(const float *states, int64_t n, const float *map, bool keep_sign, uint8_t *code, float *absmax);

/* Single-threaded kernels of one instruction set. */
typedef struct {
  const char *isa;
  void (*quantize_4bit)(const bsh_quantize_4bit_args *args, int64_t block_begin, int64_t block_end);
  void (*quantize_e2m1)(const bsh_quantize_e2m1_args *args, int64_t begin, int64_t end); /* begin: a multiple of 32 */
  void (*decode_4bit)(const bsh_decode_run *run);
  void (*quantize_blockwise)(const bsh_quantize_blockwise_args *args, int64_t block_begin, int64_t block_end);
  void (*dequantize_blockwise)(const bsh_dequantize_blockwise_args *args, int64_t begin, int64_t end);
  void (*linear_4bit)(const bsh_product_args *args, int64_t row_begin, int64_t row_end); /* M <= BSH_CPU_SMALL_M */
  void (*linear_4bit_dgrad)(const bsh_product_args *args, int64_t column_begin, int64_t column_end); /* same */
  void (*to_f32)(const void *x, bsh_dtype dtype, float *out, int64_t n);
  void (*from_f32)(const float *x, bsh_dtype dtype, void *out, int64_t n);
  /* values[0 ...]: elements [begin, end) of W in fp32, to which the adapters are added */
  void (*add_adapters)(const bsh_merge_4bit_args *args, int64_t begin, int64_t end, float *values);
  const bsh_cpu_optimizers *optimizers;
  const bsh_cpu_calibration *calibration;
  const bsh_cpu_int8_kernels *int8;
} bsh_cpu_kernels;

/* Each one in a file of its name; not all are in every build: the list is in cpu.c. */
extern const bsh_cpu_kernels bsh_cpu_scalar;
extern const bsh_cpu_kernels bsh_cpu_avx2;   /* AVX2, FMA, F16C */
extern const bsh_cpu_kernels bsh_cpu_avx512; /* AVX-512 F, BW, VL, DQ, VBMI */
extern const bsh_cpu_kernels bsh_cpu_neon;   /* every 64-bit Arm CPU */

const bsh_cpu_kernels *bsh_cpu(void);

/* Whether this CPU has bf16 dot products (AVX512-BF16; every CPU with AMX has it too). torch then multiplies bf16
 * faster than fp32 (benchmarks/results), and so do we. Not measured on Arm. */
static inline bool bsh_cpu_fast_bf16(void) { return bsh_cpu_has()->avx512bf16 && bsh_cpu_has()->avx512vbmi; }

#endif
