/* cpu/features.h - what this CPU can do, and its operating system saves: read once from CPUID.
 *
 * Compilers have __builtin_cpu_supports for this, but not each one's runtime library fills the table behind it. */
#ifndef BSH_CPU_FEATURES_H
#define BSH_CPU_FEATURES_H

#include <stdbool.h>

typedef struct {
  bool avx2, fma, f16c;
  bool avx512f, avx512bw, avx512vl, avx512dq, avx512vbmi, avx512vnni, avx512bf16;
} bsh_cpu_features;

const bsh_cpu_features *bsh_cpu_has(void);

#endif
