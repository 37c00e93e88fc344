/* cpu/avx_vnni.c - products of int8 codes with AVX-VNNI, which CPUs without AVX-512 have: vpdpbusd as cpu/avx512_vnni.c
 * uses it, in vectors of AVX2. A compiler that does not know it (gcc 10 and older) makes AVX2's products here. */
#include "cpu/isa/avx2.h"

#if defined(__AVXVNNI__)
#define INT8_OPERANDS
enum { WIDTH = 32, STEPS = 64, EXCESS = 128 };

ALWAYS_INLINE ints left_operand(const int8_t *const codes) { return (ints)v_read(codes); }
ALWAYS_INLINE ints right_operand(const int8_t *const codes) { return left_operand(codes) ^ (int32_t)0x80808080; }
ALWAYS_INLINE ints multiply(const ints sum, const ints a, const ints b) {
  return (ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)b, (__m256i)a);
}
#endif
#include "cpu/int8_product.inc.h"

void bsh_cpu_avx_vnni_product(const bsh_product_int8_args *const args, const int64_t ld, void *const scratch) {
  product_by_tiles(args, ld, scratch);
}
