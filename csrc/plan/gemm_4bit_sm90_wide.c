/* plan/gemm_4bit_sm90_wide.c - what gemm_4bit_sm90_wide.cu takes and how its tiles are shared out. */
#include "core/arithmetic.h"
#include "cuda/gemm_4bit_sm90_wide.h"
#include "plan/kernel.h"

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
static bsh_cuda_kernel kernels[][2][2] = {BSH_GEMM_WIDE_FORMS(WIDE_FORM)}; /* [form][dtype][direction] */
static bsh_cuda_kernel clear_flags = WIDE_KERNEL("clear_flags");

/* ---- how long it takes, in nanoseconds on an H200 under load: benchmarks/results/wide_h200_202611.md ---- */

/* A piece of a tile of each form: forward in bf16; in fp16, where W is rounded exactly from 192 tokens on; gradient. */
#define WIDE_TOKENS(form, tokens) tokens,
static const int32_t form_tokens[] = {BSH_GEMM_WIDE_FORMS(WIDE_TOKENS)};
static const int32_t piece_ns[][3] = {{1050, 1050, 1050}, {1320, 1580, 1350}, {1620, 1900, 1670}};
enum { FORMS = sizeof form_tokens / sizeof *form_tokens };
_Static_assert(sizeof piece_ns / sizeof *piece_ns == FORMS, "a time for each form");
/* Until the first products run and from the last one on; and where the sums of a tile are joined: by two pairs one
 * after the other, by 2 and by 4 at once. */
enum { ENDS_NS = 4000, JOIN_IN_ORDER_NS = 3000, JOIN_2_NS = 4500, JOIN_4_NS = 6000 };

/* The busiest pair's. A tile that more pairs share in order is joined by one of them. */
static int64_t nanoseconds(const bsh_gemm_wide_cut *const cut, const int32_t pairs, const int32_t piece) {
  if (cut->scatter > 0)
    return ENDS_NS + (cut->scatter == 2 ? JOIN_2_NS : JOIN_4_NS) + divide_up(cut->pieces, cut->scatter) * piece;
  if (cut->shared == 0) return ENDS_NS + divide_up(cut->tiles, pairs) * cut->pieces * piece;
  const int64_t joins = cut->shared < pairs ? divide_up(pairs, cut->shared) : 1;
  return ENDS_NS + joins * JOIN_IN_ORDER_NS + (int64_t)cut->tiles * cut->pieces * piece / pairs;
}

/* ---- how tiles are shared out ---- */

/* [flags][sums] of the blocks that share tiles, bytes. */
static int64_t flag_bytes(const bsh_gemm_wide_cut *const cut) {
  const int64_t bytes = (int64_t)cut->sharing * BSH_GEMM_WIDE_PAIR * BSH_GEMM_WIDE_CONSUMERS * sizeof(uint32_t);
  return divide_up(bytes, SUMS_ALIGNMENT) * SUMS_ALIGNMENT;
}
static int64_t scratch_bytes(const bsh_gemm_wide_cut *const cut) {
  return flag_bytes(cut) + (int64_t)cut->sharing * BSH_GEMM_WIDE_PAIR * bsh_gemm_wide_partial_bytes(cut->tokens);
}

/* All pairs share the last round of whole tiles and the one before it, or all tiles where they are fewer. */
static bsh_gemm_wide_cut shared_in_order(bsh_gemm_wide_cut cut, const int32_t pairs) {
  cut.shared = cut.tiles < pairs ? cut.tiles : cut.tiles % pairs + pairs;
  cut.sharing = pairs;
  return cut;
}
static bsh_gemm_wide_cut scattered(bsh_gemm_wide_cut cut, const int32_t shares) {
  cut.shared = cut.tiles, cut.sharing = cut.tiles * shares, cut.scatter = shares;
  return cut;
}

typedef struct {
  int64_t workspace_bytes; /* that the sums of shared tiles may take */
  int32_t pairs, piece;    /* piece: nanoseconds */
  bsh_gemm_wide_cut cut;
  int64_t ns;
} best_cut;

static void take_faster(best_cut *const best, const bsh_gemm_wide_cut cut) {
  const int64_t ns = nanoseconds(&cut, best->pairs, best->piece);
  if (ns < best->ns && scratch_bytes(&cut) <= best->workspace_bytes) best->ns = ns, best->cut = cut;
}

/* Of all forms and ways to share the fastest. Tiles stay whole where the sums of shared ones would take more scratch
 * memory than there may be. */
static best_cut cut_rows(const bsh_facts *const facts, const int64_t rows_of_x) {
  enum { LEAST_PIECES = 4 }; /* of a pair that shares in order */
  const bool forward = facts->direction == BSH_FORWARD;
  const int64_t rows = forward ? facts->N : facts->K, depth = forward ? facts->K : facts->N;
  const int32_t pairs = facts->sms / BSH_GEMM_WIDE_PAIR, kind = !forward ? 2 : facts->dtype == BSH_F16;
  best_cut best = {.workspace_bytes = facts->workspace_bytes, .pairs = pairs, .ns = INT64_MAX};
  for (int32_t form = 0; form < FORMS; form++) {
    bsh_gemm_wide_cut cut = {.tokens = form_tokens[form]};
    cut.token_tiles = (int32_t)divide_up(rows_of_x, cut.tokens);
    cut.tiles = (int32_t)divide_up(rows, BSH_GEMM_WIDE_ROWS * BSH_GEMM_WIDE_PAIR) * cut.token_tiles;
    cut.pieces = (int32_t)divide_up(depth, BSH_GEMM_WIDE_PIECE);
    best.piece = piece_ns[form][kind];
    take_faster(&best, cut);
    for (int32_t shares = 2; shares <= 4; shares += 2)
      if (cut.tiles <= pairs / shares && shares <= cut.pieces) take_faster(&best, scattered(cut, shares));
    if (cut.tiles % pairs > 0 && (int64_t)cut.tiles * cut.pieces >= (int64_t)pairs * LEAST_PIECES)
      take_faster(&best, shared_in_order(cut, pairs));
  }
  return best;
}

double bsh_plan_wide_piece_nanoseconds(const int32_t tokens, const bsh_facts *const facts) {
  int32_t form = 0;
  while (form_tokens[form] != tokens) form++;
  return piece_ns[form][facts->direction != BSH_FORWARD ? 2 : facts->dtype == BSH_F16];
}

double bsh_plan_wide_nanoseconds(const bsh_facts *const facts) {
  const int64_t rows = min_i64(facts->M, SLICE_ROWS);
  return (double)facts->M / (double)rows * (double)cut_rows(facts, rows).ns;
}

/* ---- the cut ---- */

static void lay_out_scratch(bsh_fused_slice *const slice) {
  if (slice->wide.sharing == 0) return;
  slice->counters = slice->wide.sharing * BSH_GEMM_WIDE_PAIR * BSH_GEMM_WIDE_CONSUMERS;
  slice->partial_at = flag_bytes(&slice->wide);
  slice->scratch_bytes = scratch_bytes(&slice->wide);
  slice->before.kernel = &clear_flags;
  slice->before.shape = (bsh_cuda_launch_shape){.grid = {1, 1, 1}, .block = {FLAG_THREADS, 1, 1}, .overlap = true};
}

static void cut(const bsh_facts *const facts, bsh_fused_slice *const slice) {
  slice->wide = cut_rows(facts, slice->rows).cut;
  int32_t form = 0;
  while (form_tokens[form] != slice->wide.tokens) form++;
  slice->block_shift = __builtin_ctzll((uint64_t)facts->blocksize / BSH_UNIT);
  slice->product.kernel = &kernels[form][facts->dtype == BSH_F16][facts->direction == BSH_INPUT_GRADIENT];
  const int32_t pairs = facts->sms / BSH_GEMM_WIDE_PAIR;
  const int64_t busy = slice->wide.sharing > 0 ? slice->wide.sharing : min_i64(slice->wide.tiles, pairs);
  slice->product.shape = (bsh_cuda_launch_shape){.grid = {(uint32_t)busy * BSH_GEMM_WIDE_PAIR, 1, 1},
                                                 .block = {BSH_GEMM_WIDE_THREADS, 1, 1},
                                                 .cluster = BSH_GEMM_WIDE_PAIR,
                                                 .shared_bytes = bsh_gemm_wide_shared_bytes(slice->wide.tokens),
                                                 .overlap = true};
  lay_out_scratch(slice);
}

const bsh_fused_kernel bsh_plan_gemm_4bit_sm90_wide = {.rows = SLICE_ROWS, .refuses = refuses, .cut = cut};
