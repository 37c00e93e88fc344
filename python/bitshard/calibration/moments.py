"""Second moments of the inputs of linear layers and of experts, gathered while a decoder layer runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bitshard.experts import modules
from bitshard.experts.forward import require_experts

IMPLEMENTATION = "bitshard_moments"  # of transformers' experts, while a layer is looked at


class Sum:
    """Sum of x x^T over rows x [K] of one input, float32 [K, K], and how many there were."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.rows = 0

    def add(self, x: Tensor) -> None:
        """Rows [..., K]."""
        x = x.reshape(-1, x.shape[-1]).float()
        if self.total is None:
            self.total = torch.zeros(x.shape[-1], x.shape[-1], dtype=torch.float32, device=x.device)
        self.total.addmm_(x.t(), x)
        self.rows += len(x)

    def mean(self) -> Tensor | None:
        """The mean of x x^T; None without rows."""
        return self.total / self.rows if self.rows else None


class Moments:
    """Those of the inputs of some modules of a decoder layer.

    Linear layers that are given the same tensor share one sum. Of a stack of experts there is one sum for each expert,
    of the rows that the router sends there, and one of all rows.

    Args:
        layer: the decoder layer, dense.
        names: of its linear layers and, ending in the name of a stack, of stacks of experts.
    """

    def __init__(self, layer: nn.Module, names: list[str]):
        self.layer, self.names = layer, names
        self._sums: dict[str, Sum] = {}  # of a linear layer: of the first one that is given the same input
        self._leader: dict[str, str] = {}
        self._experts: dict[str, list[Sum]] = {}
        self._given: list[tuple[Tensor, str]] = []  # inputs of the forward that is running, which keeps them alive

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While it lasts, forwards of the layer are counted."""
        handles = [self.layer.register_forward_pre_hook(lambda *_: self._given.clear())]
        stacks: dict[str, list[str]] = {}
        for name in self.names:
            module = self.layer.get_submodule(name) if _is_module(self.layer, name) else None
            if module is None:
                stacks.setdefault(name.rpartition(".")[0], []).append(name.rpartition(".")[2])
            else:
                handles.append(module.register_forward_pre_hook(self._watch(name)))
        observed = [self._observe(path) for path in stacks]
        try:
            yield
        finally:
            self._given.clear()
            for handle in handles:
                handle.remove()
            for restore in observed:
                restore()

    def of(self, name: str) -> Tensor | None:
        """float32 [K, K]: the mean of x x^T over the inputs of a linear layer; None: there were none."""
        return self._sums[self.leader(name)].mean()

    def leader(self, name: str) -> str:
        """The name under which this one's inputs are counted."""
        return self._leader.get(name, name)

    def of_expert(self, name: str, expert: int) -> tuple[Tensor | None, int]:
        """float32 [K, K] of an expert's inputs, and how many there were; None: no expert of the stack had any.

        With n rows of K numbers it is n / (n + K) of the expert's own mean and the rest of that of all rows: an expert
        that few tokens reach is calibrated mostly, and one that none reaches only, for what the layer gets.
        """
        own, (*_, every) = self._experts[name][expert], self._experts[name]
        if not own.rows:
            return every.mean(), 0
        share = own.rows / (own.rows + len(own.total))
        return own.mean() * share + every.mean() * (1 - share), own.rows

    def rows(self, name: str) -> int:
        """How many inputs a linear layer had."""
        return self._sums[self.leader(name)].rows

    def _watch(self, name: str) -> Callable[..., None]:
        self._sums[name] = Sum()

        def hook(_: nn.Module, given: tuple) -> None:
            x = given[0]
            leader = next((other for tensor, other in self._given if tensor is x), None)
            if leader is None:
                self._given.append((x, name))
                self._sums[name].add(x)
            else:
                self._leader.setdefault(name, leader)

        return hook

    def _observe(self, path: str) -> Callable[[], None]:
        """Let an experts module run one expert at a time and tell of the rows; what puts it back."""
        module = self.layer.get_submodule(path)
        for name in modules.stack_names(module):
            self._experts[f"{path}.{name}"] = [Sum() for _ in range(module.num_experts + 1)]
        _register()
        config, before = module.config, module.config._experts_implementation
        vars(module)["bitshard_moments"] = lambda name, expert, x: self._count(f"{path}.{name}", expert, x)
        config._experts_implementation = IMPLEMENTATION

        def restore() -> None:
            config._experts_implementation = before
            vars(module).pop("bitshard_moments", None)

        return restore

    def _count(self, name: str, expert: int, x: Tensor) -> None:
        self._experts[name][expert].add(x)
        self._experts[name][-1].add(x)


def _is_module(layer: nn.Module, name: str) -> bool:
    parent, _, leaf = name.rpartition(".")
    return leaf in layer.get_submodule(parent)._modules


def _register() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if IMPLEMENTATION not in ALL_EXPERTS_FUNCTIONS.valid_keys():
        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _forward)


def _forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts' part of a layer, expert by expert; arguments as of `experts.forward.experts_forward`."""
    require_experts(top_k_index, self.num_experts, getattr(self, "_is_expert_parallel", False))
    out = torch.zeros_like(hidden_states)
    up, down = modules.stack_names(self)
    tell = self.bitshard_moments
    for expert in range(self.num_experts):
        token, place = torch.where(top_k_index == expert)
        if not len(token):
            continue
        x = hidden_states[token]
        tell(up, expert, x)
        h = _product(self, up, expert, x)
        h = self._apply_gate(h) if self.has_gate else self.act_fn(h)
        tell(down, expert, h)
        y = _product(self, down, expert, h)
        if getattr(self, "has_post_expert_norm", False):
            y = self.post_expert_norm(y)
        out.index_add_(0, token, (y * top_k_weights[token, place, None]).to(out.dtype))
    return out


def _product(module: Any, name: str, expert: int, x: Tensor) -> Tensor:
    w = getattr(module, name)[expert]
    y = x @ (w if module.is_transposed else w.t())
    return y + getattr(module, f"{name}_bias")[expert] if module.has_bias else y
