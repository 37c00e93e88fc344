"""Experts modules of transformers with 4-bit stacks: which modules these are, and how one gets them.

transformers keeps the experts of a layer as stacked parameters of one module, [E, N, K], or [E, K, N] where the module
says `is_transposed` (gpt-oss). Here such a parameter is a `Params4bit` whose packed bytes are always those of
[E, N, K]: one column [n, 1], expert after expert. Its holder is a `PackedStack`. The module keeps its class, with
`PackedExperts` in front of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bitshard.formats.checks import check_storage
from bitshard.formats.kind import Kind, kind_of
from bitshard.formats.state import QuantState
from bitshard.functions import functional
from bitshard.nn.holder import HoldsPackedWeights, PackedWeight
from bitshard.process import launch
from bitshard.shards import gather
from bitshard.weights.tensor import Params4bit

_FLAGS = ("has_gate", "has_bias", "is_transposed")  # what transformers' decorator of experts classes sets
_classes: dict[type, type] = {}


class PackedStack(PackedWeight):
    """The holder of one stack; attributes as of a `PackedWeight`, and the settings that a layer of one weight has.

    Attributes:
        transposed: whether the module shows [E, K, N].
        compute_dtype: dtype of x and biases in a product; None: that of x.
        packed_files: whether what is loaded comes packed.
    """

    def __init__(self, owner: nn.Module, name: str, settings: dict[str, Any]):
        shown = owner._parameters[name].shape
        self.transposed = bool(owner.is_transposed)
        super().__init__(owner, name, (shown[0], shown[2], shown[1]) if self.transposed else shown)
        self.quant_type: str = settings["quant_type"]
        self.quant_storage: torch.dtype = settings["quant_storage"]
        self.compress_statistics: bool = settings["compress_statistics"]
        self.compute_dtype: torch.dtype | None = settings.get("compute_dtype")
        self.packed_files: bool = settings.get("packed_files", False)

    def fitting(self, state: QuantState) -> QuantState:
        """A flat stack, as `bitsandbytes.nn.parametrize` writes it, becomes one of experts where its bytes are theirs.

        Its nested scales have one second level for all experts, so they become plain ones, 4 bytes a block.
        """
        if state.kind.stacked:
            return state
        if self.transposed or state.shape != self.shape or state.shape[1:].numel() % state.blocksize:
            raise ValueError(
                f"{list(state.shape)}: a flat stack (bitsandbytes.nn.parametrize) for experts of {list(self.shown)}, "
                f"whose bytes are those of {list(self.shape)} in whole blocks of {state.blocksize}: dequantize it and "
                "load the values"
            )
        state = functional.with_plain_scales(state).clone()
        state.kind = self.kind
        return state

    @property
    def kind(self) -> Kind:
        """What the bytes are: a stack of weights in the format of the settings."""
        return kind_of(self.quant_type).stack

    @property
    def shown(self) -> torch.Size:
        """The shape that the module shows: [E, N, K], or [E, K, N] where it is `transposed`."""
        experts, N, K = self.shape
        return torch.Size((experts, K, N) if self.transposed else (experts, N, K))

    def shown_as(self, view: Tensor) -> Tensor:
        """A parameter in any case, for peft parametrizes no other tensors; under a version counter of its own."""
        return Params4bit.of_state(view.data, self.state, self.storage, self.layer)

    def oriented(self, values: Tensor) -> Tensor:
        """Values of the module's shape as [E, N, K], or the reverse."""
        return values.transpose(1, 2).contiguous() if self.transposed else values


class PackedExperts(HoldsPackedWeights):
    """An experts module of transformers whose stacks are 4-bit, or will be once they are loaded."""

    def __delattr__(self, name: str) -> None:
        """For peft, which parametrizes what is there: of a view of FSDP1 both places where it is."""
        if name in self._parameters and name in self.__dict__.get("packed_stacks", {}):
            self.__dict__.pop(name, None)
        super().__delattr__(name)

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _new, (type(self).__bases__[1],), self.__getstate__()  # the class was made here and has no place


def _new(plain: type) -> nn.Module:
    made = packed_class(plain)
    return made.__new__(made)


def packed_class(plain: type) -> type:
    """The class of a packed experts module that was a `plain`; it has the same name, which other code asks for."""
    if plain not in _classes:
        _classes[plain] = type(plain.__name__, (PackedExperts, plain), {"__module__": plain.__module__})
    return _classes[plain]


def is_experts(module: nn.Module) -> bool:
    """Whether this is a module of transformers' experts interface, with its weights in stacks."""
    if not hasattr(type(module), "_apply_gate") or not all(flag in vars(module) for flag in _FLAGS):
        return False
    tensors = [module._parameters.get(name) for name in stack_names(module)]
    return all(tensor is not None and (tensor.dim() == 3 or isinstance(module, PackedExperts)) for tensor in tensors)


def stack_names(module: nn.Module) -> tuple[str, str]:
    """Names of the stacks of an experts module."""
    return ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"


def found(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of every experts module of `model`."""
    return ((name, module) for name, module in model.named_modules() if is_experts(module))


def check(
    module: nn.Module, path: str, quant_type: str, blocksize: int | None, quant_storage: torch.dtype, **_: Any
) -> None:
    """TypeError or ValueError unless the stacks of an experts module can be 4-bit; `path` is its name."""
    if isinstance(module, PackedExperts):
        raise ValueError(f"{path}: these experts are 4-bit already")
    if (kind := kind_of(quant_type).stack) is None:
        raise ValueError(f"{path}: experts cannot be {quant_type!r}")
    blocksize = kind.blocksize if blocksize is None else blocksize
    kind.check(quant_type, blocksize)
    check_storage(quant_storage)
    for name in stack_names(module):
        stack = module._parameters[name]
        if gather.is_dtensor(stack):
            raise ValueError(
                f"{path}.{name}: this stack of {list(stack.shape)} is sharded already: quantize the model before "
                "fully_shard, or load it with a quantization_config"
            )
        elements = stack.shape[1:].numel()
        if not stack.is_floating_point() or stack.numel() == 0 or elements % blocksize:
            raise ValueError(
                f"{path}.{name}: a stack {list(stack.shape)} of {stack.dtype} cannot be 4-bit: it must hold floats, "
                f"and the {elements} elements of an expert must be a multiple of the blocksize {blocksize}; choose "
                "another blocksize, or name the module in llm_int8_skip_modules"
            )


def pack(module: nn.Module, path: str, **settings: Any) -> None:
    """Let the stacks of an experts module be 4-bit weights, quantized when they move to a device.

    Args:
        module: of transformers, with float stacks; on the meta device, too.
        path: its name, for messages.
        settings: quant_type, quant_storage, compress_statistics, blocksize, compute_dtype, packed_files.

    TypeError or ValueError where a stack cannot be 4-bit, or is already: the module is as it was.
    """
    check(module, path, **settings)
    module.__class__ = packed_class(type(module))
    module.packed_stacks = {name: PackedStack(module, name, settings) for name in stack_names(module)}
    for name, held in module.packed_stacks.items():
        stack = module._parameters[name]
        module._parameters[name] = Params4bit(
            stack.data,
            blocksize=settings["blocksize"],
            compress_statistics=held.compress_statistics,
            quant_type=held.quant_type,
            quant_storage=held.quant_storage,
            module=held,
        )
        if stack.is_meta:
            launch.layer_waits(held, stack.numel())
