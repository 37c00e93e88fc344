// merge.cu - a packed weight with LoRA adapters in it, quantized anew: the bits of cpu/merge.c.
//
//   packed -> value -> + s B A, fp32 FMAs by rank -> largest magnitude of the block -> code -> packed
//
// The fast kernels take blocks of 64 within a row. A block of threads has a tile of the weight, and 32 ranks of A and B
// at a time as fp32 in shared memory. A warp has 32 rows of one block of columns; a lane 8 rows, and 8 columns, which
// are a word of codes: a rank is four loads of 16 bytes and 64 FMAs. Sums stay in registers until the codes are
// written. With one adapter the weight is decoded after the sums, so that its bytes arrive meanwhile; with several,
// values are kept beside the sums, and rows are taken in two passes. The *_any kernels give a warp a block of any size,
// and compute it twice. add_adapters_*: values that are decoded already, whatever the format, and not quantized. Host
// side: csrc/gpu/merge.c.
#include "cuda/sizes/merge.h"

#include "cuda/numerics/encode.cuh"

namespace bsh {

constexpr int ROWS = BSH_MERGE_ROWS, COLUMNS = BSH_MERGE_COLUMNS, CHUNK = BSH_MERGE_CHUNK, LANES = 8; // of a row
constexpr int GROUP = BSH_MERGE_ROWS / 4;                                                             // rows of a lane
constexpr int TILE_ROWS = BSH_MERGE_TILE_ROWS, TILE_COLUMNS = BSH_MERGE_TILE_COLUMNS;
constexpr int B_STRIDE = TILE_ROWS + 4;

// 1 / absmax as core/numerics.h has it: the approximate one where that is known (fp16 and bf16 numbers), else rounded
// correctly. The approximate one of a GPU is not for all fp32 numbers the same as on another machine.
__device__ __forceinline__ float exact_reciprocal(float absmax) {
  if ((__float_as_uint(absmax) & 0x1FFFu) == 0) return reciprocal(absmax);
  const float rounded = __fdiv_rn(1.0f, absmax);
  return __float_as_uint(rounded) & 0x7F800000u ? rounded : __uint_as_float(__float_as_uint(rounded) & 0x80000000u);
}

__device__ __forceinline__ float scale_of_block(const bsh_scales &scales, int64_t b) {
  return scales.absmax == nullptr ? block_scale<true>(scales, b) : block_scale<false>(scales, b);
}

struct factors {
  float4 a[CHUNK * TILE_COLUMNS / 4]; // [rank][block of columns][half of a lane's columns][lane of 8][4]
  float4 b[CHUNK * B_STRIDE / 4];     // [rank][row]
};

// `count` <= 4 numbers; zeros after them. Aligned: to four of them.
template <typename T>
__device__ __forceinline__ void load_four(const T *source, int count, bool is_aligned, float (&four)[4]) {
  if (is_aligned && count >= 4) {
    struct alignas(4 * sizeof(T)) raw {
      T of[4];
    };
    const raw found = *reinterpret_cast<const raw *>(source);
#pragma unroll
    for (int i = 0; i < 4; i++) four[i] = to_float(found.of[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; i++) four[i] = i < count ? to_float(source[i]) : 0.0f;
}

// Ranks from `rank` on, CHUNK at most, of the tile at (first, column); zeros beyond the weight's end.
template <typename T>
__device__ __forceinline__ void load_factors(const bsh_merge_4bit_args &args, int64_t first, int64_t column, int rank,
                                             factors &f) {
  const int ranks = min((int)args.R - rank, CHUNK);
  const T *const a = static_cast<const T *>(args.a) + rank * args.K + column;
  for (int i = threadIdx.x; i < ranks * (TILE_COLUMNS / 4); i += BSH_MERGE_THREADS) {
    const int r = i / (TILE_COLUMNS / 4), four = i % (TILE_COLUMNS / 4), in_block = four % (COLUMNS / 4);
    float x[4];
    load_four(a + r * args.K + 4 * four, column + 4 * four < args.K ? 4 : 0, true, x);
    const int at = four / (COLUMNS / 4) * (COLUMNS / 4) + in_block % 2 * LANES + in_block / 2;
    f.a[r * (TILE_COLUMNS / 4) + at] = make_float4(x[0], x[1], x[2], x[3]);
  }
  const T *const b = static_cast<const T *>(args.b) + first * args.R + rank;
  const bool is_aligned = args.R % 4 == 0 && reinterpret_cast<uintptr_t>(args.b) % (4 * sizeof(T)) == 0;
  float *const to = reinterpret_cast<float *>(f.b);
  for (int i = threadIdx.x; i < (ranks + 3) / 4 * TILE_ROWS; i += BSH_MERGE_THREADS) {
    const int row = i % TILE_ROWS, four = i / TILE_ROWS;
    float x[4];
    load_four(b + row * args.R + 4 * four, first + row < args.N ? ranks - 4 * four : 0, is_aligned, x);
#pragma unroll
    for (int j = 0; j < 4; j++) to[(4 * four + j) * B_STRIDE + row] = x[j];
  }
}

// T rows of a lane, and what the weight has there. Rows below `inside` are in the weight.
template <int T> struct part {
  int64_t first; // byte of the first row's block in the packed weight; an index of a block is a 32nd of it
  int stride, inside, lane;
  uint32_t words[T]; // codes of 8 columns
  float scale;       // of row mine()

  __device__ __forceinline__ part(const bsh_merge_4bit_args &args, int64_t row, int64_t column)
      : first((row * args.K + column) / 2), stride((int)(args.K / 2)),
        inside(column < args.K ? (int)min(args.N - row, (int64_t)T) : 0), lane(threadIdx.x % LANES) {
#pragma unroll
    for (int i = 0; i < T; i++)
      words[i] = i < inside ? *reinterpret_cast<const uint32_t *>(args.weight.packed + at(i) + 4 * lane) : 0;
    scale = mine() < inside ? scale_of_block(args.weight.scales, at(mine()) / (COLUMNS / 2)) : 0.0f;
  }
  __device__ __forceinline__ int mine() const { return lane / (LANES / T); }
  __device__ __forceinline__ int64_t at(int i) const { return first + (int64_t)i * stride; }
};

// The shift of column j in a word: the first of two is the upper half of a byte.
__device__ constexpr int shift_of(int j) { return j / 2 * 8 + (j % 2 ? 0 : 4); }

// W in fp32. unit: the value of code lane % 16.
template <int T> __device__ __forceinline__ void decode_row(const part<T> &p, float unit, int i, float (&value)[8]) {
  const float scale = __shfl_sync(ALL_LANES, p.scale, i * (LANES / T), LANES);
#pragma unroll
  for (int j = 0; j < 8; j++)
    value[j] = multiply_flush(__shfl_sync(ALL_LANES, unit, p.words[i] >> shift_of(j), 16), scale);
}

// a, b: of the lane, at the first of `ranks` ranks.
template <int T>
__device__ __forceinline__ void add_ranks(const float4 *a, const float4 *b, int ranks, float (&sum)[T][8]) {
#pragma unroll 1 // more code is slower: benchmarks/results/merged_step_h100_202611.md
  for (int r = 0; r < ranks; r++, a += TILE_COLUMNS / 4, b += B_STRIDE / 4) {
    const float4 low = a[0], high = a[LANES];
    const float of_column[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int four = 0; four < T / 4; four++) {
      const float4 rows = b[four];
      const float of_row[4] = {rows.x, rows.y, rows.z, rows.w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 8; j++) sum[4 * four + i][j] = __fmaf_rn(of_row[i], of_column[j], sum[4 * four + i][j]);
      }
    }
  }
}

// Largest magnitudes of the rows over their 8 lanes; lane l gets that of row l / (8 / T).
template <int T> __device__ __forceinline__ float absmax_of_rows(const float (&value)[T][8]) {
  const int lane = threadIdx.x % LANES;
  float most[T];
#pragma unroll
  for (int i = 0; i < T; i++) {
    most[i] = -LARGEST;
#pragma unroll
    for (int j = 0; j < 8; j++) most[i] = absmax_step(most[i], value[i][j]);
  }
#pragma unroll
  for (int half = T / 2; half > 0; half /= 2) { // a lane keeps half of the rows, and gives the others away
    const bool upper = lane & half * (LANES / T);
#pragma unroll
    for (int i = 0; i < half; i++) {
      const float given = upper ? most[i] : most[i + half], kept = upper ? most[i + half] : most[i];
      most[i] = fmaxf(kept, __shfl_xor_sync(ALL_LANES, given, half * (LANES / T)));
    }
  }
#pragma unroll
  for (int d = LANES / T / 2; d > 0; d /= 2) most[0] = fmaxf(most[0], __shfl_xor_sync(ALL_LANES, most[0], d));
  return most[0];
}

// The scale that this lane has written; 0 where it has none.
template <int FORMAT, int T>
__device__ __forceinline__ float encode(const bsh_merge_4bit_args &args, const code_encoder<FORMAT> &encoder,
                                        const part<T> &p, const float (&value)[T][8]) {
  const float absmax = absmax_of_rows(value), inverses = exact_reciprocal(absmax);
  const bool writes = p.lane % (LANES / T) == 0 && p.mine() < p.inside;
  if (writes) args.absmax[p.at(p.mine()) / (COLUMNS / 2)] = absmax;
#pragma unroll
  for (int i = 0; i < T; i++) {
    const float inverse = __shfl_sync(ALL_LANES, inverses, i * (LANES / T), LANES);
    uint32_t codes = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) codes = encoder.add_code(codes, multiply_flush(inverse, value[i][j]), shift_of(j));
    if (i < p.inside) *reinterpret_cast<uint32_t *>(args.packed + p.at(i) + 4 * p.lane) = codes;
  }
  return writes ? absmax : 0.0f;
}

template <typename T, int FORMAT> struct merging {
  const bsh_merge_4bit_args &args;
  factors &f;
  const int64_t first, column;     // of the tile
  const float4 *const a, *const b; // of the lane, in f
  const int ranks = (int)args.R;
  const code_encoder<FORMAT> encoder{};
  const float unit = VALUES[FORMAT][threadIdx.x % 16];

  // The next ranks in shared memory, unless all are there.
  __device__ __forceinline__ void next(int rank) const {
    if (ranks <= CHUNK) return;
    __syncthreads();
    load_factors<T>(args, first, column, rank, f);
    __syncthreads();
  }

  __device__ __forceinline__ float one_adapter(const part<GROUP> &p) const {
    float value[GROUP][8] = {};
    for (int rank = 0; rank < ranks; rank += CHUNK) {
      if (rank > 0) next(rank);
      add_ranks(a, b, min(ranks - rank, CHUNK), value);
    }
    const float s = args.scales[ranks - 1];
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
      float of_row[8];
      decode_row(p, unit, i, of_row);
#pragma unroll
      for (int j = 0; j < 8; j++) value[i][j] = __fmaf_rn(s, value[i][j], of_row[j]);
    }
    return encode(args, encoder, p, value);
  }

  // Four of the rows. Ranks whose scale is not 0 are the last of an adapter.
  __device__ float adapters(int64_t row, int64_t block, int four) const {
    const part<4> p(args, row + four * 4, block);
    float value[4][8], sum[4][8] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) decode_row(p, unit, i, value[i]);
    for (int rank = 0; rank < ranks; rank += CHUNK) {
      next(rank);
      for (int r = 0; r < min(ranks - rank, CHUNK); r++) {
        add_ranks(a + r * (TILE_COLUMNS / 4), b + r * (B_STRIDE / 4) + four, 1, sum);
        const float s = args.scales[rank + r];
        if (s == 0.0f) continue;
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
          for (int j = 0; j < 8; j++) value[i][j] = __fmaf_rn(s, sum[i][j], value[i][j]), sum[i][j] = 0.0f;
        }
      }
    }
    return encode(args, encoder, p, value);
  }
};

template <typename T, int FORMAT> __device__ __forceinline__ void merge_4bit(const bsh_merge_4bit_args &args) {
  __shared__ factors f;
  const uint32_t across = (uint32_t)((args.K + TILE_COLUMNS - 1) / TILE_COLUMNS);
  const int64_t column = (int64_t)(blockIdx.x % across) * TILE_COLUMNS,
                first = (int64_t)(blockIdx.x / across) * TILE_ROWS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int of_columns = warp % BSH_MERGE_ACROSS, of_rows = warp / BSH_MERGE_ACROSS * ROWS + lane / LANES * GROUP;
  const int64_t row = first + of_rows, block = column + of_columns * COLUMNS;
  wait_for_earlier_kernels();
  const part<GROUP> p(args, row, block);
  load_factors<T>(args, first, column, 0, f);
  bool several = args.R == 0 || args.scales[args.R - 1] == 0.0f;
  for (int r = threadIdx.x; r < args.R - 1; r += BSH_MERGE_THREADS) several |= args.scales[r] != 0.0f;
  several = __syncthreads_or(several);
  const merging<T, FORMAT> of{
      args, f, first, column, f.a + of_columns * (COLUMNS / 4) + lane % LANES, f.b + of_rows / 4};
  double sum = 0;
  if (several)
    for (int four = 0; four < GROUP / 4; four++) sum += of.adapters(row, block, four);
  else sum = of.one_adapter(p);
  if (args.mean != nullptr) sum_of_block<BSH_MERGE_THREADS>(sum, args.sums + blockIdx.x);
}

// `value`, of element i of the weight, with the adapters added.
template <typename T> __device__ __forceinline__ float added(const bsh_merge_4bit_args &a, float value, int64_t i) {
  const int64_t n = i / a.K, k = i % a.K;
  float sum = 0.0f;
  for (int64_t r = 0; r < a.R; r++) {
    const float b = to_float(static_cast<const T *>(a.b)[n * a.R + r]);
    sum = __fmaf_rn(b, to_float(static_cast<const T *>(a.a)[r * a.K + k]), sum);
    if (a.scales[r] == 0.0f) continue;
    value = __fmaf_rn(a.scales[r], sum, value);
    sum = 0.0f;
  }
  return value;
}

// Element i of the merged weight; 0 beyond its end.
template <typename T> __device__ float merged(const bsh_merge_4bit_args &a, float scale, int64_t i) {
  if (i >= a.weight.n) return 0.0f;
  const int byte = a.weight.packed[i / 2];
  return added<T>(a, multiply_flush(VALUES[a.weight.format][i % 2 ? byte & 15 : byte >> 4], scale), i);
}

// A block of the weight by a warp; its scale.
template <typename T, int FORMAT>
__device__ __forceinline__ float merge_block(const bsh_merge_4bit_args &a, int64_t block) {
  const code_encoder<FORMAT> encoder;
  const int lane = threadIdx.x % 32;
  const int64_t begin = block * a.weight.blocksize;
  const int length = (int)min(a.weight.blocksize, a.weight.n - begin);
  const float scale = scale_of_block(a.weight.scales, block);
  float absmax = length < a.weight.blocksize ? 0.0f : -LARGEST;
  for (int i = lane; i < length; i += 32) absmax = absmax_step(absmax, merged<T>(a, scale, begin + i));
  absmax = warp_absmax(absmax);
  const float inverse = exact_reciprocal(absmax);
  if (lane == 0) a.absmax[block] = absmax;
  for (int pair = 0; pair < length; pair += 64) {
    const int64_t i = begin + pair + 2 * lane;
    const bool inside = pair + 2 * lane < length;
    const float high = inside ? merged<T>(a, scale, i) : 0.0f, low = inside ? merged<T>(a, scale, i + 1) : 0.0f;
    uint32_t codes = encoder.add_code(0, multiply_flush(inverse, high), 4);
    codes = encoder.add_code(codes, multiply_flush(inverse, low), 0);
    if (inside) a.packed[i / 2] = (uint8_t)codes;
  }
  return absmax;
}

template <typename T, int FORMAT> __device__ __forceinline__ void merge_4bit_any(const bsh_merge_4bit_args &a) {
  const int64_t block = (int64_t)blockIdx.x * BSH_MERGE_WARPS + threadIdx.x / 32;
  wait_for_earlier_kernels();
  const float absmax = block * a.weight.blocksize < a.weight.n ? merge_block<T, FORMAT>(a, block) : 0.0f;
  if (a.mean != nullptr) sum_of_block<BSH_MERGE_THREADS>(threadIdx.x % 32 == 0 ? absmax : 0.0f, a.sums + blockIdx.x);
}

// *mean = (sums[0] + ... + sums[count - 1]) / scales, by one block of threads.
__device__ __forceinline__ void merge_mean(const double *sums, int64_t count, int64_t scales, float *mean) {
  wait_for_earlier_kernels();
  double mine = 0, total;
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) mine += sums[i];
  sum_of_block<BSH_MERGE_MEAN_THREADS>(mine, &total);
  if (threadIdx.x == 0) *mean = (float)__dmul_rn(total, 1.0 / (double)scales);
}

// Adapters added in place to elements [begin, end) of the weight in fp32, values[0 ...].
template <typename T>
__device__ __forceinline__ void add_adapters(const bsh_merge_4bit_args &a, int64_t begin, int64_t end, float *values) {
  const int64_t i = begin + (int64_t)blockIdx.x * BSH_MERGE_THREADS + threadIdx.x;
  wait_for_earlier_kernels();
  if (i < end) values[i - begin] = added<T>(a, values[i - begin], i);
}

} // namespace bsh

#define MERGE(name, type, format_name, format)                                                                         \
  extern "C" __global__ void __launch_bounds__(BSH_MERGE_THREADS, BSH_MERGE_RESIDENT)                                  \
      merge_4bit_##name##_##format_name(const __grid_constant__ bsh_merge_4bit_args args) {                            \
    bsh::merge_4bit<type, format>(args);                                                                               \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(BSH_MERGE_THREADS)                                                      \
      merge_4bit_any_##name##_##format_name(const __grid_constant__ bsh_merge_4bit_args args) {                        \
    bsh::merge_4bit_any<type, format>(args);                                                                           \
  }
#define MERGE_FORMATS(name, type)                                                                                      \
  extern "C" __global__ void __launch_bounds__(BSH_MERGE_THREADS) add_adapters_##name(                                 \
      const __grid_constant__ bsh_merge_4bit_args args, int64_t begin, int64_t end, float *values) {                   \
    bsh::add_adapters<type>(args, begin, end, values);                                                                 \
  }                                                                                                                    \
  MERGE(name, type, nf4, BSH_NF4)                                                                                      \
  MERGE(name, type, fp4, BSH_FP4)
MERGE_FORMATS(f32, float)
MERGE_FORMATS(f16, __half)
MERGE_FORMATS(bf16, __nv_bfloat16)

extern "C" __global__ void __launch_bounds__(BSH_MERGE_MEAN_THREADS)
    merge_4bit_mean(const double *sums, int64_t count, int64_t scales, float *mean) {
  bsh::merge_mean(sums, count, scales, mean);
}
