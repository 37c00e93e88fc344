// gemm_4bit_sm90_wide.cu - y[M, N] = x[M, K] W^T + bias and dx[M, K] = dy[M, N] W in one pass over the packed W, for
// many rows, on Hopper's wgmma, tensor copies and clusters (sm_90a).
//
//   x (dy) [M, depth]            W, packed [N, K / 2]         scales
//      | tensor copies,             | tensor copies              | two warps: nested to fp32,
//      | half of the tokens by      | 128 rows x 64 bytes        | in the order in which they
//      | each block of a pair,      v                            v are read
//      | for both                  ring of 3 pieces           ring of 3 pieces
//      v                            |                            |
//   ring of 64 of depth:            |  pair table in shared memory (decode_sm90_wide.cuh)
//   B operand of wgmma              v                            v
//      |                         A operand in registers: W or W^T, rounded to T with its scale (consume), or
//      |                            |  its values without the scale (consume_unscaled)
//      v                            v
//   wgmma m64 n128/n192/n256 k16, fp32 sums in registers over all of depth; unscaled: over 64 of depth, then scaled
//      |
//      v
//   y, or args.partial, which the pair with the tile's end adds (epilogue_sm90_wide.cuh)
//
// Operands are swapped: C^T[rows, tokens] = A x^T with A = W or W^T, decoded by the warp that multiplies it. A thread
// block is two warpgroups that multiply, 64 rows of A each, and one that brings: warp 8 x, warps 9 and 10 scales, warp
// 11 packed W. Two blocks with the same tokens and neighbouring rows are a pair in a cluster. Decoding a group of 32 of
// depth is spread over three iterations, and its product is issued while the one before runs.
//
// W, its scales and x are read behind wait_for_earlier_kernels, since a kernel before may write any of them (an
// all-gather writes W); only hints go ahead.
#include "cuda/gemm/gemm_4bit_sm90_wide.cuh"

#define GEMM_WIDE(T, NAME, TOKENS, GRADIENT) BSH_GEMM_WIDE_ENTRY(T, NAME, wide_form<T, TOKENS, GRADIENT>)
#define GEMM_WIDE_FORM(FORM, TOKENS) BSH_GEMM_WIDE_ENTRIES(GEMM_WIDE, gemm_wide_, FORM, TOKENS)
BSH_GEMM_WIDE_FORMS(GEMM_WIDE_FORM)

// In front of a product that shares tiles: clears its flags.
extern "C" __global__ void clear_flags(uint32_t *flags, int n) {
  bsh::let_later_kernels_start(); // the product waits for this kernel, which waits for those before it
  bsh::wait_for_earlier_kernels();
  for (int i = threadIdx.x; i < n; i += blockDim.x) flags[i] = 0;
}
