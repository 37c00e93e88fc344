// experts.cuh - whose rows of x are whose, for kernels that multiply the rows of many experts: from where the rows of
// each end, which the host does not know, to groups of rows that are multiplied together.
#pragma once

#include "cuda/sizes/fused.h"
#include "cuda/ptx/ptx.cuh"

namespace bsh {
namespace {

// Groups of TOKENS rows.
template <int TOKENS> struct groups_of {
  __device__ __forceinline__ int operator()(int rows) const { return (rows + TOKENS - 1) / TOKENS; }
};

// Where the rows of the 32 experts from `first` on end, one a lane, none before `last` and none beyond the M rows: ends
// that are not sorted are clamped. Lanes behind the last expert have what it has.
__device__ __forceinline__ int sorted_end(const int32_t *offs, int first, int lane, int experts, int M, int last) {
  int end = first + lane < experts ? min(max(offs[first + lane], 0), M) : 0;
#pragma unroll
  for (int step = 1; step < BSH_WARP; step *= 2) {
    const int before = __shfl_up_sync(~0u, end, step);
    if (lane >= step) end = max(end, before);
  }
  return max(end, last);
}

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

  // By one warp; a barrier by the caller. count(rows): groups of an expert.
  template <typename COUNT> __device__ __forceinline__ void fill(const int32_t *offs, int M, COUNT count) const {
    const int lane = threadIdx.x & 31;
    int last = 0, groups = 0;
    for (int first = 0; first < experts; first += BSH_WARP) {
      const int expert = first + lane;
      const int end = sorted_end(offs, first, lane, experts, M, last);
      const int before = __shfl_up_sync(~0u, end, 1), begin = lane == 0 ? last : before;
      const int own = count(end - begin);
      const int sum = sum_upto(own, lane);
      if (expert < experts) {
        st_shared(at + 4 * expert, (uint32_t)end);
        st_shared(at + 4 * (experts + expert), (uint32_t)(groups + sum - own));
      }
      last = __shfl_sync(~0u, end, BSH_WARP - 1);
      groups += __shfl_sync(~0u, sum, BSH_WARP - 1);
    }
    if (lane == 0) st_shared(at + 8 * experts, (uint32_t)groups);
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
