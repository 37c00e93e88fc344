// int8.cu - what surrounds a product of int8 codes: quantize_int8, outliers_int8, dequantize_int8, scale_product_int8;
// and linear_int8_any, few rows of x by W, for sizes and dtypes that gemv_int8.cu does not take.
//
//   x [M, K] --quantize_int8--> codes [M, K], absmax [M], flags [K] --outliers_int8--> list and count of outlier
//   columns,
//                                                                   their codes cleared, x and W gathered
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
__device__ __forceinline__ int code_of(float x, float scale) {
  const float product = __fmul_rn(x, scale);
  return fabsf(product) <= 128.f ? __float2int_rn(product) : 0;
}

// One row of x by a block of threads: a look for its absmax, one for its codes. The elements of the first look that fit
// stay in registers, others come from the cache.
template <typename T> struct row_quantizer {
  static constexpr int WIDTH = vector16<T>::WIDTH, KEPT = 4;
  const bsh_quantize_int8_args &args;
  const T *row;
  int8_t *codes;
  bool fast; // 16-byte loads; codes stored by WIDTH bytes
  int64_t vectors;

  __device__ __forceinline__ row_quantizer(const bsh_quantize_int8_args &a, int64_t m) : args(a) {
    row = static_cast<const T *>(a.x) + m * a.ldx, codes = a.codes + m * a.K;
    fast = reinterpret_cast<uintptr_t>(row) % 16 == 0 && reinterpret_cast<uintptr_t>(codes) % WIDTH == 0;
    vectors = fast ? a.K / WIDTH : 0;
  }
  // Takes an element into the absmax, or flags its column where it reaches the threshold. absmax: bits of magnitudes,
  // of which those of NaN are the largest.
  __device__ __forceinline__ void look(float x, int64_t k, uint32_t &absmax) const {
    if (args.outliers != nullptr && fabsf(x) >= args.threshold) args.outliers[k] = 1;
    else absmax = max(absmax, __float_as_uint(fabsf(x)));
  }
  __device__ __forceinline__ int code(float x, float scale) const {
    return args.outliers != nullptr && fabsf(x) >= args.threshold ? 0 : code_of(x, scale);
  }
  __device__ __forceinline__ vector16<T> load(int64_t v) const {
    vector16<T> loaded;
    loaded.raw = *reinterpret_cast<const uint4 *>(row + v * WIDTH);
    return loaded;
  }
  __device__ __forceinline__ void look(const vector16<T> &v, int64_t at, uint32_t &absmax) const {
#pragma unroll
    for (int i = 0; i < WIDTH; i++) look(v.get(i), at * WIDTH + i, absmax);
  }
  __device__ __forceinline__ void store(const vector16<T> &v, int64_t at, float scale) const {
    uint32_t words[2] = {};
#pragma unroll
    for (int i = 0; i < WIDTH; i++) words[i / 4] |= (uint32_t)(code(v.get(i), scale) & 255) << (i % 4 * 8);
    if (WIDTH == 8) *reinterpret_cast<uint2 *>(codes + at * 8) = make_uint2(words[0], words[1]);
    else *reinterpret_cast<uint32_t *>(codes + at * 4) = words[0];
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
    for (int64_t v = threadIdx.x + KEPT * THREADS; v < vectors; v += THREADS) look(load(v), v, largest);
    for (int64_t k = vectors * WIDTH + threadIdx.x; k < args.K; k += THREADS) look(to_float(row[k]), k, largest);
    largest = block_max(largest, scratch);
    const float absmax = __uint_as_float(largest > INFINITE ? 0x7FFFFFFFu : largest);
    if (threadIdx.x == 0) args.absmax[m] = absmax;
    const float scale = scale_of_row<T>(absmax);
#pragma unroll
    for (int i = 0; i < KEPT; i++)
      if (threadIdx.x + i * THREADS < vectors) store(kept[i], threadIdx.x + i * THREADS, scale);
    for (int64_t v = threadIdx.x + KEPT * THREADS; v < vectors; v += THREADS) store(load(v), v, scale);
    for (int64_t k = vectors * WIDTH + threadIdx.x; k < args.K; k += THREADS)
      codes[k] = (int8_t)code(to_float(row[k]), scale);
  }
};

__device__ __forceinline__ void clear_int8(const bsh_int8_clear_args &args) {
  wait_for_earlier_kernels();
  let_later_kernels_start();
  const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  if (i < args.n) args.flags[i] = 0;
}

template <typename T> __device__ __forceinline__ void quantize_int8(const bsh_quantize_int8_args &args) {
  __shared__ uint32_t scratch[WARPS];
  wait_for_earlier_kernels();
  let_later_kernels_start();
  row_quantizer<T>(args, blockIdx.x).run(blockIdx.x, scratch);
}

// ---- outliers_int8 --------------------------------------------------------------------------------------------------

// Every block lists the outlier columns for itself, LISTED of them at a time: thread t has those among its own `span`
// flags, which begin at position `before` of the whole list.
constexpr int LISTED = 1024;
struct outlier_list {
  const uint8_t *flags;
  int begin, end, before, count;

  __device__ __forceinline__ outlier_list(const uint8_t *f, int K, int *scratch) : flags(f) {
    const int span = (K + THREADS - 1) / THREADS, lane = threadIdx.x % 32;
    begin = min(K, (int)threadIdx.x * span), end = min(K, begin + span);
    int own = 0;
    for (int k = begin; k < end; k++) own += flags[k];
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
    for (int k = begin; k < end; k++)
      if (flags[k]) {
        if (at >= 0 && at < LISTED) listed[at] = k;
        at++;
      }
  }
};

template <typename T> struct gatherer {
  const bsh_int8_gather_args &args;
  const int *listed;
  int first, n, gathered; // positions [first, first + n) are listed; those below `gathered` go to the gathered rows

  // Row r of x, then of W: position first + i.
  __device__ __forceinline__ void take(int r, int i) const {
    const int at = first + i, capacity = args.outliers.capacity;
    const bool of_x = r < args.M;
    const int64_t row = of_x ? r : r - args.M;
    T *const to = static_cast<T *>(of_x ? args.outliers.x : args.outliers.w) + row * capacity + at;
    if (i >= n) {
      from_float(0.f, to);
      return;
    }
    const int k = listed[i];
    if (of_x) args.codes[row * args.K + k] = 0;
    if (at >= gathered) return;
    if (of_x) *to = static_cast<const T *>(args.x)[row * args.ldx + k];
    else from_float((float)args.w[row * args.K + k], to);
  }
};

template <typename T> __device__ __forceinline__ void outliers_int8(const bsh_int8_gather_args &args) {
  __shared__ int scratch[WARPS], listed[LISTED];
  wait_for_earlier_kernels();
  let_later_kernels_start();
  const outlier_list list(args.outliers.flags, args.K, scratch);
  const int capacity = args.outliers.capacity, gathered = min(list.count, capacity);
  const int padded = (gathered + BSH_INT8_CHUNK - 1) / BSH_INT8_CHUNK * BSH_INT8_CHUNK; // at most the capacity
  if (args.outliers.count != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *args.outliers.count = list.count;
  const int begin = blockIdx.x * BSH_INT8_OUTLIER_ROWS;
  const int rows = min(BSH_INT8_OUTLIER_ROWS, args.M + (capacity > 0 ? args.N : 0) - begin);
  for (int first = 0; first < list.count; first += LISTED) {
    const int n = min(LISTED, list.count - first), wide = max(n, min(LISTED, padded - first));
    __syncthreads();
    list.list(first, listed);
    __syncthreads();
    if (args.outliers.count != nullptr && blockIdx.x == 0)
      for (int i = threadIdx.x; i < n; i += THREADS) args.outliers.list[first + i] = listed[i];
    const gatherer<T> gather = {args, listed, first, n, gathered};
    for (int i = threadIdx.x; i < rows * wide; i += THREADS) gather.take(begin + i / wide, i % wide);
  }
}

// ---- dequantize_int8, scale_product_int8 ----------------------------------------------------------------------------

// 16 codes a thread where rows are 16-byte aligned, else one.
template <typename T, bool FAST> __device__ __forceinline__ void dequantize_int8(const bsh_int8_rectangle_args &args) {
  constexpr int WIDTH = FAST ? 16 : 1;
  wait_for_earlier_kernels();
  let_later_kernels_start();
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
  wait_for_earlier_kernels();
  let_later_kernels_start();
  const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  if (i >= args.M * args.N) return;
  const int64_t m = i / args.N, n = i - m * args.N;
  from_float(scale_sum(args.sums[i], args.row_absmax[m], args.col_absmax[n], bias_of<T>(args.bias, n)),
             static_cast<T *>(args.y) + i);
}

// ---- linear_int8_any ------------------------------------------------------------------------------------------------

// A warp has one row of W and, of x, ANY_TOKENS rows; blockIdx.y counts these. Lanes take every 32nd element.
template <typename T> __device__ __forceinline__ void linear_int8_any(const bsh_linear_int8_args &args) {
  constexpr int TOKENS = BSH_INT8_ANY_TOKENS;
  wait_for_earlier_kernels();
  let_later_kernels_start();
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
  wait_for_earlier_kernels();
  let_later_kernels_start();
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
  KERNEL(quantize_int8_##SUFFIX, T, bsh_quantize_int8_args, BSH_INT8_THREADS, quantize_int8<T>)                        \
  KERNEL(outliers_int8_##SUFFIX, T, bsh_int8_gather_args, BSH_INT8_THREADS, outliers_int8<T>)                          \
  KERNEL(dequantize_int8_##SUFFIX, T, bsh_int8_rectangle_args, BSH_INT8_THREADS, dequantize_int8<T BSH_COMMA true>)    \
  KERNEL(dequantize_int8_any_##SUFFIX, T, bsh_int8_rectangle_args, BSH_INT8_THREADS,                                   \
         dequantize_int8<T BSH_COMMA false>)                                                                           \
  KERNEL(scale_product_int8_##SUFFIX, T, bsh_scale_product_int8_args, BSH_INT8_THREADS, scale_product_int8<T>)         \
  KERNEL(linear_int8_any_##SUFFIX, T, bsh_linear_int8_args, BSH_INT8_ANY_WARPS * 32, linear_int8_any<T>)               \
  KERNEL(linear_int8_dgrad_any_##SUFFIX, T, bsh_linear_int8_args, BSH_INT8_ANY_WARPS * 32, linear_int8_dgrad_any<T>)
#define BSH_COMMA ,
KERNEL(clear_int8, , bsh_int8_clear_args, BSH_INT8_THREADS, clear_int8)
KERNELS(f32, float)
KERNELS(f16, __half)
KERNELS(bf16, __nv_bfloat16)
