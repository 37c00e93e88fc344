/* plan/images.h - which of a build's kernel images a GPU gets. Pure but for the build's own list of architectures. */
#ifndef BSH_PLAN_IMAGES_H
#define BSH_PLAN_IMAGES_H

#include <stdbool.h>
#include <stdint.h>

/* Which of the images the driver loads on a GPU `sm` (10 * major + minor). `architectures`: what the build was made
 * for, as nvcc numbers it: "80,90a,compute_80". Machine code is taken before PTX: the newest of the GPU's major
 * version, not above it; else the newest PTX not above it. Code for 90a and the like has instructions of that one GPU
 * generation. */
typedef struct {
  int32_t arch;       /* 10 * major + minor that the image was compiled for, 0: none loads */
  bool this_gpu_only; /* of an architecture with an "a", no plain one beside it */
} bsh_kernel_image;
bsh_kernel_image bsh_image_for(const char *architectures, int32_t sm);

/* The same of this build; the last answer is kept. A build without kernels answers like one with all of them. */
bsh_kernel_image bsh_image_here(int32_t sm);

#endif
