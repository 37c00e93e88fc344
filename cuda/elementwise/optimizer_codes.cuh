// optimizer_codes.cuh - tables of codes in shared memory for 8-bit states: code to number and number to code.
//
// optimizer.cu includes this within namespace bsh, behind its arithmetic. All kStepThreads threads fill the tables when
// a kernel begins (TableFill); then a code costs one load (entry_of), and so does a number (StateCodes::encode).
#pragma once

// ---- codes of 8-bit states ------------------------------------------------------------------------------------------

__device__ __forceinline__ bool is_negative(float a) { return __float_as_uint(a) >> 31; }

// bitsandbytes' search, for any map: seven halvings against entries of odd index leave one of even index, the midpoints
// decide, and a tie goes to the even index; a NaN is 0. With keep_sign a code whose entry has not the sign of the state
// is moved by one, beyond either end too, where it wraps.
template <typename T>
__device__ __noinline__ uint32_t encode_any(const T &tables, bool keep_sign, float v, float state) {
  const auto map = [&](int i) { return tables.map[i & 255]; };
  int odd = 127;
  for (int step = 64; step > 1; step /= 2) odd += v > map(odd) ? step : -step;
  const int even = odd + (v > map(odd) ? 1 : -1);
  int code = even;
  if (v > map(even)) code += v > v_mul(v_add(map(even), map(even + 1)), 0.5f);
  else if (even > 0) code -= v < v_mul(v_add(map(even), map(even - 1)), 0.5f);
  if (keep_sign && is_negative(map(code)) != is_negative(state)) code += state > 0.0f ? 1 : -1;
  return (uint32_t)code & 255;
}

// The bytes that kSelect takes from two words, of four words: 0x73 their upper ones, 0xFB copies of their signs.
template <int kSelect> __device__ __forceinline__ uint32_t byte_of_each(const uint32_t (&words)[4]) {
  uint32_t low, high;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(low) : "r"(words[0]), "r"(words[1]), "n"(kSelect));
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(high) : "r"(words[2]), "r"(words[3]), "n"(kSelect));
  return __byte_perm(low, high, 0x5410);
}

constexpr int kStepThreads = BSH_STEP_THREADS; // 32 warps share the tables of codes

// The code of a number in one load: magnitudes from 2^-24 to 1 in cells of the upper kBits bits of the mantissa, of
// which none has more than one threshold. A cell and the bits of a magnitude of it add up to a number whose upper byte
// is the code, of a negative number its complement: what lies between is chosen so that the sum carries from the
// threshold on. A map of which that is not true is searched by encode_any.
template <bool kSigned> struct StateCodes {
  // The signed map has half as many entries of each sign.
  static constexpr int kBits = kSigned ? 6 : 7, kShift = 23 - kBits, kOctaves = 24;
  static constexpr int kCells = (kOctaves << kBits) + 1, kSigns = kSigned ? 2 : 1;
  static constexpr uint32_t kOne = 127u << 23, kLeast = kOne - ((uint32_t)kOctaves << 23);

  float map[256];
  uint32_t cells[kSigns * kCells]; // those of both signs in turn

  // The code, or its complement, in the upper byte; |v| <= 1 but for rounding.
  __device__ __forceinline__ uint32_t encode(float v) const {
    const uint32_t magnitude = __float_as_uint(fmaxf(kSigned ? fabsf(v) : v, 0x1p-24f));
    const uint32_t cell = magnitude >> kShift;
    const uint32_t place = kSigned ? __funnelshift_l(__float_as_uint(v), cell, 1) : cell;
    return cells[(int)place - kSigns * (int)(kLeast >> kShift)] + magnitude;
  }

  // The codes of four numbers.
  __device__ __forceinline__ uint32_t encode_four(const float *v, float scale) const {
    uint32_t found[4], bits[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const float scaled = v_mul(scale, v[k]);
      bits[k] = __float_as_uint(scaled);
      found[k] = encode(scaled);
    }
    const uint32_t codes = byte_of_each<0x73>(found);
    return kSigned ? codes ^ byte_of_each<0xFB>(bits) : codes;
  }
};

// ---- filling the tables ---------------------------------------------------------------------------------------------

// The codes of one sign, on the way from zero to larger magnitudes.
struct CodeWalk {
  const float *bounds; // least number with a code of i + 1 or more; [255] is infinite
  bool negative;
  int code;        // of the magnitude that the walk is at
  uint32_t change; // the least magnitude with another code, or none

  // At `magnitude`, of a map whose first `n_negative` entries are negative: a number gets the code of one of its sign.
  __device__ __forceinline__ CodeWalk(const float *bounds, int n_negative, uint32_t magnitude, bool negative)
      : bounds(bounds), negative(negative), code(0) {
    const float v = __uint_as_float(magnitude | (negative ? 0x80000000u : 0u));
#pragma unroll
    for (int step = 128; step > 0; step /= 2)
      if (bounds[code + step - 1] <= v) code += step;
    code = negative ? min(code, n_negative - 1) : max(code, n_negative);
    find_change();
  }

  __device__ __forceinline__ void find_change() {
    const int bound = negative ? code - 1 : code;
    change = 0xFFFFFFFFu;
    if ((uint32_t)bound < 255) change = (__float_as_uint(bounds[bound]) & 0x7FFFFFFFu) + negative;
  }

  __device__ __forceinline__ void pass_change() {
    code += negative ? -1 : 1;
    find_change();
  }
};

template <bool kTwo> struct Tables {
  StateCodes<true> first;
};
template <> struct Tables<true> {
  StateCodes<true> first;
  StateCodes<false> second;
};

// Entries of both maps, [256, 2], each in 32 copies, one for the bank of each lane: no two lanes wait for each other.
// 64 KiB, which GPUs before sm_80 do not have.
#if __CUDA_ARCH__ >= 800
constexpr bool kCopies = true;
#else
constexpr bool kCopies = false;
#endif
extern __shared__ float4 map_copies[];
constexpr int kCopyBytes = 128, kEntryBytes = 2 * kCopyBytes;
static_assert(256 * kEntryBytes == BSH_STEP_COPIES_BYTES, "what the host asks for");

// Fills the tables of both maps at a time, by kStepThreads threads, half of them for each of two.
template <bool kTwo> struct TableFill {
  static constexpr int kMaps = 1 + kTwo, kThreads = kStepThreads / kMaps;
  static constexpr int kCells = 2 * (StateCodes<true>::kCells - 1), kEach = kCells / kThreads; // of a map
  static_assert(kEach * kThreads == kCells && StateCodes<false>::kCells - 1 == kCells, "all fill as many cells");
  static constexpr uint32_t kNever = 1u << 20; // more than a cell has, less than the byte below the code

  float entry, next; // of the map that this thread looks at first, and the one behind it

  // The loads from global memory.
  __device__ __forceinline__ explicit TableFill(const bsh_step_list &list) : entry(0), next(0) {
    const int i = threadIdx.x % 256;
    if (threadIdx.x >= kMaps * 256) return;
    const float *const map = threadIdx.x < 256 ? list.map1 : list.map2;
    entry = map[i], next = map[min(i + 1, 255)];
  }

  // One entry and one bound. False: not every map has bounds.
  __device__ __forceinline__ bool put_bound(float *map, float *bounds, bool is_signed) const {
    const int i = threadIdx.x % 256;
    const float middle = i < 255 ? v_mul(v_add(entry, next), 0.5f) : INFINITY;
    const uint32_t bits = __float_as_uint(middle), above = is_negative(middle) ? bits - 1 : bits + 1;
    map[i] = entry;
    bounds[i] = i % 2 == 0 ? __uint_as_float(above) : middle; // a tie goes to the even index
    return fabsf(entry) <= FLT_MAX && (i == 255 || entry < next) && fabsf(middle) >= FLT_MIN && // so is `above`
           (is_signed || i > 0 || entry >= 0.0f); // then the code of all below zero is that of zero
  }

  // `n` cells, each `stride` words behind the one before, from that of magnitude `first` on; the last one of all is the
  // cell that begins at 1, in which only 1 is, and what is rounded up from it.
  static __device__ __forceinline__ bool put_cells(CodeWalk walk, uint32_t *cells, int stride, uint32_t first,
                                                   int shift, int n) {
    constexpr uint32_t kOne = StateCodes<true>::kOne;
    bool fits = true;
#pragma unroll 1
    for (int i = 0; i < n; i++) {
      const uint32_t last = first + (first == kOne ? 64 : (1u << shift) - 1);
      if (walk.change <= first) walk.pass_change();
      const uint32_t code = walk.negative ? ~walk.code : walk.code;
      const bool changes = walk.change <= last;
      cells[i * stride] = (code << 24) + (1u << 24) - (changes ? walk.change : first + kNever);
      fits = fits && walk.change > first && !(changes && first == kOne);
      if (changes) walk.pass_change();
      fits = fits && walk.change > last;
      first = last + 1;
    }
    return fits;
  }

  // Lanes begin at different banks.
  __device__ __forceinline__ void put_copies() const {
    constexpr int kVectors = kCopyBytes / sizeof(float4);
    const int i = threadIdx.x % 256, map = threadIdx.x / 256;
    if (!kCopies || map >= kMaps) return;
    float4 *const copies = map_copies + (i * 2 + map) * kVectors;
#pragma unroll
    for (int k = 0; k < kVectors; k++) copies[(i + k) % kVectors] = make_float4(entry, entry, entry, entry);
  }

  // Whether `encode` may be used.
  __device__ __forceinline__ bool fill(Tables<kTwo> &tables) const {
    __shared__ float bounds[kMaps][256];
    bool fits = true;
    if (threadIdx.x < 256) fits = put_bound(tables.first.map, bounds[0], true);
    if constexpr (kTwo)
      if (threadIdx.x / 256 == 1) fits = put_bound(tables.second.map, bounds[1], false);
    int n_negative = __syncthreads_count(threadIdx.x < 256 && is_negative(entry));
    const int t = threadIdx.x % kThreads, map = threadIdx.x / kThreads;
    const bool is_signed = map == 0, negative = is_signed && t >= kThreads / 2;
    const int cell = kEach * (negative ? t - kThreads / 2 : t);
    const int shift = is_signed ? StateCodes<true>::kShift : StateCodes<false>::kShift;
    uint32_t *cells = tables.first.cells + 2 * cell + negative;
    if constexpr (kTwo)
      if (!is_signed) cells = tables.second.cells + cell, n_negative = 0;
    const uint32_t first = StateCodes<true>::kLeast + ((uint32_t)cell << shift);
    const bool has_end = first + ((uint32_t)kEach << shift) == StateCodes<true>::kOne;
    const CodeWalk walk(bounds[map], n_negative, first, negative);
    // Below the first cell nothing changes.
    fits = fits && (cell != 0 || walk.code == n_negative - negative);
    fits = put_cells(walk, cells, 1 + is_signed, first, shift, kEach + has_end) && fits;
    put_copies();
    return __syncthreads_and(fits);
  }
};

// The entry of the code that is byte k of a word.
template <bool kSigned>
__device__ __forceinline__ float entry_of(const StateCodes<kSigned> &tables, uint32_t word, int k) {
  if constexpr (!kCopies) return tables.map[__byte_perm(word, 0, 0x4440 + k)];
  static_assert(kEntryBytes == 256, "a code is the second byte of its entry's place");
  const uint32_t place = __byte_perm(word, threadIdx.x % 32 * 4, 0x5504 + 16 * k);
  return *reinterpret_cast<const float *>(reinterpret_cast<const uint8_t *>(map_copies) + place +
                                          (kSigned ? 0 : kCopyBytes));
}
