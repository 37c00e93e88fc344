// epilogue.cuh - from fp32 sums in tensor-core accumulator order to y: bias, rounding, and joining of split K.
//
// A tile is 16 rows of W by 8 * TOKEN_TILES tokens; its sums lie as [token tile][lane][4], the order in which lane (g,
// c) of m16n8 holds rows g, g, g + 8, g + 8 and tokens 2c, 2c + 1, 2c, 2c + 1.
#pragma once

#include "cuda/operands/decode.cuh"

namespace bsh {

// The first token of this thread block: blockIdx.y counts groups of tokens.
template <int TOKEN_TILES> __device__ __forceinline__ int first_token() { return blockIdx.y * (TOKEN_TILES * 8); }

// Element e of a tile's sums, in mma accumulator order [token tile][lane][4]. first_token: of the tile.
struct element {
  int row, token;
  __device__ __forceinline__ element(int tile, int first_token, int e) {
    const int i = e & 3, lane = (e >> 2) & 31;
    row = tile * BSH_ROW_TILE + (lane >> 2) + 8 * (i >> 1);
    token = first_token + (e >> 7) * 8 + (lane & 3) * 2 + (i & 1);
  }
};
// Stores a sum as y.
template <typename T> struct store_sum {
  const bsh_fused_args &args;
  __device__ __forceinline__ void operator()(element at, float sum) const {
    if (at.token >= args.M) return;
    if (args.bias) sum += to_float(static_cast<const T *>(args.bias)[at.row]);
    from_float(sum, static_cast<T *>(args.y) + at.token * args.ldy + at.row);
  }
};

// Of rows `row` and row + 8, if there is one.
template <typename T> __device__ __forceinline__ void load_bias(const bsh_fused_args &args, int row, float (&bias)[2]) {
  if (args.bias)
#pragma unroll
    for (int r = 0; r < 2; r++) bias[r] = to_float(static_cast<const T *>(args.bias)[row + 8 * r]);
}

// A tile from token `first` on, out of a warp's registers.
template <typename T, int TOKEN_TILES>
__device__ __forceinline__ void store_tile(const bsh_fused_args &args, int tile, int first, const float *sum) {
  const int lane = threadIdx.x & 31, row = tile * BSH_ROW_TILE + (lane >> 2), token = first + (lane & 3) * 2;
  float bias[2] = {};
  load_bias<T>(args, row, bias);
  T *to = static_cast<T *>(args.y) + token * args.ldy + row;
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; n++, to += 8 * args.ldy)
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (token + n * 8 + (i & 1) < args.M)
        from_float(sum[4 * n + i] + bias[i >> 1], to + (i & 1 ? args.ldy : 0) + 8 * (i >> 1));
}

// The same with half as many stores: lanes of rows g and g ^ 1 swap, so that each has two rows of one token. y and ldy
// are multiples of 4 bytes; all lanes take part.
template <typename T, int TOKEN_TILES>
__device__ __forceinline__ void store_tile_pairs(const bsh_fused_args &args, int tile, int first, const float *sum) {
  const int lane = threadIdx.x & 31, row = tile * BSH_ROW_TILE + (lane >> 2), odd = row & 1;
  const int token = first + (lane & 3) * 2 + odd;
  float bias[2] = {};
  load_bias<T>(args, row, bias);
  T *to = static_cast<T *>(args.y) + token * args.ldy + (row - odd);
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; n++, to += 8 * args.ldy)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float *const tokens = sum + 4 * n + 2 * r;
      const uint32_t own = pack_pair<T>(tokens[0] + bias[r], tokens[1] + bias[r]);
      const uint32_t other = __shfl_xor_sync(~0u, own, 4);
      const uint32_t rows = odd ? __byte_perm(other, own, 0x7632) : __byte_perm(own, other, 0x5410);
      if (token + n * 8 < args.M) *reinterpret_cast<uint32_t *>(to + 8 * r) = rows;
    }
}

// Where the sums of a row tile of this block's tokens are of block `split` of those that share its K. args.partial goes
// through the row tiles of the first group of tokens, then through those of the next.
template <int TOKEN_TILES>
__device__ __forceinline__ float *split_sums(const bsh_fused_args &args, int tile, int split, int e) {
  return args.partial +
         (((int64_t)(blockIdx.y * (args.N / BSH_ROW_TILE) + tile) * args.cut.k_splits + split) * (TOKEN_TILES * 128) +
          e);
}

// Adds the k_splits sums of elements [begin, end) of the row tiles from `tile` on, `stride` apart, for store(element,
// sum).
template <int TOKEN_TILES, typename STORE>
__device__ __forceinline__ void join_splits(const bsh_fused_args &args, int tile, int begin, int end, int stride,
                                            STORE store) {
  constexpr int TILE = TOKEN_TILES * 128;
  for (int o = begin; o < end; o += stride) {
    const int e = o % TILE, t = tile + o / TILE;
    const float *from = split_sums<TOKEN_TILES>(args, t, 0, e);
    float sum = 0.f;
#pragma unroll 1
    for (int k = 0; k < args.cut.k_splits; k++) sum += __ldcg(from + k * TILE);
    store(element(t, first_token<TOKEN_TILES>(), e), sum);
  }
}

// The second kernel of split K where blocks cannot meet in a cluster.
template <int TOKEN_TILES, typename STORE>
__device__ __forceinline__ void join(const bsh_fused_args &args, STORE store) {
  const int tiles = args.N / BSH_ROW_TILE;
  join_splits<TOKEN_TILES>(args, 0, blockIdx.x * blockDim.x + threadIdx.x, tiles * TOKEN_TILES * 128,
                           gridDim.x * blockDim.x, store);
}

} // namespace bsh
