/* test_lora.c - the products of a LoRA layer on a GPU (csrc/ops/lora.c) down to what cuBLASLt is told
 * (csrc/gpu/cublas.c), without a GPU: cuBLASLt is replaced by functions that hold a call to its rules and multiply on
 * the host. */
#include "check.h"

#include <math.h>

#include "core/numerics.h"
#include "gpu/cublas.h"
#include "ops/lora.h"
#include "torch/abi.h"
#include "torch/gemm.h"

uint64_t check_seed;
bsh_torch_api bsh_torch;

static void *const stream = (void *)0x51;
static int open_scratch, open_objects, chosen, multiplied, fails_at; /* fails_at: this product, 0 none */
static void *scratch_memory;
static int64_t scratch_size;

/* ---- the driver ---- */

bsh_status bsh_cuda_scratch_new(const bsh_cuda_context *const context, const int64_t n_bytes,
                                bsh_cuda_scratch *const scratch) {
  (void)context;
  scratch_memory = aligned_alloc(256, (size_t)((n_bytes + 255) / 256 * 256));
  scratch_size = n_bytes;
  memset(scratch_memory, 0xFF, (size_t)n_bytes); /* NaN */
  open_scratch++;
  *scratch = (bsh_cuda_scratch){.data = scratch_memory};
  return BSH_OK;
}
void bsh_cuda_scratch_delete(bsh_cuda_scratch *const scratch) {
  free(scratch->data);
  open_scratch--;
}
bsh_status bsh_torch_cpu_gemm_add(const bsh_dtype dtype, const bsh_torch_matrix *const c,
                                  const bsh_torch_matrix *const a, const bsh_torch_matrix *const b, const double alpha,
                                  const double beta) {
  (void)dtype, (void)c, (void)a, (void)b, (void)alpha, (void)beta;
  CHECK(false, "the CPU's product on a GPU");
  return BSH_OK;
}

/* ---- cuBLASLt ---- */

typedef struct {
  int compute_type, scale_type;
  int32_t transpose[2];
} operation;

typedef struct {
  int type;
  int64_t rows, columns, ld;
} layout;

static int torch_handle(void **const handle) {
  *handle = (void *)0x42;
  return 0;
}
static int new_operation(void **const out, const int compute_type, const int scale_type) {
  operation *const made = calloc(1, sizeof *made);
  made->compute_type = compute_type, made->scale_type = scale_type;
  *out = made;
  open_objects++;
  return 0;
}
static int set_operation(void *const to, const int attribute, const void *const value, const size_t bytes) {
  CHECK((attribute == 3 || attribute == 4) && bytes == 4, "attribute %d", attribute);
  memcpy(&((operation *)to)->transpose[attribute - 3], value, 4);
  return 0;
}
static int new_layout(void **const out, const int type, const uint64_t rows, const uint64_t columns, const int64_t ld) {
  layout *const made = malloc(sizeof *made);
  *made = (layout){type, (int64_t)rows, (int64_t)columns, ld};
  CHECK(rows > 0 && columns > 0 && ld >= (int64_t)rows, "%d x %d, ld %d", (int)rows, (int)columns, (int)ld);
  *out = made;
  open_objects++;
  return 0;
}
static int delete_object(void *const object) {
  free(object);
  open_objects--;
  return 0;
}
static int new_preference(void **const out) {
  *out = malloc(1);
  open_objects++;
  return 0;
}
static int set_preference(void *const preference, const int attribute, const void *const value, const size_t bytes) {
  (void)preference, (void)value, (void)bytes;
  CHECK(attribute == 1 || (attribute >= 5 && attribute <= 8), "attribute %d", attribute);
  return 0;
}

/* What an algorithm was chosen for travels in it, so that one of another product shows. */
typedef struct {
  int32_t m, n, k, ld_a, ld_b, ld_c, transposed, type;
} shape;

static shape shape_of(const operation *const o, const layout *const a, const layout *const b, const layout *const c) {
  return (shape){.m = (int32_t)c->rows,
                 .n = (int32_t)c->columns,
                 .k = (int32_t)(o->transpose[0] ? a->rows : a->columns),
                 .ld_a = (int32_t)a->ld,
                 .ld_b = (int32_t)b->ld,
                 .ld_c = (int32_t)c->ld,
                 .transposed = 2 * o->transpose[1] + o->transpose[0],
                 .type = c->type};
}

static int choose(void *handle, void *o, void *a, void *b, void *c, void *d, void *preference, int asked, void *results,
                  int *found) {
  (void)handle, (void)d, (void)preference;
  const shape s = shape_of(o, a, b, c);
  memset(results, 0, 96);
  memcpy(results, &s, sizeof s);
  *found = asked;
  chosen++;
  return 0;
}

static bsh_dtype dtype_of(const int type) { return type == 2 ? BSH_F16 : BSH_BF16; }

static float value_at(const void *const data, const int64_t i, const int type) {
  return load_f32(data, dtype_of(type), i);
}

static void put_value(void *const data, const int64_t i, const int type, const float value) {
  store_f32(data, dtype_of(type), i, value);
}

static int product(void *handle, void *o, const void *alpha, const void *a, void *a_layout, const void *b,
                   void *b_layout, const void *beta, const void *c, void *c_layout, void *d, void *d_layout,
                   const void *algorithm, void *workspace, size_t workspace_bytes, void *on) {
  const operation *const op = o;
  const layout *const la = a_layout, *const lb = b_layout, *const lc = c_layout;
  const bool ta = op->transpose[0], tb = op->transpose[1];
  const shape s = shape_of(o, la, lb, lc);
  const float factor = *(const float *)alpha, keep = *(const float *)beta;
  CHECK(handle == (void *)0x42 && on == stream && c == d && c_layout == d_layout, "handle, stream or result");
  CHECK(workspace == scratch_memory && (int64_t)workspace_bytes <= scratch_size, "%zu bytes", workspace_bytes);
  CHECK(op->compute_type == 68 && op->scale_type == 0 && memcmp(algorithm, &s, sizeof s) == 0, "algorithm");
  CHECK((tb ? lb->columns : lb->rows) == s.k && (tb ? lb->rows : lb->columns) == s.n && la->type == lb->type, "sizes");
  CHECK((ta ? la->columns : la->rows) == s.m, "sizes");
  if (++multiplied == fails_at) return 13;
  memset(workspace, 0xFF, workspace_bytes); /* cuBLAS may write there whatever it likes */
  for (int64_t i = 0; i < s.m; i++)
    for (int64_t j = 0; j < s.n; j++) {
      double sum = 0;
      for (int64_t k = 0; k < s.k; k++)
        sum += (double)value_at(a, ta ? k + i * s.ld_a : i + k * s.ld_a, s.type) *
               value_at(b, tb ? j + k * s.ld_b : k + j * s.ld_b, s.type);
      const float before = keep != 0 ? keep * value_at(d, i + j * s.ld_c, s.type) : 0;
      put_value(d, i + j * s.ld_c, s.type, (float)(factor * sum) + before);
    }
  return 0;
}

static void install(void) {
  bsh_torch.torch_get_current_cuda_blas_handle = torch_handle;
  bsh_torch.cublasLtMatmulDescCreate = new_operation;
  bsh_torch.cublasLtMatmulDescSetAttribute = set_operation;
  bsh_torch.cublasLtMatmulDescDestroy = delete_object;
  bsh_torch.cublasLtMatrixLayoutCreate = new_layout;
  bsh_torch.cublasLtMatrixLayoutDestroy = delete_object;
  bsh_torch.cublasLtMatmulPreferenceCreate = new_preference;
  bsh_torch.cublasLtMatmulPreferenceSetAttribute = set_preference;
  bsh_torch.cublasLtMatmulPreferenceDestroy = delete_object;
  bsh_torch.cublasLtMatmulAlgoGetHeuristic = choose;
  bsh_torch.cublasLtMatmul = product;
}

/* ---- layers ---- */

/* A matrix of exactly its bytes, and its values. */
typedef struct {
  void *data;
  double *values;
  int64_t rows, columns;
} numbers;

static numbers numbers_of(uint64_t *const state, const int64_t rows, const int64_t columns, const int type) {
  const numbers n = {buffer(2 * rows * columns), buffer(8 * rows * columns), rows, columns};
  for (int64_t i = 0; i < rows * columns; i++) {
    put_value(n.data, i, type, random_unit(state));
    n.values[i] = value_at(n.data, i, type);
  }
  return n;
}

static void forget(const numbers n) {
  free(n.data);
  free(n.values);
}

/* values += scale a b, of a [m, k] and b [k, n]; `a_t` and `b_t`: kept transposed. */
static void add(const numbers c, const double scale, const numbers a, const bool a_t, const numbers b, const bool b_t) {
  const int64_t terms = a_t ? a.rows : a.columns;
  for (int64_t i = 0; i < c.rows; i++)
    for (int64_t j = 0; j < c.columns; j++)
      for (int64_t k = 0; k < terms; k++)
        c.values[i * c.columns + j] += scale * a.values[a_t ? k * a.columns + i : i * a.columns + k] *
                                       b.values[b_t ? j * b.columns + k : k * b.columns + j];
}

/* What one rounding of the result explains, no more: factors are the rounded ones. */
static void check_close(const char *const what, const numbers n, const int type) {
  for (int64_t i = 0; i < n.rows * n.columns; i++) {
    const double found = value_at(n.data, i, type), expected = n.values[i], gap = fabs(found - expected);
    CHECK(gap <= 0x1p-8 * fabs(expected) + 0x1p-16, "%s [%d, %d]: element %d is %g, expected %g", what, (int)n.rows,
          (int)n.columns, (int)i, found, expected);
  }
}

/* A factor as the next product reads it. */
static void round_values(const numbers n, const int type) {
  for (int64_t i = 0; i < n.rows * n.columns; i++) {
    put_value(n.data, i, type, (float)n.values[i]);
    n.values[i] = value_at(n.data, i, type);
  }
}

static void zero(const numbers n) { memset(n.values, 0, (size_t)(8 * n.rows * n.columns)); }

typedef struct {
  numbers x, dy, A, B, y, xa, dx, dx_apart, dA, dB, dxa;
  bsh_lora_args args;
  int type;
} layer;

static const bsh_cuda_context context = {.op = "lora_4bit", .stream = (void *)0x51, .sm = 90, .sms = 132};
static const double scale = 1.75;

static layer new_layer(uint64_t *const state, const int64_t M, const int64_t N, const int64_t K, const int64_t r,
                       const bool half) {
  const int type = half ? 2 : 14;
  layer l = {.type = type};
  numbers *const of_x[] = {&l.x, &l.dx}, *const of_y[] = {&l.y, &l.dy}, *const of_A[] = {&l.A, &l.dA},
                 *const of_B[] = {&l.B, &l.dB}, *const inner[] = {&l.xa, &l.dxa};
  for (int i = 0; i < 2; i++) {
    *of_x[i] = numbers_of(state, M, K, type), *of_y[i] = numbers_of(state, M, N, type);
    *of_A[i] = numbers_of(state, r, K, type), *of_B[i] = numbers_of(state, N, r, type);
    *inner[i] = numbers_of(state, M, r, type);
  }
  l.dx_apart = numbers_of(state, M, K, type);
  l.args = (bsh_lora_args){.A = l.A.data, .B = l.B.data, .M = M, .N = N, .K = K, .r = r, .scale = scale};
  l.args.dtype = half ? BSH_F16 : BSH_BF16;
  return l;
}

static void delete_layer(layer *const l) {
  const numbers all[] = {l->x, l->dy, l->A, l->B, l->y, l->xa, l->dx, l->dx_apart, l->dA, l->dB, l->dxa};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) forget(all[i]);
  CHECK(open_scratch == 0 && open_objects == 0, "%d blocks and %d objects are left", open_scratch, open_objects);
}

/* in_two: xa by a call of its own. */
static void check_forward(layer *const l, const bool in_two) {
  const int before = multiplied;
  bsh_lora_args args = l->args;
  args.x = l->x.data, args.xa = l->xa.data;
  if (in_two) CHECK(bsh_cuda_lora(&args, &context) == BSH_OK && multiplied == before + 1, "xa only");
  args.has_xa = in_two, args.y = l->y.data;
  CHECK(bsh_cuda_lora(&args, &context) == BSH_OK && multiplied == before + 2, "forward");
  zero(l->xa), add(l->xa, 1, l->x, false, l->A, true);
  check_close("xa", l->xa, l->type), round_values(l->xa, l->type);
  add(l->y, scale, l->xa, false, l->B, true), check_close("y", l->y, l->type);
}

/* needs: 1 dx, 2 dA, 4 dB, 8 what is added to dx apart from it. What is not needed stays as it was. */
static void check_backward(layer *const l, const int needs) {
  const bool x = needs & 1, A = needs & 2, B = needs & 4, apart = x && needs & 8;
  const int before = multiplied;
  bsh_lora_args args = l->args;
  args.dy = l->dy.data, args.x = A ? l->x.data : NULL, args.xa = B ? l->xa.data : NULL;
  args.dx = x ? l->dx.data : NULL, args.dA = A ? l->dA.data : NULL, args.dB = B ? l->dB.data : NULL;
  args.dx_apart = apart ? l->dx_apart.data : NULL;
  CHECK(bsh_cuda_lora_backward(&args, &context) == BSH_OK, "backward");
  CHECK(multiplied - before == (x || A) + x + A + B, "%d products for %d", multiplied - before, needs);
  zero(l->dxa), add(l->dxa, scale, l->dy, false, l->B, false), round_values(l->dxa, l->type);
  if (apart) zero(l->dx_apart);
  if (x) add(apart ? l->dx_apart : l->dx, 1, l->dxa, false, l->A, false);
  if (A) zero(l->dA), add(l->dA, 1, l->dxa, true, l->x, false);
  if (B) zero(l->dB), add(l->dB, scale, l->dy, true, l->xa, false);
  check_close("dx", l->dx, l->type), check_close("dx apart", l->dx_apart, l->type);
  check_close("dA", l->dA, l->type), check_close("dB", l->dB, l->type);
}

static void check_layer(uint64_t *const state, const int64_t M, const int64_t N, const int64_t K, const int64_t r,
                        const bool half, const int needs) {
  layer l = new_layer(state, M, N, K, r, half);
  check_forward(&l, needs % 2 == 0);
  check_backward(&l, needs);
  delete_layer(&l);
}

/* Every product fails in turn: the rest is not done and nothing is left. */
static void check_failures(void) {
  uint16_t memory[64] = {0};
  bsh_lora_args args = {.x = memory,
                        .dy = memory,
                        .A = memory,
                        .B = memory,
                        .xa = memory,
                        .y = memory,
                        .dx = memory,
                        .dA = memory,
                        .dB = memory,
                        .M = 2,
                        .N = 3,
                        .K = 4,
                        .r = 1,
                        .scale = 1,
                        .dtype = BSH_F16};
  for (int back = 0; back < 2; back++)
    for (int i = 1; i <= (back ? 4 : 2); i++) {
      multiplied = 0, fails_at = i;
      CHECK((back ? bsh_cuda_lora_backward : bsh_cuda_lora)(&args, &context) == BSH_NO_KERNEL && multiplied == i,
            "product %d: %d were made", i, multiplied);
      CHECK(open_scratch == 0 && open_objects == 0, "%d blocks and %d objects are left", open_scratch, open_objects);
    }
  fails_at = 0, multiplied = 0;
  args.dtype = BSH_F32;
  CHECK(bsh_cuda_lora(&args, &context) == BSH_NO_KERNEL && bsh_cuda_lora_backward(&args, &context) == BSH_NO_KERNEL &&
            multiplied == 0,
        "fp32 is not cuBLAS' here");
}

int main(const int argc, char **const argv) {
  check_seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
  const int rounds = argc > 2 ? atoi(argv[2]) : 60;
  uint64_t state = check_seed;
  install();
  check_failures();
  check_layer(&state, 1, 1, 1, 1, false, 7);
  for (int i = 0; i < rounds; i++)
    check_layer(&state, 1 + random_below(&state, 20), 1 + random_below(&state, 40), 1 + random_below(&state, 40),
                1 + random_below(&state, 17), random_below(&state, 2), (int)random_below(&state, 16));
  chosen = 0;
  for (int i = 0; i < 3; i++) check_layer(&state, 4, 32, 64, 16, false, 7);
  CHECK(chosen <= 8, "%d algorithms chosen for 6 products", chosen);
  printf("test_lora: ok, seed %" PRIu64 "\n", check_seed);
  return 0;
}
