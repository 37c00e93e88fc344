/* ops.h - registration of torch.ops.bitshard.*. */
#ifndef BSH_OPS_H
#define BSH_OPS_H

/* Registers every op for CPU and, where torch has it, CUDA; once per process. NULL, or a text that says what failed. */
const char *bsh_ops_register(void);

#endif
