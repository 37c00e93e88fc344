// gemv_int8_dgrad.cu - dx[M, K] = dy[M, N] W for few rows of dy, in one pass over the codes of W (sm_90 to sm_119).
//
//   W, codes [N, K]                           dy [M, N], absmax [N]
//     | cp.async: pieces of 32 of N x 128 of K   | a piece ahead: dy * absmax / 127 in fp32,
//     v                                          v  as the sum of two bf16
//   ring of slots, one for each warp           B operands
//     | ldmatrix, transposed; codes widened, exactly  |
//     v                                          |
//   A operand: 16 of K x 16 of N --------------> mma m16n8k16, twice
//                                                  | fp32 sums of 128 of K x tokens
//                                                  v
//                   warps -> shared memory, added in order -> args.partial, added over `splits` blocks in order -> dx
//
// A block has 128 of K; the warps of `splits` blocks, a cluster, go round the pieces of N. blockIdx.y counts groups of
// 8 TOKEN_TILES tokens, each of which reads W for itself. Scaled dy has 16 bits of mantissa, so neither it nor W is
// rounded to the dtype. Sums are added in a fixed order: equal inputs give equal bits.
#include "cuda/operands/int8.cuh"

#if !defined(__CUDA_ARCH__) || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200)
#define BSH_IS_WIDE 1

namespace bsh {
namespace {

constexpr int WARPS = BSH_GEMV_DGRAD_WARPS, COLUMNS = BSH_GEMV_DGRAD_COLUMNS, PIECE_ROWS = 32;
constexpr int PIECE = PIECE_ROWS * COLUMNS; // bytes

// This lane's B operands of a piece: of token tile n and 16 of N, two words of dy; and the scales of their rows of W.
template <typename T, int TOKEN_TILES> struct dy_piece {
  uint32_t raw[TOKEN_TILES][4]; // pairs of N: 2t, 8 + 2t, 16 + 2t, 24 + 2t
  float scale[8];

  __device__ __forceinline__ void fetch(const bsh_int8_gemv_dgrad_args &args, int first, int token, int t) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int n = first + i * 8 + 2 * t;
      const bool there = n < args.N; // N is even
      scale[2 * i] = there ? args.absmax[n] : 0.f, scale[2 * i + 1] = there ? args.absmax[n + 1] : 0.f;
#pragma unroll
      for (int j = 0; j < TOKEN_TILES; j++) {
        const T *const row = static_cast<const T *>(args.dy) + (int64_t)min(token + j * 8, args.M - 1) * args.ldy;
        raw[j][i] = there ? *reinterpret_cast<const uint32_t *>(row + n) : 0;
      }
    }
  }
  // Of word i of token tile j: a sum of two pairs.
  __device__ __forceinline__ void split(int j, int i, uint32_t &high, uint32_t &low) const {
    const T *const pair = reinterpret_cast<const T *>(&raw[j][i]);
    const float first = to_float(pair[0]) * (scale[2 * i] * INVERSE_127);
    const float second = to_float(pair[1]) * (scale[2 * i + 1] * INVERSE_127);
    high = pack_pair<__nv_bfloat16>(first, second);
    low = pack_pair<__nv_bfloat16>(first - __uint_as_float(high << 16), second - __uint_as_float(high & 0xFFFF0000u));
  }
};

struct codes_ring {
  const int8_t *from;
  uint32_t to;
  int lane, N, columns;
  int64_t pitch;
  __device__ __forceinline__ codes_ring(const bsh_int8_gemv_dgrad_args &args, uint32_t own, int k, int l)
      : to(own), lane(l), N(args.N), pitch(args.K) {
    from = args.packed + min(k + l % 8 * 16, args.K - 16); // columns beyond W are not stored
  }
  // Rows beyond W repeat the last one: their dy is 0. Chunk c of row r lies at c ^ r % 8.
  __device__ __forceinline__ void start(int first, int slot) const {
#pragma unroll
    for (int i = 0; i < PIECE_ROWS / 4; i++) {
      const int row = i * 4 + lane / 8;
      cp_async_16(to + slot * PIECE + row * COLUMNS + ((lane % 8 ^ (row & 7)) << 4),
                  from + (int64_t)min(first + row, N - 1) * pitch);
    }
  }
};

template <int TOKEN_TILES> using dgrad_sums = float[COLUMNS / 16][TOKEN_TILES][4];

// sum += a piece.
template <typename T, int TOKEN_TILES>
__device__ __forceinline__ void multiply_piece(dgrad_sums<TOKEN_TILES> &sum, const dy_piece<T, TOKEN_TILES> &dy,
                                               uint32_t piece, int lane) {
  uint32_t high[TOKEN_TILES][4], low[TOKEN_TILES][4];
#pragma unroll
  for (int j = 0; j < TOKEN_TILES; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) dy.split(j, i, high[j][i], low[j][i]);
#pragma unroll
  for (int c = 0; c < COLUMNS / 16; c++) {
    uint32_t v[4];
    ldmatrix_x4_trans(v, piece + lane * COLUMNS + ((c ^ (lane & 7)) << 4));
#pragma unroll
    for (int s = 0; s < 2; s++) { // 16 of N
      uint32_t a[4];
      // Bytes of a word: K 2g and 2g + 1 of N 2t, then of 2t + 1. Rows g and g + 8 of A are K 2g and 2g + 1.
      widen_codes<__nv_bfloat16>(__byte_perm(v[2 * s], 0, 0x3120), a);
      widen_codes<__nv_bfloat16>(__byte_perm(v[2 * s + 1], 0, 0x3120), a + 2);
#pragma unroll
      for (int j = 0; j < TOKEN_TILES; j++) {
        mma_m16n8k16<__nv_bfloat16>(sum[c][j], a, high[j][2 * s], high[j][2 * s + 1]);
        mma_m16n8k16<__nv_bfloat16>(sum[c][j], a, low[j][2 * s], low[j][2 * s + 1]);
      }
    }
  }
}

template <typename T, int TOKEN_TILES>
__device__ __forceinline__ void store_dx(const bsh_int8_gemv_dgrad_args &args, int k, int token, float sum) {
  if (k < args.K && token < args.M) from_float(sum, static_cast<T *>(args.dx) + (int64_t)token * args.K + k);
}

template <typename T, int TOKEN_TILES, int SLOTS>
__device__ __forceinline__ void gemv_dgrad(const bsh_int8_gemv_dgrad_args &args) {
  constexpr int TILE = TOKEN_TILES * 8 * COLUMNS;
  extern __shared__ __align__(1024) char dynamic[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int slab = blockIdx.x / args.splits, split = blockIdx.x - slab * args.splits, k = slab * COLUMNS;
  const int token = blockIdx.y * TOKEN_TILES * 8, pieces = (args.N + PIECE_ROWS - 1) / PIECE_ROWS;
  const int begin = (int)((int64_t)pieces * split / args.splits),
            end = (int)((int64_t)pieces * (split + 1) / args.splits);
  const codes_ring ring(args, shared_address(dynamic) + warp * SLOTS * PIECE, k, lane);
  dgrad_sums<TOKEN_TILES> sum = {};
  dy_piece<T, TOKEN_TILES> next;
  let_later_kernels_start();
  wait_for_earlier_kernels();
  int ahead = begin + warp, slot = 0, fill = 0;
#pragma unroll
  for (int i = 0; i < SLOTS - 1; i++, ahead += WARPS, fill++) {
    if (ahead < end) ring.start(ahead * PIECE_ROWS, fill);
    cp_async_commit();
  }
  next.fetch(args, (begin + warp) * PIECE_ROWS, token + g, t);
  for (int piece = begin + warp; piece < end; piece += WARPS, ahead += WARPS) {
    cp_async_wait<SLOTS - 2>();
    __syncwarp();
    if (ahead < end) ring.start(ahead * PIECE_ROWS, fill);
    cp_async_commit();
    const dy_piece<T, TOKEN_TILES> dy = next;
    next.fetch(args, (piece + WARPS) * PIECE_ROWS, token + g, t);
    multiply_piece<T, TOKEN_TILES>(sum, dy, ring.to + slot * PIECE, lane);
    slot = slot + 1 == SLOTS ? 0 : slot + 1, fill = fill + 1 == SLOTS ? 0 : fill + 1;
  }
  cp_async_wait<0>();
  __syncthreads();                                        // the rings are free
  float *const sums = reinterpret_cast<float *>(dynamic); // [warp][token][column]
#pragma unroll
  for (int c = 0; c < COLUMNS / 16; c++)
#pragma unroll
    for (int j = 0; j < TOKEN_TILES; j++)
#pragma unroll
      for (int e = 0; e < 2; e++)
        *reinterpret_cast<float2 *>(sums + warp * TILE + (j * 8 + 2 * t + e) * COLUMNS + c * 16 + 2 * g) =
            make_float2(sum[c][j][e], sum[c][j][e + 2]);
  __syncthreads();
  float *const partial = args.partial + ((int64_t)(blockIdx.y * (gridDim.x / args.splits) + slab) * args.splits) * TILE;
  for (int o = threadIdx.x; o < TILE; o += WARPS * 32) {
    float all = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) all += sums[w * TILE + o];
    if (args.splits > 1) partial[split * TILE + o] = all;
    else store_dx<T, TOKEN_TILES>(args, k + o % COLUMNS, token + o / COLUMNS, all);
  }
  if (args.splits == 1) return;
  cluster_sync();
  for (int o = split * WARPS * 32 + threadIdx.x; o < TILE; o += args.splits * WARPS * 32) {
    float all = 0.f;
    for (int s = 0; s < args.splits; s++) all += __ldcg(partial + s * TILE + o);
    store_dx<T, TOKEN_TILES>(args, k + o % COLUMNS, token + o / COLUMNS, all);
  }
}

} // namespace
} // namespace bsh
#endif

#ifdef BSH_IS_WIDE
#define BODY(...) bsh::gemv_dgrad<__VA_ARGS__>(args)
#else
#define BODY(...) __trap()
#endif
#define GEMV(NAME, T, TOKEN_TILES, SLOTS, BLOCKS)                                                                      \
  extern "C" __global__ void __launch_bounds__(BSH_GEMV_DGRAD_WARPS * 32, BLOCKS)                                      \
      NAME(const __grid_constant__ bsh_int8_gemv_dgrad_args args) {                                                    \
    BODY(T, TOKEN_TILES, SLOTS);                                                                                       \
  }
#define GEMV_F16(FORM, ...) GEMV(gemv_int8_dgrad_f16_##FORM, __half, __VA_ARGS__)
#define GEMV_BF16(FORM, ...) GEMV(gemv_int8_dgrad_bf16_##FORM, __nv_bfloat16, __VA_ARGS__)
BSH_GEMV_DGRAD_FORMS(GEMV_F16)
BSH_GEMV_DGRAD_FORMS(GEMV_BF16)
