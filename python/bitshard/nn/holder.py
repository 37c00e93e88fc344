"""A layer's packed weight, wherever FSDP has put it: which bytes and state a forward uses, and what may take its place.

FSDP puts other tensors in the place of the weight that was quantized. `PackedWeight.place` says in one word what is
there now, and changes where something is put there; the layer asks its `PackedWeight` and never looks at types itself.
A layer class becomes one that holds a packed weight by deriving from `HoldsPackedWeight` first and from a torch module
second.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bitshard import ops
from bitshard.formats.container import repack
from bitshard.formats.kind import Kind, kind_of
from bitshard.formats.layouts import Layout
from bitshard.formats.place import Place
from bitshard.formats.state import QuantState, dtype_name
from bitshard.nn import merged
from bitshard.process import foreign, switches
from bitshard.process.recognized import OfBitsandbytes
from bitshard.shards import gather, kept_part
from bitshard.shards.shard import PackedShard
from bitshard.weights.guards import module_move
from bitshard.weights.inventory import held_by, model_of, path_of
from bitshard.weights.placeholder import PlaceholderParams4bit
from bitshard.weights.tensor import Params4bit, verify

_SETTINGS = ("quant_type", "quant_storage", "compress_statistics")  # of a weight, which its layer repeats


class PackedWeight:
    """The packed weight of one layer.

    Attributes:
        owner: the module that registers the parameter.
        name: the parameter's name in it.
        place: where the weight is; `put` and `swapped` change it, `known` where a float weight is quantized, `awaits`
            and `arrived`.
        shape: shape of the weight that was quantized, None before it is known.
        state: its quantization state; None before it is quantized.
        awaited: what FSDP2 sharded before it was quantized (`bitshard.sharding.weights.rows.AwaitedRows`), else None.
        shard: what FSDP2 registers as the weight between forwards, once it has.
        flat: FSDP1 with use_orig_params, which looks for the very tensors that it put here.
        foreign: somebody else has set the bytes since they were quantized or loaded.
        checked: the state that foreign bytes were last compared with.
        unwatched: no forward with gradients has been seen, and somebody waits for it (`watch`).
        late: loaded into shards: adapters may come after `fully_shard` (`sharding.weights.late_adapters`).
        reported: the log has told what of the model is 4-bit (`bitshard.weights.inventory`).
        kept: the weight from before adapters were merged into it (`bitshard.nn.merged.Kept`), while some are.
        layout: how the files that it came from have it, where that is a layout of others (`formats.layouts`).
        restored: which adapter was the last to be taken out of it (`bitshard.nn.merged.Writer.name`).
    """

    late = False
    layout: Layout | None = None
    restored: tuple[int, str] | None = None

    def __init__(self, owner: nn.Module, name: str, shape: tuple[int, ...] | None = None):
        self.owner = owner
        self.name = name
        self.place = Place.FLOAT
        self.shape = None if shape is None else torch.Size(shape)
        self.state: QuantState | None = None
        self.awaited: Any = None
        self.shard: Tensor | None = None
        self.flat = False
        self.foreign = False
        self.checked: QuantState | None = None
        self.unwatched = switches.acting is not None
        self.reported = False
        self.kept: merged.Kept | None = None

    @property
    def layer(self) -> Any:
        """What has the weight's settings, and what the weight names as its `module`: the owner, or this where that has
        several weights."""
        return self.owner if vars(self.owner).get("packed_weight") is self else self

    @property
    def packed_weight(self) -> PackedWeight:
        """This, as the layer of one weight has it."""
        return self

    def standing_for(self, owner: nn.Module, state: QuantState) -> PackedWeight:
        """A holder like this one for another module, in which the weight is whole."""
        new = copy.copy(self)
        new.owner, new.state, new.place, new.shard, new.awaited = owner, state, Place.WHOLE, None, None
        new.flat = new.foreign = new.unwatched = new.late = False
        new.kept = self.kept if owner is self.owner else None
        return new

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "kept": None, "restored": None}  # of copies and pickles

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeight:
        """The holder of a copied layer. The copy of a shard or part keeps the state: its scales are cut already."""
        new = memo[id(self)] = copy.copy(self)
        new.owner = copy.deepcopy(self.owner, memo)
        if self.place is Place.PART:
            return new
        if self.shard is None:
            new.state, new.checked = copy.deepcopy((self.state, self.checked), memo)
        else:
            from bitshard.sharding.weights import parameter

            new.shard = copy.deepcopy(self.shard, memo)
            parameter.adopt(new.shard, new.owner if self.layer is self.owner else new)
        return new

    # -- where it is --

    @property
    def weight(self) -> Any:
        """What is in the weight's place now."""
        return getattr(self.owner, self.name)

    @property
    def kind(self) -> Kind:
        """What the bytes are, or will be (`bitshard.kinds`)."""
        return self.state.kind if self.state is not None else kind_of(self.layer.quant_type)

    @property
    def storage(self) -> torch.dtype:
        """The declared storage dtype, which files have."""
        return self.layer.quant_storage

    @property
    def shown(self) -> torch.Size | None:
        """The shape of the values that the owner shows."""
        return self.shape

    @property
    def of_conv1d(self) -> bool:
        """Whether files of dense weights have its transpose: transformers has replaced a Conv1D, [in, out], by it."""
        return getattr(getattr(self.owner, "source_cls", None), "__name__", "") == "Conv1D"

    def fitting(self, state: QuantState) -> QuantState:
        """A state that was read, as one of this weight's kind. ValueError where its bytes are laid out otherwise."""
        if state.kind is self.kind:
            return state
        raise ValueError(f"{list(state.shape)}: a stack of experts (layout {state.kind.name!r}) for one weight")

    def oriented(self, values: Tensor) -> Tensor:
        """Values of the shape that the owner shows in that of the weight."""
        return values

    def stored(self) -> PackedWeight | None:
        """What a checkpoint has of the weight: this holder; None where it is a float like others."""
        return self

    def quantized(self) -> PackedWeight | None:
        """This holder, for reports; None where the weight is a float."""
        return self if self.state is not None else None

    def captured(self) -> tuple:
        """What a CUDA graph of a forward has from here beside the parameter; another value needs another graph."""
        return (id(self.state),)

    # -- for a forward --

    def ready(self, weight: Tensor) -> tuple[Tensor, QuantState]:
        """The weight and state for a forward that found `weight`.

        The layer's own, trusted, are simply these. A weight that was put here with a state of its own brings it; bytes
        delivered by others are checked once per state (`verify`). RuntimeError or ValueError where there is no state,
        or the weight is no packed column.
        """
        state = self.state
        if (
            state is not None
            and type(weight) is Params4bit
            and weight.quant_state is state
            and (not self.foreign or self.checked is state)
        ):
            return weight, state
        brought = getattr(weight, "quant_state", None) is not None
        self.reconcile(weight if brought or not torch.compiler.is_exporting() else self.kept_by_export())
        state = self.state
        if self.foreign or not brought or type(weight) is not Params4bit:
            if self.checked is state and type(weight) is not Params4bit:
                return weight, state
            if state.absmax.device != weight.device and not state.absmax.is_meta:
                state.to(weight.device)
            self._verify(weight, state)
        return weight, state

    def kept_by_export(self) -> Tensor:
        """The owner's parameter, in whose place torch.export traces a tensor without its attributes.

        RuntimeError where torch keeps it elsewhere than in the releases that are known: a state from before would be
        that of another weight, if somebody has put one there since.
        """
        frame = foreign.running(foreign.TORCH_EXPORTS)
        traced, kept = (None if frame is None else frame.f_locals.get(name) for name in ("mod", "original_state_dict"))
        modules = traced.named_modules(remove_duplicate=False) if isinstance(traced, nn.Module) else ()
        path = next((path for path, module in modules if module is self.owner), None)
        weight = None if path is None or kept is None else kept.get(f"{path}.{self.name}" if path else self.name)
        if weight is None:
            raise RuntimeError(
                f"{type(self.owner).__name__}: torch.export of torch {torch.__version__} has put another tensor in the "
                f"place of the {self.kind.word} weight {list(self.shape or ())}, and the weight with its scales is not "
                "found: export with strict=True"
            )
        return weight

    def _verify(self, weight: Tensor, state: QuantState) -> None:
        """Check delivered bytes.

        torch.export traces with other tensors in the places of parameters, without their bytes. What it exports are the
        parameters themselves: ValueError where others have written them since they were last checked.
        """
        where = f"{type(self.owner).__name__} with a weight of {list(state.shape)}"
        if not torch.compiler.is_exporting():
            verify(weight, state, where)
            self.checked = state
        elif self.foreign and self.checked is not state:
            raise ValueError(
                f"{where}: its packed bytes were set by other code, and torch.export has no bytes to check. Call the "
                "module once before it is exported."
            )

    def reconcile(self, weight: Tensor) -> None:
        """Bring the states of holder and weight together again after something has replaced either.

        A weight with a state of its own gives it to the holder. A plain tensor (FSDP1's view of the flat parameter)
        gets nothing. RuntimeError or ValueError where there is no state, or the weight is no packed column.
        """
        owner = type(self.owner).__name__
        if gather.is_dtensor(weight):
            if self.shard is None and self.state is not None:
                raise ValueError(
                    f"{owner}: tensor parallelism (parallelize_module, distribute_tensor, tp_plan) has made the packed "
                    f"weight of {list(self.state.shape)} a DTensor {list(weight.shape)}, and cuts bytes where it means "
                    f"rows or columns. Leave {self.kind.word} layers out of the plan, and shard them with FSDP2 "
                    "(fully_shard)."
                )
            raise ValueError(
                f"{owner}: the weight is still sharded (DTensor {list(weight.shape)}): call the module that FSDP2 "
                "wrapped, or unshard() it first"
            )
        own = getattr(weight, "quant_state", None)
        if own is not None:
            self.known(own)
            if own.part is not None:
                raise kept_part.unreadable(owner, own)
            return
        if self.state is None and type(weight) is nn.Parameter and weight.is_floating_point():
            raise self._plain_error(weight)
        if self.state is None or (isinstance(weight, Params4bit) and not weight.bnb_quantized):
            raise RuntimeError(
                f"{owner}: the weight {list(weight.shape)} of {dtype_name(weight.dtype)} is not quantized yet: move "
                "the layer to a device first, for instance with .to('cpu') or .cuda(); where fully_shard came before "
                "the weights, call bitshard.fsdp.quantize(model) after loading them"
            )
        if weight.dim() != 2 or weight.shape[1] != 1:
            raise ValueError(
                f"{owner}: the weight has shape {list(weight.shape)}, expected a packed column [n, 1]. Is it a shard "
                "of FSDP? Call the module that FSDP wrapped."
            )
        if isinstance(weight, Params4bit):
            weight.quant_state = self.state

    def _plain_error(self, weight: nn.Parameter) -> RuntimeError:
        """The error for a float parameter that nobody quantizes, mostly that of another module, to which it is tied."""
        path = path_of(self.owner)
        others = [
            f"{other}.{name}"
            for other, module in model_of(self.owner).named_modules()
            for name, parameter in module._parameters.items()
            if parameter is weight and module is not self.owner
        ]
        what = f"{path} is not quantized: its weight {list(weight.shape)} of {dtype_name(weight.dtype)} is"
        if not others:
            return RuntimeError(f"{what} a plain parameter, which no move quantizes: assign a Params4bit")
        return RuntimeError(
            f"{what} tied to {' and '.join(others)}, which is not quantized. Name {path.rpartition('.')[2]!r} in "
            "llm_int8_skip_modules when the model is loaded (the argument replaces transformers' own list, which has "
            "the head), or quantize both: bnb_4bit_embedding_bits of bitshard.transformers.FourBitConfig"
        )

    def watch(self) -> None:
        """In the first forward with gradients: see to it that a backward warns of adapters that nobody averages.

        And tell of switches that wait for a `train` which nobody has called (`bitshard.process.switches`).
        """
        self.unwatched = False
        if self.late:
            from bitshard.sharding.weights import late_adapters

            late_adapters.watch(self.owner)
        if switches.acting is not None:
            switches.acting.forwards(self.owner)

    # -- what the weight tells (see Params4bit) --

    def follow(self, state: QuantState | None) -> None:
        """The weight was quantized, loaded or moved by us: `state` is that of its bytes."""
        self.known(state)
        self.foreign = False

    def known(self, state: QuantState | None) -> None:
        """`state` is that of the layer's weight, whoever says so; with the first one the weight is quantized."""
        self.state = state
        if self.place is Place.FLOAT and state is not None:
            self.place = Place.WHOLE if state.part is None else Place.PART

    def awaits(self, rows: Any) -> None:
        """FSDP2 has sharded the float weight, or a loader has assigned rows of it: `rows` takes what comes."""
        self.awaited, self.place = rows, Place.AWAITED

    def arrived(self, state: QuantState) -> None:
        """The awaited rows are quantized, and FSDP2 is about to register their shard."""
        self.awaited, self.state, self.place = None, state, Place.SHARD
        self.unwatched = self.late = True

    def rebuilt(self) -> None:
        """A float weight is being made for the layer, by peft out of the attributes of the packed one that it has.

        peft clears `bnb_quantized` in these attributes, and what it does next may fail: the weight stays a packed one.
        """
        weight = None if self.state is None else self.weight
        if isinstance(weight, Tensor) and weight.__dict__.get("bnb_quantized") is False:
            if list(weight.shape) == [self.state.packed_elements(weight.element_size()), 1]:
                weight.__dict__["bnb_quantized"] = True

    def delivered(self) -> None:
        """Somebody else has set the bytes of the weight."""
        self.foreign = True

    # -- what takes the weight's place --

    def put(self, value: Any) -> bool:
        """`layer.weight = value` for a quantized weight or a DTensor; True unless `value` is to be registered.

        FSDP2 puts its shard here and, while it is gathered, the whole weight; FSDP1 a view of its flat parameter. A new
        quantized weight for a layer that FSDP2 sharded is written into the shards of all ranks, for FSDP2 would drop it
        with its next gather: a collective, to which every rank brings the same weight. So is one for a view of FSDP1,
        which lasts where FSDP1 shards nothing; elsewhere the next forward misses it (`verify`).
        """
        if self.state is None:
            if not gather.is_dtensor(value):
                return self._registers(value)
            from bitshard.sharding.weights.rows import AwaitedRows

            AwaitedRows.adopt(self, value)
            return True
        if type(value) is Params4bit:
            return self._put_packed(value)
        if gather.is_dtensor(value):
            from bitshard.sharding.weights import parameter

            if parameter.adopt(value, self.layer):
                value = self.shard = parameter.settled(value, self.layer)
            # directly, as FSDP2 registers it elsewhere: patches of it leave a DTensor that is no Parameter
            self.owner._parameters[self.name], self.place = value, Place.SHARD
            return True
        if type(value) is Tensor and self.name not in self.owner._parameters and _is_flat_view(value, self.state):
            return self._put_view(value)
        if self.shard is not None and value is not None:
            raise ValueError(
                f"weight = {list(value.shape)} of {dtype_name(value.dtype)}: this {self.kind.word} layer is sharded by "
                "FSDP2 and takes a quantized Params4bit only, which it writes into its shards"
            )
        return self._registers(value)

    def swapped(self, value: Any) -> bool:
        """Register `value` where it is what FSDP2 puts here again and again: its shard, or the weight that it gathers.

        False for anything else, and for a shard that does not answer as a weight, or is elsewhere (`put`).
        """
        shard = self.shard
        local = None if shard is None else shard._local_tensor
        if type(local) is not PackedShard:
            return False
        if value is shard:
            own = value.__dict__
            module, moves = own.get("module"), local.origin.on_cpu and local.device.type != "cpu"
            if moves or not own.get("bnb_quantized") or (module is not self.owner and module is not self):
                return False
            place = Place.SHARD
        elif type(value) is Params4bit and value.__dict__.get("quant_state") is local.origin.state:
            place = Place.GATHERED
        else:
            return False
        self.owner._parameters[self.name], self.place = value, place
        return True

    def _registers(self, value: Any) -> bool:
        """`value` is left to nn.Module: where the weight is once it is the parameter, and False, as `put` gives it."""
        if isinstance(value, nn.Parameter):
            self.place = self.place_of(value)
        return False

    def place_of(self, weight: Tensor) -> Place:
        """Where the weight is when `weight`, which FSDP2 has not sharded, is the parameter."""
        if self.state is None or not getattr(weight, "bnb_quantized", True):
            return Place.FLOAT
        if isinstance(weight, PlaceholderParams4bit):
            return Place.PART
        return Place.VIEW if self.flat or _is_flat_view(weight, self.state) else Place.WHOLE

    def _put_view(self, view: Tensor) -> bool:
        """FSDP1's view of its flat parameter, a plain tensor; as a packed weight foreign code dequantizes it, too."""
        self.foreign, self.place = True, Place.VIEW
        self.owner.__dict__[self.name] = self.shown_as(view)
        return True

    def shown_as(self, view: Tensor) -> Tensor:
        """FSDP1's view as the owner has it."""
        return view if self.flat else Params4bit.of_state(view, self.state, self.storage, self.layer)

    def _put_packed(self, value: Params4bit) -> bool:
        view = self.owner.__dict__.get(self.name)
        if view is value:
            return True
        if getattr(value, "_fsdp_flattened", False):
            # FSDP1 with use_orig_params puts its own parameter back, whose bytes are the layer's, merged ones too
            self.flat, value.quant_state = True, self.state
            return self._registers(value)
        if self.shard is not None:
            self._put_gathered(value)
            return True
        if view is None and self.name not in self.owner._parameters:
            raise ValueError(
                f"two layers share one {self.kind.word} weight of {list(self.state.shape)}, which FSDP1 has "
                "flattened for one of them only: give each layer a weight of its own (copy.deepcopy(layer.weight)), or "
                "shard with FSDP2 (fully_shard, fsdp_version: 2)"
            )
        with merged.replacing(self, value) as before:
            if before is not None:
                before.into(value)
            if type(view) is not Params4bit or not value.bnb_quantized:
                self.known(value.quant_state or self.state)
                return self._registers(value)
            self._overwrite(view, value)
        return True

    def _put_gathered(self, value: Params4bit) -> None:
        """The whole weight from FSDP2, which has the state of the shard, or a new one for the shards of all ranks."""
        state = self.shard.quant_state
        if value.quant_state is state:
            self.owner._parameters[self.name], self.place = value, Place.GATHERED
            return
        from bitshard.sharding.weights.replace import put_back, write

        gathered = self.owner._parameters[self.name]
        gathered = gathered if type(gathered) is Params4bit else None
        self.state = state  # quantizing the new weight has put its own here
        with merged.replacing(self, value) as before:
            if before is not None and before.of_rows:
                return put_back(self.shard, gathered, before)
            if before is not None:  # from before the weight was sharded
                before.into(value)
                self.state = state
            write(self.shard, gathered, value)

    def _overwrite(self, view: Tensor, new: Params4bit) -> None:
        """Write a packed weight into FSDP1's view of its flat parameter, which must stay where it is."""
        state = new.quant_state
        with torch._C.DisableTorchFunctionSubclass():
            packed = repack(new.data, view.dtype, state)
            if packed.shape != view.shape:
                # quantizing has put its own state on the layer: back to that of the bytes that stay
                old = self.state = getattr(view, "quant_state", self.state)
                raise ValueError(
                    f"weight = packed {list(state.shape)} for a layer of {list(old.shape)}: FSDP1 holds it in a flat "
                    "parameter, where only a weight of the same size can take its place"
                )
            view.data.copy_(packed)
            state.checksum = ops.checksum(packed)
        self.state = state
        if type(view) is Params4bit:
            view.quant_state, view.bnb_quantized = state, True

    # -- made elsewhere than in its place --

    def of_values(self, values: Tensor, settings: dict[str, Any]) -> Params4bit:
        """A quantized weight for this place from float values, on their device; `settings`: of the weight before."""
        return Params4bit(values, requires_grad=False, **{**settings, "module": self.layer}).to(values.device)

    def of_codes(self, codes: Tensor, beside: dict[str, Tensor], key: str, dtype: torch.dtype) -> Params4bit:
        """A quantized weight for this place from what a file has of the weight `key`; `dtype`: of the model."""
        entries = {name.removeprefix(f"{key}."): value for name, value in beside.items()}
        return Params4bit.from_prequantized(codes, entries, device=codes.device, module=self.layer)

    def lend(self, base: nn.Module, packed: Tensor, state: QuantState) -> None:
        """Give the stand-in `base` of the owner a whole weight, for peft to merge into."""
        base.register_parameter(self.name, Params4bit.of_state(packed, state, self.storage, None))

    def lent(self, base: nn.Module, state: QuantState) -> tuple[Tensor, QuantState]:
        """(packed bytes, their state) of the weight that the stand-in has now; it was lent one of `state`."""
        weight = getattr(base, self.name)
        return weight.saved_data(), weight.quant_state

    def enter(self) -> bool:
        """Bring a quantized weight into the form that FSDP shards, where it has another; whether it had."""
        return False

    def take(self, new: Params4bit) -> None:
        """Take over a weight that was loaded packed; the parameter object stays where it can."""
        weight = self.owner._parameters.get(self.name)
        if getattr(weight, "_fsdp_flattened", False) or (
            isinstance(weight, nn.Parameter) and _is_flat_view(weight, new.quant_state)
        ):
            return self._overwrite(weight, new)
        if isinstance(weight, Params4bit) and not weight.is_meta and weight.dtype is new.dtype:
            with torch._C.DisableTorchFunctionSubclass():
                weight.data = new.data
            weight.__dict__.update(new.__dict__)
        else:
            setattr(self.owner, self.name, new)
            weight = new
        weight.module = self.layer
        weight.quant_state = new.quant_state
        self.follow(new.quant_state)
        for setting in _SETTINGS:
            setattr(self.layer, setting, getattr(new, setting))

    # -- moves --

    @contextlib.contextmanager
    def moving(self, fn: Any) -> Iterator[None]:
        """While `fn` is applied to the owner's tensors: dtype moves leave packed bytes alone.

        A sharded weight stays out of it unless the device changes, which a probe shows that no dtype move concerns.
        """
        registered = self.owner._parameters
        weight = registered.get(self.name)
        if isinstance(weight, Params4bit) and not weight.bnb_quantized:
            weight.module = self.layer
            if weight.is_meta:  # accelerate rebuilds a weight without its settings there
                for setting in _SETTINGS:
                    setattr(weight, setting, getattr(self.layer, setting))
        stays = self.place is Place.SHARD and _keeps_device(fn, weight.device)
        if stays:
            registered[self.name] = None
        try:
            with module_move():
                yield
        finally:
            if stays:
                registered[self.name] = weight

    # -- state dicts --

    def unfilled(self) -> dict[str, Tensor]:
        """What torch.distributed's loading fills beside the weight: the scale entries of a shard, by name."""
        if self.place is not Place.SHARD:
            return {}
        from bitshard.sharding.weights.pending_load import PendingLoad

        return PendingLoad.begin(self.weight).handed

    def save_entries(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Complete what nn.Module has saved of the owner: packed bytes as files have them, and the scale entries.

        Of a shard the entries are DTensors, in the container's dtype; the weight gathers into the declared storage.
        """
        key, place = f"{prefix}{self.name}", self.place
        if place is Place.SHARD:
            from bitshard.sharding.weights import state_entries

            entries = state_entries.sharded_entries(self.weight)
            destination.update({f"{key}.{name}": value for name, value in entries.items()})
            return
        if place is Place.AWAITED:
            self.awaited.key = key
            destination[key] = self.awaited.entry()
            return
        weight, state = self.weight, self.state
        if place is Place.PART:  # accelerate asks for a state dict before it shards, and does not use it
            return
        if isinstance(weight, Params4bit):
            state = weight.quant_state
            if not keep_vars:
                destination[key] = weight.saved_data()
        if state is not None:  # FSDP1's view of the flat parameter goes out as it is, for FSDP1 splits it again
            for name, value in state.as_dict(packed=True).items():
                destination[f"{key}.{name}"] = value if keep_vars else value.detach()

    def pending_load(self, state_dict: dict[str, Any], key: str) -> Any:
        """The load of `state_dict` into a shard (`bitshard.sharding.weights.pending_load.PendingLoad`)."""
        from bitshard.sharding.weights.pending_load import PendingLoad

        return PendingLoad.of(self.weight, state_dict, key)

    def load_entries(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        strict: bool,
        assigns: bool,
        missing_keys: list[str],
        error_msgs: list[str],
    ) -> set[str]:
        """Load the weight, unless it is a shard; the keys that nn.Module is to pass over then.

        `assigns`, the `assign=True` of load_state_dict, does not matter to packed bytes in a container.
        """
        key = f"{prefix}{self.name}"
        if self.place is Place.PART:
            given = {name for name in state_dict if name == key or name.startswith(f"{key}.")}
            if given:
                error_msgs.append(str(kept_part.unreadable(f"loading {key}", self.state)))
            elif strict:
                missing_keys.append(key)
            return {key, *given}
        if self.place is Place.AWAITED:
            return set()
        statistics = {name: value for name, value in state_dict.items() if name.startswith(f"{key}.")}
        if not statistics and not getattr(self.weight, "bnb_quantized", False):
            self.checked = None  # what is copied into a view of FSDP1's flat parameter is checked again
            return set()
        try:
            self._load_packed(state_dict.get(key), statistics, key, missing_keys)
        except (TypeError, ValueError) as error:
            error_msgs.append(f"{key}: {error}")
        return {key, *statistics}

    def _load_packed(self, data: Tensor | None, statistics: dict[str, Any], key: str, missing_keys: list[str]) -> None:
        """Replace the weight in place by packed entries. Bytes without statistics must be the bytes already here."""
        if data is None:
            missing_keys.append(key)
            return
        device = data.device if self.weight.is_meta else self.weight.device
        if data.is_meta and device.type != "meta":
            raise ValueError("the weight is on the meta device and holds no bytes")
        if not statistics and data.shape == self.shape:
            raise ValueError(
                f"a dense weight {list(data.shape)} of {dtype_name(data.dtype)} for a layer that is quantized "
                "already: load it into a new layer before that moves to a device"
            )
        if not statistics:
            return verify(data.to(device), self.state, key)
        new = Params4bit.from_prequantized(data, statistics, device=device)
        if new.quant_state.shape != self.shape:
            raise ValueError(f"shape {list(new.quant_state.shape)} does not fit a layer of {list(self.shape)}")
        new.quant_state = self.fitting(new.quant_state)
        self.take(new)


def _is_flat_view(weight: Tensor, state: QuantState) -> bool:
    """Whether `weight` can be FSDP1's view of its flat parameter: a plain packed column of the size of `state`."""
    if isinstance(weight, Params4bit) or weight.is_meta:
        return False
    return list(weight.shape) == [state.packed_elements(weight.element_size()), 1]


def _keeps_device(fn: Any, device: torch.device) -> bool:
    return fn(torch.empty(0, dtype=torch.uint8, device=device)).device == device


class HoldsPackedWeights(nn.Module, OfBitsandbytes):
    """A module some of whose parameters may be packed 4-bit weights. Derive from this before the module.

    `packed_stacks` are the holders of several by name. A layer of one weight is a `HoldsPackedWeight`.
    """

    packed_stacks: dict[str, PackedWeight]

    @property
    def base_layer(self) -> nn.Module:
        """AttributeError, for this is the innermost layer. peft looks for that before it merges (`nn.merged.asked`)."""
        if not torch.compiler.is_compiling():
            merged.asked(self)
        raise AttributeError

    def __setattr__(self, name: str, value: Any) -> None:
        held = self.__dict__.get("packed_stacks", {}).get(name)
        if held is None or not (held.swapped(value) or held.put(value)):
            super().__setattr__(name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for held in held_by(self):
            if "place" not in vars(held):  # a pickle from before it was kept
                held.place = held.place_of(self._parameters[held.name])
            if held.owner is not self:  # copy.copy, which shares what it finds
                self._replace_holder(held, copy.copy(held))
        for held in held_by(self):
            weight = self._parameters.get(held.name)
            if isinstance(weight, Params4bit):
                weight.module = held.layer

    def _replace_holder(self, held: PackedWeight, new: PackedWeight) -> None:
        new.owner = self
        self.packed_stacks = {**self.packed_stacks, held.name: new}

    def train(self, mode: bool = True) -> Any:
        """As of any module; switches in the environment learn here that a model trains (`huggingface.at_train`)."""
        if switches.acting is not None and mode and not torch.compiler.is_compiling():
            switches.acting.trains(self)
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        with contextlib.ExitStack() as stack:
            for held in held_by(self):
                stack.enter_context(held.moving(fn))
            return super()._apply(fn, recurse)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The module's buffers and, for a sharded weight, its scale entries, which torch.distributed's loading fills.

        Only where this layer's own buffers are asked for, as that loading does; `fully_shard` compares the names of all
        buffers before and after.
        """
        yield from super().named_buffers(prefix, recurse, remove_duplicate)
        if not recurse:
            for held in held_by(self):
                key = f"{prefix}.{held.name}" if prefix else held.name
                for name, value in held.unfilled().items():
                    yield f"{key}.{name}", value

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for held in held_by(self):
            held.save_entries(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        arguments = (local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        weights = held_by(self)
        if any(held.place is Place.GATHERED for held in weights):
            # FSDP2's hook puts the shard back; nn.Module calls it, as often as one likes, but only after this
            for hook in self._load_state_dict_pre_hooks.values():
                hook(state_dict, prefix, *arguments)
        taken: set[str] = set()
        pending = []
        assigns = bool(local_metadata.get("assign_to_params_buffers", False))
        for held in weights:
            key = f"{prefix}{held.name}"
            if held.state is not None:
                state_dict = held.kind.unfiled(key, state_dict, held.state)
            if held.place is Place.SHARD:
                pending.append((held, key, held.pending_load(state_dict, key)))
                state_dict = pending[-1][-1].prepared(state_dict, key)
            else:
                taken |= held.load_entries(state_dict, prefix, strict, assigns, missing_keys, error_msgs)
        rest = {key: value for key, value in state_dict.items() if key not in taken}
        absent: list[str] = []
        errors = len(error_msgs)
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, absent, unexpected_keys, error_msgs)
        missing_keys.extend(key for key in absent if key not in taken)
        for held, key, load in pending:
            load.finish(self, held.name, key, loaded=len(error_msgs) == errors)


class HoldsPackedWeight(HoldsPackedWeights):
    """A module whose parameter `packed_weight.name` may be a packed 4-bit weight. Derive from this before the module.

    `packed_weight` is set by the class that derives, once the parameter is there. The weight's state is readable and
    settable as `quant_state`, for foreign code does both.
    """

    packed_weight: PackedWeight

    @property
    def quant_state(self) -> QuantState | None:
        """The quantization state of the weight; None before it is quantized."""
        return self.packed_weight.state

    @quant_state.setter
    def quant_state(self, state: QuantState | None) -> None:
        self.packed_weight.known(state)

    def __setattr__(self, name: str, value: Any) -> None:
        held = self.__dict__.get("packed_weight")
        if held is None or name != held.name or not (held.swapped(value) or held.put(value)):
            nn.Module.__setattr__(self, name, value)

    def _replace_holder(self, held: PackedWeight, new: PackedWeight) -> None:
        new.owner, self.packed_weight = self, new
