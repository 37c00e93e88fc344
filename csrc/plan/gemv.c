/* plan/gemv.c - see plan/gemv.h. */
#include "plan/gemv.h"

#include "core/arithmetic.h"
#include "cuda/sizes/gemv_4bit.h"
#include "plan/cards.h"

typedef bsh_gemv_division division;

int64_t bsh_clusters_at_once(const int64_t sms, const int64_t k) {
  const bsh_card *const card = bsh_card_of(90);
  const int64_t clusters = card->clusters[k] * sms / card->sms;
  return clusters > 0 ? clusters : 1;
}
static int64_t teams_at_once(const int64_t sms, const int64_t k_splits, const bool clusters) {
  if (clusters) return bsh_clusters_at_once(sms, k_splits);
  return sms / k_splits > 0 ? sms / k_splits : 1;
}

/* Groups of 16 tokens decode W again for each group, yet beat 32 tokens a block where blocks have 16 warps: x of 32
 * tokens takes the registers of 8 of them (benchmarks/results/small_m_h200_202611.md). */
static int32_t token_tiles_of(const int64_t M, const int32_t arch) {
  if (M <= 8) return 1;
  return M <= 16 || bsh_is_wide(arch) || arch < 80 ? 2 : 4;
}

/* Tokens and K; the rest of a division follows from what runs at once. */
static division divide_tokens(const int64_t M, const int64_t K, const int32_t arch) {
  const int64_t units = K / BSH_UNIT, warps = bsh_gemv_warps(arch);
  division d = {.token_tiles = token_tiles_of(M, arch)};
  d.token_groups = (int32_t)divide_up(M, d.token_tiles * 8);
  d.units = d.token_tiles == 1 && units > 4 * warps ? 8 : 4;
  const int64_t all_warps = divide_up(units, d.units);
  d.k_splits = (int32_t)divide_up(all_warps, warps);
  d.k_warps = (int32_t)divide_up(all_warps, d.k_splits);
  return d;
}

bsh_gemv_division bsh_gemv_divide(const int64_t M, const int64_t N, const int64_t K, const int32_t arch,
                                  const int32_t sms) {
  const int64_t tiles = N / BSH_ROW_TILE;
  division d = divide_tokens(M, K, arch);
  const int64_t most = teams_at_once(sms, d.k_splits, bsh_is_wide(arch)) / d.token_groups;
  const int64_t teams = most > 0 ? most : 1;
  d.row_groups = (int32_t)min_i64(bsh_gemv_warps(arch) / d.k_warps, divide_up(tiles, teams));
  d.teams = (int32_t)min_i64(teams, divide_up(tiles, d.row_groups));
  return d;
}

static bsh_fused_cut cut_of(const division *const d, const int64_t N) {
  const int32_t tiles = (int32_t)(N / BSH_ROW_TILE), team_tiles = tiles / d->teams;
  return (bsh_fused_cut){.k_splits = d->k_splits,
                         .k_warps = d->k_warps,
                         .row_groups = d->row_groups,
                         .group_of_warp = (int32_t)divide_up(1 << 16, d->k_warps),
                         .team_tiles = team_tiles,
                         .longer_teams = tiles % d->teams,
                         .steps = (int32_t)divide_up(team_tiles, d->row_groups),
                         .longer_steps = (int32_t)divide_up(team_tiles + 1, d->row_groups)};
}

void bsh_gemv_lay_out(const division *const d, const bsh_facts *const facts, bsh_cuda_kernel *const joins,
                      bsh_plan_slice *const slice) {
  const bool clusters = bsh_is_wide(facts->image.arch);
  const int64_t sums = facts->N / BSH_ROW_TILE * bsh_gemv_tile_sums(d->token_tiles);
  slice->cut = cut_of(d, facts->N);
  slice->product.shape =
      (bsh_cuda_launch_shape){.grid = {(uint32_t)(d->teams * d->k_splits), (uint32_t)d->token_groups, 1},
                              .block = {(uint32_t)(BSH_WARP * d->k_warps * d->row_groups), 1, 1},
                              .cluster = clusters ? (uint32_t)d->k_splits : 1,
                              .overlap = clusters};
  if (d->k_splits == 1) return;
  slice->scratch_bytes = sums * d->token_groups * d->k_splits * (int64_t)sizeof(float);
  if (clusters) return; /* the cluster joins */
  slice->after.kernel = &joins[d->token_tiles / 2];
  slice->after.shape =
      (bsh_cuda_launch_shape){.grid = {(uint32_t)divide_up(sums, BSH_GEMV_JOIN_THREADS), (uint32_t)d->token_groups, 1},
                              .block = {BSH_GEMV_JOIN_THREADS, 1, 1}};
}

const char *bsh_gemv_4bit_refuses(const bsh_facts *const facts) {
  const int32_t arch = facts->image.arch;
  if (facts->dtype == BSH_F32) return "no float32";
  if (arch < (facts->dtype == BSH_BF16 ? 80 : 75)) return "no tensor cores for the dtype in this code";
  if (bsh_is_wide(arch) && !bsh_is_wide(facts->sm)) return "code for more shared memory than the GPU has";
  if (facts->N % BSH_ROW_TILE) return "N is no multiple of 16";
  if (facts->K % BSH_UNIT) return "K is no multiple of 64";
  const char *const blocks = bsh_short_blocks_refuse(facts);
  if (blocks != NULL) return blocks;
  if (facts->K > INT32_MAX / BSH_ROW_TILE || facts->N > INT32_MAX / 16 || facts->N * (facts->K / BSH_UNIT) > UINT32_MAX)
    return "W is too large for 32-bit indices";
  if (facts->packed_alignment < 16) return "packed is not 16-byte aligned";
  const int64_t rows = min_i64(facts->M, BSH_GEMV_TOKENS);
  if (bsh_is_wide(arch) && divide_tokens(rows, facts->K, arch).k_splits > BSH_GEMV_CLUSTER)
    return "K is longer than a cluster of blocks holds";
  return bsh_few_rows_refuse(facts);
}

bool bsh_gemv_reads_codes_together(const bsh_facts *const facts, const int32_t units) {
  if (facts->w.scales != BSH_SCALES_NESTED || facts->w.blocksize != 64) return false;
  return units == 4 || (facts->K / BSH_UNIT % 2 == 0 && facts->code_alignment >= 2);
}
