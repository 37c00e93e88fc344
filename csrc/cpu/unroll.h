/* cpu/unroll.h - for loops over sums that must stay in registers. */
#ifndef BSH_CPU_UNROLL_H
#define BSH_CPU_UNROLL_H

#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 64")
#endif

#endif
