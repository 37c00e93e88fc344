/* torch_abi.h - the functions of libtorch that bitshard calls, with prototypes of its own.
 *
 * torch's headers do not compile as C and are not needed: every function below is exported with C linkage. They are
 * looked up by name in the libtorch that Python has already loaded, so one binary serves CPU-only and CUDA builds of
 * torch >= 2.10 (torch_parallel_for sets that floor). An AOTITorchError of 0 is success. */
#ifndef BSH_TORCH_ABI_H
#define BSH_TORCH_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct AtenTensorOpaque *AtenTensorHandle;
typedef struct TorchLibraryOpaque *TorchLibraryHandle;
typedef int32_t AOTITorchError;
typedef uint64_t StableIValue; /* Tensor: handle; int: int64; float: double bits; bool: low byte; ScalarType: int32 */
typedef void (*bsh_boxed_kernel)(StableIValue *stack, uint64_t n_arguments, uint64_t n_outputs);

/* X(return type, name, (parameters)): in libtorch_cpu, all required. */
#define BSH_TORCH_CPU_FUNCTIONS(X)                                                                                     \
  X(AOTITorchError, aoti_torch_library_init_fragment,                                                                  \
    (const char *ns, const char *file, uint32_t line, TorchLibraryHandle *library))                                    \
  X(AOTITorchError, aoti_torch_library_init_impl,                                                                      \
    (const char *ns, const char *key, const char *file, uint32_t line, TorchLibraryHandle *library))                   \
  X(AOTITorchError, aoti_torch_library_def, (TorchLibraryHandle library, const char *schema))                          \
  X(AOTITorchError, aoti_torch_library_impl, (TorchLibraryHandle library, const char *name, bsh_boxed_kernel kernel))  \
  X(AOTITorchError, aoti_torch_get_data_ptr, (AtenTensorHandle tensor, void **data))                                   \
  X(AOTITorchError, aoti_torch_get_numel, (AtenTensorHandle tensor, int64_t *numel))                                   \
  X(AOTITorchError, aoti_torch_get_dim, (AtenTensorHandle tensor, int64_t *dim))                                       \
  X(AOTITorchError, aoti_torch_get_sizes, (AtenTensorHandle tensor, int64_t **borrowed))                               \
  X(AOTITorchError, aoti_torch_get_dtype, (AtenTensorHandle tensor, int32_t *dtype))                                   \
  X(AOTITorchError, aoti_torch_get_device_type, (AtenTensorHandle tensor, int32_t *device_type))                       \
  X(AOTITorchError, aoti_torch_get_device_index, (AtenTensorHandle tensor, int32_t *device_index))                     \
  X(AOTITorchError, aoti_torch_get_storage_size, (AtenTensorHandle tensor, int64_t *bytes))                            \
  X(AOTITorchError, aoti_torch_get_storage_offset, (AtenTensorHandle tensor, int64_t *elements))                       \
  X(AOTITorchError, aoti_torch_is_contiguous, (AtenTensorHandle tensor, bool *contiguous))                             \
  X(AOTITorchError, aoti_torch_empty_strided,                                                                          \
    (int64_t dim, const int64_t *sizes, const int64_t *strides, int32_t dtype, int32_t device_type,                    \
     int32_t device_index, AtenTensorHandle *tensor))                                                                  \
  X(AOTITorchError, aoti_torch_create_tensor_from_blob,                                                                \
    (void *data, int64_t dim, const int64_t *sizes, const int64_t *strides, int64_t offset, int32_t dtype,             \
     int32_t device_type, int32_t device_index, AtenTensorHandle *tensor))                                             \
  X(AOTITorchError, aoti_torch__reinterpret_tensor,                                                                    \
    (AtenTensorHandle self, int64_t dim, const int64_t *sizes, const int64_t *strides, int64_t offset_increment,       \
     AtenTensorHandle *tensor))                                                                                        \
  X(AOTITorchError, aoti_torch_copy_, (AtenTensorHandle self, AtenTensorHandle source, int32_t non_blocking))          \
  X(AOTITorchError, aoti_torch_zero_, (AtenTensorHandle self))                                                         \
  X(AOTITorchError, aoti_torch_delete_tensor_object, (AtenTensorHandle tensor))                                        \
  X(AOTITorchError, aoti_torch_cpu_mm_out, (AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2))       \
  X(AOTITorchError, torch_parallel_for,                                                                                \
    (int64_t begin, int64_t end, int64_t grain_size, void (*body)(int64_t begin, int64_t end, void *context),          \
     void *context))                                                                                                   \
  X(void, aoti_torch_check, (bool condition, const char *function, const char *file, uint32_t line, const char *text)) \
  X(int32_t, aoti_torch_device_type_cpu, (void))                                                                       \
  X(int32_t, aoti_torch_device_type_cuda, (void))                                                                      \
  X(int32_t, aoti_torch_dtype_float64, (void))                                                                         \
  X(int32_t, aoti_torch_dtype_float32, (void))                                                                         \
  X(int32_t, aoti_torch_dtype_float16, (void))                                                                         \
  X(int32_t, aoti_torch_dtype_bfloat16, (void))                                                                        \
  X(int32_t, aoti_torch_dtype_uint8, (void))                                                                           \
  X(int32_t, aoti_torch_dtype_int8, (void))                                                                            \
  X(int32_t, aoti_torch_dtype_int64, (void))

/* In libtorch_cuda; absent in CPU-only builds of torch. */
#define BSH_TORCH_CUDA_FUNCTIONS(X)                                                                                    \
  X(AOTITorchError, aoti_torch_get_current_cuda_stream, (int32_t device_index, void **stream))                         \
  X(AOTITorchError, aoti_torch_cuda_mm_out, (AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2))      \
  X(AOTITorchError, aoti_torch_cuda_addmm_out,                                                                         \
    (AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat1, AtenTensorHandle mat2, double beta,           \
     double alpha))                                                                                                    \
  X(AOTITorchError, aoti_torch_create_cuda_guard, (int32_t device_index, void **guard))                                \
  X(AOTITorchError, aoti_torch_delete_cuda_guard, (void *guard))

#define BSH_DECLARE_POINTER(result, name, parameters) result(*name) parameters;
typedef struct {
  BSH_TORCH_CPU_FUNCTIONS(BSH_DECLARE_POINTER)
  BSH_TORCH_CUDA_FUNCTIONS(BSH_DECLARE_POINTER)
  bool has_cuda; /* libtorch_cuda is loaded and has every function above */
} bsh_torch_api;
#undef BSH_DECLARE_POINTER

extern bsh_torch_api bsh_torch;

/* Fills bsh_torch. NULL on success, else a text that says what is missing. */
const char *bsh_torch_load(void);

#endif
