"""4-bit weights that are loaded into a model that `fully_shard` has sharded already: no rank ever holds a whole one.

transformers' `from_pretrained(..., distributed_config=DistributedConfig(fsdp_size=N))` shards the model while it is on
the meta device, before anything is quantized, and gives every rank its rows [N / world, K] of each weight. When they
come, float or packed, every rank makes its part of the packed weight of them, with the bytes and scales that quantizing
the whole weight gives, and FSDP2's parameter of [N, K] becomes one of the packed column [n, 1], as if the weight had
been quantized before `fully_shard`. From there on nothing differs from a model that was loaded whole.

Loading is a collective: all ranks bring the rows of the same weights in the same order. Before each weight the ranks
tell each other what they bring and what went wrong, so that all raise or none does.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bitshard import ops
from bitshard.formats.container import repack, shardable_dtype
from bitshard.formats.kinds import Kind
from bitshard.formats.layouts import Layout
from bitshard.formats.state import VALUE_DTYPES, QuantState, check_scales, dtype_name
from bitshard.functions import functional
from bitshard.process import foreign, launch
from bitshard.sharding.weights.record import record_of, start_over
from bitshard.shards import gather
from bitshard.shards.shard import PackedShard, ShardedScales
from bitshard.weights import inventory
from bitshard.weights.tensor import Params4bit

_KEPT = ("blocksize", "_is_hf_initialized")  # of the weight that FSDP2 took, for the one that is made of its rows

_Brought = tuple[Any, list[int] | None, dict[str, Tensor]]

_out_of_step: str | None = None  # the ranks of this process have lost each other while loading: why


class _AwaitedWeight(DTensor):
    """FSDP2's DTensor [N, K] on the meta device, which counts its own rows where transformers asks what to reserve."""

    def numel(self) -> int:
        """The number of elements."""
        return self._local_tensor.numel() if foreign.asked_by(foreign.TRANSFORMERS_RESERVES) else super().numel()


class AwaitedRows:
    """A float weight [N, K] of a 4-bit layer that FSDP2 sharded; this rank's rows of it are still to come.

    Attributes:
        held: the layer's `PackedWeight`.
        weight: what is registered: FSDP2's DTensor, or one that a loader has put in its place.
        dtype: of the layer's weight before; transformers casts what it reads to it, so of packed bytes it is theirs.
        key: name of the weight in the model's state dict, once one was asked for.
    """

    def __init__(self, held: Any, weight: DTensor, dtype: torch.dtype):
        self.held = held
        self.weight = weight
        self.dtype = dtype
        self.key = held.name

    # -- before they come --

    @classmethod
    def adopt(cls, held: Any, weight: DTensor) -> None:
        """FSDP2 registers `weight` for a layer that is not quantized, or a loader assigns its rows to it.

        ValueError for a weight that is not sharded by rows.
        """
        if any(placement.is_shard() and placement.dim != 0 for placement in weight.placements):
            raise ValueError(
                f"packed weights are sharded by rows, not {weight.placements}: tensor parallelism cannot have them"
            )
        global _out_of_step
        owner, settings = held.owner, held.layer
        before = owner._parameters.get(held.name)
        owner._parameters[held.name] = weight
        if isinstance(before, (Params4bit, DTensor)):
            # What transformers rebuilds the weight from: Params4bit(rows, requires_grad=False, **old_weight.__dict__)
            weight.__dict__.update({name: value for name, value in vars(before).items() if name in _KEPT})
        weight.__dict__.update(
            compress_statistics=settings.compress_statistics,
            quant_type=settings.quant_type,
            quant_storage=settings.quant_storage,
            module=settings,
        )
        if weight._local_tensor.is_meta:
            weight.__class__ = _AwaitedWeight
            _out_of_step = None  # another model, to which all ranks have come
        earlier = held.awaited
        held.awaits(cls(held, weight, getattr(before, "dtype", weight.dtype)))
        if earlier is not None:
            held.awaited.key, held.awaited.dtype = earlier.key, earlier.dtype
        record = record_of(owner, held.name)  # None while FSDP2 is making it
        if record is not None and record.sharded_param is not weight and not weight._local_tensor.is_meta:
            held.awaited.quantize(weight._local_tensor)

    def entry(self) -> DTensor:
        """The weight in a state dict.

        On the meta device this is asked for by transformers, which reads from each entry how the tensors of the
        checkpoint are split: by their first dimension, each by its own size. An entry of one dimension [N] says that
        for all of them, dense [N, K] and packed [n, 1] weights, scales [S] and the JSON entry (beside an entry of two
        dimensions it takes those of one for members of a list of experts, and gives them to one rank only). Of a stack
        whose experts come dense, one by one or all in one, the entry is [E, N, K]: a rank reads its experts.
        """
        local = self.weight._local_tensor
        if not local.is_meta:
            return self.weight.detach()
        record = record_of(self.held.owner, self.held.name)
        if record is not None and record.offload_to_cpu:
            launch.read_in_order()  # or all rows come to the GPU before the first of them go to the host
        dims = 1 if not self.held.kind.stacked or self.held.packed_files else 3
        entry = local.new_empty(local.size()[:dims], dtype=self.dtype)
        return gather.like(entry, self.weight, self.weight.size()[:dims])

    # -- when they come --

    @torch.no_grad()
    def quantize(self, rows: Tensor) -> PackedShard:
        """Quantize this rank's float `rows` [r, K]; its shard, which is registered too. A collective.

        Each rank quantizes its own rows where a shard of the packed column holds exactly the blocks of these rows. For
        nested scales the first level is gathered: its mean, and the second-level blocks of 256 scales, span the ranks.
        Where the rows are split unevenly or inside a block, the weight is gathered for a moment and every rank
        quantizes all of it.
        """
        self._agree(lambda: self._check_rows(rows))
        layer, kind, device = self.held.layer, self.held.kind, rows.device
        blocksize, nested = self.weight.__dict__.get("blocksize", kind.blocksize), layer.compress_statistics
        world, rank = gather.shard_world(self.weight)
        container = shardable_dtype(rows.dtype, layer.quant_storage, kind)
        shown = self.weight.size()
        quantize = _quantizer(kind, layer.quant_type, blocksize, container)
        if not _splits_whole_blocks(kind, shown[0], shown[1:].numel(), world, blocksize, container):
            values = self.held.oriented(gather.whole(_placed(rows, self.weight)).to(device))
            packed, state = quantize(values, nested)
            begin, length = ops.rank_slice(packed.size(0), world, rank)
            return self._install(packed[begin : begin + length].clone(), state, None)
        packed, state = quantize(self.held.oriented(rows), False)
        own, state.shape = state.absmax, self.held.shape or shown
        if nested and kind.nests:
            total = torch.Size((state.scale_count,))
            state.absmax = gather.whole(gather.like(own, self.weight, total)).to(device)
            functional.nest(state)
            own = None
        return self._install(packed, state, own)

    @torch.no_grad()
    def take_packed(self, data: Tensor, entries: dict[str, Any], device: Any) -> PackedShard:
        """Take over this rank's parts of a packed weight and of all its entries from a checkpoint. A collective."""
        parts = {name.removeprefix(f"{self.held.name}."): value for name, value in entries.items()}
        scales = parts.pop("absmax", None)
        small, sizes = self._agree(lambda: _check_parts(data, scales, parts))
        world, rank = gather.shard_world(self.weight)
        scales, length, total = scales.to(device), data.numel(), sum(map(operator.itemgetter(1), sizes))
        # of the scales only their number is read; the values are this rank's
        state = self._read({**small, "absmax": torch.zeros(total, dtype=scales.dtype)}, device)
        elements = state.packed_elements(data.element_size())
        self._check_sizes(sizes, elements, total)
        data = data.to(device).reshape(-1, 1)
        container = shardable_dtype(state.dtype, data.dtype, state.kind)
        self.held.layer.quant_storage = data.dtype
        if container is data.dtype:
            return self._install(data, state, scales)
        if elements % world == 0 and (length * data.element_size()) % container.itemsize == 0:
            return self._install(data.view(-1).view(container).view(-1, 1), state, scales)
        column = torch.Size((elements, 1))
        whole = repack(gather.whole(gather.like(data, self.weight, column)).to(device), container, state)
        begin, length = ops.rank_slice(whole.size(0), world, rank)
        return self._install(whole[begin : begin + length].clone(), state, scales)

    @torch.no_grad()
    def take_rows(self, layout: type[Layout], key: str, get: Callable[[str], Tensor | None], dtype: Any) -> tuple:
        """Take over this rank's rows (of a stack, experts) of a weight that the files have in a layout of others.

        Arguments as of `Layout.read`, with this rank's rows of the entries that have rows, and others on some rank;
        gives its shard and the layout. A collective.
        """
        without_rows, mine, read = set(layout.names(key)[2:]), {}, []

        def bring() -> _Brought:
            mine.update(
                {name: value.cpu() for name in without_rows if (value := get(name)) is not None and value.numel()}
            )
            return layout.__name__, None, {}

        shared: dict[str, Tensor] = {}
        if without_rows:  # transformers takes a scalar for a row, of one rank
            self._agree(bring)
            group = _shard_group(self.weight)
            for each in [mine] if group is None else gather.everyone(mine, group)[::-1]:
                shared.update(each)

        def prepare() -> _Brought:
            read[:] = layout.read(
                key, lambda name: shared.get(name) if name in without_rows else get(name), dtype, QuantState
            )
            return (layout.__name__, dtype_name(dtype), list(read[1].shape[1:])), [read[1].shape[0]], {}

        lengths = [length for (length,) in self._agree(prepare)[1]]
        packed, own, found = read
        shape, (world, rank) = torch.Size((sum(lengths), *own.shape[1:])), gather.shard_world(self.weight)
        expected = [ops.rank_slice(shape[0], world, place)[1] for place in range(len(lengths))]
        if shape != (self.held.shape or self.weight.size()) or lengths != expected:
            raise ValueError(f"{self.key}: {lengths} rows of {list(shape)}, expected {expected} of {self.held.shape}")
        kind, scales = own.kind, own.absmax
        second = own.state2.absmax[:1].repeat(kind.second_level(shape)) if kind.has_global else None
        state = kind.state(QuantState, scales, second, shape, dtype)
        state.absmax = scales.new_empty(state.scale_count)
        container = shardable_dtype(dtype, self.held.storage, kind)
        if len(set(lengths)) == 1 and packed.numel() % container.itemsize == 0:
            return self._install(packed.view(-1).view(container).view(-1, 1), state, scales), found
        row = shape[1:].numel()
        whole = self._whole(packed, shape[0], row // 2)
        state.absmax = self._whole(scales, shape[0], row // state.blocksize)
        column = repack(whole.view(-1, 1), container, state)
        begin, length = ops.rank_slice(column.size(0), world, rank)
        return self._install(column[begin : begin + length].clone(), state, None), found

    def _whole(self, own: Tensor, rows: int, width: int) -> Tensor:
        """[rows * width] of all ranks, of which `own` has this rank's rows."""
        mesh, placements, size = self.weight.device_mesh, self.weight.placements, torch.Size((rows, width))
        given = DTensor.from_local(
            own.view(-1, width), mesh, placements, run_check=False, shape=size, stride=(width, 1)
        )
        return gather.whole(given).to(own.device).reshape(-1)

    def _install(self, packed: Tensor, state: QuantState, own_scales: Tensor | None) -> PackedShard:
        """Make `packed` [rows, 1], this rank's part of a packed column, the sharded weight of the layer.

        `own_scales` is this rank's chunk of the scales; None where `state` has all of them.
        """
        held, owner, awaited = self.held, self.held.owner, self.weight
        record = record_of(owner, held.name)
        if record is None:
            raise ValueError(f"{self.key}: FSDP2 does not know this weight, whose rows have come, (any more)")
        total = state.scale_count
        world, rank = gather.shard_world(awaited)
        if own_scales is not None and world == 1:
            state.absmax, own_scales = own_scales, None
        if own_scales is not None:
            state.sharded = ShardedScales(own_scales, total, world, rank)
            state.absmax = torch.empty(total, dtype=own_scales.dtype, device="meta")
        n = state.packed_elements(packed.element_size())
        column = torch.empty(n, 1, dtype=packed.dtype, device="meta")
        held.arrived(state)
        start_over(record, Params4bit.of_state(column, state, held.storage, held.layer))
        sharded = owner._parameters[held.name]  # FSDP2's DTensor of the packed column, on the meta device
        origin = sharded._local_tensor.origin
        origin.on_cpu = record.offload_to_cpu
        origin.cut_scales(world, rank, packed.device)
        weight = nn.Parameter(gather.like(PackedShard.wrap(packed, origin), sharded, sharded.size()), False)
        if awaited.__dict__.get("_is_hf_initialized"):
            weight._is_hf_initialized = True
        setattr(owner, held.name, weight)
        record.reset_sharded_param()  # takes the new tensor over: pads it, pins it where it is offloaded
        return owner._parameters[held.name]._local_tensor

    # -- what the ranks tell each other --

    def _agree(self, prepare: Callable[[], _Brought]) -> tuple[dict[str, Tensor], list[list[int]]]:
        """Run `prepare` on every rank: (facts that all must share, numbers that each brings, small entries in parts).

        The small entries, whole, and the numbers that each rank brings come back. ValueError on all ranks where one
        rank's `prepare` raises, where the facts differ, or where the ranks are not at the same weight, after which no
        rank loads any more.
        """
        global _out_of_step
        if _out_of_step is not None:
            raise ValueError(f"{self.key}: not loaded, for the ranks lost each other before: {_out_of_step}")
        facts, own, small, failure = None, None, {}, None
        try:
            facts, own, small = prepare()
        except (RuntimeError, TypeError, ValueError) as error:
            failure = f"{type(error).__name__}: {error}"
        group = _shard_group(self.weight)
        box = (self.key, facts, failure)
        boxes = [box] if group is None else gather.everyone(box, group)
        keys, every, failures = zip(*boxes, strict=True)
        if len(set(keys)) > 1:
            at = ", ".join(f"rank {rank} {key}" for rank, key in enumerate(keys))
            _out_of_step = f"they came with different weights ({at}), so one of them has failed to read its rows of one"
            raise ValueError(f"{self.key}: {_out_of_step}; see its own error")
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise ValueError(f"{self.key}: rank {rank} of {len(boxes)} cannot load it: {failure}")
        if every != (facts,) * len(every):
            raise ValueError(
                f"{self.key}: the ranks bring different things, do they read the same files? {list(every)}"
            )
        if group is None or own is None:
            return small, [own]
        return gather.joined(small, group, own)

    def _check_rows(self, rows: Tensor) -> _Brought:
        expected = self.weight._local_tensor.size()
        if rows.size() != expected:
            raise ValueError(f"rows of {list(rows.shape)}, expected {list(expected)} of {list(self.weight.size())}")
        if rows.dtype not in VALUE_DTYPES.values():
            raise TypeError(f"rows of {rows.dtype}, expected float32, float16 or bfloat16")
        return dtype_name(rows.dtype), None, {}

    def _check_sizes(self, sizes: list[list[int]], elements: int, total: int) -> None:
        """ValueError on all ranks unless every rank brings its part of `elements` packed ones and of `total` scales."""
        wanted = _parts_of(elements, total, len(sizes))
        if sizes == wanted:
            return
        for rank, parts in enumerate(zip(sizes, wanted, strict=True)):
            for found, expected, what in zip(*parts, ("packed elements", "scales"), strict=True):
                if found != expected:
                    raise ValueError(
                        f"{self.key}: rank {rank} of {len(sizes)} brings {found} {what} of a weight of "
                        f"{list(self.weight.size())}, expected {expected}"
                    )

    def _read(self, entries: dict[str, Tensor], device: Any) -> QuantState:
        """The state that the entries say, all ranks the same; ValueError unless it is that of this weight."""
        try:
            state = QuantState.from_dict(entries, device=device)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.key}: {error}") from error
        shape = self.held.shape or self.weight.size()
        if list(state.shape) != list(shape) or state.kind is not self.held.kind:
            raise ValueError(
                f"{self.key}: packed weight of shape {list(state.shape)} for a layer of {list(shape)} (layout "
                f"{state.kind.name} and {self.held.kind.name})"
            )
        return state


def quantize(model: nn.Module) -> int:
    """Quantize every 4-bit layer of `model` that was sharded and loaded before it was quantized; how many.

    A collective. Loaders that assign weights (transformers with a `DistributedConfig`, `load_state_dict(assign=True)`
    of DTensors) need no call. Those that write into the sharded weights do: `model.to_empty(...)`, then
    torch.distributed.checkpoint or `set_model_state_dict`. ValueError where no rows have been loaded yet.
    """
    found = ((name, held) for name, module in model.named_modules() for held in inventory.held_by(module))
    waiting = [(name, held) for name, held in found if held.awaited is not None]
    for name, held in waiting:
        held.awaited.key = f"{name}.{held.name}" if name else held.name
        weight = held.owner._parameters[held.name]
        if not isinstance(weight, DTensor) or weight._local_tensor.is_meta:
            raise ValueError(f"{held.awaited.key}: no rows have been loaded yet, or the weight is gathered now")
        held.awaited.quantize(weight._local_tensor)
    return len(waiting)


def _quantizer(
    kind: Kind, quant_type: str, blocksize: int, container: torch.dtype
) -> Callable[..., tuple[Tensor, QuantState]]:
    settings = {"quant_type": quant_type, "blocksize": blocksize, "quant_storage": container}

    def call(values: Tensor, nested: bool) -> tuple[Tensor, QuantState]:
        return kind.quantize(values, compress_statistics=nested, **settings)

    return call


def _splits_whole_blocks(kind: Kind, N: int, K: int, world: int, blocksize: int, container: torch.dtype) -> bool:
    """Whether each rank's rows, quantized alone, are the very bytes of its chunk of the packed column."""
    unit = math.lcm(blocksize, 8 * container.itemsize // kind.bits)
    return kind.by_blocks and N % world == 0 and (N // world * K) % unit == 0


def _check_parts(data: Tensor, scales: Any, parts: dict[str, Any]) -> _Brought:
    if not isinstance(scales, Tensor):
        raise ValueError(f"absmax is missing beside {sorted(parts)}")
    check_scales(scales, "absmax")
    for name, value in parts.items():
        if not isinstance(value, Tensor) or value.dim() != 1:
            raise TypeError(f"{name}: expected a vector, got {getattr(value, 'shape', type(value).__name__)}")
    parts = dict(sorted(parts.items()))
    dtypes = [(name, dtype_name(value.dtype)) for name, value in parts.items()]
    return (dtype_name(data.dtype), dtype_name(scales.dtype), dtypes), [data.numel(), scales.numel()], parts


def _placed(rows: Tensor, weight: DTensor) -> DTensor:
    return DTensor.from_local(
        rows, weight.device_mesh, weight.placements, run_check=False, shape=weight.size(), stride=weight.stride()
    )


@functools.cache
def _parts_of(elements: int, total: int, world: int) -> list[list[int]]:
    """Packed elements and scales of each rank."""
    return [[ops.rank_slice(whole, world, rank)[1] for whole in (elements, total)] for rank in range(world)]


def _shard_group(weight: DTensor) -> Any:
    """The process group over which `weight` is sharded; None if it is not."""
    dims = [i for i, placement in enumerate(weight.placements) if placement.is_shard()]
    return weight.device_mesh.get_group(dims[0]) if dims else None
