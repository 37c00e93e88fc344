/* plan/product.h - how a product with a packed weight is computed on a GPU: from its facts to launches. Pure: numbers
 * in, numbers out, no CUDA call, nothing allocated.
 *
 *   facts -> bsh_plan_product -> plan -> gpu/product.c launches it
 *              plan/choose.c    all kernels; the cheapest of those that take the product
 *              plan/<kernel>.c  what that kernel takes, what it costs, how a product is cut into its thread blocks
 *              plan/cards.c     what was measured on a card
 *              cuda/sizes/      its sizes
 *
 * A product is an operand (the weight), a direction and sizes. Whoever multiplies makes one plan, before anything is
 * allocated, and does what it says. A further kernel is one more plan/<kernel>.c and one row in plan/choose.c. */
#ifndef BSH_PLAN_PRODUCT_H
#define BSH_PLAN_PRODUCT_H

#include <stdbool.h>
#include <stdint.h>

#include "core/cuda_kernel.h"
#include "core/kernels.h"
#include "core/status.h"
#include "cuda/sizes/fused.h"
#include "cuda/sizes/gemm_4bit_sm80.h"
#include "cuda/sizes/gemm_4bit_sm90_wide.h"
#include "plan/images.h"

/* Who multiplies panels. */
typedef enum {
  BSH_VENDOR_NONE,
  BSH_VENDOR_TORCH,  /* torch's product, with scratch memory of its own */
  BSH_VENDOR_CUBLAS, /* cuBLASLt, with what the plan leaves it behind the panel */
} bsh_vendor;

enum { BSH_WORKSPACE_BYTES = 64 << 20 };  /* of bsh_facts.workspace_bytes, where nobody says otherwise */
enum { BSH_CUBLAS_WORKSPACE = 16 << 20 }; /* bytes it can use: sums of a product cut along its terms */
enum { BSH_CUBLAS_BIAS_ALIGNMENT = 16 };  /* bytes */

/* One scale for `blocksize` elements in a row, the same with scales that are coded themselves, or one for a row of W.
 */
typedef enum { BSH_SCALES_BLOCKS, BSH_SCALES_NESTED, BSH_SCALES_ROWS } bsh_scale_layout;

/* What a weight is made of. */
typedef struct {
  int32_t bits;     /* of a code: 4 or 8 */
  bsh_format table; /* what a code stands for */
  bsh_scale_layout scales;
  int64_t blocksize; /* of BSH_SCALES_BLOCKS and BSH_SCALES_NESTED */
} bsh_operand;

/* Ops have operands of one kind. */
typedef enum { BSH_OF_4BIT, BSH_OF_STACK, BSH_OF_INT8, BSH_OPERANDS } bsh_operand_kind;

typedef struct bsh_kernel bsh_kernel; /* plan/kernel.h */

/* What is known of a product before it is computed. x and y: of the input gradient dy and dx. */
typedef struct {
  bsh_operand w;
  int64_t M, N, K;
  int64_t E;               /* weights [N, K] of a stack, M: rows of all; 0: one weight */
  int64_t workspace_bytes; /* for a panel and the vendor's scratch memory, sums of shared tiles, or outlier columns */
  bsh_direction direction;
  bsh_dtype dtype;
  bool threshold; /* outlier columns of x are multiplied as they are */
  /* Bytes, powers of two up to 16, that addresses are multiples of: of all rows of x and of y, of packed (of a stack,
   * and of codes of 8 bits each weight or row), of nested scales' codes, of the bias (0: none). */
  int32_t x_alignment, y_alignment, packed_alignment, code_alignment, bias_alignment;
  int32_t sm, sms; /* the GPU: 10 * major + minor, multiprocessors */
  bsh_kernel_image image;
  bool tensor_maps; /* the driver makes them */
  bsh_vendor vendor;
  const bsh_kernel *forced; /* NULL: the plan chooses */
} bsh_facts;

/* What a kernel's parameters are, and so which function of gpu/ launches it. */
typedef enum {
  BSH_LAUNCH_FUSED,      /* bsh_fused_args */
  BSH_LAUNCH_STACK,      /* bsh_grouped_gemv_args */
  BSH_LAUNCH_WIDE,       /* bsh_gemm_wide_args, of a weight or a stack */
  BSH_LAUNCH_SM80,       /* bsh_gemm_sm80_args */
  BSH_LAUNCH_SM75,       /* the same, for stages of gemm_4bit_sm75 */
  BSH_LAUNCH_ROWS_INT8,  /* bsh_int8_any_args */
  BSH_LAUNCH_CODES_INT8, /* bsh_int8_gemm_args, after x was coded */
  BSH_LAUNCH_MIXED_INT8, /* bsh_int8_mixed_args */
  BSH_LAUNCH_DGRAD_INT8, /* bsh_int8_gemv_dgrad_args */
  BSH_LAUNCH_PANELS,     /* no kernel of ours multiplies */
} bsh_launch;

/* One kernel of a slice; NULL: none. */
typedef struct {
  bsh_cuda_kernel *kernel;
  bsh_cuda_launch_shape shape;
} bsh_planned_launch;

/* Of BSH_LAUNCH_CODES_INT8, BSH_LAUNCH_MIXED_INT8 and BSH_LAUNCH_DGRAD_INT8. */
typedef struct {
  bool codes;             /* x is quantized before */
  int32_t m_tiles, tiles; /* of rows of x, of all */
  int32_t splits;         /* blocks, or pairs, that share a tile's depth */
  int32_t rows, columns;  /* of a box of x, or of its codes; of W */
  int32_t capacity;       /* outlier columns that are gathered */
  bool finds;             /* the kernel finds outlier columns itself: nothing is gathered */
  bool maps;              /* operands come by tensor maps */
  /* Scratch memory, at bytes: */
  int64_t codes_at, absmax_at, claims_at, shares_at, flags_at, count_at, list_at, x_at, w_at, scales_at;
} bsh_int8_cut;

/* How a kernel multiplies `rows` rows of x: up to three launches, and their scratch memory. */
typedef struct {
  int64_t rows;
  bsh_planned_launch before, product, after;
  int64_t scratch_bytes;             /* fused: [x in the kernel's order][counters][sums] */
  int64_t counters_at, partial_at;   /* bytes */
  bsh_fused_cut cut;                 /* BSH_LAUNCH_FUSED, BSH_LAUNCH_STACK */
  int32_t block_shift;               /* as in bsh_fused_args, or in bsh_gemm_sm80_args */
  int32_t reads_together;            /* bsh_gemm_wide_args.code_pairs, bsh_int8_gemm_args.fast */
  bool stores_together;              /* store_fours of these, bsh_int8_mixed_args.store_pairs, store_eights */
  bool orders_x;                     /* `before` writes x to the scratch memory, and the kernel reads it there */
  int32_t tokens, x_units, counters; /* of `before`: rows and units that it writes, counters that it clears */
  bsh_gemm_wide_cut wide;            /* BSH_LAUNCH_WIDE */
  bsh_gemm_sm80_cut sm80;            /* BSH_LAUNCH_SM80, BSH_LAUNCH_SM75 */
  bsh_int8_cut int8;
} bsh_plan_slice;

typedef struct {
  const bsh_kernel *kernel;
  bsh_launch launch;
  bsh_vendor vendor;     /* whose product follows each panel; else BSH_VENDOR_NONE */
  int32_t y_alignment;   /* of the facts */
  int64_t scratch_bytes; /* at any one time */
  /* But for panels: */
  int64_t n_slices; /* like `slice`, one after the other */
  bsh_plan_slice slice;
  bsh_plan_slice rest; /* the rows left over; rest.rows = 0: none */
  /* Panels: */
  int64_t panel_lines;      /* of W: rows forward, columns for the input gradient; of a stack experts */
  int64_t panel_bytes;      /* a multiple of 256 */
  bsh_planned_launch panel; /* how a whole one of a 4-bit weight is dequantized */
  int64_t vendor_bytes;     /* behind the panel */
} bsh_plan;

/* BSH_NO_KERNEL, saying why and for which numbers, where nothing computes this or the forced kernel cannot. M is
 * positive, N and K are too but for int8 weights, and M * N, N * K and M * K are below 2^63. */
bsh_status bsh_plan_product(const char *op, const bsh_facts *facts, bsh_plan *plan);

static inline bsh_operand_kind bsh_kind_of(const bsh_facts *const facts) {
  if (facts->w.bits == 8) return BSH_OF_INT8;
  return facts->E > 0 ? BSH_OF_STACK : BSH_OF_4BIT;
}

/* The product of int8 codes alone, to int32 [M, N]: a slice whose kernel takes bsh_int8_gemm_args. alignment: bytes, of
 * all rows of codes. */
bsh_status bsh_plan_product_int8(const char *op, int64_t M, int64_t N, int64_t K, int32_t alignment, int32_t arch,
                                 bsh_plan_slice *slice);

/* "linear_4bit", "grouped_linear_4bit_dgrad", ...; "gemv_4bit", ... */
const char *bsh_op_name(bsh_operand_kind kind, bsh_direction direction);
const char *bsh_kernel_name(const bsh_kernel *kernel);
/* Estimated nanoseconds of a product that it does not refuse; below 100, or infinite, where there is no estimate. */
double bsh_kernel_cost(const bsh_kernel *kernel, const bsh_facts *facts);

/* The kernel of this name that takes the operands of an op ("linear_4bit", "grouped_linear_4bit_dgrad", ...), whatever
 * the op's direction. BSH_BAD_VALUE for a name that is none. */
bsh_status bsh_kernel_named(const char *op, const char *name, const bsh_kernel **kernel);

/* For tests and benchmarks: makes every later plan of an op take the kernel of this name; NULL: ends that.
 * BSH_BAD_VALUE for an op or a name that is none. bsh_forced_kernel: for bsh_facts.forced. bsh_read_forced_kernels:
 * from BITSHARD_LINEAR_4BIT, BITSHARD_LINEAR_4BIT_DGRAD and so on in the environment. */
bsh_status bsh_force_kernel(const char *op, const char *name);
const bsh_kernel *bsh_forced_kernel(bsh_operand_kind kind, bsh_direction direction);
bsh_status bsh_read_forced_kernels(void);

#endif
