/* plan/plan.h - how a product with a 4-bit weight is computed on a GPU: from its facts to launches. Pure: numbers in,
 * numbers out, no CUDA call, nothing allocated.
 *
 *   facts -> bsh_plan_linear_4bit -> plan -> gpu/linear.c launches it
 *              plan/plan.c           which kernel: what each takes, then what was measured
 *              plan/<kernel>.c  what that kernel takes, and how it is cut into thread blocks
 *              cuda/<kernel>.h  its sizes
 *
 * Whoever multiplies makes one plan, before anything is allocated, and does what it says. A further kernel is one more
 * plan/<kernel>.c, one entry of BSH_LINEAR_KERNELS and a line of choose() in plan/plan.c. */
#ifndef BSH_PLAN_H
#define BSH_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#include "core/cuda_kernel.h"
#include "core/kernels.h"
#include "core/status.h"
#include "cuda/fused.h"
#include "cuda/gemm_4bit_sm90_wide.h"
#include "plan/images.h"

/* X(name): every way to multiply, panels last. Panels: W dequantized into bounded scratch memory a panel at a time, and
 * the vendor's product of each. The others decode and multiply in one kernel. */
#define BSH_LINEAR_KERNELS(X) X(gemv_4bit) X(gemv_4bit_simt) X(gemm_4bit_sm90) X(gemm_4bit_sm90_wide) X(panels)
#define BSH_LINEAR_INDEX(name) BSH_LINEAR_##name,
typedef enum { BSH_LINEAR_KERNELS(BSH_LINEAR_INDEX) BSH_LINEAR_COUNT } bsh_linear_kernel;
#undef BSH_LINEAR_INDEX

/* Who multiplies panels. */
typedef enum {
  BSH_VENDOR_NONE,
  BSH_VENDOR_TORCH,  /* torch's product, with scratch memory of its own */
  BSH_VENDOR_CUBLAS, /* cuBLASLt, with what the plan leaves it behind the panel */
} bsh_vendor;

enum { BSH_CUBLAS_WORKSPACE = 16 << 20 }; /* bytes it can use: sums of a product cut along its terms */
enum { BSH_CUBLAS_BIAS_ALIGNMENT = 16 };  /* bytes */

/* What is known of a product before it is computed. x and y: of the input gradient dy and dx. */
typedef struct {
  int64_t M, N, K;
  int64_t blocksize;
  int64_t workspace_bytes; /* that a panel and the vendor's scratch memory, or the sums of shared tiles, may take */
  bsh_direction direction;
  bsh_dtype dtype;
  bsh_format format;
  bool nested;
  /* Bytes, powers of two up to 16, that addresses are multiples of: of all rows of x and of y, of packed, of codes, of
   * the bias (0: none). */
  int32_t x_alignment, y_alignment, packed_alignment, code_alignment, bias_alignment;
  int32_t sm, sms; /* the GPU: 10 * major + minor, multiprocessors */
  bsh_kernel_image image;
  bool tensor_maps; /* the driver makes them */
  bsh_vendor vendor;
  bsh_linear_kernel forced; /* or BSH_LINEAR_COUNT: the plan chooses */
} bsh_facts;

/* One kernel of a slice; NULL: none. */
typedef struct {
  bsh_cuda_kernel *kernel;
  bsh_cuda_launch_shape shape;
} bsh_planned_launch;

/* How a fused kernel multiplies `rows` rows of x: up to three launches, and their scratch memory. */
typedef struct {
  int64_t rows;
  bsh_planned_launch before, product, after;
  bsh_fused_cut cut;
  int32_t block_shift;               /* as in bsh_fused_args */
  int64_t scratch_bytes;             /* [x in the kernel's order][counters][sums] */
  int64_t counters_at, partial_at;   /* bytes */
  bool orders_x;                     /* `before` writes x to the scratch memory, and the kernel reads it there */
  int32_t tokens, x_units, counters; /* of `before`: rows and units that it writes, counters that it clears */
  bsh_gemm_wide_cut wide;            /* gemm_4bit_sm90_wide, in the place of cut */
} bsh_fused_slice;

typedef struct {
  bsh_linear_kernel kernel;
  bsh_vendor vendor;     /* whose product follows each panel; fused: BSH_VENDOR_NONE */
  int32_t y_alignment;   /* of the facts */
  int64_t scratch_bytes; /* at any one time */
  /* Fused: */
  int64_t n_slices; /* like `slice`, one after the other */
  bsh_fused_slice slice;
  bsh_fused_slice rest; /* the rows left over; rest.rows = 0: none */
  /* Panels: */
  int64_t panel_lines;      /* of W: rows forward, columns for the input gradient */
  int64_t panel_bytes;      /* a multiple of 256 */
  bsh_planned_launch panel; /* how a whole one is dequantized */
  int64_t vendor_bytes;     /* behind the panel */
} bsh_plan;

/* BSH_NO_KERNEL, saying why and for which numbers, where nothing computes this or the forced kernel cannot. M, N and K
 * are positive and M * N, N * K and M * K below 2^63. */
bsh_status bsh_plan_linear_4bit(const char *op, const bsh_facts *facts, bsh_plan *plan);

/* "gemv_4bit", ... */
const char *bsh_linear_kernel_name(bsh_linear_kernel kernel);

/* For tests and benchmarks: makes every later plan of a direction take the kernel of this name; NULL: ends that.
 * BSH_BAD_VALUE for a name that is none. bsh_forced_kernel: for bsh_facts.forced. bsh_read_forced_kernels: from
 * BITSHARD_LINEAR_4BIT and BITSHARD_LINEAR_4BIT_DGRAD in the environment. */
bsh_status bsh_force_kernel(bsh_direction direction, const char *name);
bsh_linear_kernel bsh_forced_kernel(bsh_direction direction);
bsh_status bsh_read_forced_kernels(void);

#endif
