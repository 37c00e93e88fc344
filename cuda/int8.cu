// int8.cu - what surrounds a product of int8 codes: columns_int8, quantize_int8, dequantize_int8, scale_product_int8;
// and linear_int8_any, few rows of x by W, for sizes and dtypes that gemv_int8.cu does not take.
//
//   x [M, K] --columns_int8, where there is a threshold--> flags [K] of outlier columns
//   x, flags --quantize_int8--> codes [M, K], absmax [M]; list and number of outlier columns, of which x and W gathered
//
// Host side: csrc/gpu/int8.c.
#include "int8.cuh"

namespace bsh {
namespace {

constexpr int THREADS = BSH_INT8_THREADS, WARPS = THREADS / 32;

// Of all threads of a block, to all of them. scratch: a word for each warp.
__device__ __forceinline__ uint32_t block_max(uint32_t value, uint32_t *scratch) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value = max(value, __shfl_xor_sync(ALL_LANES, value, step));
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  value = scratch[threadIdx.x % WARPS];
#pragma unroll
  for (int step = WARPS / 2; step > 0; step /= 2) value = max(value, __shfl_xor_sync(ALL_LANES, value, step));
  return value;
}

// ---- quantize_int8 --------------------------------------------------------------------------------------------------

constexpr uint32_t INFINITE = 0x7F800000u;
template <typename T> constexpr bool IS_HALF = false;
template <> constexpr bool IS_HALF<__half> = true;

// int8_scale and int8_code of core/numerics.h.
template <typename T> __device__ __forceinline__ float scale_of_row(float absmax) {
  if (!(absmax >= 3.009265538105056e-36f && absmax <= LARGEST)) return 0.f; // 2^-118
  return IS_HALF<T> ? __fmul_rn(127.f, reciprocal(absmax)) : __fmul_rn(31.75f, __fdiv_rn(4.f, absmax));
}
// A code of an element of at most the row's absmax, whose scale is not 0, in the low byte.
__device__ __forceinline__ uint32_t code_of(float x, float scale) {
  return __float_as_uint(__fadd_rn(__fmul_rn(x, scale), 12582912.f)); // 1.5 * 2^23
}
__device__ __forceinline__ uint32_t pack_codes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x40), __byte_perm(c, d, 0x40), 0x5410);
}

// The largest magnitude of a vector, as the bits of an fp32 number: those of NaN are the largest.
template <typename T> __device__ __forceinline__ uint32_t largest_of(const vector16<T> &v) {
  const uint32_t words[4] = {v.raw.x, v.raw.y, v.raw.z, v.raw.w};
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (sizeof(T) == 4) most = max(most, words[i] & 0x7FFFFFFFu);
    else most = max(most, max(words[i] & 0x7FFF0000u, words[i] << 16 & 0x7FFF0000u));
  if (!IS_HALF<T>) return most;
  return __float_as_uint(__half2float(__ushort_as_half((unsigned short)(most >> 16))));
}

// What of a row or a column is an outlier: bits of a magnitude from those of the threshold on, but no NaN.
struct outlier_bits {
  uint32_t threshold; // more than those of any number where there is none
  __device__ __forceinline__ explicit outlier_bits(const bsh_quantize_int8_args &args)
      : threshold(args.outliers == nullptr ? 0xFFFFFFFFu : __float_as_uint(args.threshold)) {}
  __device__ __forceinline__ bool operator()(uint32_t magnitude) const {
    return magnitude >= threshold && magnitude <= INFINITE;
  }
};

// One row of x by a block of threads: a look for its absmax, one for its codes. The elements of the first look that fit
// stay in registers, others come from the cache. Vectors without an outlier are taken whole. Codes of outlier columns,
// whose flags columns_int8 has left, are 0.
template <typename T> struct row_quantizer {
  static constexpr int WIDTH = vector16<T>::WIDTH, KEPT = 4;
  const bsh_quantize_int8_args &args;
  const outlier_bits is_outlier;
  const T *row;
  int8_t *codes;
  int vectors;

  __device__ __forceinline__ row_quantizer(const bsh_quantize_int8_args &a, int64_t m) : args(a), is_outlier(a) {
    row = static_cast<const T *>(a.x) + m * a.ldx, codes = a.codes + m * a.K;
    const bool fast = reinterpret_cast<uintptr_t>(row) % 16 == 0 &&
                      (reinterpret_cast<uintptr_t>(codes) | reinterpret_cast<uintptr_t>(a.outliers)) % WIDTH == 0;
    vectors = fast ? (int)(a.K / WIDTH) : 0;
  }
  // Takes an element into the absmax, or passes over it.
  __device__ __forceinline__ void look(float x, uint32_t &largest) const {
    const uint32_t magnitude = __float_as_uint(fabsf(x));
    if (!is_outlier(magnitude)) largest = max(largest, magnitude);
  }
  __device__ __forceinline__ vector16<T> load(int v) const {
    vector16<T> loaded;
    loaded.raw = reinterpret_cast<const uint4 *>(row)[v];
    return loaded;
  }
  // Flags of a vector's columns.
  __device__ __forceinline__ uint64_t flags(int v) const {
    if (args.outliers == nullptr) return 0;
    if constexpr (WIDTH == 8) return reinterpret_cast<const uint64_t *>(args.outliers)[v];
    else return reinterpret_cast<const uint32_t *>(args.outliers)[v];
  }
  __device__ __forceinline__ void look(const vector16<T> &v, uint32_t &largest) const {
    const uint32_t most = largest_of(v);
    if (most < is_outlier.threshold) {
      largest = max(largest, most);
      return;
    }
#pragma unroll
    for (int i = 0; i < WIDTH; i++) look(v.get(i), largest);
  }
  __device__ __forceinline__ void store(const vector16<T> &v, uint64_t flagged, int at, float scale) const {
    uint32_t c[WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; i++) c[i] = scale == 0.f ? 0 : code_of(v.get(i), scale);
    if (flagged != 0)
#pragma unroll
      for (int i = 0; i < WIDTH; i++)
        if (flagged >> (8 * i) & 1) c[i] = 0;
    const uint32_t first = pack_codes(c[0], c[1], c[2], c[3]);
    if constexpr (WIDTH == 8)
      *reinterpret_cast<uint2 *>(codes + (int64_t)at * 8) = make_uint2(first, pack_codes(c[4], c[5], c[6], c[7]));
    else *reinterpret_cast<uint32_t *>(codes + (int64_t)at * 4) = first;
  }
  __device__ __forceinline__ void run(int64_t m, uint32_t *scratch) const {
    vector16<T> kept[KEPT];
    uint64_t flagged[KEPT];
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < KEPT; i++)
      if (threadIdx.x + i * THREADS < vectors)
        kept[i] = load(threadIdx.x + i * THREADS), flagged[i] = flags(threadIdx.x + i * THREADS);
#pragma unroll
    for (int i = 0; i < KEPT; i++)
      if (threadIdx.x + i * THREADS < vectors) look(kept[i], largest);
    for (int v = threadIdx.x + KEPT * THREADS; v < vectors; v += THREADS) look(load(v), largest);
    for (int64_t k = vectors * WIDTH + threadIdx.x; k < args.K; k += THREADS) look(to_float(row[k]), largest);
    largest = block_max(largest, scratch);
    const float absmax = __uint_as_float(largest > INFINITE ? 0x7FFFFFFFu : largest);
    if (threadIdx.x == 0) args.absmax[m] = absmax;
    const float scale = scale_of_row<T>(absmax);
#pragma unroll
    for (int i = 0; i < KEPT; i++)
      if (threadIdx.x + i * THREADS < vectors) store(kept[i], flagged[i], threadIdx.x + i * THREADS, scale);
    for (int v = threadIdx.x + KEPT * THREADS; v < vectors; v += THREADS) store(load(v), flags(v), v, scale);
    for (int64_t k = vectors * WIDTH + threadIdx.x; k < args.K; k += THREADS) {
      const bool zero = scale == 0.f || (args.outliers != nullptr && args.outliers[k] != 0);
      codes[k] = (int8_t)(zero ? 0 : code_of(to_float(row[k]), scale));
    }
  }
};

// ---- columns_int8: flags of outlier columns
// --------------------------------------------------------------------------

// A block has the columns of STRIP vectors, all rows: a thread one vector of every 64th row, BATCH of them at a time.
template <typename T> struct column_search {
  static constexpr int WIDTH = vector16<T>::WIDTH, STRIP = BSH_INT8_STRIP, ROWS = THREADS / STRIP, BATCH = 8;
  const bsh_quantize_int8_args &args;
  const outlier_bits is_outlier;
  const T *x; // from this thread's first column on
  int there;  // of its columns

  __device__ __forceinline__ explicit column_search(const bsh_quantize_int8_args &a) : args(a), is_outlier(a) {
    const int64_t column = ((int64_t)blockIdx.x * STRIP + threadIdx.x % STRIP) * WIDTH;
    x = static_cast<const T *>(a.x) + column;
    there = (int)min((int64_t)WIDTH, max((int64_t)0, a.K - column));
  }
  // Bit i: column i of the vector has an outlier in one of this thread's rows.
  __device__ __forceinline__ uint32_t find() const {
    const bool fast = there == WIDTH && (reinterpret_cast<uintptr_t>(x) | args.ldx * sizeof(T)) % 16 == 0;
    uint32_t found = 0;
    for (int64_t m = threadIdx.x / STRIP; m < args.M; m += ROWS * BATCH) {
      vector16<T> v[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        const int64_t row = m + i * ROWS;
        v[i].raw = make_uint4(0, 0, 0, 0);
        if (row >= args.M) continue;
        if (fast) v[i].raw = *reinterpret_cast<const uint4 *>(x + row * args.ldx);
        else
#pragma unroll
          for (int e = 0; e < WIDTH; e++)
            if (e < there) reinterpret_cast<T *>(&v[i].raw)[e] = x[row * args.ldx + e];
      }
#pragma unroll
      for (int i = 0; i < BATCH; i++)
        if (largest_of(v[i]) >= is_outlier.threshold)
#pragma unroll
          for (int e = 0; e < WIDTH; e++) found |= (uint32_t)is_outlier(__float_as_uint(fabsf(v[i].get(e)))) << e;
    }
    return found;
  }
};

template <typename T> __device__ __forceinline__ void columns_int8(const bsh_quantize_int8_args &args) {
  using search = column_search<T>;
  __shared__ uint32_t scratch[WARPS][search::STRIP];
  let_later_kernels_start();
  wait_for_earlier_kernels();
  uint32_t found = search(args).find();
#pragma unroll
  for (int step = search::STRIP; step < 32; step *= 2) found |= __shfl_xor_sync(ALL_LANES, found, step);
  if (threadIdx.x % 32 < search::STRIP) scratch[threadIdx.x / 32][threadIdx.x % 32] = found;
  __syncthreads();
  const int64_t k = (int64_t)blockIdx.x * search::STRIP * search::WIDTH + threadIdx.x;
  if (threadIdx.x >= search::STRIP * search::WIDTH || k >= args.K) return;
  found = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) found |= scratch[w][threadIdx.x / search::WIDTH];
  args.outliers[k] = found >> threadIdx.x % search::WIDTH & 1;
}

// ---- the list of outlier columns, and what is gathered of them ------------------------------------------------------

// Every block lists the outlier columns for itself, LISTED of them at a time: thread t has those among its own `span`
// words of 16 flags, which begin at position `before` of the whole list.
constexpr int LISTED = 1024;
struct outlier_list {
  const uint8_t *flags;
  int K, begin, end, before, count; // begin, end: words

  // Flags of a word: bit 8i of [j] is that of column 16 word + 4j + i.
  __device__ __forceinline__ uint4 word(int w) const {
    if (w * 16 + 16 <= K && reinterpret_cast<uintptr_t>(flags) % 16 == 0)
      return reinterpret_cast<const uint4 *>(flags)[w];
    uint32_t found[4] = {};
#pragma unroll
    for (int i = 0; i < 16; i++)
      if (w * 16 + i < K) found[i / 4] |= (uint32_t)flags[w * 16 + i] << (i % 4 * 8);
    return make_uint4(found[0], found[1], found[2], found[3]);
  }
  __device__ __forceinline__ outlier_list(const uint8_t *f, int columns, int *scratch) : flags(f), K(columns) {
    const int words = (K + 15) / 16, span = (words + THREADS - 1) / THREADS, lane = threadIdx.x % 32;
    begin = min(words, (int)threadIdx.x * span), end = min(words, begin + span);
    int own = 0;
#pragma unroll 4
    for (int w = begin; w < end; w++) {
      const uint4 v = word(w);
      own += __popc(v.x) + __popc(v.y) + __popc(v.z) + __popc(v.w);
    }
    int upto = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(ALL_LANES, upto, step);
      if (lane >= step) upto += other;
    }
    if (lane == 31) scratch[threadIdx.x / 32] = upto;
    __syncthreads();
    before = upto - own, count = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      if (w < threadIdx.x / 32) before += scratch[w];
      count += scratch[w];
    }
  }
  // Positions [first, first + LISTED) of the list to `listed`; a barrier by the caller.
  __device__ __forceinline__ void list(int first, int *listed) const {
    int at = before - first;
    for (int w = begin; w < end; w++) {
      const uint4 v = word(w);
      const uint32_t parts[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int j = 0; j < 4; j++)
        for (uint32_t left = parts[j]; left != 0; left &= left - 1, at++)
          if (at >= 0 && at < LISTED) listed[at] = w * 16 + j * 4 + (__ffs(left) - 1) / 8;
    }
  }
};

__device__ __forceinline__ float to_value(int8_t code) { return (float)code; }
template <typename T> __device__ __forceinline__ float to_value(T x) { return to_float(x); }

// Of a row of x or of W, the first `n` columns in `listed`, in T to `to`; zeros from there up to `padded`, a multiple
// of 8. `at` and `step`: positions of this thread, 8 at a time.
template <typename T, typename FROM>
__device__ __forceinline__ void gather_row(T *to, const FROM *from, const int *listed, int n, int padded, int at,
                                           int step) {
#pragma unroll 1
  for (; at < padded; at += step) {
    float values[8];
#pragma unroll
    for (int i = 0; i < 8; i++) values[i] = at + i < n ? to_value(from[listed[at + i]]) : 0.f;
    *reinterpret_cast<uint4 *>(to + at) =
        make_uint4(pack_pair<T>(values[0], values[1]), pack_pair<T>(values[2], values[3]),
                   pack_pair<T>(values[4], values[5]), pack_pair<T>(values[6], values[7]));
  }
}

// Gathers the outlier columns of row `row` of x, by a block of threads, or where there is none those of the block's
// rows of W, each by 8 threads. The first block leaves the list and its length.
template <typename T> __device__ __forceinline__ void gather_outliers(const bsh_int8_code_args &args, int64_t row) {
  __shared__ int scratch[WARPS], listed[LISTED];
  const bsh_int8_outliers &of = args.outliers;
  const outlier_list list(of.flags, (int)args.x.K, scratch);
  if (blockIdx.x == 0 && threadIdx.x == 0) *of.count = list.count;
  const int gathered = min(list.count, of.capacity);
  const int padded = (gathered + BSH_INT8_CHUNK - 1) / BSH_INT8_CHUNK * BSH_INT8_CHUNK; // at most the capacity
  const int last = blockIdx.x == 0 ? list.count : gathered;
  for (int first = 0; first < last; first += LISTED) {
    const int n = min(LISTED, list.count - first);
    __syncthreads();
    list.list(first, listed);
    __syncthreads();
    if (blockIdx.x == 0)
      for (int i = threadIdx.x; i < n; i += THREADS) of.list[first + i] = listed[i];
    if constexpr (sizeof(T) == 2) {
      const int wanted = min(n, gathered - first), end = min(LISTED, padded - first);
      if (row < args.x.M) {
        gather_row(static_cast<T *>(of.x) + row * of.capacity + first,
                   static_cast<const T *>(args.x.x) + row * args.x.ldx, listed, wanted, end, 8 * threadIdx.x,
                   8 * THREADS);
      } else {
        const int64_t step = (int64_t)(gridDim.x - args.x.M) * BSH_INT8_GATHER_ROWS;
        int64_t r = (row - args.x.M) * BSH_INT8_GATHER_ROWS + threadIdx.x / 8;
        for (; r < args.N; r += step)
          gather_row(static_cast<T *>(of.w) + r * of.capacity + first, args.w + r * args.x.K, listed, wanted, end,
                     8 * (threadIdx.x % 8), 64);
      }
    }
  }
}

// A block of threads for each row of x, and where outlier columns are gathered some for W.
template <typename T> __device__ __forceinline__ void quantize_int8(const bsh_int8_code_args &args) {
  __shared__ uint32_t scratch[WARPS];
  let_later_kernels_start();
  wait_for_earlier_kernels();
  if (blockIdx.x < args.x.M) row_quantizer<T>(args.x, blockIdx.x).run(blockIdx.x, scratch);
  if (args.outliers.count != nullptr) gather_outliers<T>(args, blockIdx.x);
}

// ---- dequantize_int8, scale_product_int8 ----------------------------------------------------------------------------

// 16 codes a thread where rows are 16-byte aligned, else one.
template <typename T, bool FAST> __device__ __forceinline__ void dequantize_int8(const bsh_int8_rectangle_args &args) {
  constexpr int WIDTH = FAST ? 16 : 1;
  let_later_kernels_start();
  wait_for_earlier_kernels();
  const int64_t of_row = args.columns / WIDTH, i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  if (i >= of_row * args.rows) return;
  const int64_t row = i / of_row, column = (i - row * of_row) * WIDTH;
  const int8_t *const from = args.codes + row * args.pitch + column;
  T *const to = static_cast<T *>(args.y) + row * args.columns + column;
  const float absmax = args.absmax[row];
  if constexpr (!FAST) {
    from_float(__fmul_rn(__fmul_rn((float)*from, absmax), INVERSE_127), to);
  } else {
    const uint4 raw = *reinterpret_cast<const uint4 *>(from);
    const int8_t *const codes = reinterpret_cast<const int8_t *>(&raw);
    constexpr int OUT = vector16<T>::WIDTH;
#pragma unroll
    for (int v = 0; v < 16 / OUT; v++) {
      float values[OUT];
#pragma unroll
      for (int j = 0; j < OUT; j++) values[j] = __fmul_rn(__fmul_rn((float)codes[v * OUT + j], absmax), INVERSE_127);
      vector16<T> out;
      out.set(values);
      reinterpret_cast<uint4 *>(to)[v] = out.raw;
    }
  }
}

template <typename T> __device__ __forceinline__ void scale_product_int8(const bsh_scale_product_int8_args &args) {
  let_later_kernels_start();
  wait_for_earlier_kernels();
  const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  if (i >= args.M * args.N) return;
  const int64_t m = i / args.N, n = i - m * args.N;
  from_float(scale_sum(args.sums[i], args.row_absmax[m], args.col_absmax[n], bias_of<T>(args.bias, n)),
             static_cast<T *>(args.y) + i);
}

template <typename T> __device__ __forceinline__ void split_scales_int8(const bsh_int8_split_args &args) {
  let_later_kernels_start();
  wait_for_earlier_kernels();
  const int i = blockIdx.x * THREADS + threadIdx.x, n = 2 * i;
  if (i >= args.n_pairs) return;
  const float first = n < args.N ? args.absmax[n] * INVERSE_127 : 0.f;
  const float second = n + 1 < args.N ? args.absmax[n + 1] * INVERSE_127 : 0.f;
  T high[2];
  from_float(first, &high[0]), from_float(second, &high[1]);
  args.pairs[i] = {pack_pair<T>(first, second), pack_pair<T>(first - to_float(high[0]), second - to_float(high[1]))};
}

// ---- linear_int8_any ------------------------------------------------------------------------------------------------

// A warp has one row of W and, of x, ANY_TOKENS rows; blockIdx.y counts these. Lanes take every 32nd element.
template <typename T> __device__ __forceinline__ void linear_int8_any(const bsh_linear_int8_args &args) {
  constexpr int TOKENS = BSH_INT8_ANY_TOKENS;
  let_later_kernels_start();
  wait_for_earlier_kernels();
  const int lane = threadIdx.x % 32;
  const int64_t n = (int64_t)blockIdx.x * BSH_INT8_ANY_WARPS + threadIdx.x / 32, m = (int64_t)blockIdx.y * TOKENS;
  if (n >= args.N) return;
  const int8_t *const w = args.packed + n * args.K;
  float sum[TOKENS] = {};
  for (int64_t k = lane; k < args.K; k += 32) {
    const float code = (float)w[k];
#pragma unroll
    for (int t = 0; t < TOKENS; t++)
      if (m + t < args.M) sum[t] = fmaf(to_float(static_cast<const T *>(args.x)[(m + t) * args.ldx + k]), code, sum[t]);
  }
#pragma unroll
  for (int t = 0; t < TOKENS; t++) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum[t] += __shfl_xor_sync(ALL_LANES, sum[t], step);
    if (lane == 0 && m + t < args.M)
      from_float(scale_codes(sum[t], args.absmax[n], bias_of<T>(args.bias, n)),
                 static_cast<T *>(args.y) + (m + t) * args.N + n);
  }
}

// dx[m, k] of ANY_TOKENS rows m, which blockIdx.y counts, a column a thread: any sizes.
template <typename T> __device__ __forceinline__ void linear_int8_dgrad_any(const bsh_linear_int8_args &args) {
  constexpr int TOKENS = BSH_INT8_ANY_TOKENS;
  let_later_kernels_start();
  wait_for_earlier_kernels();
  const int64_t k = (int64_t)blockIdx.x * BSH_INT8_ANY_WARPS * 32 + threadIdx.x, m = (int64_t)blockIdx.y * TOKENS;
  if (k >= args.K) return;
  float sum[TOKENS] = {};
  for (int64_t n = 0; n < args.N; n++) {
    const float value = __fmul_rn(__fmul_rn((float)args.packed[n * args.K + k], args.absmax[n]), INVERSE_127);
#pragma unroll
    for (int t = 0; t < TOKENS; t++)
      if (m + t < args.M)
        sum[t] = fmaf(to_float(static_cast<const T *>(args.x)[(m + t) * args.ldx + n]), value, sum[t]);
  }
#pragma unroll
  for (int t = 0; t < TOKENS; t++)
    if (m + t < args.M) from_float(sum[t], static_cast<T *>(args.y) + (m + t) * args.K + k);
}

} // namespace
} // namespace bsh

#define KERNEL(NAME, T, ARGS, THREADS, CALL)                                                                           \
  extern "C" __global__ void __launch_bounds__(THREADS) NAME(const __grid_constant__ ARGS args) { bsh::CALL(args); }
#define KERNELS(SUFFIX, T)                                                                                             \
  KERNEL(columns_int8_##SUFFIX, T, bsh_quantize_int8_args, BSH_INT8_THREADS, columns_int8<T>)                          \
  KERNEL(quantize_int8_##SUFFIX, T, bsh_int8_code_args, BSH_INT8_THREADS, quantize_int8<T>)                            \
  KERNEL(dequantize_int8_##SUFFIX, T, bsh_int8_rectangle_args, BSH_INT8_THREADS, dequantize_int8<T BSH_COMMA true>)    \
  KERNEL(dequantize_int8_any_##SUFFIX, T, bsh_int8_rectangle_args, BSH_INT8_THREADS,                                   \
         dequantize_int8<T BSH_COMMA false>)                                                                           \
  KERNEL(scale_product_int8_##SUFFIX, T, bsh_scale_product_int8_args, BSH_INT8_THREADS, scale_product_int8<T>)         \
  KERNEL(linear_int8_any_##SUFFIX, T, bsh_linear_int8_args, BSH_INT8_ANY_WARPS * 32, linear_int8_any<T>)               \
  KERNEL(linear_int8_dgrad_any_##SUFFIX, T, bsh_linear_int8_args, BSH_INT8_ANY_WARPS * 32, linear_int8_dgrad_any<T>)
#define BSH_COMMA ,
KERNEL(split_scales_int8_f16, , bsh_int8_split_args, BSH_INT8_THREADS, split_scales_int8<__half>)
KERNEL(split_scales_int8_bf16, , bsh_int8_split_args, BSH_INT8_THREADS, split_scales_int8<__nv_bfloat16>)
KERNELS(f32, float)
KERNELS(f16, __half)
KERNELS(bf16, __nv_bfloat16)
