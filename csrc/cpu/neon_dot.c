/* cpu/neon_dot.c - products of int8 codes with the dot products of Armv8.2: sdot adds four products of signed bytes to
 * an int32, without saturation. Every sum is right modulo 2^32, for any codes. */
#include "cpu/isa/neon.h"

#define INT8_OPERANDS
enum { WIDTH = 16, STEPS = 64, EXCESS = 0 };

ALWAYS_INLINE ints left_operand(const int8_t *const codes) { return (ints)v_read(codes); }
ALWAYS_INLINE ints right_operand(const int8_t *const codes) { return left_operand(codes); }
/* Not the intrinsic: no flag that allows it is one of both gcc and zig. */
ALWAYS_INLINE ints multiply(ints sum, const ints a, const ints b) {
  __asm__(".arch armv8.2-a+dotprod\n\tsdot %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(a), "w"(b));
  return sum;
}
#include "cpu/int8_product.inc.h"

void bsh_cpu_neon_dot_product(const bsh_product_int8_args *const args, const int64_t ld, void *const scratch) {
  product_by_tiles(args, ld, scratch);
}
