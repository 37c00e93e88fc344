/* plan/int8.h - how a product with an int8 weight is computed on a GPU. Pure, as plan/plan.h. */
#ifndef BSH_PLAN_INT8_H
#define BSH_PLAN_INT8_H

#include "cuda/int8.h"
#include "plan/plan.h"

/* X(name). gemv_int8: few rows of x as they are, any: the same for all sizes and dtypes, and the input gradient.
 * mixed_int8_sm90: more rows of x as they are. gemm_int8, gemm_int8_sm90: x in codes. dgrad_int8_sm90, gemv_int8_dgrad:
 * the input gradient in one pass over W, the latter of few rows. panels: of it, W dequantized a panel of columns at a
 * time, and the vendor's product of each. */
#define BSH_INT8_KERNELS(X)                                                                                            \
  X(gemv_int8) X(any) X(mixed_int8_sm90) X(gemm_int8) X(gemm_int8_sm90) X(dgrad_int8_sm90) X(gemv_int8_dgrad) X(panels)
#define BSH_INT8_INDEX(name) BSH_INT8_##name,
typedef enum { BSH_INT8_KERNELS(BSH_INT8_INDEX) BSH_INT8_COUNT } bsh_int8_kernel;
#undef BSH_INT8_INDEX

/* Rows of x up to which it is multiplied as it is, whatever kernel does; twice as many of 16 bits on sm_90 and sm_100.
 */
enum { BSH_INT8_FEW_ROWS = 16 };

typedef struct {
  int64_t M, N, K;
  int64_t workspace_bytes; /* that a panel and the vendor's scratch memory, or gathered outlier columns, may take */
  bool dgrad, outliers;    /* outliers: there is a threshold */
  bsh_dtype dtype;
  int32_t x_alignment, y_alignment, packed_alignment; /* as in bsh_facts */
  int32_t sm, sms;
  bsh_kernel_image image;
  bool tensor_maps, cublas; /* cublas: multiplies panels */
  bsh_int8_kernel forced;   /* or BSH_INT8_COUNT */
} bsh_int8_facts;

/* Scratch memory of a product, at bytes. */
typedef struct {
  int64_t codes, absmax, claims, shares, flags, count, list, x, w, partial, scales, bytes;
} bsh_int8_scratch;

typedef struct {
  bsh_int8_kernel kernel;
  bool codes;                        /* x is quantized before */
  bsh_planned_launch product, after; /* after: gemv_int8's second kernel, or NULL */
  bsh_int8_scratch at;
  bsh_fused_cut cut;      /* gemv_int8 */
  int32_t m_tiles, tiles; /* of the kernels on tensor cores for many rows: of rows of x, of all */
  int32_t form, splits;   /* of those of sm_90: which of their forms; blocks, or pairs, that share a tile's depth */
  int32_t capacity;       /* outlier columns that are gathered */
  bool finds;             /* gemm_int8_sm90 finds outlier columns itself: nothing is gathered */
  int64_t panel_columns, panel_bytes, vendor_bytes;
} bsh_int8_plan;

/* BSH_NO_KERNEL, saying why, where the forced kernel cannot, or sizes are too large. Sizes may be 0 as gpu/int8.h says.
 */
bsh_status bsh_plan_linear_int8(const char *op, const bsh_int8_facts *facts, bsh_int8_plan *plan);

/* The product of codes alone, to int32. */
bsh_status bsh_plan_product_int8(const char *op, int64_t M, int64_t N, int64_t K, int32_t arch, bsh_int8_plan *plan);

/* Of a form of gemm_int8_sm90. */
typedef struct {
  int32_t rows, columns, stages, cluster;
} bsh_int8_form;
extern const bsh_int8_form bsh_int8_forms[];
extern const int32_t bsh_mixed_int8_tokens[]; /* of a form of mixed_int8_sm90 and dgrad_int8_sm90 */

/* "gemv_int8", ...; and the kernel of a name, BSH_BAD_VALUE for one that is none. */
const char *bsh_int8_kernel_name(bsh_int8_kernel kernel);
bsh_status bsh_int8_kernel_of(const char *name, bsh_int8_kernel *kernel);

/* For tests and benchmarks: every later plan takes the kernel of this name, of products or of input gradients; NULL
 * ends that. BITSHARD_LINEAR_INT8 and BITSHARD_LINEAR_INT8_DGRAD in the environment do the same, read by
 * bsh_read_forced_int8. */
bsh_status bsh_force_int8_kernel(bool dgrad, const char *name);
bsh_int8_kernel bsh_forced_int8_kernel(bool dgrad);
bsh_status bsh_read_forced_int8(void);

#endif
