"""4-bit parameters of modules that are not linear layers, for instance the 3-D expert weights of MoE models.

The packed bytes are registered as `Params4bit`; `torch.nn.utils.parametrize` dequantizes them wherever the module reads
the parameter. State dicts carry the keys of a `Linear4bit`: `name`, `name.absmax`, `name.quant_map`, ...
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.utils import parametrize

from bitshard.formats.state import QuantState
from bitshard.functions import functional
from bitshard.nn.holder import HoldsPackedWeight, PackedWeight
from bitshard.process import foreign
from bitshard.process.recognized import OfBitsandbytes
from bitshard.shards import gather
from bitshard.weights.tensor import Params4bit


class Bnb4bitParametrization(nn.Module, OfBitsandbytes):
    """Turns packed bytes into the weight they stand for.

    Args:
        quant_state: shape, dtype, format and scales of the weight.
    """

    def __init__(self, quant_state: QuantState) -> None:
        super().__init__()
        self.packed_weight = PackedWeight(self, "original", quant_state.shape)
        self.packed_weight.known(quant_state)

    @property
    def quant_state(self) -> QuantState:
        """The quantization state of the weight."""
        return self.packed_weight.state

    @torch.no_grad()
    def forward(self, quantized_param: torch.Tensor) -> torch.Tensor:
        """Dequantize [n, 1] packed bytes to `quant_state.shape` in `quant_state.dtype`; no gradient flows through.

        A shard of FSDP2, read between forwards, is gathered by all ranks together. ValueError where the bytes are not
        those that were quantized (see `bitshard.tensor.verify`).
        """
        if gather.is_dtensor(quantized_param):
            return functional.dequantize_4bit(quantized_param, self.packed_weight.state)
        return functional.dequantize_4bit(*self.packed_weight.ready(quantized_param))


class PackedParametrizationList(HoldsPackedWeight, parametrize.ParametrizationList):
    """torch's container of one parametrized weight, which registers the packed bytes as `original`."""


def _parameter(module: nn.Module, param_name: str) -> nn.Parameter:
    if not hasattr(module, param_name):
        raise AttributeError(f"Module does not have parameter '{param_name}'")
    param = getattr(module, param_name)
    if not isinstance(param, nn.Parameter):
        raise TypeError(f"Parameter '{param_name}' is not an instance of nn.Parameter but {type(param).__name__}")
    return param


def _replace(module: nn.Module, param_name: str, packed: Params4bit) -> None:
    setattr(module, param_name, packed)
    parametrize.register_parametrization(module, param_name, Bnb4bitParametrization(packed.quant_state), unsafe=True)
    _register_parametrization_hooks(module, param_name)


def _hold(module: nn.Module, param_name: str) -> None:
    """Let the container of a parametrized weight hold it as `Linear4bit` does its weight."""
    owner = module.parametrizations[param_name]
    held, packed = owner[0].packed_weight, owner.original
    owner.__class__ = PackedParametrizationList
    held.owner, owner.packed_weight = owner, held
    if isinstance(packed, Params4bit):
        packed.module = owner
        owner.quant_type, owner.quant_storage = packed.quant_type, packed.quant_storage
        owner.compress_statistics = packed.compress_statistics


def replace_parameter_4bit(
    module: nn.Module,
    param_name: str,
    compress_statistics: bool = False,
    quant_type: Literal["nf4", "fp4"] = "nf4",
    blocksize: int | None = None,
) -> None:
    """Quantize `module.param_name` in place; reading it gives the dequantized weight from then on.

    Args:
        module: owner of the parameter.
        param_name: name of a floating point parameter of any shape.
        compress_statistics: whether the block scales are quantized too.
        quant_type: "nf4" or "fp4".
        blocksize: weights per block scale, None for the default of `quantize_4bit`.

    Raises:
        AttributeError: the module has no such attribute.
        TypeError: the attribute is not a parameter, or not one of floats.
    """
    param = _parameter(module, param_name)
    packed = Params4bit(
        param.data,
        requires_grad=False,
        blocksize=blocksize,
        compress_statistics=compress_statistics,
        quant_type=quant_type,
    )
    _replace(module, param_name, packed.to(param.device))


def replace_parameter_4bit_prequantized(
    module: nn.Module, param_name: str, qs_dict: dict[str, Any], device: torch.device
) -> None:
    """Let a parameter that already holds packed bytes be read as the weight they stand for.

    Args:
        module: owner of the parameter.
        param_name: name of a parameter of shape [n, 1] in any storage dtype.
        qs_dict: the quantization state, as `QuantState.as_dict(packed=True)` gives it.
        device: where bytes and state go.

    Raises:
        AttributeError: the module has no such attribute.
        TypeError: the attribute is not a parameter.
        ValueError: the state is incomplete, or does not fit the number of bytes.
    """
    param = _parameter(module, param_name)
    _replace(module, param_name, Params4bit.from_prequantized(param.data, qs_dict, device=device))


def _enable_parametrization_cache(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    parametrize._cache_enabled += 1


def _disable_parametrization_cache(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    """Undo one `_enable_parametrization_cache`; never below zero, which would keep the cache on for ever."""
    if parametrize._cache_enabled > 0:
        parametrize._cache_enabled -= 1
    if parametrize._cache_enabled == 0:
        parametrize._cache = {}


def _register_parametrization_hooks(module: nn.Module, param_name: str) -> None:
    """One dequantization per forward of `module`, however often it reads the parameter, and state dicts with scales.

    The closing hook must run also when forward ends in an exception: recomputation under activation checkpointing stops
    early by one, and a cache left on would keep every dequantized weight alive.
    """
    if parametrize.is_parametrized(module, param_name):
        _hold(module, param_name)
    module.register_forward_pre_hook(_enable_parametrization_cache)
    module.register_forward_hook(_disable_parametrization_cache, always_call=True)
    module.register_state_dict_post_hook(partial(_parametrized_state_dict_post_hook, param_name=param_name))
    module.register_load_state_dict_pre_hook(partial(_before_loading, param_name=param_name))
    module.register_load_state_dict_post_hook(partial(_after_loading, param_name=param_name))


def _rename(state_dict: dict[str, Any], old: str, new: str) -> None:
    """Give the entry `old` and those below it, `old.absmax` and so on, the name `new`."""
    for key in [key for key in state_dict if key == old or key.startswith(f"{old}.")]:
        state_dict[f"{new}{key.removeprefix(old)}"] = state_dict.pop(key)


def _parametrized_state_dict_post_hook(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    *,
    param_name: str = "weight",
    **kwargs: Any,
) -> None:
    """Save the packed bytes under the parameter's own name and the quantization state beside them.

    ValueError where transformers' `save_pretrained` asks, whose files nobody could read.
    """
    if _for_transformers():
        from bitshard.sharding.checkpoints.contents import parametrized_error

        raise parametrized_error(f"{prefix}{param_name}")
    _rename(state_dict, f"{prefix}parametrizations.{param_name}.original", f"{prefix}{param_name}")


def _for_transformers() -> bool:
    """Whether the state dict that is being made is one of transformers' `save_pretrained`."""
    frame = foreign.asker()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("torch."):
        frame = frame.f_back
    saves = foreign.TRANSFORMERS_SAVES
    return frame is not None and foreign.is_of(frame, saves) and frame.f_globals.get("__name__") == saves.module


def _before_loading(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *arguments: Any, param_name: str
) -> None:
    """Let the container find what was saved under the parameter's own name."""
    if parametrize.is_parametrized(module, param_name):
        _rename(state_dict, f"{prefix}{param_name}", f"{prefix}parametrizations.{param_name}.original")


def _after_loading(module: nn.Module, incompatible_keys: Any, *, param_name: str) -> None:
    """Name what is missing as state dicts do."""
    missing, container = incompatible_keys.missing_keys, f"parametrizations.{param_name}.original"
    missing[:] = [f"{key.removesuffix(container)}{param_name}" if key.endswith(container) else key for key in missing]
