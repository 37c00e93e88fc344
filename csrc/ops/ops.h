/* ops/ops.h - registration of torch.ops.bitshard.*. */
#ifndef BSH_OPS_H
#define BSH_OPS_H

#include "torch/tensor.h"

/* Registers every op for CPU and, where torch has it, CUDA; once per process. NULL, or a text that says what failed. */
const char *bsh_ops_register(void);

/* The ops that python/direct.c calls too: arguments as in their schemas (ops/ops.c). */
bsh_status bsh_op_dequantize_4bit(bsh_call *call);
bsh_status bsh_op_linear_4bit(bsh_call *call);
bsh_status bsh_op_linear_4bit_dgrad(bsh_call *call);

/* ops/int8_ops.c. */
bsh_status bsh_op_quantize_int8(bsh_call *call);
bsh_status bsh_op_dequantize_int8(bsh_call *call);
bsh_status bsh_op_product_int8(bsh_call *call);
bsh_status bsh_op_scale_product_int8(bsh_call *call);
bsh_status bsh_op_linear_int8(bsh_call *call);
bsh_status bsh_op_linear_int8_dgrad(bsh_call *call);

/* ops/optimizer_ops.c. */
bsh_status bsh_op_optimizer_32bit(bsh_call *call);
bsh_status bsh_op_optimizer_8bit_blockwise(bsh_call *call);

#endif
