/* test_packed.c - byte counts, size checks and rank slices of core/packed.c, against counting by hand. */
#include "check.h"

#include "core/packed.h"

uint64_t check_seed;

static void sizes(uint64_t *const state) {
  static const int64_t itemsizes[] = {1, 2, 4, 8};
  for (int round = 0; round < 2000; round++) {
    const int64_t n = round < 70 ? round : random_below(state, INT64_C(1) << 40);
    CHECK(2 * bsh_packed_bytes(n) == n + n % 2, "n %" PRId64, n);
    for (int i = 0; i < 4; i++) {
      const int64_t spare = bsh_storage_elements(n, itemsizes[i]) * itemsizes[i] - bsh_packed_bytes(n);
      CHECK(spare >= 0 && spare < itemsizes[i], "n %" PRId64 " itemsize %" PRId64, n, itemsizes[i]);
    }
    const int64_t blocksize = INT64_C(32) << random_below(state, 8);
    const int64_t blocks = bsh_block_count(n, blocksize);
    CHECK(blocks * blocksize >= n && (blocks - 1) * blocksize < n, "n %" PRId64 " blocksize %" PRId64, n, blocksize);
  }
}

static void rank_slices(uint64_t *const state) {
  for (int round = 0; round < 2000; round++) {
    const int64_t total = round < 40 ? round : random_below(state, 1 << 20), world = 1 + random_below(state, 9);
    int64_t covered = 0;
    for (int64_t rank = 0; rank < world; rank++) {
      const bsh_slice slice = bsh_rank_slice(total, world, rank);
      CHECK(slice.length >= 0 && slice.begin + slice.length <= total, "rank %" PRId64 " of %" PRId64, rank, world);
      CHECK(slice.length == 0 || slice.begin == covered, "rank %" PRId64 " begins at %" PRId64, rank, slice.begin);
      CHECK(slice.length <= (total + world - 1) / world, "rank %" PRId64 " keeps %" PRId64, rank, slice.length);
      covered += slice.length;
    }
    CHECK(covered == total, "%" PRId64 " ranks cover %" PRId64 " of %" PRId64, world, covered, total);
  }
}

static void refusals(void) {
  static const int64_t bad[] = {-64, 0, 1, 16, 31, 33, 48, 96, 8192, INT64_MAX, INT64_MIN};
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
    CHECK(bsh_check_blocksize("test", bad[i], BSH_MAX_BLOCKSIZE) == BSH_BAD_VALUE, "blocksize %" PRId64, bad[i]);
  for (int64_t good = 32; good <= 4096; good *= 2)
    CHECK(bsh_check_blocksize("test", good, BSH_MAX_BLOCKSIZE) == BSH_OK, "blocksize %" PRId64, good);

  CHECK(bsh_check_packed_bytes("test", 4, 2, 7) == BSH_OK, "7 codes are 4 bytes");
  CHECK(bsh_check_packed_bytes("test", 6, 2, 9) == BSH_OK, "9 codes are 5 bytes, 3 elements of 2");
  CHECK(bsh_check_packed_bytes("test", 5, 1, 9) == BSH_OK, "9 codes are 5 bytes");
  CHECK(bsh_check_packed_bytes("test", 4, 2, 9) == BSH_BAD_SHAPE, "too short");
  CHECK(bsh_check_packed_bytes("test", 8, 2, 9) == BSH_BAD_SHAPE, "too long");

  int64_t product = 0;
  CHECK(bsh_checked_product("test", 1 << 20, 1 << 20, &product) == BSH_OK && product == INT64_C(1) << 40, "2^40");
  CHECK(bsh_checked_product("test", 0, INT64_MAX, &product) == BSH_OK && product == 0, "zero");
  CHECK(bsh_checked_product("test", INT64_C(1) << 32, INT64_C(1) << 32, &product) == BSH_BAD_SHAPE, "2^64");
  CHECK(bsh_checked_product("test", -1, 3, &product) == BSH_BAD_SHAPE, "negative");
}

int main(const int argc, char **const argv) {
  check_seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
  uint64_t state = check_seed;
  sizes(&state);
  rank_slices(&state);
  refusals();
  printf("test_packed: ok (seed %" PRIu64 ")\n", check_seed);
}
