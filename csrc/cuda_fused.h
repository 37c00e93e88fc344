/* cuda_fused.h - launches of the fused linear kernels. */
#ifndef BSH_CUDA_FUSED_H
#define BSH_CUDA_FUSED_H

#include "cuda_driver.h"
#include "kernels.h"
#include "plan.h"
#include "status.h"

/* y = x W^T + bias by the kernel of a plan that is neither BSH_LINEAR_panels nor BSH_LINEAR_gemm_4bit_sm90_wide. */
bsh_status bsh_cuda_fused(const bsh_linear_4bit_args *args, const bsh_plan *plan, const bsh_cuda_context *context);

#endif
