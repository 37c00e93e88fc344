"""Kernels for CUDA, in `ops`."""
