// gemm_4bit_int8.cu - y[M, N] = x W^T + bias with int8 codes of x and of the 4-bit W, by mma.sync; any card from sm_75
// on.
//
//   x: codes [M, K], scales [K / 64][M]         W: packed codes of 128 rows, 64 bytes a stage, and their scales
//     | cp.async, 128-byte swizzle                | registers, a stage ahead; a table of 16 bytes by prmt
//     v                                           v
//   stages of 128 codes of 128 + 128 rows, scales of 2 groups of 64
//     | ldmatrix
//     v
//   mma m16n8k32, int32 sums of a group -> fp32: sum += s (x_scale w_scale), in the order of the groups --> y
//
// A block of 8 warps has 128 x 128 of y, a warp 64 x 32. Rows beyond the matrices are zeros, which are not stored. The
// bits of y are those of the CPU.
#include "cuda/sizes/gemm_4bit_int8.h"

#include "cuda/loaders/loaders_int8.cuh"

#ifndef BSH_INT8_PRODUCTS
#define BSH_INT8_PRODUCTS                                                                                              \
  1 // 4 in benchmarks: as if tensor cores were as many times slower. Sums are as many times larger.
#endif

namespace bsh {
namespace {

constexpr int GROUP = BSH_GROUP_INT8, RING = BSH_GEMM_4BIT_INT8_STAGES, SCALES = BSH_GEMM_4BIT_INT8_SCALES / 4;

__host__ __device__ constexpr uint32_t four_codes(int c0, int c1, int c2, int c3) {
  return (uint32_t)(c0 & 255) | (uint32_t)(c1 & 255) << 8 | (uint32_t)(c2 & 255) << 16 | (uint32_t)(c3 & 255) << 24;
}
template <int FORMAT> __device__ __forceinline__ constexpr uint32_t table_word(int i) {
  constexpr int8_t CODES[2][16] = {{BSH_NF4_CODES_INT8}, {BSH_FP4_CODES_INT8}};
  const int8_t *const c = CODES[FORMAT == BSH_FP4] + 4 * i;
  return four_codes(c[0], c[1], c[2], c[3]);
}

// A row of W by two threads, a group of 64 codes each: from global memory to registers, and from there to a stage.
struct w_loader {
  const bsh_gemm_4bit_int8_args &args;
  const uint32_t t0, t1, t2, t3; // the 16 codes
  const float unit;
  const int row, half, shift; // of the tile; which group of a stage; log2 of the blocksize
  const int64_t first;        // element of W
  const bool inside;
  uint32_t words[8]; // packed
  float plain;
  int code;
  int64_t block;
  bool there;

  __device__ __forceinline__ w_loader(const bsh_gemm_4bit_int8_args &args, int n, bool fp4)
      : args(args), t0(fp4 ? table_word<BSH_FP4>(0) : table_word<BSH_NF4>(0)),
        t1(fp4 ? table_word<BSH_FP4>(1) : table_word<BSH_NF4>(1)),
        t2(fp4 ? table_word<BSH_FP4>(2) : table_word<BSH_NF4>(2)),
        t3(fp4 ? table_word<BSH_FP4>(3) : table_word<BSH_NF4>(3)),
        unit(fp4 ? 1.f / BSH_FP4_FACTOR_INT8 : 1.f / BSH_NF4_FACTOR_INT8), row(threadIdx.x / 2), half(threadIdx.x % 2),
        shift(__ffs((int)args.weight.blocksize) - 1), first((int64_t)(n + row) * args.K), inside(n + row < args.N) {}

  __device__ __forceinline__ void load_words(const uint8_t *packed) {
    if (args.fast) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const uint4 v = __ldg(reinterpret_cast<const uint4 *>(packed) + i);
        words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < 32; i++) {
      const uint32_t byte = packed[i];
      words[i / 4] = i % 4 == 0 ? byte : words[i / 4] | byte << (i % 4 * 8);
    }
  }
  __device__ __forceinline__ void load(int step) {
    const int group = 2 * step + half;
    const int64_t at = first + group * GROUP;
    there = inside && group * GROUP < args.K;
    if (!there) return;
    load_words(args.weight.packed + at / 2);
    block = at >> shift;
    if (args.weight.scales.absmax != nullptr) plain = __ldg(args.weight.scales.absmax + block);
    else code = __ldg(args.weight.scales.absmax_code + block);
  }
  __device__ __forceinline__ float scale() const {
    const bsh_scales &of = args.weight.scales;
    if (of.absmax != nullptr) return __fmul_rn(plain, unit);
    const float product = multiply_flush(__ldg(of.absmax_map + code), __ldg(of.absmax2 + block / BSH_NESTED_BLOCKSIZE));
    return __fmul_rn(__fadd_rn(product, __ldg(of.offset)), unit);
  }
  // Of four codes in the low 16 bits.
  __device__ __forceinline__ uint32_t four(uint32_t nibbles) const {
    const uint32_t low = __byte_perm(t0, t1, nibbles & 0x7777), high = __byte_perm(t2, t3, nibbles & 0x7777);
    const uint32_t upper = __byte_perm(0xFF00u, 0, nibbles >> 3 & 0x1111);
    return (low & ~upper) | (high & upper);
  }
  // To the rows of W of a stage, and their scales [2][TILE].
  __device__ __forceinline__ void store(char *stage, float *scales) const {
    scales[half * TILE + row] = there ? scale() : 0.f;
#pragma unroll
    for (int c = 0; c < 4; c++) {
      uint32_t out[4] = {};
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const uint32_t word = words[2 * c + i], in_order = (word & 0x0F0F0F0Fu) << 4 | (word >> 4 & 0x0F0F0F0Fu);
        if (there) out[2 * i] = four(in_order & 0xFFFF), out[2 * i + 1] = four(in_order >> 16);
      }
      *reinterpret_cast<uint4 *>(stage + row * DEPTH + (((half * 4 + c) ^ (row & 7)) << 4)) =
          make_uint4(out[0], out[1], out[2], out[3]);
    }
  }
};

// The scales of x of a stage, one a thread.
struct x_scales {
  const bsh_gemm_4bit_int8_args &args;
  const int row, half;
  float value;
  __device__ __forceinline__ explicit x_scales(const bsh_gemm_4bit_int8_args &args)
      : args(args), row(threadIdx.x % TILE), half(threadIdx.x / TILE) {}
  __device__ __forceinline__ void load(int step, int m) {
    const int group = 2 * step + half;
    value = m + row < args.M && group * GROUP < args.K ? args.x_scales[(int64_t)group * args.M + m + row] : 0.f;
  }
  __device__ __forceinline__ void store(float *scales) const { scales[half * TILE + row] = value; }
};

// sum += a group's product: 64 codes from `half` of a stage on.
__device__ __forceinline__ void multiply_group(float (*sum)[COLUMN_TILES][4], const place &p, uint32_t stage, int half,
                                               const float *of_x, const float *of_w) {
  int part[ROW_TILES][COLUMN_TILES][4] = {};
#pragma unroll
  for (int k = 0; k < 2; k++) {
    uint32_t a[ROW_TILES][4], b[COLUMN_TILES / 2][4];
    const int chunk = 4 * half + 2 * k;
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++)
      ldmatrix_x4(a[i], p.a + stage + i * 16 * DEPTH + (((chunk + p.lane / 16) ^ p.swizzle) << 4));
#pragma unroll
    for (int j = 0; j < COLUMN_TILES / 2; j++)
      ldmatrix_x4(b[j], p.b + stage + j * 16 * DEPTH + (((chunk + p.lane / 8 % 2) ^ p.swizzle) << 4));
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
      for (int j = 0; j < COLUMN_TILES; j++)
#pragma unroll
        for (int r = 0; r < BSH_INT8_PRODUCTS; r++)
          mma_codes(part[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
  }
  of_x += half * TILE + p.row, of_w += half * TILE + p.column;
#pragma unroll
  for (int j = 0; j < COLUMN_TILES; j++) {
    const float w[2] = {of_w[j * 8], of_w[j * 8 + 1]};
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++) {
      const float x[2] = {of_x[i * 16], of_x[i * 16 + 8]};
#pragma unroll
      for (int e = 0; e < 4; e++)
        sum[i][j][e] = __fmaf_rn((float)part[i][j][e], __fmul_rn(x[e / 2], w[e % 2]), sum[i][j][e]);
    }
  }
}

template <typename T>
__device__ __forceinline__ void store(const bsh_gemm_4bit_int8_args &args, float (*sum)[COLUMN_TILES][4],
                                      const place &p, int m, int n) {
#pragma unroll
  for (int j = 0; j < COLUMN_TILES; j++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int column = n + p.column + j * 8 + e;
      if (column >= args.N) continue;
      const float bias = bias_of<T>(args.bias, column);
#pragma unroll
      for (int i = 0; i < 2 * ROW_TILES; i++) {
        const int row = m + p.row + i * 8;
        const float value = sum[i / 2][j][i % 2 * 2 + e];
        if (row < args.M)
          from_float(args.bias != nullptr ? __fadd_rn(value, bias) : value,
                     static_cast<T *>(args.y) + (int64_t)row * args.N + column);
      }
    }
}

template <typename T> __device__ __forceinline__ void gemm(const bsh_gemm_4bit_int8_args &args) {
  extern __shared__ __align__(1024) char dynamic[];
  const uint32_t memory = shared_address(dynamic);
  const place p(memory);
  const int m = blockIdx.x % args.m_tiles * TILE, n = blockIdx.x / args.m_tiles * TILE;
  const int steps = (args.K + DEPTH - 1) / DEPTH;
  const byte_rows a = {args.codes, args.K, args.M, args.K};
  float *const scales = reinterpret_cast<float *>(dynamic + RING * STAGE_BYTES); // of a stage: x [2][TILE], W
  float sum[ROW_TILES][COLUMN_TILES][4] = {};
  w_loader w(args, n, args.weight.format == BSH_FP4);
  x_scales x(args);
  auto load_a = [&](int step) {
    if (step < steps) a.load(memory + step % RING * STAGE_BYTES, m, step * DEPTH, true);
    cp_async_commit();
  };
  auto store_w = [&](int step) {
    const int stage = step % RING;
    x.store(scales + stage * SCALES);
    w.store(dynamic + stage * STAGE_BYTES + TILE * DEPTH, scales + stage * SCALES + 2 * TILE);
  };
  let_later_kernels_start();
  wait_for_earlier_kernels();
  w.load(0), x.load(0, m);
  for (int step = 0; step < RING - 1; step++) load_a(step);
  store_w(0);
  w.load(1), x.load(1, m);
  for (int step = 0; step < steps; step++) {
    cp_async_wait<RING - 2>();
    __syncthreads(); // the stage is there, and the one before it has been read
    load_a(step + RING - 1);
    if (step + 1 < steps) store_w(step + 1);
    w.load(step + 2), x.load(step + 2, m);
    const float *const of = scales + step % RING * SCALES;
    for (int half = 0; half < 2; half++)
      if ((2 * step + half) * GROUP < args.K)
        multiply_group(sum, p, step % RING * STAGE_BYTES, half, of, of + 2 * TILE);
  }
  store<T>(args, sum, p, m, n);
}

} // namespace
} // namespace bsh

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define BODY(T) bsh::gemm<T>(args);
#else
#define BODY(T) __trap(); // a stage and its scales do not fit; the host does not launch it
#endif
#define GEMM(NAME, T)                                                                                                  \
  extern "C" __global__ void __launch_bounds__(BSH_GEMM_INT8_THREADS, 1)                                               \
      NAME(const __grid_constant__ bsh_gemm_4bit_int8_args args) {                                                     \
    BODY(T)                                                                                                            \
  }
GEMM(int8_gemm_4bit_f32, float)
GEMM(int8_gemm_4bit_f16, __half)
GEMM(int8_gemm_4bit_bf16, __nv_bfloat16)
