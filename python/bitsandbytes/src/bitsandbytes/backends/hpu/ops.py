"""No kernels: bitshard does not run on Gaudi."""

from ..._ops import register_kernel
from ..utils import GAUDI_SW_VER

__all__ = ["GAUDI_SW_VER", "register_kernel"]
