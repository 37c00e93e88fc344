/* cpu/product.c - which function computes a product on the CPU. */
#include "cpu/cpu.h"
#include "cpu/int8.h"

bsh_status bsh_cpu_product(const bsh_product_args *const args, const bsh_cpu_gemm *const gemm) {
  if (args->E > 0) return bsh_cpu_grouped_linear_4bit(args, gemm);
  if (args->weight.format != BSH_INT8) return bsh_cpu_linear_4bit(args, gemm);
  return args->direction == BSH_FORWARD ? bsh_cpu_linear_int8(args) : bsh_cpu_linear_int8_dgrad(args);
}
