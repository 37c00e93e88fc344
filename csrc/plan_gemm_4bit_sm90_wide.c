/* plan_gemm_4bit_sm90_wide.c - what gemm_4bit_sm90_wide.cu takes and how its tiles are shared out. */
#include "arithmetic.h"
#include "gemm_4bit_sm90_wide.h"
#include "plan_kernel.h"

enum { SLICE_ROWS = 1 << 16, LARGEST_SIDE = INT32_MAX / 1024, FLAG_THREADS = 256, SUMS_ALIGNMENT = 256 };

static const char *refuses(const bsh_facts *const facts) {
  if (facts->sm != 90 || facts->image.arch != 90 || !facts->image.this_gpu_only) return "needs sm_90a code on sm_90";
  if (!facts->tensor_maps) return "the driver makes no tensor maps";
  if (facts->sms < BSH_GEMM_WIDE_PAIR) return "fewer than 2 multiprocessors";
  if (facts->dtype == BSH_F32) return "no float32";
  if (facts->K % BSH_UNIT) return "K is no multiple of 64";
  if (facts->blocksize % BSH_UNIT) return "the blocksize is below 64";
  if (facts->N > LARGEST_SIDE || facts->K > LARGEST_SIDE || facts->N * (facts->K / BSH_UNIT) > INT32_MAX)
    return "W is too large for 32-bit indices";
  if (facts->x_alignment < 16) return "rows of x are not 16-byte aligned";
  return facts->packed_alignment < 16 ? "packed is not 16-byte aligned" : NULL;
}

#define WIDE_KERNEL(NAME) {.fatbin = BSH_FATBIN_gemm_4bit_sm90_wide, .name = NAME}
#define WIDE_FORM(form, tokens)                                                                                        \
  {{WIDE_KERNEL("gemm_wide_bf16_" #form), WIDE_KERNEL("gemm_wide_dgrad_bf16_" #form)},                                 \
   {WIDE_KERNEL("gemm_wide_f16_" #form), WIDE_KERNEL("gemm_wide_dgrad_f16_" #form)}},
static bsh_cuda_kernel kernels[2][2][2] = {BSH_GEMM_WIDE_FORMS(WIDE_FORM)}; /* [form][dtype][direction] */
static bsh_cuda_kernel clear_flags = WIDE_KERNEL("clear_flags");

/* Where tiles are fewer than pairs of multiprocessors, 4 or 2 pairs share each; else, where the last round of whole
 * tiles would leave many pairs idle, all pairs share the tiles of the last round but one and of that one. What a
 * prototype measured on an H200. */
static bsh_gemm_wide_cut share_out(bsh_gemm_wide_cut cut, const int32_t pairs) {
  const int32_t left = cut.tiles % pairs;
  if (cut.tiles < pairs) {
    const int64_t shares = min_i64(pairs / cut.tiles, cut.pieces);
    cut.scatter = shares >= 4 ? 4 : shares >= 2 ? 2 : 0;
    if (cut.scatter > 0) cut.shared = cut.tiles, cut.sharing = cut.tiles * cut.scatter;
  } else if (left > 0 && 100 * (int64_t)left < 93 * (int64_t)pairs) {
    cut.shared = left + pairs, cut.sharing = pairs;
  }
  return cut;
}

/* [flags][sums], of the blocks that share tiles. */
static void lay_out_scratch(bsh_fused_slice *const slice) {
  const int64_t blocks = (int64_t)slice->wide.sharing * BSH_GEMM_WIDE_PAIR;
  if (blocks == 0) return;
  slice->counters = (int32_t)blocks * BSH_GEMM_WIDE_CONSUMERS;
  slice->partial_at = divide_up(slice->counters * (int64_t)sizeof(uint32_t), SUMS_ALIGNMENT) * SUMS_ALIGNMENT;
  slice->scratch_bytes = slice->partial_at + blocks * bsh_gemm_wide_partial_bytes(slice->wide.tokens);
  slice->before.kernel = &clear_flags;
  slice->before.shape = (bsh_cuda_launch_shape){.grid = {1, 1, 1}, .block = {FLAG_THREADS, 1, 1}, .overlap = true};
}

static void cut(const bsh_facts *const facts, bsh_fused_slice *const slice) {
  const bool forward = facts->direction == BSH_FORWARD, many = slice->rows > 128;
  const int64_t rows = forward ? facts->N : facts->K, depth = forward ? facts->K : facts->N;
  const int32_t tokens = many ? 256 : 128, pairs = facts->sms / BSH_GEMM_WIDE_PAIR;
  bsh_gemm_wide_cut wide = {.tokens = tokens, .token_tiles = (int32_t)divide_up(slice->rows, tokens)};
  wide.tiles = (int32_t)divide_up(rows, BSH_GEMM_WIDE_ROWS * BSH_GEMM_WIDE_PAIR) * wide.token_tiles;
  wide.pieces = (int32_t)divide_up(depth, BSH_GEMM_WIDE_PIECE);
  slice->wide = share_out(wide, pairs);
  slice->block_shift = __builtin_ctzll((uint64_t)facts->blocksize / BSH_UNIT);
  slice->product.kernel = &kernels[many][facts->dtype == BSH_F16][!forward];
  const int64_t busy = slice->wide.scatter > 0 ? slice->wide.sharing : min_i64(wide.tiles, pairs);
  const int32_t together = slice->wide.scatter > 0 ? slice->wide.scatter : 1; /* pairs that wait for one another */
  slice->product.shape = (bsh_cuda_launch_shape){.grid = {(uint32_t)busy * BSH_GEMM_WIDE_PAIR, 1, 1},
                                                 .block = {BSH_GEMM_WIDE_THREADS, 1, 1},
                                                 .cluster = (uint32_t)(BSH_GEMM_WIDE_PAIR * together),
                                                 .shared_bytes = bsh_gemm_wide_shared_bytes(tokens),
                                                 .overlap = true};
  lay_out_scratch(slice);
}

const bsh_fused_kernel bsh_plan_gemm_4bit_sm90_wide = {.rows = SLICE_ROWS, .refuses = refuses, .cut = cut};
