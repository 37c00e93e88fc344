/* gpu/panels.h - products with W dequantized by panels into bounded scratch memory, a vendor's product of each. */
#ifndef BSH_GPU_PANELS_H
#define BSH_GPU_PANELS_H

#include "core/kernels.h"
#include "core/status.h"
#include "gpu/driver.h"
#include "plan/plan.h"

/* The tensors behind the pointers of the arguments, borrowed AtenTensorHandles, for torch's product of panels; NULL for
 * the others. */
typedef struct {
  void *x;    /* contiguous [M, columns], any leading sizes: x, or dy of the input gradient */
  void *y;    /* the same of the result */
  void *bias; /* NULL without */
} bsh_torch_operands;

/* y = x W^T + bias, or dx = dy W, by a plan of BSH_LINEAR_panels. Any arguments. */
bsh_status bsh_cuda_panels(const bsh_linear_4bit_args *args, const bsh_plan *plan, const bsh_torch_operands *operands,
                           const bsh_cuda_context *context);

#endif
