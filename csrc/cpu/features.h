/* cpu/features.h - what this CPU can do, and its operating system saves: read once, from CPUID or from what Linux
 * passes to a process.
 *
 * Compilers have __builtin_cpu_supports for this, but not each one's runtime library fills the table behind it. */
#ifndef BSH_CPU_FEATURES_H
#define BSH_CPU_FEATURES_H

#include <stdbool.h>

/* The machine that is compiled for. Other sources ask these two. */
#if defined(__x86_64__)
#define BSH_X86_64 1
#elif defined(__aarch64__)
#define BSH_AARCH64 1
#endif

typedef struct {
#if BSH_AARCH64
  bool dotprod, i8mm; /* NEON itself is in every 64-bit CPU */
#endif
  bool avx2, fma, f16c, avxvnni;
  bool avx512f, avx512bw, avx512vl, avx512dq, avx512vbmi, avx512vnni, avx512bf16;
} bsh_cpu_features;

const bsh_cpu_features *bsh_cpu_has(void);

#endif
