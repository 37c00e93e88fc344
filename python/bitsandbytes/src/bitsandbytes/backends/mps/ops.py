"""No kernels: bitshard does not run on Apple GPUs."""

from ..._ops import register_kernel

__all__ = ["register_kernel"]
