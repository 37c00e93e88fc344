"""bitshard under the import name `bitsandbytes`.

Every public name sits at the module path where bitsandbytes 0.50.2 has it. Code lives in the package `bitshard`; what
is defined here is the `bitsandbytes::` operator names (`_ops`), what is said of the machine (`cuda_specs`,
`cextension`, `diagnostics`), and names that bitshard does not have yet (`_absent`).
"""

try:
    import bitshard.functional as _engine  # noqa: F401  (a folder that pip has left empty has no such module)
except ModuleNotFoundError as error:
    if error.name not in ("bitshard", "bitshard.functional"):
        raise
    raise ImportError(
        "this bitsandbytes is bitshard's package, and its engine, the distribution bitshard, is not installed: install "
        "bitshard again (then `bitshard unuse` puts a kept bitsandbytes back), or get the original by "
        "`pip install --force-reinstall --no-deps bitsandbytes==0.50.2`"
    ) from None

import torch

from . import _ops as _ops
from . import cextension, consts, cuda_specs, functional, nn, optim, utils
from .autograd._functions import MatmulLtState, matmul, matmul_4bit
from .backends.cpu import ops as cpu_ops
from .backends.default import ops as default_ops
from .nn import modules
from .optim import adam

if torch.cuda.is_available():
    from .backends.cuda import ops as cuda_ops  # noqa: F401

__version__ = "0.50.2+bitshard.0.1.0"

features = {"multi_backend"}
supported_torch_devices = {"cpu", "cuda"}

__all__ = [
    "MatmulLtState",
    "adam",
    "cextension",
    "consts",
    "cpu_ops",
    "cuda_specs",
    "default_ops",
    "features",
    "functional",
    "matmul",
    "matmul_4bit",
    "modules",
    "nn",
    "optim",
    "supported_torch_devices",
    "utils",
]
