/* gpu/product.h - products with packed weights on CUDA: facts of the arguments to a plan (plan/product.h), a plan to
 * launches. */
#ifndef BSH_GPU_PRODUCT_H
#define BSH_GPU_PRODUCT_H

#include "core/kernels.h"
#include "core/status.h"
#include "gpu/driver.h"
#include "plan/product.h"

/* The tensors behind the pointers of the arguments, borrowed AtenTensorHandles, for torch's product of panels; NULL for
 * the others. */
typedef struct {
  void *x;    /* contiguous [M, columns], any leading sizes: x, or dy of the input gradient */
  void *y;    /* the same of the result */
  void *bias; /* NULL without */
} bsh_torch_operands;

/* The plan of a product on a GPU of `sms` multiprocessors; `vendor` would multiply panels. y may be NULL: it will
 * then begin at a multiple of 16 bytes. */
bsh_status bsh_cuda_plan(const char *op, const bsh_product_args *args, int32_t sm, int32_t sms, bsh_vendor vendor,
                         bsh_plan *plan);

/* y = x W^T + bias, or dx = dy W, as planned, on context->stream. No size is zero but terms of int8's sums. Panels of
 * a stack are not launched here (python/bitshard/functions/grouped.py). BSH_BAD_VALUE where y lies at another multiple
 * than the plan was made for; BSH_OUT_OF_MEMORY where there is no scratch memory. */
bsh_status bsh_cuda_product(const bsh_product_args *args, const bsh_plan *plan, const bsh_torch_operands *operands,
                            const bsh_cuda_context *context);

/* ---- below: for gpu/ -------------------------------------------------------------------------------------------- */

/* Launches a slice's rows (args->M of them) with its scratch memory, NULL where it needs none; one for each bsh_launch.
 */
typedef bsh_status bsh_launch_slice(const bsh_product_args *args, const bsh_plan_slice *slice, char *memory,
                                    const bsh_cuda_context *context);
bsh_launch_slice bsh_launch_fused, bsh_launch_stack, bsh_launch_wide, bsh_launch_sm80, bsh_launch_sm75,
    bsh_launch_rows_int8, bsh_launch_codes_int8, bsh_launch_mixed_int8, bsh_launch_dgrad_int8;

/* By panels of lines of W, and a vendor's product of each. */
bsh_status bsh_launch_panels(const bsh_product_args *args, const bsh_plan *plan, const bsh_torch_operands *operands,
                             const bsh_cuda_context *context);

/* A map of x (dy) by boxes of 64 columns; and of W, `rows` rows of `columns` bytes each. */
bsh_status bsh_map_x(const bsh_product_args *args, int32_t box_rows, const bsh_cuda_context *context,
                     bsh_tensor_map *map);
bsh_status bsh_map_w(const bsh_product_args *args, int64_t rows, int64_t columns, int32_t box_rows, int32_t box_columns,
                     const bsh_cuda_context *context, bsh_tensor_map *map);

/* The parameters of a fused kernel for a slice, without scratch memory. */
bsh_fused_args bsh_fused_arguments(const bsh_product_args *args, const bsh_plan_slice *slice);

#endif
