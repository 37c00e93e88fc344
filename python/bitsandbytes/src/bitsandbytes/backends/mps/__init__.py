"""No kernels: bitshard does not run on Apple GPUs."""
