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
  X(gemv_4bit_simt)                                                                                                    \
  X(gemm_4bit_sm90)                                                                                                    \
  X(gemm_4bit_sm90_wide)                                                                                               \
  X(gemm_4bit_sm90_wide_grouped)                                                                                       \
  X(int8)                                                                                                              \
  X(gemv_int8)                                                                                                         \
  X(gemm_int8) X(gemm_int8_sm90) X(mixed_int8_sm90) X(dgrad_int8_sm90) X(gemv_int8_dgrad) X(optimizer) X(pairs)
#define BSH_FATBIN_INDEX(stem) BSH_FATBIN_##stem,
typedef enum { BSH_FATBINS(BSH_FATBIN_INDEX) BSH_FATBIN_COUNT } bsh_fatbin;
#undef BSH_FATBIN_INDEX

/* A kernel by name; the rest is filled on first launch. Objects are static:
 *   static bsh_cuda_kernel dequantize = {.fatbin = BSH_FATBIN_blockwise, .name = "dequantize_4bit_bf16"}; */
typedef struct {
  bsh_fatbin fatbin;
  const char *name;         /* extern "C" name in the .cu file */
  _Atomic(void *) handle;   /* CUkernel: valid in every context */
  _Atomic(uint64_t) raised; /* devices, as bits, on which the limit of shared memory was raised */
} bsh_cuda_kernel;

typedef struct {
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t cluster;     /* blocks per cluster along x; 0 or 1: none */
  int32_t shared_bytes; /* dynamic shared memory of a block, for a kernel the same in all launches on a device; above
                           48 KiB the limit is raised once */
  bool overlap;         /* programmatic dependent launch: the kernel must execute griddepcontrol.wait before it touches
                           anything an earlier kernel may have written, or may still read */
} bsh_cuda_launch_shape;

#endif
