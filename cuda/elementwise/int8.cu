// int8.cu - what surrounds a product of int8 codes: quantize_int8, outliers_int8, dequantize_int8, scale_product_int8;
// and linear_int8_any, few rows of x by W, for sizes and dtypes that gemv_int8.cu does not take.
//
//   x [M, K] --quantize_int8--> codes [M, K], absmax [M], flags [K] --outliers_int8--> list and count of outlier
//   columns,
//                                                                   their codes cleared, x and W gathered
//
// Host side: csrc/gpu/int8.c.
#include "cuda/sizes/gemm_4bit_int8.h"

#include "cuda/operands/int8.cuh"

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

// Four elements, at once where they are aligned.
template <typename T> __device__ __forceinline__ void load_four(const T *from, bool fast, float *x) {
  using four = std::conditional_t<sizeof(T) == 4, uint4, uint2>;
  four raw;
  if (fast) {
    raw = *reinterpret_cast<const four *>(from);
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) reinterpret_cast<T *>(&raw)[i] = from[i];
  }
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = to_float(reinterpret_cast<const T *>(&raw)[i]);
}

// ---- quantize_int8 --------------------------------------------------------------------------------------------------

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

// One row of x by a block of threads: a look for its absmax, one for its codes. The elements of the first look that fit
// stay in registers, others come from the cache.
template <typename T> struct row_quantizer {
  static constexpr int WIDTH = vector16<T>::WIDTH, KEPT = 4;
  static constexpr bool CLAIMS = ARCH >= 90 && sizeof(T) == 2; // what gemm_int8_sm90 takes
  const bsh_quantize_int8_args &args;
  const T *row;
  int8_t *codes;
  uint32_t threshold;           // bits, more than those of any number where there is none
  uint32_t threshold_to_0x8000; // of elements of 16 bits
  int vectors;
  uint16_t *const claims;

  __device__ __forceinline__ row_quantizer(const bsh_int8_rows_args &a, int64_t m) : args(a.rows), claims(a.claims) {
    row = static_cast<const T *>(args.x) + m * args.ldx, codes = args.codes + m * args.K;
    const bool none = args.outliers == nullptr && !(CLAIMS && claims != nullptr);
    threshold = none ? 0xFFFFFFFFu : __float_as_uint(args.threshold);
    threshold_to_0x8000 = missing_to_0x8000(threshold);
    const bool fast = reinterpret_cast<uintptr_t>(row) % 16 == 0 && reinterpret_cast<uintptr_t>(codes) % WIDTH == 0;
    vectors = fast ? (int)(args.K / WIDTH) : 0;
  }
  __device__ __forceinline__ bool is_outlier(uint32_t magnitude) const { return bsh::is_outlier(magnitude, threshold); }
  // Flags or claims a column.
  __device__ __forceinline__ void mark(int64_t k) const {
    if (CLAIMS && claims != nullptr) claims[k] = (uint16_t)~blockIdx.x;
    else args.outliers[k] = 1;
  }
  // Takes an element into the absmax, or marks its column where it reaches the threshold.
  __device__ __forceinline__ void look(float x, int64_t k, uint32_t &largest) const {
    const uint32_t magnitude = __float_as_uint(fabsf(x));
    if (is_outlier(magnitude)) mark(k);
    else largest = max(largest, magnitude);
  }
  __device__ __forceinline__ uint32_t code(float x, float scale) const {
    return is_outlier(__float_as_uint(fabsf(x))) ? 0 : code_of(x, scale);
  }
  __device__ __forceinline__ vector16<T> load(int v) const {
    vector16<T> loaded;
    loaded.raw = reinterpret_cast<const uint4 *>(row)[v];
    return loaded;
  }
  // Zeros in the place of outliers, and a bit for each: of 16-bit elements as in place_of. Without branches: lanes of a
  // warp have theirs at many places.
  __device__ __forceinline__ uint32_t take_out(vector16<T> &v) const {
    uint32_t words[4] = {v.raw.x, v.raw.y, v.raw.z, v.raw.w}, mask[4], found = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      mask[i] = outliers_of(words[i]);
      words[i] &= ~mask[i];
      if (sizeof(T) == 4) found |= mask[i] & 1u << i;
    }
    v.raw = make_uint4(words[0], words[1], words[2], words[3]);
    if (sizeof(T) == 4) return found;
    return (__byte_perm(mask[0], mask[1], 0x6420) & 0x01010101u) |
           (__byte_perm(mask[2], mask[3], 0x6420) & 0x10101010u);
  }
  static __device__ __forceinline__ int place_of(int bit) { return sizeof(T) == 4 ? bit : bit >> 3 | (bit & 4); }
  // Ones in the place of the outliers of a word.
  __device__ __forceinline__ uint32_t outliers_of(uint32_t word) const {
    if (sizeof(T) == 4) return 0u - (uint32_t)is_outlier(word & 0x7FFFFFFFu);
    // In both halves bit 15 is set where a magnitude is at least the threshold, and where it is more than infinity.
    constexpr uint32_t MORE_THAN_INFINITE = IS_HALF<T> ? 0x7C01u : 0x7F81u, BOTH = 0x00010001u;
    const uint32_t magnitudes = word & 0x7FFF7FFFu;
    const uint32_t found = magnitudes + threshold_to_0x8000,
                   no_numbers = magnitudes + (0x8000u - MORE_THAN_INFINITE) * BOTH;
    return ((found & ~no_numbers) >> 15 & BOTH) * 0xFFFFu;
  }
  // Of two numbers of 16 bits: what takes the threshold, a number of T, to 0x8000.
  static __device__ __forceinline__ uint32_t missing_to_0x8000(uint32_t threshold) {
    if (threshold > INFINITE) return 0;
    T least;
    from_float(__uint_as_float(threshold), &least);
    uint16_t bits;
    memcpy(&bits, &least, sizeof bits);
    return (0x8000u - bits) * 0x00010001u;
  }
  // Leaves zeros in the place of outliers.
  __device__ __forceinline__ void look(vector16<T> &v, int at, uint32_t &largest) const {
    if (largest_of(v) >= threshold)
      for (uint32_t left = take_out(v); left != 0; left &= left - 1)
        mark((int64_t)at * WIDTH + place_of(__ffs(left) - 1));
    largest = max(largest, largest_of(v));
  }
  // Of a vector without outliers.
  __device__ __forceinline__ void store(const vector16<T> &v, int at, float scale) const {
    uint32_t c[WIDTH];
    if (scale == 0.f) {
#pragma unroll
      for (int i = 0; i < WIDTH; i++) c[i] = 0;
    } else {
#pragma unroll
      for (int i = 0; i < WIDTH; i++) c[i] = code_of(v.get(i), scale);
    }
    const uint32_t first = pack_codes(c[0], c[1], c[2], c[3]);
    if constexpr (WIDTH == 8)
      *reinterpret_cast<uint2 *>(codes + (int64_t)at * 8) = make_uint2(first, pack_codes(c[4], c[5], c[6], c[7]));
    else *reinterpret_cast<uint32_t *>(codes + (int64_t)at * 4) = first;
  }
  __device__ __forceinline__ void run(int64_t m, uint32_t *scratch) const {
    vector16<T> kept[KEPT];
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < KEPT; i++)
      if (threadIdx.x + i * THREADS < vectors) kept[i] = load(threadIdx.x + i * THREADS);
#pragma unroll
    for (int i = 0; i < KEPT; i++)
      if (threadIdx.x + i * THREADS < vectors) look(kept[i], threadIdx.x + i * THREADS, largest);
    for (int v = threadIdx.x + KEPT * THREADS; v < vectors; v += THREADS) {
      vector16<T> loaded = load(v);
      look(loaded, v, largest);
    }
    for (int64_t k = vectors * WIDTH + threadIdx.x; k < args.K; k += THREADS) look(to_float(row[k]), k, largest);
    largest = block_max(largest, scratch);
    const float absmax = __uint_as_float(largest > INFINITE ? 0x7FFFFFFFu : largest);
    if (threadIdx.x == 0) args.absmax[m] = absmax;
    const float scale = scale_of_row<T>(absmax);
#pragma unroll
    for (int i = 0; i < KEPT; i++)
      if (threadIdx.x + i * THREADS < vectors) store(kept[i], threadIdx.x + i * THREADS, scale);
    for (int v = threadIdx.x + KEPT * THREADS; v < vectors; v += THREADS) {
      vector16<T> loaded = load(v);
      if (largest_of(loaded) >= threshold) take_out(loaded);
      store(loaded, v, scale);
    }
    for (int64_t k = vectors * WIDTH + threadIdx.x; k < args.K; k += THREADS)
      codes[k] = (int8_t)(scale == 0.f ? 0 : code(to_float(row[k]), scale));
  }
};

__device__ __forceinline__ void clear_int8(const bsh_int8_clear_args &args) {
  let_later_kernels_start();
  wait_for_earlier_kernels();
  const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  if (i < args.n) args.flags[i] = 0;
}

template <typename T> __device__ __forceinline__ void quantize_int8(const bsh_int8_rows_args &args) {
  __shared__ uint32_t scratch[WARPS];
  let_later_kernels_start();
  wait_for_earlier_kernels();
  if (row_quantizer<T>::CLAIMS && args.shares != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *args.shares = 0;
  row_quantizer<T>(args, blockIdx.x).run(blockIdx.x, scratch);
}

// ---- quantize_groups_int8 ------------------------------------------------------------------------------------------

// Codes and scales of a group of 64 elements by 16 lanes.
template <typename T> __device__ __forceinline__ void quantize_groups_int8(const bsh_groups_int8_args &args) {
  constexpr int LANES = BSH_GROUP_INT8_LANES;
  const int64_t group = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / LANES, groups = args.K / BSH_GROUP_INT8;
  const int lane = threadIdx.x % LANES;
  const int64_t m = group / groups, g = group % groups, k = g * BSH_GROUP_INT8 + lane * 4;
  const bool there = m < args.M; // all lanes of a warp shuffle
  let_later_kernels_start();
  wait_for_earlier_kernels();
  float x[4] = {};
  if (there) load_four(static_cast<const T *>(args.x) + m * args.ldx + k, args.fast, x);
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) largest = max(largest, __float_as_uint(fabsf(x[i])));
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, step));
  const float absmax = __uint_as_float(largest > INFINITE ? 0x7FFFFFFFu : largest), scale = scale_of_row<T>(absmax);
  if (!there) return;
  uint32_t codes[4] = {};
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (scale != 0.f) codes[i] = code_of(x[i], scale);
  *reinterpret_cast<uint32_t *>(args.codes + m * args.K + k) = pack_codes(codes[0], codes[1], codes[2], codes[3]);
  if (lane == 0) args.scales[g * args.M + m] = __fmul_rn(absmax, INVERSE_127);
}

// ---- outliers_int8 --------------------------------------------------------------------------------------------------

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
    const int upto = sum_upto(own, lane);
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

// Of positions [first, first + n) of the list, those below `gathered` go to the gathered rows; these have zeros from
// there up to `padded`.
template <typename T> struct gatherer {
  const bsh_int8_gather_args &args;
  const int *listed;
  int first, n, gathered, padded;

  // Row r of x, then of W, by a warp: lanes take 64 positions, two neighbours each.
  __device__ __forceinline__ void take(int r, int lane) const {
    const int capacity = args.outliers.capacity;
    const bool of_x = r < args.M;
    const int64_t row = of_x ? r : r - args.M;
    T *const to = static_cast<T *>(of_x ? args.outliers.x : args.outliers.w) + row * capacity + first;
    int8_t *const codes = args.codes + row * args.K;
    const T *const x = static_cast<const T *>(args.x) + row * args.ldx;
    const int8_t *const w = args.w + row * args.K;
    for (int at = 2 * lane; at < max(n, padded - first); at += 64) {
      T value[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        from_float(0.f, &value[i]);
        if (at + i >= n) continue;
        const int k = listed[at + i];
        if (of_x) codes[k] = 0;
        if (first + at + i >= gathered) continue;
        if (of_x) value[i] = x[k];
        else from_float((float)w[k], &value[i]);
      }
      if (first + at < padded) to[at] = value[0], to[at + 1] = value[1];
    }
  }
};

// Rows of x and of W go round the warps of the grid.
template <typename T> __device__ __forceinline__ void outliers_int8(const bsh_int8_gather_args &args) {
  __shared__ int scratch[WARPS], listed[LISTED];
  let_later_kernels_start();
  wait_for_earlier_kernels();
  const outlier_list list(args.outliers.flags, args.K, scratch);
  const bool keeps = args.outliers.count != nullptr && blockIdx.x == 0;
  if (keeps && threadIdx.x == 0) *args.outliers.count = list.count;
  gatherer<T> gather = {args, listed};
  gather.gathered = min(list.count, args.outliers.capacity);
  gather.padded = (gather.gathered + BSH_INT8_CHUNK - 1) / BSH_INT8_CHUNK * BSH_INT8_CHUNK; // at most the capacity
  const int rows = args.M + (args.outliers.capacity > 0 ? args.N : 0);
  for (int first = 0; first < list.count; first += LISTED) {
    gather.first = first, gather.n = min(LISTED, list.count - first);
    __syncthreads();
    list.list(first, listed);
    __syncthreads();
    if (keeps)
      for (int i = threadIdx.x; i < gather.n; i += THREADS) args.outliers.list[first + i] = listed[i];
    // Beyond the first LISTED columns what W adds may be past what is gathered.
    const int last = first < gather.padded ? rows : args.M;
    for (int r = blockIdx.x * WARPS + threadIdx.x / 32; r < last; r += gridDim.x * WARPS)
      gather.take(r, threadIdx.x % 32);
  }
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
template <typename T> __device__ __forceinline__ void linear_int8_any(const bsh_int8_any_args &args) {
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
template <typename T> __device__ __forceinline__ void linear_int8_dgrad_any(const bsh_int8_any_args &args) {
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

#define ENTRY(NAME, ARGS, ...) BSH_ENTRY(__launch_bounds__(BSH_INT8_THREADS), NAME, ARGS, __VA_ARGS__)
#define ANY_ENTRY(NAME, ...) BSH_ENTRY(__launch_bounds__(BSH_INT8_ANY_WARPS * 32), NAME, bsh_int8_any_args, __VA_ARGS__)
#define ENTRIES(SUFFIX, T)                                                                                             \
  ENTRY(quantize_int8_##SUFFIX, bsh_int8_rows_args, quantize_int8<T>)                                                  \
  ENTRY(quantize_groups_int8_##SUFFIX, bsh_groups_int8_args, quantize_groups_int8<T>)                                  \
  ENTRY(outliers_int8_##SUFFIX, bsh_int8_gather_args, outliers_int8<T>)                                                \
  ENTRY(dequantize_int8_##SUFFIX, bsh_int8_rectangle_args, dequantize_int8<T, true>)                                   \
  ENTRY(dequantize_int8_any_##SUFFIX, bsh_int8_rectangle_args, dequantize_int8<T, false>)                              \
  ENTRY(scale_product_int8_##SUFFIX, bsh_scale_product_int8_args, scale_product_int8<T>)                               \
  ANY_ENTRY(linear_int8_any_##SUFFIX, linear_int8_any<T>)                                                              \
  ANY_ENTRY(linear_int8_dgrad_any_##SUFFIX, linear_int8_dgrad_any<T>)
ENTRY(clear_int8, bsh_int8_clear_args, clear_int8)
ENTRY(split_scales_int8_f16, bsh_int8_split_args, split_scales_int8<__half>)
ENTRY(split_scales_int8_bf16, bsh_int8_split_args, split_scales_int8<__nv_bfloat16>)
ENTRIES(f32, float)
ENTRIES(f16, __half)
ENTRIES(bf16, __nv_bfloat16)
