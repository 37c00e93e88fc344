"""bitshard: 4-bit weights that survive sharding.

The engine: quantized tensors and their products for PyTorch, computed by a C and CUDA core. The package `bitsandbytes`
of this project re-exports it under the names that transformers, accelerate, peft and trl look for.
"""

import sys
import sysconfig

try:
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise ImportError("bitshard needs Python with the GIL: this one is free-threaded")
    import torch  # noqa: F401  (the C core looks up libtorch, which must be loaded)

    from bitshard import _C, nn, ops
    from bitshard.formats import state
    from bitshard.formats.state import QuantState
    from bitshard.functions import direct, functional
    from bitshard.huggingface import at_train
    from bitshard.huggingface.entries import ENTRIES
    from bitshard.nn.linear import Linear4bit, LinearFP4, LinearNF4
    from bitshard.process import registry, switches
    from bitshard.products import autograd
    from bitshard.products.autograd import matmul_4bit
    from bitshard.weights import tensor
    from bitshard.weights.int8_params import Int8Params
    from bitshard.weights.tensor import PackedData, Params4bit

    direct.enable_direct_calls(Params4bit, PackedData, Int8Params)
    switches.attend(at_train.ACTS)
    registry.watch(ENTRIES)
    __version__ = _C.version
except ImportError:
    # `python -m bitshard` says what is wrong, so it must get past this.
    if sys.argv[:1] != ["-m"] or ("-m", "bitshard") not in zip(sys.orig_argv, sys.orig_argv[1:], strict=False):
        raise

__all__ = [
    "Linear4bit",
    "LinearFP4",
    "LinearNF4",
    "Params4bit",
    "QuantState",
    "autograd",
    "functional",
    "matmul_4bit",
    "nn",
    "ops",
    "state",
    "tensor",
]
