/* gpu/linear.h - products with 4-bit weights on CUDA: facts of the arguments to a plan (plan/plan.h), a plan to
 * launches.
 */
#ifndef BSH_GPU_LINEAR_H
#define BSH_GPU_LINEAR_H

#include "core/kernels.h"
#include "core/status.h"
#include "gpu/driver.h"
#include "gpu/panels.h"
#include "plan/plan.h"

/* What is known of a product on a GPU of `sms` multiprocessors. */
bsh_facts bsh_cuda_facts(const bsh_linear_4bit_args *args, int32_t sm, int32_t sms, bsh_vendor vendor);

/* The plan of a product on a GPU of `sms` multiprocessors; `vendor` would multiply panels. y may be NULL: it will
 * then begin at a multiple of 16 bytes. */
bsh_status bsh_cuda_plan_linear_4bit(const char *op, const bsh_linear_4bit_args *args, int32_t sm, int32_t sms,
                                     bsh_vendor vendor, bsh_plan *plan);

/* y = x W^T + bias, or dx = dy W, as planned, on context->stream. BSH_BAD_VALUE where y lies at another multiple than
 * the plan was made for. */
bsh_status bsh_cuda_linear_4bit(const bsh_linear_4bit_args *args, const bsh_plan *plan,
                                const bsh_torch_operands *operands, const bsh_cuda_context *context);

#endif
