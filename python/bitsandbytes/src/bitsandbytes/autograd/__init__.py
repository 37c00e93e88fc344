"""Autograd functions, in `bitsandbytes.autograd._functions`."""
