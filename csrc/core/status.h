/* core/status.h - how inner code reports trouble.
 *
 * Inner functions return a bsh_status and leave the words in a thread-local buffer; only the edge turns them into an
 * exception: bsh_call_finish (torch/tensor.c) for an op, python/module.c for Python. A direct call (python/direct.c)
 * raises nothing and leaves the words to the op. Messages say which op, which argument, what was expected and what
 * came. */
#ifndef BSH_CORE_STATUS_H
#define BSH_CORE_STATUS_H

#include <stdint.h>

typedef enum {
  BSH_OK = 0,
  BSH_BAD_SHAPE,
  BSH_BAD_DTYPE,
  BSH_BAD_DEVICE,
  BSH_BAD_VALUE,
  BSH_NO_KERNEL,
  BSH_CUDA_ERROR,
  BSH_TORCH_ERROR,
  BSH_OUT_OF_MEMORY
} bsh_status;

/* Records a printf-style message for this thread and returns `code`. */
bsh_status bsh_fail(bsh_status code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Records in torch's words, by which others know it, that n_bytes could not be allocated for `what` of an op; device:
 * that of CUDA, or BSH_DEVICE_CPU. BSH_OUT_OF_MEMORY. */
enum { BSH_DEVICE_CPU = -1 };
bsh_status bsh_no_memory(const char *op, const char *what, int32_t device, double n_bytes);

/* The message of the last bsh_fail on this thread; never NULL. */
const char *bsh_status_message(void);

#define BSH_TRY(expression)                                                                                            \
  do {                                                                                                                 \
    const bsh_status bsh_try_status_ = (expression);                                                                   \
    if (bsh_try_status_ != BSH_OK) return bsh_try_status_;                                                             \
  } while (0)

#endif
