// gemv_int8.cu - y[M, N] = x[M, K] W^T + bias for few rows of x as they are, codes of W widened on the way to the
// tensor cores.
//
//   W, codes [N, K]                               x [M, K]
//     | cp.async: 16 rows x 128 of K                | once
//     v                                             v
//   ring of slots, one for each warp              registers: the warp's UNITS of K of 8 or 16 tokens
//     | 16 bytes of two rows a lane                 |
//     v                                             v
//   widened, exactly ------------------> mma m16n8k16, four a unit
//                                         | fp32
//                                         v
//   warp's sums -> shared memory -> added over the k_warps of a block -> * absmax / 127 + bias --> y
//                                                                     '-> args.partial -> added over k_splits -> y
//
// blockIdx.y counts groups of 16 tokens, each of which reads W for itself, the second from L2.
// The order of the work, and what of K and of W a block and a warp take, are those of gemv_4bit.cu: a unit is 64 of K,
// a row tile 16 rows of W. A lane's 16 bytes of a row are 16 consecutive codes, of which each mma takes 4: the order of
// K within a unit is the same in x. Sums are added in a fixed order: equal inputs give equal bits.
#include "cuda/gemv/gemv_4bit.cuh"
#include "cuda/operands/int8.cuh"

namespace bsh {
namespace {

constexpr int PIECE_UNITS = 2; // of a slot: 16 rows x 128 codes

// As gemv_4bit's weight_loader: the 8 chunks of 16 bytes of a row lie at chunk ^ 4 (row % 2), so that the 4 chunks of a
// unit of 2 rows are in different banks.
template <int PIECES, int SLOTS> struct codes_loader {
  const uint8_t *from[PIECES]; // this lane's first 16 bytes of a piece in row tile 0
  uint32_t to;
  int64_t tile_bytes, four_rows;

  __device__ __forceinline__ codes_loader(const bsh_fused_args &args, const place &p, const char *ring) {
    const int row = p.lane >> 3, chunk = p.lane & 7;
    tile_bytes = (int64_t)args.K * BSH_ROW_TILE, four_rows = (int64_t)args.K * 4;
    to = keep(shared_address(ring) + p.warp * SLOTS * PIECE_BYTES + row * 128 + ((chunk ^ (row & 1) << 2) << 4));
#pragma unroll
    for (int i = 0; i < PIECES; i++)
      from[i] = keep(args.packed + (int64_t)row * args.K + min(p.first_unit * 64 + i * 128 + chunk * 16, args.K - 16));
  }
  __device__ __forceinline__ void start(int tile, int piece, uint32_t slot) const {
    const uint8_t *source = from[piece] + tile * tile_bytes;
#pragma unroll
    for (int i = 0; i < 4; i++, source += four_rows) cp_async_16(to + slot + i * 512, source);
  }
  __device__ __forceinline__ void prefetch(int tile, int piece) const {
    const uint8_t *source = from[piece] + tile * tile_bytes;
    if ((threadIdx.x & 7) == 0)
#pragma unroll
      for (int i = 0; i < 4; i++, source += four_rows) prefetch_l2(source);
  }
};

// Stores a sum of products with codes as y.
template <typename T> struct store_codes {
  const bsh_fused_args &args;
  __device__ __forceinline__ void operator()(element at, float sum) const {
    if (at.token >= args.M) return;
    from_float(scale_codes(sum, args.absmax[at.row], bias_of<T>(args.bias, at.row)),
               static_cast<T *>(args.y) + at.token * args.ldy + at.row);
  }
};

// Adds the k_warps sums of a step, in the order of K, and hands them on.
template <typename T, int TOKEN_TILES>
__device__ __forceinline__ void meet_codes(const bsh_fused_args &args, const place &p, const float *sums, int step) {
  constexpr int TILE = TOKEN_TILES * 128;
  for (int o = threadIdx.x; o < p.row_groups * TILE; o += blockDim.x) {
    const int e = o % TILE, group = o / TILE, tile = p.tile_begin + step * p.row_groups + group;
    if (tile >= p.tile_end) continue;
    meet_element<TOKEN_TILES>(args, p, tile, e, sums + group * args.cut.k_warps * TILE + e, store_codes<T>{args});
  }
}

// sum += one unit of 16 rows * x
template <typename T, int TOKEN_TILES>
__device__ __forceinline__ void multiply_codes(float (*sum)[4], uint4 upper, uint4 lower, const uint32_t (*x)[8]) {
  const uint32_t up[4] = {upper.x, upper.y, upper.z, upper.w}, low[4] = {lower.x, lower.y, lower.z, lower.w};
#pragma unroll
  for (int k = 0; k < 4; k++) {
    uint32_t u[2], l[2];
    widen_codes<T>(up[k], u);
    widen_codes<T>(low[k], l);
    const uint32_t a[4] = {u[0], l[0], u[1], l[1]};
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++) mma_m16n8k16<T>(sum[n], a, x[n][2 * k], x[n][2 * k + 1]);
  }
}

template <typename T, int TOKEN_TILES, int UNITS>
__device__ __forceinline__ void gemv_int8(const bsh_fused_args &args) {
  constexpr int PIECES = UNITS / PIECE_UNITS, TILE = TOKEN_TILES * 128;
  constexpr int SLOTS = bsh::SLOTS<TOKEN_TILES>;
  extern __shared__ __align__(1024) char memory[];
  const place p = find_place<UNITS>(args);
  const codes_loader<PIECES, SLOTS> stream(args, p, memory);
  float *const sums = reinterpret_cast<float *>(memory + WARPS * SLOTS * PIECE_BYTES);
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (i / PIECES < p.steps) stream.prefetch(p.tile(i / PIECES), i % PIECES);
  let_later_kernels_start();
  wait_for_earlier_kernels();
#pragma unroll
  for (int i = 0; i < SLOTS - 1; i++) {
    if (i / PIECES < p.steps) stream.start(p.tile(i / PIECES), i % PIECES, i * PIECE_BYTES);
    cp_async_commit();
  }
  uint32_t x[UNITS][TOKEN_TILES][8];
  load_x<TOKEN_TILES, UNITS>(x, args, p);

  // This lane's 16 bytes of unit 0 of row g, in slot 0; those of unit 1 lie at the address ^ 64.
  const uint32_t read =
      keep(shared_address(memory) + p.warp * SLOTS * PIECE_BYTES + p.g * 128 + ((p.c ^ (p.g & 1) << 2) << 4));
  const uint32_t own_sums = keep(shared_address(sums + p.warp * TILE + p.lane * 4));
  uint32_t slot = 0, fill = (SLOTS - 1) * PIECE_BYTES;
  int half = 0; // of the double-buffered sums
  for (int step = 0; step < p.steps; step++, half ^= 1) {
    float sum[TOKEN_TILES][4] = {};
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
      cp_async_wait<SLOTS - 2>();
      __syncwarp();
      const int ahead = piece + SLOTS - 1; // SLOTS - 1 pieces ahead
      if (step + ahead / PIECES < p.steps) stream.start(p.tile(step + ahead / PIECES), ahead % PIECES, fill);
      cp_async_commit();
#pragma unroll
      for (int j = 0; j < PIECE_UNITS; j++) {
        const uint32_t from = (read + slot) ^ (j * 64);
        multiply_codes<T, TOKEN_TILES>(sum, ld_shared_uint4(from), ld_shared_uint4(from + PIECE_BYTES / 2),
                                       x[piece * PIECE_UNITS + j]);
      }
      fill = slot;
      slot = slot == (SLOTS - 1) * PIECE_BYTES ? 0 : slot + PIECE_BYTES;
    }
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++) st_shared(own_sums + (half * WARPS * TILE + n * 128) * 4, sum[n]);
    __syncthreads(); // the sums are written, and the other half has been read
    meet_codes<T, TOKEN_TILES>(args, p, sums + half * WARPS * TILE, step);
  }
#if __CUDA_ARCH__ >= 900
  if (args.cut.k_splits > 1) {
    cluster_sync();
    join_splits<TOKEN_TILES>(args, p.tile_begin, p.split * blockDim.x + threadIdx.x, (p.tile_end - p.tile_begin) * TILE,
                             args.cut.k_splits * blockDim.x, store_codes<T>{args});
  }
#endif
}

} // namespace
} // namespace bsh

#define GEMV(T, NAME, TOKEN_TILES, UNITS)                                                                              \
  extern "C" __global__ void __launch_bounds__(bsh::WARPS * 32, 1) NAME(const __grid_constant__ bsh_fused_args args) { \
    bsh::gemv_int8<T, TOKEN_TILES, UNITS>(args);                                                                       \
  }
#define GEMV_BF16(FORM, TOKEN_TILES, UNITS) GEMV(__nv_bfloat16, gemv_int8_bf16_##FORM, TOKEN_TILES, UNITS)
#define GEMV_F16(FORM, TOKEN_TILES, UNITS) GEMV(__half, gemv_int8_f16_##FORM, TOKEN_TILES, UNITS)
BSH_GEMV_INT8_FORMS(GEMV_BF16)
BSH_GEMV_INT8_FORMS(GEMV_F16)

// The second kernel of split K where blocks cannot meet in a cluster.
#define JOIN(T, NAME, TOKEN_TILES)                                                                                     \
  extern "C" __global__ void NAME(const __grid_constant__ bsh_fused_args args) {                                       \
    bsh::join<TOKEN_TILES>(args, bsh::store_codes<T>{args});                                                           \
  }
JOIN(__nv_bfloat16, join_codes_bf16_m8, 1)
JOIN(__nv_bfloat16, join_codes_bf16_m16, 2)
JOIN(__half, join_codes_f16_m8, 1)
JOIN(__half, join_codes_f16_m16, 2)
