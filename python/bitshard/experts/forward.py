"""The forward of experts modules with 4-bit stacks, registered as an experts implementation of transformers.

Rows are the chosen (token, expert) pairs, sorted by expert; both products are grouped, and nothing waits for the host.
An adapter of peft on a stack (`target_parameters`) is multiplied apart: y = x W_e^T + scale (x A_e^T) B_e^T.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bitshard import inventory
from bitshard.autograd import grouped_matmul_4bit
from bitshard.experts.adapted import AdaptedStack
from bitshard.experts.modules import PackedExperts, stack_names

IMPLEMENTATION = "bitshard"  # config._experts_implementation


def experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts' part of a layer.

    Args:
        hidden_states: [T, H].
        top_k_index: integers [T, k], the experts of each token; from num_experts on they are those of other ranks
            (expert parallelism).
        top_k_weights: [T, k], what the results of its experts count in the sum of a token.

    Returns:
        [T, H] of the dtype of hidden_states.
    """
    if not isinstance(self, PackedExperts):  # left dense by a skip list
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](self, hidden_states, top_k_index, top_k_weights)
    tokens, k = top_k_index.shape
    expert, order = torch.sort(top_k_index.reshape(-1), stable=True)
    offs = _offsets(expert, self.num_experts)
    up, down = stack_names(self)
    x = hidden_states[order // k]
    h = _product(self, up, x, offs)
    h = self._apply_gate(h) if self.has_gate else self.act_fn(h)
    y = _product(self, down, h, offs)
    if getattr(self, "has_post_expert_norm", False):  # transformers 5.18 and later
        y = self.post_expert_norm(y)
    counts = top_k_weights.reshape(-1)[order]
    if getattr(self, "_is_expert_parallel", False):  # a norm behind the experts makes something of zeros
        elsewhere = expert >= self.num_experts
        y, counts = y.masked_fill(elsewhere.unsqueeze(-1), 0), counts.masked_fill(elsewhere, 0)
    y = y * counts.unsqueeze(-1)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    return y[back].view(tokens, k, -1).sum(1).to(hidden_states.dtype)


def _offsets(expert: Tensor, experts: int) -> Tensor:
    """int32 [E]: where the rows of each expert end, of sorted expert numbers."""
    numbers = torch.arange(experts, device=expert.device, dtype=expert.dtype)
    return torch.searchsorted(expert, numbers, right=True, out_int32=True)


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
    y = grouped_matmul_4bit(x, offs, weight, state, None if bias is None else bias.to(x.dtype))
    for add in () if adapted is None else adapted.added:
        y = y + add.product(x, offs, held.transposed)
    return y.to(dtype)


def register() -> None:
    """Tell transformers of this implementation; later calls change nothing."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
