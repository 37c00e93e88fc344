/* core/stack.h - one expert of a stack of packed weights. */
#ifndef BSH_CORE_STACK_H
#define BSH_CORE_STACK_H

#include "core/kernels.h"
#include "core/packed.h"

/* Second-level scales of each expert, whose n / experts elements are whole blocks. */
static inline int64_t bsh_expert_scales2(const int64_t n, const int64_t experts, const int64_t blocksize) {
  return bsh_block_count(n / experts / blocksize, BSH_NESTED_BLOCKSIZE);
}

/* Weight `expert` of a stack of `experts` weights, whose elements are whole blocks. */
static inline bsh_weight bsh_expert(const bsh_weight *const stack, const int64_t experts, const int64_t expert) {
  bsh_weight weight = *stack;
  weight.n = stack->n / experts;
  const int64_t blocks = expert * (weight.n / weight.blocksize);
  weight.packed += expert * (weight.n / 2);
  if (weight.scales.absmax != NULL) {
    weight.scales.absmax += blocks;
    return weight;
  }
  weight.scales.absmax_code += blocks;
  weight.scales.absmax2 += expert * bsh_expert_scales2(stack->n, experts, weight.blocksize);
  weight.scales.offset += expert;
  return weight;
}

#endif
