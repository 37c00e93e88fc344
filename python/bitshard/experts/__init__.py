"""Mixture-of-experts models in 4 bits: the experts too, which transformers' own `load_in_4bit` leaves in 16 bits.

    import bitshard.experts
    bitshard.experts.enable()            # every BitsAndBytesConfig(load_in_4bit=True) of this process takes experts now
    model = AutoModelForCausalLM.from_pretrained(name, quantization_config=BitsAndBytesConfig(load_in_4bit=True))

or `bitshard.transformers.FourBitConfig` for one model, or `quantize(model)` for a model that is there. docs/experts.md.
"""

from __future__ import annotations

import torch
from torch import nn

from bitshard.experts import forward, modules
from bitshard.process import registry

__all__ = ["disable", "enable", "quantize"]


def enable() -> None:
    """Let every `BitsAndBytesConfig(load_in_4bit=True)` of this process take experts too; again changes nothing.

    Models whose files are MXFP4 (gpt-oss) keep their bytes then, where they are loaded without a config of one's own.

    BITSHARD_EXPERTS=1 in the environment does the same for scripts that nobody wants to edit.
    """
    registry.take_over()


def disable() -> None:
    """Undo `enable`: experts of models that are loaded from now on stay as they are in the files."""
    registry.give_back()


def quantize(
    model: nn.Module,
    *,
    quant_type: str = "nf4",
    blocksize: int | None = None,
    compress_statistics: bool = True,
    quant_storage: torch.dtype = torch.uint8,
    compute_dtype: torch.dtype | None = None,
    skip: tuple[str, ...] = (),
) -> int:
    """Quantize the experts of a model that is there; how many stacks. At most one stack is there twice at a time.

    Args:
        model: of transformers, in float32, float16 or bfloat16, not sharded.
        quant_type: "nf4", "fp4", "mxfp4" or "nvfp4".
        blocksize: weights per scale; None: 64, of MXFP4 32 and of NVFP4 16, which have no other.
        compress_statistics, quant_storage: as of `functional.quantize_4bit`.
        compute_dtype: dtype of a product; None: that of its input.
        skip: names of modules, or parts of them, that stay as they are.

    ValueError where the model has no experts modules, or a stack cannot be 4-bit; nothing was changed then.
    """
    settings = {"quant_type": quant_type, "blocksize": blocksize, "compress_statistics": compress_statistics}
    settings |= {"quant_storage": quant_storage, "compute_dtype": compute_dtype}
    found = [(path, module) for path, module in modules.found(model) if not any(part in path for part in skip)]
    if not found:
        raise ValueError(f"experts.quantize: {type(model).__name__} has no experts in stacks (or skip names them all)")
    for path, module in found:
        modules.check(module, path, **settings)
    forward.register()
    for path, module in found:
        modules.pack(module, path, **settings)
        for name in module.packed_stacks:
            stack = module._parameters[name]
            if not stack.is_meta:
                module._parameters[name] = stack.to(stack.device)
        module.config._experts_implementation = forward.IMPLEMENTATION
    return sum(len(module.packed_stacks) for _, module in found)
