// gemm_int8.cu - y[M, N] = the product of codes a [M, K] and b [N, K], scaled, by mma.sync; int32 sums as they are.
//
//   a, b: stages of 128 codes of 128 + 128 rows       outliers: 64 gathered columns of x and codes of W, 16 bits each
//     | cp.async, 128-byte swizzle                      |  the same stages, as bytes
//     v                                                 v
//   ldmatrix -> mma m16n8k32, int32 sums -> fp32 -> ldmatrix -> mma m16n8k16 --> columns of no chunk, one by one --> y
//
// A block of 8 warps has 128 x 128 of y, a warp 64 x 32. Rows and columns beyond the matrices are zeros, which are not
// stored; any sizes, any alignments: where rows are not 16-byte aligned, bytes are loaded one by one. The bits of y are
// those of scale_product_int8 where there are no outliers.
#include "cuda/loaders/loaders_int8.cuh"

namespace bsh {
namespace {

// sum += a stage's product; STEP multiplies 32 bytes of depth.
template <typename D, typename STEP>
__device__ __forceinline__ void multiply(D (*sum)[COLUMN_TILES][4], const place &p, uint32_t stage, STEP step) {
#pragma unroll
  for (int k = 0; k < 4; k++) {
    uint32_t a[ROW_TILES][4], b[COLUMN_TILES / 2][4];
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++)
      ldmatrix_x4(a[i], p.a + stage + i * 16 * DEPTH + (((2 * k + p.lane / 16) ^ p.swizzle) << 4));
#pragma unroll
    for (int j = 0; j < COLUMN_TILES / 2; j++)
      ldmatrix_x4(b[j], p.b + stage + j * 16 * DEPTH + (((2 * k + p.lane / 8 % 2) ^ p.swizzle) << 4));
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
      for (int j = 0; j < COLUMN_TILES; j++) step(sum[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
  }
}

// The tile's int32 sums.
__device__ __forceinline__ void multiply_codes(int (*sum)[COLUMN_TILES][4], const bsh_int8_gemm_args &args,
                                               const place &p, uint32_t memory, int m, int n) {
  const byte_rows a = {args.a, args.K, args.M, args.K}, b = {args.b, args.K, args.N, args.K};
  const int steps = (args.K + DEPTH - 1) / DEPTH;
  auto load = [&](int step) {
    const uint32_t stage = memory + step % STAGES * STAGE_BYTES;
    if (step < steps) {
      a.load(stage, m, step * DEPTH, args.fast);
      b.load(stage + TILE * DEPTH, n, step * DEPTH, args.fast);
    }
    cp_async_commit();
  };
  for (int step = 0; step < STAGES - 1; step++) load(step);
  for (int step = 0; step < steps; step++) {
    cp_async_wait<STAGES - 2>();
    __syncthreads(); // the stage is there, and the one before it has been read
    load(step + STAGES - 1);
    multiply(sum, p, step % STAGES * STAGE_BYTES,
             [](int *d, const uint32_t *x, uint32_t b0, uint32_t b1) { mma_codes(d, x, b0, b1); });
  }
  cp_async_wait<0>();
  __syncthreads();
}

// sum += x W^T over the gathered outlier columns, W as its codes.
template <typename T>
__device__ __forceinline__ void multiply_gathered(float (*sum)[COLUMN_TILES][4], const bsh_int8_gemm_args &args,
                                                  const place &p, uint32_t memory, int m, int n, int columns) {
  const bsh_int8_outliers &of = args.outliers;
  const int bytes = of.capacity * 2;
  const byte_rows a = {static_cast<const int8_t *>(of.x), bytes, args.M, bytes};
  const byte_rows b = {static_cast<const int8_t *>(of.w), bytes, args.N, bytes};
  for (int column = 0; column < columns; column += BSH_INT8_CHUNK) {
    a.load(memory, m, column * 2, true);
    b.load(memory + TILE * DEPTH, n, column * 2, true);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    multiply(sum, p, 0, [](float *d, const uint32_t *x, uint32_t b0, uint32_t b1) { mma_m16n8k16<T>(d, x, b0, b1); });
    __syncthreads();
  }
}

// sum += x W^T over the outlier columns from position `first` of the list on.
template <typename T>
__device__ __forceinline__ void multiply_listed(float (*sum)[COLUMN_TILES][4], const bsh_int8_gemm_args &args,
                                                const place &p, int m, int n, int first, int count) {
  for (int at = first; at < count; at++) {
    const int k = args.outliers.list[at];
    float x[ROW_TILES][2], code[COLUMN_TILES][2];
#pragma unroll
    for (int i = 0; i < ROW_TILES * 2; i++) {
      const int row = m + p.row + i * 8;
      x[i / 2][i % 2] = row < args.M ? to_float(static_cast<const T *>(args.x)[row * args.ldx + k]) : 0.f;
    }
#pragma unroll
    for (int j = 0; j < COLUMN_TILES * 2; j++) {
      const int column = n + p.column + j / 2 * 8 + j % 2;
      code[j / 2][j % 2] = column < args.N ? (float)args.b[(int64_t)column * args.K + k] : 0.f;
    }
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
      for (int j = 0; j < COLUMN_TILES; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) sum[i][j][e] = fmaf(x[i][e / 2], code[j][e % 2], sum[i][j][e]);
  }
}

// f(row of y, column of y, element) for the elements of this thread that y has.
template <typename F>
__device__ __forceinline__ void for_elements(const bsh_int8_gemm_args &args, const place &p, int m, int n, F f) {
#pragma unroll
  for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int row = m + p.row + i * 16 + e / 2 * 8, column = n + p.column + j * 8 + e % 2;
        if (row < args.M && column < args.N) f(row, column, i, j, e);
      }
}

template <typename T> __device__ __forceinline__ void gemm(const bsh_int8_gemm_args &args) {
  extern __shared__ __align__(1024) char dynamic[];
  const uint32_t memory = shared_address(dynamic);
  const place p(memory);
  const int m = blockIdx.x % args.m_tiles * TILE, n = blockIdx.x / args.m_tiles * TILE;
  int sum[ROW_TILES][COLUMN_TILES][4] = {};
  let_later_kernels_start();
  wait_for_earlier_kernels();
  multiply_codes(sum, args, p, memory, m, n);
  if constexpr (sizeof(T) == 1) { // int32 sums
    for_elements(args, p, m, n, [&](int row, int column, int i, int j, int e) {
      static_cast<int *>(args.y)[(int64_t)row * args.N + column] = sum[i][j][e];
    });
    return;
  } else {
    T *const y = static_cast<T *>(args.y);
    const int count = args.outliers.count == nullptr ? 0 : *args.outliers.count;
    if (count == 0) {
      for_elements(args, p, m, n, [&](int row, int column, int i, int j, int e) {
        from_float(
            scale_sum(sum[i][j][e], args.row_absmax[row], args.col_absmax[column], bias_of<T>(args.bias, column)),
            y + (int64_t)row * args.N + column);
      });
      return;
    }
    float part[ROW_TILES][COLUMN_TILES][4] = {};
    for_elements(args, p, m, n, [&](int row, int column, int i, int j, int e) {
      part[i][j][e] = sum_beside_outliers(sum[i][j][e], args.row_absmax[row]);
    });
    const int gathered = HAS_MMA<T> ? min(count, args.outliers.capacity) : 0;
    if constexpr (HAS_MMA<T>) multiply_gathered<T>(part, args, p, memory, m, n, gathered);
    multiply_listed<T>(part, args, p, m, n, gathered, count);
    for_elements(args, p, m, n, [&](int row, int column, int i, int j, int e) {
      from_float(scale_codes(part[i][j][e], args.col_absmax[column], bias_of<T>(args.bias, column)),
                 y + (int64_t)row * args.N + column);
    });
  }
}

} // namespace
} // namespace bsh

#define GEMM(NAME, T) BSH_ENTRY(__launch_bounds__(BSH_GEMM_INT8_THREADS, 1), NAME, bsh_int8_gemm_args, gemm<T>)
GEMM(gemm_int8_i32, char)
GEMM(gemm_int8_f32, float)
GEMM(gemm_int8_f16, __half)
GEMM(gemm_int8_bf16, __nv_bfloat16)
