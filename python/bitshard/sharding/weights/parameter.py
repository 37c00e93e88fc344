"""The weight that FSDP2 registers: its own DTensor around a `PackedShard`, which answers as a `Params4bit` does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from bitshard.formats.container import repack
from bitshard.formats.state import QuantState
from bitshard.process import foreign
from bitshard.sharding.weights.state_entries import sharded_entries, state_of
from bitshard.shards import gather
from bitshard.shards.shard import PackedShard
from bitshard.weights.guards import grad_error
from bitshard.weights.tensor import Params4bit


def _keeping_class(name: str) -> Callable[..., DTensor]:
    """A method of DTensor whose result, still a packed shard, answers as `ShardedWeight` too.

    (`__torch_dispatch__` cannot see to that: torch 2.10 and 2.11 pass over it in subclasses of DTensor.)
    """
    method = getattr(DTensor, name)

    @functools.wraps(method)
    def call(weight: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        return as_entry(method(weight, *args, **kwargs))

    return call


def _entry(name: str) -> property:
    """An entry of the state dict as an attribute: torch.distributed resolves the key "weight.absmax" with getattr."""
    return property(lambda weight: sharded_entries(weight)[name])


class ShardedWeight(DTensor):
    """The registered weight of a layer that FSDP2 sharded, to foreign code a Params4bit that answers for all ranks.

    It is FSDP2's own DTensor around a `PackedShard`; `adopt` gives it this class when FSDP2 registers it, and the
    attributes of the Params4bit it was cut from. peft and transformers ask for the name of the class, dequantize by
    `dequantize_4bit(weight.data, weight.quant_state)`, and rebuild a weight from `weight.__dict__`.

    Gathered (`full_tensor`, torch's full state dicts) it is a plain tensor in the declared `quant_storage`.
    """

    detach = _keeping_class("detach")
    clone = _keeping_class("clone")
    to = _keeping_class("to")
    cpu = _keeping_class("cpu")

    def redistribute(self, device_mesh: Any = None, placements: Any = None, **options: Any) -> DTensor:
        """As of any DTensor; made whole on every rank, in the declared storage: that is what files get."""
        out = gather.plain(self).redistribute(device_mesh, placements, **options)
        origin = self._local_tensor.origin
        if origin.storage is origin.dtype or not all(placement.is_replicate() for placement in out.placements):
            return out
        packed = repack(gather.whole(out), origin.storage, origin.state)
        return DTensor.from_local(packed, out.device_mesh, out.placements, run_check=False)

    def requires_grad_(self, requires_grad: bool = True) -> DTensor:
        """Only to turn it off: packed bytes have no gradient."""
        if requires_grad:
            raise grad_error(self._local_tensor.origin.state.kind.word)
        return super().requires_grad_(False)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        """The bytes are copied; state, scales and layer stay those of this weight."""
        copy = self.detach().clone()
        memo[id(self)] = copy = nn.Parameter(copy, requires_grad=False) if isinstance(self, nn.Parameter) else copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return gather.plain(self).__reduce_ex__(protocol)

    @property
    def data(self) -> Any:
        """As of any DTensor. Of a stack of experts that peft merges into: what takes the sum."""
        merges = (foreign.PEFT_MERGES, foreign.PEFT_UNMERGES)
        if _is_stack(self.__dict__.get("module")) and any(map(foreign.asked_by, merges)):
            return Params4bit.summed(self)
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value: Any) -> None:
        replacement = getattr(value, "replacement", None)
        if replacement is None:
            return torch.Tensor.data.__set__(self, value)
        held = self.__dict__["module"]
        setattr(held.owner, held.name, replacement)

    @property
    def quant_state(self) -> QuantState:
        """The state of the whole weight; its `absmax` is real only while the weight is gathered."""
        return state_of(self)

    @property
    def ds_shape(self) -> torch.Size:
        """Shape of a stack of experts as its module shows it, as in `Params4bit`."""
        held = self.__dict__.get("module")
        if not _is_stack(held):
            raise AttributeError("ds_shape: this is the weight of a layer")
        return held.shown

    absmax = _entry("absmax")
    quant_map = _entry("quant_map")
    nested_absmax = _entry("nested_absmax")
    nested_quant_map = _entry("nested_quant_map")
    global_scale = _entry("global_scale")


ShardedWeight.__name__ = "Params4bit"


def _is_stack(held: Any) -> bool:
    kind = getattr(held, "kind", None)
    return kind is not None and kind.stacked


def adopt(weight: DTensor, module: nn.Module) -> bool:
    """FSDP2 registers `weight` in `module`: make it answer as the Params4bit it was cut from does.

    False for a weight that is no packed shard: being loaded, or sharded before it was quantized.
    """
    if not isinstance(weight._local_tensor, PackedShard):
        return False
    attributes = dict(weight._local_tensor.origin.attributes)
    attributes.pop("quant_state", None)
    weight.__class__ = ShardedWeight
    weight.__dict__.update(attributes, module=module)
    return True


def settled(weight: DTensor, module: nn.Module) -> DTensor:
    """The adopted `weight`, on the CPU where FSDP2 keeps it there: loaders bring it to the device of the mesh."""
    if not weight._local_tensor.origin.on_cpu or weight.device.type == "cpu":
        return weight
    moved = nn.Parameter(DTensor(weight._local_tensor.cpu(), weight._spec, requires_grad=False), requires_grad=False)
    adopt(moved, module)
    return moved


def as_entry(weight: DTensor) -> DTensor:
    """`weight` as a state dict holds it: it gathers into the declared storage."""
    if isinstance(weight._local_tensor, PackedShard):
        weight.__class__ = ShardedWeight
    return weight
