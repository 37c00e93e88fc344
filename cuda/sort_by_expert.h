/* sort_by_expert.h - sizes of sort_by_expert.cu, for the kernel and its host (csrc/gpu/sort.c). C and CUDA. */
#ifndef BSH_SORT_BY_EXPERT_H
#define BSH_SORT_BY_EXPERT_H

/* One block of up to 32 warps; 32-bit counters in dynamic shared memory, all a block has without asking for more. */
enum { BSH_SORT_WARPS = 32, BSH_SORT_COUNTERS = 12 << 10 };

#endif
