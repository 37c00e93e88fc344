// shared_tile.cuh - how those who share a tile, some blocks or pairs of blocks with equal parts of its depth, find out
// who joins which part of its sums.
//
// Each of them writes its partial sums of the others' parts and waits for theirs, with a timeout, since nothing says
// that they run. One that times out writes the partial sum of its own part too, sets its bit and exits; the last to
// arrive joins that part as well. All use one word, 0 at the start: the number of those that arrived, and above it one
// bit for each that timed out.
#pragma once

#include "cuda/ptx/ptx.cuh"

namespace bsh {
namespace {

enum : uint32_t { CAME = 7, GONE = 8 };
enum { PATIENCE = 64 }; // reads of the word before the timeout: some 40 us

// One thread, behind what those it stands for have left. Which parts it has to join, as bits; 0: not all have come.
__device__ __forceinline__ uint32_t come(uint32_t *word, int me, int shares) {
  const uint32_t state = count_acq_rel(word, 0);
  if ((state & CAME) == (uint32_t)shares - 1) return 1u << me | state / GONE; // the last
#pragma unroll 1
  for (int i = 0; i < PATIENCE; i++)
    if ((load_acquire(word) & CAME) == (uint32_t)shares) return 1u << me;
  return 0;
}
__device__ __forceinline__ uint32_t go(uint32_t *word, int me, int shares) {
  return (or_acq_rel(word, GONE << me) & CAME) == (uint32_t)shares ? 1u << me : 0;
}

} // namespace
} // namespace bsh
