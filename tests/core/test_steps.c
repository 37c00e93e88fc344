/* test_steps.c - how csrc/ops/optimizer_step.c and gpu/optimizer.c put parameters into launches, without a GPU: the
 * driver is replaced by functions that note what a kernel gets. */
#include "check.h"

#include "core/arithmetic.h"
#include "gpu/ops.h"
#include "ops/optimizer_step.h"

uint64_t check_seed;

enum { MOST = 1500, SMS = 132 };

static int updated[MOST];       /* how often each parameter was, by its number, which stands in its g */
static int64_t launched, norms; /* steps, and kernels of the norm before them */
static int fail_at = -1;        /* the launch that fails */
static bsh_step_item items[MOST];
static const float map1[256], map2[256], other_map[256];

bsh_status bsh_cuda_enter(bsh_cuda_context *const context, const char *const op, const int32_t device,
                          const int64_t size0, const int64_t size1, const int64_t size2) {
  (void)size0, (void)size1, (void)size2;
  *context = (bsh_cuda_context){.op = op, .device = device, .sm = 90, .sms = SMS};
  return BSH_OK;
}
void bsh_cuda_leave(bsh_cuda_context *const context) { (void)context; }

bsh_status bsh_cuda_scratch_new(const bsh_cuda_context *const context, const int64_t n_bytes,
                                bsh_cuda_scratch *const scratch) {
  (void)context;
  CHECK(n_bytes >= 8 && n_bytes <= 8 * SMS, "%" PRId64 " bytes of sums", n_bytes);
  *scratch = (bsh_cuda_scratch){.data = (void *)0x7000000000};
  return BSH_OK;
}
void bsh_cuda_scratch_delete(bsh_cuda_scratch *const scratch) { *scratch = (bsh_cuda_scratch){0}; }

static int64_t number_of(const bsh_step_tensor *const tensor) { return (int64_t)(uintptr_t)tensor->g / 4096 - 1; }

static void check_list(const char *const name, const bsh_step_list *const list, const int32_t device) {
  CHECK(list->n_tensors > 0 && list->n_tensors <= BSH_STEP_TENSORS && list->first[0] == 0, "%s: %u parameters", name,
        list->n_tensors);
  for (uint32_t t = 0; t < list->n_tensors; t++) {
    const int64_t number = number_of(list->tensors + t);
    const bsh_step_item *const item = items + number;
    CHECK(item->device == device && item->g_dtype == list->g_dtype && item->p_dtype == list->p_dtype &&
              item->map1 == list->map1 && item->map2 == list->map2 && item->unorm == list->unorm &&
              (int64_t)list->algorithm == item->settings->algorithm && list->numbers.lr == item->settings->lr,
          "%s: parameter %" PRId64 " is in a launch of others", name, number);
    CHECK(list->first[t + 1] - list->first[t] == (uint32_t)divide_up(item->tensor.n, BSH_STEP_BLOCK),
          "%s: parameter %" PRId64 " has %u blocks", name, number, list->first[t + 1] - list->first[t]);
    updated[number]++;
  }
}

bsh_status bsh_cuda_launch(const bsh_cuda_context *const context, bsh_cuda_kernel *const kernel,
                           const bsh_cuda_launch_shape *const shape, void **const arguments) {
  CHECK(kernel->fatbin == BSH_FATBIN_optimizer && shape->grid[0] >= 1 && shape->grid[0] <= SMS, "%s: %u blocks",
        kernel->name, shape->grid[0]);
  if (strncmp(kernel->name, "optimizer_squares", 17) == 0 || strcmp(kernel->name, "optimizer_sum") == 0) {
    norms++;
    return BSH_OK;
  }
  if (launched++ == fail_at) return bsh_fail(BSH_CUDA_ERROR, "no launch");
  const bsh_step_list *const list = arguments[0];
  const char *const pair = list->g_dtype != list->p_dtype ? "_mixed"
                           : list->p_dtype == BSH_F32     ? "_f32"
                           : list->p_dtype == BSH_F16     ? "_f16"
                                                          : "_bf16";
  CHECK(strncmp(kernel->name, list->map1 != NULL ? "optimizer_8bit_" : "optimizer_32bit_", 15) == 0 &&
            strcmp(strrchr(kernel->name, '_'), pair) == 0,
        "%s for %s", kernel->name, pair);
  check_list(kernel->name, list, context->device);
  return BSH_OK;
}

static bsh_step_item item_of(const int64_t number, const bsh_step_settings *const settings, const int64_t n) {
  char *const memory = (char *)(uintptr_t)((number + 1) * 4096);
  char *const p = (char *)(uintptr_t)((number + 1) << 44); /* far from all others */
  return (bsh_step_item){.settings = settings,
                         .tensor = {.g = memory, .p = p, .state1 = memory, .state2 = memory, .n = n},
                         .map1 = map1,
                         .map2 = map2,
                         .blocksize = BSH_STEP_BLOCK,
                         .g_dtype = BSH_BF16,
                         .p_dtype = BSH_BF16};
}

static void forget(void) {
  memset(updated, 0, sizeof updated);
  launched = norms = 0, fail_at = -1;
}

/* Parameters of mixed kinds: each is updated once, in a launch of its like. */
static void any_mixture(uint64_t *const state, const int rounds) {
  const bsh_step_settings settings[2] = {{.algorithm = BSH_ADAM, .step = 3, .lr = 1.0f, .beta1 = 0.9f, .beta2 = 0.99f},
                                         {.algorithm = BSH_ADEMAMIX, .step = 1, .lr = 2.0f}};
  for (int round = 0; round < rounds; round++) {
    const int64_t n_items = 1 + random_below(state, MOST), kinds = 1 + random_below(state, 4);
    for (int64_t i = 0; i < n_items; i++) {
      const int64_t kind = random_below(state, kinds);
      items[i] = item_of(i, settings + (kind == 3), 1 + random_below(state, 5000));
      if (kind == 1) items[i].p_dtype = BSH_F32;
      if (kind == 2) items[i].map1 = other_map, items[i].device = (int32_t)random_below(state, 2);
    }
    forget();
    CHECK(bsh_step_items("steps", items, n_items) == BSH_OK, "%s", bsh_status_message());
    for (int64_t i = 0; i < n_items; i++)
      CHECK(updated[i] == 1 && items[i].done, "parameter %" PRId64 ": %d times", i, updated[i]);
    CHECK(kinds > 1 || launched == divide_up(n_items, BSH_STEP_TENSORS), "%" PRId64 " launches of %" PRId64, launched,
          n_items);
  }
}

/* One that has no room in a list waits for the next, where those that had room behind it are not updated again. */
static void too_many_blocks(void) {
  const bsh_step_settings settings = {.algorithm = BSH_LION, .step = 1};
  for (int64_t i = 0; i < 3; i++) items[i] = item_of(i, &settings, INT64_C(1) << (i == 2 ? 10 : 39));
  forget();
  CHECK(bsh_step_items("steps", items, 3) == BSH_OK && launched == 2, "%" PRId64 " launches", launched);
  for (int64_t i = 0; i < 3; i++) CHECK(updated[i] == 1, "parameter %" PRId64 ": %d times", i, updated[i]);
}

/* What was updated before a launch failed is marked, and nothing else. */
static void a_failing_launch(void) {
  const bsh_step_settings settings = {.algorithm = BSH_LION, .step = 1};
  for (int64_t i = 0; i < MOST; i++) items[i] = item_of(i, &settings, 700);
  forget();
  fail_at = 1;
  CHECK(bsh_step_items("steps", items, MOST) == BSH_CUDA_ERROR, "the second launch fails");
  for (int64_t i = 0; i < MOST; i++)
    CHECK(updated[i] == (i < BSH_STEP_TENSORS) && items[i].done == (updated[i] == 1), "parameter %" PRId64, i);
}

/* Parameters that share memory with another one, or with another one's gradient, have launches of their own. */
static void shared_memory(void) {
  const bsh_step_settings settings = {.algorithm = BSH_LION, .step = 1};
  for (int way = 0; way < 6; way++) {
    for (int64_t i = 0; i < 20; i++) items[i] = item_of(i, &settings, 700);
    char *const third = items[3].tensor.p;
    const int64_t bytes = 700 * 2;
    if (way == 1) items[17].tensor.p = third;                     /* the same */
    if (way == 2) items[17].tensor.p = third + bytes - 2;         /* one element */
    if (way == 3) items[17].tensor.p = third + bytes;             /* neighbours */
    if (way == 4) items[3].tensor.p = (char *)items[17].tensor.g; /* updated before another one reads it */
    if (way == 5) items[17].tensor.p = (char *)items[3].tensor.g + bytes - 2;
    forget();
    const bool alone = way != 0 && way != 3;
    CHECK(bsh_step_items("steps", items, 20) == BSH_OK && launched == (alone ? 20 : 1), "way %d: %" PRId64 " launches",
          way, launched);
    for (int64_t i = 0; i < 20; i++) CHECK(updated[i] == 1, "parameter %" PRId64 ": %d times", i, updated[i]);
  }
}

/* A bounded update has kernels of its own, and 8-bit blocks have 256 elements. */
static void bounds_and_blocks(void) {
  const bsh_step_settings settings = {.algorithm = BSH_MOMENTUM, .step = 1};
  float unorm[2];
  for (int i = 0; i < 2; i++) {
    items[i] = item_of(i, &settings, 1000);
    items[i].map1 = items[i].map2 = NULL, items[i].unorm = unorm + i, items[i].max_unorm = 1.0f;
  }
  forget();
  CHECK(bsh_step_items("steps", items, 2) == BSH_OK && launched == 2 && norms == 4, "%" PRId64 " launches", launched);
  items[0] = item_of(0, &settings, 1000);
  items[0].blocksize = 512;
  forget();
  CHECK(bsh_step_items("steps", items, 1) == BSH_NO_KERNEL && launched == 0, "blocks of 512 on a GPU");
  items[0] = item_of(0, &settings, INT64_C(1) << 41);
  CHECK(bsh_step_items("steps", items, 1) == BSH_BAD_SHAPE && launched == 0, "2^33 blocks");
}

int main(const int argc, char **const argv) {
  check_seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
  uint64_t state = check_seed;
  any_mixture(&state, argc > 2 ? atoi(argv[2]) : 60);
  too_many_blocks();
  a_failing_launch();
  shared_memory();
  bounds_and_blocks();
  printf("test_steps: ok, seed %" PRIu64 "\n", check_seed);
  return 0;
}
