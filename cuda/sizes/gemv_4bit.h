/* gemv_4bit.h - sizes of gemv_4bit.cu, for the kernel, its plan (csrc/plan/gemv_4bit.c) and tests. */
#ifndef BSH_GEMV_4BIT_H
#define BSH_GEMV_4BIT_H

#include "cuda/sizes/fused.h"

/* X(name, token tiles: 8 rows of x each, units of K a warp). m32_k4 is for sm_80 to sm_89 and sm_120 only. */
#define BSH_GEMV_FORMS(X) X(m8_k4, 1, 4) X(m8_k8, 1, 8) X(m16_k4, 2, 4) X(m32_k4, 4, 4)
/* X(name, token tiles): the second kernel of split K where blocks cannot meet in a cluster. */
#define BSH_GEMV_JOINS(X) X(m8, 1) X(m16, 2) X(m32, 4)

enum { BSH_GEMV_TOKENS = 64 }; /* rows of x, of a launch */
enum { BSH_GEMV_CLUSTER = 8 }; /* blocks that share K, at most, where they meet in a cluster */
enum { BSH_GEMV_JOIN_THREADS = 256 };

/* f32 sums of a row tile. */
BSH_SIZE int32_t bsh_gemv_tile_sums(int32_t token_tiles) { return token_tiles * 8 * BSH_ROW_TILE; }

/* Warps of a block, at most. */
BSH_SIZE int32_t bsh_gemv_warps(int32_t arch) { return bsh_is_wide(arch) ? 16 : arch >= 80 ? 8 : 4; }
/* Slots of a warp's ring of packed bytes. */
BSH_SIZE int32_t bsh_gemv_slots(int32_t arch, int32_t token_tiles) { return arch >= 80 && token_tiles < 4 ? 3 : 2; }
/* Row tiles after which the warps synchronize and their sums are added. */
BSH_SIZE int32_t bsh_gemv_tiles_per_sync(int32_t arch, int32_t token_tiles) {
  return token_tiles == 1 && arch >= 80 ? 2 : 1;
}

/* Dynamic shared memory. Wide: [map, two sets of sums] below 64 KiB, the table at 64 KiB, the rings at 128 KiB. Else:
 * [table, map, two sets of sums, rings]. */
BSH_SIZE int32_t bsh_gemv_sums_bytes(int32_t arch, int32_t token_tiles) {
  return 2 * bsh_gemv_tiles_per_sync(arch, token_tiles) * bsh_gemv_warps(arch) * bsh_gemv_tile_sums(token_tiles) * 4;
}
BSH_SIZE int32_t bsh_gemv_shared_bytes(int32_t arch, int32_t token_tiles) {
  const int32_t rings = bsh_gemv_warps(arch) * bsh_gemv_slots(arch, token_tiles) * BSH_PIECE_BYTES;
  if (bsh_is_wide(arch)) return BSH_WIDE_RING_AT + rings;
  return bsh_table_bytes(arch) + BSH_MAP_BYTES + bsh_gemv_sums_bytes(arch, token_tiles) + rings;
}

#endif
