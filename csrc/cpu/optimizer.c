/* cpu/optimizer.c - optimizer steps on the CPU: threads, the norm of an update, and tables that encode states. */
#include <pthread.h>

#include "core/numerics.h"
#include "cpu/cpu.h"
#include "cpu/state_search.h"

enum { RUN = 16384 }; /* elements that a thread takes at least */

/* ---- tables of codes -------------------------------------------------------------------------------------------- */

static uint8_t encode_magnitude(const bsh_state_search *const search, const uint32_t magnitude, const bool negative) {
  const float v = bits_float(magnitude | (negative ? 0x80000000u : 0u));
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

/* Cells [i, last_i] alike; false where they have more than one threshold, or several cells one. */
static bool fill_cells(bsh_state_search *const search, const uint32_t i, const uint32_t last_i, const bool negative) {
  const uint32_t first = i << 16, last = (last_i << 16) + 0xFFFF;
  const int code = encode_magnitude(search, first, negative);
  const int change = encode_magnitude(search, last, negative) - code;
  if (change != 0 && (i != last_i || change != (negative ? -1 : 1))) return false;
  const uint32_t rest = change == 0 ? 0 : 0x10000 - (find_threshold(search, first, last, negative) - first);
  const uint32_t base = negative ? 0xFF000000u + ((255 - (uint32_t)code) << 16) : (uint32_t)code << 16;
  for (uint32_t cell = i + (negative ? BSH_SEARCH_SIGN : 0), n = last_i - i + 1; n > 0; n--, cell++)
    search->cells[cell] = base + rest - (cell << 16);
  return true;
}

/* Codes then grow with v, which finding a threshold by halving relies on. */
static bool is_ascending(const float *const map) {
  for (int i = 0; i < 255; i++)
    if (!(map[i] <= map[i + 1])) return false;
  return fabsf(map[0]) <= FLT_MAX && fabsf(map[255]) <= FLT_MAX;
}

static bool fill_table(bsh_state_search *const search) {
  if (!is_ascending(search->map)) return false;
  for (int negative = 0; negative < 2; negative++) {
    if (!fill_cells(search, 0, BSH_SEARCH_LEAST - 1, negative)) return false;
    for (uint32_t i = BSH_SEARCH_LEAST; i <= BSH_SEARCH_MOST; i++)
      if (!fill_cells(search, i, i, negative)) return false;
  }
  return true;
}

static void fill_search(bsh_state_search *const search, const float *const map, const bool keep_sign) {
  memcpy(search->map, map, sizeof search->map);
  search->keep_sign = keep_sign;
  search->least = FLT_MAX;
  for (int i = 0; i < 256; i++) {
    const float value = search->flushed[i] = flush_denormal(map[i]), magnitude = fabsf(value);
    if (magnitude > 0.0f && magnitude < search->least) search->least = magnitude;
  }
  search->usable = fill_table(search);
}

enum { N_SEARCHES = 8 }; /* maps that are known at a time: an optimizer has two */
static pthread_mutex_t search_lock = PTHREAD_MUTEX_INITIALIZER;

/* The table of this map, else the one that was not used for longest, filled anew; NULL where all are in use. */
static bsh_state_search *find_search(const float *const map, const bool keep_sign) {
  static bsh_state_search searches[N_SEARCHES];
  bsh_state_search *oldest = NULL;
  for (bsh_state_search *s = searches; s < searches + N_SEARCHES; s++) {
    if (s->last_use > 0 && s->keep_sign == keep_sign && memcmp(s->map, map, sizeof s->map) == 0) return s;
    if (s->users == 0 && (oldest == NULL || s->last_use < oldest->last_use)) oldest = s;
  }
  if (oldest != NULL) fill_search(oldest, map, keep_sign);
  return oldest;
}

const bsh_state_search *bsh_state_search_get(const float *const map, const bool keep_sign) {
  static int64_t uses;
  pthread_mutex_lock(&search_lock);
  bsh_state_search *const search = find_search(map, keep_sign);
  if (search != NULL) search->last_use = ++uses;
  const bool usable = search != NULL && search->usable;
  if (usable) search->users++;
  pthread_mutex_unlock(&search_lock);
  return usable ? search : NULL;
}

void bsh_state_search_put(const bsh_state_search *const search) {
  if (search == NULL) return;
  pthread_mutex_lock(&search_lock);
  ((bsh_state_search *)(uintptr_t)search)->users--;
  pthread_mutex_unlock(&search_lock);
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

typedef struct {
  const bsh_optimizer_8bit_blockwise_args *args;
  const bsh_state_search *search1, *search2;
} blocks_task;

static void step_8bit_blocks(const int64_t begin, const int64_t end, void *const ctx) {
  const blocks_task *const task = ctx;
  bsh_cpu()->optimizers->optimizer_8bit_blockwise(task->args, task->search1, task->search2, begin, end);
}

bsh_status bsh_cpu_optimizer_8bit_blockwise(const bsh_optimizer_8bit_blockwise_args *const args) {
  const bool two = BSH_HAS_SECOND_STATE(args->algorithm);
  blocks_task task = {.args = args,
                      .search1 = bsh_state_search_get(args->map1, true),
                      .search2 = two ? bsh_state_search_get(args->map2, false) : NULL};
  bsh_parallel_for(0, divide_up(args->n, args->blocksize), RUN / args->blocksize, step_8bit_blocks, &task);
  bsh_state_search_put(task.search1);
  bsh_state_search_put(task.search2);
  return BSH_OK;
}
