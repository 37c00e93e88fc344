"""The piece of a packed 4-bit weight that one rank keeps under FSDP2, and the hooks that gather it bit by bit.

FSDP2 builds its shard with `param.new_zeros(...)`; `Params4bit.new_zeros` returns a `PackedShard`. This prevents two
things that destroy packed bytes: mixed precision (`MixedPrecisionPolicy.param_dtype`) casts only what has no
hooks, and the copy into the all-gather buffer, which on CUDA rewrites NaN patterns of bfloat16 and float16, sees uint8.
The block scales are gathered with the bytes: each rank keeps ceil(S / N) of them.

This module needs torch only, never `torch.distributed`: the mesh is an argument of the hook. Before the first gather
the ranks compare what they hold (`bitshard.shards.agreement`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch

from bitshard import ops
from bitshard.shards import agreement

aten = torch.ops.aten

# Named once: a packet gives another object for `.default` after somebody has removed it or the packet was made anew.
_COPY, _PIN, _TO_COPY = aten.copy_.default, aten._pin_memory.default, aten._to_copy.default

# Ops that move or rearrange whole storage elements: a result of the shard's own dtype is a PackedShard again.
_LAYOUT = {
    aten.alias.default,
    aten.narrow.default,  # reached under inference_mode only, like chunk and reshape
    aten.chunk.default,
    aten.reshape.default,
    aten.as_strided.default,
    aten.cat.default,
    aten.clone.default,
    aten.constant_pad_nd.default,
    aten.detach.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.squeeze.dim,
    aten.unsqueeze.default,
    aten.view.default,
    aten.zeros_like.default,
    aten._pin_memory.default,
    aten._to_copy.default,
    aten._unsafe_view.default,
}
# Ops that read bytes or overwrite them with bytes; their results are plain.
_BYTES = {
    aten.copy_.default,
    aten.eq.Tensor,
    aten.equal.default,
    aten.is_pinned.default,
    aten.is_same_size.default,
    aten.ne.Tensor,
    aten.record_stream.default,
    aten.set_.source_Storage_storage_offset,
    aten.set_.source_Tensor,
    aten.view.dtype,
}
_COLLECTIVES = {"_c10d_functional", "_c10d_functional_autograd", "c10d", "c10d_functional"}


class ShardedScales:
    """This rank's chunk of the block scales of one weight: scales `begin` to `begin + length` of `total`.

    `scales` is the chunk, [ceil(total / world)] of the dtype of `absmax`, zero-padded after `length` entries. While it
    exists, `absmax` of the quantization state has data only between a gather and the freeing of what was gathered.
    `checksum` is that of the whole scales, if each rank has made its chunk by itself: the gathered scales are compared
    with it (`bitshard.tensor.verify`). Else None.
    """

    __slots__ = ("begin", "checksum", "length", "scales", "total")

    def __init__(self, chunk: torch.Tensor, total: int, world: int, rank: int):
        self.total = total
        self.begin, self.length = ops.rank_slice(total, world, rank)
        self.scales = chunk.new_zeros(-(-total // world))
        self.checksum: torch.Tensor | None = None
        self.own.copy_(chunk.view(-1))

    @classmethod
    def of_whole(cls, absmax: torch.Tensor, world: int, rank: int) -> ShardedScales:
        """This rank's chunk of whole scales."""
        begin, length = ops.rank_slice(absmax.numel(), world, rank)
        return cls(absmax.view(-1)[begin : begin + length], absmax.numel(), world, rank)

    @property
    def own(self) -> torch.Tensor:
        """The real scales, [length], without the padding; writes go through to `scales`."""
        return self.scales[: self.length]

    def part(self, absmax: torch.Tensor) -> torch.Tensor:
        """This rank's part [length] of whole scales [total]."""
        return absmax.view(-1)[self.begin : self.begin + self.length]

    def to(self, device: torch.device | str) -> None:
        """Move the chunk."""
        self.scales = self.scales.to(device)


class Origin:
    """What all tensors made from one packed weight share: state, whole size, and the state dict being loaded into them.

    Attributes:
        state: the `QuantState` of the whole weight; its `sharded` is this rank's chunk of the scales once they are cut.
        size: size of the whole packed weight, [n, 1].
        dtype: dtype of the container.
        parameter, attributes: class and `__dict__` of the parameter that forward sees after a gather.
        on_cpu, pinned: where FSDP2 keeps the shards, and so the chunk of the scales.
        pending: the state dict that is being loaded into the shards (`sharding.weights.pending_load`), else None.
        agreed: the ranks have compared the weight (`bitshard.shards.agreement`).
        scales_checksum: of the whole scales, once they are cut here.
    """

    __slots__ = ("__weakref__", "agreed", "attributes", "dtype", "on_cpu", "parameter", "pending")
    __slots__ += ("pinned", "scales_checksum", "size", "state")

    def __init__(
        self, state: Any, size: torch.Size, dtype: torch.dtype, parameter: type | None, attributes: dict[str, Any]
    ):
        self.state = state
        self.size = torch.Size(size)
        self.dtype = dtype
        self.parameter = parameter
        self.attributes = attributes
        self.on_cpu = self.pinned = False
        self.pending: Any = None
        self.agreed = False
        self.scales_checksum: torch.Tensor | None = None
        agreement.awaits(self)

    @property
    def storage(self) -> torch.dtype:
        """The declared storage dtype, which files have."""
        return self.attributes.get("quant_storage", self.dtype)

    def cut_scales(self, world: int, rank: int, device: torch.device) -> None:
        """Keep only this rank's chunk of the scales, on the device of the shard. Later calls change nothing."""
        if self.state.sharded is not None:
            if self.on_cpu and self.state.sharded.scales.device.type != "cpu":  # cut before there was a shard
                self._settle(device)
            return
        if world == 1:
            return
        whole = self.state.absmax
        if whole.is_meta:
            raise ValueError(
                f"{whole.numel()} scales on the meta device cannot be sharded: load the {self.state.kind.word} weights "
                "first"
            )
        sharded = ShardedScales.of_whole(whole, world, rank)
        self.scales_checksum = ops.checksum(whole)
        if whole.is_cuda:  # FSDP2 gathers on a stream of its own, and `whole` is freed here
            whole.record_stream(torch.cuda.current_stream(whole.device))
        self.state.absmax = torch.empty_like(whole, device="meta")
        self.state.sharded = sharded
        self._settle(device)

    def _settle(self, device: torch.device) -> None:
        """Bring the chunk of the scales to where the shards are: `device`, or with offloading the CPU."""
        sharded = self.state.sharded
        sharded.to("cpu" if self.on_cpu else device)
        if self.pinned:
            sharded.scales = sharded.scales.pin_memory()


class _Bound(functools.partial):
    """The hook of one shard."""

    __signature__ = inspect.Signature([inspect.Parameter("mesh", inspect.Parameter.POSITIONAL_OR_KEYWORD)])


def _hook(function: Callable[..., Any]) -> Any:
    """A method whose signature is made once.

    FSDP2 asks `inspect.signature` how many arguments the hook takes, for each weight in each gather. Reading it from a
    method takes longer than all that the hook does. No Python runs to bind it, for FSDP2 looks three times for it.
    """
    return property(functools.partial(_Bound, function), doc=function.__doc__)


class _Handed:
    """What a shard last handed to FSDP2, and what that was made of.

    The tensors are views of the shard and of the chunk of the scales: what is written into these is in them.
    """

    __slots__ = ("code", "data", "mesh", "result", "scales", "sharded")

    def __init__(self, mesh: Any, state: Any, result: tuple):
        self.mesh, self.code, self.sharded, self.result = mesh, state.code, state.sharded, result
        self.data, self.scales = (*result[0], None)[:2]

    def again(self, shard: PackedShard, mesh: Any) -> bool:
        """Whether the same would be made for `shard` now: for this mesh, of these objects and of their memory.

        False where the tensors are copies. Tensors of one address share their memory, for both keep it alive. Another
        `code` may be on another device.
        """
        state = shard.origin.state
        return (
            mesh is self.mesh
            and state._code is self.code
            and state.sharded is self.sharded
            and self.data.data_ptr() == shard.data_ptr() != 0
            and (self.scales is None or self.scales.data_ptr() == self.sharded.scales.data_ptr())
        )


class PackedShard(torch.Tensor):
    """Some rows of a packed 4-bit weight: storage-backed, of the container's dtype, [rows, 1] or a flat view of it.

    Only ops that move bytes are allowed. Casts raise TypeError and arithmetic ValueError: a value cast would
    silently destroy packed bytes.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    origin: Origin
    handed: _Handed | None = None
    whole_scales: torch.Tensor | None = None  # [S], a view of the memory into which FSDP2 gathers the scales

    @staticmethod
    def __new__(cls, data: torch.Tensor, state: Any, outer_size: torch.Size, like: torch.Tensor | None = None):
        """Make a shard over the storage of `data` (a plain tensor).

        Args:
            state: the `QuantState` of the whole weight.
            outer_size: size of the whole packed weight, [n, 1].
            like: the `Params4bit` this is cut from; its class and attributes are what forward sees after a gather.
        """
        attributes = {} if like is None else dict(like.__dict__)
        parameter = None if like is None else type(like)
        return cls.wrap(data, Origin(state, outer_size, data.dtype, parameter, attributes))

    @classmethod
    def wrap(cls, data: torch.Tensor, origin: Origin) -> PackedShard:
        """A shard over the storage of plain `data` that belongs to `origin`."""
        shard = torch.Tensor._make_subclass(cls, data, False)
        shard.origin = origin
        return shard

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        shard = _first_shard(args) if args else None
        if shard is None:
            shard = _first_shard(tuple(kwargs.values()))
        load = shard.origin.pending
        if load is not None and func is _COPY and load.take(args[1]):
            return args[0]
        _check_allowed(func, shard, args, kwargs)
        with no_dispatch():
            out = func(*args, **kwargs)
        if func not in _LAYOUT:
            # an in-place op returns its first argument; collectives, named alike, return more
            return args[0] if func.namespace == "aten" and func._schema.name.endswith("_") else out
        if func is _PIN:
            shard.origin.pinned = True
        if func is _TO_COPY and out.device.type == "cpu" != shard.device.type:
            shard.origin.on_cpu = True
        if isinstance(out, torch.Tensor):
            return cls.wrap(out, shard.origin)
        return type(out)(cls.wrap(part, shard.origin) for part in out)

    def plain(self) -> torch.Tensor:
        """The same storage as a plain tensor."""
        with no_dispatch():
            return self.detach()

    def __reduce_ex__(self, protocol):
        return self.plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        return PackedShard.wrap(self.plain().clone(), self.origin)

    def __repr__(self, *, tensor_contents=None):
        return f"PackedShard({tuple(self.shape)} of {tuple(self.origin.size)}, {self.dtype}, {self.device})"

    @_hook
    def fsdp_pre_all_gather(self, mesh):
        """FSDP2: what this rank contributes, ((bytes, scales), metadata), both uint8 [n] and of one n on every rank.

        The form with one argument is used because the other demands that every input has the padded size of the weight.
        One rank gathers nothing and may return one input only.
        """
        handed = self.handed
        if handed is not None and handed.again(self, mesh):
            return handed.result
        world, origin = mesh.size(), self.origin
        inputs = (_padded(self.plain(), -(-origin.size[0] // world)).view(-1).view(torch.uint8),)
        if origin.state.code.device != self.device:
            origin.state.to(self.device)
        agreement.agree(origin, mesh)
        scales_dtype = None
        if world > 1:
            origin.cut_scales(world, mesh.get_local_rank(), self.device)
            scales = origin.state.sharded.scales.to(self.device, non_blocking=True)
            inputs, scales_dtype = (*inputs, scales.view(torch.uint8)), scales.dtype
        handed = _Handed(mesh, origin.state, (inputs, (self.dtype, scales_dtype)))
        self.handed = handed if handed.again(self, mesh) else None  # copies are not kept
        return handed.result

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        """FSDP2: the whole weight, a view of the gathered bytes; the gathered scales are put into the state.

        `param_dtype` is ignored: packed words are never cast. FSDP2 frees the storage of `outputs` after use and fills
        the same storage again, so views made here stay valid; `out` is then the weight made the first time. There are
        no inner tensors, for FSDP2 would allocate and free them besides `outputs`.
        """
        dtype, scales_dtype = metadata
        origin = self.origin
        state = origin.state
        if scales_dtype is not None:
            whole_scales = self.whole_scales
            if whole_scales is None or whole_scales.data_ptr() != outputs[1].data_ptr():
                whole_scales = outputs[1].view(scales_dtype)[: state.sharded.total]
                self.whole_scales = whole_scales
            state.absmax = whole_scales
        if out is not None and state.checksum is not None:
            return None
        whole = outputs[0].view(dtype)[: origin.size.numel()].view(origin.size)
        if state.checksum is None:
            state.checksum = ops.checksum(whole)
        if out is not None:
            return None
        if origin.parameter is not None:
            whole = torch.Tensor._make_subclass(origin.parameter, whole, False)
            whole.__dict__.update(origin.attributes)
        return whole, ()


def _first_shard(args: Any) -> PackedShard | None:
    for arg in args:
        if isinstance(arg, PackedShard):
            return arg
        if isinstance(arg, (list, tuple)):
            found = _first_shard(arg)
            if found is not None:
                return found
    return None


def _check_allowed(func: Any, shard: PackedShard, args: Any, kwargs: dict[str, Any]) -> None:
    """TypeError where `func` casts, ValueError where it computes.

    (Python turns a TypeError of an operator into its own "unsupported operand", without the reason.)
    """
    if func in _LAYOUT:
        dtype = kwargs.get("dtype") or shard.dtype
    elif func is _COPY:
        dtype = args[1].dtype if args[0] is shard else args[0].dtype
    elif func in _BYTES or func.namespace in _COLLECTIVES:
        dtype = shard.dtype
    else:
        raise ValueError(
            f"{func}: packed {shard.origin.state.kind.word} weights ({shard.dtype}) can be moved, not computed with; "
            "dequantize first"
        )
    if dtype != shard.dtype:
        raise TypeError(
            f"{func} would cast packed {shard.origin.state.kind.word} weights between {shard.dtype} and {dtype} and so "
            "destroy them; they keep the dtype of their container (of 4-bit ones see bnb_4bit_quant_storage)"
        )


def _padded(data: torch.Tensor, rows: int) -> torch.Tensor:
    """`data` [r, 1] as [rows, 1]: over the padding FSDP2 keeps behind a short shard, or else a padded copy.

    What the padding holds does not matter: it is cut off after the gather.
    """
    if data.size(0) == rows:
        return data
    if data.size(0) > rows:
        raise ValueError(
            f"a shard of {data.size(0)} rows where this mesh expects {rows}: packed weights can be sharded by "
            "fully_shard, not replicated"
        )
    storage_elements = data.untyped_storage().nbytes() // data.element_size()
    if data.storage_offset() + rows <= storage_elements:
        return data.as_strided((rows, 1), (1, 1))
    padded = data.new_zeros(rows, 1)
    padded[: data.size(0)].copy_(data)
    return padded
