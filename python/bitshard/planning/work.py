"""What one GPU computes in a step, operation by operation: the model's own code, run on the meta device and listed.

An operation reads and writes bytes and multiplies; how long that takes, `bitshard.planning.time` says. Products with
packed weights and attention are those that the stand-ins of `bitshard.planning.played` note. Adapters are listed apart,
as `bitshard.lora` fuses them or as peft computes them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from bitshard.experts import modules as experts
from bitshard.planning.job import Job
from bitshard.planning.meter import ONE, Noted, listening
from bitshard.planning.model import Model
from bitshard.planning.played import Play, stubs

_SCALAR = torch.ops.aten._local_scalar_dense.default
_MAKES = {"new_empty", "empty", "empty_like", "empty_strided", "detach", "new_empty_strided"}


class Op(NamedTuple):
    """A kernel.

    Attributes:
        kind: "pass" (elementwise operations and sums), "dense" (a product in 16 bits), "product", "stack" or
            "attention" (see `meter.Noted`).
        moved: bytes read and written; 0 of products of stand-ins, whose sizes say it.
        flops: 2 for each multiplication and addition.
        sizes, gradient: as `meter.Noted` has them.
    """

    kind: str
    moved: float
    flops: float = 0.0
    sizes: tuple[int, ...] = ()
    gradient: bool = False


class Listing(TorchDispatchMode):
    """While entered, lists each kernel that operators would launch, in `ops`."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []

    def hear(self, what: Noted) -> None:
        """Of a stand-in."""
        flops = 0.0
        if what.kind == "attention":
            batch, heads, tokens, keys, values = what.sizes
            flops = 1.0 * batch * heads * tokens**2 * (keys + values)  # half of the pairs: a causal mask
            flops *= 2.5 if what.gradient else 1.0
        self.ops.append(Op(what.kind, 0.0, flops, what.sizes, what.gradient))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is _SCALAR and args[0].is_meta:  # masks are full
            return ONE[args[0].dtype.is_floating_point, args[0].dtype is torch.bool]
        out = func(*args, **kwargs)
        if func.overloadpacket.__name__ in _MAKES:
            return out
        read = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        written = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        if _views(read, written) and not func._schema.is_mutable:
            return out
        count = flop_registry.get(func.overloadpacket)
        flops = float(count(*args, **kwargs, out_val=out)) if count else 0.0
        moved = sum(map(_nbytes, written)) + sum(_gathered(func, read, written))
        self.ops.append(Op("dense" if flops else "pass", moved, flops))
        return out


def _views(read: list[Tensor], written: list[Tensor]) -> bool:
    inputs = {id(each.untyped_storage()) for each in read}
    return all(id(each.untyped_storage()) in inputs for each in written)


def _nbytes(tensor: Tensor) -> float:
    """Of a tensor that repeats its elements, those that are there."""
    return float(min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()))


def _gathered(func: Any, read: list[Tensor], written: list[Tensor]) -> list[float]:
    """Bytes of each input: of an embedding the rows that are taken."""
    if func.overloadpacket.__name__ in ("embedding", "index", "gather", "index_select"):
        return [sum(map(_nbytes, written))]
    return [_nbytes(each) for each in read]


class Work(NamedTuple):
    """Of a part of the model: kernels of forward and of backward."""

    forward: list[Op]
    backward: list[Op]


class Worked:
    """What parts of a model compute; kept for jobs that differ in other things only.

    Args:
        model, play: of the same model.
    """

    def __init__(self, model: Model, play: Play):
        self.model, self.play = model, play
        self._known: dict[tuple, Work] = {}

    def layer(self, number: int, kind: tuple, job: Job, fused: bool) -> Work:
        """Decoder layer `number`, of a kind that `model.Unit` tells; adapters as bitshard fuses them or as peft has
        them. RuntimeError where the model's code does not run on the meta device."""
        key = (kind, job.seq, job.batch, job.rank, job.lora_bytes, job.targets, job.lora_experts, job.bits)
        key += (job.experts_4bit, job.skip, fused)
        if key not in self._known:
            self._known[key] = self._list_layer(number, job, fused)
        return self._known[key]

    def ends(self, job: Job) -> Work:
        """Embeddings, head and loss of all tokens."""
        key = ("ends", job.seq * job.batch)
        if key not in self._known:
            with stubs(self.model):
                self.play.loss(1)  # the first call asks each kind of layer what it returns
                with Listing() as forward:
                    loss = self.play.loss(job.seq * job.batch)
                with Listing() as backward:
                    loss.backward()
            self._known[key] = Work(forward.ops, backward.ops)
        return self._known[key]

    def _list_layer(self, number: int, job: Job, fused: bool) -> Work:
        bare = job._replace(targets=(), lora_experts=False)
        call = self.play.call(number, job)
        if call is None:
            return Work([], [])
        args, kwargs = call
        layer = self.play.stand_in(number, bare)
        hidden = args[0].detach().requires_grad_()
        with Listing() as forward, listening(forward.hear):
            out = layer(hidden, *args[1:], **kwargs)
            out = out[0] if isinstance(out, (tuple, list)) else out
        with Listing() as backward, listening(backward.hear):
            out.backward(torch.empty_like(out))
        more = self._adapters(number, job, fused)
        return Work(forward.ops + more.forward, backward.ops + more.backward)

    def _adapters(self, number: int, job: Job, fused: bool) -> Work:
        name, layer = self.model.layers()[number]
        found = Work([], [])
        for path, module in layer.named_modules():
            rank = job.rank
            sizes = self.model.adapted(f"{name}.{path}", module, job)
            rows = job.seq * job.batch
            if sizes and experts.is_experts(module):
                stack = module._parameters[experts.stack_names(module)[0]].shape[0]
                rows *= getattr(self.model.config, "num_experts_per_tok", None) or 1
                sizes, rank = [size // stack for size in sizes], job.rank
            elif type(module) is not nn.Linear:
                continue
            for K, N in zip(sizes[::2], sizes[1::2], strict=True):
                more = adapter(rows, K // rank, N // rank, rank, job, fused)
                found.forward.extend(more.forward)
                found.backward.extend(more.backward)
        return found


def adapter(rows: int, K: int, N: int, rank: int, job: Job, fused: bool) -> Work:
    """y += s B (A x) and its gradients. Fused: sums are accumulations of products; peft's are passes of their own."""
    x, y, inner = 2.0 * rows * K, 2.0 * rows * N, 2.0 * rows * rank
    a, b = float(job.lora_bytes * K * rank), float(job.lora_bytes * N * rank)
    by_k, by_n = 2.0 * rows * K * rank, 2.0 * rows * N * rank
    forward = [Op("dense", x + a + inner, by_k), Op("dense", inner + b + 2 * y, by_n)]
    backward = [
        Op("dense", y + b + inner, by_n), Op("dense", y + inner + b, by_n),
        Op("dense", x + inner + a, by_k), Op("dense", inner + a + 2 * x, by_k),
    ]  # fmt: skip
    if not fused:
        forward += [Op("pass", 2 * y), Op("pass", 3 * y)]
        backward += [Op("pass", 2 * y), Op("pass", 3 * x)]
    if job.lora_bytes == 4:  # cast to 16 bits, and gradients back
        forward += [Op("pass", 1.5 * a), Op("pass", 1.5 * b)]
        backward += [Op("pass", 1.5 * a), Op("pass", 1.5 * b)]
    return Work(forward, backward)
