"""How unsloth goes around peft's LoRA layers, so that a report can say so. Nothing of unsloth is imported.

Its `get_peft_model` gives the attention and the MLP of a decoder layer functions of `unsloth.kernels` as attributes.
They read the weights of q, k and v, of o, or of the MLP's layers, and compute them in kernels of unsloth's own: peft's
layers are never called. What it can't take so it calls, but with another forward on the classes themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

KERNELS = "unsloth.kernels."
WORDS = "unsloth's own kernels"
# attribute of a block -> the layers that its function computes; None: all of the block
_BLOCKS = {"apply_qkv": ("q_proj", "k_proj", "v_proj"), "apply_o": ("o_proj",), "forward": None}
_BLOCKS["_unsloth_forward"] = None  # where the MLP is computed tile by tile


def computed(model: nn.Module) -> Iterator[str]:
    """Names of the modules of `model` that unsloth's kernels compute without calling them."""
    for path, block in model.named_modules():
        for attribute, names in _BLOCKS.items():
            if _module_of(vars(block).get(attribute)).startswith(KERNELS):
                prefix = f"{path}." if path else ""
                yield from (f"{prefix}{name}" for name in names or block._modules)


def by(forward: Any) -> str:
    """ " by unsloth" of a forward that unsloth has put on a class, else nothing."""
    return " by unsloth" if _module_of(forward).startswith("unsloth") else ""


def _module_of(function: Any) -> str:
    function = getattr(function, "__func__", function)
    function = function.func if isinstance(function, functools.partial) else function
    return getattr(function, "__module__", None) or ""
