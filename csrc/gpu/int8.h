/* gpu/int8.h - the int8 ops on CUDA: device pointers and sizes in (core/int8.h), kernels enqueued on context->stream.
 *
 * Nothing here waits for the GPU. All pointers of the argument structs are device pointers of context->device. Sizes
 * are not zero, unless a comment says so. Codes of a weight may begin at any byte. */
#ifndef BSH_GPU_INT8_H
#define BSH_GPU_INT8_H

#include <stdbool.h>

#include "core/int8.h"
#include "core/status.h"
#include "cuda/sizes/int8.h"
#include "gpu/driver.h"

bsh_status bsh_cuda_quantize_int8(const bsh_quantize_int8_args *args, const bsh_cuda_context *context);

/* The same, but the codes of an outlier column that are none of an outlier stay. */
bsh_status bsh_cuda_quantize_int8_rows(const bsh_quantize_int8_args *args, const bsh_cuda_context *context);
bsh_status bsh_cuda_dequantize_int8(const bsh_dequantize_int8_args *args, const bsh_cuda_context *context);

/* K may be 0: sums are then zero. */
bsh_status bsh_cuda_product_int8(const bsh_product_int8_args *args, const bsh_cuda_context *context);
bsh_status bsh_cuda_scale_product_int8(const bsh_scale_product_int8_args *args, const bsh_cuda_context *context);

/* x in codes, then the product. */
bsh_status bsh_cuda_linear_4bit_int8(const bsh_product_args *args, const bsh_cuda_context *context);

/* ---- below: for gpu/ -------------------------------------------------------------------------------------------- */

/* Codes of rows. claims: instead of flags, or NULL; shares: as in bsh_int8_rows_args. */
bsh_status bsh_cuda_code_rows(const bsh_quantize_int8_args *args, uint16_t *claims, uint32_t *shares,
                              const bsh_cuda_context *context);

/* Outlier columns of x and of W beside each other, and none of their codes. */
bsh_status bsh_cuda_gather_outliers(const bsh_int8_gather_args *args, bsh_dtype dtype, const bsh_cuda_context *context);

/* A rectangle of a weight in int8. */
bsh_status bsh_cuda_dequantize_int8_part(const bsh_dequantize_4bit_args *args, const bsh_cuda_context *context);

/* Scales of rows of W as the input gradient reads them. */
bsh_status bsh_cuda_split_scales_int8(const bsh_product_args *args, const bsh_int8_scale_pair *pairs,
                                      const bsh_cuda_context *context);

#endif
