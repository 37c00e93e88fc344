/* cpu/avx512.c - the CPU kernels with AVX-512 F, BW, VL, DQ and VBMI. */
#include "cpu/isa/avx512.h"
#include "cpu/kernels.inc.h"
#include "cpu/avx512_linear.inc.h"

const bsh_cpu_kernels bsh_cpu_avx512 = {
    KERNELS_BY_LANES,
    .isa = "avx512",
    .linear_4bit = linear_avx512,
};

const bsh_cpu_int8_kernels bsh_cpu_avx512_vnni_int8 = {INT8_BY_LANES, .product = bsh_cpu_avx512_vnni_product};
