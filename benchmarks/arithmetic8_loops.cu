// arithmetic8_loops.cu - main loops of 8-bit products without loads from memory and without decoding: what scaling the
// 32-bit sums inside the loop costs. Operands are random bytes in shared memory (4 stages, read in turn). Numbers are
// not checked except `magic` against `convert` (mma.sync), which must agree.
//
// Build:  nvcc -O3 -std=c++17 -cudart static -gencode arch=compute_90a,code=sm_90a -gencode arch=compute_80,code=sm_80
// \
//              -I . -I csrc -o loops benchmarks/arithmetic8_loops.cu          (wgmma parts only in the sm_90a image)
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_bf16.h>
#include <algorithm>
#include <type_traits>
#include <vector>
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#include "cuda/ptx/wgmma_codes_sm90.cuh"
using namespace bsh;
#endif

constexpr int STAGES = 4;            // of 128 bytes of K
constexpr float MAGIC = 12582912.0f; // 1.5 * 2^23: its bits plus an integer s, |s| < 2^22, are the float 2^23*1.5 + s
constexpr int MAGIC_BITS = 0x4B400000;

enum Scaling { NONE, X, X_W };                // in the loop: nothing; by x's scale (row); by x's and W's (row, column)
enum Turn { CONVERT, MAGIC_EACH, MAGIC_RUN }; // int to float: I2F; bits preset each time; preset each 256 of K

// ---------------------------------------------------------------- wgmma ------------------------------------------
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#define WGMMA 1
#endif

#ifdef WGMMA
template <int N> struct fp8;
#define FP8(N, D_LIST, A, B, P, ...)                                                                                   \
  template <> struct fp8<N> {                                                                                          \
    static __device__ __forceinline__ void mma_async(float *d, uint64_t a, uint64_t b, int add) {                      \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P ", 0;\n"                                                     \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" D_LIST "}, %" A ", %" B                \
                   ", p, 1, 1;\n}"                                                                                     \
                   : __VA_ARGS__                                                                                       \
                   : "l"(a), "l"(b), "r"(add));                                                                        \
    }                                                                                                                  \
  };
FP8(64, BSH_LIST_32, "32", "33", "34", BSH_D32(0))
FP8(96, BSH_LIST_48, "48", "49", "50", BSH_D32(0), BSH_D16(32))
FP8(128, BSH_LIST_64, "64", "65", "66", BSH_D32(0), BSH_D32(32))
FP8(256, BSH_LIST_128, "128", "129", "130", BSH_D32(0), BSH_D32(32), BSH_D32(64), BSH_D32(96))

// The same as wgmma_codes with the sums cleared by the instruction.
template <int N> struct int8;
#define INT8(N, D_LIST, A, B, P, ...)                                                                                  \
  template <> struct int8<N> {                                                                                         \
    static __device__ __forceinline__ void mma_async(int *d, uint64_t a, uint64_t b, int add) {                        \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P ", 0;\n"                                                     \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8.s8 {" D_LIST "}, %" A ", %" B ", p;\n}"          \
                   : __VA_ARGS__                                                                                       \
                   : "l"(a), "l"(b), "r"(add));                                                                        \
    }                                                                                                                  \
  };
INT8(64, BSH_LIST_32, "32", "33", "34", BSH_I32(0))
INT8(96, BSH_LIST_48, "48", "49", "50", BSH_I32(0), BSH_I16(32))
INT8(128, BSH_LIST_64, "64", "65", "66", BSH_I32(0), BSH_I32(32))
INT8(256, BSH_LIST_128, "128", "129", "130", BSH_I32(0), BSH_I32(32), BSH_I32(64), BSH_I32(96))

template <int N, typename D> __device__ __forceinline__ void pinned(D *d) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    if constexpr (sizeof(D) && std::is_same<D, int>::value) asm volatile("" : "+r"(d[i])::"memory");
    else asm volatile("" : "+f"(d[i])::"memory");
  }
}
#endif

extern __shared__ __align__(1024) uint8_t shared[];

__device__ void fill(uint8_t *to, int bytes, uint32_t seed, bool fp8_) {
  for (int i = threadIdx.x; i < bytes / 4; i += blockDim.x) {
    uint32_t v = (i + 1) * 2654435761u ^ seed * 40503u;
    v ^= v >> 15, v *= 2246822519u, v ^= v >> 13;
    ((uint32_t *)to)[i] = fp8_ ? v & 0xBFBFBFBFu : v; // e4m3 and bf16 without NaN
  }
}

// One block: GROUPS x 64 rows and COLUMNS columns; PART columns a time, BUFFERS of them in flight; scaling each BLOCK
// of K. KIND 0: int8, 1: fp8, 2: bf16 (128 bytes of K are 64 numbers).
template <int KIND, int GROUPS, int COLUMNS, int PART, int BUFFERS, int BLOCK, int SCALING, int TURN>
__global__ void __launch_bounds__(GROUPS * 128, 1) wgmma_loop(float *out, int k_steps /* of 128 bytes */) {
#ifdef WGMMA
  constexpr int A = GROUPS * 64 * 128, B = COLUMNS * 128, STAGE = A + B;
  float *scales = (float *)(shared + STAGES * STAGE); // [8][64 GROUPS], then [8][COLUMNS]
  fill(shared, STAGES * STAGE, blockIdx.x, KIND != 0);
  for (int i = threadIdx.x; i < 8 * (GROUPS * 64 + COLUMNS); i += blockDim.x) scales[i] = 1e-4f * (1 + i % 7);
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int row = group * 64 + warp * 16 + lane / 4;
  const float *columns = scales + 8 * GROUPS * 64 + lane % 4 * 2;
  const uint32_t base = (uint32_t)__cvta_generic_to_shared(shared);
  float total[COLUMNS / 2];
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; i++) total[i] = 0;
  if constexpr (SCALING == NONE) {
    int sums[KIND == 0 ? COLUMNS / 2 : 1];
#pragma unroll
    for (int i = 0; i < (KIND == 0 ? COLUMNS / 2 : 1); i++) sums[i] = 0;
    for (int k = 0; k < k_steps; k++) {
      const uint32_t stage = base + k % STAGES * STAGE;
      const uint64_t a = wgmma_descriptor_64(stage + group * 64 * 128), b = wgmma_descriptor_64(stage + A);
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < 4; j++) {
        if constexpr (KIND == 0) int8<COLUMNS>::mma_async(sums, a + 2 * j, b + 2 * j, 1);
        if constexpr (KIND == 1) fp8<COLUMNS>::mma_async(total, a + 2 * j, b + 2 * j, 1);
        if constexpr (KIND == 2) wgmma_ss<__nv_bfloat16, COLUMNS>::mma_async(total, a + 2 * j, b + 2 * j);
      }
      wgmma_commit();
      wgmma_wait<1>();
    }
    wgmma_wait<0>();
    if constexpr (KIND == 0) {
      pinned<COLUMNS / 2>(sums);
#pragma unroll
      for (int i = 0; i < COLUMNS / 2; i++) total[i] = sums[i];
    } else pinned<COLUMNS / 2>(total);
  } else {
    using D = typename std::conditional<KIND == 0, int, float>::type;
    constexpr int PARTS = COLUMNS / PART, PER_STEP = 128 / BLOCK == 0 ? 1 : 128 / BLOCK;
    constexpr int STEPS = BLOCK > 128 ? BLOCK / 128 : 1; // of 128 bytes that one scale spans
    constexpr int INSTRUCTIONS = BLOCK / PER_STEP / STEPS == 0 ? 1 : (BLOCK < 128 ? BLOCK : 128) / 32;
    static_assert(PARTS % BUFFERS == 0 || BUFFERS == 1, "");
    D part[BUFFERS][PART / 2];
    auto issue = [&](D *d, int k, int at, int p) { // columns p of one block of K
      if constexpr (KIND == 0 && TURN == MAGIC_EACH) {
#pragma unroll
        for (int i = 0; i < PART / 2; i++) d[i] = MAGIC_BITS;
      }
      if constexpr (KIND == 0 && TURN == MAGIC_RUN) {
        if ((k * PER_STEP + at) % (256 / BLOCK) == 0) {
#pragma unroll
          for (int i = 0; i < PART / 2; i++) d[i] = MAGIC_BITS;
        }
      }
      pinned<PART / 2>(d);
      wgmma_fence();
#pragma unroll
      for (int s = 0; s < STEPS; s++) {
        const uint32_t stage = base + (k * STEPS + s) % STAGES * STAGE;
        const uint64_t a = wgmma_descriptor_64(stage + group * 64 * 128) + at * (BLOCK / 16);
        const uint64_t b = wgmma_descriptor_64(stage + A + p * PART * 128) + at * (BLOCK / 16);
#pragma unroll
        for (int j = 0; j < INSTRUCTIONS; j++) {
          const int add = s || j || (KIND == 0 && TURN != CONVERT);
          if constexpr (KIND == 0) int8<PART>::mma_async(d, a + 2 * j, b + 2 * j, add);
          else fp8<PART>::mma_async(d, a + 2 * j, b + 2 * j, add);
        }
      }
      wgmma_commit();
    };
    auto scale = [&](D *d, int k, int at, int p) {
      const int block = (k * PER_STEP + at) % 8;
      const float low = scales[block * GROUPS * 64 + row], high = scales[block * GROUPS * 64 + row + 8];
      const bool last = (k * PER_STEP + at) % (256 / BLOCK) == 256 / BLOCK - 1;
#pragma unroll
      for (int i = 0; i < PART / 2; i++) {
        float v, &t = total[p * PART / 2 + i];
        if constexpr (KIND == 1) v = d[i];
        else if constexpr (TURN == CONVERT) v = (float)d[i];
        else if constexpr (TURN == MAGIC_EACH) v = __int_as_float(d[i]) - MAGIC;
        else v = __int_as_float(d[i]);
        if constexpr (SCALING == X_W) v *= columns[block * COLUMNS + p * PART + i / 4 * 8 + i % 2];
        t = fmaf(v, i % 4 < 2 ? low : high, t);
        if constexpr (KIND == 0 && TURN == MAGIC_RUN)
          if (last) t -= i % 4 < 2 ? low : high; // MAGIC times the first scale, once for 256 of K
      }
    };
    const int blocks = k_steps / STEPS;
    if constexpr (BUFFERS == 1) {
      for (int k = 0; k < blocks; k++)
#pragma unroll
        for (int at = 0; at < PER_STEP; at++)
#pragma unroll
          for (int p = 0; p < PARTS; p++) {
            issue(part[0], k, at, p);
            wgmma_wait<0>();
            pinned<PART / 2>(part[0]);
            scale(part[0], k, at, p);
          }
    } else {
      for (int k = 0; k < blocks; k++) { // nothing in flight across the loop's edge, or ptxas serializes
        issue(part[0], k, 0, 0);
#pragma unroll
        for (int u = 0; u < PER_STEP * PARTS; u++) {
          if (u + 1 < PER_STEP * PARTS) {
            issue(part[(u + 1) % 2], k, (u + 1) / PARTS, (u + 1) % PARTS);
            wgmma_wait<1>();
          } else wgmma_wait<0>();
          pinned<PART / 2>(part[u % 2]);
          scale(part[u % 2], k, u / PARTS, u % PARTS);
        }
      }
    }
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; i++) sum += total[i];
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
#endif
}

// ---------------------------------------------------------------- mma.sync ---------------------------------------
__device__ __forceinline__ void ldmatrix(uint32_t *d, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address));
}
__device__ __forceinline__ void mma_int8(int *d, const uint32_t *a, const uint32_t *b, int c0, int c1, int c2, int c3) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(c0), "r"(c1), "r"(c2), "r"(c3));
}
__device__ __forceinline__ void mma_bf16(float *d, const uint32_t *a, const uint32_t *b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// A block of 8 warps: 128 x 256, a warp 64 x 64; 128 bytes of K a stage, scaled each BLOCK (64, 128, 256) of K. With
// TIMES each product is issued so many times (GeForce has a quarter of the tensor cores beside the same ALUs).
template <bool BF16, int BLOCK, int SCALING, int TURN, int TIMES>
__global__ void __launch_bounds__(256, 1) mma_loop(float *out, int k_steps) {
  constexpr int A = 128 * 128, B = 256 * 128, STAGE = A + B, ONE = 3; // ONE: stages, 144 KB, fits an A100
  float *scales = (float *)(shared + ONE * STAGE);
  fill(shared, ONE * STAGE, blockIdx.x, BF16);
  for (int i = threadIdx.x; i < 8 * (128 + 256); i += blockDim.x) scales[i] = 1e-4f * (1 + i % 7);
  __syncthreads();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, m0 = warp % 2 * 64, n0 = warp / 2 * 64;
  const uint32_t base = (uint32_t)__cvta_generic_to_shared(shared);
  // 16 bytes c of row r are at r * 128 + (c ^ r % 8) * 16
  auto at = [&](int r, int c) { return r * 128 + ((c ^ (r & 7)) << 4); };
  float total[4][8][4];
  int run[SCALING == NONE && !BF16 ? 4 : 1][8][4];
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) total[i][j][e] = 0;
#pragma unroll
  for (int i = 0; i < sizeof(run) / 128; i++)
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) run[i][j][e] = 0;
  for (int k = 0; k < k_steps; k++) {
    const uint32_t stage = base + k % ONE * STAGE;
#pragma unroll
    for (int half = 0; half < 2; half++) { // 64 bytes of K: two products of 32 bytes
      uint32_t a[4][2][4];
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int q = 0; q < 2; q++)
          ldmatrix(a[i][q], stage + at(m0 + i * 16 + lane % 16, half * 4 + q * 2 + lane / 16));
      const int block = (k * 2 + half) * 64 / BLOCK % 8;
      float sx[4][2];
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int h = 0; h < 2; h++)
          sx[i][h] = SCALING == NONE ? 1.f : scales[block * 128 + m0 + i * 16 + h * 8 + lane / 4];
      uint32_t b[8][4]; // both products of 8 columns in one ldmatrix
#pragma unroll
      for (int j = 0; j < 8; j++) {
        ldmatrix(b[j], stage + A + at(n0 + j * 8 + lane % 8, half * 4 + lane / 8));
        float sw[2] = {1.f, 1.f};
        if constexpr (SCALING == X_W) {
          const float2 w = *(const float2 *)&scales[8 * 128 + block * 256 + n0 + j * 8 + lane % 4 * 2];
          sw[0] = w.x, sw[1] = w.y;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
          if constexpr (BF16) {
#pragma unroll
            for (int t = 0; t < TIMES; t++)
              mma_bf16(total[i][j], a[i][0], b[j]), mma_bf16(total[i][j], a[i][1], b[j] + 2);
          } else if constexpr (SCALING == NONE) {
            int *r = run[i][j];
#pragma unroll
            for (int t = 0; t < TIMES; t++) {
              mma_int8(r, a[i][0], b[j], r[0], r[1], r[2], r[3]);
              mma_int8(r, a[i][1], b[j] + 2, r[0], r[1], r[2], r[3]);
            }
          } else {
            constexpr int START = TURN == CONVERT ? 0 : MAGIC_BITS;
            int s[4];
            mma_int8(s, a[i][0], b[j], START, START, START, START);
            mma_int8(s, a[i][1], b[j] + 2, s[0], s[1], s[2], s[3]);
#pragma unroll
            for (int t = 1; t < TIMES; t++) { // sums that are TIMES as large: what is not used ptxas leaves out
              mma_int8(s, a[i][0], b[j], s[0], s[1], s[2], s[3]);
              mma_int8(s, a[i][1], b[j] + 2, s[0], s[1], s[2], s[3]);
            }
#pragma unroll
            for (int e = 0; e < 4; e++) {
              float v = TURN == CONVERT      ? (float)s[e]
                        : TURN == MAGIC_EACH ? __int_as_float(s[e]) - MAGIC
                                             : __int_as_float(s[e]);
              if constexpr (SCALING == X_W) v *= sw[e % 2];
              total[i][j][e] = fmaf(v, sx[i][e / 2], total[i][j][e]);
            }
          }
        }
      }
    }
    // MAGIC_RUN here: bits are preset by the C operand each time, MAGIC times the scales leaves each 4 blocks of K
    if constexpr (TURN == MAGIC_RUN && SCALING == X) {
      if (k % 2 == 1) {
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            float sum = 0;
#pragma unroll
            for (int b4 = 0; b4 < 4; b4++) sum += scales[((k / 2 * 4 + b4) % 8) * 128 + m0 + i * 16 + h * 8 + lane / 4];
            sum *= MAGIC;
#pragma unroll
            for (int j = 0; j < 8; j++) total[i][j][2 * h] -= sum, total[i][j][2 * h + 1] -= sum;
          }
      }
    }
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) sum += total[i][j][e] + (sizeof(run) > 128 ? run[i % (sizeof(run) / 128)][j][e] : 0);
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

// ---------------------------------------------------------------- host -------------------------------------------
static int processors;
static float *out;
static double reference_rate;

static void check(cudaError_t e, const char *what) {
  if (e != cudaSuccess) {
    printf("%s: %s\n", what, cudaGetErrorString(e));
    exit(1);
  }
}

// rows x columns a block; number_bytes of K; prints one line
static double timed(const char *name, void (*kernel)(float *, int), int threads, int shared_bytes, int rows,
                    int columns, int number_bytes, double *checksum = nullptr) {
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes) != cudaSuccess) {
    cudaGetLastError();
    printf("| %-66s | no room |\n", name);
    return 0;
  }
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, kernel), name);
  const int k_steps = 6000 / (number_bytes == 1 ? 1 : 2) * 2;
  std::vector<float> times;
  cudaEvent_t begin, end;
  cudaEventCreate(&begin), cudaEventCreate(&end);
  for (int i = 0; i < 8; i++) {
    cudaEventRecord(begin);
    kernel<<<processors, threads, shared_bytes>>>(out, k_steps);
    cudaEventRecord(end);
    check(cudaEventSynchronize(end), name);
    float ms;
    cudaEventElapsedTime(&ms, begin, end);
    if (i > 2) times.push_back(ms);
  }
  check(cudaGetLastError(), name);
  std::sort(times.begin(), times.end());
  const double ms = times[times.size() / 2], k = k_steps * 128.0 / number_bytes;
  const double rate = 2.0 * processors * rows * columns * k / ms * 1e-9;
  if (reference_rate == 0) reference_rate = rate;
  printf("| %-66s | %7.1f | %5.2f | %3d regs, %zu spilled |\n", name, rate, rate / reference_rate, attributes.numRegs,
         attributes.localSizeBytes);
  if (checksum) {
    float v;
    cudaMemcpy(&v, out, 4, cudaMemcpyDeviceToHost);
    *checksum = v;
  }
  return rate;
}

template <int KIND, int GROUPS, int COLUMNS, int PART, int BUFFERS, int BLOCK, int SCALING, int TURN>
static void wgmma_row(const char *name) {
  const int bytes = STAGES * (GROUPS * 64 + COLUMNS) * 128 + 32 * (GROUPS * 64 + COLUMNS);
  timed(name, wgmma_loop<KIND, GROUPS, COLUMNS, PART, BUFFERS, BLOCK, SCALING, TURN>, GROUPS * 128, bytes, GROUPS * 64,
        COLUMNS, KIND == 2 ? 2 : 1);
}
template <bool BF16, int BLOCK, int SCALING, int TURN, int TIMES> static double mma_row(const char *name) {
  double v;
  timed(name, mma_loop<BF16, BLOCK, SCALING, TURN, TIMES>, 256, 3 * 384 * 128 + 32 * 384, 128, 256, BF16 ? 2 : 1, &v);
  return v;
}

int main() {
  cudaDeviceProp p;
  check(cudaGetDeviceProperties(&p, 0), "device");
  processors = p.multiProcessorCount;
  check(cudaMalloc(&out, 4 * 512 * processors), "memory");
  printf("%s, sm_%d%d, %d processors\n\n", p.name, p.major, p.minor, processors);
  const char *head = "| %-66s | T op/s | of bf16 | |\n|---|---|---|---|\n";
  if (p.major == 9) {
    printf(head, "wgmma loop, no decoding");
    wgmma_row<2, 2, 256, 256, 1, 64, NONE, CONVERT>("bf16, 128 x 256");
    wgmma_row<0, 2, 256, 256, 1, 64, NONE, CONVERT>("int8, no scaling, 128 x 256");
    wgmma_row<1, 2, 256, 256, 1, 64, NONE, CONVERT>("fp8, no scaling, 128 x 256");
    wgmma_row<0, 2, 256, 128, 1, 64, X, CONVERT>("int8, per 64, x, convert, 128 x 256, 128 columns");
    wgmma_row<0, 2, 256, 128, 1, 64, X, MAGIC_EACH>("int8, per 64, x, preset, 128 x 256, 128 columns");
    wgmma_row<0, 2, 256, 64, 2, 64, X, CONVERT>("int8, per 64, x, convert, 128 x 256, 2 x 64 columns");
    wgmma_row<0, 3, 128, 128, 1, 64, X, CONVERT>("int8, per 64, x, convert, 192 x 128");
    wgmma_row<0, 3, 128, 128, 1, 64, X, MAGIC_EACH>("int8, per 64, x, preset, 192 x 128");
    wgmma_row<0, 3, 128, 128, 1, 64, X, MAGIC_RUN>("int8, per 64, x, preset each 256, 192 x 128");
    wgmma_row<0, 3, 128, 64, 2, 64, X, CONVERT>("int8, per 64, x, convert, 192 x 128, 2 x 64 columns");
    wgmma_row<0, 2, 192, 96, 2, 64, X, CONVERT>("int8, per 64, x, convert, 128 x 192, 2 x 96 columns");
    wgmma_row<0, 2, 192, 96, 2, 64, X, MAGIC_EACH>("int8, per 64, x, preset, 128 x 192, 2 x 96 columns");
    wgmma_row<0, 2, 256, 128, 1, 64, X_W, CONVERT>("int8, per 64, x and W, convert, 128 x 256, 128 columns");
    wgmma_row<0, 3, 128, 128, 1, 64, X_W, CONVERT>("int8, per 64, x and W, convert, 192 x 128");
    wgmma_row<0, 2, 192, 96, 2, 64, X_W, CONVERT>("int8, per 64, x and W, convert, 128 x 192, 2 x 96 columns");
    wgmma_row<0, 2, 256, 128, 1, 128, X, CONVERT>("int8, per 128, x, convert, 128 x 256, 128 columns");
    wgmma_row<0, 2, 256, 64, 2, 128, X, CONVERT>("int8, per 128, x, convert, 128 x 256, 2 x 64 columns");
    wgmma_row<0, 3, 128, 128, 1, 128, X, CONVERT>("int8, per 128, x, convert, 192 x 128");
    wgmma_row<0, 2, 192, 96, 2, 128, X, CONVERT>("int8, per 128, x, convert, 128 x 192, 2 x 96 columns");
    wgmma_row<0, 2, 192, 96, 2, 128, X, MAGIC_EACH>("int8, per 128, x, preset, 128 x 192, 2 x 96 columns");
    wgmma_row<0, 2, 192, 96, 2, 128, X_W, CONVERT>("int8, per 128, x and W, convert, 128 x 192, 2 x 96 columns");
    wgmma_row<0, 2, 256, 128, 1, 256, X, CONVERT>("int8, per 256, x, convert, 128 x 256, 128 columns");
    wgmma_row<0, 3, 128, 128, 1, 256, X, CONVERT>("int8, per 256, x, convert, 192 x 128");
    wgmma_row<0, 2, 192, 96, 2, 256, X, CONVERT>("int8, per 256, x, convert, 128 x 192, 2 x 96 columns");
    wgmma_row<1, 2, 192, 96, 2, 64, X, CONVERT>("fp8, per 64, x, 128 x 192, 2 x 96 columns");
    wgmma_row<1, 3, 128, 128, 1, 64, X, CONVERT>("fp8, per 64, x, 192 x 128");
    wgmma_row<1, 2, 192, 96, 2, 128, X, CONVERT>("fp8, per 128, x, 128 x 192, 2 x 96 columns");
    printf("\n");
  }
  reference_rate = 0;
  printf(head, "mma.sync loop, no decoding, 128 x 256, 8 warps");
  mma_row<true, 64, NONE, CONVERT, 1>("bf16");
  mma_row<false, 64, NONE, CONVERT, 1>("int8, no scaling");
  double a = mma_row<false, 64, X, CONVERT, 1>("int8, per 64, x, convert");
  double b = mma_row<false, 64, X, MAGIC_EACH, 1>("int8, per 64, x, preset");
  double c = mma_row<false, 64, X, MAGIC_RUN, 1>("int8, per 64, x, preset, taken off each 256");
  mma_row<false, 64, X_W, CONVERT, 1>("int8, per 64, x and W, convert");
  mma_row<false, 64, X_W, MAGIC_EACH, 1>("int8, per 64, x and W, preset");
  printf("\nfirst thread's sum: convert %.9g, preset %.9g, preset each 256 %.9g\n\n", a, b, c);
  reference_rate = 0;
  printf(head, "the same, each product issued 4 times (rates of one)");
  mma_row<true, 64, NONE, CONVERT, 4>("bf16");
  mma_row<false, 64, NONE, CONVERT, 4>("int8, no scaling");
  mma_row<false, 64, X, CONVERT, 4>("int8, per 64, x, convert");
  mma_row<false, 64, X, MAGIC_EACH, 4>("int8, per 64, x, preset");
  mma_row<false, 64, X_W, CONVERT, 4>("int8, per 64, x and W, convert");
  return 0;
}
