"""Linear4bit: nn.Linear with a frozen 4-bit weight.

    layer = Linear4bit(K, N, compute_dtype=torch.bfloat16, quant_type="nf4")
    layer.load_state_dict(linear.state_dict())
    layer.to("cuda")                                   # quantizes here
    y = layer(x)                                       # x [..., K] -> y [..., N]

What FSDP puts in the weight's place, and which state belongs to it, is the business of the layer's holder
(bitshard/nn/holder.py); forward asks it and never changes a weight. A bias of another dtype it converts
(bitshard/nn/bias.py).
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from bitshard.formats.state import QuantState, dtype_name
from bitshard.nn.bias import keep_in
from bitshard.nn.holder import HoldsPackedWeight, PackedWeight
from bitshard.process import launch
from bitshard.products.autograd import matmul_4bit
from bitshard.weights import inventory
from bitshard.weights.guards import SKIP
from bitshard.weights.tensor import Params4bit

logger = logging.getLogger(__name__)


class Linear4bit(HoldsPackedWeight, nn.Linear):
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
        self.packed_weight = PackedWeight(self, "weight", (output_features, input_features))
        if self.weight.is_meta:
            launch.layer_waits(self, input_features * output_features)

    def reset_parameters(self) -> None:
        """Initialize a weight that is not quantized; packed bytes are left alone."""
        if not getattr(self.weight, "bnb_quantized", False):
            super().reset_parameters()

    # -- forward --

    def forward(self, x: Tensor) -> Tensor:
        weight, state, bias, compute_dtype = self.operands(x)
        dtype = x.dtype
        if dtype is not compute_dtype:
            if not dtype.is_floating_point:
                raise self._no_floats(dtype)
            x = x.to(compute_dtype)
        y = matmul_4bit(x, weight, state, bias=bias)
        return y if dtype is compute_dtype else y.to(dtype)

    def _no_floats(self, dtype: torch.dtype) -> TypeError:
        """The error for an x of `dtype`, which is that of the packed bytes where the model has asked them for it."""
        text = f"Linear4bit: x is {dtype_name(dtype)}, expected a floating-point dtype"
        if dtype is not self.weight.dtype:
            return TypeError(text)
        path = inventory.path_of(self)
        return TypeError(
            f"{text}. {path}.weight holds packed bytes of this dtype. {SKIP} Here: {path.rpartition('.')[2]!r}"
        )

    def operands(self, x: Tensor) -> tuple[Tensor, QuantState, Tensor | None, torch.dtype]:
        """(packed weight, its state, bias, dtype of the product) with which this forward multiplies x.

        The first call reports what of the model is 4-bit, and the first x chooses `compute_dtype` where it is not set.
        """
        parameters = self._parameters  # read directly, for attributes come through nn.Module's __getattr__
        held = self.packed_weight
        weight, state = held.ready(parameters["weight"] if "weight" in parameters else self.weight)
        if not held.reported and not torch.compiler.is_compiling():
            inventory.log_line(self)
        if held.unwatched and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            held.watch()
        if not self.compute_type_is_set:
            self.set_compute_type(x)
            self.compute_type_is_set = True
        compute_dtype = self.compute_dtype or x.dtype
        bias = parameters["bias"] if "bias" in parameters else self.bias
        if bias is not None and bias.dtype is not compute_dtype:
            keep_in(bias, compute_dtype)
            bias = bias.to(compute_dtype)
        return weight, state, bias, compute_dtype

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

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Read a copy or a pickle, bitsandbytes' too, in which the weight is a plain parameter."""
        state = dict(state)
        foreign_state = state.pop("quant_state", None)
        super().__setstate__(state)
        if "packed_weight" not in state:
            self.packed_weight = PackedWeight(self, "weight", (self.out_features, self.in_features))
            self.packed_weight.known(foreign_state)
        weight = self._parameters.get("weight")
        if type(weight) is nn.Parameter and vars(weight).get("quant_state") is not None:
            weight = Params4bit(weight.data, weight.requires_grad, **vars(weight))
            self._parameters["weight"] = weight
        if isinstance(weight, Params4bit):
            weight.module = self


def fix_4bit_weight_quant_state_from_module(module: nn.Module) -> None:
    """Bring the states of a layer and of its weight together again after something has replaced either.

    A weight with a state of its own gives it to the layer. A plain tensor (FSDP1's view of the flat parameter) gets
    nothing: forward uses the layer's state with it. RuntimeError or ValueError where there is no state, or the weight
    is no packed column.
    """
    held = getattr(module, "packed_weight", None)
    if held is None:  # a layer of somebody else's
        held = PackedWeight(module, "weight")
        held.known(module.quant_state)
    held.reconcile(module.weight)
    if module.quant_state is not held.state:
        module.quant_state = held.state


class _OneFormat(Linear4bit):
    format: str

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
        numbers = (bias, compute_dtype, compress_statistics, self.format, quant_storage, device)
        super().__init__(input_features, output_features, *numbers)


class LinearNF4(_OneFormat):
    """Linear4bit with quant_type="nf4"."""

    format = "nf4"


class LinearFP4(_OneFormat):
    """Linear4bit with quant_type="fp4"."""

    format = "fp4"
