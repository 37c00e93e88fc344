/* machine.h - a GPU as far as this project's kernels see one, to run them without a GPU.
 *
 * Each CUDA thread is a fiber with its own stack; one runs at a time and gives way only where it must wait: a barrier,
 * an exchange within its warp, a lock. The order in which threads go on is drawn from a seed, so that a missing barrier
 * has a chance to show. Copies that a GPU makes in the background (cp.async, bulk copies, wgmma) are made as late as
 * the program allows: a result that is read, or a source that is overwritten, before its wait is wrong here too. Every
 * access to memory is checked: inside what the launch was given, and aligned.
 *
 * Rounding is IEEE's with fused operations where PTX has them; rcp.approx is the H200's (csrc/core/numerics.h) and
 * sqrt.approx the rounded root. Products of matrices are summed in double and rounded once, which no GPU does: compare
 * them within a bound. */
#ifndef PTX_MACHINE_H
#define PTX_MACHINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "core/numerics.h"
#include "core/tensor_map.h"

enum {
  PTX_WARP = 32,
  PTX_BARRIERS = 16,
  PTX_DEPOSIT = 12, /* words that a lane brings to an exchange */
  PTX_COPIES = 512, /* pending copies of a thread */
  PTX_RANGES = 64,
  PTX_WGMMA = 64 /* pending products of a warpgroup */
};

typedef struct ptx_thread ptx_thread;
typedef struct ptx_cta ptx_cta;
typedef void (*ptx_kernel)(ptx_thread *t);
typedef struct {
  const char *name;
  ptx_kernel kernel;
} ptx_entry;

/* What a launch gets, and what it says afterwards. */
typedef struct {
  const char *kernel;
  const uint8_t *parameters;
  uint64_t grid[3], block[3]; /* x, y, z */
  uint64_t shared;            /* dynamic, bytes */
  uint64_t cluster;           /* CTAs, 1: none */
  uint64_t resident;          /* CTAs at work at a time */
  uint64_t seed;              /* 0: threads in order */
  uint64_t n_ranges;
  struct {
    uint64_t begin, end; /* addresses that kernels may touch */
  } ranges[PTX_RANGES];
  char error[512];
} ptx_run;

/* An exchange between lanes: two deposits, since one lane may come to the next while another reads. */
typedef struct {
  uint32_t arrived, generation;
  uint32_t deposits[2][PTX_WARP][PTX_DEPOSIT];
} ptx_exchange;

typedef struct {
  ptx_exchange by_lead[PTX_WARP]; /* of the lowest lane that takes part */
} ptx_warp;

typedef struct {
  uint32_t arrived, generation, votes;
  uint32_t all_before, votes_before;
} ptx_barrier;

typedef struct {
  uint8_t *to;
  const uint8_t *from;
  uint32_t size, taken, group;
} ptx_copy_of;

/* What wgmma multiplies: 16 of depth, of codes 32. */
typedef enum { PTX_F16, PTX_BF16, PTX_S8 } ptx_operand;

/* D += A B of one warpgroup: registers of 128 threads. */
typedef struct {
  uint32_t *d[128][128];
  uint32_t a[128][4];
  uint64_t a_tile, b; /* descriptors; a_tile 0: A is in `a` */
  uint32_t columns, keep, group;
  ptx_operand kind;
} ptx_product;

typedef struct {
  ptx_product *pending; /* PTX_WGMMA */
  uint32_t n, group;
  uint32_t arrived, generation;
} ptx_warpgroup;

/* A box of a matrix: `from` is the map, `to` and `barrier` are addresses in shared memory. */
typedef struct {
  const bsh_map_of *map;
  int32_t column, row;
} ptx_box;

typedef struct {
  uint8_t *to;
  const uint8_t *from;
  uint64_t *barrier;
  uint32_t size;
  ptx_box box; /* map NULL: `size` bytes in a row */
} ptx_bulk;

typedef struct {
  uint32_t arrived, generation, n_ctas;
} ptx_cluster;

struct ptx_cta {
  ptx_run *run;
  uint64_t id[3];
  uint32_t rank, live;
  uint32_t registers; /* that threads asked for by setmaxnreg */
  uint8_t *shared;
  uint64_t shared_size;
  ptx_warp *warps;
  ptx_warpgroup *groups;
  ptx_barrier barriers[PTX_BARRIERS];
  ptx_cluster *cluster;
  ptx_thread *threads;
};

struct ptx_thread {
  void *stack_pointer; /* while it does not run */
  uint8_t *stack;
  ptx_run *run;
  ptx_cta *cta;
  uint64_t tid[3];
  uint32_t index;          /* in the CTA */
  const uint32_t *waiting; /* goes on when this is not `for_change` any more */
  uint32_t for_change;
  bool done, spinning, waited; /* waited: for earlier kernels */
  ptx_copy_of *copies;         /* PTX_COPIES, apart: every round looks at all threads */
  uint32_t n_copies, copy_group;
};

/* A variable of the module, which kernels read. */
typedef struct {
  const uint8_t *begin;
  uint64_t size;
} ptx_table;

extern const ptx_entry ptx_entries[];
extern const ptx_table ptx_tables[];
extern const uint32_t ptx_static_shared;
extern const bool ptx_overlaps; /* the kernel waits for earlier ones itself */

/* ---- waiting and failing ---- */

void ptx_yield(ptx_thread *t);
_Noreturn void ptx_fail(ptx_thread *t, const char *what);
void ptx_wait(ptx_thread *t, const uint32_t *word, uint32_t old);
void ptx_registers(ptx_thread *t, uint32_t n); /* setmaxnreg, once a thread */
void ptx_spin(ptx_thread *t);                  /* reads what another one writes, and may read it again */

/* ---- memory ---- */

uint8_t *ptx_global(ptx_thread *t, uint64_t address, uint32_t size, bool write);
void ptx_prefetch(ptx_thread *t, uint64_t address);
uint8_t *ptx_shared(ptx_thread *t, uint64_t address, uint32_t size, bool write);
uint8_t *ptx_generic(ptx_thread *t, uint64_t address, uint32_t size, bool write);
static inline uint8_t *ptx_param(ptx_thread *t, uint64_t address, uint32_t size, bool write) {
  (void)t, (void)size, (void)write;
  return (uint8_t *)(uintptr_t)address;
}
#define ptx_local ptx_param
#define ptx_const ptx_param

static inline uint64_t ptx_shared_base(const ptx_thread *const t, const uint32_t place) {
  return ((uint64_t)t->cta->rank << 24) + place;
}
static inline uint64_t ptx_cvta_shared(const ptx_thread *const t, const uint64_t address) {
  return (uint64_t)(uintptr_t)t->cta->shared + (address & 0xFFFFFF);
}
static inline uint64_t ptx_cvta_to_shared(const ptx_thread *const t, const uint64_t address) {
  return ptx_shared_base(t, 0) + (address - (uint64_t)(uintptr_t)t->cta->shared);
}

#define PTX_GET(bits)                                                                                                  \
  static inline uint##bits##_t ptx_get_u##bits(const uint8_t *const from) {                                            \
    uint##bits##_t value;                                                                                              \
    memcpy(&value, from, sizeof value);                                                                                \
    return value;                                                                                                      \
  }                                                                                                                    \
  static inline int##bits##_t ptx_get_s##bits(const uint8_t *const from) {                                             \
    return (int##bits##_t)ptx_get_u##bits(from);                                                                       \
  }                                                                                                                    \
  static inline void ptx_put_u##bits(uint8_t *const to, const uint64_t value) { memcpy(to, &value, bits / 8); }
PTX_GET(8)
PTX_GET(16)
PTX_GET(32)
PTX_GET(64)

#define PTX_ATOM(operation, type, bits, joined)                                                                        \
  static inline uint##bits##_t ptx_atom_##operation##_##type(uint8_t *const at, const uint##bits##_t b) {              \
    const uint##bits##_t a = ptx_get_u##bits(at);                                                                      \
    ptx_put_u##bits(at, joined);                                                                                       \
    return a;                                                                                                          \
  }
PTX_ATOM(add, u32, 32, a + b)
PTX_ATOM(add, s32, 32, a + b)
PTX_ATOM(add, u64, 64, a + b)
PTX_ATOM(exch, b32, 32, b)
PTX_ATOM(max, u32, 32, a > b ? a : b)
PTX_ATOM(or, b32, 32, a | b)
PTX_ATOM(and, b32, 32, a &b)

/* ---- floats as bits ---- */

static inline float ptx_float(const uint32_t bits) { return bits_float(bits); }
static inline uint32_t ptx_bits(const float value) { return isnan(value) ? 0x7FFFFFFFu : float_bits(value); }
static inline float ptx_flushed(const uint32_t bits) { return flush_denormal(bits_float(bits)); }
static inline uint32_t ptx_flush(const float value) { return ptx_bits(flush_denormal(value)); }
static inline double ptx_double(const uint64_t bits) {
  double value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
static inline uint64_t ptx_bits64(const double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

#define PTX_FLOAT2(name, joined)                                                                                       \
  static inline uint32_t ptx_##name##_f32(const uint32_t x, const uint32_t y) {                                        \
    const float a = ptx_float(x), b = ptx_float(y);                                                                    \
    return ptx_bits(joined);                                                                                           \
  }                                                                                                                    \
  static inline uint32_t ptx_##name##_ftz_f32(const uint32_t x, const uint32_t y) {                                    \
    const float a = ptx_flushed(x), b = ptx_flushed(y);                                                                \
    return ptx_flush(joined);                                                                                          \
  }
PTX_FLOAT2(add, a + b)
PTX_FLOAT2(add_rn, a + b)
PTX_FLOAT2(sub, a - b)
PTX_FLOAT2(sub_rn, a - b)
PTX_FLOAT2(mul, a *b)
PTX_FLOAT2(mul_rn, a *b)
PTX_FLOAT2(div_rn, a / b)
PTX_FLOAT2(max, isnan(a) ? b : isnan(b) ? a : a > b || (a == b && !signbit(a)) ? a : b)
PTX_FLOAT2(min, isnan(a) ? b : isnan(b) ? a : a < b || (a == b && signbit(a)) ? a : b)
PTX_FLOAT2(max_NaN, isnan(a) || isnan(b) ? NAN : a > b || (a == b && !signbit(a)) ? a : b)

static inline uint32_t ptx_fma_rn_f32(const uint32_t a, const uint32_t b, const uint32_t c) {
  return ptx_bits(fmaf(ptx_float(a), ptx_float(b), ptx_float(c)));
}
static inline uint32_t ptx_fma_rn_ftz_f32(const uint32_t a, const uint32_t b, const uint32_t c) {
  return ptx_flush(fmaf(ptx_flushed(a), ptx_flushed(b), ptx_flushed(c)));
}
static inline uint32_t ptx_abs_f32(const uint32_t a) { return a & 0x7FFFFFFFu; }
static inline uint32_t ptx_neg_f32(const uint32_t a) { return a ^ 0x80000000u; }
static inline uint32_t ptx_rcp_approx_ftz_f32(const uint32_t a) { return ptx_flush(reciprocal(ptx_flushed(a))); }
static inline uint32_t ptx_sqrt_approx_ftz_f32(const uint32_t a) { return ptx_flush(sqrtf(ptx_flushed(a))); }
static inline uint32_t ptx_sqrt_rn_f32(const uint32_t a) { return ptx_bits(sqrtf(ptx_float(a))); }
static inline uint64_t ptx_add_f64(const uint64_t a, const uint64_t b) {
  return ptx_bits64(ptx_double(a) + ptx_double(b));
}
static inline uint64_t ptx_add_rn_f64(const uint64_t a, const uint64_t b) { return ptx_add_f64(a, b); }
static inline uint64_t ptx_mul_f64(const uint64_t a, const uint64_t b) {
  return ptx_bits64(ptx_double(a) * ptx_double(b));
}
static inline uint64_t ptx_mul_rn_f64(const uint64_t a, const uint64_t b) { return ptx_mul_f64(a, b); }
static inline uint32_t ptx_rcp_rn_f32(const uint32_t a) { return ptx_bits(1.0f / ptx_float(a)); }
static inline uint64_t ptx_rcp_rn_f64(const uint64_t a) { return ptx_bits64(1.0 / ptx_double(a)); }
static inline uint64_t ptx_fma_rn_f64(const uint64_t a, const uint64_t b, const uint64_t c) {
  return ptx_bits64(fma(ptx_double(a), ptx_double(b), ptx_double(c)));
}

/* ---- conversions ---- */

static inline uint32_t ptx_cvt_f32_f16(const uint16_t a) { return ptx_bits(f16_to_f32(a)); }
static inline uint32_t ptx_cvt_ftz_f32_f16(const uint16_t a) { return ptx_flush(f16_to_f32(a)); }
static inline uint32_t ptx_cvt_f32_bf16(const uint16_t a) { return ptx_bits(bf16_to_f32(a)); }
static inline uint16_t ptx_cvt_rn_f16_f32(const uint32_t a) { return f32_to_f16(ptx_float(a)); }
static inline uint16_t ptx_cvt_rn_bf16_f32(const uint32_t a) { return f32_to_bf16(ptx_float(a)); }
static inline uint32_t ptx_cvt_rn_f16x2_f32(const uint32_t high, const uint32_t low) {
  return (uint32_t)f32_to_f16(ptx_float(high)) << 16 | f32_to_f16(ptx_float(low));
}
static inline uint32_t ptx_cvt_rn_bf16x2_f32(const uint32_t high, const uint32_t low) {
  return (uint32_t)f32_to_bf16(ptx_float(high)) << 16 | f32_to_bf16(ptx_float(low));
}
static inline uint32_t ptx_cvt_rn_f32_s32(const uint32_t a) { return ptx_bits((float)(int32_t)a); }
static inline uint32_t ptx_cvt_rn_f32_s16(const uint16_t a) { return ptx_bits((float)(int16_t)a); }
static inline uint32_t ptx_cvt_rn_f32_s8(const uint16_t a) { return ptx_bits((float)(int8_t)a); }
/* To the nearest even, at the ends of int32 what they are; NaN is 0. */
static inline uint32_t ptx_cvt_rni_f32_f32(const uint32_t a) { return ptx_bits(nearbyintf(ptx_float(a))); }

/* To the number below, clamped; NaN is 0. */
static inline uint32_t ptx_cvt_rzi_u32_f32(const uint32_t a) {
  const float value = ptx_float(a);
  return !(value > 0.0f) ? 0 : value >= 0x1p32f ? UINT32_MAX : (uint32_t)value;
}
static inline uint32_t ptx_cvt_rni_s32_f32(const uint32_t a) {
  const float value = rintf(ptx_float(a));
  if (isnan(value)) return 0;
  if (value >= 0x1p31f) return INT32_MAX;
  return value < -0x1p31f ? (uint32_t)INT32_MIN : (uint32_t)(int32_t)value;
}
static inline uint32_t ptx_cvt_rn_f32_u32(const uint32_t a) { return ptx_bits((float)a); }
static inline uint32_t ptx_cvt_rn_f32_s64(const uint64_t a) { return ptx_bits((float)(int64_t)a); }
static inline uint32_t ptx_cvt_rn_f32_u16(const uint16_t a) { return ptx_bits((float)a); }
static inline uint64_t ptx_cvt_f64_f32(const uint32_t a) { return ptx_bits64((double)ptx_float(a)); }
static inline uint64_t ptx_cvt_rn_f64_s64(const uint64_t a) { return ptx_bits64((double)(int64_t)a); }
static inline uint32_t ptx_cvt_rn_f32_f64(const uint64_t a) { return ptx_bits((float)ptx_double(a)); }
static inline uint64_t ptx_cvt_s64_s32(const uint32_t a) { return (uint64_t)(int64_t)(int32_t)a; }
static inline uint64_t ptx_cvt_s64_s16(const uint16_t a) { return (uint64_t)(int64_t)(int16_t)a; }
static inline uint32_t ptx_cvt_s32_s16(const uint16_t a) { return (uint32_t)(int32_t)(int16_t)a; }
static inline uint32_t ptx_cvt_s32_s8(const uint16_t a) { return (uint32_t)(int32_t)(int8_t)a; }
static inline uint16_t ptx_cvt_s16_s8(const uint16_t a) { return (uint16_t)(int16_t)(int8_t)a; }
static inline uint64_t ptx_cvt_u64_u32(const uint32_t a) { return a; }
static inline uint64_t ptx_cvt_u64_u16(const uint16_t a) { return a; }
static inline uint32_t ptx_cvt_u32_u64(const uint64_t a) { return (uint32_t)a; }
static inline uint32_t ptx_cvt_u32_u16(const uint16_t a) { return a; }
static inline uint32_t ptx_cvt_u32_u8(const uint16_t a) { return a & 0xFF; }
static inline uint16_t ptx_cvt_u16_u32(const uint32_t a) { return (uint16_t)a; }
static inline uint16_t ptx_cvt_u16_u64(const uint64_t a) { return (uint16_t)a; }
static inline uint16_t ptx_cvt_u16_u8(const uint16_t a) { return a & 0xFF; }

/* ---- pairs of 16-bit floats, the first in the low half ---- */

#define PTX_HALF2(name, joined)                                                                                        \
  PTX_PAIR(name, bf16x2, bf16_to_f32, f32_to_bf16, joined)                                                             \
  PTX_PAIR(name, f16x2, f16_to_f32, f32_to_f16, joined)
#define PTX_PAIR(name, type, widen, narrow, joined)                                                                    \
  static inline uint32_t ptx_##name##_##type(const uint32_t x, const uint32_t y) {                                     \
    uint32_t out = 0;                                                                                                  \
    for (int i = 0; i < 32; i += 16) {                                                                                 \
      const float a = widen((uint16_t)(x >> i)), b = widen((uint16_t)(y >> i));                                        \
      out |= (uint32_t)narrow(joined) << i;                                                                            \
    }                                                                                                                  \
    return out;                                                                                                        \
  }
PTX_HALF2(max, isnan(a) ? b : isnan(b) ? a : a > b || (a == b && !signbit(a)) ? a : b)
PTX_HALF2(add, a + b)
PTX_HALF2(add_rn, a + b)
PTX_HALF2(sub, a - b)
PTX_HALF2(mul, a *b)
PTX_HALF2(mul_rn, a *b)
/* To fp32 so that a second rounding, to fewer bits, is as if it were the only one: what is lost makes the last bit
 * odd. */
static inline float ptx_round_to_odd(const double value) {
  const float near = (float)value;
  if ((double)near == value || isnan(near) || isinf(near) || (float_bits(near) & 1)) return near;
  return nextafterf(near, (double)near < value ? INFINITY : -INFINITY);
}
#define PTX_FMA_PAIR(type, widen, narrow)                                                                              \
  static inline uint32_t ptx_fma_rn_##type(const uint32_t x, const uint32_t y, const uint32_t z) {                     \
    uint32_t out = 0;                                                                                                  \
    for (int i = 0; i < 32; i += 16) {                                                                                 \
      const double a = widen((uint16_t)(x >> i)), b = widen((uint16_t)(y >> i)), c = widen((uint16_t)(z >> i));        \
      out |= (uint32_t)narrow(ptx_round_to_odd(fma(a, b, c))) << i;                                                    \
    }                                                                                                                  \
    return out;                                                                                                        \
  }
PTX_FMA_PAIR(bf16x2, bf16_to_f32, f32_to_bf16)
PTX_FMA_PAIR(f16x2, f16_to_f32, f32_to_f16)
static inline uint32_t ptx_abs_bf16x2(const uint32_t a) { return a & 0x7FFF7FFFu; }
static inline uint32_t ptx_abs_f16x2(const uint32_t a) { return a & 0x7FFF7FFFu; }
static inline uint32_t ptx_neg_bf16x2(const uint32_t a) { return a ^ 0x80008000u; }
static inline uint32_t ptx_neg_f16x2(const uint32_t a) { return a ^ 0x80008000u; }

/* ---- integers ---- */

#define PTX_INT2(name, type, bits, sign, joined)                                                                       \
  static inline uint##bits##_t ptx_##name##_##type(const uint##bits##_t x, const uint##bits##_t y) {                   \
    const sign##bits##_t a = (sign##bits##_t)x, b = (sign##bits##_t)y;                                                 \
    return (uint##bits##_t)(joined);                                                                                   \
  }
#define PTX_INTS(u, s, bits)                                                                                           \
  PTX_INT2(add, s, bits, uint, a + b)                                                                                  \
  PTX_INT2(add, u, bits, uint, a + b)                                                                                  \
  PTX_INT2(sub, s, bits, uint, a - b)                                                                                  \
  PTX_INT2(sub, u, bits, uint, a - b)                                                                                  \
  PTX_INT2(mul_lo, s, bits, uint, a *b)                                                                                \
  PTX_INT2(mul_lo, u, bits, uint, a *b)                                                                                \
  PTX_INT2(div, u, bits, uint, b == 0 ? (uint##bits##_t) - 1 : a / b)                                                  \
  PTX_INT2(div, s, bits, int, b == 0 ? -1 : a / b)                                                                     \
  PTX_INT2(rem, u, bits, uint, b == 0 ? a : a % b)                                                                     \
  PTX_INT2(rem, s, bits, int, b == 0 ? a : a % b)                                                                      \
  PTX_INT2(min, u, bits, uint, a < b ? a : b)                                                                          \
  PTX_INT2(max, u, bits, uint, a > b ? a : b)                                                                          \
  PTX_INT2(min, s, bits, int, a < b ? a : b)                                                                           \
  PTX_INT2(max, s, bits, int, a > b ? a : b)                                                                           \
  static inline uint##bits##_t ptx_neg_##s(const uint##bits##_t a) { return (uint##bits##_t)(0 - a); }                 \
  static inline uint##bits##_t ptx_abs_##s(const uint##bits##_t a) {                                                   \
    return (int##bits##_t)a < 0 ? (uint##bits##_t)(0 - a) : a;                                                         \
  }                                                                                                                    \
  static inline uint##bits##_t ptx_mad_lo_##s(const uint##bits##_t a, const uint##bits##_t b,                          \
                                              const uint##bits##_t c) {                                                \
    return (uint##bits##_t)(a * b + c);                                                                                \
  }                                                                                                                    \
  static inline uint##bits##_t ptx_mad_lo_##u(const uint##bits##_t a, const uint##bits##_t b,                          \
                                              const uint##bits##_t c) {                                                \
    return (uint##bits##_t)(a * b + c);                                                                                \
  }
PTX_INTS(u32, s32, 32)
PTX_INTS(u64, s64, 64)
PTX_INTS(u16, s16, 16)

#define PTX_BITS(bits)                                                                                                 \
  PTX_INT2(and, b##bits, bits, uint, a &b)                                                                             \
  PTX_INT2(or, b##bits, bits, uint, a | b)                                                                             \
  PTX_INT2(xor, b##bits, bits, uint, a ^ b)                                                                            \
  static inline uint##bits##_t ptx_not_b##bits(const uint##bits##_t a) { return (uint##bits##_t) ~a; }                 \
  static inline uint##bits##_t ptx_shl_b##bits(const uint##bits##_t a, const uint32_t n) {                             \
    return n >= bits ? 0 : (uint##bits##_t)(a << n);                                                                   \
  }                                                                                                                    \
  static inline uint##bits##_t ptx_shr_u##bits(const uint##bits##_t a, const uint32_t n) {                             \
    return n >= bits ? 0 : (uint##bits##_t)(a >> n);                                                                   \
  }                                                                                                                    \
  static inline uint##bits##_t ptx_shr_b##bits(const uint##bits##_t a, const uint32_t n) {                             \
    return ptx_shr_u##bits(a, n);                                                                                      \
  }                                                                                                                    \
  static inline uint##bits##_t ptx_shr_s##bits(const uint##bits##_t a, const uint32_t n) {                             \
    return (uint##bits##_t)((int##bits##_t)a >> (n >= bits ? bits - 1 : n));                                           \
  }
PTX_BITS(16)
PTX_BITS(32)
PTX_BITS(64)

static inline uint32_t ptx_and_pred(const uint32_t a, const uint32_t b) { return a & b; }
static inline uint32_t ptx_or_pred(const uint32_t a, const uint32_t b) { return a | b; }
static inline uint32_t ptx_xor_pred(const uint32_t a, const uint32_t b) { return a ^ b; }
static inline uint32_t ptx_not_pred(const uint32_t a) { return !a; }
static inline uint64_t ptx_mul_wide_u32(const uint32_t a, const uint32_t b) { return (uint64_t)a * b; }
static inline uint64_t ptx_mul_wide_s32(const uint32_t a, const uint32_t b) {
  return (uint64_t)((int64_t)(int32_t)a * (int32_t)b);
}
static inline uint32_t ptx_mul_wide_u16(const uint16_t a, const uint16_t b) { return (uint32_t)a * b; }
static inline uint32_t ptx_mul_wide_s16(const uint16_t a, const uint16_t b) {
  return (uint32_t)((int32_t)(int16_t)a * (int16_t)b);
}
static inline uint64_t ptx_mad_wide_u32(const uint32_t a, const uint32_t b, const uint64_t c) {
  return ptx_mul_wide_u32(a, b) + c;
}
static inline uint64_t ptx_mad_wide_s32(const uint32_t a, const uint32_t b, const uint64_t c) {
  return ptx_mul_wide_s32(a, b) + c;
}
static inline uint32_t ptx_mul_hi_u32(const uint32_t a, const uint32_t b) { return (uint32_t)((uint64_t)a * b >> 32); }
static inline uint32_t ptx_mul_hi_s32(const uint32_t a, const uint32_t b) {
  return (uint32_t)((int64_t)(int32_t)a * (int32_t)b >> 32);
}
static inline uint64_t ptx_mul_hi_u64(const uint64_t a, const uint64_t b) {
  return (uint64_t)((unsigned __int128)a * b >> 64);
}
static inline uint32_t ptx_clz_b32(const uint32_t a) { return a ? (uint32_t)__builtin_clz(a) : 32; }
static inline uint32_t ptx_bfind_shiftamt_u32(const uint32_t a) { return a ? (uint32_t)__builtin_clz(a) : ~0u; }
static inline uint32_t ptx_clz_b64(const uint64_t a) { return a ? (uint32_t)__builtin_clzll(a) : 64; }
static inline uint32_t ptx_popc_b32(const uint32_t a) { return (uint32_t)__builtin_popcount(a); }
static inline uint32_t ptx_popc_b64(const uint64_t a) { return (uint32_t)__builtin_popcountll(a); }
static inline uint32_t ptx_brev_b32(uint32_t a) {
  uint32_t out = 0;
  for (int i = 0; i < 32; i++, a >>= 1) out = out << 1 | (a & 1);
  return out;
}
static inline uint32_t ptx_field(const uint32_t n) { return n >= 32 ? ~0u : (1u << n) - 1; }
static inline uint32_t ptx_bfi_b32(const uint32_t a, const uint32_t b, const uint32_t at, const uint32_t n) {
  const uint32_t mask = (at & 255) >= 32 ? 0 : ptx_field(n & 255) << (at & 255);
  return (b & ~mask) | ((at & 255) >= 32 ? 0 : (a << (at & 255)) & mask);
}
static inline uint32_t ptx_bfe_u32(const uint32_t a, const uint32_t at, const uint32_t n) {
  return (at & 255) >= 32 ? 0 : (a >> (at & 255)) & ptx_field(n & 255);
}
static inline uint32_t ptx_lop3_b32(const uint32_t a, const uint32_t b, const uint32_t c, const uint32_t table) {
  uint32_t out = 0;
  for (uint32_t i = 0; i < 8; i++)
    if (table >> i & 1) out |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return out;
}
static inline uint32_t ptx_prmt_b32(const uint32_t a, const uint32_t b, const uint32_t selector) {
  const uint64_t bytes = (uint64_t)b << 32 | a;
  uint32_t out = 0;
  for (uint32_t i = 0; i < 4; i++) {
    const uint32_t one = selector >> 4 * i;
    const uint32_t byte = (uint32_t)(bytes >> 8 * (one & 7)) & 0xFF;
    out |= (one & 8 ? (byte & 0x80 ? 0xFFu : 0) : byte) << 8 * i;
  }
  return out;
}
static inline uint32_t ptx_shf_l_wrap_b32(const uint32_t low, const uint32_t high, const uint32_t n) {
  return (n & 31) == 0 ? high : high << (n & 31) | low >> (32 - (n & 31));
}
static inline uint32_t ptx_shf_r_wrap_b32(const uint32_t low, const uint32_t high, const uint32_t n) {
  return (n & 31) == 0 ? low : low >> (n & 31) | high << (32 - (n & 31));
}

/* ---- comparisons ---- */

#define PTX_COMPARE(type, bits, sign)                                                                                  \
  PTX_COMPARE1(eq, ==, type, bits, sign)                                                                               \
  PTX_COMPARE1(ne, !=, type, bits, sign)                                                                               \
  PTX_COMPARE1(lt, <, type, bits, sign)                                                                                \
  PTX_COMPARE1(le, <=, type, bits, sign)                                                                               \
  PTX_COMPARE1(gt, >, type, bits, sign)                                                                                \
  PTX_COMPARE1(ge, >=, type, bits, sign)
#define PTX_COMPARE1(name, operator, type, bits, sign)                                                                 \
  static inline uint32_t ptx_##name##_##type(const uint##bits##_t a, const uint##bits##_t b) {                         \
    return (sign##bits##_t)a operator(sign##bits##_t) b;                                                               \
  }
PTX_COMPARE(u16, 16, uint)
PTX_COMPARE(s16, 16, int)
PTX_COMPARE(b16, 16, uint)
PTX_COMPARE(u32, 32, uint)
PTX_COMPARE(s32, 32, int)
PTX_COMPARE(b32, 32, uint)
PTX_COMPARE(u64, 64, uint)
PTX_COMPARE(s64, 64, int)
PTX_COMPARE(b64, 64, uint)

#define PTX_COMPARE_FLOAT(name, operator)                                                                              \
  static inline uint32_t ptx_##name##_f32(const uint32_t a, const uint32_t b) {                                        \
    return ptx_float(a) operator ptx_float(b);                                                                         \
  }                                                                                                                    \
  static inline uint32_t ptx_##name##u_f32(const uint32_t a, const uint32_t b) {                                       \
    return isnan(ptx_float(a)) || isnan(ptx_float(b)) || ptx_float(a) operator ptx_float(b);                           \
  }                                                                                                                    \
  static inline uint32_t ptx_##name##_ftz_f32(const uint32_t a, const uint32_t b) {                                    \
    return ptx_flushed(a) operator ptx_flushed(b);                                                                     \
  }
PTX_COMPARE_FLOAT(eq, ==)
PTX_COMPARE_FLOAT(lt, <)
PTX_COMPARE_FLOAT(le, <=)
PTX_COMPARE_FLOAT(gt, >)
PTX_COMPARE_FLOAT(ge, >=)
static inline uint32_t ptx_neu_f32(const uint32_t a, const uint32_t b) { return !(ptx_float(a) == ptx_float(b)); }
static inline uint32_t ptx_ne_f32(const uint32_t a, const uint32_t b) {
  return ptx_float(a) < ptx_float(b) || ptx_float(a) > ptx_float(b);
}
static inline uint32_t ptx_nan_f32(const uint32_t a, const uint32_t b) {
  return isnan(ptx_float(a)) || isnan(ptx_float(b));
}
static inline uint32_t ptx_num_f32(const uint32_t a, const uint32_t b) { return !ptx_nan_f32(a, b); }

/* ---- between threads ---- */

enum { PTX_IDX, PTX_UP, PTX_DOWN, PTX_BFLY };

/* Lanes of `mask` come together. */
void ptx_meet(ptx_thread *t, uint32_t mask);
uint32_t ptx_shfl(ptx_thread *t, int way, uint32_t value, uint32_t b, uint32_t c, uint32_t mask, uint32_t *good);
uint32_t ptx_vote_any(ptx_thread *t, uint32_t value, uint32_t mask);
uint32_t ptx_vote_all(ptx_thread *t, uint32_t value, uint32_t mask);
uint32_t ptx_vote_ballot(ptx_thread *t, uint32_t value, uint32_t mask);
uint32_t ptx_redux_max_u32(ptx_thread *t, uint32_t value, uint32_t mask);
uint32_t ptx_redux_add_u32(ptx_thread *t, uint32_t value, uint32_t mask);
/* `threads` 0: all of the CTA. */
void ptx_bar_sync(ptx_thread *t, uint32_t barrier, uint32_t threads);
void ptx_bar_arrive(ptx_thread *t, uint32_t barrier, uint32_t threads);
uint32_t ptx_bar_red_and(ptx_thread *t, uint32_t barrier, uint32_t threads, uint32_t value);
uint32_t ptx_bar_red_or(ptx_thread *t, uint32_t barrier, uint32_t threads, uint32_t value);
uint32_t ptx_bar_red_popc(ptx_thread *t, uint32_t barrier, uint32_t threads, uint32_t value);
void ptx_cluster_arrive(ptx_thread *t);
void ptx_cluster_wait(ptx_thread *t);

/* in: A, B, C of this lane as PTX lists them; out: its 4 elements of D. */
void ptx_mma_m16n8k16_bf16(ptx_thread *t, const uint32_t *in, uint32_t *out);
void ptx_mma_m16n8k16_f16(ptx_thread *t, const uint32_t *in, uint32_t *out);
void ptx_mma_m16n8k8_f16(ptx_thread *t, const uint32_t *in, uint32_t *out);
void ptx_mma_m16n8k32_s8(ptx_thread *t, const uint32_t *in, uint32_t *out);
void ptx_mma_m8n8k16_s8(ptx_thread *t, const uint32_t *in, uint32_t *out);
void ptx_ldmatrix(ptx_thread *t, uint64_t address, uint32_t matrices, bool transposed, uint32_t *out);

/* The flag of a wgmma in machine code: ptxas does not add to sums that it knows to be 0. Where they are so in some
 * warps of a group only, these issue different wgmma. */
static inline uint32_t ptx_adds(const uint32_t keep, const bool constant) { return keep != 0 && !constant; }
/* D [64, columns] (+)= A [64, 16] B: `b` is the descriptor of a K-major tile in shared memory, `keep` 0 drops D. */
void ptx_wgmma_bf16(ptx_thread *t, uint32_t columns, uint32_t *const *d, const uint32_t *a, uint64_t b, uint32_t keep);
void ptx_wgmma_f16(ptx_thread *t, uint32_t columns, uint32_t *const *d, const uint32_t *a, uint64_t b, uint32_t keep);
/* The same with A in shared memory, too. Of s8: 32 of depth, int32 sums. */
void ptx_wgmma_tiles(ptx_thread *t, ptx_operand kind, uint32_t columns, uint32_t *const *d, uint64_t a, uint64_t b,
                     uint32_t keep);
void ptx_wgmma_commit(ptx_thread *t);
void ptx_wgmma_wait(ptx_thread *t, uint32_t pending);

/* ---- copies in the background ---- */

void ptx_copy(ptx_thread *t, uint64_t to, uint64_t from, uint32_t size, uint32_t taken);
void ptx_copy_commit(ptx_thread *t);
void ptx_copy_wait(ptx_thread *t, uint32_t pending);
void ptx_bulk_copy(ptx_thread *t, uint64_t to, uint64_t from, uint32_t size, uint64_t barrier);
/* To the blocks of the cluster in `blocks`, at the same place of each. A map is a bsh_map_of here. */
void ptx_tensor_copy(ptx_thread *t, uint64_t to, uint64_t map, uint32_t column, uint32_t row, uint64_t barrier,
                     uint32_t blocks);
static inline uint32_t ptx_mapa_shared_cluster_u32(const uint32_t address, const uint32_t rank) {
  return (address & 0xFFFFFF) | rank << 24;
}
void ptx_mbarrier_init(ptx_thread *t, uint64_t address, uint32_t arrivals);
void ptx_mbarrier_arrive(ptx_thread *t, uint64_t address, uint32_t bytes);
void ptx_mbarrier_expect(ptx_thread *t, uint64_t address, uint32_t bytes);
uint32_t ptx_mbarrier_wait(ptx_thread *t, uint64_t address, uint32_t parity);

#endif
