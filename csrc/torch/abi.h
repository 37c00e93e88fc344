/* torch/abi.h - the functions of libtorch that bitshard calls, with prototypes of its own.
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
  X(AOTITorchError, aoti_torch_cpu_addmm_out,                                                                          \
    (AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat1, AtenTensorHandle mat2, double beta,           \
     double alpha))                                                                                                    \
  X(AOTITorchError, torch_parallel_for,                                                                                \
    (int64_t begin, int64_t end, int64_t grain_size, void (*body)(int64_t begin, int64_t end, void *context),          \
     void *context))                                                                                                   \
  X(void, aoti_torch_check, (bool condition, const char *function, const char *file, uint32_t line, const char *text))

/* X(name): torch's number of a device type or dtype, which the function aoti_torch_<name> gives. */
#define BSH_TORCH_NUMBERS(X)                                                                                           \
  X(device_type_cpu)                                                                                                   \
  X(device_type_cuda)                                                                                                  \
  X(dtype_float64)                                                                                                     \
  X(dtype_float32)                                                                                                     \
  X(dtype_float16)                                                                                                     \
  X(dtype_bfloat16)                                                                                                    \
  X(dtype_uint8)                                                                                                       \
  X(dtype_int8)                                                                                                        \
  X(dtype_int32)                                                                                                       \
  X(dtype_int64)

/* In libtorch_cuda; absent in CPU-only builds of torch. */
#define BSH_TORCH_CUDA_FUNCTIONS(X)                                                                                    \
  X(AOTITorchError, aoti_torch_get_current_cuda_stream, (int32_t device_index, void **stream))                         \
  X(AOTITorchError, aoti_torch_cuda_mm_out, (AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2))      \
  X(AOTITorchError, aoti_torch_cuda_addmm_out,                                                                         \
    (AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat1, AtenTensorHandle mat2, double beta,           \
     double alpha))                                                                                                    \
  X(AOTITorchError, aoti_torch_create_cuda_guard, (int32_t device_index, void **guard))                                \
  X(AOTITorchError, aoti_torch_delete_cuda_guard, (void *guard))

/* In libtorch_cuda and the cuBLAS it is linked to; without them torch's own product is called. A status of 0 is
 * success; void * stands for handles, descriptions and device addresses. */
#define BSH_CUBLAS_FUNCTIONS(X)                                                                                        \
  X(AOTITorchError, torch_get_current_cuda_blas_handle, (void **handle))                                               \
  X(int, cublasLtMatmulDescCreate, (void **operation, int compute_type, int scale_type))                               \
  X(int, cublasLtMatmulDescSetAttribute, (void *operation, int attribute, const void *value, size_t bytes))            \
  X(int, cublasLtMatmulDescDestroy, (void *operation))                                                                 \
  X(int, cublasLtMatrixLayoutCreate, (void **layout, int type, uint64_t rows, uint64_t columns, int64_t ld))           \
  X(int, cublasLtMatrixLayoutDestroy, (void *layout))                                                                  \
  X(int, cublasLtMatmulPreferenceCreate, (void **preference))                                                          \
  X(int, cublasLtMatmulPreferenceSetAttribute, (void *preference, int attribute, const void *value, size_t bytes))     \
  X(int, cublasLtMatmulPreferenceDestroy, (void *preference))                                                          \
  X(int, cublasLtMatmulAlgoGetHeuristic,                                                                               \
    (void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference, int asked, void *results,    \
     int *found))                                                                                                      \
  X(int, cublasLtMatmul,                                                                                               \
    (void *handle, void *operation, const void *alpha, const void *a, void *a_layout, const void *b, void *b_layout,   \
     const void *beta, const void *c, void *c_layout, void *d, void *d_layout, const void *algorithm, void *workspace, \
     size_t workspace_bytes, void *stream))

#define BSH_DECLARE_POINTER(result, name, parameters) result(*name) parameters;
#define BSH_DECLARE_NUMBER(name) int32_t name;
typedef struct {
  BSH_TORCH_CPU_FUNCTIONS(BSH_DECLARE_POINTER)
  BSH_TORCH_CUDA_FUNCTIONS(BSH_DECLARE_POINTER)
  BSH_CUBLAS_FUNCTIONS(BSH_DECLARE_POINTER)
  BSH_TORCH_NUMBERS(BSH_DECLARE_NUMBER)
  bool has_cuda;   /* libtorch_cuda is loaded and has every function of its list */
  bool has_cublas; /* and of cuBLAS' list */
} bsh_torch_api;
#undef BSH_DECLARE_POINTER
#undef BSH_DECLARE_NUMBER

extern bsh_torch_api bsh_torch;

/* Fills bsh_torch. NULL on success, else a text that says what is missing. */
const char *bsh_torch_load(void);

#endif
