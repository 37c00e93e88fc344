"""bitshard under the import name `bitsandbytes`.

Every public name sits at the module path where bitsandbytes 0.50.2 has it. Code lives in the package `bitshard`; what
is defined here is the `bitsandbytes::` operator names (`_ops`) and names that bitshard does not have yet (`_absent`).
"""

from . import _ops as _ops
from . import cextension, consts, functional, nn, optim, utils
from .autograd._functions import MatmulLtState, matmul, matmul_4bit

__version__ = "0.50.2+bitshard.0.1.0"

features = {"multi_backend"}
supported_torch_devices = {"cpu", "cuda"}

__all__ = [
    "MatmulLtState",
    "cextension",
    "consts",
    "features",
    "functional",
    "matmul",
    "matmul_4bit",
    "nn",
    "optim",
    "supported_torch_devices",
    "utils",
]
