/* inputs.h - what the C tests of CPU kernels share: threads of their own, and ordinary and hostile elements. */
#ifndef BSH_INPUTS_H
#define BSH_INPUTS_H

#include <math.h>

#include "check.h"
#include "core/numerics.h"
#include "cpu/cpu.h"

/* ---- threads ---------------------------------------------------------------------------------------------------- */

static int n_threads = 1;

typedef struct {
  int64_t begin, end;
  bsh_range_function fn;
  void *ctx;
} range_task;

static void *run_range(void *const task) {
  const range_task *const t = task;
  t->fn(t->begin, t->end, t->ctx);
  return NULL;
}

/* Equal parts, one thread each; ignores `grain`, so that even the smallest work is split. */
static void threaded_for(const int64_t begin, const int64_t end, const int64_t grain, const bsh_range_function fn,
                         void *const ctx) {
  (void)grain;
  pthread_t threads[8];
  range_task tasks[8];
  const int64_t step = (end - begin + n_threads - 1) / n_threads;
  int started = 0;
  for (int64_t first = begin; first < end; first += step, started++) {
    tasks[started] = (range_task){first, first + step < end ? first + step : end, fn, ctx};
    CHECK(pthread_create(&threads[started], NULL, run_range, &tasks[started]) == 0, "no thread");
  }
  for (int i = 0; i < started; i++) pthread_join(threads[i], NULL);
}

/* ---- inputs ----------------------------------------------------------------------------------------------------- */

static const char *const dtype_names[] = {"f32", "f16", "bf16"};

/* One hostile or ordinary element; the kind is fixed for runs of 64, so that blocks of one kind exist. */
static float hostile_value(uint64_t *const state, const int kind) {
  const float unit = random_unit(state);
  switch (kind) {
  case 0:
    return 0.0f;
  case 1:
    return unit * 0x1p-130f;
  case 2:
    return random_below(state, 8) ? unit : NAN;
  case 3:
    return random_below(state, 32) ? unit : copysignf(INFINITY, unit);
  case 4:
    return unit * 0x1p127f;
  case 5:
    return unit * 0x1p-120f;
  case 6:
    return (float)(random_below(state, 33) - 16) / 16.0f; /* ratios such as 5/12 that thresholds sit on */
  case 7:
    return NAN;
  case 8:
    return (float)(random_below(state, 25) - 12) / 12.0f;
  case 9:
    return random_below(state, 4) ? unit * 0x1p-127f : unit * 0x1p-125f;
  case 10:
    return unit * 0x1p-14f;
  default:
    return unit * 3.0f;
  }
}

static void *make_input(uint64_t *const state, const int64_t n, const bsh_dtype dtype, const bool hostile) {
  void *const x = buffer(n * dtype_size(dtype));
  int kind = 99;
  for (int64_t i = 0; i < n; i++) {
    if (i % 64 == 0) kind = hostile ? (int)random_below(state, 16) : 99;
    const float value = hostile_value(state, kind);
    store_f32(x, dtype, i, value);
  }
  return x;
}

#endif
