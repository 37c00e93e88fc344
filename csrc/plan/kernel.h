/* plan/kernel.h - a kernel as plan/choose.c sees it: what it takes, what it costs, and how a product is cut for it. One
 * object of each, in plan/<kernel>.c. */
#ifndef BSH_PLAN_KERNEL_H
#define BSH_PLAN_KERNEL_H

#include <math.h>

#include "plan/cards.h"
#include "plan/product.h"

/* Code that a kernel has; its `refuses` says more. */
typedef enum {
  BSH_ANY_CARD,
  BSH_SM90A,      /* wgmma */
  BSH_SM90A_MAPS, /* the same, with tensor maps */
} bsh_needs;

enum { BSH_FORWARD_ONLY = 1 << BSH_FORWARD, BSH_GRADIENT_ONLY = 1 << BSH_INPUT_GRADIENT, BSH_BOTH = 3 };
#define BSH_KIND(kind) (1 << BSH_OF_##kind)

struct bsh_kernel {
  const char *name;
  uint8_t operands;   /* bits: BSH_KIND(4BIT), ... */
  uint8_t directions; /* BSH_FORWARD_ONLY, BSH_GRADIENT_ONLY or BSH_BOTH */
  bsh_needs needs;
  bsh_launch launch;
  int64_t rows; /* of x, of a launch; 0: all */
  /* NULL, or what of the facts it cannot take. Any number of rows: they go in slices. */
  const char *(*refuses)(const bsh_facts *facts);
  /* Nanoseconds, where there is an estimate of them. Where borders were measured instead, BSH_ORDER: such kernels come
   * before all with estimates, in this order. BSH_LAST: only where nobody multiplies panels. */
  double (*cost)(const bsh_facts *facts);
  /* NULL, or nanoseconds of a kernel that is chosen by measured borders: for plans of time, not for choosing. */
  double (*estimate)(const bsh_facts *facts);
  /* Fills a zeroed slice for slice->rows rows of a product that is not refused. NULL: panels. */
  void (*cut)(const bsh_facts *facts, bsh_plan_slice *slice);
};

#define BSH_ORDER(n) ((double)(n)) /* below 100; no product takes 100 ns */
#define BSH_LAST HUGE_VAL

/* The same by a card's rates: plan/sm80.c. */
double bsh_modelled_panels(const bsh_facts *facts);

/* Nanoseconds by panels: every weight is dequantized, then comes the vendor's product, at the speed of its tensor
 * cores, which are fewer on smaller cards, or of its memory, and not below what a launch takes. */
static inline double bsh_panels_nanoseconds(const bsh_facts *const facts) {
  if (bsh_rates_of(facts->sm)->chosen) return bsh_modelled_panels(facts);
  const bsh_card *const card = bsh_card_of(facts->sm);
  const double flops_per_ns = card->panels.flops_per_ns / card->sms * facts->sms;
  const double weights = (double)facts->N * (double)facts->K;
  const double product = fmax(2 * weights * (double)facts->M / flops_per_ns, 2 * weights / card->panels.bytes_per_ns);
  return card->panels.begin + weights / card->panels.weights_per_ns + fmax(product, card->panels.least);
}

/* The cost of a kernel that was measured as faster than panels; by how much was not. */
static inline double bsh_before_panels(const bsh_facts *const facts) {
  return facts->vendor == BSH_VENDOR_NONE ? BSH_LAST : nextafter(bsh_panels_nanoseconds(facts), 0);
}

/* Of a form of a kernel of tiles: its entries in `file`, [dtype][direction]. */
#define BSH_TILE_ENTRIES(file, stem, form)                                                                             \
  {                                                                                                                    \
    {BSH_KERNEL(file, stem "bf16_" #form), BSH_KERNEL(file, stem "dgrad_bf16_" #form)}, {                              \
      BSH_KERNEL(file, stem "f16_" #form), BSH_KERNEL(file, stem "dgrad_f16_" #form)                                   \
    }                                                                                                                  \
  }

/* All kernels, each a row of plan/choose.c. */
extern const bsh_kernel bsh_kernel_gemm_4bit_sm90, bsh_kernel_gemv_4bit, bsh_kernel_gemm_4bit_sm90_wide,
    bsh_kernel_gemv_4bit_simt, bsh_kernel_gemm_4bit_sm80, bsh_kernel_gemv_4bit_grouped,
    bsh_kernel_gemm_4bit_sm90_wide_grouped, bsh_kernel_gemm_4bit_sm80_grouped, bsh_kernel_gemm_4bit_sm75,
    bsh_kernel_gemm_4bit_sm75_grouped, bsh_kernel_gemv_int8, bsh_kernel_mixed_int8_sm90, bsh_kernel_gemm_int8_sm90,
    bsh_kernel_gemm_int8, bsh_kernel_any_int8, bsh_kernel_gemv_int8_dgrad, bsh_kernel_dgrad_int8_sm90,
    bsh_kernel_panels;

/* Of panels: fills the plan of a product that they do not refuse. */
void bsh_cut_panels(const bsh_facts *facts, bsh_plan *plan);

#endif
