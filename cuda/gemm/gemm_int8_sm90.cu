// gemm_int8_sm90.cu - y[M, N] = the product of codes a [M, K] and b [N, K], scaled, on Hopper (sm_90a): wgmma of int8,
// tensor copies, clusters.
//
//   a [M, K]      b [N, K]          x [M, capacity]  W [N, capacity]   gathered outlier columns, 64 of them a stage
//     | tensor copies, 128 bytes of depth a stage       |
//     |  own rows      part of the rows, to the cluster |
//     v                v                                v
//   ring of STAGES in shared memory ----------------> the same ring
//     | wgmma m64nNk32, int32 sums                      | wgmma m64nNk16 of 16 bits, onto the same sums in fp32
//     v                                                 v
//   registers --> scales, bias, one rounding --> lanes of a quad exchange --> y, 16 bytes a lane
//
// A block of threads has a warp that copies and two warpgroups that multiply, 64 rows of a each, or of 64 rows half of
// the columns each. Blocks take tile after tile, rows of a first; blocks of a cluster have neighbouring rows. What lies
// beyond the matrices is copied as zeros and not stored. Where there are few tiles, the blocks of a cluster share the
// depth of one instead: the others leave their sums in memory for the first, which adds them, exactly, and stores. The
// bits of y are those of scale_product_int8 where there are no outliers.
#include "cuda/gemm/outliers_int8_sm90.cuh"

namespace bsh {
namespace {

template <typename FORM> struct int8_copies {
  const int8_maps &maps;
  int m, n;

  static __device__ __forceinline__ int steps(const int8_work<FORM> &work) { return work.steps + work.chunks; }
  __device__ __forceinline__ void enter(const int8_work<FORM> &work, int tile) {
    m = work.row(tile), n = work.column(tile) + (FORM::CLUSTER > 1 ? work.rank * FORM::PART : 0);
  }
  struct place {
    bool codes;
    int at;
  };
  static __device__ __forceinline__ place from(const int8_work<FORM> &work, int step) {
    const bool codes = step < work.steps;
    return {codes, codes ? (work.first_step + step) * BSH_GEMM_INT8_DEPTH : (step - work.steps) * BSH_INT8_CHUNK};
  }
  __device__ __forceinline__ void copy(const int8_work<FORM> &work, place from, uint32_t to, uint32_t full) const {
    const uint32_t to_b = to + FORM::A_BYTES;
    tensor_copy(to, from.codes ? maps.a : maps.x, from.at, m, full);
    if (FORM::CLUSTER == 1) tensor_copy(to_b, from.codes ? maps.b : maps.w, from.at, n, full);
    else if (work.rank < FORM::READERS)
      tensor_copy_to(to_b + work.rank * FORM::PART * BSH_GEMM_INT8_DEPTH, from.codes ? maps.b : maps.w, from.at, n,
                     full, (1 << FORM::CLUSTER) - 1);
  }
};

// One thread, while earlier kernels make the codes of x: what it will read first of b.
template <typename FORM>
__device__ __forceinline__ void prefetch_b(const int8_work<FORM> &work, const bsh_tensor_map *b) {
  if (work.cluster >= work.args.tiles || (FORM::CLUSTER > 1 && work.rank >= FORM::READERS)) return;
  const int n = work.column(work.cluster) + (FORM::CLUSTER > 1 ? work.rank * FORM::PART : 0);
#pragma unroll 1
  for (int step = 0; step < min(work.steps, 2 * FORM::STAGES); step++)
    tensor_prefetch_l2(b, (work.first_step + step) * BSH_GEMM_INT8_DEPTH, n);
}

// Scales and bias of the first tile, to L2, by lanes of a warp.
template <typename T, typename FORM>
__device__ __forceinline__ void prefetch_scales(const int8_work<FORM> &work, int lane) {
  constexpr int LINE = 128, SCALES = FORM::COLUMNS * (int)sizeof(float) / LINE;
  const bool of_bias = lane >= SCALES;
  const int n = work.column(work.cluster) + (of_bias ? (lane - SCALES) * LINE / (int)sizeof(T) : lane * LINE / 4);
  if (n >= min(work.args.N, work.column(work.cluster) + FORM::COLUMNS)) return;
  if (!of_bias) prefetch_l2(work.args.col_absmax + n);
  else if (work.args.bias != nullptr) prefetch_l2(static_cast<const T *>(work.args.bias) + n);
}

// Where a thread's sums are: element i of a tile's sums is row `row` + 8 (i / 2 % 2), column `column` + 8 (i / 4) + i
// % 2.
struct int8_place {
  int m, n, c; // of element 0 in y; lane of its quad
  // Of elements i to i + 15, those of column e of eight.
  __device__ __forceinline__ int column(int i, int e) const { return n + (i + e / 2 * 4) * 2 + e % 2; }
};

// Adds the sums of the blocks that share a tile's depth in the first of them; whether this is the first.
template <typename FORM>
__device__ __forceinline__ bool join(int (&sum)[FORM::SUMS], const int8_work<FORM> &work, int tile, int lane) {
  constexpr int GROUP = CONSUMERS * 32;
  const int others = work.size - 1;
  int4 *const all = reinterpret_cast<int4 *>(work.args.partial) + (int64_t)tile * others * (FORM::SUMS / 4 * GROUP);
  if (work.rank > 0) {
    int4 *const to = all + (work.rank - 1) * (FORM::SUMS / 4 * GROUP) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < FORM::SUMS; i += 4) to[i / 4 * GROUP] = make_int4(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]);
    __threadfence();
    __syncwarp();
    if (lane == 0) mbarrier_arrive_there(map_to_rank(work.joined, 0));
    return false;
  }
  mbarrier_wait(work.joined, 0);
  __threadfence();
  for (int other = 0; other < others; other++) {
    const int4 *const from = all + other * (FORM::SUMS / 4 * GROUP) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < FORM::SUMS; i += 4) {
      const int4 v = __ldcg(from + i / 4 * GROUP);
      sum[i] += v.x, sum[i + 1] += v.y, sum[i + 2] += v.z, sum[i + 3] += v.w;
    }
  }
  return true;
}

// sum += x W^T over the outlier columns from position `first` of the list on.
template <typename T, typename FORM>
__device__ __forceinline__ void multiply_listed(float *sum, const bsh_int8_gemm_args &args, const int8_place &p,
                                                int first, int count) {
  const T *const x = static_cast<const T *>(args.x);
  for (int at = first; at < count; at++) {
    const int k = args.outliers.list[at];
    const float x0 = p.m < args.M ? to_float(x[p.m * args.ldx + k]) : 0.f;
    const float x1 = p.m + 8 < args.M ? to_float(x[(p.m + 8) * args.ldx + k]) : 0.f;
    const int8_t *w = args.b + (int64_t)p.n * args.K + k;
#pragma unroll
    for (int i = 0; i < FORM::SUMS; i += 4, w = keep(w + 6 * (int64_t)args.K))
#pragma unroll
      for (int e = 0; e < 2; e++, w += args.K) {
        const float code = p.n + i * 2 + e < args.N ? (float)*w : 0.f;
        sum[i + e] = fmaf(x0, code, sum[i + e]), sum[i + e + 2] = fmaf(x1, code, sum[i + e + 2]);
      }
  }
}

// Words of the four lanes of a quad: lane c gets word c of each, in the order of the lanes.
__device__ __forceinline__ void transpose_quad(uint32_t *w, int c) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i & step) continue;
      const bool high = c & step;
      const uint32_t sent = high ? w[i] : w[i | step], got = __shfl_xor_sync(~0u, sent, step);
      if (high) w[i] = got;
      else w[i | step] = got;
    }
}

// Scales and bias of a tile's columns, which a thread loads one of when the product begins, in shared memory when it
// has ended. Twice, for tiles in turn: who writes for the next tile has met all that have read those before this one.
template <typename T, typename FORM> struct int8_columns {
  static constexpr int BARRIER = 3;
  const int8_work<FORM> &work;
  float2 own;         // scale and bias
  uint32_t place = 0; // of which of the two

  __device__ __forceinline__ explicit int8_columns(const int8_work<FORM> &w) : work(w) {}
  __device__ __forceinline__ void load(int tile) {
    const int n = work.column(tile) + threadIdx.x;
    own = make_float2(0.f, 0.f);
    if (threadIdx.x < FORM::COLUMNS && n < work.args.N)
      own = make_float2(__ldg(work.args.col_absmax + n), bias_of<T>(work.args.bias, n));
  }
  // By all that multiply. Where column 0 is.
  __device__ __forceinline__ uint32_t share() {
    const uint32_t all = work.columns + place;
    place ^= FORM::COLUMNS * 8;
    if (threadIdx.x < FORM::COLUMNS)
      st_shared_8(all + 8 * threadIdx.x, make_uint2(__float_as_uint(own.x), __float_as_uint(own.y)));
    named_barrier<CONSUMERS * 32>(BARRIER);
    return all;
  }
};

// value(i, row of the thread (0, 1), scale and bias of the column): element i as a float. columns: where the thread's
// first column is, of int8_columns.
template <typename T, typename FORM, typename VALUE>
__device__ __forceinline__ void store(const bsh_int8_gemm_args &args, const int8_place &p, uint32_t columns,
                                      VALUE value) {
  T *const y = static_cast<T *>(args.y);
#pragma unroll
  for (int i = 0; i < FORM::SUMS; i += 16) { // 32 columns of y
    float scale[8], bias[8];
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      const uint4 two = ld_shared_16(columns + 8 * p.column(i, e) - 8 * p.n);
      scale[e] = __uint_as_float(two.x), bias[e] = __uint_as_float(two.y);
      scale[e + 1] = __uint_as_float(two.z), bias[e + 1] = __uint_as_float(two.w);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int m = p.m + 8 * r;
      float v[8];
#pragma unroll
      for (int e = 0; e < 8; e++) v[e] = value(i + e / 2 * 4 + r * 2 + e % 2, r, scale[e], bias[e]);
      if constexpr (sizeof(T) == 2) {
        if (args.store_fours) {
          uint32_t w[4];
#pragma unroll
          for (int j = 0; j < 4; j++) w[j] = pack_pair<T>(v[2 * j], v[2 * j + 1]);
          transpose_quad(w, p.c);
          const int n = p.n - 2 * p.c + i * 2 + p.c * 8;
          if (m < args.M && n < args.N)
            *reinterpret_cast<uint4 *>(y + (int64_t)m * args.N + n) = make_uint4(w[0], w[1], w[2], w[3]);
          continue;
        }
      }
#pragma unroll
      for (int e = 0; e < 8; e++) {
        const int n = p.column(i, e);
        if (m < args.M && n < args.N) from_float(v[e], y + (int64_t)m * args.N + n);
      }
    }
  }
}

template <typename T, typename FORM>
__device__ __forceinline__ void multiply_tiles(const int8_work<FORM> &work, int count, int warp, int lane) {
  const bsh_int8_gemm_args &args = work.args;
  const int group = warp / 4;
  const uint64_t a = wgmma_descriptor_64(work.memory + (FORM::ROWS == 64 ? 0 : group * 64 * BSH_GEMM_INT8_DEPTH));
  const uint64_t b = wgmma_descriptor_64(work.memory + FORM::A_BYTES +
                                         (FORM::ROWS == 64 ? group * FORM::OWN * BSH_GEMM_INT8_DEPTH : 0));
  int8_ring<FORM> ring = ring_of(work, lane);
  int8_place p;
  p.c = lane % 4;
  int8_columns<T, FORM> of_tile(work);
  uint32_t uses = 0; // of operands of found columns
  for (int tile = work.cluster; tile < args.tiles; tile += work.clusters()) {
    p.m = work.row(tile) + (FORM::ROWS == 64 ? 0 : group * 64) + warp % 4 * 16 + lane / 4;
    p.n = work.column(tile) + (FORM::ROWS == 64 ? group * FORM::OWN : 0) + 2 * p.c;
    const float row[2] = {p.m < args.M ? args.row_absmax[p.m] : 0.f, p.m + 8 < args.M ? args.row_absmax[p.m + 8] : 0.f};
    of_tile.load(tile);
    int sum[FORM::SUMS];
#pragma unroll
    for (int i = 0; i < FORM::SUMS; i++) sum[i] = 0;
    multiply_stages<wgmma_codes<FORM::OWN>, FORM>(work, ring, work.steps, sum, a, b);
    if (work.shares_depth() && !join<FORM>(sum, work, tile, lane)) continue;
    const uint32_t columns = of_tile.share() + 8 * (p.n - work.column(tile));
    const int found = count_found(work);
    if (count == 0 && found == 0) {
      store<T, FORM>(args, p, columns,
                     [&](int i, int r, float col, float b) { return scale_sum(sum[i], row[r], col, b); });
      continue;
    }
    float part[FORM::SUMS];
    if (found > 0) {
      if constexpr (FORM::FINDS) multiply_found<T, FORM>(sum, part, work, group, found, lane, uses);
#pragma unroll
      for (int i = 0; i < FORM::SUMS; i++) part[i] += sum_beside_outliers(sum[i], row[i / 2 % 2]);
      store<T, FORM>(args, p, columns, [&](int i, int, float col, float b) { return scale_codes(part[i], col, b); });
      continue;
    }
#pragma unroll
    for (int i = 0; i < FORM::SUMS; i++) part[i] = sum_beside_outliers(sum[i], row[i / 2 % 2]);
    multiply_stages<wgmma_ss<T, FORM::OWN>, FORM>(work, ring, work.chunks, part, a, b);
    multiply_listed<T, FORM>(part, args, p, min(count, args.outliers.capacity), count);
    store<T, FORM>(args, p, columns, [&](int i, int, float col, float b) { return scale_codes(part[i], col, b); });
  }
}

template <typename T, typename FORM>
__device__ __forceinline__ void gemm(const int8_maps &maps, const bsh_int8_gemm_args &args) {
  extern __shared__ __align__(1024) char dynamic[];
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  int8_work<FORM> work(args, (shared_address(dynamic) + 1023) / 1024 * 1024);
  if (threadIdx.x == 0) work.init();
  if (warp == COPY_WARP && lane == 0) prefetch_map(maps.a), prefetch_map(maps.b);
  __syncthreads();
  if (work.size > 1) cluster_sync_aligned_relaxed();
  let_later_kernels_start();
  if (warp == COPY_WARP && lane == 0) prefetch_b<FORM>(work, maps.b);
  if (warp == COPY_WARP + 1) prefetch_scales<T, FORM>(work, lane);
  if constexpr (FORM::FINDS)
    if (warp > COPY_WARP && work.finds()) outlier_warps<T, FORM>(work, warp - COPY_WARP - 1, lane).clear_w();
  wait_for_earlier_kernels();
  const int count = work.count_outliers();
  if constexpr (FORM::FINDS)
    if (work.finds() && warp != COPY_WARP)
      outlier_warps<T, FORM>::mark_columns(work, threadIdx.x - (warp > COPY_WARP ? 32 : 0));
  if (warp >= COPY_WARP) {
    if constexpr (!FORM::SAME) give_registers<FORM::PRODUCER_REGISTERS>();
    if (warp == COPY_WARP && lane == 0) fill_ring<FORM>(work, int8_copies<FORM>{maps});
    if constexpr (FORM::FINDS)
      if (warp > COPY_WARP && work.finds()) outlier_warps<T, FORM>(work, warp - COPY_WARP - 1, lane).run();
  } else {
    if constexpr (!FORM::SAME) take_registers<FORM::CONSUMER_REGISTERS>();
    if constexpr (FORM::FINDS)
      if (work.finds()) named_barrier_arrive<outlier_warps<T, FORM>::MARKERS>(outlier_warps<T, FORM>::MARKED);
    multiply_tiles<T, FORM>(work, count, warp, lane);
  }
  __syncwarp();
  if (work.size > 1) cluster_sync_aligned_relaxed(); // nobody ends while a block of its cluster may still write here
}

} // namespace
} // namespace bsh

#define BODY(T, ...) bsh::gemm<T, bsh::int8_form<__VA_ARGS__>>({&a, &b, &x, &w}, args)
// Registers are stated, not threads: the same number, but what the compiler then makes of 128 rows takes less time
// (benchmarks/results/int8_h100_202611.md).
#define GEMM(NAME, T, ROWS, COLUMNS, STAGES, CLUSTER)                                                                  \
  extern "C" __global__ void __maxnreg__(bsh_gemm_int8_sm90_registers(COLUMNS))                                        \
      NAME(const __grid_constant__ bsh_tensor_map a, const __grid_constant__ bsh_tensor_map b,                         \
           const __grid_constant__ bsh_tensor_map x, const __grid_constant__ bsh_tensor_map w,                         \
           const __grid_constant__ bsh_int8_gemm_args args) {                                                          \
    BODY(T, ROWS, COLUMNS, STAGES, CLUSTER);                                                                           \
  }
#define GEMM_F16(FORM, ...) GEMM(gemm_int8_sm90_f16_##FORM, __half, __VA_ARGS__)
#define GEMM_BF16(FORM, ...) GEMM(gemm_int8_sm90_bf16_##FORM, __nv_bfloat16, __VA_ARGS__)
BSH_GEMM_INT8_SM90_FORMS(GEMM_F16)
BSH_GEMM_INT8_SM90_FORMS(GEMM_BF16)
