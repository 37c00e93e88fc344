/* cpu/isa/vectors.h - the vectors that the templates (cpu/<name>.inc.h) compute with, and what they do with them.
 *
 * An instruction set is one header of this folder. It defines LANES, the fp32 numbers in a vector, and REGISTERS, the
 * number of vector registers, includes this file, and defines the functions and types below. n: the first n lanes, n at
 * least 1; from LANES on all of them. The other lanes are not read (zero), or not written.
 *
 *   memory     v_load(x, dtype, i)  v_load_some(x, dtype, i, n)           x[i ...] as fp32
 *              v_store(out, dtype, i, v)  v_store_some(out, dtype, i, n, v)
 *              v_store_two(out, dtype, i, a, b)                           rounded; NaN as in core/numerics.h
 *              v_write_some(out, n, v)                                    fp32 as it is
 *              v_load_codes(codes)                                        LANES int8 as fp32
 *              i_load_bytes(bytes)                                        LANES uint8
 *              i_store_bytes(out, a)                                      the lowest byte of each lane
 *              w_store_bytes(out, a, b)                                   4 LANES words, none above 255
 *              i_store_nibbles(out, a)                                    a[32 / LANES], none above 15: two to a byte,
 *                                                                         the first of a pair in the high nibble
 *   numbers    v_set(number)  v_fma(a, b, c)  v_sqrt(a)  v_sum(a)
 *              v_flush(a)                   denormals as zero of the same sign
 *              v_sign(a)                    1, 0 or -1; 0 for a NaN
 *              v_round(dtype, a)            rounded to dtype and back; v_round_number(dtype, a): where a is no NaN
 *              v_hold(a)                    a in a register; the compiler no longer knows its value
 *              i_max(a, b)  i_reduce_max(a)  w_max(a, b)                  without sign; the largest lane
 *              i_upper_halves(a, b)         words: those of a, then those of b
 *   masks      v_above(a, b)  v_at_most(a, b)  v_equal(a, b)              a > b, a <= b, a == b: false for NaN
 *              v_choose(m, a, b)            a where m is set, else b
 *              i_count(n, m)                n + 1 where m is set
 *              m_any(m)  m_all()            whether any lane is set; all lanes set, which the compiler does not know
 *   tables     v_gather(table, at, all)  i_gather(table, at, all)         all: m_all(), once for a loop
 *              v_heap_entry(heap, level, node)                            heap[node], 2^level <= node < 2^(level + 1)
 *   4 bits     encoder  make_encoder(format)  encode(coder, format, x, inverse)      codes of LANES elements
 *              table_16bit  make_table(values, dtype)                     16 values, rounded, as words to look up
 *              table_f32  make_f32_table(values)                          the same of fp32, as they are
 *              decode32_16bit(packed, table, second, out, stream)         16 bytes -> 32 values of 16 bits
 *              decode32_f32(packed, table, second, out, stream)           16 bytes -> 32 values of fp32
 *                                                                         second: of the last 16, NULL: the same table
 *              end_stream()                 after results that bypass the cache
 *   64 codes   group_table  make_group_table(scaled, dtype)               16 values to look up, rounded here
 *              group_codes  load_group(packed)                            of 32 bytes
 *              decode_vector(codes, table, dtype, j)                      fp32 of the codes of vector j, j < 64 / LANES
 *              group_element(j, lane)       which of the 64 that lane has
 *              block_table  store_block_table(values, table)      16 rounded values, to look up codes of a block of 16
 *              join_tables(quarters, dtype, j)   the group_table of vector j, where each 16 codes have a block_table
 *              BF16_GROUPS                  whether that is faster with bf16 as a constant
 *              add_lane_sums(v, n, sums)    sums[i] += the sum of the lanes of v[i], i < n; n at most REGISTERS / 2
 *   int8       i_load_words(codes)          2 LANES int8 as int16
 *              i_multiply_words(sum, a, b)  sum + the products of neighbours
 *              i_reduce4(sums, out)         out[j] = the sum of the lanes of sums[j], j < 4
 *   MASKED_ENDS                             whether the end of a dot product is summed in lanes
 *
 * Where it knows a faster form of load_scales (cpu/decode.inc.h) or all_ordinary (cpu/groups.inc.h), it defines that,
 * and a macro of the same name. */
#ifndef BSH_CPU_ISA_VECTORS_H
#define BSH_CPU_ISA_VECTORS_H

#include "core/numerics.h"
#include "cpu/cpu.h"
#include "cpu/forms.h"

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t unsigneds __attribute__((vector_size(4 * LANES)));
typedef uint16_t words __attribute__((vector_size(4 * LANES)));

ALWAYS_INLINE floats v_add(const floats a, const floats b) { return a + b; }
ALWAYS_INLINE floats v_mul(const floats a, const floats b) { return a * b; }
ALWAYS_INLINE floats v_div(const floats a, const floats b) { return a / b; }
ALWAYS_INLINE floats v_abs(const floats a) { return (floats)((ints)a & 0x7FFFFFFF); }

/* As it is, at any address. */
ALWAYS_INLINE floats v_read(const void *const x) {
  floats v;
  memcpy(&v, x, sizeof v);
  return v;
}

ALWAYS_INLINE void v_write(float *const out, const floats v) { memcpy(out, &v, sizeof v); }

#endif
