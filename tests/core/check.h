/* check.h - what the C tests share: a seeded generator, a thread pool of their own, exact-size buffers. */
#ifndef BSH_CHECK_H
#define BSH_CHECK_H

#include <inttypes.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern uint64_t check_seed; /* printed at the start; pass it as the first argument to repeat a run */

#define CHECK(condition, ...)                                                                                          \
  do {                                                                                                                 \
    if (condition) break;                                                                                              \
    fprintf(stderr, "%s:%d: %s failed (seed %" PRIu64 "): ", __FILE__, __LINE__, #condition, check_seed);              \
    fprintf(stderr, __VA_ARGS__);                                                                                      \
    fprintf(stderr, "\n");                                                                                             \
    exit(1);                                                                                                           \
  } while (0)

/* splitmix64 */
static inline uint64_t random_bits(uint64_t *const state) {
  uint64_t z = (*state += 0x9E3779B97F4A7C15u);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

static inline int64_t random_below(uint64_t *const state, const int64_t n) {
  return (int64_t)(random_bits(state) % (uint64_t)n);
}

/* In [-1, 1). */
static inline float random_unit(uint64_t *const state) {
  return (float)(int64_t)(random_bits(state) >> 40) * 0x1p-23f - 1.0f;
}

/* A buffer of exactly n bytes, so that AddressSanitizer sees the first byte beyond it. */
static inline void *buffer(const int64_t n_bytes) {
  void *const bytes = malloc(n_bytes > 0 ? (size_t)n_bytes : 1);
  CHECK(bytes != NULL, "no memory for %" PRId64 " bytes", n_bytes);
  memset(bytes, 0xA5, n_bytes > 0 ? (size_t)n_bytes : 1);
  return bytes;
}

static inline void check_same_bytes(const char *const what, const void *const a, const void *const b,
                                    const int64_t n_bytes) {
  const uint8_t *const left = a, *const right = b;
  for (int64_t i = 0; i < n_bytes; i++)
    CHECK(left[i] == right[i], "%s: byte %" PRId64 " of %" PRId64 " is %02x, expected %02x", what, i, n_bytes, left[i],
          right[i]);
}

#endif
