"""Kernels for any device, in `ops`."""
