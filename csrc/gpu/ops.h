/* gpu/ops.h - blocks and optimizers on CUDA (products: gpu/product.h): device pointers and sizes in, kernels enqueued
 * on context->stream.
 *
 * Nothing here waits for the GPU. All pointers of the argument structs are device pointers of context->device. */
#ifndef BSH_GPU_OPS_H
#define BSH_GPU_OPS_H

#include "core/kernels.h"
#include "core/status.h"
#include "gpu/driver.h"

bsh_status bsh_cuda_quantize_4bit(const bsh_quantize_4bit_args *args, const bsh_cuda_context *context);
bsh_status bsh_cuda_dequantize_4bit(const bsh_dequantize_4bit_args *args, const bsh_cuda_context *context);
bsh_status bsh_cuda_quantize_blockwise(const bsh_quantize_blockwise_args *args, const bsh_cuda_context *context);
/* Blocks of threads that quantize n numbers in such blocks, a warp each at a time. */
int64_t bsh_cuda_search_blocks(int64_t n, int64_t blocksize, const bsh_cuda_context *context);
bsh_status bsh_cuda_dequantize_blockwise(const bsh_dequantize_blockwise_args *args, const bsh_cuda_context *context);

/* Scales and codes of calibration (gpu/calibration.c). */
bsh_status bsh_cuda_search_4bit(const bsh_search_4bit_args *args, const bsh_cuda_context *context);
bsh_status bsh_cuda_round_4bit(const bsh_round_4bit_args *args, const bsh_cuda_context *context);

/* Adapters merged into a weight (gpu/merge.c). */
bsh_status bsh_cuda_merge_4bit(const bsh_merge_4bit_args *args, const bsh_cuda_context *context);
bsh_status bsh_cuda_merge_e2m1(const bsh_merge_4bit_args *args, const bsh_cuda_context *context);
bsh_status bsh_cuda_merged_values(const bsh_merge_4bit_args *args, int64_t begin, int64_t end, float *values,
                                  const bsh_cuda_context *context);

/* Pairs of tokens and experts (gpu/pairs.c): of up to 6,143 experts; rows that y does not have are its first or last.
 */
bsh_status bsh_cuda_sort_by_expert(const bsh_sort_by_expert_args *args, const bsh_cuda_context *context);
bsh_status bsh_cuda_sum_by_token(const bsh_sum_by_token_args *args, const bsh_cuda_context *context);

/* *sum (on the device) = position-dependent 64-bit sum of n_bytes bytes, the same as bsh_cpu_checksum's. */
bsh_status bsh_cuda_checksum(const uint8_t *bytes, int64_t n_bytes, uint64_t *sum, const bsh_cuda_context *context);

/* One step of all parameters of a list (gpu/optimizer.c). */
bsh_status bsh_cuda_optimizer_step(const bsh_step_list *list, const bsh_cuda_context *context);

/* *unorm (on the device) = squared norm of the update of the only parameter of a list, by Adam, momentum or RMSprop. */
bsh_status bsh_cuda_optimizer_norm(const bsh_step_list *list, float *unorm, const bsh_cuda_context *context);

#endif
