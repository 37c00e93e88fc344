"""Linear8bitLt: nn.Linear with a weight in int8 (LLM.int8).

    layer = Linear8bitLt(K, N, has_fp16_weights=False, threshold=6.0)
    layer.load_state_dict(linear.state_dict())
    layer.to("cuda")                                   # quantizes here
    y = layer(x)                                       # x [..., K] -> y [..., N]

In a state dict: weight int8 [N, K], SCB float32 [N], weight_format uint8 0 (rows), bias [N].

The weight is an `Int8Params` [N, K]. Where FSDP shards in this process it becomes a column of packed bytes, as a 4-bit
weight is, with a holder (`Int8Weight`) that knows where FSDP has put it; codes alone are never sharded.
"""

from __future__ import annotations

import contextlib
import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from bitshard.formats.container import repack
from bitshard.formats.kinds import INT8
from bitshard.formats.place import Place
from bitshard.formats.state import VALUE_DTYPES, QuantState, dtype_name, int8_state
from bitshard.functions import int8
from bitshard.nn import merged
from bitshard.nn.bias import keep_in
from bitshard.nn.holder import HoldsPackedWeight, PackedWeight
from bitshard.process import launch
from bitshard.products.matmul_int8 import MatmulLtState, OfModule, RowScales, matmul, matmul_int8
from bitshard.shards import gather
from bitshard.shards.shard import PackedShard
from bitshard.weights import inventory
from bitshard.weights.int8_params import Int8Params
from bitshard.weights.tensor import Params4bit

FORMATS = {number: name for number, name in enumerate(("row", "col32", "col_turing", "col_ampere"))}


class Int8Weight(OfModule, PackedWeight):
    """The holder of an int8 weight: with a state of its own while that is a column; an `Int8Params` has its state.

    Attributes:
        dtype: of the float weight, and of the container in which FSDP shards it.
        rows: what the last forward that was not traced has multiplied with.
    """

    kind = INT8
    rows: QuantState | RowScales | None = None

    def __init__(self, owner: nn.Module, shape: tuple[int, int], dtype: torch.dtype):
        super().__init__(owner, "weight", shape)
        self.dtype = dtype if dtype in VALUE_DTYPES.values() else torch.float32

    def __getstate__(self) -> dict[str, Any]:
        return self.with_owner({**PackedWeight.__getstate__(self), "rows": None})

    def __deepcopy__(self, memo: dict[int, Any]) -> Int8Weight:
        new = super().__deepcopy__(memo)
        new._kept = new.owner
        return new

    def rows_of(self, weight: Tensor) -> QuantState | RowScales | None:
        """`rows`, if they are those of this weight still: a whole one with the scales of the last forward.

        Asks the weight nothing that goes through torch's functions. The op compares the number of its bytes.
        """
        rows = self.rows
        if rows is None or type(weight) is not Int8Params or weight.__dict__.get("row_state") is not rows:
            return None
        return rows

    @property
    def storage(self) -> torch.dtype:
        """int8: what files have."""
        return torch.int8

    def enter(self) -> bool:
        """Make a quantized weight a column, which FSDP can shard; whether it was none before."""
        weight = self.owner._parameters.get(self.name)
        if not isinstance(weight, Int8Params) or not weight.bnb_quantized or weight.is_meta:
            return False
        if weight.SCB is None:
            weight.SCB = self.owner.state.SCB
        self.scales_of(weight)
        weight.enter(self.owner, self.dtype)
        self.place, self.rows = self.place_of(weight), None
        return True

    def put(self, value: Any) -> bool:
        """`layer.weight = value`; see `PackedWeight.put`. ValueError for a shard of a weight that is not quantized."""
        if isinstance(value, Int8Params) and value.bnb_quantized and not value.is_meta and value.SCB is not None:
            if self.state is not None:
                column = value.column(self.owner, self.dtype)
                if not super().put(column):
                    self.owner._parameters[self.name] = column
                return True
            return self._put_codes(value)
        if type(value) is Params4bit and isinstance(self.owner._parameters.get(self.name), Int8Params):
            self.owner._parameters[self.name] = value  # the first column
            self.follow(value.quant_state)
            self.place = self.place_of(value)
            return True
        if self.state is None and gather.is_dtensor(value) and isinstance(value._local_tensor, PackedShard):
            self.known(value._local_tensor.origin.state)  # a column since accelerate has asked
        if self.state is None:
            trained = self.owner.state.has_fp16_weights or getattr(value, "requires_grad", False)
            if gather.is_dtensor(value) and not trained:
                raise ValueError(
                    f"{type(self.owner).__name__} of {list(self.shape)}: a sharded weight {list(value.shape)} of "
                    f"{dtype_name(value.dtype)} for a layer that is not quantized yet. Load and quantize the whole "
                    "model first (from_pretrained in a process where FSDP shards, or bitshard.fsdp.shardable(model)), "
                    "then shard it"
                )
            return self._registers(value)
        dense = isinstance(value, nn.Parameter) and type(value) is not Params4bit and value.dtype.is_floating_point
        if dense and value.shape == self.shape:
            if self.place is Place.WHOLE:  # a float weight again
                self.state, self.foreign, self.checked = None, False, None
                return self._registers(value)
        return super().put(value)

    def _put_codes(self, value: Int8Params) -> bool:
        """A quantized weight for one that is no column; see `put`. Of what peft unmerges, what was there before."""
        with contextlib.ExitStack() as stack:
            if isinstance(self.owner._parameters.get(self.name), Int8Params) and self.quantized() is not None:
                before = stack.enter_context(merged.replacing(self, value))
                if before is not None:
                    before.into(value)
            if launch.fsdp_launch() or launch.keeps_parts():
                self.owner._parameters[self.name] = value
                return self.enter()
            return self._registers(value)

    def of_values(self, values: Tensor, settings: dict[str, Any]) -> Params4bit:
        """See `PackedWeight.of_values`: a column."""
        return Int8Params(values, requires_grad=False)._quantize(values.device).column(self.owner, values.dtype)

    def of_codes(self, codes: Tensor, beside: dict[str, Tensor], key: str, dtype: torch.dtype) -> Params4bit:
        """See `PackedWeight.of_codes`: a column of codes [N, K] and their SCB."""
        (scales,) = beside.values()
        self.check_codes(codes, scales)
        return Int8Params(codes, SCB=scales.view(-1).to(codes.device)).column(self.owner, dtype)

    def lend(self, base: nn.Module, packed: Tensor, state: Any) -> None:
        """See `PackedWeight.lend`: as peft finds it in one process, codes [N, K] and scales in the layer's `state`."""
        base.state = SimpleNamespace(SCB=None, CB=None, reset_grads=lambda: None)
        base.weight = Int8Params(self.codes(packed, state), SCB=state.absmax)

    def lent(self, base: nn.Module, state: Any) -> tuple[Tensor, Any]:
        """See `PackedWeight.lent`."""
        return base.weight.plain_data().reshape(-1, 1), int8_state(base.weight.SCB, state.shape, state.dtype)

    def stored(self) -> PackedWeight | None:
        """See `PackedWeight.stored`; of an `Int8Params` a holder that shows it as a column."""
        weight = self.owner._parameters.get(self.name)
        if self.state is not None or weight is None:
            return self
        if weight.dtype is not torch.int8:
            return None if self.owner.state.has_fp16_weights or not isinstance(weight, Int8Params) else self
        return self.standing_for(self.owner, int8_state(self.scales_of(weight).absmax, self.shape, self.dtype))

    def quantized(self) -> PackedWeight | None:
        """See `PackedWeight.quantized`; of an `Int8Params` a holder that shows it as a column."""
        weight = self.owner._parameters.get(self.name)
        whole = self.state is None and weight is not None and weight.dtype is torch.int8
        return self.stored() if whole and self.owner.state.SCB is not None else super().quantized()

    def captured(self) -> tuple:
        """See `PackedWeight.captured`: of a whole weight its scales, and what the layer's state says."""
        scales = getattr(self.owner._parameters.get(self.name), "SCB", None) if self.state is None else None
        of = self.owner.state
        return (id(self.state), None if scales is None else scales.data_ptr(), of.threshold, of.has_fp16_weights)

    # -- codes and scales --

    @staticmethod
    def codes(packed: Tensor, state: QuantState) -> Tensor:
        """int8 [N, K] of a whole column, plain."""
        data = packed.detach().as_subclass(Tensor)
        return repack(data, torch.int8, state).view(state.shape)

    @property
    def own_codes(self) -> Tensor | None:
        """Codes int8 [N, K] of the weight; None where it is a float, or not whole in this process."""
        if self.state is None:
            return getattr(self.owner._parameters.get(self.name), "CB", None)
        return self.codes(self.weight, self.state) if self.place is Place.WHOLE else None

    @property
    def own_scales(self) -> Tensor | None:
        """Scales float32 [N] of the weight; None where it is a float. ValueError where the weight is sharded."""
        if self.state is None:
            return getattr(self.owner._parameters.get(self.name), "SCB", None)
        if self.state.sharded is not None or self.shard is not None:
            raise ValueError(
                f"{type(self.owner).__name__}: the int8 weight of {list(self.shape)} is sharded, its scales too, so "
                "nothing can be merged into it here. bitshard.fsdp.save_pretrained(model, folder, merge=True) writes "
                "the merged model, or merge in one process with the saved adapter"
            )
        return self.state.absmax

    def ready(self, weight: Tensor) -> tuple[Tensor, Any]:
        """See `PackedWeight.ready`; codes [N, K] bring their own scales."""
        if self.state is not None or getattr(weight, "quant_state", None) is not None:
            return super().ready(weight)
        if weight.dtype is not torch.int8:
            raise unquantized(self.owner, weight)
        return weight, self.scales_of(weight)

    def scales_of(self, weight: Tensor) -> QuantState | RowScales:
        """The scales of codes [N, K]. RuntimeError or ValueError where there are none, or others."""
        rows = getattr(weight, "row_state", None)
        if rows is None and torch.compiler.is_exporting():
            rows = getattr(self.kept_by_export(), "row_state", None)
        scales = self.owner.state.SCB if rows is None else rows.absmax
        if scales is None:
            raise RuntimeError(
                f"{type(self.owner).__name__}: the int8 weight {list(self.shape)} has no scales: load a state dict "
                "with SCB beside it, or assign Int8Params(codes, SCB=scales)"
            )
        if weight.shape != self.shape or scales.shape != self.shape[:1]:
            raise ValueError(
                f"{type(self.owner).__name__}: codes {list(weight.shape)} and scales {list(scales.shape)} for a layer "
                f"of {list(self.shape)}"
            )
        if rows is None or rows.shape != weight.shape:
            rows = RowScales(scales, weight.shape, INT8)
        if not torch.compiler.is_compiling():
            self.rows = rows
        return rows

    # -- state dicts --

    def save_entries(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Complete what nn.Module has saved of the owner: of a whole weight as files have it."""
        key, state = f"{prefix}{self.name}", self.state
        if state is None:
            weight = self.owner._parameters.get(self.name)
            if weight is None or weight.dtype is not torch.int8 or self.owner.state.SCB is None:
                return
            state = RowScales(self.owner.state.SCB, self.shape, INT8)
        elif self.place is Place.WHOLE:
            destination[key] = self.codes(self.weight, state)
        else:
            return super().save_entries(destination, prefix, keep_vars)
        for name, value in INT8.beside(key, state).items():
            destination[name] = value if keep_vars else value.detach()

    def load_entries(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        strict: bool,
        assigns: bool,
        missing_keys: list[str],
        error_msgs: list[str],
    ) -> set[str]:
        """See `PackedWeight.load_entries`. RuntimeError for codes where the weight is a float."""
        if self.state is not None:
            return super().load_entries(state_dict, prefix, strict, assigns, missing_keys, error_msgs)
        key, weight = f"{prefix}{self.name}", self.owner._parameters.get(self.name)
        beside = INT8.keys_beside(key)
        codes, scales = state_dict.get(key), state_dict.get(beside[0])
        quantized = weight is not None and weight.dtype is torch.int8
        if scales is None and not quantized and (codes is None or codes.dtype is not torch.int8):
            return set()
        replaces = assigns or (self.owner.loads_codes_at_once and not quantized)
        if scales is not None and not replaces and (not quantized or self.owner.state.SCB is None):
            raise RuntimeError(
                f"Loading a quantized checkpoint into non-quantized {type(self.owner).__name__} ({prefix}): move the "
                "module to its device first, which quantizes it (module.to(...)), or load with assign=True"
            )
        if codes is None and scales is None:
            missing_keys.extend([key, beside[0]] if strict else [])
            return {key, *beside}
        try:
            self._load_codes(codes, scales, assigns, replaces)
        except (TypeError, ValueError) as error:
            error_msgs.append(f"{key}: {error}")
        return {key, *beside}

    def check_codes(self, codes: Tensor | None, scales: Tensor | None) -> None:
        """TypeError or ValueError unless these are codes and scales for this weight, both of them."""
        shape = list(self.shape)
        if codes is None or scales is None:
            what = "codes without SCB, their scales" if scales is None else "SCB, scales without their codes"
            if codes is not None and codes.dtype is not torch.int8:
                what = f"a dense weight of {dtype_name(codes.dtype)}: load it into a new layer before that moves"
            raise ValueError(f"for a quantized layer of {shape} the state dict has {what}")
        int8.check_codes(codes, "weight")
        if codes.shape != self.shape:
            raise ValueError(f"codes {list(codes.shape)} for a layer of {shape}")
        int8.check_scales(scales, shape[0], "SCB")
        if codes.is_meta is not scales.is_meta:
            raise ValueError(f"{'weight' if codes.is_meta else 'SCB'} is on the meta device and holds no values")

    def _load_codes(self, codes: Tensor | None, scales: Tensor | None, assigns: bool, replaces: bool) -> None:
        """Take over codes and scales of a checkpoint: both, or neither with TypeError or ValueError.

        They become the weight's themselves (`assigns`), or copies do (`replaces`), or they are written into it.
        """
        self.check_codes(codes, scales)
        here = None if self.weight is None or self.weight.is_meta else self.weight.device
        if codes.is_meta and here is not None and not assigns:
            raise ValueError("weight is on the meta device and holds no values")
        if replaces and not assigns:
            codes, scales = (each.to(here, copy=True) for each in (codes, scales))
        if replaces:
            self.owner.weight = Int8Params(codes, requires_grad=False, SCB=scales.view(-1))
            return
        with torch.no_grad():
            self.weight.data.copy_(codes)
            self.owner.state.SCB.copy_(scales.view(-1))


class HoldsInt8Weight(HoldsPackedWeight):
    """A module whose parameter `weight` [N, K] may be int8. Derive from this before the module.

    `state` and `packed_weight` (an `Int8Weight`) are set by the class that derives, once the parameter is there.
    """

    state: MatmulLtState
    loads_codes_at_once = False  # a quantized state dict loads before the weight is quantized, also without assign=True

    def matrix_shape(self) -> tuple[int, int]:
        """N and K."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Initialize a weight that is not quantized; codes are left alone."""
        if "packed_weight" not in vars(self) or (self.quant_state is None and self.weight.dtype is not torch.int8):
            super().reset_parameters()

    def init_8bit_state(self) -> None:
        """Nothing: codes and scales of the weight are those of `state`, always. For callers of bitsandbytes' method."""

    # -- what others ask for --

    @property
    def SCB(self) -> Tensor | None:
        """Entry of the state dict: torch's code for state dicts walks keys by getattr."""
        return self.state.SCB

    @property
    def weight_format(self) -> Tensor:
        """Entry of the state dict."""
        return torch.zeros((), dtype=torch.uint8)

    # -- copies and moves --

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Read a copy or a pickle, bitsandbytes' too, in which the weight is a plain parameter."""
        super().__setstate__(state)
        weight, held = self._parameters.get("weight"), self.state
        if type(weight) is nn.Parameter and "SCB" in vars(weight):
            own = {**vars(weight)}
            if weight.dtype is torch.int8 and own["SCB"] is None:  # after its first forward
                own["SCB"] = held.SCB
            self._parameters["weight"] = Int8Params(weight.data, weight.requires_grad, **own)
        if "packed_weight" not in state:
            dtype = torch.float32 if weight is None else weight.dtype
            self.packed_weight = Int8Weight(self, self.matrix_shape(), dtype)
        self.state = held if held.owner is self else copy.copy(held)
        self.state.owner = self.packed_weight.owner = self

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        held, weight = self.packed_weight, self._parameters.get("weight")
        if held.state is None and isinstance(weight, Int8Params) and weight.bnb_quantized and weight.SCB is None:
            weight.SCB = self.state.SCB  # as bitsandbytes leaves it after a forward
        result = super()._apply(fn, recurse)
        self.state.reset_grads()  # what was set there, or made of a float weight, is where the layer was
        weight = self._parameters.get("weight")
        if held.state is None and weight is not None:
            if weight.dtype in VALUE_DTYPES.values():
                held.dtype = weight.dtype
            elif launch.fsdp_launch() or launch.keeps_parts():
                held.enter()
        return result

    # -- state dicts --

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        maybe_rearrange_weight(state_dict, prefix, *arguments)
        super()._load_from_state_dict(state_dict, prefix, *arguments)


def unquantized(module: nn.Module, weight: Tensor) -> RuntimeError:
    """The error for a float weight where a quantized one is needed."""
    return RuntimeError(
        f"{type(module).__name__}: the weight {list(weight.shape)} of {dtype_name(weight.dtype)} is not quantized yet: "
        "move the module to a device first, for instance with .to('cpu') or .cuda()"
    )


class Linear8bitLt(HoldsInt8Weight, nn.Linear):
    """y = x W^T + b with W in int8.

    Args:
        input_features, output_features: K and N.
        bias: whether there is a bias [N].
        has_fp16_weights: keep the weight in floats, to train it, and quantize it in each forward.
        threshold: columns of x with a value of this size or more are multiplied as they are; 0: there are none.
        index: kept for others, not used.
        device: where the float weight is created; it is quantized when it moves, or in the first forward.
    """

    def __init__(
        self,
        input_features: int,
        output_features: int,
        bias: bool = True,
        has_fp16_weights: bool = True,
        threshold: float = 0.0,
        index: Tensor | None = None,
        device: torch.device | str | int | None = None,
    ):
        super().__init__(input_features, output_features, bias, device)
        self.index = index
        self.state = MatmulLtState()
        self.state.threshold = int8.check_threshold(threshold)
        self.state.has_fp16_weights = has_fp16_weights
        self.state.use_pool = threshold > 0.0 and not has_fp16_weights
        self.state.owner = self
        self.weight = Int8Params(self.weight.data, has_fp16_weights=has_fp16_weights, requires_grad=has_fp16_weights)
        self.packed_weight = Int8Weight(self, (output_features, input_features), self.weight.dtype)

    def matrix_shape(self) -> tuple[int, int]:
        """N and K."""
        return self.out_features, self.in_features

    def forward(self, x: Tensor) -> Tensor:
        """y [..., N] of the dtype of x, float32, float16 or bfloat16 [..., K]."""
        weight, scales, bias = self.operands(x)
        if scales is None:
            return matmul(x, weight, bias=bias, state=self.state)
        return matmul_int8(x, weight, scales, bias, self.state.threshold)

    def operands(self, x: Tensor) -> tuple[Tensor, Any, Tensor | None]:
        """(weight, its scales and shape, bias) with which this forward multiplies x; a float weight has no scales.

        The first call reports what of the model is int8.
        """
        state, held, parameters = self.state, self.packed_weight, self._parameters
        state.is_training = self.training
        weight, bias = parameters["weight"] if "weight" in parameters else self.weight, self._bias(x)
        scales = None if torch.compiler.is_compiling() else held.rows_of(weight)
        if held.unwatched and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            held.watch()
        if scales is not None:
            return weight, scales, bias
        if held.state is None and getattr(weight, "quant_state", None) is None and weight.dtype is not torch.int8:
            trained = state.has_fp16_weights or weight.requires_grad
            if trained or not (isinstance(weight, Int8Params) or torch.compiler.is_exporting()):
                return weight, None, bias
            if not torch.compiler.is_exporting():
                weight.to(weight.device)
        weight, scales = held.ready(weight)
        if not held.reported and not torch.compiler.is_compiling():
            inventory.log_line(self)
        return weight, scales, bias

    def _bias(self, x: Tensor) -> Tensor | None:
        """The bias. In one process a layer keeps it in the dtype of its last x, as bitsandbytes' does."""
        bias = self._parameters["bias"] if "bias" in self._parameters else self.bias
        if bias is not None and bias.dtype is not x.dtype and not self.state.has_fp16_weights:
            keep_in(bias, x.dtype)
        return bias

    def to(self, *args: Any, **kwargs: Any) -> Linear8bitLt:
        """As of any module: a float weight is quantized by its first move to a device, its scales go with it."""
        return super().to(*args, **kwargs)


def maybe_rearrange_weight(
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Take the entry weight_format out of a state dict with a weight. ValueError unless it says rows, as all do now."""
    if state_dict.get(f"{prefix}weight") is None:
        return
    found = state_dict.pop(f"{prefix}weight_format", "row")
    if isinstance(found, Tensor) and found.is_meta:
        raise ValueError(f"{prefix}weight_format is on the meta device and holds no values")
    found = found.item() if isinstance(found, Tensor) else found
    name = FORMATS.get(found) if isinstance(found, int) else found
    if name is None:
        raise ValueError(f"{prefix}weight_format is {found!r}, known are {FORMATS}")
    if name != "row":
        raise ValueError(f"{prefix}weight_format is {name!r}: only weights by rows can be read")
