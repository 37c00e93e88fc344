/* cpu_optimizer.c - optimizer steps on the CPU: threads, the norm of an update, and tables that encode states. */
#include "cpu.h"
#include "cpu_numerics.h"

enum { RUN = 16384 }; /* elements that a thread takes at least */

/* ---- tables of codes -------------------------------------------------------------------------------------------- */

static float from_magnitude(const uint32_t magnitude, const bool negative) {
  return bits_float(magnitude | (negative ? 0x80000000u : 0u));
}

static uint8_t encode_magnitude(const bsh_state_search *const search, const uint32_t magnitude, const bool negative) {
  const float v = from_magnitude(magnitude, negative);
  return bsh_cpu_encode_state(search->map, search->keep_sign, v, v);
}

/* The least magnitude of [first, last] with the code of `last`, where all codes before it are another. */
static uint32_t find_threshold(const bsh_state_search *const search, const uint32_t first, const uint32_t last,
                               const bool negative) {
  const uint8_t code = encode_magnitude(search, last, negative);
  uint32_t below = first, found = last;
  while (found - below > 1) {
    const uint32_t middle = below + (found - below) / 2;
    if (encode_magnitude(search, middle, negative) == code) found = middle;
    else below = middle;
  }
  return found;
}

static bool fill_cell(bsh_state_search *const search, const uint32_t i, const bool negative) {
  const uint32_t first = BSH_SEARCH_LEAST + (i << BSH_SEARCH_SHIFT);
  const uint32_t last = i + 1 == BSH_SEARCH_CELLS ? first : first + (1u << BSH_SEARCH_SHIFT) - 1;
  const int code = encode_magnitude(search, first, negative);
  const int change = encode_magnitude(search, last, negative) - code;
  if (change < -1 || change > 1) return false;
  const uint32_t threshold = change == 0 ? 0 : find_threshold(search, first, last, negative) - first;
  search->cells[i + (negative ? BSH_SEARCH_CELLS : 0)] = (uint32_t)code | (uint32_t)(change + 1) << 8 | threshold << 10;
  return true;
}

/* Zero and all that is less than the first cell have its code, and v rounded up beyond 1 the code of 1. Infinite v
 * never come to the table. */
static bool ends_are_flat(const bsh_state_search *const search, const bool negative) {
  const uint8_t least = encode_magnitude(search, BSH_SEARCH_LEAST, negative);
  const uint8_t most = encode_magnitude(search, BSH_SEARCH_MOST, negative);
  return encode_magnitude(search, 0, negative) == least && encode_magnitude(search, 0x00800000u, negative) == least &&
         encode_magnitude(search, 0x7F7FFFFFu, negative) == most;
}

/* Codes then grow with v, which finding a threshold by halving relies on. */
static bool is_ascending(const float *const map) {
  for (int i = 0; i < 255; i++)
    if (!(map[i] <= map[i + 1])) return false;
  return fabsf(map[0]) <= FLT_MAX && fabsf(map[255]) <= FLT_MAX;
}

static bool fill_search(bsh_state_search *const search) {
  if (!is_ascending(search->map)) return false;
  for (int negative = 0; negative < 2; negative++) {
    if (!ends_are_flat(search, negative)) return false;
    for (uint32_t i = 0; i < BSH_SEARCH_CELLS; i++)
      if (!fill_cell(search, i, negative)) return false;
  }
  return true;
}

const bsh_state_search *bsh_find_state_search(const float *const map, const bool keep_sign) {
  static _Thread_local bsh_state_search kept[2]; /* by keep_sign: one of each, as an optimizer has one or two maps */
  bsh_state_search *const search = &kept[keep_sign];
  if (!search->filled || memcmp(search->map, map, sizeof search->map) != 0) {
    memcpy(search->map, map, sizeof search->map);
    search->keep_sign = keep_sign;
    search->usable = fill_search(search);
    search->filled = true;
  }
  return search->usable ? search : NULL;
}

/* ---- 32-bit states ---------------------------------------------------------------------------------------------- */

enum { N_PARTS = 256, CHUNK = 1024, N_SUMS = 16 };

typedef struct {
  const bsh_optimizer_32bit_args *args;
  int64_t part; /* elements of a part, a multiple of CHUNK */
  double sums[N_PARTS];
} norm_task;

/* Element i is added to sum i mod 16, so that the order is the same however the squares were computed. */
static void norm_of_parts(const int64_t begin, const int64_t end, void *const ctx) {
  norm_task *const task = ctx;
  const bsh_cpu_optimizers *const optimizers = bsh_cpu()->optimizers;
  for (int64_t part = begin; part < end; part++) {
    const int64_t last = min_i64((part + 1) * task->part, task->args->n);
    double sums[N_SUMS] = {0};
    for (int64_t first = part * task->part; first < last; first += CHUNK) {
      const int64_t n = min_i64(CHUNK, last - first);
      float squares[CHUNK];
      optimizers->optimizer_squares(task->args, first, first + n, squares);
      for (int64_t i = 0; i < n; i++) sums[i % N_SUMS] += (double)squares[i];
    }
    for (int i = 0; i < N_SUMS; i++) task->sums[part] += sums[i];
  }
}

static float squared_norm(const bsh_optimizer_32bit_args *const args) {
  norm_task task = {.args = args, .part = divide_up(divide_up(args->n, N_PARTS), CHUNK) * CHUNK};
  if (task.part < RUN) task.part = RUN;
  const int64_t n_parts = divide_up(args->n, task.part);
  double sum = 0;
  bsh_parallel_for(0, n_parts, 1, norm_of_parts, &task);
  for (int64_t i = 0; i < n_parts; i++) sum += task.sums[i];
  return (float)sum;
}

static void step_32bit_runs(const int64_t begin, const int64_t end, void *const ctx) {
  const bsh_optimizer_32bit_args *const args = ctx;
  bsh_cpu()->optimizers->optimizer_32bit(args, begin * RUN, min_i64(end * RUN, args->n));
}

bsh_status bsh_cpu_optimizer_32bit(const bsh_optimizer_32bit_args *const args) {
  bsh_optimizer_32bit_args copy = *args;
  if (args->unorm != NULL) {
    *args->unorm = squared_norm(args);
    const float norm = sqrtf(*args->unorm), product = args->max_unorm * args->param_norm;
    const float most =
        args->algorithm == BSH_ADAM ? product : fmaf(args->max_unorm, args->param_norm, args->numbers.eps);
    if (norm > most) copy.numbers.update_scale = most / norm;
    copy.numbers.step_size *= copy.numbers.update_scale;
  }
  bsh_parallel_for(0, divide_up(args->n, RUN), 1, step_32bit_runs, &copy);
  return BSH_OK;
}

/* ---- 8-bit states ----------------------------------------------------------------------------------------------- */

static void step_8bit_blocks(const int64_t begin, const int64_t end, void *const ctx) {
  bsh_cpu()->optimizers->optimizer_8bit_blockwise(ctx, begin, end);
}

bsh_status bsh_cpu_optimizer_8bit_blockwise(const bsh_optimizer_8bit_blockwise_args *const args) {
  bsh_optimizer_8bit_blockwise_args copy = *args;
  bsh_parallel_for(0, divide_up(args->n, args->blocksize), RUN / args->blocksize, step_8bit_blocks, &copy);
  return BSH_OK;
}
