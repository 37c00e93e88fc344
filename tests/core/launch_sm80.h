/* launch_sm80.h - launches of gemm_4bit_sm80 and gemm_4bit_sm75 and their forms for stacks against their products: part
 * of test_launch.c. */
#include "cuda/sizes/gemm_4bit_sm75.h"

static bool is_sm75(const char *const name) { return strncmp(name, "gemm_sm75", 9) == 0; }
/* Threads, shared memory and depth of a stage of a kernel. */
static int32_t threads_of(const char *const name, const int32_t rows) {
  return is_sm75(name) ? BSH_GEMM_SM75_THREADS : bsh_gemm_sm80_threads(rows);
}
static int32_t depth_of(const char *const name) { return is_sm75(name) ? BSH_GEMM_SM75_DEPTH : 64; }
static int32_t shared_of(const char *const name, const int32_t rows) {
  return is_sm75(name) ? BSH_GEMM_SM75_SHARED_BYTES : bsh_gemm_sm80_shared_bytes(rows);
}
static int32_t grouped_of(const char *const name, const int32_t rows) {
  return is_sm75(name) ? BSH_GEMM_SM75_GROUPED_BYTES : bsh_gemm_sm80_grouped_bytes(rows);
}

/* The blocks walk through their stages as the kernel does: every stage of every tile once, and every block has some. */
static void check_shares(const bsh_gemm_sm80_cut *const cut, const int64_t blocks) {
  int64_t walked = 0, whole = 0;
  for (int64_t i = 0; i < blocks && cut->splits == 0; i++) {
    const int64_t shared = cut->shared > 0 ? cut->share + (i < cut->longer) : 0;
    walked += shared;
    int64_t own = 0;
    for (int64_t tile = cut->shared + i; tile < cut->tiles; tile += blocks) own++;
    whole += own;
    CHECK(shared + own > 0, "block %" PRId64 " has nothing to do", i);
  }
  if (cut->splits == 0)
    CHECK(walked == (int64_t)cut->shared * cut->stages && cut->shared + whole == cut->tiles,
          "%" PRId64 " of %d stages, %" PRId64 " of %d tiles", walked, cut->shared * cut->stages, whole, cut->tiles);
  else
    CHECK((cut->splits == 2 || cut->splits == 4) && blocks == (int64_t)cut->tiles * cut->splits &&
              cut->splits <= cut->stages,
          "%" PRId64 " blocks share %d tiles", blocks, cut->tiles);
}

/* Of W. A negative shift: two blocks of 16 in 32 weights. */
static int64_t last_block(const bsh_gemm_sm80_args *const args) {
  return args->block_shift < 0 ? 2 * (int64_t)args->last_half + 1 : args->last_half >> args->block_shift;
}

/* The nearest and furthest of what a thread reads of W's scales. */
static void check_scales(const char *const name, const bsh_gemm_sm80_args *const args, const bsh_weight *const weight) {
  const bool nested = weight->scales.absmax == NULL;
  const int64_t blocks = divide_up(weight->n, weight->blocksize);
  CHECK(args->last_half == weight->n / 32 - 1 && last_block(args) == blocks - 1 &&
            (args->last_half >> args->absmax_shift) == (nested ? (blocks - 1) / BSH_NESTED_BLOCKSIZE : blocks - 1),
        SHAPE ": scales of blocks of %" PRId64, SHAPE_OF(name, args), weight->blocksize);
  CHECK(nested ? args->codes == weight->scales.absmax_code && args->map == weight->scales.absmax_map
               : args->codes == weight->packed && args->map == NULL && args->absmax == weight->scales.absmax,
        SHAPE ": scales", SHAPE_OF(name, args));
  const int32_t code_of_1[BSH_4BIT_FORMATS] = {[BSH_NF4] = 15, [BSH_FP4] = 3, [BSH_E2M1] = 2};
  CHECK(args->values[code_of_1[weight->format]] == 1.f, SHAPE ": values", SHAPE_OF(name, args));
}

static void check_sm80(const char *const name, const bsh_gemm_sm80_args *const args,
                       const bsh_cuda_launch_shape *const shape, const int32_t sm, const int32_t sms) {
  const bsh_gemm_sm80_cut *const cut = &args->cut;
  const bool forward = strstr(name, "dgrad") == NULL, shares = cut->splits > 0 || cut->shared > 0;
  const int64_t width = forward ? args->N : args->K, depth = forward ? args->K : args->N, blocks = shape->grid[0];
  const int64_t at_once = cut->rows == 128 && (sm == 80 || bsh_is_wide(sm)) ? 2 : 1;
  CHECK(strstr(name, cut->rows == 128 ? "_m128" : "_m256") != NULL && (cut->rows == 128 || cut->rows == 256),
        "%s for tiles of %d rows", name, cut->rows);
  CHECK(blocks <= sms * at_once && shape->cluster <= 1, SHAPE ": %" PRId64 " blocks", SHAPE_OF(name, args), blocks);
  CHECK(!is_sm75(name) || (sm == 75 && cut->rows == 256 && !shape->overlap), "%s on sm_%d", name, (int)sm);
  CHECK((int32_t)shape->block[0] == threads_of(name, cut->rows) && shape->shared_bytes == shared_of(name, cut->rows),
        SHAPE ": %d bytes of shared memory", SHAPE_OF(name, args), (int)shape->shared_bytes);
  CHECK((int64_t)cut->row_tiles * cut->rows >= args->M && (int64_t)(cut->row_tiles - 1) * cut->rows < args->M &&
            cut->tiles == divide_up(width, 128) * cut->row_tiles && cut->stages == divide_up(depth, depth_of(name)) &&
            cut->stages < 1 << 16,
        SHAPE ": %d tiles of %d stages", SHAPE_OF(name, args), cut->tiles, cut->stages);
  check_shares(cut, blocks);
  const int64_t chunks = is_sm75(name) ? 4 : 8;
  CHECK(args->x_step == cut->rows / chunks * args->ldx * 2, SHAPE ": steps through x", SHAPE_OF(name, args));
  CHECK(!args->store_eights || (aligned(args->y, 16) && args->ldy % 8 == 0), SHAPE ": stores of 16 bytes",
        SHAPE_OF(name, args));
  CHECK(forward || args->N % 8 == 0, SHAPE ": whole chunks of dy", SHAPE_OF(name, args));
  if (!shares) return;
  const int64_t flags = cut->splits > 0 ? cut->tiles : blocks, begin = (char *)args->partial - scratch_begin;
  CHECK(flags_cleared == args->flags && counters_cleared >= flags && begin >= counters_cleared * 4 && begin % 16 == 0,
        SHAPE ": %" PRId64 " flags cleared", SHAPE_OF(name, args), counters_cleared);
  CHECK(begin + blocks * bsh_gemm_sm80_partial_bytes(cut->rows) <= scratch_bytes && scratch_bytes <= workspace,
        SHAPE ": %" PRId64 " bytes of scratch", SHAPE_OF(name, args), scratch_bytes);
  counters_cleared = 0, flags_cleared = NULL; /* the next slice wants its own */
}

/* What a thread reads of the last expert's scales, and the most tiles that a block counts. */
static void check_sm80_grouped(const char *const name, const bsh_gemm_sm80_args *const args,
                               const bsh_cuda_launch_shape *const shape, const bsh_weight *const weight,
                               const int32_t sms) {
  const bsh_gemm_sm80_cut *const cut = &args->cut;
  const bool forward = strstr(name, "dgrad") == NULL, nested = weight->scales.absmax == NULL;
  const int64_t width = forward ? args->N : args->K, depth = forward ? args->K : args->N, blocks = shape->grid[0];
  const int64_t elements = (int64_t)args->N * args->K, of_expert = elements / weight->blocksize;
  CHECK(strstr(name, cut->rows == 128 ? "_m128" : "_m256") != NULL && (cut->rows == 256 || weight->blocksize > 32),
        "%s for tiles of %d rows", name, cut->rows);
  CHECK(blocks <= 2 * sms && (int32_t)shape->block[0] == threads_of(name, cut->rows) &&
            shape->shared_bytes == grouped_of(name, cut->rows) && shape->shared_bytes <= 99 << 10,
        SHAPE ": %d bytes of shared memory", SHAPE_OF(name, args), (int)shape->shared_bytes);
  CHECK(cut->stages == divide_up(depth, depth_of(name)) && cut->shared == 0 && cut->splits == 0, SHAPE ": %d stages",
        SHAPE_OF(name, args), cut->stages);
  CHECK((args->M / cut->rows + args->experts) * divide_up(width, 128) / blocks < 1 << 16 || blocks < sms, SHAPE,
        SHAPE_OF(name, args));
  CHECK(args->experts * elements == weight->n && args->last_half == weight->n / 32 - 1 &&
            last_block(args) == weight->n / weight->blocksize - 1,
        SHAPE ": %d experts", SHAPE_OF(name, args), args->experts);
  const int64_t last = (elements / 32 - 1) >> args->absmax_shift;
  CHECK(last == args->expert_absmax - 1 && last == (nested ? (of_expert - 1) / BSH_NESTED_BLOCKSIZE : of_expert - 1),
        SHAPE ": %d scales of an expert", SHAPE_OF(name, args), args->expert_absmax);
  CHECK(aligned(args->y, 16) && args->ldy % 8 == 0 && args->N % 8 == 0, SHAPE ": stores of 16 bytes",
        SHAPE_OF(name, args));
}
