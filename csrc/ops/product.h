/* ops/product.h - the products of all ops: y = x W^T + bias and dx = dy W, with packed weights of any kind. */
#ifndef BSH_OPS_PRODUCT_H
#define BSH_OPS_PRODUCT_H

#include "core/kernels.h"
#include "core/status.h"
#include "torch/tensor.h"

/* A product as an op reads it: the weight first, into args.weight and `packed`, and the bias. */
typedef struct {
  bsh_product_args args;   /* sizes, rows and direction; the weight; of a stack offs and E */
  bsh_tensor packed, bias; /* bias.numel = 0: none */
  bsh_tensor x;            /* bsh_read_input */
} bsh_product;

/* The activation [..., args.ldx] at stack[0], x or dy: its data, dtype and rows, and the bias's data. */
bsh_status bsh_read_input(bsh_call *call, const char *argument, bsh_product *product);

/* Makes the result, [..., args.ldy], the call's only output, and leaves the op. On CUDA the plan comes first: where
 * nobody would multiply, nothing was allocated. Where the plan of a stack has panels nothing is computed: the output is
 * [0, n, 0], and whoever called multiplies n experts at a time. */
bsh_status bsh_multiply(bsh_call *call, bsh_product *product);

#endif
