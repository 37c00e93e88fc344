// blocks8.cuh - blocks of numbers in 8 bits, by a map of 256 values: blockwise.cu, and merge.cu's nested scales.
#ifndef BSH_BLOCKS8_CUH
#define BSH_BLOCKS8_CUH

#include "cuda/sizes/blockwise.h"

#include "cuda/numerics/encode.cuh"

namespace bsh {

constexpr int WARPS = BSH_BLOCK_WARPS;

__device__ __forceinline__ int64_t global_warp() { return (int64_t)blockIdx.x * WARPS + threadIdx.x / 32; }

// Nearest of 256 ascending entries. Seven comparisons with entries of odd index (a tree in breadth-first order, so that
// its upper levels are free of bank conflicts) leave one entry of even index; the midpoints to its neighbours decide,
// and a tie goes to the even index. A NaN compares false throughout: index 0.
struct search_table {
  float tree[128];       // [1 .. 127]: children of node i are 2 i and 2 i + 1
  float2 midpoints[128]; // of entry 2 j: with entry 2 j - 1 (entry 0: nothing is below) and with entry 2 j + 1
};

__device__ __forceinline__ void fill_search_table(search_table &table, const float *map) {
  const int i = threadIdx.x % 128;
  if (threadIdx.x < 128) {
    const float entry = map[2 * i], before = map[max(2 * i - 1, 0)], after = map[2 * i + 1];
    const float lower = i == 0 ? -INFINITY : multiply_flush(before + entry, 0.5f);
    table.midpoints[i] = make_float2(lower, multiply_flush(after + entry, 0.5f));
  } else if (i > 0) {
    const int level = 31 - __clz(i), position = i - (1 << level);
    table.tree[i] = map[2 * (((2 * position + 1) << (6 - level)) - 1) + 1];
  }
}

__device__ __forceinline__ uint32_t search(const search_table &table, float v) {
  const char *const tree = reinterpret_cast<const char *>(table.tree);
  uint32_t node = 4; // as an offset in bytes: a level then takes four instructions
#pragma unroll
  for (int level = 0; level < 7; level++) {
    const bool above = v > *reinterpret_cast<const float *>(tree + node);
    node += node;
    if (above) node += 4;
  }
  const char *const midpoints = reinterpret_cast<const char *>(table.midpoints) - 1024;
  const float2 midpoint = *reinterpret_cast<const float2 *>(midpoints + 2 * node);
  return node / 2 - 256 + (v > midpoint.y) - (v < midpoint.x);
}

// One warp per block, in chunks of 256 elements; blocks of one chunk are read once. A whole chunk of aligned memory
// moves 16 bytes of x at a time, anything else element by element.
template <typename T> struct block_chunk {
  static constexpr int PER_LANE = 8, ELEMENTS = 32 * PER_LANE, PER_LOAD = 16 / sizeof(T);
  float values[PER_LANE];

  static __device__ __forceinline__ bool is_wide(int first, int length, bool aligned) {
    return aligned && first + ELEMENTS <= length;
  }

  // Element of the chunk that values[k] is.
  static __device__ __forceinline__ int wide_index(int k) {
    return k / PER_LOAD * 32 * PER_LOAD + (int)threadIdx.x % 32 * PER_LOAD + k % PER_LOAD;
  }
  static __device__ __forceinline__ int narrow_index(int k) { return 32 * k + (int)threadIdx.x % 32; }

  __device__ __forceinline__ void load(const T *x, int first, int length, float offset, bool aligned) {
    if (is_wide(first, length, aligned)) {
#pragma unroll
      for (int k = 0; k < PER_LANE; k += PER_LOAD) {
        vector16<T> vector;
        vector.load(x + first + wide_index(k));
#pragma unroll
        for (int j = 0; j < PER_LOAD; j++) values[k + j] = __fsub_rn(vector.get(j), offset);
      }
      return;
    }
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) {
      const int i = first + narrow_index(k);
      values[k] = i < length ? __fsub_rn(to_float(x[i]), offset) : __int_as_float(0x7FFFFFFF); // no magnitude
    }
  }

  __device__ __forceinline__ float absmax(float result) const {
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) result = absmax_step(result, values[k]);
    return result;
  }

  __device__ __forceinline__ void encode(const search_table &table, float inverse, uint8_t *code, int first, int length,
                                         bool aligned) const {
    uint32_t found[PER_LANE]; // all searches side by side
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) found[k] = search(table, multiply_flush(inverse, values[k]));
    if (is_wide(first, length, aligned)) {
#pragma unroll
      for (int k = 0; k < PER_LANE; k += 4) {
        const uint32_t low = __byte_perm(found[k], found[k + 1], 0x0040);
        const uint32_t high = __byte_perm(found[k + 2], found[k + 3], 0x0040);
        *reinterpret_cast<uint32_t *>(code + first + wide_index(k)) = __byte_perm(low, high, 0x5410);
      }
      return;
    }
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) {
      const int i = first + narrow_index(k);
      if (i < length) code[i] = (uint8_t)found[k];
    }
  }
};

// Blocks of x - offset; the caller has waited for what came before.
template <typename T>
__device__ __forceinline__ void quantize_blocks8(const bsh_quantize_blockwise_args &a, const float offset) {
  constexpr int CHUNK = block_chunk<T>::ELEMENTS;
  __shared__ search_table table;
  const int64_t n_blocks = (a.n + a.blocksize - 1) / a.blocksize, stride = (int64_t)gridDim.x * WARPS;
  const bool aligned = reinterpret_cast<uintptr_t>(a.x) % 16 == 0 && reinterpret_cast<uintptr_t>(a.code) % 4 == 0;
  int64_t block = global_warp();
  block_chunk<T> chunk;
  const auto load = [&](int first) {
    const int64_t begin = block * a.blocksize;
    chunk.load(static_cast<const T *>(a.x) + begin, first, (int)min(a.blocksize, a.n - begin), offset, aligned);
  };
  if (block < n_blocks) load(0);
  fill_search_table(table, a.map);
  __syncthreads();
  while (block < n_blocks) {
    const int length = (int)min(a.blocksize, a.n - block * a.blocksize);
    float absmax = chunk.absmax(length < a.blocksize ? 0.0f : -LARGEST);
    for (int first = CHUNK; first < length; first += CHUNK) {
      load(first);
      absmax = chunk.absmax(absmax);
    }
    absmax = warp_absmax(absmax);
    const float inverse = reciprocal(absmax);
    if (threadIdx.x % 32 == 0) a.absmax[block] = absmax;
    for (int first = 0; first < length; first += CHUNK) {
      if (length > CHUNK) load(first);
      chunk.encode(table, inverse, a.code + block * a.blocksize, first, length, aligned);
    }
    block += stride;
    if (block < n_blocks) load(0);
  }
}

} // namespace bsh

#endif
