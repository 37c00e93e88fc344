"""A training step's forward and backward as one CUDA graph, for batches of one shape on one GPU.

    step = bitshard.graphs.CapturedStep(model, lambda batch: model(**batch).loss, batch)
    for batch in batches:
        loss = step(batch)                      # gradients are in p.grad, as after loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

For a few hundred tokens the host needs several times as long to launch the work as the GPU needs to do it. A graph is
one launch. Optimizer, clipping and schedule stay outside, so that all of them may change from step to step.

A graph repeats what was captured, on the same memory. So each call compares the model with the time of capture: every
parameter and buffer and its address, the mode, the hooks and the settings of every module. What it cannot compare must
not change: what else a module keeps in Python, and anything else that the function does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bitshard.graphs import record
from bitshard.graphs.record import Body
from bitshard.graphs.watched import seen
from bitshard.shards import gather

DEVICE = "cuda"  # for tests
WARM_UP = 2  # calls before the capture: libraries load kernels and take workspaces in their first ones
_NAME = "bitshard.graphs.CapturedStep: "

Batch = Mapping[str, Tensor]


class Graph(record.Graph):
    """Everything that `body` launches, as one launch, behind calls of it that warm up; in a pool of its own."""

    def __init__(self, body: Body):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                body()
        torch.cuda.current_stream().wait_stream(stream)
        super().__init__(body, None, stream)


class CapturedStep:
    """`function(batch).backward()` as one CUDA graph.

    Args:
        model: the module whose parameters `function` trains and reads, in training mode, all on one GPU, not sharded,
            without dropout; with gradient checkpointing, which must not preserve the state of random numbers
            (`gradient_checkpointing_kwargs={"use_reentrant": False, "preserve_rng_state": False}`).
        function: batch -> loss, a tensor of one element that depends on nothing but the batch and the model, without a
            wait for the GPU (`.item()`, `.cpu()`) or a choice by values on it.
        batch: {name: tensor on the GPU}, with the names, shapes and dtypes of all later batches.

    TypeError for a batch with other values, ValueError for a model or batch that cannot be captured; RuntimeError if
    the capture fails, with the error of the function or of CUDA as its cause. Gradients that existed before are kept.
    """

    def __init__(self, model: nn.Module, function: Callable[[dict[str, Tensor]], Tensor], batch: Batch):
        self._modules, self._function = list(model.modules()), function
        self._trained = [p for p in model.parameters() if p.requires_grad]
        _check(model, self._trained, batch)
        before = [p.grad for p in self._trained]
        self._batch = {name: tensor.detach().clone() for name, tensor in batch.items()}
        try:
            self._graph = Graph(self._body)
        except RuntimeError as error:
            raise RuntimeError(
                f"{_NAME}the step cannot be captured ({error}). With gradient checkpointing it needs "
                'gradient_checkpointing_kwargs={"use_reentrant": False, "preserve_rng_state": False}; a function that '
                "waits for the GPU or chooses by its values can't be captured"
            ) from error
        finally:
            for p, grad in zip(self._trained, before, strict=True):
                p.grad = grad
        self._loss, *grads = self._graph.results
        self._grads = dict(zip(self._used, grads, strict=True))
        self._seen = seen(self._modules)

    def __call__(self, batch: Batch) -> Tensor:
        """The loss of `batch`, detached; adds its gradients to `p.grad` of the model's parameters.

        A gradient that was None is put into memory that the next call overwrites: copy what you need longer.

        ValueError if the batch has other names, shapes or dtypes. RuntimeError if the model has changed: make another
        CapturedStep then.
        """
        self._check_batch(batch)
        if seen(self._modules) != self._seen:
            raise RuntimeError(
                f"{_NAME}parameters, buffers, a module's training mode or an adapter's settings are not those of "
                "the capture; make another CapturedStep"
            )
        kept = self._gradients_before()
        for name, tensor in batch.items():
            self._batch[name].copy_(tensor, non_blocking=True)
        self._graph.replay()
        for p, grad in self._grads.items():
            p.grad = grad if p not in kept else kept[p].add_(grad)
        return self._loss.clone()

    def _body(self) -> list[Tensor]:
        """The captured work: [loss, gradients of `_used`], which are new tensors."""
        for p in self._trained:
            p.grad = None
        loss = self._function(dict(self._batch))
        loss.backward()
        self._used = [p for p in self._trained if p.grad is not None]
        return [loss.detach(), *(p.grad for p in self._used)]

    def _gradients_before(self) -> dict[nn.Parameter, Tensor]:
        """Gradients to add to; those of the last call, which the graph overwrites, as copies."""
        return {
            p: p.grad.clone() if p.grad is grad or p.grad.data_ptr() == grad.data_ptr() else p.grad
            for p, grad in self._grads.items()
            if p.grad is not None
        }

    def _check_batch(self, batch: Batch) -> None:
        expected, found = _described(self._batch), _described(batch)
        if found != expected:
            raise ValueError(f"{_NAME}captured with {expected}, called with {found}")


def _check(model: nn.Module, trained: list[nn.Parameter], batch: Batch) -> None:
    """ValueError if a model or a batch cannot be captured."""
    _described(batch)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    places = {tensor.device for tensor in tensors.values()} | {tensor.device for tensor in batch.values()}
    if len(places) != 1 or next(iter(places)).type != DEVICE:
        raise ValueError(f"{_NAME}model and batch must be on one GPU, found {sorted(map(str, places))}")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        ranks = torch.distributed.get_world_size()
        if ranks > 1:
            raise ValueError(f"{_NAME}this is one of {ranks} processes, whose collectives a graph would not repeat")
    sharded = [name for name, tensor in tensors.items() if gather.is_dtensor(tensor)]
    if sharded:
        raise ValueError(f"{_NAME}{sharded[0]} is sharded; a graph has the memory of one process only")
    if not trained:
        raise ValueError(f"{_NAME}no parameter of this {type(model).__name__} requires a gradient")
    drops = [
        name
        for name, module in model.named_modules()
        if "Dropout" in type(module).__name__ and getattr(module, "p", 0) > 0
    ]
    config = getattr(model, "config", None)
    drops += [f"config.{name}" for name, value in getattr(config, "__dict__", {}).items() if _drops(name, value)]
    if drops and model.training:
        raise ValueError(f"{_NAME}{drops[0]} drops at random, which a second forward would not repeat; set it to 0")


def _described(batch: Batch) -> dict[str, tuple]:
    """{name: (shape, dtype)}; TypeError if a value is not a tensor: a graph would not notice its changes."""
    others = [f"{name} is a {type(value).__name__}" for name, value in batch.items() if not isinstance(value, Tensor)]
    if others:
        raise TypeError(f"{_NAME}a batch holds tensors only, but {', '.join(others)}")
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in batch.items()}


def _drops(name: str, value: Any) -> bool:
    return ("dropout" in name or name.endswith("_pdrop")) and isinstance(value, float) and value > 0
