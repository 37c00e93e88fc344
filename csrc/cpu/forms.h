/* cpu/forms.h - how one function becomes several: inlined with constants, loops unrolled. */
#ifndef BSH_CPU_FORMS_H
#define BSH_CPU_FORMS_H

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* Before loops over sums that must stay in registers. */
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 64")
#endif

/* f(..., dtype) and f(..., format) with constants, so that a form is compiled for each. */
#define BY_DTYPE(f, dtype, ...)                                                                                        \
  ((dtype) == BSH_F32   ? f(__VA_ARGS__, BSH_F32)                                                                      \
   : (dtype) == BSH_F16 ? f(__VA_ARGS__, BSH_F16)                                                                      \
                        : f(__VA_ARGS__, BSH_BF16))
#define BY_FORMAT(f, format, ...) ((format) == BSH_NF4 ? f(__VA_ARGS__, BSH_NF4) : f(__VA_ARGS__, BSH_FP4))

#endif
