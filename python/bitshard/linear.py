"""Linear4bit: nn.Linear with a frozen 4-bit weight.

    layer = Linear4bit(K, N, compute_dtype=torch.bfloat16, quant_type="nf4")
    layer.load_state_dict(linear.state_dict())
    layer.to("cuda")                                   # quantizes here
    y = layer(x)                                       # x [..., K] -> y [..., N]

The quantization state is kept by the layer as well as by the weight, for FSDP puts other tensors in the weight's place;
forward reads it from the layer and never changes a weight.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bitshard import _C, ops
from bitshard.autograd import matmul_4bit
from bitshard.state import QuantState, dtype_name
from bitshard.tensor import Params4bit, module_move, repack, verify

logger = logging.getLogger(__name__)


class Linear4bit(nn.Linear):
    """y = x W^T + b with W quantized to 4 bits.

    Args:
        input_features, output_features: K and N.
        bias: whether there is a bias [N].
        compute_dtype: dtype that x and bias are cast to before the product; None: that of the first float32 or
            bfloat16 x.
        compress_statistics: quantize the scales too.
        quant_type: "nf4" or "fp4".
        quant_storage: dtype of the packed bytes.
        device: where the float weight is created; it is quantized when it moves.
    """

    # defaults of the class, for layers unpickled from bitsandbytes' own files
    foreign_data = False  # somebody else has set the data of the weight since it was quantized
    verified_state: QuantState | None = None  # the state that foreign data was checked against
    sharded_weight: Tensor | None = None  # what FSDP2 registers as the weight between forwards
    original_parameters = False  # FSDP1 with use_orig_params, which looks for the very tensors that it put here

    def __init__(
        self,
        input_features: int,
        output_features: int,
        bias: bool = True,
        compute_dtype: torch.dtype | None = None,
        compress_statistics: bool = True,
        quant_type: str = "fp4",
        quant_storage: torch.dtype = torch.uint8,
        device: torch.device | str | int | None = None,
    ):
        super().__init__(input_features, output_features, bias, device)
        self.weight = Params4bit(
            self.weight.data,
            compress_statistics=compress_statistics,
            quant_type=quant_type,
            quant_storage=quant_storage,
            module=self,
        )
        self.compute_dtype = compute_dtype
        self.compute_type_is_set = compute_dtype is not None
        self.compress_statistics = compress_statistics
        self.quant_type = quant_type
        self.quant_storage = quant_storage
        self.quant_state: QuantState | None = None

    def reset_parameters(self) -> None:
        """Initialize a weight that is not quantized; packed bytes are left alone."""
        if not getattr(self.weight, "bnb_quantized", False):
            super().reset_parameters()

    # -- forward --

    def forward(self, x: Tensor) -> Tensor:
        parameters = self._parameters  # read directly, for attributes come through nn.Module's __getattr__
        weight = parameters["weight"] if "weight" in parameters else self.weight
        state = self.quant_state
        packed = type(weight) is Params4bit
        doubtful = self.foreign_data or not packed
        if state is None or packed and weight.quant_state is not state or doubtful and self.verified_state is not state:
            weight, state = self._resolve(weight)
        if not self.compute_type_is_set:
            self.set_compute_type(x)
            self.compute_type_is_set = True
        dtype = x.dtype
        compute_dtype = self.compute_dtype or dtype
        if dtype is not compute_dtype:
            if not dtype.is_floating_point:
                raise TypeError(f"Linear4bit: x is {dtype_name(dtype)}, expected a floating-point dtype")
            x = x.to(compute_dtype)
        bias = parameters["bias"] if "bias" in parameters else self.bias
        if bias is not None and bias.dtype is not compute_dtype:
            bias = bias.to(compute_dtype)
        y = matmul_4bit(x, weight, state, bias=bias)
        return y if dtype is compute_dtype else y.to(dtype)

    def _resolve(self, weight: Tensor) -> tuple[Tensor, QuantState]:
        """The weight and state for this forward where they are not simply the layer's own.

        A weight that was put here with a state of its own brings it; bytes delivered by others are checked once per
        state.
        """
        brought = getattr(weight, "quant_state", None) is not None
        fix_4bit_weight_quant_state_from_module(self)
        weight, state = self.weight, self.quant_state
        if self.foreign_data or not brought or type(weight) is not Params4bit:
            if state.absmax.device != weight.device and not state.absmax.is_meta:
                state.to(weight.device)
            verify(weight, state, f"Linear4bit({self.in_features}, {self.out_features})")
            self.verified_state = state
        return weight, state

    def set_compute_type(self, x: Tensor) -> None:
        """Choose `compute_dtype` by the first input: float32 and bfloat16 are safe, float16 is computed as it is."""
        if x.dtype in (torch.float32, torch.bfloat16):
            self.compute_dtype = x.dtype
        elif x.dtype == torch.float16 and self.compute_dtype in (None, torch.float32):
            what = "inference" if x.numel() == x.shape[-1] else "inference or training"
            logger.warning(
                "Linear4bit: the input is float16 and compute_dtype is %s, which makes for slow %s.",
                self.compute_dtype,
                what,
            )

    # -- what takes the weight's place --

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and self.__dict__.get("quant_state") is not None:
            self._set_weight(value)
        else:
            super().__setattr__(name, value)

    def _set_weight(self, value: Any) -> None:
        """`layer.weight = value` where there is a quantized weight already.

        FSDP2 puts its shard here and, while it is gathered, the whole weight; FSDP1 a view of its flat parameter. A new
        quantized weight for a layer that FSDP2 sharded is written into the shards of all ranks, for FSDP2 would drop it
        with its next gather: a collective, to which every rank brings the same weight. So is one for a view of FSDP1,
        which lasts where FSDP1 shards nothing; elsewhere the next forward misses it (`verify`).
        """
        if type(value) is Params4bit:
            view = self.__dict__.get("weight")
            if view is value:
                return None
            if getattr(value, "_fsdp_flattened", False):
                # FSDP1 with use_orig_params puts its own parameter back, whose bytes are the layer's, merged ones too
                self.original_parameters, value.quant_state = True, self.quant_state
                return super().__setattr__("weight", value)
            if self.sharded_weight is None:
                if type(view) is Params4bit and value.bnb_quantized:
                    return self._overwrite(view, value)
                return super().__setattr__("weight", value)
            from bitshard import fsdp

            if value.quant_state is fsdp.state_of(self.sharded_weight):
                self._parameters["weight"] = value
                return None
            return fsdp.write(self, value)
        if _is_dtensor(value):
            from bitshard import fsdp

            fsdp.adopt_shard(self, value)
        elif type(value) is Tensor and "weight" not in self._parameters and _is_flat_view(value, self.quant_state):
            self.foreign_data = True
            if not self.original_parameters:
                # FSDP1's view of its flat parameter, as a weight of this layer: foreign code dequantizes nothing else
                value = Params4bit.of_state(value, self.quant_state, self.quant_storage, self)
            self.__dict__["weight"] = value
            return None
        elif self.sharded_weight is not None and value is not None:
            raise ValueError(
                f"weight = {list(value.shape)} of {dtype_name(value.dtype)}: this 4-bit layer is sharded by FSDP2 and "
                "takes a quantized Params4bit only, which it writes into its shards"
            )
        return super().__setattr__("weight", value)

    # -- moves --

    def _apply(self, fn: Any, recurse: bool = True) -> Linear4bit:
        weight = self._parameters.get("weight")
        if isinstance(weight, Params4bit) and not weight.bnb_quantized:
            weight.module = self
            if weight.is_meta:  # accelerate rebuilds a weight without its settings there
                weight.quant_type = self.quant_type
                weight.compress_statistics = self.compress_statistics
                weight.quant_storage = self.quant_storage
        # A sharded weight stays where it is unless the device changes: a probe that no dtype move concerns shows that.
        stays = (
            _is_dtensor(weight) and fn(torch.empty(0, dtype=torch.uint8, device=weight.device)).device == weight.device
        )
        if stays:
            self._parameters["weight"] = None
        try:
            with module_move():
                return super()._apply(fn, recurse)
        finally:
            if stays:
                self._parameters["weight"] = weight

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        weight = self._parameters.get("weight")
        if not isinstance(weight, Params4bit) and getattr(weight, "quant_state", None) is not None:
            # pickled by bitsandbytes: its weight arrives as a plain parameter with the attributes of a Params4bit
            weight = Params4bit(weight.data, weight.requires_grad, **weight.__dict__)
            self._parameters["weight"] = weight
        if isinstance(weight, Params4bit):
            weight.module = self

    # -- state dicts --

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The module's buffers and, for a sharded weight, its scale entries, which torch.distributed's loading fills.

        Only where this layer's own buffers are asked for, as that loading does; `fully_shard` compares the names of all
        buffers before and after.
        """
        yield from super().named_buffers(prefix, recurse, remove_duplicate)
        if not recurse and self.quant_state is not None and _is_dtensor(self.weight):
            from bitshard import fsdp

            for name, value in fsdp.unfilled_entries(self.weight, self.quant_state).items():
                yield f"{prefix}.weight.{name}" if prefix else f"weight.{name}", value

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if _is_dtensor(self.weight):
            from bitshard import fsdp

            return fsdp.save_sharded(self, destination, prefix, keep_vars)
        super()._save_to_state_dict(destination, prefix, keep_vars)
        weight, state = self.weight, self.quant_state
        if isinstance(weight, Params4bit):
            state = weight.quant_state
            if not keep_vars:
                destination[prefix + "weight"] = weight.saved_data()
        if state is not None:  # FSDP1's view of the flat parameter goes out as it is, for FSDP1 splits it again
            for key, value in state.as_dict(packed=True).items():
                destination[f"{prefix}weight.{key}"] = value if keep_vars else value.detach()

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
        if _is_dtensor(self.weight):
            from bitshard import fsdp

            return fsdp.load_sharded(self, state_dict, prefix, *arguments)
        name = f"{prefix}weight"
        statistics = {key: value for key, value in state_dict.items() if key.startswith(f"{name}.")}
        if statistics or getattr(self.weight, "bnb_quantized", False):
            self._load_packed(state_dict, name, statistics, missing_keys, error_msgs)
            taken = {name, *statistics}
            state_dict = {key: value for key, value in state_dict.items() if key not in taken}
            absent: list[str] = []
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, absent, unexpected_keys, error_msgs
            )
            missing_keys.extend(key for key in absent if key != name)
            return
        self.verified_state = None  # what is copied into a view of FSDP1's flat parameter is checked again
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _load_packed(
        self,
        state_dict: dict[str, Any],
        name: str,
        statistics: dict[str, Any],
        missing_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Replace the weight in place by packed entries. Bytes without statistics must be the bytes already here."""
        data = state_dict.get(name)
        if data is None:
            missing_keys.append(name)
            return
        weight = self.weight
        device = data.device if weight.is_meta else weight.device
        try:
            if not statistics and tuple(data.shape) == (self.out_features, self.in_features):
                raise ValueError(
                    f"a dense weight {list(data.shape)} of {dtype_name(data.dtype)} for a layer that is quantized "
                    "already: load it into a new layer before that moves to a device"
                )
            if not statistics:
                verify(data.to(device), self.quant_state, name)
                return
            new = Params4bit.from_prequantized(data, statistics, device=device)
            if tuple(new.quant_state.shape) != (self.out_features, self.in_features):
                raise ValueError(
                    f"shape {list(new.quant_state.shape)} does not fit a layer of "
                    f"{[self.out_features, self.in_features]}"
                )
        except (TypeError, ValueError) as error:
            error_msgs.append(f"{name}: {error}")
            return
        self._adopt(new)

    def _adopt(self, new: Params4bit) -> None:
        """Take over a packed weight; the parameter object stays where it can."""
        weight = self._parameters.get("weight")
        if getattr(weight, "_fsdp_flattened", False) or (
            isinstance(weight, nn.Parameter) and _is_flat_view(weight, new.quant_state)
        ):
            return self._overwrite(weight, new)
        if isinstance(weight, Params4bit) and not weight.is_meta and weight.dtype is new.dtype:
            with torch._C.DisableTorchFunctionSubclass():
                weight.data = new.data
            weight.__dict__.update(new.__dict__)
        else:
            self.weight = weight = new
        weight.module = self
        weight._set_state(new.quant_state)
        self.quant_type, self.quant_storage = new.quant_type, new.quant_storage
        self.compress_statistics = new.compress_statistics

    def _overwrite(self, view: Tensor, new: Params4bit) -> None:
        """Write a packed weight into FSDP1's view of its flat parameter, which must stay where it is."""
        state = new.quant_state
        with torch._C.DisableTorchFunctionSubclass():
            packed = repack(new.data, view.dtype, state.shape.numel())
            if packed.shape != view.shape:
                # quantizing has put its own state on the layer: back to that of the bytes that stay
                old = self.quant_state = getattr(view, "quant_state", self.quant_state)
                raise ValueError(
                    f"weight = packed {list(state.shape)} for a layer of {list(old.shape)}: FSDP1 holds it in a flat "
                    "parameter, where only a weight of the same size can take its place"
                )
            view.data.copy_(packed)
            state.checksum = ops.checksum(packed)
        self.quant_state = state
        if type(view) is Params4bit:
            view.quant_state, view.bnb_quantized = state, True


def _is_flat_view(weight: Tensor, state: QuantState) -> bool:
    """Whether `weight` can be FSDP1's view of its flat parameter: a plain packed column of the size of `state`."""
    if isinstance(weight, Params4bit) or weight.is_meta:
        return False
    return list(weight.shape) == [_C.storage_elements(state.shape.numel(), weight.element_size()), 1]


def _is_dtensor(weight: Any) -> bool:
    if type(weight) is Params4bit or not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(weight, DTensor)


def fix_4bit_weight_quant_state_from_module(module: nn.Module) -> None:
    """Bring the states of a layer and of its weight together again after something has replaced either.

    A weight with a state of its own gives it to the layer. A plain tensor (FSDP1's view of the flat parameter) gets
    nothing: forward uses the layer's state with it. RuntimeError or ValueError where there is no state, or the weight
        is no packed column.
    """
    weight = module.weight
    if _is_dtensor(weight):
        raise ValueError(
            f"{type(module).__name__}: the weight is still sharded (DTensor {list(weight.shape)}): call the module "
            "that FSDP2 wrapped, or unshard() it first"
        )
    own = getattr(weight, "quant_state", None)
    if own is not None:
        if module.quant_state is not own:
            module.quant_state = own
        return
    if module.quant_state is None or (isinstance(weight, Params4bit) and not weight.bnb_quantized):
        raise RuntimeError(
            f"{type(module).__name__}: the weight {list(weight.shape)} of {dtype_name(weight.dtype)} is not quantized "
            "yet: move the layer to a device first, for instance with .to('cpu') or .cuda()"
        )
    if weight.dim() != 2 or weight.shape[1] != 1:
        raise ValueError(
            f"{type(module).__name__}: the weight has shape {list(weight.shape)}, expected a packed column [n, 1]. Is "
            "it a shard of FSDP? Call the module that FSDP wrapped."
        )
    if isinstance(weight, Params4bit):
        weight.quant_state = module.quant_state


class LinearNF4(Linear4bit):
    """Linear4bit with quant_type="nf4"."""

    def __init__(
        self,
        input_features: int,
        output_features: int,
        bias: bool = True,
        compute_dtype: torch.dtype | None = None,
        compress_statistics: bool = True,
        quant_storage: torch.dtype = torch.uint8,
        device: torch.device | str | int | None = None,
    ):
        super().__init__(
            input_features, output_features, bias, compute_dtype, compress_statistics, "nf4", quant_storage, device
        )


class LinearFP4(Linear4bit):
    """Linear4bit with quant_type="fp4"."""

    def __init__(
        self,
        input_features: int,
        output_features: int,
        bias: bool = True,
        compute_dtype: torch.dtype | None = None,
        compress_statistics: bool = True,
        quant_storage: torch.dtype = torch.uint8,
        device: torch.device | str | int | None = None,
    ):
        super().__init__(
            input_features, output_features, bias, compute_dtype, compress_statistics, "fp4", quant_storage, device
        )
