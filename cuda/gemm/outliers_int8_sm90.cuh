// outliers_int8_sm90.cuh - outlier columns of x that gemm_int8_sm90 finds itself, beside its product.
//
//   claims [K] --> a bit for each column that has one --> a list of those that are true     three warps of a block
//   codes of W at k, out of the ring --> W [COLUMNS, 64], and the same in 16 bits           two of them
//   x at k, and its codes, negated, in memory --> x [ROWS, 64] in 16 bits, codes [ROWS, 64] the third
//     '--> sums += products of the codes, which takes them out exactly; part = x W^T        consumers, after a tile
//
// Each block needs x of its rows at all columns, and each of these elements is 32 bytes to fetch. So all blocks fetch a
// share and leave it in memory in one piece, [M, 64].
//
// Operands have 64 columns; more columns follow in turns of 64, from memory. Rows of an operand are 128 bytes, with
// 128-byte swizzle: 64 columns in 16 bits, or codes of 64 columns; of x those of two rows, r and 64 + r, of W half of
// the bytes are unused.
#pragma once

#include "cuda/gemm/gemm_int8_sm90.cuh"

namespace bsh {
namespace {

__device__ __forceinline__ void st_shared_1(uint32_t address, uint32_t v) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
__device__ __forceinline__ void st_shared_2(uint32_t address, uint32_t v) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"((uint16_t)v) : "memory");
}
__device__ __forceinline__ uint32_t ld_shared_2(uint32_t address) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
  return v;
}
// Zero where it is not wanted. Without a branch, and nothing is read then: copies write the same memory.
__device__ __forceinline__ uint32_t ld_shared_if(bool wanted, uint32_t address) {
  uint32_t v;
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\nmov.u32 %0, 0;\n@p ld.shared.u8 %0, [%1];\n}"
               : "=&r"(v)
               : "r"(address), "r"((uint32_t)wanted)
               : "memory");
  return v;
}
// Zero where there is none. Without a branch, which would wait for each load.
__device__ __forceinline__ uint32_t ld_if(bool there, const uint16_t *from) {
  uint16_t v;
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\nmov.u16 %0, 0;\n@p ld.global.u16 %0, [%1];\n}"
               : "=&h"(v)
               : "l"(from), "r"((uint32_t)there)
               : "memory");
  return v;
}
__device__ __forceinline__ uint32_t ld_if(bool there, const int8_t *from) {
  uint32_t v;
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\nmov.u32 %0, 0;\n@p ld.global.u8 %0, [%1];\n}"
               : "=&r"(v)
               : "l"(from), "r"((uint32_t)there)
               : "memory");
  return v;
}
// Where a byte of a row lies in a tile of 128-byte rows with 128-byte swizzle.
__device__ __forceinline__ uint32_t in_tile(int row, int byte) {
  return row * 128 + ((byte >> 4 ^ row & 7) << 4) + (byte & 15);
}

// Codes of a row of eight columns, the last ones that came.
struct eight_codes {
  uint2 of = {0, 0};

  __device__ __forceinline__ void push(uint32_t code) {
    of.x = __funnelshift_r(of.x, of.y, 8), of.y = __byte_perm(of.y, code, 0x4321);
  }
};

// ---- the warps that find columns ------------------------------------------------------------------------------------

template <typename T, typename FORM> struct outlier_warps {
  static constexpr int THREADS = OUTLIER_WARPS * 32, CHUNK = BSH_INT8_CHUNK, BARRIER = 1, NO_COLUMN = 0xFFFF;
  static constexpr int MARKERS = CONSUMERS * 32 + THREADS, MARKED = 2; // who marks columns, and a barrier
  static constexpr int AT_ONCE = FORM::ROWS * 128 / 16; // words of eight claims: what the operand of x has room for
  static constexpr int WARP_ROWS = FORM::COLUMNS / RING_WARPS; // of W, of what comes out of the ring
  static constexpr int W_ROWS = (WARP_ROWS + 31) / 32;         // of a lane
  const int8_work<FORM> &work;
  const bsh_int8_gemm_args &args;
  const int warp, lane;
  int begin, end, before, count; // words of 32 marks of this thread; columns before them; all columns
  bool shared = false;           // all blocks are known to have gathered their rows

  __device__ __forceinline__ outlier_warps(const int8_work<FORM> &w, int own_warp, int own_lane)
      : work(w), args(w.args), warp(own_warp), lane(own_lane) {}

  // Before the earlier kernels: columns behind the last, which are multiplied, too.
  __device__ __forceinline__ void clear_w() const {
#pragma unroll 1
    for (int i = warp * 32 + lane; i < FORM::COLUMNS * 8; i += THREADS)
      st_shared_16(work.w + 16 * i, make_uint4(0, 0, 0, 0));
  }

  // ---- the list ----

  // A bit for each column that has a claim, zeros beyond K; claims pass where x will be, and not beyond: W's operand
  // may be cleared after them. By all that do not copy: those that multiply have nothing to do yet. Loops are not
  // unrolled: this code is new to the multiprocessor in each launch, and fetching it would take longer than running it.
  static __device__ __forceinline__ void mark_columns(const int8_work<FORM> &work, int thread) {
    const int words = work.args.K / 8, padded = (work.args.K + 31) / 32 * 4;
    const uint4 *const claims = reinterpret_cast<const uint4 *>(work.args.claims);
#pragma unroll 1
    for (int first = 0; first < padded; first += AT_ONCE) {
      const int end_word = min(AT_ONCE, padded - first);
#pragma unroll 1
      for (int w = thread; w < end_word; w += MARKERS)
        if (first + w < words) cp_async_16(work.x + 16 * w, claims + first + w);
      cp_async_commit();
      cp_async_wait<0>();
#pragma unroll 1
      for (int w = thread; w < end_word; w += MARKERS) {
        const uint32_t marks = first + w < words ? marks_of(ld_shared_16(work.x + 16 * w), (uint32_t)work.args.M) : 0;
        st_shared_1(work.marks + first + w, marks);
      }
    }
  }
  // Of eight claims: bit 16 of claim + M says whether the complement of a claim is a row of x.
  static __device__ __forceinline__ uint32_t marks_of(const uint4 &claims, uint32_t M) {
    const uint32_t pairs[4] = {claims.x, claims.y, claims.z, claims.w};
    uint32_t marks = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t low = (pairs[i] & 0xFFFF) + M, high = (pairs[i] >> 16) + M;
      marks |= low >> 16 << 2 * i | high >> 16 << (2 * i + 1);
    }
    return marks;
  }
  // Whether column k of x reaches the threshold where it is claimed.
  __device__ __forceinline__ bool is_true(int k) const {
    const uint32_t claim = args.K <= 8 * AT_ONCE ? ld_shared_2(work.x + 2 * k) : args.claims[k];
    const T x = static_cast<const T *>(args.x)[(int64_t)(uint16_t)~claim * args.ldx + k];
    return is_outlier(__float_as_uint(fabsf(to_float(x))), __float_as_uint(args.threshold));
  }
  // Takes marks away whose claims are not true.
  __device__ __forceinline__ void look_up_marks() const {
#pragma unroll 1
    for (int w = begin; w < end; w++) {
      uint32_t marks = ld_shared_4(work.marks + 4 * w);
#pragma unroll 1
      for (uint32_t left = marks; left != 0; left &= left - 1) {
        const int bit = __ffs(left) - 1;
        if (!is_true(w * 32 + bit)) marks &= ~(1u << bit);
      }
      st_shared(work.marks + 4 * w, marks);
    }
    named_barrier<THREADS>(BARRIER);
  }
  __device__ __forceinline__ void count_columns() {
    const int words = (args.K + 31) / 32, span = (words + THREADS - 1) / THREADS;
    begin = min(words, (warp * 32 + lane) * span), end = min(words, begin + span);
    int own = 0;
#pragma unroll 1
    for (int w = begin; w < end; w++) own += __popc(ld_shared_4(work.marks + 4 * w));
    const int upto = sum_upto(own, lane);
    if (lane == 31) st_shared(work.counts + 4 * warp, (uint32_t)upto);
    named_barrier<THREADS>(BARRIER);
    before = upto - own, count = 0;
#pragma unroll
    for (int w = 0; w < OUTLIER_WARPS; w++) {
      const int of_warp = (int)ld_shared_4(work.counts + 4 * w);
      if (w < warp) before += of_warp;
      count += of_warp;
    }
    if (own == 0) end = begin; // nothing to list
  }
  // Positions [first, first + CHUNK) of the list, and NO_COLUMN behind the last. All lanes go round together: each
  // would have its own turn else.
  __device__ __forceinline__ void list(int first, uint32_t to) const {
    const int span = ((args.K + 31) / 32 + THREADS - 1) / THREADS;
    int at = before - first;
#pragma unroll 1
    for (int w = begin; w < begin + span; w++) {
      uint32_t left = w < end ? ld_shared_4(work.marks + 4 * w) : 0;
#pragma unroll 1
      while (__any_sync(ALL_LANES, left != 0)) {
        if (left != 0 && at >= 0 && at < CHUNK) st_shared_2(to + 2 * at, w * 32 + __ffs(left) - 1);
        at += left != 0;
        left &= left - 1;
      }
    }
    if (warp == 0 && lane < 4) st_shared_2(to + 2 * (min(CHUNK, count - first) + lane), NO_COLUMN);
    named_barrier<THREADS>(BARRIER);
  }
  // Of a list of at most 64 columns those whose claims are true, to the list of the first. All warps look.
  __device__ __forceinline__ void keep_true() {
    uint32_t k[2], there[2];
#pragma unroll
    for (int half = 0; half < 2; half++) k[half] = ld_shared_2(work.later + 2 * (32 * half + lane));
#pragma unroll
    for (int half = 0; half < 2; half++)
      there[half] = __ballot_sync(ALL_LANES, 32 * half + lane < count && is_true((int)k[half]));
    const int at[2] = {__popc(there[0] & (1u << lane) - 1), __popc(there[0]) + __popc(there[1] & (1u << lane) - 1)};
    count = __popc(there[0]) + __popc(there[1]);
    if (warp == 0) {
#pragma unroll
      for (int half = 0; half < 2; half++)
        if (there[half] >> lane & 1) st_shared_2(work.listed + 2 * at[half], k[half]);
      if (lane < 4) st_shared_2(work.listed + 2 * (count + lane), NO_COLUMN);
    }
    named_barrier<THREADS>(BARRIER);
  }
  // Lists the first columns, and says how many there are.
  __device__ __forceinline__ void find() {
    named_barrier<MARKERS>(MARKED);
    count_columns();
    if (count > CHUNK) {
      look_up_marks();
      count_columns();
      list(0, work.listed);
    } else if (count > 0) {
      list(0, work.later);
      keep_true();
    }
    if (warp == RING_WARPS && lane == 0) st_shared(work.found_count, (uint32_t)count), mbarrier_arrive(work.known);
  }

  // ---- operands ----

  static __device__ __forceinline__ uint2 eight_of(const uint32_t *v) {
    return make_uint2(pack_codes(v[0], v[1], v[2], v[3]), pack_codes(v[4], v[5], v[6], v[7]));
  }
  // Of eight columns from `at` on, a multiple of 8.
  __device__ __forceinline__ void store_x(int r, int at, const uint32_t *v) const {
    st_shared_16(work.x + in_tile(r, 2 * at),
                 make_uint4(v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16));
  }
  static __device__ __forceinline__ uint32_t in_x_codes(int r, int at) { return in_tile(r % 64, r / 64 * 64 + at); }
  __device__ __forceinline__ void store_x_codes(int r, int at, const uint32_t *v) const {
    const uint2 codes = eight_of(v);
    st_shared_8(work.x_codes + in_x_codes(r, at), make_uint2(__vneg4(codes.x), __vneg4(codes.y)));
  }
  __device__ __forceinline__ void store_w(int r, int at, uint2 codes) const {
    uint32_t words[4];
    widen_codes<T>(codes.x, words), widen_codes<T>(codes.y, words + 2);
    st_shared_8(work.w_codes + in_tile(r, at), codes);
    st_shared_16(work.w + in_tile(r, 2 * at), make_uint4(words[0], words[1], words[2], words[3]));
  }

  // Rows of x, its codes and W of a tile. What lies beyond the matrices is not stored: any row will do.
  __device__ __forceinline__ const uint16_t *x_of(int64_t m) const {
    return static_cast<const uint16_t *>(args.x) + min(m, (int64_t)args.M - 1) * args.ldx;
  }
  __device__ __forceinline__ const int8_t *codes_of(int64_t m) const {
    return args.a + min(m, (int64_t)args.M - 1) * args.K;
  }
  __device__ __forceinline__ const int8_t *w_of(int64_t n) const {
    return args.b + min(n, (int64_t)args.N - 1) * args.K;
  }

  // 32 columns of a list of n, from `first` on, of a row, zeros behind them.
  template <typename E>
  __device__ __forceinline__ void load(uint32_t list, int first, int n, const E *row, uint32_t (&v)[32]) const {
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
      const uint2 k = ld_shared_8(list + 2 * (first + i));
      const uint32_t columns[4] = {k.x & 0xFFFF, k.x >> 16, k.y & 0xFFFF, k.y >> 16};
#pragma unroll
      for (int e = 0; e < 4; e++) v[i + e] = ld_if(first + i + e < n, row + columns[e]);
    }
  }
  // The columns of a list of n; `group` counts 32 rows of x, its codes, W, of a tile.
  __device__ __forceinline__ void gather(int tile, int group, uint32_t list, int n) const {
    constexpr int GROUPS = FORM::ROWS / 32;
    const int of = group / GROUPS, r = (of < 2 ? group % GROUPS : group - 2 * GROUPS) * 32 + lane;
#pragma unroll 1
    for (int first = 0; first < n; first += 32) {
      uint32_t v[32];
      if (of == 0) load(list, first, n, x_of(work.row(tile) + r), v);
      else load(list, first, n, of == 1 ? codes_of(work.row(tile) + r) : w_of(work.column(tile) + r), v);
#pragma unroll
      for (int i = 0; i < 32; i += 8)
        if (of == 0) store_x(r, first + i, v + i);
        else if (of == 1) store_x_codes(r, first + i, v + i);
        else store_w(r, first + i, eight_of(v + i));
    }
  }

  // ---- x of the first columns: the last warp ----

  // This block's share of the rows of x, [M, 64], and of its codes, negated.
  __device__ __forceinline__ void share(int n) {
    constexpr int AT_ONCE = 4; // rows, two columns a lane
    const int rows = (args.M + (int)gridDim.x - 1) / (int)gridDim.x,
              end_row = min(args.M, (int)(blockIdx.x + 1) * rows);
    const uint32_t k[2] = {ld_shared_2(work.listed + 2 * lane), ld_shared_2(work.listed + 2 * (32 + lane))};
#pragma unroll 1
    for (int first = blockIdx.x * rows; first < end_row; first += AT_ONCE) {
      uint32_t x[AT_ONCE][2], codes[AT_ONCE][2];
#pragma unroll
      for (int i = 0; i < 2 * AT_ONCE; i++) {
        const int half = i % 2, m = first + i / 2;
        x[i / 2][half] = ld_if(half * 32 + lane < n, x_of(m) + k[half]);
        codes[i / 2][half] = ld_if(half * 32 + lane < n, codes_of(m) + k[half]);
      }
#pragma unroll
      for (int i = 0; i < 2 * AT_ONCE; i++) {
        const int half = i % 2, m = first + i / 2;
        if (m >= end_row) break;
        const int64_t at = (int64_t)m * BSH_INT8_CHUNK + 32 * half + lane;
        static_cast<uint16_t *>(args.found_x)[at] = x[i / 2][half];
        args.found_codes[at] = 0 - codes[i / 2][half];
      }
    }
    __syncwarp();
    count_acq_rel(args.shares, lane);
  }
  // Whether all blocks have gathered theirs. A block may not have begun, if other kernels have its multiprocessor, and
  // these may wait for this one: after some time it does without.
  __device__ __forceinline__ bool all_shared() const {
    constexpr int LOOKS = 64; // some 40 us
#pragma unroll 1
    for (int look = 0; look < LOOKS; look++)
      if (__all_sync(ALL_LANES, load_acquire(args.shares) == gridDim.x)) return true;
    return false;
  }
  // Rows of a tile of what all blocks have gathered.
  __device__ __forceinline__ void copy_shared(int tile) const {
    const char *const x = static_cast<const char *>(args.found_x);
    const char *const codes = reinterpret_cast<const char *>(args.found_codes);
#pragma unroll 4
    for (int first = 0; first < FORM::ROWS; first += 4) {
      const int r = first + lane / 8, at = lane % 8 * 16;
      cp_async_16(work.x + in_tile(r, at), x + (int64_t)min(work.row(tile) + r, args.M - 1) * 128 + at);
    }
#pragma unroll 4
    for (int first = 0; first < FORM::ROWS; first += 8) {
      const int r = first + lane / 4, at = lane % 4 * 16;
      cp_async_16(work.x_codes + in_x_codes(r, at), codes + (int64_t)min(work.row(tile) + r, args.M - 1) * 64 + at);
    }
    cp_async_commit();
    cp_async_wait<0>();
  }
  __device__ __forceinline__ void take_x(int tile, int n) {
    shared = shared || all_shared();
    if (shared) copy_shared(tile);
    else
      for (int group = 0; group < 2 * FORM::ROWS / 32; group++) gather(tile, group, work.listed, n);
  }

  // ---- W of the first columns, out of the ring: the other warps ----

  // The first n columns of a tile, of this warp's rows. Behind them are zeros; codes there are multiplied by those of
  // x, which are zeros. Frees every stage.
  __device__ __forceinline__ void take_w(int8_ring<FORM> &ring, int n) const {
    constexpr int WIDE = 4; // columns at once
    const int row = warp * WARP_ROWS + lane;
    const auto has_row = [&](int i) { return 32 * (i + 1) <= WARP_ROWS || 32 * i + lane < WARP_ROWS; };
    eight_codes codes[W_ROWS];
    int at = 0;
    const auto push = [&](const uint32_t *c) {
#pragma unroll
      for (int i = 0; i < W_ROWS; i++) codes[i].push(c[i]);
      if (++at % 8 != 0) return;
#pragma unroll
      for (int i = 0; i < W_ROWS; i++)
        if (has_row(i)) store_w(row + 32 * i, at - 8, codes[i].of);
    };
    int k[WIDE];
    const auto read_list = [&](int from) {
#pragma unroll
      for (int j = 0; j < WIDE; j++) k[j] = n > 0 ? (int)ld_shared_2(work.listed + 2 * (from + j)) : NO_COLUMN;
    };
    read_list(0);
#pragma unroll 1
    for (int end_k = BSH_GEMM_INT8_DEPTH, step = 0; step < work.steps; step++, end_k += BSH_GEMM_INT8_DEPTH) {
      ring.get(work);
      const uint32_t b = work.memory + ring.stage * FORM::STAGE_BYTES + FORM::A_BYTES;
#pragma unroll 1
      while (k[0] < end_k) {
        uint32_t c[WIDE][W_ROWS];
        bool in_stage[WIDE];
#pragma unroll
        for (int j = 0; j < WIDE; j++) {
          in_stage[j] = k[j] < end_k;
          const uint32_t from = b + in_tile(row, k[j] % BSH_GEMM_INT8_DEPTH);
#pragma unroll
          for (int i = 0; i < W_ROWS; i++) c[j][i] = ld_shared_if(in_stage[j] && has_row(i), from + 32 * 128 * i);
        }
        const int taken = in_stage[3] ? 4 : in_stage[2] ? 3 : in_stage[1] ? 2 : 1;
        read_list(at + taken);
#pragma unroll
        for (int j = 0; j < WIDE; j++)
          if (j < taken) push(c[j]);
      }
      __syncwarp();
      ring.release(ring.stage);
      ring.next(work);
    }
    const uint32_t none[W_ROWS] = {};
    while (at % 8 != 0) push(none);
  }

  // ---- all ----

  // Operands of n columns from `first` of the list on.
  __device__ __forceinline__ void make_operands(int tile, int first, int n, int8_ring<FORM> &ring) {
    if (first == 0 && warp < RING_WARPS) take_w(ring, n);
    else if (first == 0) take_x(tile, n);
    else
      for (int group = warp; group < (2 * FORM::ROWS + FORM::COLUMNS) / 32; group += OUTLIER_WARPS)
        gather(tile, group, work.later, n);
  }
  __device__ __forceinline__ void run() {
    int8_ring<FORM> ring = ring_of(work, lane);
    uint32_t uses = 0;
    find();
    if (warp == RING_WARPS && count > 0) share(min(count, CHUNK));
    for (int tile = work.cluster; tile < args.tiles; tile += work.clusters()) {
      if (count == 0) {
        if (warp < RING_WARPS) take_w(ring, 0);
        continue;
      }
#pragma unroll 1
      for (int first = 0; first < count; first += CHUNK, uses++) {
        if (first > 0) named_barrier<THREADS>(BARRIER), list(first, work.later);
        mbarrier_wait(work.free, uses & 1 ^ 1);
        make_operands(tile, first, min(CHUNK, count - first), ring);
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(work.ready);
      }
    }
  }
};

// ---- the warps that multiply ----------------------------------------------------------------------------------------

// How many columns there are.
template <typename FORM> __device__ __forceinline__ int count_found(const int8_work<FORM> &work) {
  if (!work.finds()) return 0;
  mbarrier_wait(work.known, 0);
  return (int)ld_shared_4(work.found_count);
}

// Takes products of the codes of found columns out of a tile's sums; part: x W^T of them. uses: of the operands before.
template <typename T, typename FORM>
__device__ __forceinline__ void multiply_found(int (&sum)[FORM::SUMS], float (&part)[FORM::SUMS],
                                               const int8_work<FORM> &work, int group, int count, int lane,
                                               uint32_t &uses) {
  constexpr bool SHARED_ROWS = FORM::ROWS == 64; // by both groups, which have half of the columns each
  const uint64_t x = wgmma_descriptor_64(work.x + (SHARED_ROWS ? 0 : group * 64 * 128));
  const uint64_t w = wgmma_descriptor_64(work.w + (SHARED_ROWS ? group * FORM::OWN * 128 : 0));
  const uint64_t x_codes = wgmma_descriptor_64(work.x_codes) + (SHARED_ROWS ? 0 : 4 * group);
  const uint64_t w_codes = wgmma_descriptor_64(work.w_codes + (SHARED_ROWS ? group * FORM::OWN * 128 : 0));
#pragma unroll
  for (int i = 0; i < FORM::SUMS; i++) part[i] = 0.f;
#pragma unroll 1
  for (int first = 0; first < count; first += BSH_INT8_CHUNK, uses++) {
    const int n = min(BSH_INT8_CHUNK, count - first);
    mbarrier_wait(work.ready, uses & 1);
    wgmma_fence();
#pragma unroll 1
    for (int k = 0; k < (n + 31) / 32; k++) wgmma_codes<FORM::OWN>::mma_async(sum, x_codes + 2 * k, w_codes + 2 * k);
#pragma unroll 1
    for (int k = 0; k < (n + 15) / 16; k++) wgmma_ss<T, FORM::OWN>::mma_async(part, x + 2 * k, w + 2 * k);
    wgmma_commit();
    wgmma_wait<0>();
    renew(sum), renew(part);
    if (lane == 0) mbarrier_arrive(work.free);
  }
}

} // namespace
} // namespace bsh
