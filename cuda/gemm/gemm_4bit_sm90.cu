// gemm_4bit_sm90.cu - y[M, N] = x[M, K] W^T + bias for M <= 64 on Hopper's wgmma tensor-core instructions (sm_90a).
//
//   W, packed [N, K / 2]                          x [M, K]
//     | cp.async: 16 rows x 256 of K a warp         | x_units, the kernel in front
//     v                                             v
//   ring of 3 slots, one for each warp            x in the kernel's order [unit][token][64]
//     | 8 bytes of two rows a lane                  | cp.async.bulk, 3 stages  (OWN_X: x -> four more warps -> stages)
//     v                                             v
//   table of pairs -> A operand, registers        B operand, shared memory
//     '----------------------.  .-------------------'
//                            v  v
//          four wgmma m64 n16|32|64 k16 for a unit: part, fp32 registers
//                             | x scale of row and unit
//                             v
//          sum, fp32 registers, until the row block ends --> y
//                                                        '-> args.partial --> its last owner adds all --> y
//
// W is the A operand from registers: each warp decodes its 16 rows of an m64 tile, so a code is looked up once for all
// tokens. x is the B operand in shared memory, in the order of k that the packed bytes dictate (decode_unit), swizzled,
// tokens padded with zeros. x_units, a small kernel in front, has put it so, and a plain bulk copy brings each stage;
// or (OWN_X) four more warps do it, which saves the kernel but costs shared-memory cycles. The product of one unit (64
// of K) is made unscaled, then added to the sums times its fp32 scales.
//
// Work split: W is cut into row blocks, one row tile a warp, and these into pieces of 4 units of K; the blocks of
// threads share all pieces, in order, evenly. Where several own parts of one row block, the owner of its last piece
// waits until the others have left their sums in args.partial and adds all in the order of K: equal inputs give equal
// bits. A block of threads begins with its last row block, so that what others wait for is left early and what it waits
// for is needed late. It waits for blocks of lower index only. There are no more blocks than multiprocessors, so all
// run at once unless other work holds some; and blocks start in the order of their index, so that even then those it
// waits for have started.
//
// K_PARTS = 2: half of the warps take the first half of K, the others the second, so that row blocks are half as high.
// Each block of threads then has one share of one row block, and the two warps of a row tile finish half of the
// tokens each. The host also chooses how many row tiles a row block has, so that all multiprocessors get one; the warps
// left over decode nothing.
#include "cuda/gemm/gemm_4bit_sm90.cuh"

#define GEMM_PAIR(T, NAME, TOKENS, K_PARTS)                                                                            \
  BSH_GEMM_SM90(T, NAME, TOKENS, K_PARTS, NESTED_64) BSH_GEMM_SM90(T, NAME##_any, TOKENS, K_PARTS, ANY_SCALES)
#define GEMM_BF16(FORM, TOKENS, K_PARTS) GEMM_PAIR(__nv_bfloat16, gemm_4bit_bf16_##FORM, TOKENS, K_PARTS)
#define GEMM_F16(FORM, TOKENS, K_PARTS) GEMM_PAIR(__half, gemm_4bit_f16_##FORM, TOKENS, K_PARTS)
BSH_GEMM_FORMS(GEMM_BF16)
BSH_GEMM_FORMS(GEMM_F16)

// x[M, K] (2-byte elements) -> [all_units][tokens][64] in the layout of one stage, as x_producer makes it. Missing
// tokens and units are zero. Also clears the counters; with tokens = 0 nothing else.
extern "C" __global__ void x_units(const __grid_constant__ bsh_fused_args args, uint4 *out, int tokens, int all_units,
                                   int counters) {
  bsh::let_later_kernels_start(); // the product waits for this kernel, which waits for those before it
  bsh::wait_for_earlier_kernels();
  const int units = args.K / BSH_UNIT, at = blockIdx.x * blockDim.x + threadIdx.x;
  for (int i = at; i < counters; i += gridDim.x * blockDim.x) args.counters[i] = 0;
  if (tokens == 0) return;
  const int chunk = at & 7, token = (at >> 3) % tokens, unit = (at >> 3) / tokens;
  if (unit >= all_units) return;
  uint32_t pairs[4] = {};
  if (token < args.M && unit < units) {
    const uint32_t *from = reinterpret_cast<const uint32_t *>(static_cast<const uint16_t *>(args.x) + token * args.ldx +
                                                              unit * BSH_UNIT + chunk * 2);
#pragma unroll
    for (int c = 0; c < 4; c++) pairs[c] = from[c * 8];
  }
  out[((int64_t)unit * tokens + token) * 8 + (chunk ^ (token & 7))] =
      make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}
