/* gpu/int8.h - the int8 ops on CUDA: device pointers and sizes in (core/int8.h), kernels enqueued on context->stream.
 *
 * Nothing here waits for the GPU. All pointers of the argument structs are device pointers of context->device. Sizes
 * are not zero, unless a comment says so. Codes of a weight may begin at any byte. */
#ifndef BSH_GPU_INT8_H
#define BSH_GPU_INT8_H

#include <stdbool.h>

#include "core/int8.h"
#include "core/status.h"
#include "gpu/driver.h"

bsh_status bsh_cuda_quantize_int8(const bsh_quantize_int8_args *args, const bsh_cuda_context *context);

/* The same, but the codes of an outlier column that are none of an outlier stay. */
bsh_status bsh_cuda_quantize_int8_rows(const bsh_quantize_int8_args *args, const bsh_cuda_context *context);
bsh_status bsh_cuda_dequantize_int8(const bsh_dequantize_int8_args *args, const bsh_cuda_context *context);

/* K may be 0: sums are then zero. */
bsh_status bsh_cuda_product_int8(const bsh_product_int8_args *args, const bsh_cuda_context *context);
bsh_status bsh_cuda_scale_product_int8(const bsh_scale_product_int8_args *args, const bsh_cuda_context *context);

/* y = x W^T + bias; K may be 0. With `dgrad`: dx = dy W, where args->x is dy [M, N] and args->y is dx [M, K]; N may be
 * 0. */
bsh_status bsh_cuda_linear_int8(const bsh_linear_int8_args *args, bool dgrad, const bsh_cuda_context *context);

#endif
