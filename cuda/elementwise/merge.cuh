// merge.cuh - LoRA adapters added to a tile of a packed weight, which is quantized anew: the stages of merge.cu and
// merge_short.cu.
//
//   packed -> value -> + s B A, fp32 FMAs by rank -> scale of the block -> code -> packed
//
// Rows are whole blocks, 64 columns a warp. A block of threads has a tile of the weight, and 32 ranks of A and B at a
// time as fp32 in shared memory. A warp has 32 rows of 64 columns; a lane 8 rows, and 8 columns, which are a word of
// codes: a rank is four loads of 16 bytes and 64 FMAs. Sums stay in registers until the codes are written. With one
// adapter the weight is decoded after the sums, so that its bytes arrive meanwhile; with several, values are kept
// beside the sums, and rows are taken in two passes.
#ifndef BSH_MERGE_CUH
#define BSH_MERGE_CUH

#include "cuda/sizes/merge.h"

#include "cuda/numerics/common.cuh"

namespace bsh {

constexpr int ROWS = BSH_MERGE_ROWS, COLUMNS = BSH_MERGE_COLUMNS, CHUNK = BSH_MERGE_CHUNK, LANES = 8; // of a row
constexpr int GROUP = BSH_MERGE_ROWS / 4;                                                             // rows of a lane
constexpr int TILE_ROWS = BSH_MERGE_TILE_ROWS, TILE_COLUMNS = BSH_MERGE_TILE_COLUMNS;
constexpr int B_STRIDE = TILE_ROWS + 4;

struct factors {
  float4 a[CHUNK * TILE_COLUMNS / 4]; // [rank][block of columns][half of a lane's columns][lane of 8][4]
  float4 b[CHUNK * B_STRIDE / 4];     // [rank][row]
};

// `count` <= 4 numbers; zeros after them. Aligned: to four of them.
template <typename T>
__device__ __forceinline__ void load_four(const T *source, int count, bool is_aligned, float (&four)[4]) {
  if (is_aligned && count >= 4) {
    struct alignas(4 * sizeof(T)) raw {
      T of[4];
    };
    const raw found = *reinterpret_cast<const raw *>(source);
#pragma unroll
    for (int i = 0; i < 4; i++) four[i] = to_float(found.of[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; i++) four[i] = i < count ? to_float(source[i]) : 0.0f;
}

// Ranks from `rank` on, CHUNK at most, of the tile at (first, column); zeros beyond the weight's end.
template <typename T>
__device__ __forceinline__ void load_factors(const bsh_merge_4bit_args &args, int64_t first, int64_t column, int rank,
                                             factors &f) {
  const int ranks = min((int)args.R - rank, CHUNK);
  const T *const a = static_cast<const T *>(args.a) + rank * args.K + column;
  const bool a_is_aligned = reinterpret_cast<uintptr_t>(args.a) % (4 * sizeof(T)) == 0; // K is a multiple of 64
  for (int i = threadIdx.x; i < ranks * (TILE_COLUMNS / 4); i += BSH_MERGE_THREADS) {
    const int r = i / (TILE_COLUMNS / 4), four = i % (TILE_COLUMNS / 4), in_block = four % (COLUMNS / 4);
    float x[4];
    load_four(a + r * args.K + 4 * four, column + 4 * four < args.K ? 4 : 0, a_is_aligned, x);
    const int at = four / (COLUMNS / 4) * (COLUMNS / 4) + in_block % 2 * LANES + in_block / 2;
    f.a[r * (TILE_COLUMNS / 4) + at] = make_float4(x[0], x[1], x[2], x[3]);
  }
  const T *const b = static_cast<const T *>(args.b) + first * args.R + rank;
  const bool is_aligned = args.R % 4 == 0 && reinterpret_cast<uintptr_t>(args.b) % (4 * sizeof(T)) == 0;
  float *const to = reinterpret_cast<float *>(f.b);
  for (int i = threadIdx.x; i < (ranks + 3) / 4 * TILE_ROWS; i += BSH_MERGE_THREADS) {
    const int row = i % TILE_ROWS, four = i / TILE_ROWS;
    float x[4];
    load_four(b + row * args.R + 4 * four, first + row < args.N ? ranks - 4 * four : 0, is_aligned, x);
#pragma unroll
    for (int j = 0; j < 4; j++) to[(4 * four + j) * B_STRIDE + row] = x[j];
  }
}

// T rows of a lane, and what the weight has there. Rows below `inside` are in the weight.
template <int T> struct part {
  int64_t first; // byte of the first row's 64 columns in the packed weight
  int stride, inside, lane;
  uint32_t words[T]; // codes of 8 columns

  __device__ __forceinline__ part(const bsh_merge_4bit_args &args, int64_t row, int64_t column)
      : first((row * args.K + column) / 2), stride((int)(args.K / 2)),
        inside(column < args.K ? (int)min(args.N - row, (int64_t)T) : 0), lane(threadIdx.x % LANES) {
#pragma unroll
    for (int i = 0; i < T; i++)
      words[i] = i < inside ? *reinterpret_cast<const uint32_t *>(args.weight.packed + at(i) + 4 * lane) : 0;
  }
  __device__ __forceinline__ int64_t at(int i) const { return first + (int64_t)i * stride; }
};

// The shift of column j in a word: the first of two is the upper half of a byte.
__device__ constexpr int shift_of(int j) { return j / 2 * 8 + (j % 2 ? 0 : 4); }

// a, b: of the lane, at the first of `ranks` ranks.
template <int T>
__device__ __forceinline__ void add_ranks(const float4 *a, const float4 *b, int ranks, float (&sum)[T][8]) {
#pragma unroll 1 // more code is slower: benchmarks/results/merged_step_h100_202611.md
  for (int r = 0; r < ranks; r++, a += TILE_COLUMNS / 4, b += B_STRIDE / 4) {
    const float4 low = a[0], high = a[LANES];
    const float of_column[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int four = 0; four < T / 4; four++) {
      const float4 rows = b[four];
      const float of_row[4] = {rows.x, rows.y, rows.z, rows.w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 8; j++) sum[4 * four + i][j] = __fmaf_rn(of_row[i], of_column[j], sum[4 * four + i][j]);
      }
    }
  }
}

// A tile, whose blocks CODEC decodes and encodes:
//   rows<N>(args, p)            what it keeps of N rows of the lane while ranks are added
//   decode(args, p, rows, i, v) row i of W in fp32
//   encode(args, p, value)      the merged rows
//   end(args)                   once, behind all rows of the block of threads
template <typename T, typename CODEC> struct merging {
  const bsh_merge_4bit_args &args;
  factors &f;
  const int64_t first, column;     // of the tile
  const float4 *const a, *const b; // of the lane, in f
  CODEC &codec;
  const int ranks = (int)args.R;

  // The next ranks in shared memory, unless all are there.
  __device__ __forceinline__ void next(int rank) const {
    if (ranks <= CHUNK) return;
    __syncthreads();
    load_factors<T>(args, first, column, rank, f);
    __syncthreads();
  }

  __device__ __forceinline__ void one_adapter(const part<GROUP> &p) const {
    const typename CODEC::template rows<GROUP> kept(args, p);
    float value[GROUP][8] = {};
    for (int rank = 0; rank < ranks; rank += CHUNK) {
      if (rank > 0) next(rank);
      add_ranks(a, b, min(ranks - rank, CHUNK), value);
    }
    const float s = args.scales[ranks - 1];
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
      float of_row[8];
      codec.decode(args, p, kept, i, of_row);
#pragma unroll
      for (int j = 0; j < 8; j++) value[i][j] = __fmaf_rn(s, value[i][j], of_row[j]);
    }
    codec.encode(args, p, value);
  }

  // Four of the rows. Ranks whose scale is not 0 are the last of an adapter.
  __device__ void adapters(int64_t row, int64_t block, int four) const {
    const part<4> p(args, row + four * 4, block);
    const typename CODEC::template rows<4> kept(args, p);
    float value[4][8], sum[4][8] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) codec.decode(args, p, kept, i, value[i]);
    for (int rank = 0; rank < ranks; rank += CHUNK) {
      next(rank);
      for (int r = 0; r < min(ranks - rank, CHUNK); r++) {
        add_ranks(a + r * (TILE_COLUMNS / 4), b + r * (B_STRIDE / 4) + four, 1, sum);
        const float s = args.scales[rank + r];
        if (s == 0.0f) continue;
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
          for (int j = 0; j < 8; j++) value[i][j] = __fmaf_rn(s, sum[i][j], value[i][j]), sum[i][j] = 0.0f;
        }
      }
    }
    codec.encode(args, p, value);
  }
};

template <typename T, typename CODEC> __device__ __forceinline__ void merge_tile(const bsh_merge_4bit_args &args) {
  __shared__ factors f;
  const uint32_t across = (uint32_t)((args.K + TILE_COLUMNS - 1) / TILE_COLUMNS);
  const int64_t column = (int64_t)(blockIdx.x % across) * TILE_COLUMNS,
                first = (int64_t)(blockIdx.x / across) * TILE_ROWS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int of_columns = warp % BSH_MERGE_ACROSS, of_rows = warp / BSH_MERGE_ACROSS * ROWS + lane / LANES * GROUP;
  const int64_t row = first + of_rows, block = column + of_columns * COLUMNS;
  wait_for_earlier_kernels();
  const part<GROUP> p(args, row, block);
  load_factors<T>(args, first, column, 0, f);
  bool several = args.R == 0 || args.scales[args.R - 1] == 0.0f;
  for (int r = threadIdx.x; r < args.R - 1; r += BSH_MERGE_THREADS) several |= args.scales[r] != 0.0f;
  several = __syncthreads_or(several);
  CODEC codec;
  const merging<T, CODEC> of{args, f, first, column, f.a + of_columns * (COLUMNS / 4) + lane % LANES, f.b + of_rows / 4,
                             codec};
  if (several)
    for (int four = 0; four < GROUP / 4; four++) of.adapters(row, block, four);
  else of.one_adapter(p);
  codec.end(args);
}

} // namespace bsh

#endif
