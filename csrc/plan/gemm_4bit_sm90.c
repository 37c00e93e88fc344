/* plan/gemm_4bit_sm90.c - what gemm_4bit_sm90.cu takes and how a product is cut into its thread blocks. */
#include "core/arithmetic.h"
#include "cuda/sizes/gemm_4bit_sm90.h"
#include "plan/cards.h"
#include "plan/gemv.h"

static const char *refuses(const bsh_facts *const facts) {
  if (facts->dtype == BSH_F32) return "no float32";
  if (facts->N % BSH_ROW_TILE) return "N is no multiple of 16";
  if (facts->K % BSH_UNIT) return "K is no multiple of 64";
  const char *const blocks = bsh_short_blocks_refuse(facts);
  if (blocks != NULL) return blocks;
  /* 32-bit block indices; fewer than 2^22 pieces of 192 x 256 weights, times up to 512 multiprocessors. */
  if (facts->K > INT32_MAX / BSH_ROW_TILE || facts->N > INT32_MAX / 2 || facts->N * (facts->K / BSH_UNIT) > INT32_MAX)
    return "W is too large for 32-bit indices";
  if (facts->packed_alignment < 16) return "packed is not 16-byte aligned"; /* bulk copies of packed rows */
  if (facts->y_alignment < 4) return "y is not 4-byte aligned";             /* two rows of W a store */
  return bsh_few_rows_refuse(facts);
}

/* By borders that were measured: before gemv_4bit and gemv_4bit_simt where W is large enough for its rows, else after
 * them; up to some rows faster than panels. From 65 rows on gemm_4bit_sm90_wide has an estimate: this one comes after
 * it where panels would. */
static double cost(const bsh_facts *const facts) {
  const bsh_card *const card = bsh_card_of(facts->sm);
  const int64_t M = facts->M, weights = facts->N * facts->K;
  const int64_t *const from = card->gemm_4bit_sm90.weights;
  if (M > bsh_border_value(card->gemm_4bit_sm90.rows, weights, BSH_GEMM_TOKENS)) return BSH_LAST;
  if (M > card->gemm_4bit_sm90_wide.rows) return bsh_before_panels(facts);
  const bool large = M > 8 && weights >= from[M <= 16 ? 0 : M <= 32 ? 1 : 2];
  return large ? BSH_ORDER(1) : BSH_ORDER(4);
}

#define GEMM_KERNEL(NAME) BSH_KERNEL(gemm_4bit_sm90, NAME)
#define GEMM_BF16(form, tokens, parts)                                                                                 \
  {GEMM_KERNEL("gemm_4bit_bf16_" #form), GEMM_KERNEL("gemm_4bit_bf16_" #form "_any")},
#define GEMM_F16(form, tokens, parts) {GEMM_KERNEL("gemm_4bit_f16_" #form), GEMM_KERNEL("gemm_4bit_f16_" #form "_any")},
#define GEMM_FORM(form, tokens, parts) {tokens, parts},
enum { FORMS = 5 };
static const int32_t forms[FORMS][2] = {BSH_GEMM_FORMS(GEMM_FORM)};
static bsh_cuda_kernel kernels[2][FORMS][2] = {{BSH_GEMM_FORMS(GEMM_BF16)}, {BSH_GEMM_FORMS(GEMM_F16)}};
#define SHORT_FORM(form, tokens, parts) BSH_SHORT_ENTRIES(gemm_4bit_sm90_short, "gemm_4bit_", form),
static bsh_cuda_kernel short_kernels[FORMS][BSH_SHORT_FORMS] = {BSH_GEMM_FORMS(SHORT_FORM)};
static bsh_cuda_kernel x_units = GEMM_KERNEL("x_units");

static bsh_cuda_kernel *kernel_of(const bsh_facts *const facts, const int32_t tokens, const int32_t k_parts) {
  const bool codes_together = facts->w.scales == BSH_SCALES_NESTED && facts->w.blocksize == 64 &&
                              facts->K % (4 * BSH_UNIT) == 0 && facts->code_alignment >= 4; /* of 4 units */
  const int form = bsh_form_of(forms, tokens, k_parts);
  if (bsh_has_short_blocks(facts)) return &short_kernels[form][bsh_short_form(facts)];
  return &kernels[facts->dtype == BSH_F16][form][!codes_together];
}

/* Row tiles of a row block: one for each warp, or, for two parts of K, as few as leave each multiprocessor one row
 * block where it would have no more anyway. */
static int64_t row_tiles_of(const int64_t tiles, const int64_t warps, const int64_t k_parts, const int32_t sms) {
  const int64_t most = warps / k_parts;
  if (k_parts == 1 || 2 * divide_up(tiles, most) <= sms) return most;
  return divide_up(tiles, sms);
}

/* Two parts of K in a block of threads halve its rows. Then every block has one share of one row block, whole or cut
 * along K. For larger weights, sharing all pieces out evenly is faster; at 64 rows that depends on whether 5 of 6 warps
 * would get rows (benchmarks/results/small_m_h200_202611.md). */
static bool two_parts(const bsh_facts *const facts, const int64_t M) {
  const bsh_card *const card = bsh_card_of(facts->sm);
  const int64_t N = facts->N, tiles = N / BSH_ROW_TILE, weights = N * facts->K;
  const int32_t sms = facts->sms;
  if (M <= 16 || tiles > (int64_t)sms * BSH_GEMM_WARPS / 2) return false;
  if (M <= 32) return weights <= card->gemm_4bit_sm90.two_parts[0];
  if (weights <= card->gemm_4bit_sm90.two_parts[1]) return true;
  const int64_t row_blocks = divide_up(tiles, row_tiles_of(tiles, BSH_GEMM_WARPS, 2, sms));
  return weights <= card->gemm_4bit_sm90.two_parts_busy &&
         6 * tiles * (sms / row_blocks) >= 5 * sms * BSH_GEMM_WARPS / 2;
}

/* Thread blocks, and the pieces of W that each of them takes. */
static void share_out(const bsh_facts *const facts, const int64_t row_blocks, const int64_t pieces,
                      const int32_t k_parts, bsh_plan_slice *const slice) {
  uint32_t *const grid = slice->product.shape.grid;
  int64_t shared =
      pieces; /* two parts of K: at most as many row blocks as multiprocessors, each with shares of its own */
  if (k_parts == 2) {
    const int32_t shares = (int32_t)min_i64(facts->sms / row_blocks, pieces);
    grid[0] = (uint32_t)shares, grid[1] = (uint32_t)row_blocks;
    slice->cut.k_splits = shares > 1 ? shares : 0;
  } else {
    shared = row_blocks * pieces;
    const int64_t blocks = min_i64(facts->sms, shared);
    grid[0] = (uint32_t)blocks, grid[1] = 1;
    slice->cut.k_splits = (int32_t)min_i64(pieces / (shared / blocks) + 1, blocks - 1);
  }
  slice->cut.block_pieces = (int32_t)shared / (int32_t)grid[0];
  slice->cut.more_pieces = (int32_t)shared % (int32_t)grid[0];
}

/* x in the kernel's order, its counters, the partial sums: one piece of scratch memory. Where a product that orders x
 * itself has nothing to join, there is none of it, and no kernel in front. Else that kernel puts x in order and clears
 * the counters, or only the latter. */
static void lay_out_scratch(const int64_t N, const int32_t tokens, const int32_t k_parts, bsh_plan_slice *const slice) {
  const int64_t splits = slice->cut.k_splits;
  slice->orders_x = !bsh_gemm_own_x(tokens, k_parts);
  slice->tokens = slice->orders_x ? tokens : 0;
  slice->counters = splits > 0 ? (int32_t)(N / BSH_ROW_TILE) * k_parts : 0;
  const int64_t counter_bytes = slice->counters * (int64_t)sizeof(uint32_t);
  slice->counters_at = (int64_t)slice->x_units * slice->tokens * BSH_UNIT * 2;
  slice->partial_at =
      slice->counters_at + divide_up(counter_bytes, BSH_GEMM_COUNTERS_ALIGNMENT) * BSH_GEMM_COUNTERS_ALIGNMENT;
  slice->scratch_bytes = slice->partial_at + N * tokens * splits * (int64_t)sizeof(float);
  if (slice->scratch_bytes == 0) return;
  const int64_t chunks = (int64_t)slice->x_units * slice->tokens * BSH_X_UNIT_CHUNKS;
  slice->before.kernel = &x_units;
  slice->before.shape =
      bsh_overlapping(chunks == 0 ? 1 : divide_up(chunks, BSH_X_UNITS_THREADS), BSH_X_UNITS_THREADS, 1, 0);
}

static void cut(const bsh_facts *const facts, bsh_plan_slice *const slice) {
  const int64_t M = slice->rows, N = facts->N, tiles = N / BSH_ROW_TILE;
  const int32_t k_parts = two_parts(facts, M) ? 2 : 1, tokens = M <= 16 ? 16 : M <= 32 ? 32 : 64;
  const int64_t pieces = divide_up(facts->K / BSH_UNIT, BSH_PIECE_UNITS * k_parts); /* of a row block */
  const int64_t row_tiles = row_tiles_of(tiles, bsh_gemm_warps(tokens, k_parts), k_parts, facts->sms);
  slice->block_shift = bsh_block_shift(facts, BSH_UNIT);
  slice->cut.row_tiles = (int32_t)row_tiles;
  slice->product.kernel = kernel_of(facts, tokens, k_parts);
  slice->product.shape = bsh_overlapping(0, bsh_gemm_threads(tokens, k_parts), 1, BSH_GEMM_SHARED_BYTES);
  share_out(facts, divide_up(tiles, row_tiles), pieces, k_parts, slice);
  slice->x_units = (int32_t)(pieces * BSH_PIECE_UNITS * k_parts);
  lay_out_scratch(N, tokens, k_parts, slice);
}

const bsh_kernel bsh_kernel_gemm_4bit_sm90 = {.name = "gemm_4bit_sm90",
                                              .operands = BSH_KIND(4BIT),
                                              .directions = BSH_FORWARD_ONLY,
                                              .needs = BSH_SM90A,
                                              .launch = BSH_LAUNCH_FUSED,
                                              .rows = BSH_GEMM_TOKENS,
                                              .refuses = refuses,
                                              .cost = cost,
                                              .cut = cut};
