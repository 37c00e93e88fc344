"""y = W x + bias + s B (A dropout(x)) with W in 4 or 8 bits and its gradients, as one autograd function.

Every sum is the accumulation of a product (`addmm_` with beta = 1) and every scale its factor (alpha), so that no pass
over y, dy or dx is of their own, but for one behind a dropout: what comes through A has a mask before it is added to
dx. Dtypes: `compute` is that of the product with W, `factor` that of the products with A and B, x and y have a third.
Where they are one, nothing is cast, and with W in 4 bits all products of a call are one call of the C core
(csrc/python/direct_lora.c). It returns None if it cannot run; the code below then computes the same. Elsewhere sums are
float32 and rounded once.

Saved for backward are x, A, B and x A^T, what peft's layer saves, and the mask of a dropout (`bitshard.lora.dropout`);
x A^T stands for dropout(x) A^T there. A and B go through `save_for_backward`, for FSDP, checkpointing and offloading
know tensors that are saved so; the packed weight does not (see `bitshard.products.matmul`).

Where torch.utils.checkpoint runs a forward again for what it saves, torch's hooks are told before the product with W:
the last of them ends that forward, and the product of the region's last layer, whose result nobody needs, is not made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from bitshard import _C, ops
from bitshard.lora.dropout import Dropout
from bitshard.products import InputGradient

_graph_task, _top_hooks = torch._C._current_graph_task_id, torch._C._autograd._top_saved_tensors_default_hooks
_ignored: dict[tuple[torch.device, torch.dtype], Tensor] = {}  # what `addmm` with beta = 0 does not read


def rows_of(x: Tensor) -> Tensor:
    """x [..., K] as [rows, K]: a view where x is contiguous."""
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


def scaled(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """scale left [m, k] right [k, n] in one product."""
    if scale == 1.0:
        return torch.mm(left, right)
    key = (left.device, left.dtype)
    ignored = _ignored.get(key)
    if ignored is None:
        ignored = _ignored[key] = torch.zeros((), device=key[0], dtype=key[1])
    return torch.addmm(ignored, left, right, beta=0, alpha=scale)


def product(
    x: Tensor,
    A: Tensor,
    B: Tensor,
    packed: Tensor,
    state: Any,
    bias: Tensor | None,
    scale: float,
    compute: torch.dtype,
    factor: torch.dtype,
    dropout: Dropout | None = None,
    threshold: float = 0.0,
    keep: Callable[..., None] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """(y, and what its gradients need: x, A and B as they were multiplied, x A^T [rows, r], the mask); no gradient.

    Args:
        x: [..., K]. A: [r, K]. B: [N, r]. packed, state: of W [N, K]. bias: [N] of `compute`, or None.
        scale: s, finite and not 0.
        compute, factor: dtypes of the products, see above.
        dropout: of the x that A multiplies, or None; x has elements then.
        threshold: of outlier columns of x, for an int8 weight.
        keep: called once with what the gradients need, before the product with W; what it raises is raised.
    """
    dtype, kept, keep_inner, given, dropped, mask = x.dtype, [], None, x, None, None
    if dropout is not None:
        dropped, mask = dropout.drop(x)
        x = dropped
    if keep is not None:

        def keep_inner(xa: Tensor) -> None:
            kept.append(xa)
            keep(x, A, B, xa, mask)

    in_int8 = getattr(state, "in_int8", None) is not None
    if dtype is compute and dtype is factor and A.dtype is dtype and state.kind.fuses_lora and not in_int8:
        try:
            absmax, absmax_map, absmax2, offset = state.scales()
            N, K = state.shape
            blocksize, format = state.blocksize, ops.CODES[state.quant_type]
            made = _C.lora_4bit(
                given, packed, absmax, absmax_map, absmax2, offset, bias, blocksize, format, N, K, A, B, scale,
                keep_inner, dropped,
            )  # fmt: skip
        except (RuntimeError, TypeError, KeyError, AttributeError) as error:
            if kept:
                raise
            failed = ops.torchs(error) if isinstance(error, RuntimeError) else error
            if ops.is_out_of_memory(failed):
                raise failed from None
            made = None  # the product below explains it
        if made is not None:
            return made[0], x, A, B, made[1], mask
    total = dtype if dtype is compute and dtype is factor else torch.float32
    times = state.kind.product
    y = times(given.to(compute), packed, state, bias, None, threshold).to(total) if keep is None else None
    x, A, B = x.to(factor), A.to(factor), B.to(factor)
    xa = kept[0] if kept else linear(rows_of(x), A)
    if keep_inner is not None and not kept:
        keep_inner(xa)
    if y is None:
        y = times(given.to(compute), packed, state, bias, None, threshold).to(total)
    rows_of(y).addmm_(xa.to(total), B.t().to(total), alpha=scale)
    return y.to(dtype), x, A, B, xa, mask


class LoraLinear(torch.autograd.Function):
    """`product` with the gradients dx = dy W + s (dy B) A, dA = s (dy B)^T x, dB = s dy^T (x A^T).

    With dropout, x is dropout(x) in dA and dB, and what is added to dy W goes through it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        A: Tensor,
        B: Tensor,
        packed: Tensor,
        state: Any,
        bias: Tensor | None,
        scale: float,
        compute: torch.dtype,
        factor: torch.dtype,
        dropout: Dropout | None,
        threshold: float = 0.0,
    ) -> Tensor:
        hooks = _top_hooks(True) if _graph_task() != -1 else None
        ctx.rest = (packed, state, scale, compute, factor, x.dtype, A.dtype, B.dtype)
        ctx.dropout = dropout
        if hooks is None:
            ctx.unpack = None
            y, *used = product(x, A, B, packed, state, bias, scale, compute, factor, dropout, threshold)
            ctx.save_for_backward(*_needed(ctx, x, A, B, *used))
            return y
        pack, ctx.unpack = hooks

        def keep(*used: Tensor | None) -> None:
            tensors = _needed(ctx, x, A, B, *used)
            ctx.early = [None if tensor is None else (pack(tensor.detach()),) for tensor in tensors]

        return product(x, A, B, packed, state, bias, scale, compute, factor, dropout, threshold, keep)[0]

    @staticmethod
    def saved(ctx: Any) -> tuple[Tensor | None, ...]:
        """x, A, B, x A^T and the mask; None for what is not needed."""
        if ctx.unpack is None:
            return ctx.saved_tensors
        return tuple(None if packed is None else ctx.unpack(*packed) for packed in ctx.early)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad
        packed, state, scale, compute, factor, dtype, a_dtype, b_dtype = ctx.rest
        if torch.is_grad_enabled():
            return _differentiable(ctx, dy)
        if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(dy.device.type):
            with torch.autocast(dy.device.type, enabled=False):
                return LoraLinear.backward(ctx, dy)
        x, A, B, xa, mask = LoraLinear.saved(ctx)
        dropout = ctx.dropout
        if dropout is not None and needs[1] and not ctx.kept_dropped:
            x = dropout.again(x, mask)
        plain = dtype is compute and dtype is factor
        if plain and a_dtype is dtype and state.kind.fuses_lora and not torch.compiler.is_dynamo_compiling():
            absmax, absmax_map, absmax2, offset = state.scales()
            N, K = state.shape
            blocksize, format = state.blocksize, ops.CODES[state.quant_type]
            read_x, read_xa = x if needs[1] else None, xa if needs[2] else None
            made = _C.lora_4bit_backward(
                dy, packed, absmax, absmax_map, absmax2, offset, blocksize, format, N, K,
                read_x, A, B, read_xa, scale, needs[0], dropout is not None,
            )  # fmt: skip
            if made is not None:
                if dropout is not None and needs[0]:
                    dropout.add_gradient(rows_of(made[0]), made[3], rows_of(mask))
                return *made[:3], *(None,) * 8
        dx = dxa = dA = dB = None
        rows = rows_of(dy)
        if not plain:
            rows = rows.to(factor)
        if needs[0] or needs[1]:
            dxa = scaled(rows, B, scale)
        if needs[2]:
            dB = scaled(rows.t(), xa, scale)
            if b_dtype is not factor:
                dB = dB.to(b_dtype)
        if needs[1]:
            if x.dtype is not factor:
                x = x.to(factor)
            dA = torch.mm(dxa.t(), rows_of(x))
            if a_dtype is not factor:
                dA = dA.to(a_dtype)
        if needs[0]:
            total = dtype if plain else torch.float32
            dx = state.kind.gradient(dy.to(compute), packed, state, None).to(total)
            if dropout is None:
                rows_of(dx).addmm_(dxa.to(total), A.to(total))
            else:
                dropout.add_gradient(rows_of(dx), torch.mm(dxa.to(total), A.to(total)), rows_of(mask))
            dx = dx.to(dtype)
        return dx, dA, dB, *(None,) * 8


def _needed(
    ctx: Any,
    x: Tensor,
    A: Tensor,
    B: Tensor,
    used_x: Tensor,
    used_a: Tensor,
    used_b: Tensor,
    xa: Tensor,
    mask: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """What a backward reads of a call's inputs and of what it has made of them.

    Where x wants no gradient, the mask is of use for dA alone, and x dropped takes no more than both.
    """
    needs_x, needs_a, needs_b = ctx.needs_input_grad[:3]
    if used_x is not x and x.element_size() <= used_x.element_size() and (mask is None or needs_x):
        used_x = x
    ctx.kept_dropped = mask is not None and used_x is not x
    ctx.cast = (used_x is not x and (mask is None or needs_x)) or used_a is not A or used_b is not B
    if not needs_x and (ctx.kept_dropped or not needs_a):
        mask = None
    return used_x if needs_a else None, used_a, used_b, xa if needs_b else None, mask


def _differentiable(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients as functions of dy, x, A and B that can be derived again (create_graph=True)."""
    x, A, B, xa, mask = LoraLinear.saved(ctx)
    needs, dropout = ctx.needs_input_grad, ctx.dropout
    packed, state, scale, compute, factor = ctx.rest[:5]
    if ctx.cast or (x is None and needs[0] and needs[2]):
        raise RuntimeError(
            "LoraLinear: a fused layer has no second derivatives where dtypes differ or A is frozen; call "
            "bitshard.lora.unfuse(model) before the forward"
        )
    dx = dA = dB = None
    rows = rows_of(dy).to(factor)
    dxa = scale * (rows @ B)
    if x is not None:
        if dropout is not None and not ctx.kept_dropped:
            x = dropout.again(x, mask)
        x = rows_of(x).to(factor)
    if needs[2]:
        dB = scale * rows.t() @ (xa if x is None else x @ A.t())
    if needs[1]:
        dA = dxa.t() @ x
    if needs[0]:
        base = InputGradient.apply(dy.to(compute), packed, state)
        added = dxa @ A if dropout is None else dropout.again(dxa @ A, rows_of(mask))
        dx = (base + added.view(base.shape)).to(dy.dtype)
    return dx, dA, dB, *(None,) * 8
