/* cpu/state_search.h - bsh_cpu_encode_state as a table, for the vector forms of the optimizers.
 *
 * v = state / absmax falls into a cell by the upper 16 bits of its number: sign, exponent and 7 bits of mantissa. A
 * cell holds what the bits of v are added to: the sum has the code in bits 16 to 23, inverted where v has a sign, and
 * bits 24 to 31 are then all set, otherwise none. In a cell with a threshold the lower half of v carries into the code
 * from the threshold on (codes fall where v falls below zero, inverted ones rise). */
#ifndef BSH_CPU_STATE_SEARCH_H
#define BSH_CPU_STATE_SEARCH_H

#include <stdbool.h>
#include <stdint.h>

enum {
  BSH_SEARCH_LEAST = 103 << 7, /* cell of 2^-24; all |v| below have one code */
  BSH_SEARCH_MOST = 127 << 7,  /* cell of 1, the last: the reciprocal is within 2^-22, v within the cell */
  BSH_SEARCH_SIGN = 1 << 15,
  BSH_SEARCH_CELLS = BSH_SEARCH_SIGN + BSH_SEARCH_MOST + 1
};

typedef struct {
  float map[256];     /* the table's */
  float flushed[256]; /* the same without denormals */
  float least;        /* magnitude of the smallest of these, but for zeros */
  bool keep_sign;
  bool usable; /* every cell has one threshold at most */
  int users;   /* calls that read it now */
  int64_t last_use;
  uint32_t cells[BSH_SEARCH_CELLS];
} bsh_state_search;

/* The table of a map, shared by all threads; NULL where the map has none. Who got one gives it back. */
const bsh_state_search *bsh_state_search_get(const float *map, bool keep_sign);
void bsh_state_search_put(const bsh_state_search *search);

#endif
