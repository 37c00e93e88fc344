"""A state dict that is being loaded into one sharded packed weight: one object from its beginning to its end.

torch loads in one of two ways. `load_state_dict` hands a layer its entries. `set_model_state_dict` first asks the layer
what there is to fill (`begin`), fills it, the weight itself in place (`take`), and then calls `load_state_dict` with
what it filled. In both, `prepared` gives the state dict that nn.Module loads, and after that `finish` puts bytes and
scales where they belong, or raises on all ranks alike.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from bitshard import ops
from bitshard.formats.container import repack_whole
from bitshard.formats.state import QuantState, check_scales
from bitshard.sharding.weights.state_entries import BLOB_PREFIX, differences, sharded_entries
from bitshard.shards import gather
from bitshard.shards.shard import PackedShard


class PendingLoad:
    """What torch has been handed, and has delivered, of a state dict for the sharded weight `weight`.

    Attributes:
        weight: the registered DTensor; its `PackedShard` leads here while torch fills what it was handed.
        handed: the entries that torch was handed to fill, by name; empty for a plain `load_state_dict`.
        checksum: of this rank's shard before torch wrote into it; None for a plain `load_state_dict`.
        part: this rank's part of a weight in the declared storage, which is cut at other bytes than the shard.
        entries, given: the scale entries by name, and the weight, that are being loaded (`prepared`).
    """

    def __init__(self, weight: DTensor):
        gather.cut_scales(weight)
        self.weight = weight
        self.origin = weight._local_tensor.origin
        self.state: QuantState = self.origin.state
        self.handed: dict[str, DTensor] = {}
        self.checksum: torch.Tensor | None = None
        self.part: torch.Tensor | None = None
        self.entries: dict[str, torch.Tensor] = {}
        self.given: Any = None

    # -- the beginning --

    @classmethod
    def begin(cls, weight: DTensor) -> PendingLoad:
        """torch asks what it may fill: zeroed copies of the scale entries, and the weight as it is.

        What it does not fill stays zero, the JSON entry included, and is known by that. torch asks so before it saves,
        too: then nothing follows, and the next beginning takes this one's place.
        """
        load = cls(weight)
        load.handed = {name: torch.zeros_like(value) for name, value in sharded_entries(weight).items()}
        load.checksum = ops.checksum(weight._local_tensor.plain())
        load.origin.pending = load
        return load

    @classmethod
    def of(cls, weight: DTensor, state_dict: dict[str, Any], key: str) -> PendingLoad:
        """The load that was begun and that brings `state_dict`; else a new one, for a plain `load_state_dict`."""
        origin = weight._local_tensor.origin
        begun, origin.pending = origin.pending, None
        return begun if begun is not None and begun._brings(state_dict, key) else cls(weight)

    def _brings(self, state_dict: dict[str, Any], key: str) -> bool:
        """Whether torch has filled `state_dict`: it holds the weight itself or an entry that was handed out."""
        given = state_dict.get(key)
        if self.part is not None or given is self.weight:
            return True
        return any(state_dict.get(f"{key}.{name}") is value for name, value in self.handed.items())

    # -- the middle --

    def take(self, data: torch.Tensor) -> bool:
        """`data` is being copied to the shard; True for a part in the declared storage, which is kept for later."""
        if data.dtype is not self.origin.storage or self.origin.storage is self.origin.dtype:
            return False
        self.part = data.clone()
        return True

    # -- the end --

    def prepared(self, state_dict: dict[str, Any], key: str) -> dict[str, Any]:
        """The state dict that nn.Module loads: this rank's rows in the place of the weight `key`, and no scales.

        Entries may be DTensors, or whole tensors of which every rank takes its part.
        """
        start = f"{key}."
        entries = {entry.removeprefix(start): value for entry, value in state_dict.items() if entry.startswith(start)}
        self.given = self._given(state_dict.get(key))
        self.entries = {} if _unfilled(entries) else entries
        rest = {entry: value for entry, value in state_dict.items() if not entry.startswith(start)}
        return {**rest, key: self._own_rows(self.given, key)} if isinstance(self.given, torch.Tensor) else rest

    def finish(self, module: nn.Module, name: str, key: str, loaded: bool) -> None:
        """After nn.Module has `loaded` what was prepared for parameter `name` of `module`, or failed to.

        Where only some ranks were given the scales (`broadcast_from_rank0` delivers registered parameters only), those
        ranks send them to the others. Where none was, the old scales stay if the loaded bytes are the old ones; else
        all ranks raise.

        Unless all entries are DTensors this is a collective: the ranks of the mesh must load together, as they do with
        torch's functions. ValueError for entries that belong to another weight.
        """
        self.weight = module._parameters[name]
        self._restore_shard(module, name, key)
        if loaded and (self.given is not None or self.entries):
            self._put(self.entries, self.given is not None, key)

    def _given(self, given: Any) -> Any:
        """The weight that was loaded: what torch delivered in the declared storage, else what the state dict has."""
        if self.part is None:
            return given
        elements = self.state.packed_elements(self.part.element_size())
        return gather.like(self.part, self.weight, torch.Size((elements, 1)))

    def _own_rows(self, packed: torch.Tensor, key: str) -> DTensor:
        """This rank's rows of a packed tensor of any storage dtype, as a DTensor like the weight.

        A DTensor of another storage is cut at other bytes, so it is gathered first.
        """
        weight = self.weight
        if isinstance(packed, DTensor):
            packed = gather.plain(packed)
            if packed.dtype is weight.dtype:
                return packed
            alike = packed.placements == weight.placements
            packed = self._whole_of_parts(packed, key) if alike else gather.whole(packed)
        packed = repack_whole(packed, self.state, weight.dtype, key)
        rows = gather.own_rows(packed, weight).to(weight._local_tensor.device)
        return gather.like(rows, weight, weight.size())

    def _whole_of_parts(self, packed: DTensor, key: str) -> torch.Tensor:
        """Every rank's part of a packed tensor of another storage than the container's, gathered. A collective.

        The size that `packed` states does not count: torch may state that of the model's weight. ValueError on all
        ranks where any part is not what this model's weight would be cut into.
        """
        elements = self.state.packed_elements(packed.element_size())
        local, (_, length) = packed.to_local(), ops.rank_slice(elements, *gather.shard_world(self.weight))
        if gather.anywhere(local.size(0) != length, self.weight):
            raise ValueError(
                f"{key}: {local.size(0)} elements of {packed.dtype} for this rank, where shape "
                f"{list(self.state.shape)} packs into {elements}, of which {length} for this rank"
            )
        return gather.whole(gather.like(local, self.weight, torch.Size((elements, 1))))

    def _restore_shard(self, module: nn.Module, name: str, key: str) -> None:
        """After a load that replaced the parameter (`assign=True`): give its local tensor the hooks again."""
        weight, origin = self.weight, self.origin
        local = weight._local_tensor
        if isinstance(local, PackedShard) and local.origin is origin:
            return
        if weight.size() != origin.size or weight.dtype != origin.dtype:
            raise ValueError(
                f"{key}: loaded {list(weight.size())} of {weight.dtype} where the model has {list(origin.size)} of "
                f"{origin.dtype}; use bitshard.fsdp.load_full_state_dict for another storage dtype"
            )
        plain = local.plain() if isinstance(local, PackedShard) else local
        weight._local_tensor = PackedShard.wrap(plain, origin)
        setattr(module, name, weight)

    def _put(self, entries: dict[str, torch.Tensor], weight_given: bool, key: str) -> None:
        if not entries or not all(isinstance(value, DTensor) for value in entries.values()):
            entries = _agree(entries, self.weight.device_mesh)
        if entries:
            self._put_entries(entries, key)
        elif weight_given:
            self._require_same_bytes(key)

    def _put_entries(self, entries: dict[str, torch.Tensor], key: str) -> None:
        """Write loaded scale entries into the state. ValueError where they belong to another weight or format."""
        state, scales = self.state, entries.get("absmax")
        if scales is None:
            raise ValueError(f"{key}.absmax is missing beside {sorted(entries)}")
        if scales.dtype != state.absmax.dtype or scales.numel() != state.absmax.numel():
            raise ValueError(
                f"{key}.absmax: {scales.numel()} scales of {scales.dtype} where the model has {state.absmax.numel()} "
                f"of {state.absmax.dtype}; bnb_4bit_use_double_quant and the block size must agree"
            )
        loaded = self._read(entries, scales)
        for name, theirs, ours in differences(loaded, state):
            raise ValueError(f"{key}: {name} is {theirs} in the state dict and {ours} in the model")
        own, given = state.absmax if state.sharded is None else state.sharded.own, self._own_scales(scales)
        self._require_finite(given, key)
        self._require_other_bytes(own, given, loaded, key)
        own.copy_(given)
        if state.sharded is not None:
            state.sharded.checksum = None
        for name in ("code", "dtype", "offset", "state2", "global_scale"):
            setattr(state, name, getattr(loaded, name))
        state.checksum = None  # of the loaded bytes; the next gather computes it

    def _read(self, entries: dict[str, torch.Tensor], scales: torch.Tensor) -> QuantState:
        """The loaded state, checked, with zeros in place of the rank's part."""
        small = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in entries.items()}
        small["absmax"] = torch.zeros(scales.shape, dtype=scales.dtype)
        return QuantState.from_dict(small, device=self.weight._local_tensor.device)

    def _own_scales(self, scales: torch.Tensor) -> torch.Tensor:
        """This rank's part [length] of loaded scales [S]."""
        if isinstance(scales, DTensor):
            return scales.redistribute(self.weight.device_mesh, self.weight.placements).to_local()
        return scales.view(-1) if self.state.sharded is None else self.state.sharded.part(scales)

    def _require_finite(self, given: torch.Tensor, key: str) -> None:
        """ValueError on all ranks unless every rank's part of float32 scales is finite."""
        if given.dtype is torch.float32 and gather.anywhere(not bool(torch.isfinite(given).all()), self.weight):
            check_scales(given, f"this rank's part of {key}.absmax")
            raise ValueError(f"{key}.absmax: another rank's part of the scales is not finite")

    def _require_other_bytes(self, own: torch.Tensor, given: torch.Tensor, loaded: QuantState, key: str) -> None:
        """ValueError on all ranks where torch delivered other scales and left the weight as it was."""
        if self.checksum is None or given.untyped_storage().data_ptr() == own.untyped_storage().data_ptr():
            return
        state = self.state
        same = torch.equal(own, given.to(own.device)) and loaded.state2 == state.state2
        for name in ("offset", "global_scale"):
            here = getattr(state, name)
            same = same and (here is None or torch.equal(getattr(loaded, name), here))
        if not self._changed() and gather.anywhere(not same, self.weight):
            raise ValueError(
                f"{key}: the state dict brings other scales but the weight stays (an adapter of another base?): "
                "load both or neither"
            )

    def _require_same_bytes(self, key: str) -> None:
        """A weight came without scales: they fit only if its bytes are the old ones. All ranks find the same."""
        state = self.state
        if self.checksum is not None:
            if not self._changed():
                return
        elif state.checksum is not None:
            if int(ops.checksum(gather.whole(gather.plain(self.weight)))) == int(state.checksum):
                return
        raise ValueError(
            f"{key}: a packed weight was loaded without its scales ({key}.absmax and the entries beside it), and its "
            "bytes are not those that the model's scales belong to; load the scales from the same state dict"
        )

    def _changed(self) -> bool:
        """Whether any rank's shard has other bytes than at the beginning. A collective."""
        now = ops.checksum(self.weight._local_tensor.plain())
        return gather.anywhere(int(now) != int(self.checksum), self.weight)


def _agree(entries: dict[str, torch.Tensor], mesh: Any) -> dict[str, torch.Tensor]:
    """The entries of a rank that has some, on all ranks of `mesh`; empty if no rank has any."""
    for dim in reversed(range(mesh.ndim)):
        group = mesh.get_group(dim)
        have = gather.everyone(bool(entries), group)
        if all(have) or not any(have):
            continue
        box = [{name: value.cpu() for name, value in entries.items() if not isinstance(value, DTensor)}]
        dist.broadcast_object_list(box, src=dist.get_global_rank(group, have.index(True)), group=group)
        entries = entries or box[0]
    return entries


def _unfilled(entries: dict[str, torch.Tensor]) -> bool:
    """Whether these are entries that torch was handed and loaded nothing into."""
    blobs = [value for name, value in entries.items() if name.startswith(BLOB_PREFIX)]
    return any(isinstance(blob, DTensor) and not bool(blob.to_local().any()) for blob in blobs)
