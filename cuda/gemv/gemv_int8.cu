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
#include "cuda/gemv/gemv.cuh"
#include "cuda/operands/int8.cuh"

namespace bsh {
namespace {

// Stores a sum of products with codes as y.
template <typename T> struct store_codes {
  const bsh_fused_args &args;
  __device__ __forceinline__ void operator()(element at, float sum) const {
    if (at.token >= args.M) return;
    from_float(scale_codes(sum, args.absmax[at.row], bias_of<T>(args.bias, at.row)),
               static_cast<T *>(args.y) + at.token * args.ldy + at.row);
  }
};

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

template <typename T, int TOKEN_TILES, int UNITS> struct codes_int8 {
  static constexpr int PIECE_UNITS = 2, TILES_PER_SYNC = 1;
  static constexpr bool EVERY_STEP = true, HALVES_IN_TURN = false;
  using loader = piece_loader<rows_of_int8, UNITS / PIECE_UNITS, SLOTS<TOKEN_TILES>>;
  uint32_t read; // this lane's 16 bytes of unit 0 of row g, in slot 0; those of unit 1 lie at the address ^ 64

  __device__ __forceinline__ codes_int8(const place &p, const char *ring) {
    read = keep(shared_address(ring) + p.warp * SLOTS<TOKEN_TILES> * PIECE_BYTES + p.g * 128 +
                ((p.c ^ (p.g & 1) << 2) << 4));
  }
  __device__ __forceinline__ void enter(const bsh_fused_args &, const place &, int) const {}
  __device__ __forceinline__ void multiply(float (*sum)[4], int piece, uint32_t slot,
                                           const uint32_t (*x)[TOKEN_TILES][8]) const {
#pragma unroll
    for (int j = 0; j < PIECE_UNITS; j++) {
      const uint32_t from = (read + slot) ^ (j * 64);
      multiply_codes<T, TOKEN_TILES>(sum, ld_shared_uint4(from), ld_shared_uint4(from + PIECE_BYTES / 2),
                                     x[piece * PIECE_UNITS + j]);
    }
  }
};

template <typename T, int TOKEN_TILES, int UNITS>
__device__ __forceinline__ void gemv_int8(const bsh_fused_args &args) {
  using codes = codes_int8<T, TOKEN_TILES, UNITS>;
  extern __shared__ __align__(1024) char memory[];
  const place p = find_place<UNITS>(args);
  const typename codes::loader stream(args, p, memory);
  float *const sums = reinterpret_cast<float *>(memory + WARPS * SLOTS<TOKEN_TILES> * PIECE_BYTES);
  stream.prefetch(p);
  let_later_kernels_start();
  wait_for_earlier_kernels();
  stream.begin(p);
  uint32_t x[UNITS][TOKEN_TILES][8];
  load_x<TOKEN_TILES, UNITS>(x, args, p);
  codes w(p, memory);
  multiply_tiles<codes, TOKEN_TILES>(args, p, sums, stream, w, x, 0, hand_on<TOKEN_TILES, store_codes<T>>{});
  join_cluster<TOKEN_TILES, store_codes<T>>(args, p);
}

} // namespace
} // namespace bsh

#define GEMV(T, NAME, TOKEN_TILES, UNITS)                                                                              \
  BSH_ENTRY(__launch_bounds__(bsh::WARPS * 32, 1), NAME, bsh_fused_args, gemv_int8<T, TOKEN_TILES, UNITS>)
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
