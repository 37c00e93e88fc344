/* gemm_4bit_sm90.h - sizes of gemm_4bit_sm90.cu, for the kernel, its plan (csrc/plan/gemm_4bit_sm90.c) and tests.
 *
 * tokens: rows of x of a launch, padded to 16, 32 or 64. k_parts: parts of K that the warpgroups of a block work on at
 * the same time. */
#ifndef BSH_GEMM_4BIT_SM90_H
#define BSH_GEMM_4BIT_SM90_H

#include "cuda/sizes/fused.h"

/* X(name, tokens, parts of K) */
#define BSH_GEMM_FORMS(X) X(m16, 16, 1) X(m32, 32, 1) X(m64, 64, 1) X(m32_p2, 32, 2) X(m64_p2, 64, 2)

enum { BSH_GEMM_TOKENS = 64 };                             /* rows of x, of a launch */
enum { BSH_GEMM_SLOTS = 3 };                               /* of a warp's ring of packed bytes */
enum { BSH_GEMM_STAGES = 3 };                              /* of x */
enum { BSH_GEMM_WARPS = 16, BSH_GEMM_X_WARPS = 4 };        /* that multiply, at most; that put x in order besides */
enum { BSH_X_UNITS_THREADS = 256, BSH_X_UNIT_CHUNKS = 8 }; /* x_units; a chunk: 16 bytes of a unit of x */
enum { BSH_GEMM_COUNTERS_ALIGNMENT = 256 };                /* bytes */

/* Decoding one unit ahead; 64 tokens then need 168 registers, which 12 warps have. */
BSH_SIZE bool bsh_gemm_ahead(int32_t tokens, int32_t k_parts) { return tokens < 64 || k_parts == 1; }
BSH_SIZE int32_t bsh_gemm_warps(int32_t tokens, int32_t k_parts) {
  return bsh_gemm_ahead(tokens, k_parts) && tokens == 64 ? 12 : BSH_GEMM_WARPS;
}
/* The kernel puts x in order itself: no x_units in front of it. */
BSH_SIZE bool bsh_gemm_own_x(int32_t tokens, int32_t k_parts) { return tokens == 32 && k_parts == 2; }
BSH_SIZE int32_t bsh_gemm_threads(int32_t tokens, int32_t k_parts) {
  return (bsh_gemm_warps(tokens, k_parts) + (bsh_gemm_own_x(tokens, k_parts) ? BSH_GEMM_X_WARPS : 0)) * BSH_WARP;
}

/* A stage of x: units of each part of K, [part][unit][token][64]. */
BSH_SIZE int32_t bsh_gemm_stage_units(int32_t tokens, int32_t k_parts) { return (tokens == 64 ? 2 : 4) / k_parts; }
BSH_SIZE int32_t bsh_gemm_part_bytes(int32_t tokens, int32_t k_parts) {
  return bsh_gemm_stage_units(tokens, k_parts) * tokens * BSH_UNIT * 2;
}
BSH_SIZE int32_t bsh_gemm_stage_bytes(int32_t tokens, int32_t k_parts) {
  return bsh_gemm_part_bytes(tokens, k_parts) * k_parts;
}

/* Dynamic shared memory: [barriers, map, x stages] below 64 KiB, the table at 64 KiB, the rings at 128 KiB. All forms
 * ask for the rings of as many warps as the largest has. */
enum { BSH_GEMM_MAP_AT = 1024, BSH_GEMM_X_AT = BSH_GEMM_MAP_AT + BSH_MAP_BYTES };
enum { BSH_GEMM_SHARED_BYTES = BSH_WIDE_RING_AT + BSH_GEMM_WARPS * BSH_GEMM_SLOTS * BSH_PIECE_BYTES };

#endif
