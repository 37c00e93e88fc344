"""Params4bit: a parameter that holds the packed bytes of a 4-bit weight, and the guards around those bytes.

The bytes sit in a column [n, 1] of some storage dtype, zero-padded to whole elements. Where that dtype is a float,
torch and training code take them for numbers; casts, arithmetic, in-place functions (of `.data` too) and assignments of
another dtype raise here, for the damage would go unseen. A dtype move of a whole module leaves the bytes as they are.
Copies and views other than `chunk`, `split`, `detach` and `as_strided` are plain tensors, which nothing guards.

`__dict__` of a Params4bit holds constructor keywords only, because transformers, accelerate and peft rebuild a weight
by `Params4bit(data, requires_grad=False, **old.__dict__)`.
"""

from __future__ import annotations

import logging
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from bitshard import ops
from bitshard.formats.checks import check_packed, check_storage
from bitshard.formats.container import container_dtype, repack, shardable_dtype
from bitshard.formats.kind import kind_of
from bitshard.formats.state import VALUE_DTYPES, QuantState, dtype_name
from bitshard.process import foreign, launch
from bitshard.shards import agreement, gather, kept_part
from bitshard.shards.shard import PackedShard
from bitshard.weights import adapters, guards
from bitshard.weights.guards import (
    PackedData,
    grad_error,
    in_module_move,
    packed_among,
    plain,
    word_of,
)
from bitshard.weights.packed import PackedParameter, before_detach, described_in, method_to

logger = logging.getLogger(__name__)

# ---- trust ----


def verify(weight: Tensor, state: QuantState, where: str) -> None:
    """Check that `weight` holds the bytes that `state` was made with: their number, and their checksum where known.

    For weights that somebody else delivered (FSDP1's views, a foreign `.data =`). Synchronizes with the device.
    ValueError naming the setting to change.
    """
    expected, word = state.packed_elements(weight.element_size()), state.kind.word
    equal = "dtype= of from_pretrained"
    if word == "4-bit":
        equal = f"the storage dtype (bnb_4bit_quant_storage, and {equal}, all the same)"
    advice = (
        "The packed bytes were cast or rewritten on their way here. Under FSDP1 give the mixed precision policy a "
        f"param_dtype equal to {equal}, and with accelerate set fsdp_use_orig_params: false or a wrap policy that "
        "keeps LoRA apart; or use FSDP2 (fsdp_version: 2)."
    )
    loaded_in_parts = state.sharded is not None and state.sharded.checksum is not None
    if loaded_in_parts:
        advice = (
            "The ranks kept their parts of it while they loaded it, and these do not fit together: the ranks read "
            "different files, or FSDP2 shards over another mesh than that of all ranks in their order. Set "
            "BITSHARD_CUT=0 to load whole weights."
        )
    if weight.numel() != expected:
        raise ValueError(
            f"{where}: the {word} weight arrived as {list(weight.shape)} of {dtype_name(weight.dtype)}, but "
            f"{list(state.shape)} packs into {expected} elements of that dtype. {advice}"
        )
    if state.checksum is None:
        return
    with plain():
        found = int(ops.checksum(weight.detach()))
    if found != int(state.checksum):
        raise ValueError(
            f"{where}: the {word} weight arrived as {list(weight.shape)} of {dtype_name(weight.dtype)} with other "
            f"bytes than it was quantized to (checksum {found:#x}, expected {int(state.checksum):#x}). {advice}"
        )
    if loaded_in_parts and not state.absmax.is_meta:
        found = int(ops.checksum(state.absmax))
        if found != int(state.sharded.checksum):
            raise ValueError(f"{where}: the {word} weight of {list(state.shape)} arrived with other scales. {advice}")


# ---- the parameter ----


def _proxy(name: str, *path: str) -> property:
    """A read-only attribute of the quantization state: torch's state-dict code walks keys by getattr."""

    def read(self: Params4bit) -> Any:
        value = state = self.quant_state
        for step in path:
            if value is not None:
                value = getattr(value, step)
        if value is None and (name not in ("offset", "state2", "nested_offset") or state is None):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return value

    return property(read, doc=f"`quant_state.{'.'.join(path)}`")


class Params4bit(PackedParameter):
    """A linear layer's weight, quantized to 4 bits when it first moves to a device.

    Before: float data [N, K]. `.to(device)`, `.cuda()` or `.cpu()` then quantize in place and return self.
    After: packed bytes [n, 1] of the container dtype (see `container_dtype`) and `quant_state`.

    Args:
        data: float32, float16 or bfloat16 [N, K], or packed bytes together with `quant_state`. A DTensor (a sum of
            sharded weights, say) is gathered: every rank quantizes the same numbers. A `PackedShard`, which patches of
            FSDP2 wrap once more, is itself the result.
        quant_state: the state of packed `data`. Data that cannot be the packed form of it counts as not quantized.
        blocksize: elements per scale; None: as the format has it, 64 for these.
        compress_statistics: quantize the scales too.
        quant_type: "nf4" or "fp4".
        quant_storage: dtype of the packed bytes, in memory and in files.
        module: the layer whose `quant_state` follows this weight's.
        bnb_quantized: whether `data` is packed already.

    Other keywords are ignored: foreign code passes whatever it finds in `__dict__`.
    """

    __module__ = "bitshard.tensor"  # as pickles name it

    # what a weight has that foreign code made with `torch.Tensor._make_subclass`
    quant_state: QuantState | None = None
    blocksize: int = 64
    compress_statistics: bool = True
    quant_type: str = "fp4"
    quant_storage: torch.dtype = torch.uint8
    module: Any = None
    state_name = "quant_state"
    summed: Any = None  # what peft adds to where it merges into a stack of experts (`bitshard.experts.adapted`)

    def __new__(
        cls,
        data: Tensor | None = None,
        requires_grad: bool = False,
        quant_state: QuantState | None = None,
        blocksize: int | None = None,
        compress_statistics: bool = True,
        quant_type: str = "fp4",
        quant_storage: torch.dtype = torch.uint8,
        module: Any = None,
        bnb_quantized: bool = False,
        **kwargs: Any,
    ) -> Params4bit:
        data = torch.empty(0, dtype=torch.float32) if data is None else data
        if type(data) is PackedShard:
            return data
        if gather.is_dtensor(data):
            data = gather.whole(data)
        kind = kind_of(quant_type) if quant_state is None else quant_state.kind
        blocksize = kind.blocksize if blocksize is None else blocksize
        kind.check(quant_type, blocksize)
        check_storage(quant_storage)
        packed = bool(bnb_quantized) and _may_be_packed(data, quant_state)
        if packed and requires_grad:
            raise grad_error("4-bit" if quant_state is None else quant_state.kind.word)
        held = getattr(module, "packed_weight", None)
        if held is not None and not bnb_quantized:
            held.rebuilt()
        self = torch.Tensor._make_subclass(cls, data, requires_grad)
        self.__dict__.update(
            quant_state=quant_state,
            blocksize=blocksize,
            compress_statistics=compress_statistics,
            quant_type=quant_type,
            quant_storage=quant_storage,
            module=module,
            bnb_quantized=packed,
        )
        return self

    absmax = _proxy("absmax", "absmax")
    code = _proxy("code", "code")
    quant_map = _proxy("quant_map", "code")
    offset = _proxy("offset", "offset")
    state2 = _proxy("state2", "state2")
    nested_absmax = _proxy("nested_absmax", "state2", "absmax")
    nested_blocksize = _proxy("nested_blocksize", "state2", "blocksize")
    nested_quant_map = _proxy("nested_quant_map", "state2", "code")
    nested_dtype = _proxy("nested_dtype", "state2", "dtype")
    nested_offset = _proxy("nested_offset", "offset")
    global_scale = _proxy("global_scale", "global_scale")

    @property
    def ds_shape(self) -> torch.Size:
        """Shape of a stack of experts as its module shows it, from which peft makes adapters.

        peft asks for this name, under which DeepSpeed keeps the shape of a parameter that it has cut.
        """
        held = self._holder()
        if held is None or not held.kind.stacked:
            raise AttributeError("ds_shape: this is the weight of a layer")
        return held.shown

    @property
    def has_fp16_weights(self) -> bool:
        """False; only int8 weights have it, and peft makes a merged one with it."""
        self._require("has_fp16_weights")
        return False

    @property
    def SCB(self) -> Tensor:
        """Scales of an int8 weight, float32 [N]. AttributeError for 4-bit weights."""
        self._require("SCB")
        return self.quant_state.absmax

    def _require(self, name: str) -> None:
        if self.quant_state is None or name not in self.quant_state.kind.attributes:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    # -- making one --

    @classmethod
    def of_state(cls, packed: Tensor, state: QuantState, quant_storage: torch.dtype, module: Any) -> Params4bit:
        """`packed` as a quantized weight with the settings that `state` was made with; nothing is checked or copied."""
        return cls(
            packed,
            quant_state=state,
            blocksize=state.blocksize,
            compress_statistics=state.nested,
            quant_type=state.quant_type,
            quant_storage=quant_storage,
            module=module,
            bnb_quantized=True,
        )

    @classmethod
    def from_prequantized(
        cls,
        data: Tensor,
        quantized_stats: dict[str, Any],
        requires_grad: bool = False,
        device: torch.device | str | int = "cuda",
        module: Any = None,
        **kwargs: Any,
    ) -> Params4bit:
        """A weight from checkpoint entries: packed `data` and its statistics (see `QuantState.from_dict`).

        `quant_storage` becomes the dtype of `data`. TypeError or ValueError where data, statistics and the linear layer
        `module` do not fit. For a layer that FSDP2 has sharded before its weight came, all of them are this rank's
        parts, and so is the result (a `PackedShard`).
        """
        with launch.counting_memory():
            held = getattr(module, "packed_weight", None)
            if held is not None and held.awaited is not None:
                return held.awaited.take_packed(data.detach(), quantized_stats, device)
            return cls._from_prequantized(data, quantized_stats, requires_grad, device, module)

    @classmethod
    def _from_prequantized(
        cls, data: Tensor, quantized_stats: dict[str, Any], requires_grad: bool, device: Any, module: Any
    ) -> Params4bit:
        state = QuantState.from_dict(quantized_stats, device=device)
        layer = [getattr(module, name, None) for name in ("out_features", "in_features")]
        held = getattr(module, "packed_weight", None)
        layer = list(held.shape or layer) if held is not None else layer
        if None not in layer and list(state.shape) != layer:
            raise ValueError(f"from_prequantized: shape {list(state.shape)} does not fit a layer of {layer}")
        state = state if held is None else held.fitting(state)
        packed = data.detach().to(device)
        check_packed(packed, state, "from_prequantized")
        self = cls.of_state(packed, state, data.dtype, module)
        container = container_dtype(state.dtype, data.dtype, state.kind)
        self._install(repack(packed.as_subclass(Tensor), container, state), state)
        self.requires_grad = requires_grad
        return self

    def _quantize(self, device: torch.device | str | int) -> Params4bit:
        """Quantize the float data in place, on `device`."""
        values, held = self.data.to(device), self._holder()
        kind = kind_of(self.quant_type) if held is None else held.kind
        if held is not None:
            values = held.oriented(values)
        if held is not None and held.state is None and held.shape not in (None, values.shape):
            raise ValueError(f"a weight of {list(values.shape)} for a layer of {list(held.shape)}")
        packed, state = kind.quantize(
            values,
            blocksize=self.blocksize,
            compress_statistics=self.compress_statistics,
            quant_type=self.quant_type,
            quant_storage=container_dtype(values.dtype, self.quant_storage, kind),
        )
        self._install(packed, state)
        return self

    def _install(self, packed: Tensor, state: QuantState) -> None:
        """Take over packed bytes and their state; from here on they are what `verify` compares with."""
        launch.loading()
        state.checksum = ops.checksum(packed)
        held = self._holder()
        keeps_part = held is not None and held.state is None and launch.keeps_parts()
        if keeps_part:
            kept_part.KeptPart(packed, state)
            packed = kept_part.hollow(packed, packed.device)
        with plain():
            if self.requires_grad:
                raise grad_error(state.kind.word)
            self.data = packed
        self.bnb_quantized = True
        self._set_state(state)
        if keeps_part:
            self.__class__ = kept_part.stand_in
            self._delivered()  # the first forward compares what was gathered with what was quantized

    def _set_state(self, state: QuantState | None) -> None:
        """The bytes are those of `state`: tell the layer, too."""
        self.quant_state = state
        held = self._holder()
        if held is not None:
            held.follow(state)
        elif self.module is not None:
            self.module.quant_state = state

    def _delivered(self) -> None:
        """Somebody else has set the bytes: the layer checks them before it uses them."""
        held = self._holder()
        if held is not None:
            held.delivered()

    def _holder(self) -> Any:
        """The `bitshard.nn.holder.PackedWeight` of the layer; None where there is no layer, or a foreign one."""
        return getattr(self.module, "packed_weight", None)

    # -- pickles --

    def __reduce_ex__(self, protocol: int) -> tuple:
        state = {**self.__dict__, "module": None}
        return _rebuild, (type(self), self.plain_data(), self.requires_grad), state

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "data": self.plain_data(), "requires_grad": self.requires_grad}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        data, requires_grad = state.pop("data", None), state.pop("requires_grad", None)
        with plain():
            if data is not None:
                self.data = data
            if requires_grad is not None:
                self.requires_grad = requires_grad
        self.__dict__.update(state)

    # -- moves --

    def _float_to(self, device: torch.device | None, dtype: torch.dtype | None, non_blocking: bool) -> Any:
        if device is None or device.type == "meta":
            return self._plain_to(device, dtype, non_blocking)
        with launch.counting_memory():
            held = self._holder()
            if held is None or held.awaited is None:
                return self._quantize(device)
            with plain():
                rows = torch.Tensor.to(self.data, device=device, dtype=dtype, non_blocking=non_blocking)
            return held.awaited.quantize(rows.as_subclass(Tensor))

    def _enter_float_container(self) -> bool:
        """Present the bytes in the container that FSDP shards, before it does; whether that could be."""
        state, data = self.quant_state, self.plain_data()
        if state is None or shardable_dtype(state.dtype, data.dtype, state.kind) is data.dtype:
            return False
        with plain():
            self.data = repack(data, state.dtype, state)
        return True

    def saved_data(self) -> Tensor:
        """What files get: the packed bytes as a plain tensor of `quant_storage`; else the data as it is."""
        data, state = self.plain_data(), self.quant_state
        if not self.bnb_quantized or state is None or data.dtype is self.quant_storage:
            return data
        whole = data.numel() == state.packed_elements(data.element_size())
        return repack(data, self.quant_storage, state) if whole else data


def _rebuild(cls: type[Params4bit], data: Tensor, requires_grad: bool) -> Params4bit:
    return torch.Tensor._make_subclass(cls, data, requires_grad)


def _may_be_packed(data: Tensor, state: QuantState | None) -> bool:
    """Whether `data` can be packed bytes of `state`: not so for a float matrix of the shape that was quantized.

    peft merges new float weights into a parameter rebuilt from the old one's attributes, `bnb_quantized` included.
    ValueError for what is neither.
    """
    if state is None or state.shape is None or data.numel() == 0:
        return True
    expected = state.packed_elements(data.element_size())
    if data.numel() == expected:
        return True
    if data.dtype in VALUE_DTYPES.values() and data.numel() == state.shape.numel():
        return False
    raise ValueError(
        f"Params4bit: data {list(data.shape)} of {dtype_name(data.dtype)} is neither a weight of shape "
        f"{list(state.shape)} nor its packed form of {expected} elements"
    )


# ---- what torch functions do with it; called with the class's own __torch_function__ off ----


def _get_data(func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    data = func(*args, **kwargs)
    if type(data) is not Tensor or packed_among(args) is None:
        return data
    if torch.compiler.is_dynamo_compiling():
        return _traced(data)
    data, state = data.as_subclass(PackedData), args[0].quant_state
    if state is not None:
        data.word = state.kind.word
        if state.kind.stacked:
            data.of_stack = args[0]
    return data


def _traced(piece: Tensor) -> PackedData:
    """Bytes of a weight in a graph of Dynamo, guarded; not from their source, of which Dynamo makes no subclass."""
    return piece.detach().as_subclass(PackedData)


def _set_data(func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    weight, data = args
    replacement = getattr(data, "replacement", None)
    if replacement is not None:  # peft has merged into a stack
        held = weight._holder()
        return setattr(held.owner, held.name, replacement)
    if weight.bnb_quantized:
        if _same_memory(weight, data):
            func(weight, data)
            return
        if data.dtype is not weight.dtype:
            raise TypeError(
                f".data = {dtype_name(data.dtype)}: this {word_of(weight)} weight holds packed bytes in a "
                f"{dtype_name(weight.dtype)} container. Under FSDP1 make param_dtype equal to the container's dtype "
                "(bnb_4bit_quant_storage of 4-bit weights) and load the model with that dtype= too."
            )
        state = weight.quant_state
        if data.dim() > 1 and state is not None and data.numel() != state.packed_elements(data.element_size()):
            raise ValueError(
                f".data = {list(data.shape)}: this {state.kind.word} weight of {list(state.shape)} packs into "
                f"{state.packed_elements(data.element_size())} elements. Assign a new Params4bit "
                "instead."
            )
    func(weight, data)
    if weight.bnb_quantized:
        _follow_data(weight, data)


def _same_memory(weight: Params4bit, data: Tensor) -> bool:
    """Whether `data` is the bytes of `weight` in another dtype: a column of them all, at the same address."""
    n_bytes = weight.numel() * weight.element_size()
    return (
        data.dtype is not weight.dtype
        and not torch.compiler.is_compiling()
        and data.dim() == 2
        and data.size(1) == 1
        and data.numel() * data.element_size() == n_bytes > 0
        and data.is_contiguous()
        and data.device == weight.device
        and data.data_ptr() == weight.data_ptr() != 0
    )


def _follow_data(weight: Params4bit, data: Tensor) -> None:
    """After `weight.data = data`: take over the state that came along, or note that the bytes are somebody else's."""
    if isinstance(data, Params4bit) and data.quant_state is not None:
        if data.quant_state is not weight.quant_state:
            foreign = data.quant_state.checksum is None
            weight._set_state(data.quant_state)
            if foreign:
                weight._delivered()
        return
    state = weight.quant_state
    whole = data.dim() == 2 and not data.is_meta  # FSDP1 with offload also assigns flat shards, on the CPU
    if state is not None and whole and not state.absmax.is_meta and state.absmax.device != data.device:
        weight._set_state(state.moved(data.device))
    weight._delivered()


def _keep_class(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    weight = args[0] if args else kwargs.get("input", kwargs.get("self"))
    out = func(*args, **kwargs)
    if not isinstance(weight, Params4bit):
        return out
    like = weight._like
    if torch.compiler.is_dynamo_compiling():  # which gives attributes to no tensor that a graph makes
        if not weight.bnb_quantized:
            return out
        like = _traced
    return tuple(like(piece) for piece in out) if isinstance(out, (tuple, list)) else like(out)


def _detach(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    before_detach(args[0] if args else kwargs.get("input", kwargs.get("self")))
    return _keep_class(func, args, kwargs)


def _compare_before_fsdp1(frame: FrameType | None) -> None:
    """Where FSDP1 flattens the first weights of a model that it shards in replicas, or not at all: compare all."""
    if frame is None:
        return
    handle, replicas, model = frame.f_locals["self"], None, None
    shards = handle.process_group
    while frame is not None:  # within the constructors of the units, the outermost last
        state = frame.f_locals.get("state")
        replicas = replicas or getattr(state, "__dict__", {}).get("_inter_node_pg")
        if "sharding_strategy" in frame.f_locals and isinstance(frame.f_locals.get("module"), torch.nn.Module):
            model = frame.f_locals["module"]
        frame = frame.f_back
    if replicas is None and not handle.uses_sharded_strategy and shards.size() > 1:
        shards, replicas = None, shards
    if replicas is not None and model is not None:
        agreement.agree_in_replicas(model, described_in(model), shards, replicas)


def _empty_like(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    out = func(*args, **kwargs)
    weight = args[0] if args else kwargs["input"]
    if not isinstance(weight, Params4bit) or out.dtype is not weight.dtype:
        return out
    if weight.bnb_quantized:
        weight._delivered()
    return weight._like(out)


def _new_zeros(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What FSDP2 makes its shards with."""
    weight = args[0]
    out = func(*args, **kwargs)
    if not isinstance(weight, Params4bit) or out.dtype is not weight.dtype:
        return out
    if not weight.bnb_quantized:
        # transformers gives the meta weight of a packed checkpoint the dtype of the bytes to come, which not every
        # FSDP2 takes. A weight that awaits its rows needs none of its own.
        return out.bfloat16() if weight.is_meta and not weight.dtype.is_floating_point else out
    require_shardable(weight)
    launch.note_sharding(loading=weight.is_meta)
    return PackedShard(out, weight.quant_state, weight.size(), like=weight)


def require_shardable(weight: Params4bit) -> None:
    """ValueError where the FSDP2 of this torch cannot shard the container's dtype."""
    if not (weight.dtype.is_floating_point or _FSDP2_TAKES_INTEGERS):
        raise ValueError(
            f"FSDP2 of torch {torch.__version__} shards no {dtype_name(weight.dtype)} (2.12 and later do): load the "
            "model with bnb_4bit_quant_storage= the dtype of the model, or after TrainingArguments(fsdp=...) or "
            "`accelerate launch` have told this process that FSDP shards"
        )


_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
_FSDP2_TAKES_INTEGERS = _TORCH >= (2, 12)
_FSDP1_CLIPS_ONE_DTYPE = _TORCH < (2, 11)  # clip_grad_norm_


def _is_floating_point(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """What FSDP asks of a weight to decide whether it can shard it (so does `Module.to`, which does not matter).

    Where accelerate is about to shard, a weight that was loaded before that was known enters a float container now;
    accelerate would leave it whole on every rank. ValueError where FSDP1 asks before it flattens.
    """
    weight = args[0]
    answer = func(*args, **kwargs)
    if in_module_move() or packed_among(args) is None or torch.compiler.is_compiling():
        return answer
    adapters.before_fsdp2()
    if answer:
        _compare_before_fsdp1(foreign.asked_by(foreign.FSDP1_FLATTENS))
        return answer
    if foreign.asked_by(foreign.FSDP1_FLATTENS):
        raise ValueError(
            f"FSDP1 cannot shard {word_of(weight)} weights that are kept as {dtype_name(weight.dtype)}: load the "
            "model with bnb_4bit_quant_storage= the dtype of the model, or after TrainingArguments(fsdp=...) or "
            "`accelerate launch` have told this process that FSDP shards; or use FSDP2 (fully_shard)"
        )
    return launch.sharding_begins() and isinstance(weight, Params4bit) and weight._enter_float_container()


def _set_requires_grad(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """weight.requires_grad = ... and weight.requires_grad_(...)."""
    wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
    if wanted and args[0].bnb_quantized:
        raise grad_error(word_of(args[0]))
    return func(*args, **kwargs)


def _reduce(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """sum(), norm() and their like, of the bytes in the declared storage, as of bitsandbytes' weights."""
    weight = packed_among((*args, *kwargs.values()))
    if weight is None:
        return func(*args, **kwargs)
    _warn_of_bytes(getattr(func, "__name__", "a reduction"), weight)
    return func(*(_as_saved(arg) for arg in args), **{name: _as_saved(arg) for name, arg in kwargs.items()})


def _as_saved(value: Any) -> Any:
    return value.saved_data() if isinstance(value, Params4bit) and value.bnb_quantized else value


def _warn_of_bytes(name: str, weight: Tensor) -> None:
    """Once per process."""
    global _warned_of_bytes
    if not _warned_of_bytes:
        _warned_of_bytes = True
        logger.warning(
            "%s of %s weight tells of its packed bytes, not of the weight. For that use "
            "dequantize_4bit(weight.data, weight.quant_state).",
            name,
            "an int8" if word_of(weight) == "int8" else "a 4-bit",
        )


_warned_of_bytes = False


def _numel(func: Any, args: tuple, kwargs: dict[str, Any]) -> int:
    """The number of elements; while parts are kept, those of this rank where transformers asks what to reserve."""
    weight = args[0]
    n = func(*args, **kwargs)
    if _FSDP1_CLIPS_ONE_DTYPE and not torch.compiler.is_compiling():
        adapters.before_fsdp1(weight)
    if (
        not weight.is_meta
        or not isinstance(weight, Params4bit)
        or torch.compiler.is_compiling()
        or not launch.keeps_parts()
    ):
        return n
    return -(-n // launch.world()) if foreign.asked_by(foreign.TRANSFORMERS_RESERVES) else n


def _handlers() -> dict[Any, Any]:
    table: dict[Any, Any] = dict(guards.HANDLERS)
    for func in (torch.chunk, torch.split, torch.Tensor.chunk, torch.Tensor.split):
        table[func] = _keep_class
    table[torch.Tensor.detach] = table[torch.detach] = _detach
    table[torch.as_strided] = table[torch.Tensor.as_strided] = _keep_class
    table[torch.Tensor.to] = method_to
    table[torch.is_floating_point] = table[torch.Tensor.is_floating_point] = _is_floating_point
    table.update(dict.fromkeys(guards.reductions(), _reduce))
    table[torch.Tensor.requires_grad_] = table[torch.Tensor.requires_grad.__set__] = _set_requires_grad
    table[torch.empty_like] = _empty_like
    table[torch.Tensor.numel] = table[torch.numel] = _numel
    table[torch.Tensor.new_zeros] = _new_zeros
    table[torch.Tensor.data.__get__] = _get_data
    table[torch.Tensor.data.__set__] = _set_data
    return table


Params4bit.handlers = _handlers()
_rebuild.__module__ = "bitshard.tensor"  # as pickles name it
torch.serialization.add_safe_globals([Params4bit, QuantState, _rebuild])
