// outliers_int8_sm90.cuh - outlier columns of x that gemm_int8_sm90 finds itself: three warps of a block list them, and
// make 16-bit operands of 64 of them at a time.
//
//   claims [K] --those that are true, in order--> a list of columns k
//   stages of b that pass through the ring --codes of W at k--> W [COLUMNS, 64]       the first 64 columns
//   x at k --------------------------> x [ROWS, 64], and its codes [ROWS, 64]         loads of many columns at once
//   further columns: codes of W at k from memory
//
// Products of the codes are taken out of the sums again, exactly: they are whole numbers below 2^21.
#pragma once

#include "gemm_int8_sm90.cuh"

namespace bsh {
namespace {

#ifdef BSH_HAS_WGMMA
__device__ __forceinline__ void st_shared_2(uint32_t address, uint16_t v) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(v) : "memory");
}
__device__ __forceinline__ int code_in_shared(uint32_t address) {
  int v;
  asm volatile("ld.shared.s8 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
// Of element `at` of 2^log2 bytes, of a row of an operand with 128-byte swizzle.
template <int LOG2> __device__ __forceinline__ uint32_t in_operand(int row, int at) {
  return row * 128 + ((((at << LOG2) >> 4) ^ (row & 7)) << 4) + ((at << LOG2) & 15);
}
template <typename T> __device__ __forceinline__ uint32_t bits_of(float v) {
  T value;
  from_float(v, &value);
  return *reinterpret_cast<const uint16_t *>(&value);
}

template <typename T, typename FORM> struct outlier_warps {
  static constexpr int THREADS = OUTLIER_WARPS * 32, CHUNK = BSH_INT8_CHUNK, AT_ONCE = 32, BARRIER = 1;
  const int8_work<FORM> &work;
  const bsh_int8_gemm_args &args;
  const int warp, lane; // warp 0 takes W out of the ring
  const uint32_t threshold, x_operand, codes_operand, w_operand;
  int begin, end, before, count; // words of 16 claims of this thread; columns before them; all columns

  __device__ __forceinline__ outlier_warps(const int8_work<FORM> &w, int own_warp, int own_lane)
      : work(w), args(w.args), warp(own_warp), lane(own_lane), threshold(__float_as_uint(w.args.threshold)),
        x_operand(w.found), codes_operand(w.found + FORM::X_BYTES), w_operand(w.found + 2 * FORM::X_BYTES) {}

  __device__ __forceinline__ const uint16_t *x_at(int64_t m) const {
    return static_cast<const uint16_t *>(args.x) + m * args.ldx;
  }
  static __device__ __forceinline__ float value_of(uint32_t bits) {
    const uint16_t raw = (uint16_t)bits;
    return to_float(*reinterpret_cast<const T *>(&raw));
  }
  __device__ __forceinline__ bool reaches(float x) const { return is_outlier(__float_as_uint(fabsf(x)), threshold); }

  // Which of columns 16 w and on are outlier columns, as bits: claims that are true.
  __device__ __forceinline__ uint32_t marks(int w) const {
    uint32_t of[16], found = 0; // claims, then elements of x
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint4 v = reinterpret_cast<const uint4 *>(args.claims)[w * 4 + i];
      of[4 * i] = v.x, of[4 * i + 1] = v.y, of[4 * i + 2] = v.z, of[4 * i + 3] = v.w;
    }
    const uint16_t *const x = x_at(0) + w * 16;
#pragma unroll
    for (int i = 0; i < 16; i++) of[i] = of[i] < (uint32_t)args.M ? x[of[i] * args.ldx + i] : 0;
#pragma unroll
    for (int i = 0; i < 16; i++) found |= (uint32_t)reaches(value_of(of[i])) << i;
    return found;
  }

  __device__ __forceinline__ void count_columns() {
    const int words = args.K / 16, span = (words + THREADS - 1) / THREADS;
    begin = min(words, (warp * 32 + lane) * span), end = min(words, begin + span);
    int own = 0;
#pragma unroll 1
    for (int w = begin; w < end; w++) own += __popc(marks(w));
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
    if (own == 0) end = begin; // nothing to list
    if (warp == 0 && lane == 0) st_shared(work.counts, (uint32_t)count), mbarrier_arrive(work.known);
  }
  // Positions [first, first + CHUNK) of the list.
  __device__ __forceinline__ void list(int first) const {
    named_barrier<THREADS>(BARRIER);
    int at = before - first;
#pragma unroll 1
    for (int w = begin; w < end; w++)
#pragma unroll 1
      for (uint32_t left = marks(w); left != 0; left &= left - 1, at++)
        if (at >= 0 && at < CHUNK) st_shared(work.listed + 4 * at, (uint32_t)(w * 16 + __ffs(left) - 1));
    named_barrier<THREADS>(BARRIER);
  }

  // 32 columns of the list at a time, of a row of this lane: load(k), then store(of 8 columns, words).
  template <typename LOAD, typename STORE>
  __device__ __forceinline__ void gather(int n, bool there, LOAD load, STORE store) const {
#pragma unroll 1
    for (int first = 0; first < n; first += AT_ONCE) {
      uint32_t v[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i += 4) {
        const uint4 k = ld_shared_16(work.listed + 4 * (first + i));
        const uint32_t columns[4] = {k.x, k.y, k.z, k.w};
#pragma unroll
        for (int e = 0; e < 4; e++) v[i + e] = there && first + i + e < n ? load(columns[e]) : 0;
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; i += 8) store(first + i, v + i);
    }
  }
  __device__ __forceinline__ void gather_x(int tile, int group, int n) const {
    const int r = group * 32 + lane, m = work.row(tile) + r;
    const bool there = m < args.M;
    const uint16_t *const x = x_at(there ? m : 0);
    const float scale = there ? scale_of_row<T>(args.row_absmax[m]) : 0.f;
    gather(
        n, there, [&](uint32_t k) { return (uint32_t)x[k]; },
        [&](int at, const uint32_t *v) {
          const uint32_t to = in_operand<1>(r, at);
          uint32_t codes[8];
#pragma unroll
          for (int i = 0; i < 8; i++) {
            const float value = value_of(v[i]);
            const int code = (int8_t)(scale == 0.f || reaches(value) ? 0 : code_of(value, scale));
            codes[i] = bits_of<T>((float)code);
          }
          st_shared_16(x_operand + to,
                       make_uint4(v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16));
          st_shared_16(codes_operand + to, make_uint4(codes[0] | codes[1] << 16, codes[2] | codes[3] << 16,
                                                      codes[4] | codes[5] << 16, codes[6] | codes[7] << 16));
        });
  }
  __device__ __forceinline__ void gather_w(int tile, int group, int n) const {
    const int r = group * 32 + lane, row = work.column(tile) + r;
    const bool there = row < args.N;
    const int8_t *const w = args.b + (int64_t)(there ? row : 0) * args.K;
    gather(
        n, there, [&](uint32_t k) { return (uint32_t)(int)w[k]; },
        [&](int at, const uint32_t *v) {
          uint32_t words[4];
#pragma unroll
          for (int i = 0; i < 4; i++) words[i] = pack_pair<T>((float)(int)v[2 * i], (float)(int)v[2 * i + 1]);
          st_shared_16(w_operand + in_operand<1>(r, at), make_uint4(words[0], words[1], words[2], words[3]));
        });
  }

  // One warp: the first n columns of W of a tile out of the ring, each of whose stages it frees; zeros behind them, as
  // far as products read.
  __device__ __forceinline__ void take_w(int8_ring<FORM> &ring, int n) const {
    const int padded = (n + 15) / 16 * 16;
    for (int at = n; at < padded; at++)
#pragma unroll
      for (int r = 0; r < FORM::COLUMNS; r += 32) st_shared_2(w_operand + in_operand<1>(r + lane, at), 0);
    int at = 0, next = n > 0 ? (int)ld_shared_4(work.listed) : args.K;
#pragma unroll 1
    for (int step = 0; step < work.steps; step++, ring.next()) {
      mbarrier_wait(work.full + 8 * ring.stage, ring.parity);
      const uint32_t b = work.memory + ring.stage * FORM::STAGE_BYTES + FORM::A_BYTES;
      while (next < (step + 1) * BSH_GEMM_INT8_DEPTH && at < n) {
        const int k = next - step * BSH_GEMM_INT8_DEPTH;
        next = (int)ld_shared_4(work.listed + 4 * min(at + 1, CHUNK - 1));
        int code[FORM::COLUMNS / 32];
#pragma unroll
        for (int i = 0; i < FORM::COLUMNS / 32; i++) code[i] = code_in_shared(b + in_operand<0>(i * 32 + lane, k));
#pragma unroll
        for (int i = 0; i < FORM::COLUMNS / 32; i++)
          st_shared_2(w_operand + in_operand<1>(i * 32 + lane, at), (uint16_t)bits_of<T>((float)code[i]));
        at++;
      }
      __syncwarp();
      ring.release(ring.stage);
    }
  }

  __device__ __forceinline__ void make_operands(int tile, int chunk, int n, int8_ring<FORM> &ring) const {
    constexpr int X_GROUPS = FORM::ROWS / 32, W_GROUPS = FORM::COLUMNS / 32;
    if (chunk > 0) {
      for (int group = warp; group < X_GROUPS + W_GROUPS; group += OUTLIER_WARPS)
        if (group < X_GROUPS) gather_x(tile, group, n);
        else gather_w(tile, group - X_GROUPS, n);
    } else if (warp == 0) take_w(ring, n);
    else
      for (int group = warp - 1; group < X_GROUPS; group += OUTLIER_WARPS - 1) gather_x(tile, group, n);
  }

  __device__ __forceinline__ void run() {
    int8_ring<FORM> ring(work, lane);
    uint32_t uses = 0;
    count_columns();
    if (count > 0) list(0);
    for (int tile = work.cluster; tile < args.tiles; tile += work.clusters()) {
      if (count == 0) {
        if (warp == 0) take_w(ring, 0);
        continue;
      }
#pragma unroll 1
      for (int first = 0; first < count; first += CHUNK, uses++) {
        if (uses > 0 && count > CHUNK) list(first);
        mbarrier_wait(work.free, uses & 1 ^ 1);
        make_operands(tile, first, min(CHUNK, count - first), ring);
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(work.ready);
      }
    }
  }
};

// Takes products of found columns out of a tile's sums; part: x W^T of them.
template <typename T, typename FORM>
__device__ __forceinline__ void multiply_found(int (&sum)[FORM::SUMS], float (&part)[FORM::SUMS],
                                               const int8_work<FORM> &work, int group, int count, int lane,
                                               uint32_t &uses) {
  constexpr int PARTS = FORM::SUMS > 32 ? 2 : 1, WIDTH = FORM::OWN / PARTS, SUMS = FORM::SUMS / PARTS;
  const uint32_t own_rows = FORM::ROWS == 64 ? 0 : group * 64 * 128;
  const uint64_t x = wgmma_descriptor_64(work.found + own_rows);
  const uint64_t codes = wgmma_descriptor_64(work.found + FORM::X_BYTES + own_rows);
  const uint64_t w =
      wgmma_descriptor_64(work.found + 2 * FORM::X_BYTES + (FORM::ROWS == 64 ? group * FORM::OWN * 128 : 0));
#pragma unroll
  for (int i = 0; i < FORM::SUMS; i++) part[i] = 0.f;
#pragma unroll 1
  for (int first = 0; first < count; first += BSH_INT8_CHUNK, uses++) {
    const int steps = (min(BSH_INT8_CHUNK, count - first) + 15) / 16; // of 16 columns
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
#endif

} // namespace
} // namespace bsh
