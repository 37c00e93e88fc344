/* gpu/fused.h - launches of the fused linear kernels. */
#ifndef BSH_GPU_FUSED_H
#define BSH_GPU_FUSED_H

#include "core/kernels.h"
#include "core/status.h"
#include "gpu/driver.h"
#include "plan/plan.h"

/* y = x W^T + bias by the kernel of a plan that is neither BSH_LINEAR_panels nor BSH_LINEAR_gemm_4bit_sm90_wide. */
bsh_status bsh_cuda_fused(const bsh_linear_4bit_args *args, const bsh_plan *plan, const bsh_cuda_context *context);

/* The arguments of a fused kernel for a slice, without scratch memory. */
bsh_fused_args bsh_cuda_fused_args(const bsh_linear_4bit_args *args, const bsh_fused_slice *slice);

#endif
