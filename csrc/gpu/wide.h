/* gpu/wide.h - launches gemm_4bit_sm90_wide as planned. */
#ifndef BSH_GPU_WIDE_H
#define BSH_GPU_WIDE_H

#include "core/kernels.h"
#include "core/status.h"
#include "gpu/driver.h"
#include "plan/plan.h"

/* y = x W^T + bias, or dx = dy W. BSH_OUT_OF_MEMORY where there is no scratch memory. */
bsh_status bsh_cuda_wide(const bsh_linear_4bit_args *args, const bsh_plan *plan, const bsh_cuda_context *context);

/* The same for all experts of a stack, in one launch. */
bsh_status bsh_cuda_wide_grouped(const bsh_grouped_linear_4bit_args *args, const bsh_fused_slice *slice,
                                 const bsh_cuda_context *context);

#endif
