/* machine.c - see machine.h: threads, memory, exchanges, copies. */
#include "machine.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

/* APART: from stack to stack, no multiple of a page: their tops do not compete for the same lines of the cache. */
enum { STACK = 256 << 10, APART = STACK + 4096 + 64, BULK_COPIES = 4096, SPINS = 20000, LATE = 50 };

/* ---- fibers ---- */

/* Saves the caller's registers on its stack and its stack pointer in *from, and goes on where `to` was saved. */
void ptx_switch(void **from, void *to);
__asm__(".text\n.globl ptx_switch\n.hidden ptx_switch\n.type ptx_switch,@function\nptx_switch:\n"
        "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
        "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
        "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");

static struct {
  void *stack_pointer; /* of the caller, while a thread runs */
  ptx_thread *current;
  ptx_kernel kernel;
  ptx_bulk bulk[BULK_COPIES];
  uint32_t n_bulk;
  bool failed;
  uint64_t random;
} machine;

void ptx_yield(ptx_thread *const t) { ptx_switch(&t->stack_pointer, machine.stack_pointer); }

_Noreturn void ptx_fail(ptx_thread *const t, const char *const what) {
  snprintf(t->run->error, sizeof t->run->error, "%s: block (%d, %d, %d), thread %d: %s", t->run->kernel,
           (int)t->cta->id[0], (int)t->cta->id[1], (int)t->cta->id[2], (int)t->index, what);
  machine.failed = true;
  for (;;) ptx_yield(t);
}

void ptx_wait(ptx_thread *const t, const uint32_t *const word, const uint32_t old) {
  if (*word != old) return;
  t->waiting = word;
  t->for_change = old;
  ptx_yield(t);
}

void ptx_spin(ptx_thread *const t) {
  t->spinning = true;
  ptx_yield(t);
}

/* A block alone on its multiprocessor begins with an equal share for each thread, a multiple of 8. Who asks for more
 * than all have waits for ever. */
void ptx_registers(ptx_thread *const t, const uint32_t n) {
  const uint32_t threads = (uint32_t)(t->run->block[0] * t->run->block[1] * t->run->block[2]);
  t->cta->registers += n;
  if (t->cta->registers > 65536 / threads / 8 * 8 * threads)
    ptx_fail(t, "setmaxnreg waits for more registers than the block has");
}

static void begin(void) {
  ptx_thread *const t = machine.current;
  machine.kernel(t);
  t->done = true;
  t->cta->live--;
  for (;;) ptx_yield(t);
}

static void prepare(ptx_thread *const t) {
  void **top = (void **)(t->stack + STACK);
  *--top = NULL; /* where `begin` would return to: the stack is aligned as after a call */
  *--top = (void *)begin;
  for (int i = 0; i < 6; i++) *--top = NULL;
  t->stack_pointer = top;
  memset(t->stack, 0x5A, 64);
}

/* Its end is looked at when the thread has ended: far from all that a turn touches. */
static bool overflowed(const ptx_thread *const t) {
  if ((const uint8_t *)t->stack_pointer < t->stack + 64) return true;
  for (int i = 0; t->done && i < 64; i++)
    if (t->stack[i] != 0x5A) return true;
  return false;
}

/* ---- memory ---- */

static _Noreturn void bad_access(ptx_thread *const t, const char *const space, const uint64_t address,
                                 const uint32_t size, const bool write) {
  char what[160];
  snprintf(what, sizeof what, "%s of %u bytes at %s 0x%llx is outside or not aligned", write ? "store" : "load", size,
           space, (unsigned long long)address);
  ptx_fail(t, what);
}

static bool in_ranges(const ptx_run *const run, const uint64_t address, const uint32_t size) {
  for (uint64_t i = 0; i < run->n_ranges; i++)
    if (address >= run->ranges[i].begin && address + size <= run->ranges[i].end) return true;
  return false;
}

static bool inside(const uint8_t *const begin, const uint64_t n, const uint64_t address, const uint32_t size) {
  return address >= (uintptr_t)begin && address + size <= (uintptr_t)begin + n;
}

static bool in_tables(const uint64_t address, const uint32_t size) {
  for (const ptx_table *table = ptx_tables; table->begin != NULL; table++)
    if (inside(table->begin, table->size, address, size)) return true;
  return false;
}

/* Whether memory of the launch is there. An earlier kernel may still write it until the thread has waited for that. */
static bool reaches(ptx_thread *const t, const uint64_t address, const uint32_t size) {
  if (!in_ranges(t->run, address, size)) return false;
  if (ptx_overlaps && !t->waited) ptx_fail(t, "global memory is touched before griddepcontrol.wait");
  return true;
}

uint8_t *ptx_global(ptx_thread *const t, const uint64_t address, const uint32_t size, const bool write) {
  const bool known = reaches(t, address, size) || (!write && in_tables(address, size));
  if (address % size != 0 || !known) bad_access(t, "global", address, size, write);
  return (uint8_t *)(uintptr_t)address;
}

/* A hint may come before the wait for earlier kernels, but what it names is memory of the launch. */
void ptx_prefetch(ptx_thread *const t, const uint64_t address) {
  if (in_ranges(t->run, address, 1)) return;
  char what[80];
  snprintf(what, sizeof what, "prefetch of global 0x%llx, which is outside", (unsigned long long)address);
  ptx_fail(t, what);
}

/* A shared address: the rank in the cluster above bit 24, the place in that CTA's memory below. */
uint8_t *ptx_shared(ptx_thread *const t, const uint64_t address, const uint32_t size, const bool write) {
  const uint64_t place = address & 0xFFFFFF, rank = (address >> 24) & 0xFF;
  if (rank >= t->run->cluster || place % size != 0 || place + size > t->cta->shared_size)
    bad_access(t, "shared", address, size, write);
  return (t->cta + (int64_t)rank - (int64_t)t->cta->rank)->shared + place;
}

/* Memory of the launch, of the CTA, the stack, the parameters, or a table of the kernel's, which only loads may touch.
 */
uint8_t *ptx_generic(ptx_thread *const t, const uint64_t address, const uint32_t size, const bool write) {
  const bool known = reaches(t, address, size) || inside(t->cta->shared, t->cta->shared_size, address, size) ||
                     inside(t->stack, STACK, address, size) ||
                     (!write && (inside(t->run->parameters, 1 << 15, address, size) || in_tables(address, size)));
  if (address % size != 0 || !known) bad_access(t, "generic", address, size, write);
  return (uint8_t *)(uintptr_t)address;
}

/* ---- exchanges of a warp ---- */

static ptx_exchange *exchange_of(ptx_thread *const t, const uint32_t mask) {
  if (mask == 0 || !(mask >> (t->index % PTX_WARP) & 1)) ptx_fail(t, "a lane is not in the mask of its exchange");
  return &t->cta->warps[t->index / PTX_WARP].by_lead[__builtin_ctz(mask)];
}

/* Bring n words, wait for all lanes of the mask; what they brought, by lane. */
static uint32_t (*gather(ptx_thread *const t, uint32_t mask, const uint32_t *const words, const uint32_t n))
    [PTX_DEPOSIT] {
      const uint64_t threads = t->run->block[0] * t->run->block[1] * t->run->block[2];
      const uint64_t first = t->index / PTX_WARP * PTX_WARP;
      if (threads - first < PTX_WARP) mask &= (1u << (threads - first)) - 1;
      ptx_exchange *const e = exchange_of(t, mask);
      uint32_t (*const deposits)[PTX_DEPOSIT] = e->deposits[e->generation & 1];
      const uint32_t lane = t->index % PTX_WARP, generation = e->generation;
      for (uint32_t i = 0; i < n; i++) deposits[lane][i] = words[i];
      e->arrived |= 1u << lane;
      if ((e->arrived & mask) == mask) {
        e->arrived = 0;
        e->generation++;
      } else {
        ptx_wait(t, &e->generation, generation);
      }
      return deposits;
    }

void ptx_meet(ptx_thread *const t, const uint32_t mask) {
  gather(t, mask, NULL, 0);
}

uint32_t ptx_shfl(ptx_thread *const t, const int way, const uint32_t value, const uint32_t b, const uint32_t c,
                  const uint32_t mask, uint32_t *const good) {
  const uint32_t lane = t->index % PTX_WARP, segment = c >> 8 & 31, by = b & 31;
  const int32_t top = (int32_t)((lane & segment) | (c & 31 & ~segment));
  int32_t from;
  bool valid;
  if (way == PTX_UP) from = (int32_t)lane - (int32_t)by, valid = from >= top;
  else {
    from = way == PTX_DOWN   ? (int32_t)(lane + by)
           : way == PTX_BFLY ? (int32_t)(lane ^ by)
                             : (int32_t)((lane & segment) | (by & ~segment));
    valid = from <= top;
  }
  uint32_t (*const all)[PTX_DEPOSIT] = gather(t, mask, &value, 1);
  if (good != NULL) *good = valid;
  if (valid && !(mask >> from & 1)) ptx_fail(t, "a shuffle reads a lane that is not in its mask");
  return valid ? all[from][0] : value;
}

uint32_t ptx_vote_ballot(ptx_thread *const t, const uint32_t value, const uint32_t mask) {
  uint32_t (*const all)[PTX_DEPOSIT] = gather(t, mask, &value, 1);
  uint32_t votes = 0;
  for (uint32_t i = 0; i < PTX_WARP; i++) votes |= (mask >> i & 1) && all[i][0] ? 1u << i : 0;
  return votes;
}

uint32_t ptx_vote_any(ptx_thread *const t, const uint32_t value, const uint32_t mask) {
  return ptx_vote_ballot(t, value, mask) != 0;
}

uint32_t ptx_vote_all(ptx_thread *const t, const uint32_t value, const uint32_t mask) {
  return ptx_vote_ballot(t, !value, mask) == 0;
}

uint32_t ptx_redux_max_u32(ptx_thread *const t, const uint32_t value, const uint32_t mask) {
  uint32_t (*const all)[PTX_DEPOSIT] = gather(t, mask, &value, 1);
  uint32_t most = 0;
  for (uint32_t i = 0; i < PTX_WARP; i++)
    if ((mask >> i & 1) && all[i][0] > most) most = all[i][0];
  return most;
}

uint32_t ptx_redux_add_u32(ptx_thread *const t, const uint32_t value, const uint32_t mask) {
  uint32_t (*const all)[PTX_DEPOSIT] = gather(t, mask, &value, 1);
  uint32_t sum = 0;
  for (uint32_t i = 0; i < PTX_WARP; i++) sum += mask >> i & 1 ? all[i][0] : 0;
  return sum;
}

/* ---- barriers ---- */

static ptx_barrier *arrive(ptx_thread *const t, const uint32_t barrier, uint32_t threads, const bool value) {
  if (barrier >= PTX_BARRIERS) ptx_fail(t, "there are 16 barriers");
  ptx_barrier *const b = &t->cta->barriers[barrier];
  if (threads == 0) threads = (uint32_t)(t->run->block[0] * t->run->block[1] * t->run->block[2]);
  if (threads % PTX_WARP != 0 && threads != t->run->block[0]) ptx_fail(t, "a barrier of no whole number of warps");
  b->votes = (b->arrived == 0 ? 0 : b->votes) + value;
  if (++b->arrived < threads) return b;
  b->arrived = 0;
  b->votes_before = b->votes;
  b->all_before = b->votes == threads;
  b->generation++;
  return b;
}

static ptx_barrier *pass(ptx_thread *const t, const uint32_t barrier, const uint32_t threads, const bool value) {
  if (barrier >= PTX_BARRIERS) ptx_fail(t, "there are 16 barriers");
  const uint32_t generation = t->cta->barriers[barrier].generation;
  ptx_barrier *const b = arrive(t, barrier, threads, value);
  ptx_wait(t, &b->generation, generation);
  return b;
}

void ptx_bar_sync(ptx_thread *const t, const uint32_t barrier, const uint32_t threads) {
  pass(t, barrier, threads, true);
}

void ptx_bar_arrive(ptx_thread *const t, const uint32_t barrier, const uint32_t threads) {
  arrive(t, barrier, threads, true);
}

uint32_t ptx_bar_red_and(ptx_thread *const t, const uint32_t barrier, const uint32_t threads, const uint32_t value) {
  return pass(t, barrier, threads, value != 0)->all_before;
}

uint32_t ptx_bar_red_or(ptx_thread *const t, const uint32_t barrier, const uint32_t threads, const uint32_t value) {
  return pass(t, barrier, threads, value != 0)->votes_before != 0;
}

uint32_t ptx_bar_red_popc(ptx_thread *const t, const uint32_t barrier, const uint32_t threads, const uint32_t value) {
  return pass(t, barrier, threads, value != 0)->votes_before;
}

/* Threads that have ended count as arrived, so the last of them is seen by the scheduler's turn. */
void ptx_cluster_arrive(ptx_thread *const t) {
  ptx_cluster *const c = t->cta->cluster;
  if (++c->arrived < c->n_ctas * t->run->block[0]) return;
  c->arrived = 0;
  c->generation++;
}

void ptx_cluster_wait(ptx_thread *const t) {
  ptx_cluster *const c = t->cta->cluster;
  if (c->arrived != 0) ptx_wait(t, &c->generation, c->generation);
}

/* ---- products of matrices ---- */

static float number(const uint32_t pair, const uint32_t which, const bool bf16) {
  const uint16_t half = (uint16_t)(pair >> 16 * which);
  return bf16 ? bf16_to_f32(half) : f16_to_f32(half);
}

/* A's element (row, k) of a 16 x 16 (8) tile, from the lanes' registers; B's (k, column) of a 16 (8) x 8 tile. */
static float element_a(uint32_t (*const all)[PTX_DEPOSIT], const uint32_t row, const uint32_t k, const bool bf16) {
  const uint32_t lane = row % 8 * 4 + k % 8 / 2, which = row / 8 + k / 8 * 2;
  return number(all[lane][which], k & 1, bf16);
}

static float element_b(uint32_t (*const all)[PTX_DEPOSIT], const uint32_t k, const uint32_t column,
                       const uint32_t place, const bool bf16) {
  return number(all[column * 4 + k % 8 / 2][place + k / 8], k & 1, bf16);
}

/* depth: 8 or 16 of the contraction. A takes depth / 4 registers, B depth / 8. */
static void mma(ptx_thread *const t, const uint32_t *const in, uint32_t *const out, const uint32_t depth,
                const bool bf16) {
  const uint32_t place_b = depth / 4, place_c = place_b + depth / 8;
  uint32_t (*const all)[PTX_DEPOSIT] = gather(t, ~0u, in, place_c + 4);
  const uint32_t lane = t->index % PTX_WARP;
  for (uint32_t i = 0; i < 4; i++) {
    const uint32_t row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    double sum = ptx_float(in[place_c + i]);
    for (uint32_t k = 0; k < depth; k++)
      sum += (double)element_a(all, row, k, bf16) * element_b(all, k, column, place_b, bf16);
    out[i] = ptx_bits((float)sum);
  }
}

void ptx_mma_m16n8k16_bf16(ptx_thread *const t, const uint32_t *const in, uint32_t *const out) {
  mma(t, in, out, 16, true);
}
void ptx_mma_m16n8k16_f16(ptx_thread *const t, const uint32_t *const in, uint32_t *const out) {
  mma(t, in, out, 16, false);
}
void ptx_mma_m16n8k8_f16(ptx_thread *const t, const uint32_t *const in, uint32_t *const out) {
  mma(t, in, out, 8, false);
}

/* Of codes, in int32: rows are `blocks` times 8, the depth is `words` times 16, a register four codes of one row. */
static void mma_codes(ptx_thread *const t, const uint32_t *const in, uint32_t *const out, const uint32_t blocks,
                      const uint32_t words) {
  const uint32_t place_b = blocks * words, place_c = place_b + words, lane = t->index % PTX_WARP;
  uint32_t (*const all)[PTX_DEPOSIT] = gather(t, ~0u, in, place_c + 2 * blocks);
  for (uint32_t i = 0; i < 2 * blocks; i++) {
    uint32_t sum = in[place_c + i];
    for (uint32_t k = 0; k < 16 * words; k++) {
      const uint32_t a = all[lane / 4 * 4 + k % 16 / 4][k / 16 * blocks + i / 2];
      const uint32_t b = all[(lane % 4 * 2 + i % 2) * 4 + k % 16 / 4][place_b + k / 16];
      sum += (uint32_t)((int8_t)(a >> k % 4 * 8) * (int8_t)(b >> k % 4 * 8));
    }
    out[i] = sum;
  }
}

void ptx_mma_m16n8k32_s8(ptx_thread *const t, const uint32_t *const in, uint32_t *const out) {
  mma_codes(t, in, out, 2, 2);
}
void ptx_mma_m8n8k16_s8(ptx_thread *const t, const uint32_t *const in, uint32_t *const out) {
  mma_codes(t, in, out, 1, 1);
}

/* Lane l names row l % 8 of matrix l / 8, 16 bytes; it gets two neighbours of row l / 4, transposed of column l / 4. */
void ptx_ldmatrix(ptx_thread *const t, const uint64_t address, const uint32_t matrices, const bool transposed,
                  uint32_t *const out) {
  const uint32_t word = (uint32_t)address, lane = t->index % PTX_WARP;
  uint32_t (*const all)[PTX_DEPOSIT] = gather(t, ~0u, &word, 1);
  for (uint32_t m = 0; m < matrices; m++) {
    uint16_t half[2];
    for (uint32_t i = 0; i < 2; i++) {
      const uint32_t row = transposed ? lane % 4 * 2 + i : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + i;
      memcpy(&half[i], ptx_shared(t, all[m * 8 + row][0], 16, false) + 2 * column, 2);
    }
    out[m] = (uint32_t)half[1] << 16 | half[0];
  }
}

/* Element (row n, k) of a K-major tile: rows of 32, 64 or 128 bytes, 8 of them contiguous, `stride` between eights. */
static float element_tile(ptx_thread *const t, const uint64_t descriptor, const uint32_t n, const uint32_t k,
                          const ptx_operand kind) {
  static const uint32_t row_bytes[] = {16, 128, 64, 32};
  const uint32_t swizzle = (uint32_t)(descriptor >> 62), bytes = row_bytes[swizzle];
  const uint32_t stride = (uint32_t)(descriptor >> 32 & 0x3FFF) << 4;
  const uint32_t item = kind == PTX_S8 ? 1 : 2;
  uint32_t place = ((uint32_t)(descriptor & 0x3FFF) << 4) + n / 8 * stride + n % 8 * bytes + k * item;
  if (swizzle == 0) ptx_fail(t, "wgmma without a swizzle is not modelled");
  place ^= (place >> 7 & (bytes / 16 - 1)) << 4;
  const uint64_t address = ptx_shared_base(t, place);
  if (kind == PTX_S8) return (float)*(const int8_t *)ptx_shared(t, address, 1, false);
  uint16_t half;
  memcpy(&half, ptx_shared(t, address, 2, false), 2);
  return kind == PTX_BF16 ? bf16_to_f32(half) : f16_to_f32(half);
}

/* What is there of D as a number, and back. */
static double sum_of(const ptx_product *const p, const uint32_t bits) {
  return p->kind == PTX_S8 ? (double)(int32_t)bits : (double)ptx_float(bits);
}
static uint32_t bits_of_sum(const ptx_product *const p, const double sum) {
  return p->kind == PTX_S8 ? (uint32_t)(int32_t)(int64_t)sum : ptx_bits((float)sum);
}

/* Element (row, k) of A in registers: 16 rows of each warp. */
static float element_group(const ptx_product *const p, const uint32_t row, const uint32_t k) {
  const uint32_t from = row / 16 * 32 + row % 8 * 4 + k % 8 / 2;
  return number(p->a[from][row / 8 % 2 + k / 8 * 2], k & 1, p->kind == PTX_BF16);
}

/* Where element (row, column) of D is. */
static uint32_t *place_of_sum(const ptx_product *const p, const uint32_t row, const uint32_t column) {
  const uint32_t thread = row / 16 * 32 + row % 8 * 4 + column % 8 / 2;
  return p->d[thread][column / 8 * 4 + row / 8 % 2 * 2 + column % 2];
}

/* sums += a of each depth times its row of b, in the order of depth. */
__attribute__((target_clones("avx2", "default"))) static void add_products(double *const sums, const double *const a,
                                                                           double (*const b)[256], const uint32_t depth,
                                                                           const uint32_t columns) {
  for (uint32_t k = 0; k < depth; k++)
    for (uint32_t n = 0; n < columns; n++) sums[n] += a[k] * b[k][n];
}

static void multiply(ptx_thread *const t, const ptx_product *const p) {
  const uint32_t depth = p->kind == PTX_S8 ? 32 : 16;
  static double b[32][256];
  for (uint32_t n = 0; n < p->columns; n++)
    for (uint32_t k = 0; k < depth; k++) b[k][n] = element_tile(t, p->b, n, k, p->kind);
  for (uint32_t row = 0; row < 64; row++) {
    double a[32], sums[256];
    for (uint32_t k = 0; k < depth; k++)
      a[k] = p->a_tile != 0 ? element_tile(t, p->a_tile, row, k, p->kind) : element_group(p, row, k);
    for (uint32_t n = 0; n < p->columns; n++) sums[n] = p->keep ? sum_of(p, *place_of_sum(p, row, n)) : 0;
    add_products(sums, a, b, depth, p->columns);
    for (uint32_t n = 0; n < p->columns; n++) *place_of_sum(p, row, n) = bits_of_sum(p, sums[n]);
  }
}

/* The four warps of a warpgroup come together; true in the one that is last, which calls group_done. */
static bool last_of_group(ptx_warpgroup *const g) { return ++g->arrived == 128; }

static void group_done(ptx_warpgroup *const g) {
  g->arrived = 0;
  g->generation++;
}

static ptx_warpgroup *group_of(const ptx_thread *const t) { return &t->cta->groups[t->index / 128]; }

/* a: registers, or NULL: a_tile. */
static void wgmma(ptx_thread *const t, const uint32_t columns, uint32_t *const *const d, const uint32_t *const a,
                  const uint64_t a_tile, const uint64_t b, const uint32_t keep, const ptx_operand kind) {
  ptx_warpgroup *const g = group_of(t);
  const uint32_t me = t->index % 128, generation = g->generation;
  if (g->n == PTX_WGMMA) ptx_fail(t, "too many pending wgmma");
  if (g->pending == NULL) g->pending = malloc(PTX_WGMMA * sizeof *g->pending);
  ptx_product *const p = &g->pending[g->n];
  if (g->arrived > 0 && (p->b != b || p->a_tile != a_tile || p->columns != columns || p->keep != keep))
    ptx_fail(t, "warps of a warpgroup issue different wgmma");
  p->b = b, p->a_tile = a_tile, p->columns = columns, p->keep = keep, p->kind = kind, p->group = g->group;
  for (uint32_t i = 0; i < columns / 2; i++) p->d[me][i] = d[i];
  if (a != NULL) memcpy(p->a[me], a, sizeof p->a[me]);
  if (!last_of_group(g)) {
    ptx_wait(t, &g->generation, generation);
    return;
  }
  g->n++;
  group_done(g);
}

void ptx_wgmma_bf16(ptx_thread *const t, const uint32_t columns, uint32_t *const *const d, const uint32_t *const a,
                    const uint64_t b, const uint32_t keep) {
  wgmma(t, columns, d, a, 0, b, keep, PTX_BF16);
}

void ptx_wgmma_f16(ptx_thread *const t, const uint32_t columns, uint32_t *const *const d, const uint32_t *const a,
                   const uint64_t b, const uint32_t keep) {
  wgmma(t, columns, d, a, 0, b, keep, PTX_F16);
}

void ptx_wgmma_tiles(ptx_thread *const t, const ptx_operand kind, const uint32_t columns, uint32_t *const *const d,
                     const uint64_t a, const uint64_t b, const uint32_t keep) {
  wgmma(t, columns, d, NULL, a, b, keep, kind);
}

void ptx_wgmma_commit(ptx_thread *const t) {
  ptx_warpgroup *const g = group_of(t);
  const uint32_t generation = g->generation;
  if (!last_of_group(g)) {
    ptx_wait(t, &g->generation, generation);
    return;
  }
  g->group++;
  group_done(g);
}

/* Products of all groups but the last `pending` are made now. */
void ptx_wgmma_wait(ptx_thread *const t, const uint32_t pending) {
  ptx_warpgroup *const g = group_of(t);
  const uint32_t generation = g->generation;
  if (!last_of_group(g)) {
    ptx_wait(t, &g->generation, generation);
    return;
  }
  uint32_t done = 0;
  while (done < g->n && g->pending[done].group + pending < g->group) multiply(t, &g->pending[done++]);
  if (done > 0) memmove(g->pending, g->pending + done, (g->n - done) * sizeof *g->pending);
  g->n -= done;
  group_done(g);
}

/* ---- copies ---- */

void ptx_copy(ptx_thread *const t, const uint64_t to, const uint64_t from, const uint32_t size, const uint32_t taken) {
  if (t->n_copies == PTX_COPIES) ptx_fail(t, "too many pending cp.async");
  if (t->copies == NULL) t->copies = malloc(PTX_COPIES * sizeof *t->copies);
  const uint8_t *const source = taken ? ptx_global(t, from, size, false) : NULL;
  t->copies[t->n_copies++] = (ptx_copy_of){ptx_shared(t, to, size, true), source, size, taken, t->copy_group};
}

void ptx_copy_commit(ptx_thread *const t) { t->copy_group++; }

void ptx_copy_wait(ptx_thread *const t, const uint32_t pending) {
  uint32_t left = 0;
  for (uint32_t i = 0; i < t->n_copies; i++) {
    const ptx_copy_of c = t->copies[i];
    if (c.group + pending >= t->copy_group) {
      t->copies[left++] = c;
      continue;
    }
    memset(c.to, 0, c.size);
    if (c.taken) memcpy(c.to, c.from, c.taken);
  }
  t->n_copies = left;
}

/* An mbarrier's 64 bits: arrivals of a phase, those still missing, the phase, bytes still missing (of either sign). */
typedef struct {
  uint16_t all, missing;
  int32_t bytes : 31;
  uint32_t phase : 1;
} mbarrier;
_Static_assert(sizeof(mbarrier) == 8, "an mbarrier has 8 bytes");

static mbarrier *mbarrier_at(ptx_thread *const t, const uint64_t address) {
  return (mbarrier *)ptx_shared(t, address, 8, true);
}

static void complete(mbarrier *const b) {
  if (b->missing != 0 || b->bytes != 0) return;
  b->missing = b->all;
  b->phase ^= 1;
}

void ptx_mbarrier_init(ptx_thread *const t, const uint64_t address, const uint32_t arrivals) {
  *mbarrier_at(t, address) = (mbarrier){(uint16_t)arrivals, (uint16_t)arrivals, 0, 0};
}

void ptx_mbarrier_expect(ptx_thread *const t, const uint64_t address, const uint32_t bytes) {
  mbarrier_at(t, address)->bytes += (int32_t)bytes;
}

void ptx_mbarrier_arrive(ptx_thread *const t, const uint64_t address, const uint32_t bytes) {
  mbarrier *const b = mbarrier_at(t, address);
  if (b->missing == 0) ptx_fail(t, "an arrival too many at an mbarrier");
  b->bytes += (int32_t)bytes;
  b->missing--;
  complete(b);
}

uint32_t ptx_mbarrier_wait(ptx_thread *const t, const uint64_t address, const uint32_t parity) {
  const mbarrier *const b = mbarrier_at(t, address);
  if (b->phase != (parity & 1)) return 1;
  ptx_spin(t);
  return b->phase != (parity & 1);
}

void ptx_bulk_copy(ptx_thread *const t, const uint64_t to, const uint64_t from, const uint32_t size,
                   const uint64_t barrier) {
  if (machine.n_bulk == BULK_COPIES) ptx_fail(t, "too many pending bulk copies");
  if (size % 16 != 0 || to % 16 != 0 || from % 16 != 0) ptx_fail(t, "a bulk copy of no whole number of 16 bytes");
  if (size == 0) return;
  ptx_shared(t, to + size - 1, 1, true);
  if (!reaches(t, from, size)) bad_access(t, "global, bulk,", from, size, false);
  machine.bulk[machine.n_bulk++] = (ptx_bulk){
      ptx_shared(t, to, 16, true), (const uint8_t *)(uintptr_t)from, (uint64_t *)mbarrier_at(t, barrier), size, {0}};
}

static uint32_t box_row_bytes(const bsh_map_of *const map) {
  return (uint32_t)map->box_columns * (map->type == BSH_MAP_U8 ? 1 : 2);
}

/* Row i of a box: the bytes of it that the matrix has, and where they are. */
static uint32_t row_of_box(const ptx_box *const box, const uint32_t i, const uint8_t **const from) {
  const bsh_map_of *const map = box->map;
  const int64_t row = box->row + (int64_t)i, left = map->columns - box->column;
  if (row < 0 || row >= map->rows || box->column < 0 || left <= 0) return 0;
  const int64_t item = map->type == BSH_MAP_U8 ? 1 : 2, n = left < map->box_columns ? left : map->box_columns;
  *from = (const uint8_t *)map->data + row * map->row_bytes + box->column * item;
  return (uint32_t)(n * item);
}

void ptx_tensor_copy(ptx_thread *const t, const uint64_t to, const uint64_t map, const uint32_t column,
                     const uint32_t row, const uint64_t barrier, const uint32_t blocks) {
  const ptx_box box = {(const bsh_map_of *)(uintptr_t)map, (int32_t)column, (int32_t)row};
  const uint32_t bytes = box_row_bytes(box.map), size = bytes * (uint32_t)box.map->box_rows;
  if (to % (8 * bytes) != 0) ptx_fail(t, "a box does not begin where its swizzle does");
  for (uint32_t i = 0; i < (uint32_t)box.map->box_rows; i++) {
    const uint8_t *from = NULL;
    const uint32_t n = row_of_box(&box, i, &from);
    if (n > 0 && !reaches(t, (uint64_t)(uintptr_t)from, n))
      bad_access(t, "global, tensor,", (uint64_t)(uintptr_t)from, n, false);
  }
  for (uint32_t rank = 0; blocks >> rank; rank++) {
    if (!(blocks >> rank & 1)) continue;
    if (machine.n_bulk == BULK_COPIES) ptx_fail(t, "too many pending bulk copies");
    const uint64_t there = (uint64_t)rank << 24;
    ptx_shared(t, there | ((to & 0xFFFFFF) + size - 1), 1, true);
    machine.bulk[machine.n_bulk++] = (ptx_bulk){ptx_shared(t, there | (to & 0xFFFFFF), 16, true), NULL,
                                                (uint64_t *)mbarrier_at(t, there | (barrier & 0xFFFFFF)), size, box};
  }
}

/* 16-byte chunk c of row r goes to chunk c ^ r % 8 where rows have 128 bytes, c ^ r / 2 % 4 where they have 64. `to` is
 * aligned to 8 rows. What the matrix has not is 0. */
static void finish_box(const ptx_bulk *const c) {
  const uint32_t bytes = box_row_bytes(c->box.map);
  for (uint32_t i = 0; i < (uint32_t)c->box.map->box_rows; i++) {
    const uint8_t *from = NULL;
    const uint32_t n = row_of_box(&c->box, i, &from);
    for (uint32_t b = 0; b < bytes; b++) {
      const uint32_t place = i * bytes + b;
      c->to[place ^ ((place >> 7 & (bytes / 16 - 1)) << 4)] = b < n ? from[b] : 0;
    }
  }
}

static uint64_t draw(void) {
  machine.random ^= machine.random << 13;
  machine.random ^= machine.random >> 7;
  machine.random ^= machine.random << 17;
  return machine.random;
}

/* One of the pending bulk copies is made. */
static void finish_bulk(void) {
  const uint32_t which = machine.random ? (uint32_t)(draw() % machine.n_bulk) : 0;
  const ptx_bulk c = machine.bulk[which];
  machine.bulk[which] = machine.bulk[--machine.n_bulk];
  if (c.box.map != NULL) finish_box(&c);
  else memcpy(c.to, c.from, c.size);
  mbarrier *const b = (mbarrier *)c.barrier;
  b->bytes -= (int32_t)c.size;
  complete(b);
}

/* ---- a launch ---- */

typedef struct {
  ptx_cta *ctas; /* a cluster's are neighbours */
  ptx_cluster *clusters;
  uint64_t n, threads, warps, groups;
} residents;

static void *zeroed(const size_t n) { return calloc(n ? n : 1, 1); }

static bool make(residents *const r, ptx_run *const run) {
  r->threads = run->block[0] * run->block[1] * run->block[2];
  r->warps = (r->threads + PTX_WARP - 1) / PTX_WARP;
  r->groups = (r->threads + 127) / 128;
  r->ctas = zeroed(r->n * sizeof *r->ctas);
  r->clusters = zeroed((r->n / run->cluster) * sizeof *r->clusters);
  for (uint64_t i = 0; i < r->n; i++) {
    ptx_cta *const cta = &r->ctas[i];
    cta->run = run;
    cta->shared_size = ptx_static_shared + run->shared;
    cta->shared = aligned_alloc(1024, (cta->shared_size + 2047) / 1024 * 1024);
    cta->warps = zeroed(r->warps * sizeof *cta->warps);
    cta->groups = zeroed(r->groups * sizeof *cta->groups);
    cta->threads = zeroed(r->threads * sizeof *cta->threads);
    uint8_t *const stacks =
        mmap(NULL, r->threads * APART, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) return false;
    for (uint64_t j = 0; j < r->threads; j++) cta->threads[j].stack = stacks + j * APART;
  }
  return true;
}

static void discard(const residents *const r) {
  for (uint64_t i = 0; i < r->n; i++) {
    munmap(r->ctas[i].threads[0].stack, r->threads * APART);
    for (uint64_t g = 0; g < r->groups; g++) free(r->ctas[i].groups[g].pending);
    for (uint64_t j = 0; j < r->threads; j++) free(r->ctas[i].threads[j].copies);
    free(r->ctas[i].threads), free(r->ctas[i].groups), free(r->ctas[i].warps), free(r->ctas[i].shared);
  }
  free(r->clusters), free(r->ctas);
}

/* Place `which` of the grid on a cluster's CTAs. Shared memory begins with what others left there. */
static void start(const residents *const r, ptx_run *const run, const uint64_t slot, const uint64_t which) {
  const uint64_t first = slot * run->cluster;
  r->clusters[slot] = (ptx_cluster){0, 0, (uint32_t)run->cluster};
  for (uint64_t c = 0; c < run->cluster; c++) {
    ptx_cta *const cta = &r->ctas[first + c];
    const uint64_t index = which * run->cluster + c;
    cta->id[0] = index % run->grid[0];
    cta->id[1] = index / run->grid[0] % run->grid[1];
    cta->id[2] = index / run->grid[0] / run->grid[1];
    cta->rank = (uint32_t)c;
    cta->cluster = &r->clusters[slot];
    cta->live = (uint32_t)r->threads, cta->registers = 0;
    memset(cta->barriers, 0, sizeof cta->barriers);
    memset(cta->warps, 0, r->warps * sizeof *cta->warps);
    memset(cta->shared, 0xFF, cta->shared_size);
    for (uint64_t j = 0; j < r->threads; j++) {
      ptx_thread *const t = &cta->threads[j];
      t->run = run, t->cta = cta, t->index = (uint32_t)j;
      t->tid[0] = j % run->block[0];
      t->tid[1] = j / run->block[0] % run->block[1];
      t->tid[2] = j / run->block[0] / run->block[1];
      t->waiting = NULL, t->done = t->spinning = t->waited = false, t->n_copies = t->copy_group = 0;
      prepare(t);
    }
  }
}

/* Whether it ran to its next wait; a spinning thread counts as no progress. */
static bool turn(ptx_thread *const t) {
  if (t->done || (t->waiting != NULL && *t->waiting == t->for_change)) return false;
  t->waiting = NULL, t->spinning = false;
  machine.current = t;
  ptx_switch(&machine.stack_pointer, t->stack_pointer);
  if (overflowed(t) && !machine.failed) {
    snprintf(t->run->error, sizeof t->run->error, "%s: a thread's stack of %d bytes ran over", t->run->kernel, STACK);
    machine.failed = true;
  }
  return !t->spinning;
}

/* One turn for every thread of a CTA, warps in an order of their own. */
static bool turns(const residents *const r, ptx_cta *const cta) {
  enum { LATE = 8 }; /* one warp of so many misses its turn: others may come twice before it */
  bool moved = false;
  const uint64_t shift = machine.random ? draw() % r->warps : 0;
  for (uint64_t w = 0; w < r->warps && !machine.failed; w++) {
    if (machine.random && draw() % LATE == 0) {
      moved = true;
      continue;
    }
    const uint64_t first = (w + shift) % r->warps * PTX_WARP;
    for (uint64_t j = first; j < first + PTX_WARP && j < r->threads && !machine.failed; j++)
      moved |= turn(&cta->threads[j]);
  }
  return moved;
}

static bool cluster_ended(const residents *const r, const ptx_run *const run, const uint64_t slot) {
  for (uint64_t c = 0; c < run->cluster; c++)
    if (r->ctas[slot * run->cluster + c].live != 0) return false;
  return true;
}

static void work(const residents *const r, ptx_run *const run) {
  const uint64_t total = run->grid[0] * run->grid[1] * run->grid[2] / run->cluster, slots = r->n / run->cluster;
  uint64_t next = 0, ended = 0, idle = 0, since_bulk = 0;
  bool *const busy = zeroed(slots);
  while (ended < total && !machine.failed) {
    bool moved = false;
    for (uint64_t slot = 0; slot < slots; slot++) {
      if (!busy[slot] && next < total) start(r, run, slot, next++), busy[slot] = moved = true;
      if (!busy[slot]) continue;
      for (uint64_t c = 0; c < run->cluster; c++) moved |= turns(r, &r->ctas[slot * run->cluster + c]);
      if (cluster_ended(r, run, slot)) busy[slot] = false, ended++, moved = true;
    }
    /* Threads that look at a flag together move without end: copies are late, but they come. */
    const bool due = !moved || ++since_bulk == LATE || (machine.random && draw() % 4 == 0);
    if (machine.n_bulk > 0 && due) finish_bulk(), moved = true, since_bulk = 0;
    idle = moved ? 0 : idle + 1;
    if (idle == SPINS) {
      snprintf(run->error, sizeof run->error, "%s: all threads wait for one another", run->kernel);
      machine.failed = true;
    }
  }
  free(busy);
}

/* Runs a kernel; 0, or 1 with the reason in run->error. */
__attribute__((visibility("default"))) int ptx_launch(ptx_run *const run) {
  const ptx_entry *entry = ptx_entries;
  while (entry->name != NULL && strcmp(entry->name, run->kernel) != 0) entry++;
  if (entry->name == NULL) {
    snprintf(run->error, sizeof run->error, "no kernel %s", run->kernel);
    return 1;
  }
  const uint64_t grid = run->grid[0] * run->grid[1] * run->grid[2];
  residents r = {.n = run->resident < grid ? run->resident : grid};
  r.n = (r.n + run->cluster - 1) / run->cluster * run->cluster;
  memset(&machine, 0, sizeof machine);
  machine.kernel = entry->kernel;
  machine.random = run->seed;
  if (make(&r, run)) work(&r, run);
  else snprintf(run->error, sizeof run->error, "no memory for %llu threads", (unsigned long long)(r.n * r.threads));
  const bool failed = machine.failed || run->error[0] != 0;
  discard(&r);
  return failed;
}
