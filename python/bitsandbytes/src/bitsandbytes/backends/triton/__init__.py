"""No kernels: those of bitshard are in C and CUDA."""
