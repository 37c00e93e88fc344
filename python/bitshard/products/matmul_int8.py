"""matmul: y = A W^T + bias with W in int8 (LLM.int8), and its gradients with respect to A, bias and a float W.

`MatmulLtState` says which codes and scales a product uses. Derivatives of a frozen weight: `bitshard.products`.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitshard.formats.checks import check_dense, into
from bitshard.formats.kinds import INT8, Kind
from bitshard.formats.state import VALUE_DTYPES, dtype_name
from bitshard.functions import int8
from bitshard.functions.outliers import GlobalOutlierPooler
from bitshard.products.matmul import input_gradient
from bitshard.products.matmul import matmul as matmul_of
from bitshard.weights.guards import SKIP


class RowScales(NamedTuple):
    """What a product asks of an int8 weight beside its bytes (of a `QuantState`, too): scales [N], [N, K], `INT8`."""

    absmax: Tensor
    shape: torch.Size
    kind: Kind  # without a default, which torch 2.10 does not trace


class OfModule:
    """What a module has and what knows the module, as `owner`, without keeping it alive.

    A copy or pickle that was made alone keeps its module, which nobody else has; one that was made with the module is
    claimed by it (`owner = self` in its `__setstate__`).
    """

    _owner: weakref.ref | None = None
    _kept: Any = None

    @property
    def owner(self) -> Any:
        """The module; None where there is none, or it is gone."""
        return None if self._owner is None else self._owner()

    @owner.setter
    def owner(self, module: Any) -> None:
        self._owner, self._kept = None if module is None else weakref.ref(module), None

    def with_owner(self, state: dict[str, Any]) -> dict[str, Any]:
        """What a copy and a pickle hold of `state`, the attributes: the module itself instead of a reference to it."""
        own = {name: value for name, value in state.items() if name not in ("_owner", "_kept")}
        return {**own, "owner": self.owner}

    def __getstate__(self) -> dict[str, Any]:
        return self.with_owner(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({name: value for name, value in state.items() if name != "owner"})
        self.owner = self._kept = state.get("owner")


class MatmulLtState(OfModule):
    """Codes and scales of one weight for `matmul`, and its settings.

    Of a layer (`Linear8bitLt`) these are its weight's: `CB` and `SCB` read them there, wherever the weight is, and what
    others assign counts only while the weight has none. Fields that nothing here uses are kept, for others set them.

    Attributes:
        CB: codes int8 [N, K].
        SCB: scales float32 [N].
        threshold: of outlier columns of A; 0 for none.
        has_fp16_weights: the weight is a float matrix, quantized anew in every forward.
        is_training: set by the layer.
        owner: the layer, or None; it is not kept alive.
    """

    __module__ = "bitshard.matmul_int8"  # as pickles name it

    force_no_igemmlt = has_accumulated_gradients = False
    SB = SBt = CBt = subB = outlier_pool = idx = None
    threshold = 0.0
    is_training = True
    has_fp16_weights = True
    use_pool = False
    _deprecated_fields = frozenset({"CxB", "CxBt", "formatB", "_tile_indices"})

    def __init__(
        self,
        force_no_igemmlt: bool = False,
        CB: Tensor | None = None,
        SB: Tensor | None = None,
        SCB: Tensor | None = None,
        SBt: Tensor | None = None,
        CBt: Tensor | None = None,
        subB: Tensor | None = None,
        outlier_pool: GlobalOutlierPooler | None = None,
        idx: Tensor | None = None,
    ):
        self.force_no_igemmlt = force_no_igemmlt
        self._codes, self._scales = CB, SCB
        self.SB, self.SBt, self.CBt, self.subB = SB, SBt, CBt, subB
        self.outlier_pool, self.idx = outlier_pool, idx

    @property
    def CB(self) -> Tensor | None:
        """Codes int8 [N, K]: the layer's weight, else what was set."""
        held = None if self.owner is None else self.owner.packed_weight.own_codes
        return self._codes if held is None else held

    @CB.setter
    def CB(self, value: Tensor | None) -> None:
        self._codes = value

    @property
    def SCB(self) -> Tensor | None:
        """Scales float32 [N]: those of the layer's weight, else what was set."""
        held = None if self.owner is None else self.owner.packed_weight.own_scales
        return self._scales if held is None else held

    @SCB.setter
    def SCB(self, value: Tensor | None) -> None:
        self._scales = value

    def reset_grads(self) -> None:
        """Forget codes and scales that were set."""
        self._codes = self._scales = self.SB = self.SBt = self.CBt = None

    def __getattr__(self, name: str) -> Any:
        if name in MatmulLtState._deprecated_fields:
            warnings.warn(f"MatmulLtState.{name} is of old releases, and always None", FutureWarning, stacklevel=2)
            return None
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MatmulLtState):
            return NotImplemented
        names = ("force_no_igemmlt", "CB", "SB", "SCB", "SBt", "CBt", "subB", "idx", "threshold", "has_fp16_weights")
        return all(_same(getattr(self, name), getattr(other, name)) for name in names)

    __hash__ = None  # type: ignore[assignment]

    def __copy__(self) -> MatmulLtState:
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__)
        new._kept = self.owner
        return new

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Read a pickle; bitsandbytes' has codes and scales as plain attributes."""
        for name, own in (("CB", "_codes"), ("SCB", "_scales")):
            if name in state:
                state = {own: state[name], **{key: value for key, value in state.items() if key != name}}
        super().__setstate__({"_codes": None, "_scales": None, **state})


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.device == b.device and bool(torch.equal(a, b))
    return type(a) is type(b) and a == b


# ---- a frozen weight ----


def matmul_int8(x: Tensor, packed: Tensor, scales: Any, bias: Tensor | None = None, threshold: float = 0.0) -> Tensor:
    """x W^T + bias for a frozen int8 weight, differentiable in x and bias.

    Args:
        x: float32, float16 or bfloat16 [..., K].
        packed: codes of W [N, K], N K bytes in any dtype and shape.
        scales: `absmax` float32 [N] and `shape` [N, K]: a `RowScales`, or a `QuantState`.
        bias: [N] of any float dtype, in which its gradient is.
        threshold: of outlier columns of x; 0 for none.

    Returns:
        [..., N] of the dtype of x.
    """
    _check_x(x, scales.shape)
    return matmul_of(x, packed, scales, bias, threshold=threshold)


def _check_x(x: Tensor, shape: torch.Size) -> None:
    check_dense(x, "matmul: x")
    if x.dtype not in VALUE_DTYPES.values():
        text = f"matmul: x is {dtype_name(x.dtype)}, expected float32, float16 or bfloat16"
        raise TypeError(f"{text}. {SKIP}" if x.dtype is torch.int8 else text)
    if x.dim() == 0 or x.shape[-1] != shape[1]:
        raise ValueError(f"matmul: x of shape {list(x.shape)} does not fit a weight of shape {list(shape)}")


# ---- bitsandbytes' names ----


def _codes_of(B: Tensor, state: MatmulLtState) -> tuple[Tensor, RowScales]:
    """Codes and scales of the weight of a product: those of `state`, or those of B [N, K] quantized now."""
    codes, scales = state.CB, state.SCB
    if state.has_fp16_weights or codes is None or scales is None:
        codes, scales = B.detach(), getattr(B, "SCB", None) if B.dtype is torch.int8 else None
        if scales is None:
            with torch.no_grad():
                codes, scales, _ = int8.quantize(codes.contiguous())
        state.reset_grads()
        state.CB, state.SCB = codes, scales  # for others: another thread may call with the same state
    int8.check_codes(codes, "matmul: CB")
    if codes.dim() != 2:
        raise ValueError(f"matmul: CB has shape {list(codes.shape)}, expected [N, K]")
    int8.check_scales(scales, codes.shape[0], "matmul: SCB")
    return codes, RowScales(scales, codes.shape, INT8)


def _begin(ctx: Any, A: Tensor, B: Tensor, bias: Tensor | None, state: MatmulLtState) -> tuple[Tensor, RowScales]:
    """Codes and scales of a forward, whose A is checked, and which keeps in `ctx` what its backward needs."""
    codes, scales = _codes_of(B, state)
    _check_x(A, scales.shape)
    if ctx.needs_input_grad[1]:
        ctx.save_for_backward(A)
        ctx.weight_dtype = B.dtype
    ctx.packed, ctx.scales, ctx.bias_dtype = codes, scales, None if bias is None else bias.dtype
    return codes, scales


def _weight_gradient(ctx: Any, dy: Tensor) -> Tensor:
    """dW [N, K] = dy^T x, of x as it is, in the dtype of W."""
    (x,) = ctx.saved_tensors
    dweight = dy.reshape(-1, dy.shape[-1]).t().to(x.dtype) @ x.reshape(-1, x.shape[-1])
    return dweight.to(ctx.weight_dtype)


class MatMul8bitLt(torch.autograd.Function):
    """y = A W^T + bias, differentiable in A, bias and, where it is a float matrix, W = B."""

    @staticmethod
    def forward(
        ctx: Any,
        A: Tensor,
        B: Tensor,
        out: Tensor | None = None,
        bias: Tensor | None = None,
        state: MatmulLtState | None = None,
    ) -> Tensor:
        state = MatmulLtState() if state is None else state
        codes, scales = _begin(ctx, A, B, bias, state)
        y = INT8.product(A, codes, scales, bias, None, int8.check_threshold(state.threshold))
        return into(out, y, "matmul: out")

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, needs_weight, _, needs_bias, _ = (*ctx.needs_input_grad, False, False, False)[:5]
        dx = input_gradient(grad_output, ctx.packed, ctx.scales) if needs_x else None
        dbias = INT8.bias_gradient(grad_output, ctx.scales, None, ctx.bias_dtype) if needs_bias else None
        dweight = _weight_gradient(ctx, grad_output) if needs_weight else None
        return (dx, dweight, None, dbias, None)[: len(ctx.needs_input_grad)]


class MatMul8bitFp(torch.autograd.Function):
    """The same with A as it is, however many rows: W is dequantized to the dtype of A and multiplied by torch."""

    @staticmethod
    def forward(
        ctx: Any,
        A: Tensor,
        B: Tensor,
        out: Tensor | None = None,
        bias: Tensor | None = None,
        state: Any = MatmulLtState,
    ) -> Tensor:
        codes, scales = _begin(ctx, A, B, bias, state() if isinstance(state, type) else state)
        values = int8.dequantize(codes, scales.absmax, *scales.shape, A.dtype)
        y = torch.nn.functional.linear(A, values, None if bias is None else bias.to(A.dtype))
        return into(out, y, "matmul: out")

    backward = staticmethod(MatMul8bitLt.backward)


def matmul(
    A: Tensor,
    B: Tensor,
    out: Tensor | None = None,
    state: MatmulLtState | None = None,
    threshold: float = 0.0,
    bias: Tensor | None = None,
) -> Tensor:
    """A W^T + bias with W in int8, differentiable in A, bias and a float W.

    Args:
        A: float32, float16 or bfloat16 [..., K].
        B: W [N, K] in floats, which is quantized here, unless `state` has codes and `has_fp16_weights` is False.
        out: tensor that receives the result, optional.
        state: codes, scales and settings; codes that are made here are put there.
        threshold: of outlier columns of A, if not 0 instead of that of `state`.
        bias: [N], optional.

    Returns:
        [..., N] of the dtype of A.

    TypeError or ValueError if shapes, dtypes or sizes do not fit.
    """
    state = MatmulLtState() if state is None else state
    if threshold > 0.0:
        state.threshold = threshold
    return MatMul8bitLt.apply(A, B, out, bias, state)


__all__ = ["MatMul8bitFp", "MatMul8bitLt", "MatmulLtState", "RowScales", "matmul", "matmul_int8"]
