/* gpu/grouped.h - the launch of a grouped product of a stack of 4-bit weights. */
#ifndef BSH_GPU_GROUPED_H
#define BSH_GPU_GROUPED_H

#include "core/kernels.h"
#include "core/status.h"
#include "gpu/driver.h"
#include "plan/grouped.h"

/* y = x W_e^T + bias_e, or dx = dy W_e, by a kernel other than panels, on context->stream, whatever a plan would
 * choose. BSH_NO_KERNEL, saying why, where it cannot. */
bsh_status bsh_cuda_grouped_linear_4bit(const bsh_grouped_linear_4bit_args *args, bsh_grouped_kernel kernel,
                                        const bsh_cuda_context *context);

#endif
