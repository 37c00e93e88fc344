"""No kernels: bitshard does not run on Intel GPUs."""
