/* gpu/cublas.c - see gpu/cublas.h. */
#include "gpu/cublas.h"

#include <pthread.h>
#include <string.h>

#include "plan/product.h"
#include "torch/abi.h"

/* Values of cublasLt.h and library_types.h. */
enum { OPERATION_TRANSPOSE = 1, TYPE_F32 = 0, TYPE_F16 = 2, TYPE_BF16 = 14, COMPUTE_F32 = 68 };
enum { DESC_TRANSPOSE_A = 3, DESC_TRANSPOSE_B = 4, DESC_EPILOGUE = 7, DESC_BIAS = 8, EPILOGUE_BIAS = 4 };
enum { PREFERENCE_WORKSPACE = 1, PREFERENCE_ALIGNMENT_A = 5, MATRICES = 4 };
enum { MAX_DEVICES = 64, PLANS = 256, MAX_ALIGNMENT = 256 };

typedef struct {
  uint64_t words[8];
} algorithm;

/* cublasLtMatmulHeuristicResult_t */
typedef struct {
  algorithm algorithm;
  size_t workspace_bytes;
  int status;
  float waves;
  int reserved[4];
} heuristic;

/* One product as cuBLAS sees it. It stores by columns, so its matrices are the transposes: c^T = b^T a^T. Factors of
 * the product and of c have no part in the choice of an algorithm. */
typedef struct {
  int64_t device, dtype, bias;
  int64_t transpose_b; /* b^T is stored by rows */
  int64_t transpose_a; /* a^T is */
  int64_t m, n, k;     /* c^T [m, n], k terms */
  int64_t ld_b, ld_a, ld_c;
  int64_t alignment; /* bytes, of all pointers and columns */
  int64_t workspace; /* bytes */
} product;

/* Algorithms by a hash of their product, the newest of a slot. */
static struct {
  product product;
  algorithm algorithm;
} plans[PLANS];
static void *handles[MAX_DEVICES]; /* torch's of the first thread; cuBLASLt takes them from any */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void *first(const bsh_torch_matrix *const matrix) {
  return (char *)(uintptr_t)matrix->data + 2 * matrix->offset;
}

/* A matrix of one row or column can be both; its strides then say how it lies. */
static bool by_columns(const bsh_torch_matrix *const matrix) {
  return matrix->row_stride == 1 && matrix->column_stride >= matrix->rows;
}

static product product_of(const bsh_dtype dtype, const bsh_torch_matrix *const c, const bsh_torch_matrix *const a,
                          const bsh_torch_matrix *const b) {
  product p = {.dtype = dtype, .transpose_b = by_columns(b), .transpose_a = by_columns(a)};
  p.m = c->columns, p.n = c->rows, p.k = a->columns;
  p.ld_b = p.transpose_b ? b->column_stride : b->row_stride;
  p.ld_a = p.transpose_a ? a->column_stride : a->row_stride, p.ld_c = c->row_stride;
  const uintptr_t bits = (uintptr_t)first(a) | (uintptr_t)first(b) | (uintptr_t)first(c) |
                         (uintptr_t)(2 * (p.ld_a | p.ld_b | p.ld_c)) | MAX_ALIGNMENT;
  p.alignment = (int64_t)(bits & -bits);
  return p;
}

static unsigned slot_of(const product *const p) {
  uint64_t words[sizeof *p / 8], hash = 0;
  memcpy(words, p, sizeof *p);
  for (size_t i = 0; i < sizeof *p / 8; i++) hash = (hash ^ words[i]) * UINT64_C(0x9E3779B97F4A7C15) ^ hash >> 29;
  return (unsigned)(hash >> 32) % PLANS;
}

/* cuBLASLt's descriptions of a product. */
typedef struct {
  void *operation, *b, *a, *c;
} description;

static void destroy(const description *const d) {
  if (d->operation != NULL) bsh_torch.cublasLtMatmulDescDestroy(d->operation);
  void *const layouts[] = {d->b, d->a, d->c};
  for (int i = 0; i < 3; i++)
    if (layouts[i] != NULL) bsh_torch.cublasLtMatrixLayoutDestroy(layouts[i]);
}

static bool set(void *const operation, const int attribute, const void *const value, const size_t bytes) {
  return bsh_torch.cublasLtMatmulDescSetAttribute(operation, attribute, value, bytes) == 0;
}

static bool describe(const product *const p, const void *const bias, description *const d) {
  const int type = p->dtype == BSH_BF16 ? TYPE_BF16 : TYPE_F16;
  const int32_t transpose = OPERATION_TRANSPOSE, epilogue = EPILOGUE_BIAS;
  const uint64_t m = (uint64_t)p->m, n = (uint64_t)p->n, k = (uint64_t)p->k;
  return !bsh_torch.cublasLtMatmulDescCreate(&d->operation, COMPUTE_F32, TYPE_F32) &&
         (!p->transpose_b || set(d->operation, DESC_TRANSPOSE_A, &transpose, sizeof transpose)) &&
         (!p->transpose_a || set(d->operation, DESC_TRANSPOSE_B, &transpose, sizeof transpose)) &&
         (!p->bias || (set(d->operation, DESC_EPILOGUE, &epilogue, sizeof epilogue) &&
                       set(d->operation, DESC_BIAS, &bias, sizeof bias))) &&
         !bsh_torch.cublasLtMatrixLayoutCreate(&d->b, type, p->transpose_b ? k : m, p->transpose_b ? m : k, p->ld_b) &&
         !bsh_torch.cublasLtMatrixLayoutCreate(&d->a, type, p->transpose_a ? n : k, p->transpose_a ? k : n, p->ld_a) &&
         !bsh_torch.cublasLtMatrixLayoutCreate(&d->c, type, m, n, p->ld_c);
}

static bool choose(void *const handle, const product *const p, const description *const d, algorithm *const chosen) {
  const uint64_t workspace = (uint64_t)p->workspace;
  const uint32_t alignment = (uint32_t)p->alignment;
  void *preference = NULL;
  heuristic best = {0};
  int found = 0;
  bool good =
      !bsh_torch.cublasLtMatmulPreferenceCreate(&preference) &&
      !bsh_torch.cublasLtMatmulPreferenceSetAttribute(preference, PREFERENCE_WORKSPACE, &workspace, sizeof workspace);
  for (int i = 0; i < MATRICES && good; i++)
    good = !bsh_torch.cublasLtMatmulPreferenceSetAttribute(preference, PREFERENCE_ALIGNMENT_A + i, &alignment,
                                                           sizeof alignment);
  good = good && !bsh_torch.cublasLtMatmulAlgoGetHeuristic(handle, d->operation, d->b, d->a, d->c, d->c, preference, 1,
                                                           &best, &found);
  if (preference != NULL) bsh_torch.cublasLtMatmulPreferenceDestroy(preference);
  *chosen = best.algorithm;
  return good && found == 1 && best.status == 0;
}

/* The kept algorithm, or a new one. */
static bool find(const product *const p, const description *const d, void **const handle, algorithm *const found) {
  const unsigned slot = slot_of(p);
  pthread_mutex_lock(&lock);
  bool good = handles[p->device] != NULL || !bsh_torch.torch_get_current_cuda_blas_handle(&handles[p->device]);
  *handle = handles[p->device];
  if (good && memcmp(&plans[slot].product, p, sizeof *p) != 0) {
    good = choose(*handle, p, d, &plans[slot].algorithm);
    plans[slot].product = good ? *p : (product){0};
  }
  *found = plans[slot].algorithm;
  pthread_mutex_unlock(&lock);
  return good;
}

bool bsh_cublas_usable(void) { return bsh_torch.has_cublas; }

typedef struct {
  float alpha, beta;
  const void *bias; /* NULL or one row */
} factors;

static bsh_status gemm(const bsh_cuda_context *const context, const bsh_dtype dtype, const bsh_torch_matrix *const c,
                       const bsh_torch_matrix *const a, const bsh_torch_matrix *const b, const factors *const f,
                       void *const workspace, const int64_t workspace_bytes) {
  product p = product_of(dtype, c, a, b);
  p.device = context->device, p.bias = f->bias != NULL, p.workspace = workspace_bytes;
  void *handle = NULL;
  description d = {0};
  algorithm found;
  int failed = -1;
  if (context->device < MAX_DEVICES && (uintptr_t)f->bias % BSH_CUBLAS_BIAS_ALIGNMENT == 0 &&
      describe(&p, f->bias, &d) && find(&p, &d, &handle, &found))
    failed = bsh_torch.cublasLtMatmul(handle, d.operation, &f->alpha, first(b), d.b, first(a), d.a, &f->beta, first(c),
                                      d.c, first(c), d.c, &found, workspace, (size_t)workspace_bytes, context->stream);
  destroy(&d);
  return failed == 0 ? BSH_OK : bsh_fail(BSH_NO_KERNEL, "%s: cuBLAS failed with status %d", context->op, failed);
}

bsh_status bsh_cublas_gemm(const bsh_cuda_context *const context, const bsh_dtype dtype,
                           const bsh_torch_matrix *const c, const bsh_torch_matrix *const a,
                           const bsh_torch_matrix *const b, const bsh_torch_matrix *const bias, void *const workspace,
                           const int64_t workspace_bytes) {
  const factors f = {.alpha = 1.0f, .bias = bias != NULL ? first(bias) : NULL};
  return gemm(context, dtype, c, a, b, &f, workspace, workspace_bytes);
}

bsh_status bsh_cublas_gemm_add(const bsh_cuda_context *const context, const bsh_dtype dtype,
                               const bsh_torch_matrix *const c, const bsh_torch_matrix *const a,
                               const bsh_torch_matrix *const b, const double alpha, const double beta,
                               void *const workspace, const int64_t workspace_bytes) {
  const factors f = {.alpha = (float)alpha, .beta = (float)beta};
  return gemm(context, dtype, c, a, b, &f, workspace, workspace_bytes);
}
