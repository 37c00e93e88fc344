"""The forward of experts modules with 4-bit stacks, registered as an experts implementation of transformers.

Rows are the chosen (token, expert) pairs, sorted by expert; both products are grouped, and nothing waits for the host.
An adapter of peft on a stack (`target_parameters`) is multiplied apart (`bitshard.experts.lora`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bitshard import ops
from bitshard.experts import lora
from bitshard.experts.adapted import AdaptedStack, Merged, added_in_call
from bitshard.experts.modules import PackedExperts, stack_names
from bitshard.products.autograd import grouped_matmul_4bit
from bitshard.weights import inventory

_dispatch_modes = torch._C._len_torch_dispatch_stack
IMPLEMENTATION = "bitshard"  # config._experts_implementation


def experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts' part of a layer.

    Args:
        hidden_states: [T, H].
        top_k_index: integers [T, k], the experts of each token. Where `_is_expert_parallel` of the module is True,
            those from num_experts on are of other ranks and add nothing. Other numbers that are no expert's are wrong:
            ValueError. On a GPU, which would have to be waited for, and in compiled code the token's row is NaN.
        top_k_weights: [T, k], what the results of its experts count in the sum of a token.

    Returns:
        [T, H] of the dtype of hidden_states.
    """
    if not isinstance(self, PackedExperts):  # left dense by a skip list
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](self, hidden_states, top_k_index, top_k_weights)
    parallel = getattr(self, "_is_expert_parallel", False)
    if not torch.compiler.is_compiling() and top_k_index.is_cpu and not _dispatch_modes():
        require_experts(top_k_index, self.num_experts, parallel)
    order, back, rows, offs = ops.sort_by_expert(top_k_index.long(), self.num_experts, parallel)
    up, down = stack_names(self)
    x = RowsOfExperts.apply(hidden_states, rows, back, top_k_index.shape[1])
    if parallel:  # products of torch leave rows behind the last offset undefined, and so their gradients
        elsewhere = top_k_index >= self.num_experts
        behind = elsewhere.reshape(-1)[order].unsqueeze(-1)
        x = x.masked_fill(behind, 0)
    h = _product(self, up, x, offs)
    h = self._apply_gate(h) if self.has_gate else self.act_fn(h)
    y = _product(self, down, h, offs)
    if getattr(self, "has_post_expert_norm", False):  # transformers 5.18 and later
        y = self.post_expert_norm(y)
    if parallel:
        y, top_k_weights = y.masked_fill(behind, 0), top_k_weights.masked_fill(elsewhere, 0)
    return SumByToken.apply(y, top_k_weights, order, back, rows).to(hidden_states.dtype)


def require_experts(top_k_index: Tensor, experts: int, elsewhere: bool) -> None:
    """ValueError for a number that is no expert's. Waits for a GPU.

    Args:
        elsewhere: whether those from `experts` on are of experts elsewhere.
    """
    if not top_k_index.numel():
        return
    lowest, highest = map(int, top_k_index.aminmax())
    if lowest >= 0 and (elsewhere or highest < experts):
        return
    wrong = top_k_index < 0 if elsewhere else (top_k_index < 0) | (top_k_index >= experts)
    raise ValueError(
        f"experts: {int(wrong.sum())} of {top_k_index.numel()} numbers in top_k_index, which are from {lowest} to "
        f"{highest}, are none of the {experts} experts'. Those from {experts} on are taken for experts of other ranks "
        "only where the module's _is_expert_parallel is True"
    )


class RowsOfExperts(torch.autograd.Function):
    """x [T, H] -> [S, H]: for each pair, in the order of their experts, the row of its token; S = T k.

    torch's gradient of an index sorts the pairs again; here a token's sum is over its k pairs, in one order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, back: Tensor, k: int) -> Tensor:
        """rows: [S], the token of each pair; back: the place of each pair, as of `ops.sort_by_expert`."""
        ctx.save_for_backward(back)
        ctx.k = k
        return x[rows]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        rows = _reordered(dy, *ctx.saved_tensors)
        return rows.view(-1, ctx.k, rows.shape[1]).sum(1), None, None, None


class InOrderOfTokens(torch.autograd.Function):
    """y [S, H] sorted by expert -> [S, H] in the order of the pairs; order: the pair of a place, back: its inverse."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return y[back]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _reordered(dy, *ctx.saved_tensors), None, None


class SumByToken(torch.autograd.Function):
    """y [S, H] sorted by expert, counts [T, k] -> [T, H]: of each token the sum of its pairs' rows times their counts.

    One launch, and no product that is kept; order, back, rows: of `ops.sort_by_expert`. NaN for a token with a `back`
    below 0. torch's index counts such a place from the end, which gives the row of the pair.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, counts: Tensor, order: Tensor, back: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(y, counts, order, back, rows)
        return ops.sum_by_token(y, back, counts)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        y, counts, order, back, rows = ctx.saved_tensors
        dy = dcounts = None
        if ctx.needs_input_grad[0]:
            dy = (dout[rows] * counts.reshape(-1)[order].unsqueeze(-1)).to(y.dtype)
        if ctx.needs_input_grad[1]:
            dout = dout.to(torch.promote_types(y.dtype, counts.dtype)).unsqueeze(1)
            dcounts = (dout * y[back].view(*counts.shape, -1)).sum(-1).to(counts.dtype)
        return dy, dcounts, None, None, None


def _reordered(dy: Tensor, places: Tensor) -> Tensor:
    """dy[places], of which all are different; those below 0 count from the end."""
    if torch.is_grad_enabled() and dy.requires_grad:  # create_graph=True
        order = torch.where(places < 0, places + len(places), places).argsort()
        return InOrderOfTokens.apply(dy, order, places)
    return dy[places]


def _product(module: Any, name: str, x: Tensor, offs: Tensor) -> Tensor:
    """x W_e^T + bias of the module's stack `name`, with its adapters; [S, N] of the dtype of x."""
    held = module.packed_stacks[name]
    weight = getattr(module, name)
    adapted = weight if isinstance(weight, AdaptedStack) else None
    weight, state = held.ready(weight if adapted is None else adapted.base)
    if not held.reported and not torch.compiler.is_compiling():
        inventory.log_line(module)
    if held.unwatched and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        held.watch()
    dtype, bias = x.dtype, getattr(module, f"{name}_bias") if module.has_bias else None
    if not dtype.is_floating_point:
        raise TypeError(f"experts: x is {dtype}, expected a floating-point dtype")
    x = x.to(held.compute_dtype or dtype)
    bias = None if bias is None else bias.to(x.dtype)
    added = added_in_call(held) if adapted is None else (*added_in_call(held), *adapted.added)
    if len(added) == 1 and isinstance(added[0], Merged):
        adapters = [(*one.factors(held.transposed), one.scale) for one in added[0].adapters]
        return lora.merged_product(x, offs, weight, state, bias, adapters).to(dtype)
    if len(added) == 1 and lora.fits(added[0], x, bias):
        return lora.product(x, offs, weight, state, bias, *added[0].factors(held.transposed), added[0].scale).to(dtype)
    y = grouped_matmul_4bit(x, offs, weight, state, bias)
    for add in added:
        y = y + add.product(x, offs, held.transposed)
    return y.to(dtype)


def register() -> None:
    """Tell transformers of this implementation; later calls change nothing."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
