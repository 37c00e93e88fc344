// loaders_int8.cuh - stages of codes in shared memory, and which of them a warp multiplies: gemm_int8.cu.
#pragma once

#include "cuda/operands/int8.cuh"

namespace bsh {
namespace {

constexpr int TILE = BSH_GEMM_INT8_TILE, DEPTH = BSH_GEMM_INT8_DEPTH, THREADS = BSH_GEMM_INT8_THREADS;
constexpr int STAGE_BYTES = BSH_GEMM_INT8_STAGE_BYTES, STAGES = bsh_gemm_int8_stages(ARCH);
constexpr int ROW_TILES = 4, COLUMN_TILES = 4; // of a warp: 16 rows, 8 columns each

// 16 bytes to shared memory, of which the last 16 - `there` are zeros.
__device__ __forceinline__ void copy_16(uint32_t to, const int8_t *from, int there, bool fast) {
#if __CUDA_ARCH__ >= 800
  if (fast && there == 16) {
    cp_async_16(to, from);
    return;
  }
#endif
  uint32_t words[4] = {};
  if (fast && there == 16) {
    const uint4 v = *reinterpret_cast<const uint4 *>(from);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  } else {
#pragma unroll
    for (int i = 0; i < 16; i++)
      if (i < there) words[i / 4] |= (uint32_t)(uint8_t)from[i] << (i % 4 * 8);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) st_shared(to + 4 * i, words[i]);
}

// Rows of bytes of which a block takes 128 from `first` on.
struct byte_rows {
  const int8_t *data;
  int64_t pitch;
  int rows, columns; // columns: bytes
  // Bytes [column, column + 128) to 128 rows of shared memory: chunk c of row r lies at c ^ r % 8.
  __device__ __forceinline__ void load(uint32_t to, int first, int column, bool fast) const {
#pragma unroll
    for (int i = threadIdx.x; i < TILE * 8; i += THREADS) {
      const int r = i / 8, c = i % 8, at = column + c * 16, row = first + r;
      const int there = row < rows ? max(0, min(16, columns - at)) : 0;
      copy_16(to + r * DEPTH + ((c ^ (r & 7)) << 4), data + (there > 0 ? row * pitch + at : 0), there, fast);
    }
  }
};

struct place {
  int lane, g, c, row, column; // of this thread's first element of the tile; its warp's lie 16 rows, 8 columns apart
  uint32_t a, b, swizzle;      // what of a stage ldmatrix reads: address of this lane's row of a and of b
  __device__ __forceinline__ explicit place(uint32_t memory) {
    const int warp = threadIdx.x / 32, rows = warp / 4 * 64, columns = warp % 4 * 32;
    lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    row = rows + g, column = columns + 2 * c;
    // Matrices of a: rows 0-7, 8-15, then the same 16 bytes further. Of b: rows 0-7, the same 16 bytes further, 8-15.
    a = memory + (rows + lane % 16) * DEPTH;
    b = memory + TILE * DEPTH + (columns + lane % 8 + lane / 16 * 8) * DEPTH;
    swizzle = lane % 8;
  }
};

} // namespace
} // namespace bsh
