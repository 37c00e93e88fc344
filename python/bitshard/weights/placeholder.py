"""The placeholder of a 4-bit weight of which this rank keeps only its part: a Params4bit that cannot be read.

`bitshard.process.launch` decides which weights get one. `bitshard.shards.kept_part` keeps the part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bitshard.formats.state import QuantState, dtype_name
from bitshard.process import launch
from bitshard.shards import kept_part
from bitshard.shards.shard import PackedShard
from bitshard.weights import guards
from bitshard.weights.guards import cast_error, guarded, in_module_move, plain
from bitshard.weights.tensor import Params4bit, require_shardable


class _NoOperator(TorchDispatchMode):
    """While a function of torch runs with a placeholder among its arguments: ValueError at its first operator.

    Functions that only return metadata run no operator, or one of `kept_part.QUESTIONS`. So they need no list.
    """

    def __init__(self, what: str, state: QuantState):
        super().__init__()
        self.what, self.state = what, state

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func.overloadpacket not in kept_part.QUESTIONS:
            raise kept_part.unreadable(self.what, self.state)
        return func(*args, **(kwargs or {}))


class PlaceholderParams4bit(Params4bit):
    """Placeholder of a weight of which this rank keeps only its part, until `fully_shard` (`shards.kept_part`).

    Other libraries see a Params4bit of the whole size. Reading its bytes raises ValueError.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in HANDLERS:
            return guarded(HANDLERS, func, args, kwargs)
        what, state = getattr(func, "__name__", str(func)), _first((args, *kwargs.values())).quant_state
        if func in kept_part.READERS:
            raise kept_part.unreadable(what, state)
        with _NoOperator(what, state):
            return guarded(HANDLERS, func, args, kwargs)

    def to(self, *args: Any, **kwargs: Any) -> Params4bit:
        """Move this rank's part."""
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is not None and dtype is not self.dtype and not in_module_move():
            raise cast_error(self, f"to({dtype_name(dtype)})")
        if device is None or device == self.device:
            return self
        if device.type == "meta":
            raise kept_part.unreadable("to(meta)", self.quant_state)
        self.quant_state.part.move(device)
        with plain():
            return self._like(kept_part.hollow(self.data, device))

    def saved_data(self) -> Tensor:
        """The placeholder itself: a state dict may hold it, as long as nothing reads it."""
        return self.detach()

    def _enter_float_container(self) -> bool:
        return False  # it was loaded into one

    def __deepcopy__(self, memo: dict[int, Any]) -> Params4bit:
        with plain():
            new = self._like(kept_part.hollow(self.data, self.device))
        memo[id(self)] = new
        return new

    def set_(self, *args: Any, **kwargs: Any) -> Tensor:
        """torch calls this without `__torch_function__`."""
        raise kept_part.unreadable("set_", self.quant_state)

    def __reduce_ex__(self, protocol: int) -> tuple:
        raise kept_part.unreadable("pickling", self.quant_state)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Params4bit(this rank's part of {list(self.quant_state.shape)}, {self.dtype}, {self.device})"


def _first(values: Any) -> PlaceholderParams4bit | None:
    """The first placeholder among arguments, in lists too."""
    for value in values:
        if isinstance(value, PlaceholderParams4bit):
            return value
        found = _first(value) if isinstance(value, (list, tuple)) else None
        if found is not None:
            return found
    return None


# ---- torch functions of a placeholder; called with the class's own __torch_function__ off ----


def _get_data(func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """`.data` of a placeholder: a tensor on the meta device with the same metadata and no bytes."""
    return torch.empty(args[0].shape, dtype=args[0].dtype, device="meta")


def _set_data(func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    weight, data = args
    if type(data) is not PlaceholderParams4bit or data.quant_state is not weight.quant_state:
        raise kept_part.unreadable(".data =", weight.quant_state)
    func(weight, data)


def _cast(func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    if in_module_move():
        return args[0]
    raise kept_part.unreadable(getattr(func, "__name__", "cast"), args[0].quant_state)


def _chunk(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """torch.chunk. FSDP2 calls it to get what a rank keeps, and later once more, only for the sizes."""
    weight, count = args[0], args[1] if len(args) > 1 else kwargs["chunks"]
    part = weight.quant_state.part
    sizes = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
    return sizes.chunk(count) if part is None else part.chunks(count)


def _new_zeros(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """FSDP2 makes its shard with this, and then copies this rank's chunk into it."""
    weight = args[0]
    out = func(*args, **kwargs)
    if out.dtype is not weight.dtype or weight.quant_state.part is None:
        raise kept_part.unreadable("new_zeros", weight.quant_state)
    require_shardable(weight)
    launch.note_sharding()
    return PackedShard.wrap(out, weight.quant_state.part.hand_over(Params4bit, dict(weight.__dict__)))


def _handlers() -> dict[Any, Any]:
    table = {func: _chunk for func in (torch.chunk, torch.Tensor.chunk)}
    table.update(dict.fromkeys(guards.casts(), _cast))
    table[torch.Tensor.new_zeros] = _new_zeros
    table[torch.Tensor.data.__get__] = _get_data
    table[torch.Tensor.data.__set__] = _set_data
    as_whole = (torch.Tensor.detach, torch.detach, torch.Tensor.to, torch.is_floating_point)
    as_whole += (torch.Tensor.is_floating_point, torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)
    table.update({func: Params4bit.handlers[func] for func in as_whole})
    return table


HANDLERS = _handlers()
PlaceholderParams4bit.__name__ = "Params4bit"
kept_part.stand_in = PlaceholderParams4bit
