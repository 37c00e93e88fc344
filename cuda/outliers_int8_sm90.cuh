// outliers_int8_sm90.cuh - outlier columns of x that gemm_int8_sm90 finds itself.
//
//   claims [K] --those that are true, in order--> a list of columns k                      three warps of a block
//   x at k ----------------------------> x [ROWS, 64], and its codes [ROWS, 64]            the same
//   codes of W at k, in memory --------> W [COLUMNS, 64]: k of the first stages, and beyond 64 columns: the same
//   codes of W at k, in the ring ------> W [COLUMNS, 64]: k of later stages                consumers, beside products
//     '--> x W^T, and products of the codes, which are taken out of the sums: whole numbers below 2^21, exact in fp32
//
// Operands are of 16 bits and have 64 columns; more columns follow in turns of 64. No stage waits for the list:
// consumers ask for it when they have multiplied the first FIRST stages.
#pragma once

#include "gemm_int8_sm90.cuh"

namespace bsh {
namespace {

#ifdef BSH_HAS_WGMMA
enum { FOUND_CHUNK = BSH_INT8_CHUNK, FIRST = 8 /* stages */ };

__device__ __forceinline__ void st_shared_2(uint32_t address, uint32_t v) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"((uint16_t)v) : "memory");
}
__device__ __forceinline__ void st_shared_1(uint32_t address, uint32_t v) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
__device__ __forceinline__ uint32_t ld_shared_2(uint32_t address) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ int ld_shared_1(uint32_t address) {
  int v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ int code_in_shared(uint32_t address) {
  int v;
  asm volatile("ld.shared.s8 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
// Where a byte of a row lies in a tile of 128-byte rows with 128-byte swizzle.
__device__ __forceinline__ uint32_t in_tile(int row, int byte) {
  return row * 128 + ((byte >> 4 ^ row & 7) << 4) + (byte & 15);
}
template <typename T> __device__ __forceinline__ uint32_t bits_of(float v) {
  T value;
  from_float(v, &value);
  return *reinterpret_cast<const uint16_t *>(&value);
}
template <typename T> __device__ __forceinline__ float value_of(uint32_t bits) {
  const uint16_t raw = (uint16_t)bits;
  return to_float(*reinterpret_cast<const T *>(&raw));
}

// ---- the warps that find columns ------------------------------------------------------------------------------------

template <typename T, typename FORM> struct outlier_warps {
  static constexpr int THREADS = OUTLIER_WARPS * 32, BARRIER = 1;
  static constexpr int AT_ONCE = 32; // columns, in registers of a lane
  static constexpr int WIDTH = 8, WORDS = 6,
                       STAGE_WORDS = BSH_GEMM_INT8_DEPTH / WIDTH; // claims of a word; words at once
  const int8_work<FORM> &work;
  const bsh_int8_gemm_args &args;
  const int warp, lane;
  const uint32_t threshold, x_operand, codes_operand, w_operand;
  int begin, end, before, count; // words of this thread; columns before them; all columns

  __device__ __forceinline__ outlier_warps(const int8_work<FORM> &w, int own_warp, int own_lane)
      : work(w), args(w.args), warp(own_warp), lane(own_lane), threshold(__float_as_uint(w.args.threshold)),
        x_operand(w.found), codes_operand(w.found + FORM::X_BYTES), w_operand(w.found + 2 * FORM::X_BYTES) {}

  __device__ __forceinline__ const uint16_t *x_at(int64_t m) const {
    return static_cast<const uint16_t *>(args.x) + m * args.ldx;
  }
  __device__ __forceinline__ bool reaches(float x) const { return is_outlier(__float_as_uint(fabsf(x)), threshold); }

  __device__ __forceinline__ uint4 claims_of(int w) const {
    return w < end ? reinterpret_cast<const uint4 *>(args.claims)[w] : make_uint4(~0u, ~0u, ~0u, ~0u);
  }
  // Of the columns of a word, those whose claims are true, as bits. ~0 is the claim of no row.
  __device__ __forceinline__ uint32_t true_claims(const uint4 &word, int w) const {
    const uint32_t pairs[4] = {word.x, word.y, word.z, word.w};
    const uint16_t *const x = x_at(0) + w * WIDTH;
    uint32_t of[WIDTH], marks = 0;
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
      const uint32_t row = pairs[i / 2] >> i % 2 * 16 & 0xFFFF;
      of[i] = row < (uint32_t)args.M ? x[row * args.ldx + i] : 0;
    }
#pragma unroll
    for (int i = 0; i < WIDTH; i++) marks |= (uint32_t)reaches(value_of<T>(of[i])) << i;
    return marks;
  }

  __device__ __forceinline__ void count_columns() {
    const int words = args.K / WIDTH, span = (words + THREADS - 1) / THREADS;
    begin = min(words, (warp * 32 + lane) * span), end = min(words, begin + span);
    int own = 0;
#pragma unroll 1
    for (int w = begin; w < end; w += WORDS) {
      uint4 claims[WORDS];
#pragma unroll
      for (int i = 0; i < WORDS; i++) claims[i] = claims_of(w + i);
#pragma unroll
      for (int i = 0; i < WORDS; i++) own += __popc(true_claims(claims[i], w + i));
    }
    int upto = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(ALL_LANES, upto, step);
      if (lane >= step) upto += other;
    }
    if (lane == 31) st_shared(work.counts + 4 * (1 + warp), (uint32_t)upto);
    named_barrier<THREADS>(BARRIER);
    before = upto - own, count = 0;
#pragma unroll
    for (int w = 0; w < OUTLIER_WARPS; w++) {
      const int of_warp = (int)ld_shared_4(work.counts + 4 * (1 + w));
      if (w < warp) before += of_warp;
      count += of_warp;
    }
  }
  // Positions [first, first + FOUND_CHUNK) of the list to `to`. A barrier by the caller.
  __device__ __forceinline__ void list(int first, uint32_t to) const {
    int at = before - first;
#pragma unroll 1
    for (int w = begin; w < end; w++) {
      if (first == 0 && w % STAGE_WORDS == 0) st_shared_1(work.starts + w / STAGE_WORDS, min(at, FOUND_CHUNK));
      if (count == 0) continue;
#pragma unroll 1
      for (uint32_t left = true_claims(claims_of(w), w); left != 0; left &= left - 1, at++)
        if (at >= 0 && at < FOUND_CHUNK) st_shared_2(to + 2 * at, w * WIDTH + __ffs(left) - 1);
    }
  }
  // All of it, to the consumers.
  __device__ __forceinline__ void publish() {
    count_columns();
    list(0, work.listed);
    const bool leads = warp == 0 && lane == 0;
    if (leads) {
      st_shared(work.counts, (uint32_t)count);
      st_shared_1(work.starts + work.steps, min(count, FOUND_CHUNK));
    }
    named_barrier<THREADS>(BARRIER);
    if (leads) mbarrier_arrive(work.known);
  }

  // n columns of a list, 32 at a time, of a row of this lane: load(k), then store(of 8 columns, words).
  template <typename LOAD, typename STORE>
  __device__ __forceinline__ void gather(uint32_t list, int n, bool there, LOAD load, STORE store) const {
#pragma unroll 1
    for (int first = 0; first < n; first += AT_ONCE) {
      uint32_t v[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i += 4) {
        const uint2 k = ld_shared_8(list + 2 * (first + i));
        const uint32_t columns[4] = {k.x & 0xFFFF, k.x >> 16, k.y & 0xFFFF, k.y >> 16};
#pragma unroll
        for (int e = 0; e < 4; e++) v[i + e] = there && first + i + e < n ? load(columns[e]) : 0;
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; i += 8) store(first + i, v + i);
    }
  }
  // Zeros behind n columns, too.
  __device__ __forceinline__ void gather_x(int tile, int group, uint32_t list, int n) const {
    const int r = group * 32 + lane, m = work.row(tile) + r;
    const bool there = m < args.M;
    const uint16_t *const x = x_at(there ? m : 0);
    const float scale = there ? scale_of_row<T>(args.row_absmax[m]) : 0.f;
    gather(
        list, n, there, [&](uint32_t k) { return (uint32_t)x[k]; },
        [&](int at, const uint32_t *v) {
          const uint32_t to = in_tile(r, 2 * at);
          uint32_t codes[8];
#pragma unroll
          for (int i = 0; i < 8; i++) {
            const float value = value_of<T>(v[i]);
            const int code = (int8_t)(scale == 0.f || reaches(value) ? 0 : code_of(value, scale));
            codes[i] = bits_of<T>((float)code);
          }
          st_shared_16(x_operand + to,
                       make_uint4(v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16));
          st_shared_16(codes_operand + to, make_uint4(codes[0] | codes[1] << 16, codes[2] | codes[3] << 16,
                                                      codes[4] | codes[5] << 16, codes[6] | codes[7] << 16));
        });
  }
  // Of the n columns of a list the first `mine`, and zeros behind all, as far as products read.
  __device__ __forceinline__ void gather_w(int tile, int group, uint32_t list, int mine, int n) const {
    const int r = group * 32 + lane, row = work.column(tile) + r;
    const bool there = row < args.N;
    const int8_t *const w = args.b + (int64_t)(there ? row : 0) * args.K;
    gather(
        list, mine, there, [&](uint32_t k) { return (uint32_t)(int)w[k]; },
        [&](int at, const uint32_t *v) {
#pragma unroll
          for (int i = 0; i < 8; i++)
            if (at + i < mine) st_shared_2(w_operand + in_tile(r, 2 * (at + i)), bits_of<T>((float)(int)v[i]));
        });
    for (int at = n; at % 16 != 0; at++) st_shared_2(w_operand + in_tile(r, 2 * at), 0);
  }

  __device__ __forceinline__ void make_operands(int tile, int first) const {
    constexpr int X_GROUPS = FORM::ROWS / 32, W_GROUPS = FORM::COLUMNS / 32;
    const int n = min(FOUND_CHUNK, count - first);
    const int mine = first > 0 ? n : ld_shared_1(work.starts + min(FIRST, work.steps));
    const uint32_t list = first > 0 ? work.later : work.listed;
    for (int group = warp; group < X_GROUPS + W_GROUPS; group += OUTLIER_WARPS)
      if (group < X_GROUPS) gather_x(tile, group, list, n);
      else gather_w(tile, group - X_GROUPS, list, mine, n);
  }

  __device__ __forceinline__ void run() {
    publish();
    uint32_t uses = 0;
    for (int tile = work.cluster; tile < args.tiles; tile += work.clusters())
#pragma unroll 1
      for (int first = 0; first < count; first += FOUND_CHUNK, uses++) {
        if (first > 0) {
          named_barrier<THREADS>(BARRIER); // the list before was read
          list(first, work.later);
          named_barrier<THREADS>(BARRIER);
        }
        mbarrier_wait(work.free, uses & 1 ^ 1);
        make_operands(tile, first);
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(work.ready);
      }
  }
};

// ---- consumers ------------------------------------------------------------------------------------------------------

// Found columns as a warp of consumers sees them. Without them, count is 0.
template <typename T, typename FORM> struct found_columns {
  static constexpr int SHARES = CONSUMERS * 32 / FORM::COLUMNS; // of the columns of a stage, by threads of a row of W
  const int8_work<FORM> &work;
  const int group, lane, row, share;
  int count = 0;
  uint32_t uses = 0; // of operands

  __device__ __forceinline__ found_columns(const int8_work<FORM> &w, int g, int warp, int l)
      : work(w), group(g), lane(l), row((warp * 32 + l) % FORM::COLUMNS), share((warp * 32 + l) / FORM::COLUMNS) {}

  __device__ __forceinline__ void learn() {
    mbarrier_wait(work.known, 0);
    count = (int)ld_shared_4(work.counts);
    if (count > 0) mbarrier_wait(work.free, uses & 1 ^ 1); // all consumers are done with the operands before
  }
  // Beside the products of a stage, its number `step`: columns of W out of it.
  __device__ __forceinline__ void take_w(int stage, int step) {
    if (!work.finds() || step < FIRST) return;
    if (step == FIRST) learn();
    if (count == 0) return;
    const int end = ld_shared_1(work.starts + step + 1);
    const uint32_t b = work.memory + stage * FORM::STAGE_BYTES + FORM::A_BYTES;
    for (int at = ld_shared_1(work.starts + step) + share; at < end; at += SHARES) {
      const int code = code_in_shared(b + in_tile(row, ld_shared_2(work.listed + 2 * at) % BSH_GEMM_INT8_DEPTH));
      st_shared_2(work.found + 2 * FORM::X_BYTES + in_tile(row, 2 * at), bits_of<T>((float)code));
    }
  }
  // Behind the stages of a tile.
  __device__ __forceinline__ void leave() {
    if (work.finds() && work.steps <= FIRST) learn();
  }

  // Takes products of codes of found columns out of a tile's sums; part: x W^T of them.
  __device__ __forceinline__ void multiply(int (&sum)[FORM::SUMS], float (&part)[FORM::SUMS]) {
    constexpr int PARTS = FORM::SUMS > 32 ? 2 : 1, WIDTH = FORM::OWN / PARTS, SUMS = FORM::SUMS / PARTS;
    const uint32_t own_rows = FORM::ROWS == 64 ? 0 : group * 64 * 128;
    const uint64_t x = wgmma_descriptor_64(work.found + own_rows);
    const uint64_t codes = wgmma_descriptor_64(work.found + FORM::X_BYTES + own_rows);
    const uint64_t w =
        wgmma_descriptor_64(work.found + 2 * FORM::X_BYTES + (FORM::ROWS == 64 ? group * FORM::OWN * 128 : 0));
#pragma unroll
    for (int i = 0; i < FORM::SUMS; i++) part[i] = 0.f;
#pragma unroll 1
    for (int first = 0; first < count; first += FOUND_CHUNK, uses++) {
      const int steps = (min(FOUND_CHUNK, count - first) + 15) / 16; // of 16 columns
      fence_proxy_async();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(work.ready);
      mbarrier_wait(work.ready, uses & 1);
#pragma unroll
      for (int h = 0; h < PARTS; h++) {
        float of_codes[SUMS];
#pragma unroll
        for (int i = 0; i < SUMS; i++) of_codes[i] = 0.f;
#pragma unroll 1
        for (int k = 0; k < steps; k++) {
          wgmma_fence();
          wgmma_ss<T, WIDTH>::mma_async(of_codes, codes + 2 * k, w + (h * WIDTH * 128 >> 4) + 2 * k);
          wgmma_ss<T, WIDTH>::mma_async(part + h * SUMS, x + 2 * k, w + (h * WIDTH * 128 >> 4) + 2 * k);
        }
        wgmma_commit();
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < SUMS; i++) {
          asm volatile("" : "+f"(of_codes[i]), "+f"(part[h * SUMS + i])::"memory");
          sum[h * SUMS + i] -= __float2int_rn(of_codes[i]);
        }
      }
      if (lane == 0) mbarrier_arrive(work.free);
    }
  }
};
#endif

} // namespace
} // namespace bsh
