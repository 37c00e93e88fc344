/* ops/optimizer_step.c - see ops/optimizer_step.h. */
#include "ops/optimizer_step.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#include "core/arithmetic.h"
#include "core/numerics.h"
#include "core/packed.h"
#include "cpu/cpu.h"
#include "gpu/ops.h"

/* ---- numbers ---- */

bsh_status bsh_step_check(const char *const op, const bsh_step_settings *const settings) {
  if (settings->algorithm < 0 || settings->algorithm >= BSH_N_OPTIMIZERS)
    return bsh_fail(BSH_BAD_VALUE, "%s: there is no algorithm %" PRId64 ": they are numbered 0 to %d", op,
                    settings->algorithm, BSH_N_OPTIMIZERS - 1);
  if (settings->step >= 1) return BSH_OK;
  return bsh_fail(BSH_BAD_VALUE, "%s: step is %" PRId64 ": the first step is 1", op, settings->step);
}

static bsh_step_numbers numbers_of(const bsh_step_item *const item) {
  const bsh_step_settings *const s = item->settings;
  const double unbiased1 = 1.0 - pow(s->beta1, (double)s->step), unbiased2 = 1.0 - pow(s->beta2, (double)s->step);
  const bsh_dtype round = item->g_dtype == item->p_dtype ? item->p_dtype : BSH_F32;
  const float correction1 = (float)unbiased1, correction2 = (float)sqrt(unbiased2);
  return (bsh_step_numbers){
      .beta1 = s->beta1,
      .beta2 = s->beta2,
      .beta3 = s->beta3,
      .rest1 = 1.0f - s->beta1,
      .rest2 = 1.0f - s->beta2,
      .rest3 = 1.0f - s->beta3,
      .lr = s->lr,
      .alpha = s->alpha,
      .eps = s->eps,
      .weight_decay = s->weight_decay,
      .gnorm_scale = s->gnorm_scale,
      .stored_lr = round_to_dtype(s->lr, round),
      .decay = fmaf(-s->lr, s->weight_decay, 1.0f),
      .correction1 = correction1,
      .correction2 = correction2,
      .inverse1 = (float)(1.0 / unbiased1),
      .inverse2 = (float)(1.0 / unbiased2),
      .step_size = -s->lr * correction2 / correction1,
      .scaled_eps = s->eps * correction2,
      .update_scale = 1.0f,
      .round = round,
      .first = s->step == 1,
      .skip_zeros = s->skip_zeros,
  };
}

int64_t bsh_first_moments(const bsh_optimizer algorithm) { return algorithm == BSH_ADEMAMIX ? 2 : 1; }

/* ---- memory ---- */

typedef struct {
  const char *argument;
  const void *data; /* NULL where there is none */
  int64_t bytes;
} span;

static bool apart(const span *const a, const span *const b) {
  const uintptr_t from_a = (uintptr_t)a->data, from_b = (uintptr_t)b->data;
  return !from_a || !from_b || from_a + (uintptr_t)a->bytes <= from_b || from_b + (uintptr_t)b->bytes <= from_a;
}

bsh_status bsh_step_apart(const char *const op, const bsh_step_item *const item) {
  const bsh_step_tensor *const t = &item->tensor;
  const int64_t moments = bsh_first_moments((bsh_optimizer)item->settings->algorithm);
  const int64_t state_bytes = item->map1 != NULL ? t->n : t->n * 4;
  const int64_t absmax_bytes = item->map1 != NULL ? bsh_block_count(t->n, item->blocksize) * 4 : 0;
  const span spans[] = {{"p", t->p, t->n * dtype_size(item->p_dtype)},
                        {"state1", t->state1, moments * state_bytes},
                        {"state2", t->state2, state_bytes},
                        {"absmax1", t->absmax1, moments * absmax_bytes},
                        {"absmax2", t->absmax2, absmax_bytes},
                        {"unorm", item->unorm, 4},
                        {"g", t->g, t->n * dtype_size(item->g_dtype)},
                        {"qmap1", item->map1, 256 * 4},
                        {"qmap2", item->map2, 256 * 4}};
  enum { N_CHANGED = 6, N_SPANS = sizeof spans / sizeof *spans };
  for (int i = 0; i < N_CHANGED; i++)
    for (int j = i + 1; j < N_SPANS; j++)
      if (!apart(spans + i, spans + j))
        return bsh_fail(BSH_BAD_VALUE, "%s: %s and %s share memory, and %s is changed in place", op, spans[i].argument,
                        spans[j].argument, spans[i].argument);
  return BSH_OK;
}

/* What one item of several reads or writes. */
typedef struct {
  uintptr_t begin, end;
  bool is_written;
} range;

static int compare_ranges(const void *const a, const void *const b) {
  const uintptr_t first = ((const range *)a)->begin, second = ((const range *)b)->begin;
  return (first > second) - (first < second);
}

static range range_of(const void *const data, const int64_t bytes, const bool is_written) {
  return (range){.begin = (uintptr_t)data, .end = (uintptr_t)data + (uintptr_t)bytes, .is_written = is_written};
}

/* Whether each begins behind all that are written before it, and a written one behind all. In order of `begin`. */
static bool ranges_are_apart(const range *const ranges, const int64_t n) {
  uintptr_t written = 0, any = 0; /* ends */
  for (int64_t i = 0; i < n; i++) {
    const range *const r = ranges + i;
    if (r->begin == 0 || r->begin == r->end) continue;
    if (r->begin < (r->is_written ? any : written)) return false;
    if (r->end > any) any = r->end;
    if (r->is_written && r->end > written) written = r->end;
  }
  return true;
}

/* Whether no parameter shares memory with another one or its gradient: then the order of items does not matter. States
 * are an optimizer's own. False also where that cannot be told. */
static bool items_are_apart(const bsh_step_item *const items, const int64_t n_items) {
  if (n_items == 1) return true;
  range *const ranges = calloc(2 * (size_t)n_items, sizeof *ranges);
  if (ranges == NULL) return false;
  for (int64_t i = 0; i < n_items; i++) {
    const bsh_step_tensor *const t = &items[i].tensor;
    ranges[2 * i] = range_of(t->p, t->n * dtype_size(items[i].p_dtype), true);
    ranges[2 * i + 1] = range_of(t->g, t->n * dtype_size(items[i].g_dtype), false);
  }
  qsort(ranges, 2 * (size_t)n_items, sizeof *ranges, compare_ranges);
  const bool result = ranges_are_apart(ranges, 2 * n_items);
  free(ranges);
  return result;
}

/* ---- on the CPU ---- */

static bsh_optimizer_32bit_args args_32bit(const bsh_step_item *const item, const bsh_step_numbers *const numbers) {
  const bsh_step_tensor *const t = &item->tensor;
  return (bsh_optimizer_32bit_args){.g = t->g,
                                    .p = t->p,
                                    .state1 = t->state1,
                                    .state2 = t->state2,
                                    .unorm = item->unorm,
                                    .max_unorm = item->max_unorm,
                                    .param_norm = item->param_norm,
                                    .n = t->n,
                                    .g_dtype = item->g_dtype,
                                    .p_dtype = item->p_dtype,
                                    .algorithm = (bsh_optimizer)item->settings->algorithm,
                                    .numbers = *numbers};
}

static bsh_optimizer_8bit_blockwise_args args_8bit(const bsh_step_item *const item,
                                                   const bsh_step_numbers *const numbers) {
  const bsh_step_tensor *const t = &item->tensor;
  return (bsh_optimizer_8bit_blockwise_args){.g = t->g,
                                             .p = t->p,
                                             .state1 = t->state1,
                                             .state2 = t->state2,
                                             .map1 = item->map1,
                                             .map2 = item->map2,
                                             .absmax1 = t->absmax1,
                                             .absmax2 = t->absmax2,
                                             .n = t->n,
                                             .blocksize = item->blocksize,
                                             .g_dtype = item->g_dtype,
                                             .p_dtype = item->p_dtype,
                                             .algorithm = (bsh_optimizer)item->settings->algorithm,
                                             .numbers = *numbers};
}

/* RUN elements of a parameter stay together, a multiple of every blocksize; a thread takes at least GRAIN elements. */
enum { RUN = BSH_MAX_BLOCKSIZE, GRAIN = 4 * RUN };

/* Parameters of one loop: the items, whose 8-bit states have the same maps. */
typedef struct {
  const bsh_step_item *items;
  int64_t n_items;
  const bsh_state_search *search1, *search2;
} cpu_batch;

static void step_runs(const cpu_batch *const batch, const bsh_step_item *const item,
                      const bsh_step_numbers *const numbers, const int64_t begin, const int64_t end) {
  const bsh_cpu_optimizers *const optimizers = bsh_cpu()->optimizers;
  const int64_t n = item->tensor.n;
  if (item->map1 == NULL) {
    const bsh_optimizer_32bit_args args = args_32bit(item, numbers);
    optimizers->optimizer_32bit(&args, begin * RUN, min_i64(end * RUN, n));
    return;
  }
  const bsh_optimizer_8bit_blockwise_args args = args_8bit(item, numbers);
  const int64_t blocks = RUN / item->blocksize, last = min_i64(end * blocks, divide_up(n, item->blocksize));
  optimizers->optimizer_8bit_blockwise(&args, batch->search1, batch->search2, begin * blocks, last);
}

static int64_t first_item(const cpu_batch *const batch, const int64_t run) {
  int64_t below = -1, found = batch->n_items - 1; /* items[found].end > run */
  while (found - below > 1) {
    const int64_t middle = below + (found - below) / 2;
    if (batch->items[middle].end > run) found = middle;
    else below = middle;
  }
  return found;
}

static void step_batch_runs(const int64_t begin, const int64_t end, void *const ctx) {
  const cpu_batch *const batch = ctx;
  const bsh_step_item *item = batch->items + first_item(batch, begin), *known = NULL;
  bsh_step_numbers numbers = {0};
  for (int64_t run = begin; run < end; item++) {
    if (item->tensor.n == 0) continue;
    if (known == NULL || known->settings != item->settings || known->g_dtype != item->g_dtype ||
        known->p_dtype != item->p_dtype)
      numbers = numbers_of(item);
    known = item;
    const int64_t first = item->end - divide_up(item->tensor.n, RUN), last = min_i64(end, item->end);
    step_runs(batch, item, &numbers, run - first, last - first);
    run = last;
  }
}

/* How many items from the first on one loop can update. */
static int64_t batch_size(const bsh_step_item *const items, const int64_t n_items) {
  const bsh_step_item *mapped = NULL; /* the first with maps: they are looked up once */
  int64_t n = 0;
  for (; n < n_items; n++) {
    const bsh_step_item *const item = items + n;
    if (item->done || item->device != BSH_ON_CPU || item->unorm != NULL) break;
    if (item->map1 == NULL) continue;
    if (mapped == NULL) mapped = item;
    if (item->map1 != mapped->map1 || (item->map2 != NULL && mapped->map2 != NULL && item->map2 != mapped->map2)) break;
    if (item->map2 != NULL) mapped = item;
  }
  return n;
}

static void step_batch(bsh_step_item *const items, const int64_t n_items) {
  const float *map1 = NULL, *map2 = NULL;
  int64_t runs = 0, elements = 1;
  for (int64_t i = 0; i < n_items; i++) {
    elements += items[i].tensor.n;
    runs += divide_up(items[i].tensor.n, RUN);
    items[i].end = runs;
    if (items[i].map1 != NULL) map1 = items[i].map1;
    if (items[i].map2 != NULL) map2 = items[i].map2;
  }
  cpu_batch batch = {.items = items,
                     .n_items = n_items,
                     .search1 = map1 != NULL ? bsh_state_search_get(map1, true) : NULL,
                     .search2 = map2 != NULL ? bsh_state_search_get(map2, false) : NULL};
  bsh_parallel_for(0, runs, divide_up(GRAIN * runs, elements), step_batch_runs, &batch);
  bsh_state_search_put(batch.search1);
  bsh_state_search_put(batch.search2);
  for (int64_t i = 0; i < n_items; i++) items[i].done = true;
}

/* items[0] and what can go with it. */
static bsh_status step_on_cpu(bsh_step_item *const items, const int64_t n_items) {
  const int64_t n = batch_size(items, n_items);
  if (n > 0) {
    step_batch(items, n);
    return BSH_OK;
  }
  const bsh_step_numbers numbers = numbers_of(items);
  const bsh_optimizer_32bit_args args = args_32bit(items, &numbers); /* with a norm, which 8-bit states do not have */
  BSH_TRY(bsh_cpu_optimizer_32bit(&args));
  items->done = true;
  return BSH_OK;
}

/* ---- on a GPU ---- */

/* False where the list is full. */
static bool append(bsh_step_list *const list, const bsh_step_tensor *const tensor) {
  const int64_t end = list->first[list->n_tensors] + divide_up(tensor->n, BSH_STEP_BLOCK);
  if (list->n_tensors == BSH_STEP_TENSORS || end > UINT32_MAX) return false;
  list->tensors[list->n_tensors++] = *tensor;
  list->first[list->n_tensors] = (uint32_t)end;
  return true;
}

/* Launches `list`, whose update is bounded where unorm is not NULL. */
static bsh_status launch(const char *const op, bsh_step_list *const list, float *const unorm, const int32_t device) {
  bsh_cuda_context context;
  BSH_TRY(bsh_cuda_enter(&context, op, device, list->tensors[0].n, list->n_tensors, 0));
  bsh_status status = unorm != NULL ? bsh_cuda_optimizer_norm(list, unorm, &context) : BSH_OK;
  list->unorm = unorm;
  if (status == BSH_OK) status = bsh_cuda_optimizer_step(list, &context);
  bsh_cuda_leave(&context);
  return status;
}

/* Whether one launch can update both. A bounded update is launched alone. */
static bool alike(const bsh_step_item *const a, const bsh_step_item *const b) {
  return a->settings == b->settings && a->device == b->device && a->g_dtype == b->g_dtype && a->p_dtype == b->p_dtype &&
         a->map1 == b->map1 && a->map2 == b->map2 && a->unorm == NULL && b->unorm == NULL;
}

/* items[0] and what is like it behind, as much as a list holds. */
static bsh_status step_on_gpu(const char *const op, bsh_step_item *const items, const int64_t n_items) {
  if (items->map1 != NULL && items->blocksize != BSH_STEP_BLOCK)
    return bsh_fail(BSH_NO_KERNEL, "%s: blocksize is %" PRId64 ": on a GPU it must be %d", op, items->blocksize,
                    BSH_STEP_BLOCK);
  bsh_step_list list = {.numbers = numbers_of(items),
                        .algorithm = (bsh_optimizer)items->settings->algorithm,
                        .g_dtype = items->g_dtype,
                        .p_dtype = items->p_dtype,
                        .map1 = items->map1,
                        .map2 = items->map2,
                        .max_unorm = items->max_unorm,
                        .param_norm = items->param_norm};
  if (!append(&list, &items->tensor))
    return bsh_fail(BSH_BAD_SHAPE, "%s: tensor too large: %" PRId64 " elements", op, items->tensor.n);
  int64_t taken[BSH_STEP_TENSORS] = {0}; /* items[0] first */
  for (int64_t i = 1; i < n_items && list.n_tensors < BSH_STEP_TENSORS; i++)
    if (!items[i].done && alike(items, items + i) && append(&list, &items[i].tensor)) taken[list.n_tensors - 1] = i;
  BSH_TRY(launch(op, &list, items->unorm, items->device));
  for (uint32_t t = 0; t < list.n_tensors; t++) items[taken[t]].done = true;
  return BSH_OK;
}

bsh_status bsh_step_items(const char *const op, bsh_step_item *const items, const int64_t n_items) {
  const bool in_any_order = items_are_apart(items, n_items);
  for (int64_t i = 0; i < n_items; i++) {
    if (items[i].done) continue;
    const int64_t n = in_any_order ? n_items - i : 1;
    if (items[i].device != BSH_ON_CPU) BSH_TRY(step_on_gpu(op, items + i, n));
    else BSH_TRY(step_on_cpu(items + i, n));
  }
  return BSH_OK;
}
