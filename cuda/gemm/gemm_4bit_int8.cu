// gemm_4bit_int8.cu - y[M, N] = x W^T + bias with int8 codes of x and of the 4-bit W, by mma.sync; any card from sm_80
// on.
//
//   x: codes [M, K], scales [K / 64][M]         W: packed codes of 64 rows, 32 bytes a stage, and their scales
//     | cp.async, two stages ahead                | cp.async, four stages ahead; a table of 16 bytes by prmt
//     v                                           v
//   stages of a group: 64 codes of 128 + 64 rows, their scales
//     | ldmatrix
//     v
//   mma m16n8k32, int32 sums of a group -> fp32: sum += s (x_scale w_scale), in the order of the groups --> y
//
// A block of 8 warps has 128 x 64 of y, a warp 32 x 32. Two blocks share a multiprocessor, so that one decodes and
// scales while the other multiplies. Rows beyond the matrices are zeros, which are not stored. The bits of y are those
// of the CPU.
#include "cuda/sizes/gemm_4bit_int8.h"

#include "cuda/operands/int8.cuh"
#include "cuda/ptx/ptx_sm80.cuh"

#ifndef BSH_INT8_PRODUCTS
#define BSH_INT8_PRODUCTS                                                                                              \
  1 // 4 in benchmarks: as if tensor cores were as many times slower. Sums are as many times larger.
#endif

namespace bsh {
namespace {

constexpr int GROUP = BSH_GROUP_INT8, RING = BSH_GEMM_4BIT_INT8_STAGES, STAGE = BSH_GEMM_4BIT_INT8_STAGE_BYTES;
constexpr int ROWS = BSH_GEMM_4BIT_INT8_ROWS, COLUMNS = BSH_GEMM_4BIT_INT8_COLUMNS;
constexpr int ROW_TILES = 2, COLUMN_TILES = 4; // of a warp: 16 rows, 8 columns
// In a stage: codes of W, scales of x. Behind the stages: packed bytes of W, scales of W of eight groups.
constexpr int W_AT = ROWS * GROUP, SCALES_AT = W_AT + COLUMNS * GROUP;
constexpr int PACKED = COLUMNS * GROUP / 2, PACKED_RING = BSH_GEMM_4BIT_INT8_PACKED_STAGES, PACKED_AT = RING * STAGE;
constexpr int W_SCALES_AT = PACKED_AT + PACKED_RING * PACKED;
static_assert(W_SCALES_AT + 8 * COLUMNS * 4 == BSH_GEMM_4BIT_INT8_SHARED, "the host's size");
static_assert(RING == 3 && PACKED_RING == 4, "the order of the loop in gemm()");

// Where chunk c (16 codes) of row r of a stage lies: 8 rows of one chunk are in different banks.
__device__ __forceinline__ constexpr uint32_t chunk_at(int r, int c) { return r * GROUP + ((c ^ (r >> 1 & 3)) << 4); }

__host__ __device__ constexpr uint32_t four_codes(int c0, int c1, int c2, int c3) {
  return (uint32_t)(c0 & 255) | (uint32_t)(c1 & 255) << 8 | (uint32_t)(c2 & 255) << 16 | (uint32_t)(c3 & 255) << 24;
}
template <int FORMAT> __device__ __forceinline__ constexpr uint32_t table_word(int i) {
  constexpr int8_t CODES[2][16] = {{BSH_NF4_CODES_INT8}, {BSH_FP4_CODES_INT8}};
  const int8_t *const c = CODES[FORMAT == BSH_FP4] + 4 * i;
  return four_codes(c[0], c[1], c[2], c[3]);
}

// Codes of x: a thread copies chunk t % 4 of rows t / 4 and t / 4 + 64 of a stage; its scales, one of them a thread.
struct x_loader {
  const int8_t *from;
  const float *scale_from;
  const int64_t second; // bytes from the first row to the second
  const int64_t M;
  const bool there[2], scales;
  const uint32_t to, scale_to; // in a stage

  __device__ __forceinline__ x_loader(const bsh_gemm_4bit_int8_args &args, int m)
      : from(args.codes + (int64_t)(m + threadIdx.x / 4) * args.K + threadIdx.x % 4 * 16),
        scale_from(args.x_scales + m + threadIdx.x), second((int64_t)64 * args.K), M(args.M),
        there{m + (int)threadIdx.x / 4 < args.M, m + 64 + (int)threadIdx.x / 4 < args.M},
        scales(threadIdx.x < ROWS && m + (int)threadIdx.x < args.M), to(chunk_at(threadIdx.x / 4, threadIdx.x % 4)),
        scale_to(SCALES_AT + threadIdx.x * 4) {}
  // The next group, to the stage at `stage`; a thread's part of it is one of its commits.
  __device__ __forceinline__ void load(uint32_t stage) {
    cp_async_16_or_zero(stage + to, from, there[0]);
    cp_async_16_or_zero(stage + to + 64 * GROUP, from + second, there[1]);
    if (scales) cp_async_4(stage + scale_to, scale_from);
    from += GROUP, scale_from += M;
  }
};

// Packed W: a thread copies and decodes 8 bytes of row t / 4 of a stage, chunk t % 4; what it copies, it alone reads.
struct w_loader {
  const uint8_t *from;
  const uint32_t t0, t1, t2, t3; // the 16 codes
  const bool inside, fast;       // W has this row; packed bytes are aligned to 8
  const uint32_t packed, to;     // of a packed stage, of a stage

  __device__ __forceinline__ w_loader(const bsh_gemm_4bit_int8_args &args, int n, bool fp4)
      : from(args.weight.packed + (int64_t)(n + threadIdx.x / 4) * args.K / 2 + threadIdx.x % 4 * 8),
        t0(fp4 ? table_word<BSH_FP4>(0) : table_word<BSH_NF4>(0)),
        t1(fp4 ? table_word<BSH_FP4>(1) : table_word<BSH_NF4>(1)),
        t2(fp4 ? table_word<BSH_FP4>(2) : table_word<BSH_NF4>(2)),
        t3(fp4 ? table_word<BSH_FP4>(3) : table_word<BSH_NF4>(3)), inside(n + (int)threadIdx.x / 4 < args.N),
        fast(args.fast), packed(PACKED_AT + threadIdx.x * 8), to(W_AT + chunk_at(threadIdx.x / 4, threadIdx.x % 4)) {}
  // The next group's, to a packed stage.
  __device__ __forceinline__ void load(char *memory, int stage) {
    char *const at = memory + packed + stage * PACKED;
    if (inside && fast) cp_async_8(shared_address(at), from);
    else if (inside)
#pragma unroll
      for (int i = 0; i < 8; i++) at[i] = (char)from[i];
    from += GROUP / 2;
  }
  // Of four codes in the low 16 bits.
  __device__ __forceinline__ uint32_t four(uint32_t nibbles) const {
    const uint32_t low = __byte_perm(t0, t1, nibbles & 0x7777), high = __byte_perm(t2, t3, nibbles & 0x7777);
    const uint32_t upper = __byte_perm(0xFF00u, 0, nibbles >> 3 & 0x1111);
    return (low & ~upper) | (high & upper);
  }
  // Decoded, to a stage. Rows that W does not have are zeros.
  __device__ __forceinline__ void decode(char *memory, int from_stage, int to_stage) const {
    uint32_t out[4] = {};
    if (inside) {
      const uint2 words = *reinterpret_cast<const uint2 *>(memory + packed + from_stage * PACKED);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const uint32_t word = i ? words.y : words.x;
        const uint32_t in_order = (word & 0x0F0F0F0Fu) << 4 | (word >> 4 & 0x0F0F0F0Fu);
        out[2 * i] = four(in_order & 0xFFFF), out[2 * i + 1] = four(in_order >> 16);
      }
    }
    *reinterpret_cast<uint4 *>(memory + to_stage * STAGE + to) = make_uint4(out[0], out[1], out[2], out[3]);
  }
};

// Scales of W, four groups of a row by four threads: codes are read six groups ahead, their values three, and scales
// are in shared memory, in one of two places, when the first of the four begins.
struct w_scales {
  const bsh_gemm_4bit_int8_args &args;
  const float unit;
  const int shift;     // log2 of the blocksize
  const bool inside;   // W has this row
  const int64_t first; // element of W: of the row
  int code;
  float value, of256; // a plain scale, or what a nested one is made of

  __device__ __forceinline__ w_scales(const bsh_gemm_4bit_int8_args &args, int n, bool fp4)
      : args(args), unit(fp4 ? 1.f / BSH_FP4_FACTOR_INT8 : 1.f / BSH_NF4_FACTOR_INT8),
        shift(__ffs((int)args.weight.blocksize) - 1), inside(n + (int)threadIdx.x / 4 < args.N),
        first((int64_t)(n + threadIdx.x / 4) * args.K + threadIdx.x % 4 * GROUP) {}
  // Whether the group of this thread exists, of the four from `group` on.
  __device__ __forceinline__ bool has(int group) const {
    return inside && (group + (int)threadIdx.x % 4) * GROUP < args.K;
  }
  __device__ __forceinline__ int64_t block(int group) const { return (first + (int64_t)group * GROUP) >> shift; }
  __device__ __forceinline__ void load_code(int group) {
    if (has(group) && args.weight.scales.absmax == nullptr) code = __ldg(args.weight.scales.absmax_code + block(group));
  }
  __device__ __forceinline__ void load_value(int group) {
    if (!has(group)) return;
    const bsh_scales &of = args.weight.scales;
    value = __ldg(of.absmax != nullptr ? of.absmax + block(group) : of.absmax_map + code);
    if (of.absmax == nullptr) of256 = __ldg(of.absmax2 + block(group) / BSH_NESTED_BLOCKSIZE);
  }
  __device__ __forceinline__ void store(char *memory, int group) const {
    const bsh_scales &of = args.weight.scales;
    float scale = 0.f;
    if (has(group)) {
      const float plain = of.absmax != nullptr ? value : __fadd_rn(multiply_flush(value, of256), __ldg(of.offset));
      scale = __fmul_rn(plain, unit);
    }
    reinterpret_cast<float *>(memory + W_SCALES_AT)[((group + threadIdx.x % 4) & 7) * COLUMNS + threadIdx.x / 4] =
        scale;
  }
};

// Which part of a tile a thread has, and what of a stage it reads.
struct place {
  int row, column;    // of its first element of the tile; its warp's lie 8 rows, 8 columns apart
  uint32_t x, w;      // of ldmatrix, in a stage: its row's first byte
  int x_turn, w_turn; // by which its row's chunks are exchanged, and which of two chunks it reads
  __device__ __forceinline__ place() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rows = warp % 4 * 32, columns = warp / 4 * 32;
    // Matrices of x: rows 0-7, 8-15, then the same 16 bytes further. Of W: rows 0-7, the same 16 bytes further, 8-15.
    const int of_x = rows + lane % 16, of_w = columns + lane % 8 + lane / 16 * 8;
    row = rows + lane / 4, column = columns + 2 * (lane % 4);
    x = of_x * GROUP, w = W_AT + of_w * GROUP;
    x_turn = of_x >> 1 & 3 ^ lane / 16, w_turn = of_w >> 1 & 3 ^ lane / 8 % 2;
  }
};

// part = the product of a stage.
__device__ __forceinline__ void multiply_group(int (*part)[COLUMN_TILES][4], const place &p, uint32_t stage) {
#pragma unroll
  for (int k = 0; k < 2; k++) {
    uint32_t a[ROW_TILES][4], b[COLUMN_TILES / 2][4];
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++) ldmatrix_x4(a[i], stage + p.x + i * 16 * GROUP + ((2 * k ^ p.x_turn) << 4));
#pragma unroll
    for (int j = 0; j < COLUMN_TILES / 2; j++)
      ldmatrix_x4(b[j], stage + p.w + j * 16 * GROUP + ((2 * k ^ p.w_turn) << 4));
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
      for (int j = 0; j < COLUMN_TILES; j++)
#pragma unroll
        for (int r = 0; r < BSH_INT8_PRODUCTS; r++)
          mma_codes(part[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
  }
}

// sum += part times the scales of its rows and columns.
__device__ __forceinline__ void add_scaled(float (*sum)[COLUMN_TILES][4], int (*part)[COLUMN_TILES][4], const place &p,
                                           const float *of_x, const float *of_w) {
  float x[2 * ROW_TILES];
#pragma unroll
  for (int i = 0; i < 2 * ROW_TILES; i++) x[i] = of_x[p.row + i * 8];
#pragma unroll
  for (int j = 0; j < COLUMN_TILES; j++) {
    const float2 w = *reinterpret_cast<const float2 *>(of_w + p.column + j * 8);
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
      for (int e = 0; e < 4; e++)
        sum[i][j][e] = __fmaf_rn((float)part[i][j][e], __fmul_rn(x[2 * i + e / 2], e % 2 ? w.y : w.x), sum[i][j][e]);
  }
}

template <typename T> __device__ __forceinline__ void store_pair(const float *values, T *y) {
  *reinterpret_cast<uint32_t *>(y) = pack_pair<T>(values[0], values[1]);
}
template <> __device__ __forceinline__ void store_pair<float>(const float *values, float *y) {
  *reinterpret_cast<float2 *>(y) = make_float2(values[0], values[1]);
}
template <typename T>
__device__ __forceinline__ void store(const bsh_gemm_4bit_int8_args &args, float (*sum)[COLUMN_TILES][4],
                                      const place &p, int m, int n) {
#pragma unroll
  for (int j = 0; j < COLUMN_TILES; j++) {
    const int column = n + p.column + j * 8;
    if (column >= args.N) continue;
    const bool two = column + 1 < args.N;
    const float first = bias_of<T>(args.bias, column), second = two ? bias_of<T>(args.bias, column + 1) : 0.f;
#pragma unroll
    for (int i = 0; i < 2 * ROW_TILES; i++) {
      const int row = m + p.row + i * 8;
      if (row >= args.M) continue;
      const float *const of = sum[i / 2][j] + i % 2 * 2;
      T *const y = static_cast<T *>(args.y) + (int64_t)row * args.N + column;
      const float values[2] = {args.bias != nullptr ? __fadd_rn(of[0], first) : of[0],
                               args.bias != nullptr ? __fadd_rn(of[1], second) : of[1]};
      if (args.pairs) {
        store_pair(values, y);
        continue;
      }
      from_float(values[0], y);
      if (two) from_float(values[1], y + 1);
    }
  }
}

// Group g is multiplied while g + 1 is decoded, x of g + 2 and packed W of g + 4 are under way.
template <typename T> __device__ __forceinline__ void gemm(const bsh_gemm_4bit_int8_args &args) {
  extern __shared__ __align__(1024) char memory[];
  const uint32_t address = shared_address(memory);
  const place p;
  const int m = blockIdx.x % args.m_tiles * ROWS, n = blockIdx.x / args.m_tiles * COLUMNS, groups = args.K / GROUP;
  const bool fp4 = args.weight.format == BSH_FP4;
  float sum[ROW_TILES][COLUMN_TILES][4] = {};
  w_loader w(args, n, fp4);
  w_scales scales(args, n, fp4);
  x_loader x(args, m);
  let_later_kernels_start();
  wait_for_earlier_kernels();
  for (int g = 0; g < 2 && g < groups; g++) w.load(memory, g);
  for (int g = 0; g < 2; g++) {
    if (g < groups) x.load(address + g * STAGE);
    if (g + 2 < groups) w.load(memory, g + 2);
    cp_async_commit();
  }
  scales.load_code(0), scales.load_value(0), scales.load_code(4), scales.store(memory, 0);
  cp_async_wait<1>();
  w.decode(memory, 0, 0);
  int stage = 0, next = 1, behind = 2; // of x and decoded W: of this group, of the next, of the last that is loaded
  for (int g = 0; g < groups; g++) {
    cp_async_wait<1>();
    __syncthreads(); // group g is there, and the one before it has been read
    if (g + 2 < groups) x.load(address + behind * STAGE);
    if (g + 4 < groups) w.load(memory, g & 3);
    cp_async_commit();
    if (g + 1 < groups) w.decode(memory, g + 1 & 3, next);
    const int turn = g & 3;
    if (turn == 1) scales.load_value(g + 3);
    else if (turn == 2) scales.load_code(g + 6);
    else if (turn == 3) scales.store(memory, g + 1);
    int part[ROW_TILES][COLUMN_TILES][4] = {};
    multiply_group(part, p, address + stage * STAGE);
    add_scaled(sum, part, p, reinterpret_cast<const float *>(memory + stage * STAGE + SCALES_AT),
               reinterpret_cast<const float *>(memory + W_SCALES_AT) + (g & 7) * COLUMNS);
    behind = stage, stage = next, next = next == 2 ? 0 : next + 1;
  }
  store<T>(args, sum, p, m, n);
}

} // namespace
} // namespace bsh

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define BODY(T) bsh::gemm<T>(args);
#else
#define BODY(T) __trap(); // no cp.async; the host does not launch it
#endif
#define GEMM(NAME, T)                                                                                                  \
  extern "C" __global__ void __launch_bounds__(BSH_GEMM_4BIT_INT8_THREADS, 2)                                          \
      NAME(const __grid_constant__ bsh_gemm_4bit_int8_args args) {                                                     \
    BODY(T)                                                                                                            \
  }
GEMM(int8_gemm_4bit_f32, float)
GEMM(int8_gemm_4bit_f16, __half)
GEMM(int8_gemm_4bit_bf16, __nv_bfloat16)
