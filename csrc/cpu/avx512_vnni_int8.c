/* cpu/avx512_vnni_int8.c - products of int8 codes with AVX-512 VNNI: vpdpbusd adds four products of an unsigned and a
 * signed byte to an int32, without saturation. The unsigned one is a code of b plus 128: its bits with the sign
 * inverted. Every sum is right modulo 2^32, for any codes. */
#include "cpu/avx512.h"

#if !defined(__AVX512VNNI__)
#error "compile with -mavx512vnni too"
#endif

typedef __m512i sums_of_lanes;
typedef __m512i operand;
enum { WIDTH = 64, EXCESS = 128, EACH_ROWS = 6 };

static const int8_t zeros[WIDTH];

ALWAYS_INLINE operand left_operand(const int8_t *const codes) { return _mm512_loadu_si512(codes); }
ALWAYS_INLINE operand right_operand(const int8_t *const codes) {
  return _mm512_xor_si512(_mm512_loadu_si512(codes), _mm512_set1_epi8((char)EXCESS));
}
/* Not the intrinsic: gcc 12 copies the sum before and after it, and runs out of registers. */
ALWAYS_INLINE sums_of_lanes multiply(sums_of_lanes sum, const operand a, const operand b) {
  __asm__("vpdpbusd %1, %2, %0" : "+v"(sum) : "vm"(a), "v"(b));
  return sum;
}
#include "cpu/avx512_int8.h"
#define BSH_INT8_STEPS 64
#include "cpu/int8_product.inc.h"

void bsh_cpu_avx512_vnni_product(const bsh_product_int8_args *const args, const int64_t ld, void *const scratch) {
  product_by_tiles(args, ld, scratch);
}
