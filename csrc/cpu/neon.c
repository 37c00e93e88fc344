/* cpu/neon.c - the CPU kernels with NEON. */
#include "cpu/isa/neon.h"
#include "cpu/kernels.inc.h"

const bsh_cpu_kernels bsh_cpu_neon = {
    KERNELS_BY_LANES,
    .isa = "neon",
    .linear_4bit = linear_by_groups,
};

const bsh_cpu_int8_kernels bsh_cpu_neon_dot_int8 = {INT8_BY_LANES, .product = bsh_cpu_neon_dot_product};
const bsh_cpu_int8_kernels bsh_cpu_neon_i8mm_int8 = {INT8_BY_LANES, .product = bsh_cpu_neon_i8mm_product};
