// experts.cuh - whose rows of x are whose, for kernels that multiply the rows of many experts: from where the rows of
// each end, which the host does not know, to groups of rows that are multiplied together.
#pragma once

#include "fused.h"
#include "ptx.cuh"

namespace bsh {
namespace {

// Groups of TOKENS rows.
template <int TOKENS> struct groups_of {
  __device__ __forceinline__ int operator()(int rows) const { return (rows + TOKENS - 1) / TOKENS; }
};

// In shared memory, from `at` on: where the rows of each expert end, and how many groups the experts before it have;
// one more: of all. 8 bytes an expert, and 4.
struct expert_rows {
  uint32_t at;
  int experts;

  __device__ __forceinline__ expert_rows(uint32_t at, int experts) : at(at), experts(experts) {}
  __device__ __forceinline__ int end(int expert) const { return read(expert); }
  __device__ __forceinline__ int begin(int expert) const { return expert ? read(expert - 1) : 0; }
  __device__ __forceinline__ int start(int expert) const { return read(experts + expert); } // groups before it
  __device__ __forceinline__ int read(int i) const { return (int)ld_shared_4(at + 4 * i); }

  // By one warp; a barrier by the caller. Ends that are not sorted, or beyond the M rows, are clamped. count(rows):
  // groups of an expert. A lane has a run of experts, whose ends it asks for at once; then it reads them again.
  template <typename COUNT> __device__ __forceinline__ void fill(const int32_t *offs, int M, COUNT count) const {
    const int lane = threadIdx.x & 31, run = (experts + BSH_WARP - 1) / BSH_WARP;
    const int first = min(lane * run, experts), last = min(first + run, experts);
    const auto clamped = [&](int expert) { return min(max(offs[expert], 0), M); };
    int most = 0;
#pragma unroll 8
    for (int expert = first; expert < last; expert++) most = max(most, clamped(expert));
    const int before = scan(most, 0, [](int a, int b) { return max(a, b); });
    int groups = 0;
    for (int expert = first, end = before; expert < last; expert++) {
      const int begin = end;
      end = max(end, clamped(expert));
      st_shared(at + 4 * expert, (uint32_t)end);
      st_shared(at + 4 * (experts + expert), (uint32_t)groups);
      groups += count(end - begin);
    }
    const auto add = [](int a, int b) { return a + b; };
    const int own = groups;
    groups = scan(groups, 0, add);
    for (int expert = first; expert < last; expert++)
      st_shared(at + 4 * (experts + expert), (uint32_t)(groups + start(expert)));
    if (lane == BSH_WARP - 1) st_shared(at + 8 * experts, (uint32_t)(groups + own));
  }
  // What the values of the lanes before make together; `none` in lane 0.
  template <typename JOIN> static __device__ __forceinline__ int scan(int value, int none, JOIN join) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int step = 1; step < BSH_WARP; step *= 2) {
      const int left = __shfl_up_sync(~0u, value, step);
      if (lane >= step) value = join(value, left);
    }
    const int before = __shfl_up_sync(~0u, value, 1);
    return lane == 0 ? none : before;
  }
  // The expert of a group: the last one that starts there or before; those without rows start where the next one does.
  __device__ __forceinline__ int of_group(int group) const {
    return of_group(group, [](int start) { return start; });
  }
  // The same where a part of what start() gives counts groups of one kind.
  template <typename PART> __device__ __forceinline__ int of_group(int group, PART part) const {
    int low = 0, high = experts - 1;
    while (low < high) {
      const int middle = (low + high + 1) >> 1;
      if (part(start(middle)) <= group) low = middle;
      else high = middle - 1;
    }
    return low;
  }
};

// Zeroes rows [first, end) of y, 16 bytes a store, by the whole grid: `width` is a multiple of 8, rows 16-byte aligned.
template <typename T> __device__ __forceinline__ void clear_rows(void *y, int64_t ldy, int width, int first, int end) {
  const int vectors = width / 8;
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < (int64_t)(end - first) * vectors;
       i += (int64_t)gridDim.x * blockDim.x) {
    T *const row = static_cast<T *>(y) + (first + i / vectors) * ldy;
    reinterpret_cast<uint4 *>(row)[i % vectors] = make_uint4(0, 0, 0, 0);
  }
}

} // namespace
} // namespace bsh
