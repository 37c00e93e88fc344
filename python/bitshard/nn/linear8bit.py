"""Linear8bitLt: nn.Linear with a weight in int8 (LLM.int8).

    layer = Linear8bitLt(K, N, has_fp16_weights=False, threshold=6.0)
    layer.load_state_dict(linear.state_dict())
    layer.to("cuda")                                   # quantizes here
    y = layer(x)                                       # x [..., K] -> y [..., N]

In a state dict: weight int8 [N, K], SCB float32 [N], weight_format uint8 0 (rows), bias [N].
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from bitshard import int8
from bitshard.int8_params import Int8Params
from bitshard.matmul_int8 import MatmulLtState, RowScales, matmul, matmul_int8
from bitshard.state import dtype_name

FORMATS = {number: name for number, name in enumerate(("row", "col32", "col_turing", "col_ampere"))}


class Linear8bitLt(nn.Linear):
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

    def reset_parameters(self) -> None:
        """Initialize a weight that is not quantized; codes are left alone."""
        if self.weight.dtype is not torch.int8:
            super().reset_parameters()

    def init_8bit_state(self) -> None:
        """Nothing: codes and scales of the weight are those of `state`, always. For callers of bitsandbytes' method."""

    # -- forward --

    def forward(self, x: Tensor) -> Tensor:
        """y [..., N] of the dtype of x, float32, float16 or bfloat16 [..., K]."""
        state = self.state
        state.is_training = self.training
        weight, bias = self.weight, self._bias(x)
        if weight.dtype is torch.int8:
            return matmul_int8(x, weight, self._scales(weight), bias, state.threshold)
        if isinstance(weight, Int8Params) and not state.has_fp16_weights and not weight.requires_grad:
            weight.to(weight.device)
            return matmul_int8(x, weight, self._scales(weight), bias, state.threshold)
        return matmul(x, weight, bias=bias, state=state)

    def _bias(self, x: Tensor) -> Tensor | None:
        """The bias. In one process a layer keeps it in the dtype of its last x, as bitsandbytes' does."""
        bias, distributed = self.bias, torch.distributed
        if bias is None or bias.dtype is x.dtype or self.state.has_fp16_weights or not x.is_floating_point():
            return bias
        if not torch.compiler.is_compiling() and not (distributed.is_available() and distributed.is_initialized()):
            bias.data = bias.data.to(x.dtype)
        return bias

    def _scales(self, weight: Tensor) -> RowScales:
        """The scales of quantized codes. RuntimeError or ValueError where there are none, or others."""
        scales, shape = self.state.SCB, (self.out_features, self.in_features)
        if scales is None:
            raise RuntimeError(
                f"Linear8bitLt: the int8 weight {list(shape)} has no scales: load a state dict with SCB beside it, or "
                "assign Int8Params(codes, SCB=scales)"
            )
        if weight.shape != shape or scales.shape != shape[:1]:
            raise ValueError(
                f"Linear8bitLt: codes {list(weight.shape)} and scales {list(scales.shape)} for a layer of {list(shape)}"
            )
        return RowScales(scales, weight.shape)

    # -- copies and moves --

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy, a pickle, or a layer that bitsandbytes pickled, whose weight arrives as a plain parameter."""
        super().__setstate__(state)
        weight, held = self._parameters.get("weight"), self.state
        if type(weight) is nn.Parameter and "SCB" in vars(weight):
            own = {**vars(weight)}
            if weight.dtype is torch.int8 and own["SCB"] is None:  # after its first forward
                own["SCB"] = held.SCB
            self._parameters["weight"] = Int8Params(weight.data, weight.requires_grad, **own)
        if held.owner is not self:
            self.state = copy.copy(held)
            self.state.owner = self

    def to(self, *args: Any, **kwargs: Any) -> Linear8bitLt:
        """As of any module: a float weight is quantized by its first move to a device, its scales go with it."""
        return super().to(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        weight, set_there = self.weight, self.state.SCB
        if isinstance(weight, Int8Params) and weight.bnb_quantized and weight.SCB is None:
            weight.SCB = set_there  # as bitsandbytes leaves it after a forward
        result = super()._apply(fn, recurse)
        self.state.reset_grads()  # what was set there, or made of a float weight, is where the layer was
        return result

    # -- state dicts --

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        scales = self.state.SCB if self.weight.dtype is torch.int8 else None
        if scales is not None:
            destination[f"{prefix}SCB"] = scales if keep_vars else scales.detach()
            destination[f"{prefix}weight_format"] = torch.tensor(0, dtype=torch.uint8)

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
        maybe_rearrange_weight(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        arguments = (local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        codes, scales = state_dict.get(f"{prefix}weight"), state_dict.get(f"{prefix}SCB")
        quantized = self.weight.dtype is torch.int8
        assigns = bool(local_metadata.get("assign_to_params_buffers", False))
        if scales is None and not quantized and (codes is None or codes.dtype is not torch.int8):
            return super()._load_from_state_dict(state_dict, prefix, *arguments)
        if scales is not None and not assigns and (not quantized or self.state.SCB is None):
            raise RuntimeError(
                f"Loading a quantized checkpoint into non-quantized Linear8bitLt ({prefix}): move the module to its "
                "device first, which quantizes it (module.to(...)), or load with assign=True"
            )
        own = {f"{prefix}{name}" for name in ("weight", "SCB", "weight_format")}
        absent: list[str] = []
        rest = {key: value for key, value in state_dict.items() if key not in own}
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, absent, unexpected_keys, error_msgs)
        missing_keys.extend(key for key in absent if key not in own)
        if codes is None and scales is None:
            missing_keys.extend([f"{prefix}weight", f"{prefix}SCB"] if strict else [])
            return
        try:
            self._load_codes(codes, scales, assigns)
        except (TypeError, ValueError) as error:
            error_msgs.append(f"{prefix}weight: {error}")

    def _load_codes(self, codes: Tensor | None, scales: Tensor | None, assigns: bool) -> None:
        """Take over codes and scales of a checkpoint: both, or neither with TypeError or ValueError."""
        shape = (self.out_features, self.in_features)
        if codes is None or scales is None:
            what = "codes without SCB, their scales" if scales is None else "SCB, scales without their codes"
            if codes is not None and codes.dtype is not torch.int8:
                what = f"a dense weight of {dtype_name(codes.dtype)}: load it into a new layer before that moves"
            raise ValueError(f"for a quantized layer of {list(shape)} the state dict has {what}")
        int8.check_codes(codes, "weight")
        if tuple(codes.shape) != shape:
            raise ValueError(f"codes {list(codes.shape)} for a layer of {list(shape)}")
        int8.check_scales(scales, shape[0], "SCB")
        if assigns:
            self.weight = Int8Params(codes, requires_grad=False, SCB=scales.view(-1))
            return
        with torch.no_grad():
            self.weight.data.copy_(codes)
            self.state.SCB.copy_(scales.view(-1))


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
    found = found.item() if isinstance(found, Tensor) else found
    name = FORMATS.get(found) if isinstance(found, int) else found
    if name is None:
        raise ValueError(f"{prefix}weight_format is {found!r}, known are {FORMATS}")
    if name != "row":
        raise ValueError(f"{prefix}weight_format is {name!r}: only weights by rows can be read")
