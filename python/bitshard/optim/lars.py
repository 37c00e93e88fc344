"""LARS in plain torch, without quantized state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from bitshard.optim.base import loss_of


class PytorchLARS(torch.optim.Optimizer):
    """SGD with momentum; the norm of an update is at most max_unorm times that of its parameter, which is float32."""

    def __init__(
        self,
        params: Iterable,
        lr: float = 0.01,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        max_unorm: float = 0.02,
    ):
        for name, value in (("learning rate", lr), ("momentum value", momentum), ("weight_decay value", weight_decay)):
            if value < 0.0:
                raise ValueError(f"Invalid {name}: {value}")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        group = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, group | {"nesterov": nesterov, "max_unorm": max_unorm})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("nesterov", False)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; the result of `closure`. TypeError, before any change, where a bounded parameter is not float32."""
        loss = loss_of(closure)
        work = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for group, p in work:
            if group["max_unorm"] > 0.0 and p.dtype not in (torch.float32, torch.float64):
                raise TypeError(f"max_unorm needs float32 or float64 parameters, got {p.dtype}")
        for group, p in work:
            update = self._update(group, p)
            if (bound := group["max_unorm"]) > 0.0:
                limit, norm = bound * torch.linalg.vector_norm(p), torch.linalg.vector_norm(update)
                update = torch.where(norm > limit, update * (limit / norm), update)
            p.add_(update, alpha=-group["lr"])
        return loss

    def _update(self, group: dict[str, Any], p: Tensor) -> Tensor:
        """The step's direction, with the momentum buffer brought forward."""
        gradient = p.grad.add(p, alpha=group["weight_decay"]) if group["weight_decay"] != 0 else p.grad
        if group["momentum"] == 0:
            return gradient
        state = self.state[p]
        if "momentum_buffer" in state:
            state["momentum_buffer"].mul_(group["momentum"]).add_(gradient, alpha=1 - group["dampening"])
        else:
            state["momentum_buffer"] = gradient.detach().clone()
        buffer = state["momentum_buffer"]
        return gradient.add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer
