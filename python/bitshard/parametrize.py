"""4-bit parameters of modules that are not linear layers, for instance the 3-D expert weights of MoE models.

The packed bytes are registered as `Params4bit`; `torch.nn.utils.parametrize` dequantizes them wherever the module reads
the parameter. State dicts carry the keys of a `Linear4bit`: `name`, `name.absmax`, `name.quant_map`, ...
"""

from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.utils import parametrize

from . import functional
from .functional import QuantState
from .linear import _is_dtensor
from .tensor import Params4bit, verify


class Bnb4bitParametrization(nn.Module):
    """Turns packed bytes into the weight they stand for.

    Args:
        quant_state: shape, dtype, format and scales of the weight.
    """

    def __init__(self, quant_state: QuantState) -> None:
        super().__init__()
        self.quant_state = quant_state
        self.foreign_data = False  # somebody else has set the packed bytes since they were quantized
        self.verified_state: QuantState | None = None  # the state that foreign bytes were checked against

    @torch.no_grad()
    def forward(self, quantized_param: torch.Tensor) -> torch.Tensor:
        """Dequantize [n, 1] packed bytes to `quant_state.shape` in `quant_state.dtype`; no gradient flows through.

        ValueError where the bytes are not those that were quantized (see `bitshard.tensor.verify`).
        """
        state = self.quant_state
        if state.absmax.device != quantized_param.device and not state.absmax.is_meta:
            state.to(quantized_param.device)
        if self.verified_state is not state and (self.foreign_data or type(quantized_param) is not Params4bit):
            verify(quantized_param, state, f"4-bit parameter of shape {list(state.shape)}")
            self.verified_state = state
        return functional.dequantize_4bit(quantized_param, state)


def _parameter(module: nn.Module, param_name: str) -> nn.Parameter:
    if not hasattr(module, param_name):
        raise AttributeError(f"Module does not have parameter '{param_name}'")
    param = getattr(module, param_name)
    if not isinstance(param, nn.Parameter):
        raise TypeError(f"Parameter '{param_name}' is not an instance of nn.Parameter but {type(param).__name__}")
    return param


def _replace(module: nn.Module, param_name: str, packed: Params4bit) -> None:
    parametrization = Bnb4bitParametrization(packed.quant_state)
    packed.module = parametrization  # its state follows the weight's
    setattr(module, param_name, packed)
    parametrize.register_parametrization(module, param_name, parametrization, unsafe=True)
    _register_parametrization_hooks(module, param_name)


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
    module.register_forward_pre_hook(_enable_parametrization_cache)
    module.register_forward_hook(_disable_parametrization_cache, always_call=True)
    module.register_state_dict_post_hook(partial(_parametrized_state_dict_post_hook, param_name=param_name))


def _parametrized_state_dict_post_hook(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    *,
    param_name: str = "weight",
    **kwargs: Any,
) -> None:
    """Save the packed bytes under the parameter's own name and the quantization state beside them."""
    original = f"{prefix}parametrizations.{param_name}.original"
    if original not in state_dict:
        return
    value = state_dict.pop(original)
    packed, state = module.parametrizations[param_name].original, module.parametrizations[param_name][0].quant_state
    if _is_dtensor(packed):
        from . import fsdp

        entries = fsdp.sharded_entries(packed, state)
        value = fsdp.state_dict_entry(value)
    else:
        entries = state.as_dict(packed=True)
        if isinstance(value, Params4bit) and value is not packed:  # the same with keep_vars
            value = value.saved_data()
    state_dict[prefix + param_name] = value
    state_dict.update({f"{prefix}{param_name}.{key}": entry for key, entry in entries.items()})
