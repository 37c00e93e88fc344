// optimizer.cu - the optimizers of core/optimizer.h for all parameters of a bsh_step_list in one launch.
//
// A warp takes a block of 256 elements at a time, 8 in each lane, whichever parameter it belongs to. The blocks of all
// parameters are numbered through: each block of threads has a stretch of them.
//
//   g, p, states (16-byte loads) -> step() -> p
//   8-bit states: codes -> map in shared memory x scale -> step() -> largest magnitude of the warp -> new codes and
//   scale; meanwhile the lines of the warp's next block come into L2
//
// The arithmetic is that of bitsandbytes' CUDA build: every operation flushes denormals, and quotients and roots are
// the GPU's approximations. What stays the same in a step (1 - beta^t and what follows from it) comes rounded once from
// the host, where bitsandbytes takes approximations of the GPU too.
#include "cuda/ptx/ptx.cuh"

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

// By way of a pair: that conversion is four times as fast.
STEP_FUNCTION value v_round(bsh_dtype dtype, value a) {
  if (dtype == BSH_F16) return __low2float(__floats2half2_rn(a, 0.0f));
  if (dtype == BSH_BF16) return __uint_as_float(pack_pair<__nv_bfloat16>(a, 0.0f) << 16);
  return a;
}

#include "core/optimizer.h"

#include "cuda/elementwise/optimizer_codes.cuh"

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

// Where a block lies: kWhole has 256 elements, and what is loaded in one go is aligned; any other goes element by
// element.
template <bool kWhole> struct Span {
  int64_t begin;
  int n; // elements, at most 256

  __device__ __forceinline__ bool has(int i) const { return kWhole || i < n; }
};

template <typename T, int kWide, bool kWhole>
__device__ __forceinline__ void load(const T *source, const Span<kWhole> &span, T (&out)[8]) {
  constexpr int kStep = kWide * sizeof(T) > 16 ? 16 / sizeof(T) : kWide;
  using W = typename Word<kStep * sizeof(T)>::type;
  const T *const block = source + span.begin;
  if constexpr (kWhole) {
#pragma unroll
    for (int k = 0; k < kPerLane; k += kStep)
      *reinterpret_cast<W *>(out + k) = *reinterpret_cast<const W *>(block + element_of<kWide>(k));
  } else {
#pragma unroll
    for (int k = 0; k < kPerLane; k++) out[k] = span.has(element_of<kWide>(k)) ? block[element_of<kWide>(k)] : T(0.0f);
  }
}

template <typename T, int kWide, bool kWhole>
__device__ __forceinline__ void store(T *target, const Span<kWhole> &span, const T (&in)[8]) {
  constexpr int kStep = kWide * sizeof(T) > 16 ? 16 / sizeof(T) : kWide;
  using W = typename Word<kStep * sizeof(T)>::type;
  T *const block = target + span.begin;
  if constexpr (kWhole) {
#pragma unroll
    for (int k = 0; k < kPerLane; k += kStep)
      *reinterpret_cast<W *>(block + element_of<kWide>(k)) = *reinterpret_cast<const W *>(in + k);
  } else {
#pragma unroll
    for (int k = 0; k < kPerLane; k++)
      if (span.has(element_of<kWide>(k))) block[element_of<kWide>(k)] = in[k];
  }
}

template <typename T, int kWide, typename S>
__device__ __forceinline__ void load_floats(const void *source, const S &span, float (&out)[kPerLane]) {
  if constexpr (sizeof(T) == 4) {
    load<T, kWide>(static_cast<const T *>(source), span, out);
  } else {
    vector16<T> raw;
    load<T, kWide>(static_cast<const T *>(source), span, reinterpret_cast<T(&)[kPerLane]>(raw));
#pragma unroll
    for (int k = 0; k < kPerLane; k++) out[k] = raw.get(k);
  }
}

template <typename T, int kWide, typename S>
__device__ __forceinline__ void store_floats(void *target, const S &span, const float (&in)[kPerLane]) {
  if constexpr (sizeof(T) == 4) {
    store<T, kWide>(static_cast<T *>(target), span, in);
  } else {
    alignas(16) T raw[kPerLane];
#pragma unroll
    for (int k = 0; k < kPerLane; k++) from_float(in[k], raw + k);
    store<T, kWide>(static_cast<T *>(target), span, raw);
  }
}

// Gradients and parameters: of one dtype, or of two that are only known when the kernel runs.
enum Pair { kF32, kF16, kBF16, kMixed };

template <Pair kPair> struct Half {
  using type = __nv_bfloat16;
};
template <> struct Half<kF16> {
  using type = __half;
};

template <Pair kPair> struct Floats {
  static constexpr int kWide = kPair == kF32 || kPair == kMixed ? 4 : 8;
  static constexpr bsh_dtype kRound = kPair == kF16 ? BSH_F16 : kPair == kBF16 ? BSH_BF16 : BSH_F32;

  template <typename S>
  static __device__ __forceinline__ void get(bsh_dtype dtype, const void *source, const S &span, float (&out)[8]) {
    if (kPair == kBF16 || (kPair == kMixed && dtype == BSH_BF16))
      return load_floats<__nv_bfloat16, kWide>(source, span, out);
    if (kPair == kF16 || (kPair == kMixed && dtype == BSH_F16)) return load_floats<__half, kWide>(source, span, out);
    load_floats<float, 4>(source, span, out);
  }

  template <typename S>
  static __device__ __forceinline__ void put(bsh_dtype dtype, void *target, const S &span, const float (&in)[8]) {
    if (kPair == kBF16 || (kPair == kMixed && dtype == BSH_BF16))
      return store_floats<__nv_bfloat16, kWide>(target, span, in);
    if (kPair == kF16 || (kPair == kMixed && dtype == BSH_F16)) return store_floats<__half, kWide>(target, span, in);
    store_floats<float, 4>(target, span, in);
  }
};

__device__ __forceinline__ bool aligned_to(int bytes, const void *a, const void *b) {
  return ((reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b)) & (bytes - 1)) == 0;
}

// The tensor that block `number` of the list belongs to: three rounds of loads that do not wait for each other.
__device__ __forceinline__ int find_tensor(const bsh_step_list &list, uint32_t number) {
  static_assert(BSH_STEP_TENSORS <= 8 * 8 * 8, "three rounds");
  int found = 0;
#pragma unroll 1
  for (int step = 64; step > 0; step /= 8) {
    int behind = 0;
#pragma unroll
    for (int i = 1; i < 8; i++) {
      const int t = found + i * step;
      behind += t < (int)list.n_tensors && list.first[t] <= number;
    }
    found += behind * step;
  }
  return found;
}

// Block `number` of a list.
struct Place {
  const bsh_step_tensor *tensor;
  uint32_t block, n_blocks; // of the tensor

  __device__ __forceinline__ Place(const bsh_step_list &list, uint32_t number, int t) {
    tensor = list.tensors + t;
    block = number - list.first[t];
    n_blocks = list.first[t + 1] - list.first[t];
  }

  template <bool kWhole> __device__ __forceinline__ Span<kWhole> span() const {
    const int64_t begin = (int64_t)block * kStepBlock;
    return {begin, (int)min(tensor->n - begin, (int64_t)kStepBlock)};
  }
};

// ---- the kernels ----------------------------------------------------------------------------------------------------

// numbers, with the rounding as a constant, and with what max_unorm leaves of the update. Decoupled decay is by 1 where
// there is none, which spares a question for each element and changes nothing.
template <bsh_optimizer kAlgorithm, Pair kPair>
__device__ __forceinline__ bsh_step_numbers numbers_of(const bsh_step_list &list) {
  bsh_step_numbers k = list.numbers;
  k.round = Floats<kPair>::kRound;
  if (!has_coupled_decay(kAlgorithm)) {
    k.decay = k.weight_decay > 0.0f ? k.decay : 1.0f;
    k.weight_decay = 1.0f;
  }
  if (list.unorm == nullptr) return k;
  const float norm = sqrtf(*list.unorm);
  const float most = list.algorithm == BSH_ADAM ? __fmul_rn(list.max_unorm, list.param_norm)
                                                : __fmaf_rn(list.max_unorm, list.param_norm, k.eps);
  if (norm > most) k.update_scale = __fdiv_rn(most, norm);
  k.step_size = __fmul_rn(k.step_size, k.update_scale);
  return k;
}

// The blocks of a warp, one after the other: a block of threads has a stretch of them, its warps take them in turn.
struct Blocks {
  const bsh_step_list &list;
  uint32_t number, end;
  int t; // tensor of block `number`

  __device__ __forceinline__ explicit Blocks(const bsh_step_list &list) : list(list) {
    const uint32_t all = list.first[list.n_tensors], share = (all + gridDim.x - 1) / gridDim.x;
    number = min(blockIdx.x * share, all) + threadIdx.x / 32;
    end = min(all, (blockIdx.x + 1) * share);
    t = find_tensor(list, number);
  }
  __device__ __forceinline__ bool more() const { return number < end; }

  // Whether the tensor is another one then.
  __device__ __forceinline__ bool next() {
    const int before = t;
    number += kStepThreads / 32;
    while (number < end && list.first[t + 1] <= number) t++;
    return t != before;
  }

  // The number of the tensor's first block whose elements cannot be moved together by a lane, states by `state_bytes`:
  // the last one, where it has fewer than 256, or the first one. The slow moment of AdEMAMix begins at n.
  template <bsh_optimizer kAlgorithm> __device__ __forceinline__ uint32_t whole_until(int state_bytes) const {
    const bsh_step_tensor &tensor = list.tensors[t];
    const bool whole = aligned_to(16, tensor.g, tensor.p) && aligned_to(state_bytes, tensor.state1, tensor.state2) &&
                       (kAlgorithm != BSH_ADEMAMIX || tensor.n % 8 == 0) && !list.numbers.skip_zeros;
    return list.first[t] + (whole ? (uint32_t)(tensor.n / kStepBlock) : 0);
  }
};

template <bsh_optimizer kAlgorithm> struct Moments {
  static constexpr bool kTwo = BSH_HAS_SECOND_STATE(kAlgorithm);
  static constexpr bool kThree = kAlgorithm == BSH_ADEMAMIX; // the slow one: the second half of state1
  static constexpr int kStates = 1 + kTwo + kThree;
};

// Whether all loads of a block go out before anything else is done, and what the next block needs while they are on
// their way: with three states and numbers of 16 bits, from sm_80 on. Of the others, fewer loads wait, or registers do
// not suffice.
template <bsh_optimizer kAlgorithm, Pair kPair>
constexpr bool kLoadsFirst = kCopies && Moments<kAlgorithm>::kThree && (kPair == kF16 || kPair == kBF16);

// 8 elements of each kind in a lane.
struct Elements {
  alignas(16) float g[kPerLane], p[kPerLane], s1[kPerLane], s2[kPerLane], s3[kPerLane];

  template <bsh_optimizer kAlgorithm> __device__ __forceinline__ step_element at(int i) const {
    return {g[i], p[i], s1[i], Moments<kAlgorithm>::kTwo ? s2[i] : 0.0f, Moments<kAlgorithm>::kThree ? s3[i] : 0.0f};
  }

  template <bsh_optimizer kAlgorithm, bool kBlockwise, bool kFinite>
  __device__ __forceinline__ void update(const bsh_step_numbers &k) {
#pragma unroll
    for (int i = 0; i < kPerLane; i++) {
      step_element e = at<kAlgorithm>(i);
      if (kFinite) step_of_finite(&k, kAlgorithm, &e, kBlockwise);
      else step(&k, kAlgorithm, &e, kBlockwise);
      p[i] = e.p, s1[i] = e.s1, s2[i] = e.s2, s3[i] = e.s3;
    }
  }
};

template <bsh_optimizer kAlgorithm, Pair kPair, bool kWhole>
__device__ __forceinline__ void load_32bit(const bsh_step_list &list, const bsh_step_tensor &tensor,
                                           const Span<kWhole> &span, Elements &e) {
  using IO = Floats<kPair>;
  IO::get(list.g_dtype, tensor.g, span, e.g);
  IO::get(list.p_dtype, tensor.p, span, e.p);
  const float *const state1 = static_cast<const float *>(tensor.state1);
  load<float, IO::kWide>(state1, span, e.s1);
  if (Moments<kAlgorithm>::kTwo) load<float, IO::kWide>(static_cast<const float *>(tensor.state2), span, e.s2);
  if (Moments<kAlgorithm>::kThree) load<float, IO::kWide>(state1 + tensor.n, span, e.s3);
}

template <bsh_optimizer kAlgorithm, Pair kPair, bool kWhole>
__device__ __forceinline__ void block_32bit(const bsh_step_list &list, const Place &place, const bsh_step_numbers &k) {
  using IO = Floats<kPair>;
  const bsh_step_tensor &tensor = *place.tensor;
  const auto span = place.span<kWhole>();
  float *const state1 = static_cast<float *>(tensor.state1);
  Elements e;
  load_32bit<kAlgorithm, kPair>(list, tensor, span, e);
  e.update<kAlgorithm, false, true>(k);
  IO::put(list.p_dtype, tensor.p, span, e.p);
  store<float, IO::kWide>(state1, span, e.s1);
  if (Moments<kAlgorithm>::kTwo) store<float, IO::kWide>(static_cast<float *>(tensor.state2), span, e.s2);
  if (Moments<kAlgorithm>::kThree) store<float, IO::kWide>(state1 + tensor.n, span, e.s3);
}

// A block of any kind: for the few that are not whole, and for skip_zeros.
template <bsh_optimizer kAlgorithm, Pair kPair>
__device__ __noinline__ void any_block_32bit(const bsh_step_list &list, uint32_t number, int t) {
  block_32bit<kAlgorithm, kPair, false>(list, Place(list, number, t), numbers_of<kAlgorithm, kPair>(list));
}

template <bsh_optimizer kAlgorithm, Pair kPair> __device__ __forceinline__ void step_32bit(const bsh_step_list &list) {
  wait_for_earlier_kernels();
  bsh_step_numbers k = numbers_of<kAlgorithm, kPair>(list);
  k.skip_zeros = false;
  Blocks blocks(list);
  uint32_t whole = blocks.whole_until<kAlgorithm>(16);
  while (blocks.more()) {
    if (blocks.number < whole) block_32bit<kAlgorithm, kPair, true>(list, Place(list, blocks.number, blocks.t), k);
    else any_block_32bit<kAlgorithm, kPair>(list, blocks.number, blocks.t);
    if (blocks.next()) whole = blocks.whole_until<kAlgorithm>(16);
  }
}

// ---- 8-bit states ----

// A state of a block as it is loaded.
struct Codes {
  alignas(8) uint8_t raw[kPerLane];
  float scale;

  template <int kWide, typename S>
  __device__ __forceinline__ void get(const uint8_t *codes, const float *scale_at, const S &span) {
    load<uint8_t, kWide>(codes, span, raw);
    scale = *scale_at;
  }

  template <int kWide, typename S, typename T>
  __device__ __forceinline__ void decode(const T &tables, const S &span, float (&states)[kPerLane]) const {
    const uint32_t *const words = reinterpret_cast<const uint32_t *>(raw);
#pragma unroll
    for (int k = 0; k < kPerLane; k++) {
      const float entry = entry_of(tables, words[k / 4], k % 4);
      states[k] = span.has(element_of<kWide>(k)) ? v_mul(entry, scale) : 0.0f;
    }
  }
};

// 16-bit gradients or parameters of a block as they are loaded.
template <typename T> struct RawHalves {
  vector16<T> values;

  template <typename S> __device__ __forceinline__ void get(const void *source, const S &span) {
    load<T, 8>(static_cast<const T *>(source), span, reinterpret_cast<T(&)[kPerLane]>(values));
  }
  __device__ __forceinline__ void unpack(float (&out)[kPerLane]) const {
#pragma unroll
    for (int k = 0; k < kPerLane; k++) out[k] = values.get(k);
  }
};

// Larger of two magnitudes; a NaN stays one where the GPU can do that at once.
__device__ __forceinline__ float largest(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float result;
  asm("max.NaN.ftz.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(fabsf(b)));
  return result;
#else
  return a != a || b != b ? __int_as_float(0x7FFFFFFF) : fmaxf(a, fabsf(b));
#endif
}

__device__ __forceinline__ float warp_largest(float most) {
#if __CUDA_ARCH__ >= 800
  return __uint_as_float(__reduce_max_sync(kAllLanes, __float_as_uint(most))); // bits of magnitudes, NaN above all
#else
#pragma unroll
  for (int d = 16; d > 0; d /= 2) most = largest(most, __shfl_xor_sync(kAllLanes, most, d));
  return most;
#endif
}

// New scale and codes by the search for any map and any states: NaN are passed over for the scale.
template <bool kSigned>
__device__ __noinline__ uint2 encode_block(const StateCodes<kSigned> &tables, const float *states, float *scale) {
  float most = 0.0f;
  for (int k = 0; k < kPerLane; k++) most = absmax_step(most, states[k]);
  *scale = most = warp_largest(most);
  const float inverse = reciprocal(most);
  uint32_t words[2] = {0, 0};
  for (int k = 0; k < kPerLane; k++)
    words[k / 4] |= encode_any(tables, kSigned, v_mul(inverse, states[k]), states[k]) << 8 * (k % 4);
  return make_uint2(words[0], words[1]);
}

// The largest magnitude of a block, or a NaN of it.
__device__ __forceinline__ float largest_of(const float (&states)[kPerLane]) {
  float most = 0.0f;
#pragma unroll
  for (int k = 0; k < kPerLane; k++) most = largest(most, states[k]);
  return warp_largest(most);
}

// New scale and codes of a block whose largest magnitude is `most`. Elements beyond its end are zero.
template <bool kSigned, int kWide, typename S>
__device__ __forceinline__ void store_codes(const StateCodes<kSigned> &tables, bool usable, uint8_t *codes,
                                            float *scale, const S &span, const float (&states)[kPerLane], float most) {
  alignas(8) uint32_t words[2];
  if (usable && most > 0.0f && most <= FLT_MAX) {
    const float inverse = reciprocal(most);
    words[0] = tables.encode_four(states, inverse);
    words[1] = tables.encode_four(states + 4, inverse);
  } else {
    float copies[kPerLane];
#pragma unroll
    for (int k = 0; k < kPerLane; k++) copies[k] = states[k];
    float without_nan;
    const uint2 found = encode_block(tables, copies, &without_nan);
    words[0] = found.x, words[1] = found.y, most = without_nan;
  }
  store<uint8_t, kWide>(codes, span, reinterpret_cast<const uint8_t (&)[kPerLane]>(words));
  if (threadIdx.x % 32 == 0) *scale = most;
}

// The line that this lane brings into L2 of the block that its warp takes next: of gradients, parameters, codes or
// scales. A warp has no registers to load that block early, and waits less for what is in L2.
template <bsh_optimizer kAlgorithm, Pair kPair> struct NextLine {
  static constexpr int kLine = 128, kWarps = kStepThreads / 32, kStates = Moments<kAlgorithm>::kStates;
  static constexpr int kFloats = kPair == kF32 ? 8 : 4; // lines of a block of g, and of p
  static constexpr int kCodesLane = 2 * kFloats, kScalesLane = kCodesLane + 2 * kStates;
  // Kernels for two dtypes go without: their loads of 4 bytes each need the registers.
  static constexpr int kLanes = kPair == kMixed ? 0 : kScalesLane + kStates;
  static_assert(kLanes <= 32, "a line for each lane");

  const uint8_t *at;

  __device__ __forceinline__ void enter(const bsh_step_list &list, uint32_t number, int t) {
    if (kLanes == 0) return;
    const bsh_step_tensor &tensor = list.tensors[t];
    const int lane = threadIdx.x % 32, state = lane < kScalesLane ? (lane - kCodesLane) / 2 : lane - kScalesLane;
    const bool second = Moments<kAlgorithm>::kTwo && state == 1, slow = Moments<kAlgorithm>::kThree && state == 2;
    const void *from = lane < kFloats ? tensor.g : tensor.p;
    if (lane >= kCodesLane) from = second ? tensor.state2 : tensor.state1;
    if (lane >= kScalesLane) from = second ? tensor.absmax2 : tensor.absmax1;
    int64_t behind = (int64_t)(number - list.first[t]) * bytes() + (lane * kLine & (bytes() - 1));
    if (lane >= kCodesLane && slow)
      behind += lane < kScalesLane ? tensor.n : 4 * (int64_t)(list.first[t + 1] - list.first[t]);
    at = static_cast<const uint8_t *>(from) + behind;
  }

  __device__ __forceinline__ void next() { at += kWarps * bytes(); }

  __device__ __forceinline__ void prefetch(bool there) const {
    if (there && (int)(threadIdx.x % 32) < kLanes) prefetch_l2(at);
  }

private:
  // Of a block, of what this lane's line is of.
  static __device__ __forceinline__ uint32_t bytes() {
    const int lane = threadIdx.x % 32;
    return lane < kCodesLane ? kFloats * kLine : lane < kScalesLane ? kStepBlock : sizeof(float);
  }
};

// The gradients, parameters and states of a block; `between` runs before they are waited for.
template <bsh_optimizer kAlgorithm, Pair kPair, typename S, typename T, typename F>
__device__ __forceinline__ void load_8bit(const bsh_step_list &list, const Place &place, const S &span, const T &tables,
                                          const F &between, Elements &e) {
  using IO = Floats<kPair>;
  constexpr int kWide = IO::kWide;
  const bsh_step_tensor &tensor = *place.tensor;
  const uint8_t *const codes1 = static_cast<uint8_t *>(tensor.state1);
  const uint8_t *const codes2 = static_cast<uint8_t *>(tensor.state2);
  const float *const scale1 = tensor.absmax1 + place.block, *const scale2 = tensor.absmax2 + place.block;
  Codes first, second, slow;
  if constexpr (kLoadsFirst<kAlgorithm, kPair>) {
    RawHalves<typename Half<kPair>::type> g, p;
    g.get(tensor.g, span);
    first.get<kWide>(codes1, scale1, span);
    second.get<kWide>(codes2, scale2, span);
    slow.get<kWide>(codes1 + tensor.n, scale1 + place.n_blocks, span);
    p.get(tensor.p, span);
    between();
    g.unpack(e.g), p.unpack(e.p);
    first.decode<kWide>(tables.first, span, e.s1);
    second.decode<kWide>(tables.second, span, e.s2);
    slow.decode<kWide>(tables.first, span, e.s3);
    return;
  }
  between();
  IO::get(list.g_dtype, tensor.g, span, e.g);
  IO::get(list.p_dtype, tensor.p, span, e.p);
  first.get<kWide>(codes1, scale1, span);
  first.decode<kWide>(tables.first, span, e.s1);
  if constexpr (Moments<kAlgorithm>::kTwo) {
    second.get<kWide>(codes2, scale2, span);
    second.decode<kWide>(tables.second, span, e.s2);
  }
  if constexpr (Moments<kAlgorithm>::kThree) {
    slow.get<kWide>(codes1 + tensor.n, scale1 + place.n_blocks, span);
    slow.decode<kWide>(tables.first, span, e.s3);
  }
}

// False: nothing was written, for kWhole takes no gradients that are not numbers, which leave none in the first moment.
template <bsh_optimizer kAlgorithm, Pair kPair, bool kWhole, typename T, typename F>
__device__ __forceinline__ bool block_8bit(const bsh_step_list &list, const Place &place, const bsh_step_numbers &k,
                                           const T &tables, bool usable, const F &between) {
  using IO = Floats<kPair>;
  constexpr bool kTwo = Moments<kAlgorithm>::kTwo, kThree = Moments<kAlgorithm>::kThree;
  const bsh_step_tensor &tensor = *place.tensor;
  const auto span = place.span<kWhole>();
  uint8_t *const codes1 = static_cast<uint8_t *>(tensor.state1), *const codes2 = static_cast<uint8_t *>(tensor.state2);
  float *const scale1 = tensor.absmax1 + place.block, *const scale2 = tensor.absmax2 + place.block;
  Elements e;
  load_8bit<kAlgorithm, kPair>(list, place, span, tables, between, e);
  e.update<kAlgorithm, true, kWhole>(k);
  const float most = largest_of(e.s1);
  if (kWhole && !(most <= FLT_MAX)) return false;
  IO::put(list.p_dtype, tensor.p, span, e.p);
  store_codes<true, IO::kWide>(tables.first, usable, codes1, scale1, span, e.s1, most);
  if constexpr (kTwo)
    store_codes<false, IO::kWide>(tables.second, usable, codes2, scale2, span, e.s2, largest_of(e.s2));
  if constexpr (kThree)
    store_codes<true, IO::kWide>(tables.first, usable, codes1 + tensor.n, scale1 + place.n_blocks, span, e.s3,
                                 largest_of(e.s3));
  return true;
}

// A block of any kind, and of gradients that are not numbers.
template <bsh_optimizer kAlgorithm, Pair kPair, typename T>
__device__ __noinline__ void any_block_8bit(const bsh_step_list &list, uint32_t number, const T &tables, bool usable) {
  const bsh_step_numbers k = numbers_of<kAlgorithm, kPair>(list);
  block_8bit<kAlgorithm, kPair, false>(list, Place(list, number, find_tensor(list, number)), k, tables, usable, [] {});
}

template <bsh_optimizer kAlgorithm, Pair kPair> __device__ __forceinline__ void step_8bit(const bsh_step_list &list) {
  constexpr bool kTwo = Moments<kAlgorithm>::kTwo;
  __shared__ Tables<kTwo> tables;
  wait_for_earlier_kernels();
  const TableFill<kTwo> maps(list);
  Blocks blocks(list);
  uint32_t whole = min(blocks.end, blocks.whole_until<kAlgorithm>(Floats<kPair>::kWide));
  NextLine<kAlgorithm, kPair> line;
  line.enter(list, blocks.number, blocks.t);
  line.prefetch(blocks.number < whole);
  bsh_step_numbers k = numbers_of<kAlgorithm, kPair>(list);
  k.skip_zeros = false;
  const bool usable = maps.fill(tables);
  while (blocks.more()) {
    const Place place(list, blocks.number, blocks.t);
    const auto go_on = [&] {
      if (blocks.next()) {
        whole = min(blocks.end, blocks.whole_until<kAlgorithm>(Floats<kPair>::kWide));
        line.enter(list, blocks.number, blocks.t);
      } else {
        line.next();
      }
      line.prefetch(blocks.number < whole);
    };
    const bool is_whole = blocks.number < whole;
    bool done = false;
    if constexpr (kLoadsFirst<kAlgorithm, kPair>) {
      if (is_whole) done = block_8bit<kAlgorithm, kPair, true>(list, place, k, tables, usable, go_on);
      else go_on();
    } else {
      go_on();
      done = is_whole && block_8bit<kAlgorithm, kPair, true>(list, place, k, tables, usable, [] {});
    }
    if (!done) any_block_8bit<kAlgorithm, kPair>(list, blocks.number - kStepThreads / 32, tables, usable);
  }
}

// ---- the norm of an update, which max_unorm bounds ----

constexpr int kSumThreads = 256;

// sums[blockIdx.x] = squares of the updates that this block of threads sees.
template <bsh_optimizer kAlgorithm> __device__ __forceinline__ void squares(const bsh_step_list &list, double *sums) {
  double sum = 0;
  wait_for_earlier_kernels();
  for (Blocks blocks(list); blocks.more(); blocks.next()) {
    const auto span = Place(list, blocks.number, blocks.t).span<false>();
    Elements e;
    load_32bit<kAlgorithm, kMixed>(list, list.tensors[0], span, e);
#pragma unroll
    for (int i = 0; i < kPerLane; i++) {
      const step_element element = e.at<kAlgorithm>(i);
      const float square = update_square(&list.numbers, kAlgorithm, &element);
      if (span.has(element_of<4>(i))) sum += (double)square;
    }
  }
  sum_of_block<kStepThreads>(sum, sums + blockIdx.x);
}

} // namespace bsh

#define STEP_ENTRY(NAME, ...) BSH_ENTRY(__launch_bounds__(bsh::kStepThreads, 1), NAME, bsh_step_list, __VA_ARGS__)

#define BSH_BY_DTYPE(kind, name, algorithm)                                                                            \
  STEP_ENTRY(optimizer_##kind##_##name##_f32, step_##kind<algorithm, bsh::kF32>)                                       \
  STEP_ENTRY(optimizer_##kind##_##name##_f16, step_##kind<algorithm, bsh::kF16>)                                       \
  STEP_ENTRY(optimizer_##kind##_##name##_bf16, step_##kind<algorithm, bsh::kBF16>)                                     \
  STEP_ENTRY(optimizer_##kind##_##name##_mixed, step_##kind<algorithm, bsh::kMixed>)

#define BSH_BY_BITS(name, algorithm) BSH_BY_DTYPE(32bit, name, algorithm) BSH_BY_DTYPE(8bit, name, algorithm)

BSH_BY_BITS(adam, BSH_ADAM)
BSH_BY_BITS(momentum, BSH_MOMENTUM)
BSH_BY_BITS(rmsprop, BSH_RMSPROP)
BSH_BY_BITS(adagrad, BSH_ADAGRAD)
BSH_BY_BITS(lion, BSH_LION)
BSH_BY_BITS(ademamix, BSH_ADEMAMIX)

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
  bsh::sum_of_block<bsh::kSumThreads>(mine, &total);
  if (threadIdx.x == 0) *unorm = (float)total;
}
