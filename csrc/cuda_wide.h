/* cuda_wide.h - launches gemm_4bit_sm90_wide as planned. */
#ifndef BSH_CUDA_WIDE_H
#define BSH_CUDA_WIDE_H

#include "cuda_driver.h"
#include "kernels.h"
#include "plan.h"
#include "status.h"

/* y = x W^T + bias, or dx = dy W with dy in x and dx in y. BSH_OUT_OF_MEMORY where there is no scratch memory. */
bsh_status bsh_cuda_wide(const bsh_linear_4bit_args *args, bsh_direction direction, const bsh_plan *plan,
                         const bsh_cuda_context *context);

#endif
