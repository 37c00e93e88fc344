/* core/cuda_kernel.h - a CUDA kernel by name, and the shape of a launch: what a plan names and the driver launches. */
#ifndef BSH_CORE_CUDA_KERNEL_H
#define BSH_CORE_CUDA_KERNEL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The fatbins: one per file of cuda/, symbol bsh_fatbin_<stem>. */
#define BSH_FATBINS(X)                                                                                                 \
  X(blockwise)                                                                                                         \
  X(calibration)                                                                                                       \
  X(gemv_4bit)                                                                                                         \
  X(gemv_4bit_grouped)                                                                                                 \
  X(gemv_4bit_short)                                                                                                   \
  X(gemv_4bit_grouped_short)                                                                                           \
  X(gemv_4bit_simt)                                                                                                    \
  X(gemm_4bit_sm75)                                                                                                    \
  X(gemm_4bit_sm75_grouped)                                                                                            \
  X(gemm_4bit_sm80)                                                                                                    \
  X(gemm_4bit_sm80_grouped)                                                                                            \
  X(gemm_4bit_sm80_short)                                                                                              \
  X(gemm_4bit_sm80_grouped_short)                                                                                      \
  X(gemm_4bit_sm90)                                                                                                    \
  X(gemm_4bit_sm90_short)                                                                                              \
  X(gemm_4bit_sm90_wide)                                                                                               \
  X(gemm_4bit_sm90_wide_grouped)                                                                                       \
  X(gemm_4bit_sm90_wide_short)                                                                                         \
  X(gemm_4bit_sm90_wide_grouped_short)                                                                                 \
  X(int8)                                                                                                              \
  X(gemv_int8)                                                                                                         \
  X(merge)                                                                                                             \
  X(merge_short)                                                                                                       \
  X(gemm_4bit_int8)                                                                                                    \
  X(gemm_int8) X(gemm_int8_sm90) X(mixed_int8_sm90) X(dgrad_int8_sm90) X(gemv_int8_dgrad) X(optimizer) X(pairs)
#define BSH_FATBIN_INDEX(stem) BSH_FATBIN_##stem,
typedef enum { BSH_FATBINS(BSH_FATBIN_INDEX) BSH_FATBIN_COUNT } bsh_fatbin;
#undef BSH_FATBIN_INDEX

/* A kernel by name; the rest is filled on first launch. Objects are static:
 *   static bsh_cuda_kernel dequantize = BSH_KERNEL(blockwise, "dequantize_4bit_bf16"); */
typedef struct {
  bsh_fatbin fatbin;
  const char *name;         /* extern "C" name in the .cu file */
  _Atomic(void *) handle;   /* CUkernel: valid in every context */
  _Atomic(uint64_t) raised; /* devices, as bits, on which the limit of shared memory was raised */
} bsh_cuda_kernel;
#define BSH_KERNEL(file, NAME) {.fatbin = BSH_FATBIN_##file, .name = NAME}
#define BSH_BY_DTYPE(file, prefix, suffix) /* indexed by bsh_dtype */                                                  \
  {BSH_KERNEL(file, prefix "f32" suffix), BSH_KERNEL(file, prefix "f16" suffix), BSH_KERNEL(file, prefix "bf16" suffix)}
enum { BSH_DTYPES = 3 };

typedef struct {
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t cluster;     /* blocks per cluster along x; 0 or 1: none */
  int32_t shared_bytes; /* dynamic shared memory of a block, for a kernel the same in all launches on a device; above
                           48 KiB the limit is raised once */
  bool overlap;         /* programmatic dependent launch: the kernel must execute griddepcontrol.wait before it touches
                           anything an earlier kernel may have written, or may still read */
} bsh_cuda_launch_shape;

/* Blocks of `threads` threads, in clusters, with overlap. */
static inline bsh_cuda_launch_shape bsh_overlapping(const int64_t blocks, const int64_t threads, const int64_t cluster,
                                                    const int32_t shared_bytes) {
  return (bsh_cuda_launch_shape){.grid = {(uint32_t)blocks, 1, 1},
                                 .block = {(uint32_t)threads, 1, 1},
                                 .cluster = (uint32_t)cluster,
                                 .shared_bytes = shared_bytes,
                                 .overlap = true};
}

#endif
