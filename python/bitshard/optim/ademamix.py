"""AdEMAMix in plain torch, in the dtype of its parameters: what the quantized form is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from bitshard.optim.base import loss_of, schedule


class ReferenceAdEMAMix(torch.optim.Optimizer):
    """State of a parameter: "m1_m2" [2, *shape], the fast and the slow mean, and "nu", that of the squares.

    The number of the step is in the group. Source: "The AdEMAMix Optimizer" (arXiv 2409.03137), algorithm 1.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        t_beta3: int | None = None,
        t_alpha: int | None = None,
    ):
        group = {"lr": lr, "betas": betas, "alpha": alpha, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, group | {"t_beta3": t_beta3, "t_alpha": t_alpha})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; the result of `closure`."""
        loss = loss_of(closure)
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    self._update(group, p)
        return loss

    def _update(self, group: dict[str, Any], p: torch.Tensor) -> None:
        (beta1, beta2, beta3), alpha = schedule(group, group["step"])
        state, g = self.state[p], p.grad
        if not state:
            state["m1_m2"], state["nu"] = p.new_zeros((2, *p.shape)), torch.zeros_like(p)
        (fast, slow), nu = state["m1_m2"], state["nu"]
        fast.lerp_(g, 1 - beta1)
        slow.lerp_(g, 1 - beta3)
        nu.lerp_(g.square(), 1 - beta2)
        root = (nu / (1 - beta2 ** group["step"])).sqrt() + group["eps"]
        update = (fast / (1 - beta1 ** group["step"]) + alpha * slow) / root
        p.add_(update + group["weight_decay"] * p, alpha=-group["lr"])
