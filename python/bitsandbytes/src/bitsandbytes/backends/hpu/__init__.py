"""No kernels: bitshard does not run on Gaudi."""
