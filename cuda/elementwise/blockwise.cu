// blockwise.cu - quantize and dequantize 4-bit and 8-bit blocks, and the checksum: everything bound by memory.
//
//   quantize     x, 16 bytes a lane and step -> largest magnitude of the block (shuffles) -> absmax
//                  '-> x 1 / absmax -> code: threshold of its bin -> packed
//   dequantize   packed -> value of the code (shuffle table) x scale, nested or not -> out, 16 bytes a lane and step
//
// The fast kernels give a warp a tile of 1024 elements: 16 bytes of the wide tensor per lane and step, so that every
// access is coalesced, and all loads of a warp are in flight before the first use. The grid covers the tensor once. A
// tile cut by an end of the tensor, and the *_any kernels, which take any alignment, go one element (or one block) at a
// time. Host side: csrc/gpu/blockwise.c.
#include "cuda/elementwise/blocks8.cuh"

namespace bsh {

constexpr int WARP_TILE = BSH_WARP_TILE;

__device__ __forceinline__ int log2_of(int64_t power_of_two) { return __ffsll(power_of_two) - 1; }

// ---- dequantize_4bit ------------------------------------------------------------------------------------------------

template <typename T>
__device__ __forceinline__ void dequantize_element(const bsh_dequantize_4bit_args &a, int64_t row, int64_t column) {
  const int64_t element = (a.row0 + row) * a.columns + a.column0 + column;
  const int64_t block = element >> log2_of(a.weight.blocksize);
  if (element >= a.weight.n) return;
  const int byte = a.weight.packed[element / 2]; // the first of a pair is in the high nibble
  const float unit = VALUES[a.weight.format][element % 2 ? byte & 15 : byte >> 4];
  T *const out = static_cast<T *>(a.out) + row * a.ld + column;
  const bool nested = a.weight.scales.absmax == nullptr;
  if (a.weight.format == BSH_E2M1) return from_float(scaled<true>(unit, exact_scale(a.weight.scales, block)), out);
  const float scale = nested ? block_scale<true>(a.weight.scales, block) : block_scale<false>(a.weight.scales, block);
  from_float(scaled<false>(unit, scale), out);
}

// A warp tile is STEPS rows of SPAN columns. Lane l fetches the scale of one block of the tile: of row l / PER_ROW,
// the (l % PER_ROW)-th block from the left; a span holds at most PER_ROW blocks of 32. Needs, besides alignment, that a
// span starts at a block border or lies inside one block (csrc/plan/dequantize.c checks). EXACT, for E2M1, whose blocks
// may have 16 elements: each lane fetches the scale of its own.
template <typename T> struct dequantize_tile {
  static constexpr int WIDTH = vector16<T>::WIDTH, SPAN = 32 * WIDTH, STEPS = WARP_TILE / SPAN;
  static constexpr int PER_ROW = 32 / STEPS;
};

// WIDTH codes, the first in the lowest nibble pair's high nibble.
template <int WIDTH> __device__ __forceinline__ uint32_t load_codes(const uint8_t *source) {
  uint32_t codes;
  if constexpr (WIDTH == 8) {
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(codes) : "l"(source));
  } else {
    uint16_t half;
    asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(half) : "l"(source));
    codes = half;
  }
  return codes;
}

template <typename T, bool NESTED, bool EXACT = false>
__device__ __forceinline__ void dequantize_4bit(const bsh_dequantize_4bit_args &a) {
  using tile = dequantize_tile<T>;
  constexpr int WIDTH = tile::WIDTH, SPAN = tile::SPAN, STEPS = tile::STEPS, PER_ROW = tile::PER_ROW;
  const int lane = threadIdx.x % 32;
  const int shift = log2_of(a.weight.blocksize);
  const float unit = VALUES[a.weight.format][lane % 16];
  const uint32_t spans = (uint32_t)((a.n_columns + SPAN - 1) / SPAN);
  const uint32_t warp = (uint32_t)global_warp();
  const int64_t row = (int64_t)(warp / spans) * STEPS;
  const int64_t column = (int64_t)(warp % spans) * SPAN;
  const int64_t corner = (a.row0 + row) * a.columns + a.column0 + column;
  wait_for_earlier_kernels();
  if (row + STEPS > a.n_rows || column + SPAN > a.n_columns || corner + (STEPS - 1) * a.columns + SPAN > a.weight.n) {
    const int64_t right = min(column + SPAN, a.n_columns);
    for (int64_t r = row; r < min(row + STEPS, a.n_rows); r++)
      for (int64_t c = column + lane; c < right; c += 32) dequantize_element<T>(a, r, c);
    return;
  }

  const uint8_t *const source = a.weight.packed + (corner + lane * WIDTH) / 2;
  uint32_t codes[STEPS];
#pragma unroll
  for (int i = 0; i < STEPS; i++) codes[i] = load_codes<WIDTH>(source + i * (a.columns / 2));
  const int64_t first = corner + (lane / PER_ROW) * a.columns + min((lane % PER_ROW) << shift, SPAN - 1);
  const float scales = EXACT ? 0.f : block_scale<NESTED>(a.weight.scales, first >> shift);

  T *const out = static_cast<T *>(a.out) + row * a.ld + column + lane * WIDTH;
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
    const float scale = EXACT ? exact_scale(a.weight.scales, (corner + i * a.columns + lane * WIDTH) >> shift)
                              : __shfl_sync(ALL_LANES, scales, i * PER_ROW + ((lane * WIDTH) >> shift));
    float values[WIDTH];
#pragma unroll
    for (int k = 0; k < WIDTH; k++)
      values[k] = scaled<EXACT>(__shfl_sync(ALL_LANES, unit, codes[i] >> (4 * (k ^ 1)), 16), scale);
    vector16<T> packed;
    packed.set(values);
    __stcs(reinterpret_cast<uint4 *>(out + i * a.ld), packed.raw);
  }
}

template <typename T> __device__ __forceinline__ void dequantize_4bit_any(const bsh_dequantize_4bit_args &a) {
  const int64_t total = a.n_rows * a.n_columns;
  wait_for_earlier_kernels();
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += (int64_t)gridDim.x * blockDim.x)
    dequantize_element<T>(a, i / a.n_columns, i % a.n_columns);
}

// ---- quantize_4bit --------------------------------------------------------------------------------------------------

// One block by one warp, twice over its elements. What is missing of a short block counts as zeros.
template <typename T, int FORMAT>
__device__ void quantize_block(const bsh_quantize_4bit_args &a, const code_encoder<FORMAT> &encoder, int64_t block) {
  const int lane = threadIdx.x % 32;
  const int64_t begin = block * a.blocksize;
  const T *const x = static_cast<const T *>(a.x) + begin;
  const int length = (int)min(a.blocksize, a.n - begin);
  float absmax = length < a.blocksize ? 0.0f : -LARGEST;
  for (int i = lane; i < length; i += 32) absmax = absmax_step(absmax, to_float(x[i]));
  absmax = warp_absmax(absmax);
  const float inverse = reciprocal(absmax);
  if (lane == 0) a.absmax[block] = absmax;
  for (int pair = 0; pair < length; pair += 64) {
    const int i = pair + 2 * lane;
    const float high = i < length ? to_float(x[i]) : 0.0f, low = i + 1 < length ? to_float(x[i + 1]) : 0.0f;
    uint32_t codes = encoder.add_code(0, multiply_flush(inverse, high), 4);
    codes = encoder.add_code(codes, multiply_flush(inverse, low), 0);
    if (i < length) a.packed[(begin + i) / 2] = (uint8_t)codes;
  }
}

template <typename T, int FORMAT> __device__ __forceinline__ void quantize_4bit_any(const bsh_quantize_4bit_args &a) {
  const code_encoder<FORMAT> encoder;
  const int64_t block = global_warp();
  wait_for_earlier_kernels();
  if (block * a.blocksize < a.n) quantize_block<T, FORMAT>(a, encoder, block);
}

// A block is a group of neighbouring lanes in one step (blocksize <= SPAN) or some neighbouring steps.
template <typename T, int FORMAT> __device__ __forceinline__ void quantize_4bit(const bsh_quantize_4bit_args &a) {
  constexpr int WIDTH = vector16<T>::WIDTH, SPAN = 32 * WIDTH, STEPS = WARP_TILE / SPAN;
  const int lane = threadIdx.x % 32;
  const int shift = log2_of(a.blocksize);
  const int block_lanes = (int)a.blocksize / WIDTH, block_steps = (int)a.blocksize / SPAN;
  const int64_t tile = global_warp() * WARP_TILE, first = tile + lane * WIDTH;
  const code_encoder<FORMAT> encoder;
  wait_for_earlier_kernels();
  if (tile + WARP_TILE > a.n) {
    for (int64_t block = tile >> shift; block << shift < a.n; block++) quantize_block<T, FORMAT>(a, encoder, block);
    return;
  }

  vector16<T> x[STEPS];
#pragma unroll
  for (int i = 0; i < STEPS; i++) x[i].load(static_cast<const T *>(a.x) + first + i * SPAN);

  float absmax[STEPS];
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
    absmax[i] = x[i].absmax();
#pragma unroll
    for (int d = 1; d < 32; d *= 2)
      if (d < block_lanes) absmax[i] = fmaxf(absmax[i], __shfl_xor_sync(ALL_LANES, absmax[i], d));
  }
#pragma unroll
  for (int d = 1; d < STEPS; d *= 2) {
    if (d >= block_steps) break;
    float partner[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; i++) partner[i] = absmax[i ^ d];
#pragma unroll
    for (int i = 0; i < STEPS; i++) absmax[i] = fmaxf(absmax[i], partner[i]);
  }

  // Lane l stores the scale of block l of the tile, which starts in step `step` at lane `source`.
  const int step = (lane << shift) / SPAN, source = (lane << shift) % SPAN / WIDTH;
  float scale = 0.0f;
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
    const float candidate = __shfl_sync(ALL_LANES, absmax[i], source);
    if (i == step) scale = candidate;
  }
  if (lane << shift < WARP_TILE) a.absmax[(tile >> shift) + lane] = scale;

#pragma unroll
  for (int i = 0; i < STEPS; i++) {
    const float inverse = reciprocal(absmax[i]);
    uint32_t codes = 0; // the first of a pair goes to the high nibble
#pragma unroll
    for (int k = 0; k < WIDTH; k++) codes = encoder.add_code(codes, multiply_flush(inverse, x[i].get(k)), 4 * (k ^ 1));
    uint8_t *const out = a.packed + (first + i * SPAN) / 2;
    if constexpr (WIDTH == 8) *reinterpret_cast<uint32_t *>(out) = codes;
    else *reinterpret_cast<uint16_t *>(out) = (uint16_t)codes;
  }
}

// ---- quantize_blockwise ---------------------------------------------------------------------------------------------

template <typename T> __device__ __forceinline__ void quantize_blockwise(const bsh_quantize_blockwise_args &a) {
  wait_for_earlier_kernels();
  quantize_blocks8<T>(a, a.offset == nullptr ? 0.0f : *a.offset);
}

// ---- dequantize_blockwise -------------------------------------------------------------------------------------------

__device__ __forceinline__ float decode_8bit(const float *map, uint32_t code, float absmax, bool shifted,
                                             float offset) {
  const float value = multiply_flush(map[code], absmax);
  return shifted ? __fadd_rn(value, offset) : value;
}

template <typename T> __device__ __forceinline__ void dequantize_blockwise(const bsh_dequantize_blockwise_args &a) {
  constexpr int WIDTH = vector16<T>::WIDTH, SPAN = 32 * WIDTH, STEPS = WARP_TILE / SPAN;
  __shared__ float map[256];
  const int shift = log2_of(a.blocksize);
  const int64_t tile = global_warp() * WARP_TILE + (threadIdx.x % 32) * WIDTH;
  wait_for_earlier_kernels();
  map[threadIdx.x] = a.map[threadIdx.x];
  const bool shifted = a.offset != nullptr;
  const float offset = shifted ? *a.offset : 0.0f;
  uint8_t codes[STEPS][WIDTH];
  float absmax[STEPS];
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
    const int64_t first = tile + i * SPAN;
    const uint8_t *const source = a.code + first;
    absmax[i] = first < a.n ? a.absmax[first >> shift] : 0.0f;
    if (first + WIDTH > a.n) {
#pragma unroll
      for (int k = 0; k < WIDTH; k++) codes[i][k] = first + k < a.n ? source[k] : 0;
    } else if constexpr (WIDTH == 8) {
      *reinterpret_cast<uint2 *>(codes[i]) = *reinterpret_cast<const uint2 *>(source);
    } else {
      *reinterpret_cast<uint32_t *>(codes[i]) = *reinterpret_cast<const uint32_t *>(source);
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
    const int64_t first = tile + i * SPAN;
    T *const out = static_cast<T *>(a.out) + first;
    float values[WIDTH];
#pragma unroll
    for (int k = 0; k < WIDTH; k++) values[k] = decode_8bit(map, codes[i][k], absmax[i], shifted, offset);
    vector16<T> packed;
    packed.set(values);
    if (first + WIDTH <= a.n) *reinterpret_cast<uint4 *>(out) = packed.raw;
    else
#pragma unroll
      for (int k = 0; k < WIDTH; k++)
        if (first + k < a.n) from_float(values[k], out + k);
  }
}

template <typename T> __device__ __forceinline__ void dequantize_blockwise_any(const bsh_dequantize_blockwise_args &a) {
  const int shift = log2_of(a.blocksize);
  wait_for_earlier_kernels();
  const bool shifted = a.offset != nullptr;
  const float offset = shifted ? *a.offset : 0.0f;
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < a.n; i += (int64_t)gridDim.x * blockDim.x)
    from_float(decode_8bit(a.map, a.code[i], a.absmax[i >> shift], shifted, offset), static_cast<T *>(a.out) + i);
}

// ---- checksum -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ unsigned long long mix_word(uint64_t word, int64_t i) {
  uint64_t z = word + (uint64_t)(i + 1) * 0x9E3779B97F4A7C15u;
  z ^= z >> 32;
  z *= 0xD6E8FEB86659FD93u;
  return z ^ (z >> 32);
}

__device__ __forceinline__ uint64_t load_word(const uint8_t *bytes, int64_t n_bytes, int64_t i, bool aligned) {
  if (aligned && 8 * i + 8 <= n_bytes) return reinterpret_cast<const uint64_t *>(bytes)[i];
  uint64_t word = 0;
  for (int k = 0; k < 8 && 8 * i + k < n_bytes; k++) word |= (uint64_t)bytes[8 * i + k] << (8 * k);
  return word;
}

} // namespace bsh

// ---- entry points: <op>[_any]_<dtype>[_<variant>] -------------------------------------------------------------------

/* 6 blocks per SM where it holds 2048 threads, else 4. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 800 && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1200)
#define BSH_BLOCKS_PER_SM 4
#else
#define BSH_BLOCKS_PER_SM 6
#endif
#define ENTRY(NAME, ARGS, ...) BSH_ENTRY(__launch_bounds__(32 * bsh::WARPS), NAME, ARGS, __VA_ARGS__)
#define BUSY_ENTRY(NAME, ...)                                                                                          \
  BSH_ENTRY(__launch_bounds__(32 * bsh::WARPS, BSH_BLOCKS_PER_SM), NAME, bsh_dequantize_4bit_args, __VA_ARGS__)
#define BSH_DTYPES(X) X(f32, float) X(f16, __half) X(bf16, __nv_bfloat16)

#define BSH_ENTRIES(name, T)                                                                                           \
  BUSY_ENTRY(dequantize_4bit_##name##_plain, dequantize_4bit<T, false>)                                                \
  BUSY_ENTRY(dequantize_4bit_##name##_nested, dequantize_4bit<T, true>)                                                \
  BUSY_ENTRY(dequantize_4bit_##name##_exact, dequantize_4bit<T, true, true>)                                           \
  ENTRY(dequantize_4bit_any_##name, bsh_dequantize_4bit_args, dequantize_4bit_any<T>)                                  \
  ENTRY(quantize_4bit_##name##_nf4, bsh_quantize_4bit_args, quantize_4bit<T, BSH_NF4>)                                 \
  ENTRY(quantize_4bit_##name##_fp4, bsh_quantize_4bit_args, quantize_4bit<T, BSH_FP4>)                                 \
  ENTRY(quantize_4bit_any_##name##_nf4, bsh_quantize_4bit_args, quantize_4bit_any<T, BSH_NF4>)                         \
  ENTRY(quantize_4bit_any_##name##_fp4, bsh_quantize_4bit_args, quantize_4bit_any<T, BSH_FP4>)                         \
  ENTRY(quantize_blockwise_##name, bsh_quantize_blockwise_args, quantize_blockwise<T>)                                 \
  ENTRY(dequantize_blockwise_##name, bsh_dequantize_blockwise_args, dequantize_blockwise<T>)                           \
  ENTRY(dequantize_blockwise_any_##name, bsh_dequantize_blockwise_args, dequantize_blockwise_any<T>)

BSH_DTYPES(BSH_ENTRIES)

// *sum must be 0. Integer addition: any order of the atomics gives the same sum.
extern "C" __global__ void __launch_bounds__(32 * bsh::WARPS)
    checksum(const uint8_t *bytes, int64_t n_bytes, unsigned long long *sum) {
  __shared__ unsigned long long partial[bsh::WARPS];
  const bool aligned = reinterpret_cast<uintptr_t>(bytes) % 8 == 0;
  const int64_t n_words = (n_bytes + 7) / 8;
  unsigned long long mine = 0;
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n_words; i += (int64_t)gridDim.x * blockDim.x)
    mine += bsh::mix_word(bsh::load_word(bytes, n_bytes, i, aligned), i);
  for (int d = 16; d > 0; d /= 2) mine += __shfl_xor_sync(bsh::ALL_LANES, mine, d);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < bsh::WARPS; w++) mine += partial[w];
  atomicAdd(sum, mine);
}
