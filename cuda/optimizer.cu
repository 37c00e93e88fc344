// optimizer.cu - the optimizers of optimizer.h for all parameters of a bsh_step_list in one launch.
//
// A warp takes a block of 256 elements at a time, 8 in each lane, whichever parameter it belongs to; blocks of all
// parameters are dealt to the warps in turn.
//
//   g, p, states (16-byte loads) -> step() -> p
//   8-bit states: codes -> map in shared memory x scale -> step() -> largest magnitude of the warp -> new codes and
//   scale
//
// The arithmetic is that of bitsandbytes' CUDA build: every operation flushes denormals, and quotients and roots are
// the GPU's approximations. What stays the same in a step (1 - beta^t and what follows from it) comes rounded once from
// the host, where bitsandbytes takes approximations of the GPU too.
#include "common.cuh"

#include <float.h>

namespace bsh {

#define STEP_FUNCTION static __device__ __forceinline__

typedef float value;

STEP_FUNCTION value v_set(float a) { return a; }

#define BSH_FLUSHING(name, instruction)                                                                                \
  STEP_FUNCTION value name(value a, value b) {                                                                         \
    value result;                                                                                                      \
    asm(instruction " %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));                                                   \
    return result;                                                                                                     \
  }
BSH_FLUSHING(v_add, "add.rn.ftz.f32")
BSH_FLUSHING(v_mul, "mul.rn.ftz.f32")
#undef BSH_FLUSHING

STEP_FUNCTION value v_fma(value a, value b, value c) {
  value result;
  asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(c));
  return result;
}

STEP_FUNCTION value v_sqrt(value a) {
  value result;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(a));
  return result;
}

// div.approx.ftz for denominators below 2^126.
STEP_FUNCTION value v_div(value a, value b) { return v_mul(a, reciprocal(b)); }

STEP_FUNCTION value v_sign(value a) { return (float)((a > 0.0f) - (a < 0.0f)); }
STEP_FUNCTION value v_flush(value a) { return a; }
STEP_FUNCTION value v_if_zero(value g, value a, value b) { return g == 0.0f ? a : b; }
STEP_FUNCTION value v_if_finite(value g, value a, value b) { return fabsf(g) <= FLT_MAX ? a : b; }

STEP_FUNCTION value v_round(bsh_dtype dtype, value a) {
  if (dtype == BSH_F16) return __half2float(__float2half_rn(a));
  if (dtype == BSH_BF16) return __bfloat162float(__float2bfloat16_rn(a));
  return a;
}

#include "optimizer.h"

// ---- codes of 8-bit states ------------------------------------------------------------------------------------------

__device__ __forceinline__ bool is_negative(float a) { return __float_as_uint(a) >> 31; }

// bitsandbytes' search, for any map: seven halvings against entries of odd index leave one of even index, the midpoints
// decide, and a tie goes to the even index; a NaN is 0. With keep_sign a code whose entry has not the sign of the state
// is moved by one, beyond either end too, where it wraps.
__device__ __noinline__ uint32_t encode_any(const float *map, bool keep_sign, float v, float state) {
  int odd = 127;
  for (int step = 64; step > 1; step /= 2) odd += v > map[odd] ? step : -step;
  const int even = odd + (v > map[odd] ? 1 : -1);
  int code = even;
  if (v > map[even]) code += v > v_mul(v_add(map[even], map[even + 1]), 0.5f);
  else if (even > 0) code -= v < v_mul(v_add(map[even], map[even - 1]), 0.5f);
  if (keep_sign && is_negative(map[code]) != is_negative(state)) code += state > 0.0f ? 1 : -1;
  return (uint32_t)code & 255;
}

// The code of a magnitude in one load: magnitudes from 2^-24 to 1 in cells of the upper kBits bits of the mantissa, of
// which none has more than one threshold. Cell: code of its least magnitude | threshold in the cell << 8, beyond which
// the code is one more (positive) or one less (negative). A map of which that is not true is searched by encode_any.
template <bool kSigned> struct StateCodes {
  // The signed map has half as many entries of each sign.
  static constexpr int kBits = kSigned ? 6 : 7, kShift = 23 - kBits, kOctaves = 24;
  static constexpr int kCells = (kOctaves << kBits) + 1, kSigns = kSigned ? 2 : 1;
  static constexpr uint32_t kOne = 127u << 23, kLeast = kOne - ((uint32_t)kOctaves << 23), kInside = (1u << kShift) - 1;
  static constexpr uint32_t kNever = 1u << (kShift + 1);

  float map[256];
  float bounds[256]; // least number with a code of i + 1 or more; [255] is infinite
  uint32_t cells[kSigns * kCells];

  // How many bounds are <= v: the code of v, before its sign is looked at.
  __device__ __forceinline__ int count(float v) const {
    int found = 0;
#pragma unroll
    for (int step = 128; step > 0; step /= 2)
      if (bounds[found + step - 1] <= v) found += step;
    return found;
  }

  static __device__ __forceinline__ float signed_of(uint32_t magnitude, bool negative) {
    return __uint_as_float(magnitude | (negative ? 0x80000000u : 0u));
  }

  __device__ __forceinline__ int with_sign(int code, bool negative) const {
    return kSigned && is_negative(map[code & 255]) != negative ? code + (negative ? -1 : 1) : code;
  }

  // Whether v lies beyond code `code`, further from zero.
  __device__ __forceinline__ bool is_beyond(int code, float v, bool negative) const {
    if (negative) return code > 0 && !(bounds[code - 1] <= v);
    return code < 255 && bounds[code] <= v;
  }

  // The cell of magnitudes `first` to `last`. False: it has several thresholds.
  __device__ __forceinline__ bool describe(uint32_t first, uint32_t last, bool negative, uint32_t &cell) const {
    const int away = negative ? -1 : 1, begin = count(signed_of(first, negative));
    const bool moves = is_beyond(begin, signed_of(last, negative), negative);
    const int end = moves ? begin + away : begin;
    const int code = with_sign(begin, negative), change = with_sign(end, negative) - code;
    uint32_t from = kNever;
    if (change != 0) {
      const uint32_t bound = __float_as_uint(bounds[negative ? end : begin]) & 0x7FFFFFFFu;
      from = bound + negative - first; // least magnitude on its far side
    }
    cell = (uint32_t)code | from << 8;
    return (change == 0 || change == away) && !(moves && is_beyond(end, signed_of(last, negative), negative));
  }

  // Nothing changes from 0 to the first cell, and from 1 to what a quotient can be rounded up to.
  __device__ __forceinline__ bool flat_ends(bool negative) const {
    uint32_t low, high;
    return describe(0, kLeast, negative, low) && low >> 8 == kNever && describe(kOne, kOne + 64, negative, high) &&
           high >> 8 == kNever;
  }

  // By all threads of a block, from map[256] in global memory. Whether `encode` may be used.
  __device__ __forceinline__ bool fill(const float *source) {
    for (int i = threadIdx.x; i < 256; i += blockDim.x) map[i] = source[i];
    __syncthreads();
    bool fits = true;
    for (int i = threadIdx.x; i < 256; i += blockDim.x) {
      const float middle = i < 255 ? v_mul(v_add(map[i], map[min(i + 1, 255)]), 0.5f) : INFINITY;
      fits = fits && fabsf(map[i]) <= FLT_MAX && (i == 255 || map[i] < map[min(i + 1, 255)]);
      fits = fits && fabsf(middle) >= FLT_MIN;                        // its neighbours are normal too
      bounds[i] = i % 2 == 0 ? nextafterf(middle, INFINITY) : middle; // a tie goes to the even index
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kSigns * kCells; i += blockDim.x) {
      const bool negative = i >= kCells;
      const uint32_t cell = negative ? i - kCells : i, first = kLeast + (cell << kShift);
      fits = describe(first, cell == kCells - 1 ? first : first + kInside, negative, cells[i]) && fits;
      if (cell == 0) fits = flat_ends(negative) && fits;
    }
    return __syncthreads_and(fits);
  }

  // v in [-1, 1], signed only with kSigned.
  __device__ __forceinline__ uint32_t encode(float v) const {
    const uint32_t bits = __float_as_uint(v), magnitude = min(max(bits & 0x7FFFFFFFu, kLeast), kOne);
    const uint32_t sign = kSigned ? bits >> 31 : 0;
    const uint32_t cell = cells[((magnitude - kLeast) >> kShift) + sign * kCells];
    const bool beyond = (magnitude & kInside) >= cell >> 8;
    return cell + (beyond ? 1 - 2 * (int)sign : 0); // the caller takes the lowest byte
  }
};

// ---- a block of 256 elements in a warp ------------------------------------------------------------------------------

constexpr int kPerLane = 8, kStepBlock = 32 * kPerLane;
static_assert(kStepBlock == BSH_STEP_BLOCK, "a warp updates one block");

template <int kBytes> struct Word;
template <> struct Word<4> {
  using type = uint32_t;
};
template <> struct Word<8> {
  using type = uint2;
};
template <> struct Word<16> {
  using type = uint4;
};

// Element of the block that value k of this lane is: kWide in a row.
template <int kWide> __device__ __forceinline__ int element_of(int k) {
  return k / kWide * 32 * kWide + (int)(threadIdx.x % 32) * kWide + k % kWide;
}

// Where a block lies: whole and aligned, or element by element.
struct Span {
  int64_t begin;
  int n;      // elements, at most 256
  bool whole; // 256, and what is loaded in one go is aligned
};

template <typename T, int kWide> __device__ __forceinline__ void load(const T *source, const Span &span, T (&out)[8]) {
  constexpr int kStep = kWide * sizeof(T) > 16 ? 16 / sizeof(T) : kWide;
  using W = typename Word<kStep * sizeof(T)>::type;
  const T *const block = source + span.begin;
  if (span.whole) {
#pragma unroll
    for (int k = 0; k < kPerLane; k += kStep)
      *reinterpret_cast<W *>(out + k) = *reinterpret_cast<const W *>(block + element_of<kWide>(k));
    return;
  }
#pragma unroll
  for (int k = 0; k < kPerLane; k++) {
    const int i = element_of<kWide>(k);
    out[k] = i < span.n ? block[i] : T(0.0f);
  }
}

template <typename T, int kWide> __device__ __forceinline__ void store(T *target, const Span &span, const T (&in)[8]) {
  constexpr int kStep = kWide * sizeof(T) > 16 ? 16 / sizeof(T) : kWide;
  using W = typename Word<kStep * sizeof(T)>::type;
  T *const block = target + span.begin;
  if (span.whole) {
#pragma unroll
    for (int k = 0; k < kPerLane; k += kStep)
      *reinterpret_cast<W *>(block + element_of<kWide>(k)) = *reinterpret_cast<const W *>(in + k);
    return;
  }
#pragma unroll
  for (int k = 0; k < kPerLane; k++) {
    const int i = element_of<kWide>(k);
    if (i < span.n) block[i] = in[k];
  }
}

template <typename T, int kWide>
__device__ __forceinline__ void load_floats(const void *source, const Span &span, float (&out)[kPerLane]) {
  alignas(16) T raw[kPerLane];
  load<T, kWide>(static_cast<const T *>(source), span, raw);
#pragma unroll
  for (int k = 0; k < kPerLane; k++) out[k] = to_float(raw[k]);
}

template <typename T, int kWide>
__device__ __forceinline__ void store_floats(void *target, const Span &span, const float (&in)[kPerLane]) {
  alignas(16) T raw[kPerLane];
#pragma unroll
  for (int k = 0; k < kPerLane; k++) from_float(in[k], raw + k);
  store<T, kWide>(static_cast<T *>(target), span, raw);
}

// Gradients and parameters: both of kRound, or with BSH_F32 of any dtypes.
template <bsh_dtype kRound> struct Floats {
  static constexpr int kWide = kRound == BSH_F32 ? 4 : 8;

  static __device__ __forceinline__ void get(bsh_dtype dtype, const void *source, const Span &span, float (&out)[8]) {
    if (kRound == BSH_BF16 || (kRound == BSH_F32 && dtype == BSH_BF16))
      return load_floats<__nv_bfloat16, kWide>(source, span, out);
    if (kRound == BSH_F16 || (kRound == BSH_F32 && dtype == BSH_F16))
      return load_floats<__half, kWide>(source, span, out);
    load_floats<float, 4>(source, span, out);
  }

  static __device__ __forceinline__ void put(bsh_dtype dtype, void *target, const Span &span, const float (&in)[8]) {
    if (kRound == BSH_BF16 || (kRound == BSH_F32 && dtype == BSH_BF16))
      return store_floats<__nv_bfloat16, kWide>(target, span, in);
    if (kRound == BSH_F16 || (kRound == BSH_F32 && dtype == BSH_F16))
      return store_floats<__half, kWide>(target, span, in);
    store_floats<float, 4>(target, span, in);
  }
};

__device__ __forceinline__ bool aligned_to(int bytes, const void *a, const void *b) {
  return ((reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b)) & (bytes - 1)) == 0;
}

// The tensor that block `number` of the list belongs to.
__device__ __forceinline__ int find_tensor(const bsh_step_list &list, uint32_t number) {
  int low = 0, high = (int)list.n_tensors;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (list.first[middle] <= number) low = middle;
    else high = middle;
  }
  return low;
}

__device__ __forceinline__ Span span_of(const bsh_step_list &list, const bsh_step_tensor &tensor, uint32_t block,
                                        int state_bytes) {
  Span span;
  span.begin = (int64_t)block * kStepBlock;
  span.n = (int)min(tensor.n - span.begin, (int64_t)kStepBlock);
  span.whole = span.n == kStepBlock && aligned_to(16, tensor.g, tensor.p) &&
               aligned_to(state_bytes, tensor.state1, tensor.state2);
  if (list.algorithm == BSH_ADEMAMIX && tensor.n % 8 != 0) span.whole = false; // the slow moment begins at n
  return span;
}

// ---- the kernels ----------------------------------------------------------------------------------------------------

constexpr int kStepThreads = 1024; // 32 warps share the tables of codes

// numbers, with the rounding as a constant, and with what max_unorm leaves of the update.
template <bsh_dtype kRound> __device__ __forceinline__ bsh_step_numbers numbers_of(const bsh_step_list &list) {
  bsh_step_numbers k = list.numbers;
  k.round = kRound;
  if (list.unorm == nullptr) return k;
  const float norm = sqrtf(*list.unorm);
  const float most = list.algorithm == BSH_ADAM ? __fmul_rn(list.max_unorm, list.param_norm)
                                                : __fmaf_rn(list.max_unorm, list.param_norm, k.eps);
  if (norm > most) k.update_scale = __fdiv_rn(most, norm);
  k.step_size = __fmul_rn(k.step_size, k.update_scale);
  return k;
}

// The block that a warp is at, and the next one.
struct Blocks {
  uint32_t number, end, stride;

  __device__ __forceinline__ explicit Blocks(const bsh_step_list &list)
      : number(blockIdx.x * (kStepThreads / 32) + threadIdx.x / 32), end(list.first[list.n_tensors]),
        stride(gridDim.x * (kStepThreads / 32)) {}
  __device__ __forceinline__ bool more() const { return number < end; }
  __device__ __forceinline__ void next() { number += stride; }
};

template <bsh_optimizer kAlgorithm> struct Moments {
  static constexpr bool kTwo = kAlgorithm == BSH_ADAM || kAlgorithm == BSH_ADEMAMIX;
  static constexpr bool kThree = kAlgorithm == BSH_ADEMAMIX; // the slow one: the second half of state1
};

// 8 elements of each kind in a lane.
struct Elements {
  float g[kPerLane], p[kPerLane], s1[kPerLane], s2[kPerLane], s3[kPerLane];

  template <bsh_optimizer kAlgorithm> __device__ __forceinline__ step_element at(int i) const {
    return {g[i], p[i], s1[i], Moments<kAlgorithm>::kTwo ? s2[i] : 0.0f, Moments<kAlgorithm>::kThree ? s3[i] : 0.0f};
  }

  template <bsh_optimizer kAlgorithm, bool kBlockwise>
  __device__ __forceinline__ void update(const bsh_step_numbers &k) {
#pragma unroll
    for (int i = 0; i < kPerLane; i++) {
      step_element e = at<kAlgorithm>(i);
      step(&k, kAlgorithm, &e, kBlockwise);
      p[i] = e.p, s1[i] = e.s1, s2[i] = e.s2, s3[i] = e.s3;
    }
  }
};

template <bsh_optimizer kAlgorithm, bsh_dtype kRound>
__device__ __forceinline__ void load_32bit(const bsh_step_list &list, const bsh_step_tensor &tensor, const Span &span,
                                           Elements &e) {
  using IO = Floats<kRound>;
  IO::get(list.g_dtype, tensor.g, span, e.g);
  IO::get(list.p_dtype, tensor.p, span, e.p);
  const float *const state1 = static_cast<const float *>(tensor.state1);
  load<float, IO::kWide>(state1, span, e.s1);
  if (Moments<kAlgorithm>::kTwo) load<float, IO::kWide>(static_cast<const float *>(tensor.state2), span, e.s2);
  if (Moments<kAlgorithm>::kThree) load<float, IO::kWide>(state1 + tensor.n, span, e.s3);
}

template <bsh_optimizer kAlgorithm, bsh_dtype kRound>
__device__ __forceinline__ void step_32bit(const bsh_step_list &list) {
  using IO = Floats<kRound>;
  wait_for_earlier_kernels();
  const bsh_step_numbers k = numbers_of<kRound>(list);
  for (Blocks blocks(list); blocks.more(); blocks.next()) {
    const int t = find_tensor(list, blocks.number);
    const bsh_step_tensor &tensor = list.tensors[t];
    const Span span = span_of(list, tensor, blocks.number - list.first[t], 16);
    float *const state1 = static_cast<float *>(tensor.state1);
    Elements e;
    load_32bit<kAlgorithm, kRound>(list, tensor, span, e);
    e.update<kAlgorithm, false>(k);
    IO::put(list.p_dtype, tensor.p, span, e.p);
    store<float, IO::kWide>(state1, span, e.s1);
    if (Moments<kAlgorithm>::kTwo) store<float, IO::kWide>(static_cast<float *>(tensor.state2), span, e.s2);
    if (Moments<kAlgorithm>::kThree) store<float, IO::kWide>(state1 + tensor.n, span, e.s3);
  }
}

// ---- 8-bit states ----

template <int kWide>
__device__ __forceinline__ void load_codes(const uint8_t *codes, const Span &span, const float *map, float scale,
                                           float (&states)[kPerLane]) {
  alignas(8) uint8_t raw[kPerLane];
  load<uint8_t, kWide>(codes, span, raw);
#pragma unroll
  for (int k = 0; k < kPerLane; k++) states[k] = v_mul(map[raw[k]], scale);
}

// Whether all states of this lane can be encoded by the table, if the scale can: finite, and not negative where the
// table has one sign.
template <bool kSigned> __device__ __forceinline__ bool ordinary(const float (&states)[kPerLane]) {
  float zero = 0.0f;
  uint32_t signs = 0;
#pragma unroll
  for (int k = 0; k < kPerLane; k++) {
    zero = v_fma(states[k], 0.0f, zero);
    if (!kSigned) signs |= __float_as_uint(states[k]);
  }
  return zero == 0.0f && (kSigned || signs >> 31 == 0);
}

// New scale and codes of a block. Elements beyond its end are zero.
template <bool kSigned, int kWide>
__device__ __forceinline__ void store_codes(const StateCodes<kSigned> &tables, bool usable, uint8_t *codes,
                                            float *scale, const Span &span, const float (&states)[kPerLane]) {
  float most = 0.0f;
#pragma unroll
  for (int k = 0; k < kPerLane; k++) most = absmax_step(most, states[k]);
#pragma unroll
  for (int d = 16; d > 0; d /= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, d));
  const float inverse = reciprocal(most);
  alignas(8) uint8_t raw[kPerLane];
  if (usable && most > 0.0f && ordinary<kSigned>(states)) {
#pragma unroll
    for (int k = 0; k < kPerLane; k++) raw[k] = (uint8_t)tables.encode(v_mul(inverse, states[k]));
  } else {
#pragma unroll
    for (int k = 0; k < kPerLane; k++)
      raw[k] = (uint8_t)encode_any(tables.map, kSigned, v_mul(inverse, states[k]), states[k]);
  }
  store<uint8_t, kWide>(codes, span, raw);
  if (threadIdx.x % 32 == 0) *scale = most;
}

template <bsh_optimizer kAlgorithm, bsh_dtype kRound>
__device__ __forceinline__ void step_8bit(const bsh_step_list &list) {
  using IO = Floats<kRound>;
  constexpr bool kTwo = Moments<kAlgorithm>::kTwo, kThree = Moments<kAlgorithm>::kThree;
  __shared__ StateCodes<true> codes_of_map1;
  __shared__ StateCodes<!kTwo> codes_of_map2; // without a second moment not used, and not there
  wait_for_earlier_kernels();
  const bsh_step_numbers k = numbers_of<kRound>(list);
  const bool usable1 = codes_of_map1.fill(list.map1);
  bool usable2 = false;
  if constexpr (kTwo) usable2 = codes_of_map2.fill(list.map2);
  for (Blocks blocks(list); blocks.more(); blocks.next()) {
    const int t = find_tensor(list, blocks.number);
    const bsh_step_tensor &tensor = list.tensors[t];
    const uint32_t block = blocks.number - list.first[t], n_blocks = list.first[t + 1] - list.first[t];
    const Span span = span_of(list, tensor, block, IO::kWide);
    uint8_t *const codes1 = static_cast<uint8_t *>(tensor.state1), *const codes2 =
                                                                       static_cast<uint8_t *>(tensor.state2);
    Elements e;
    IO::get(list.g_dtype, tensor.g, span, e.g);
    IO::get(list.p_dtype, tensor.p, span, e.p);
    load_codes<IO::kWide>(codes1, span, codes_of_map1.map, tensor.absmax1[block], e.s1);
    if constexpr (kTwo) load_codes<IO::kWide>(codes2, span, codes_of_map2.map, tensor.absmax2[block], e.s2);
    if constexpr (kThree)
      load_codes<IO::kWide>(codes1 + tensor.n, span, codes_of_map1.map, tensor.absmax1[n_blocks + block], e.s3);
    e.update<kAlgorithm, true>(k);
    IO::put(list.p_dtype, tensor.p, span, e.p);
    store_codes<true, IO::kWide>(codes_of_map1, usable1, codes1, tensor.absmax1 + block, span, e.s1);
    if constexpr (kTwo)
      store_codes<false, IO::kWide>(codes_of_map2, usable2, codes2, tensor.absmax2 + block, span, e.s2);
    if constexpr (kThree)
      store_codes<true, IO::kWide>(codes_of_map1, usable1, codes1 + tensor.n, tensor.absmax1 + n_blocks + block, span,
                                   e.s3);
  }
}

// ---- the norm of an update, which max_unorm bounds ----

constexpr int kSumThreads = 256;

// *sum = the block's `mine` in a fixed order.
__device__ __forceinline__ void sum_of_block(double mine, double *sum) {
  __shared__ double warps[kStepThreads / 32];
#pragma unroll
  for (int d = 16; d > 0; d /= 2) mine += __shfl_xor_sync(kAllLanes, mine, d);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x != 0) return;
  double total = 0;
  for (int i = 0; i < (int)blockDim.x / 32; i++) total += warps[i];
  *sum = total;
}

// sums[blockIdx.x] = squares of the updates that this block of threads sees.
template <bsh_optimizer kAlgorithm> __device__ __forceinline__ void squares(const bsh_step_list &list, double *sums) {
  double sum = 0;
  wait_for_earlier_kernels();
  for (Blocks blocks(list); blocks.more(); blocks.next()) {
    const Span span = span_of(list, list.tensors[0], blocks.number, 16);
    Elements e;
    load_32bit<kAlgorithm, BSH_F32>(list, list.tensors[0], span, e);
#pragma unroll
    for (int i = 0; i < kPerLane; i++) {
      const step_element element = e.at<kAlgorithm>(i);
      const float square = update_square(&list.numbers, kAlgorithm, &element);
      if (element_of<4>(i) < span.n) sum += (double)square;
    }
  }
  sum_of_block(sum, sums + blockIdx.x);
}

} // namespace bsh

#define BSH_KERNEL(name, threads, ...)                                                                                 \
  extern "C" __global__ void __launch_bounds__(threads, 1) name(const __grid_constant__ bsh_step_list list) {          \
    bsh::__VA_ARGS__(list);                                                                                            \
  }

#define BSH_BY_DTYPE(name, algorithm)                                                                                  \
  BSH_KERNEL(optimizer_32bit_##name##_f32, bsh::kStepThreads, step_32bit<algorithm, BSH_F32>)                          \
  BSH_KERNEL(optimizer_32bit_##name##_f16, bsh::kStepThreads, step_32bit<algorithm, BSH_F16>)                          \
      BSH_KERNEL(optimizer_32bit_##name##_bf16, bsh::kStepThreads, step_32bit<algorithm, BSH_BF16>)                    \
          BSH_KERNEL(optimizer_8bit_##name##_f32, bsh::kStepThreads, step_8bit<algorithm, BSH_F32>)                    \
              BSH_KERNEL(optimizer_8bit_##name##_f16, bsh::kStepThreads, step_8bit<algorithm, BSH_F16>)                \
                  BSH_KERNEL(optimizer_8bit_##name##_bf16, bsh::kStepThreads, step_8bit<algorithm, BSH_BF16>)

BSH_BY_DTYPE(adam, BSH_ADAM)
BSH_BY_DTYPE(momentum, BSH_MOMENTUM)
BSH_BY_DTYPE(rmsprop, BSH_RMSPROP)
BSH_BY_DTYPE(adagrad, BSH_ADAGRAD)
BSH_BY_DTYPE(lion, BSH_LION)
BSH_BY_DTYPE(ademamix, BSH_ADEMAMIX)

#define BSH_SQUARES(name, algorithm)                                                                                   \
  extern "C" __global__ void __launch_bounds__(bsh::kStepThreads, 1)                                                   \
      optimizer_squares_##name(const __grid_constant__ bsh_step_list list, double *sums) {                             \
    bsh::squares<algorithm>(list, sums);                                                                               \
  }

BSH_SQUARES(adam, BSH_ADAM)
BSH_SQUARES(momentum, BSH_MOMENTUM)
BSH_SQUARES(rmsprop, BSH_RMSPROP)

// *unorm = sums[0] + ... + sums[n - 1], by one block of threads.
extern "C" __global__ void __launch_bounds__(bsh::kSumThreads, 1)
    optimizer_sum(const double *sums, int n, float *unorm) {
  bsh::wait_for_earlier_kernels();
  double mine = 0, total;
  for (int i = threadIdx.x; i < n; i += blockDim.x) mine += sums[i];
  bsh::sum_of_block(mine, &total);
  if (threadIdx.x == 0) *unorm = (float)total;
}
