/* cpu/avx2.c - the CPU kernels with AVX2, FMA and F16C. */
#include "cpu/isa/avx2.h"
#include "cpu/kernels.inc.h"

const bsh_cpu_kernels bsh_cpu_avx2 = {
    KERNELS_BY_LANES,
    .isa = "avx2",
    .linear_4bit = linear_by_groups,
};

const bsh_cpu_int8_kernels bsh_cpu_avx_vnni_int8 = {INT8_BY_LANES, .product = bsh_cpu_avx_vnni_product};
