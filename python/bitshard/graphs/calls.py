"""A call of a module taken apart: tensors, which a graph reads from memory, and all else, which it has inside."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

# Numbers that differ from call to call, which a module takes as tensors, too: the divisor of transformers' losses.
NUMBERS = ("num_items_in_batch",)
CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_NOTHING = torch.empty(0, dtype=torch.uint8)
PLAIN = (Tensor, torch.nn.Parameter)


class Refused(Exception):
    """Why this runs without a graph, in words that go on "... runs without a graph: "."""


class Call(NamedTuple):
    """Arguments of a call: `tensors` among all leaves, and what two calls of one graph have in common, `key`."""

    key: Hashable
    tensors: list[Tensor]
    leaves: list[Any]
    spec: Any

    @classmethod
    def of(cls, args: tuple, kwargs: dict[str, Any], device: torch.device) -> Call:
        """Take a call apart; Refused where a graph can't hold one of its arguments."""
        kwargs = {**kwargs, **{name: as_tensor(kwargs[name], device) for name in NUMBERS if name in kwargs}}
        leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=lambda value: isinstance(value, torch.Size))
        described, tensors = [], []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                described.append(_tensor(leaf, device))
                tensors.append(leaf)
            elif isinstance(leaf, CONSTANTS):
                described.append((type(leaf), leaf))
            else:
                raise Refused(f"an argument is a {type(leaf).__name__}")
        return cls((spec, tuple(described)), tensors, leaves, spec)

    def kind(self) -> Hashable:
        """The key without the sizes of tensors."""
        spec, described = self.key
        return spec, tuple((len(leaf[0]), *leaf[1:]) if isinstance(leaf[0], torch.Size) else leaf for leaf in described)

    def elements(self) -> int:
        """Elements of the largest tensor: a mask or a number beside the tokens makes no larger step."""
        return max((tensor.numel() for tensor in self.tensors), default=0)

    def shapes(self) -> list[torch.Size]:
        """The shape of each tensor."""
        return [tensor.shape for tensor in self.tensors]

    def arguments(self, tensors: list[Tensor]) -> tuple[tuple, dict[str, Any]]:
        """The arguments with others in the place of the tensors."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)

    def without_tensors(self) -> Call:
        """The same, keeping no tensor of the caller's."""
        kept = [_NOTHING if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return Call(self.key, [], kept, self.spec)


def as_tensor(value: Any, device: torch.device) -> Any:
    """A number as a tensor of no dimensions, so that a graph reads it in each launch; all else unchanged."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    dtype = torch.int64 if isinstance(value, int) else torch.float64  # of no dimensions: decides no result's dtype
    return torch.tensor(value, dtype=dtype, device=device)


def _tensor(tensor: Tensor, device: torch.device) -> Hashable:
    if type(tensor) not in PLAIN:
        raise Refused(f"an argument is a {type(tensor).__name__}")
    if tensor.device != device:
        raise Refused(f"an argument is on {tensor.device}, the model on {device}")
    if tensor.requires_grad:
        raise Refused("an argument requires a gradient")
    if tensor.layout is not torch.strided:
        raise Refused(f"an argument has the layout {tensor.layout}")
    return tensor.shape, tensor.dtype, tensor.is_inference()


class Answer:
    """What a module returned, taken apart: results that are differentiable, other tensors, and all else."""

    def __init__(self, output: Any):
        leaves, self._spec = pytree.tree_flatten(output)
        unknown = next((leaf for leaf in leaves if not isinstance(leaf, (Tensor, *CONSTANTS))), None)
        if unknown is not None:
            words = "; pass use_cache=False" if "Cache" in type(unknown).__name__ else ""
            raise Refused(f"its output has a {type(unknown).__name__}{words}")
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = [leaves[i] for i in self._slots]
        self.graded = [number for number, tensor in enumerate(tensors) if tensor.requires_grad]
        self.shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        odd = next((tensor for tensor in tensors if type(tensor) not in PLAIN), None)
        if odd is not None:
            raise Refused(f"its output has a {type(odd).__name__}")
        self.tensors: list[Tensor] | None = tensors

    def form(self) -> Answer:
        """The same without tensors."""
        found = copy.copy(self)
        found.tensors = None
        return found

    def output(self, tensors: list[Tensor]) -> Any:
        """The module's output with these tensors."""
        leaves = list(self._leaves)
        for slot, tensor in zip(self._slots, tensors, strict=True):
            leaves[slot] = tensor
        return pytree.tree_unflatten(leaves, self._spec)


def settings() -> Hashable:
    """What of torch's settings decides which kernels run; they are part of a graph."""
    cuda = torch.backends.cuda
    return (
        torch.is_autocast_enabled("cuda"),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cuda"),
        torch.get_autocast_dtype("cpu"),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.get_default_dtype(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        cuda.matmul.allow_bf16_reduced_precision_reduction,
    )
