"""Kernels for the CPU, in `ops`."""
