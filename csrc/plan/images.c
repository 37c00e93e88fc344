/* plan/images.c - see plan/images.h. */
#include "plan/images.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#ifndef BSH_CUDA_ARCHS
#define BSH_CUDA_ARCHS "75,80,90a,100,120,compute_120"
#endif

/* One entry of the list: [compute_]<number>[a|f], up to a comma or the end. */
typedef struct {
  int32_t arch;
  bool ptx, this_gpu_only;
} image_entry;

static image_entry parse_entry(const char *text) {
  image_entry entry = {.ptx = strncmp(text, "compute_", 8) == 0};
  char *end;
  entry.arch = (int32_t)strtol(text + (entry.ptx ? 8 : 0), &end, 10);
  entry.this_gpu_only = *end == 'a';
  return entry;
}

static bool loads(const image_entry entry, const int32_t sm) {
  if (entry.this_gpu_only) return entry.arch == sm;
  return entry.arch <= sm && (entry.ptx || entry.arch / 10 == sm / 10);
}

bsh_kernel_image bsh_image_for(const char *architectures, const int32_t sm) {
  bsh_kernel_image best = {0};
  bool best_is_ptx = true;
  for (const char *at = architectures; at != NULL; at = strchr(at, ',')) {
    at += *at == ',';
    const image_entry entry = parse_entry(at);
    if (entry.arch <= 0 || !loads(entry, sm)) continue;
    const bool better =
        best.arch == 0 || entry.ptx < best_is_ptx || (entry.ptx == best_is_ptx && entry.arch > best.arch);
    if (better) best = (bsh_kernel_image){entry.arch, entry.this_gpu_only}, best_is_ptx = entry.ptx;
    else if (entry.ptx == best_is_ptx && entry.arch == best.arch) best.this_gpu_only &= entry.this_gpu_only;
  }
  return best;
}

bsh_kernel_image bsh_image_here(const int32_t sm) {
  static _Atomic(uint32_t) last; /* sm << 16 | arch << 1 | this_gpu_only */
  const uint32_t known = atomic_load_explicit(&last, memory_order_relaxed);
  if (known >> 16 == (uint32_t)sm) return (bsh_kernel_image){(int32_t)(known >> 1 & 0x7FFF), known & 1};
  const bsh_kernel_image image = bsh_image_for(BSH_CUDA_ARCHS, sm);
  if (sm > 0 && sm < 0x8000)
    atomic_store_explicit(&last, (uint32_t)sm << 16 | (uint32_t)image.arch << 1 | image.this_gpu_only,
                          memory_order_relaxed);
  return image;
}
