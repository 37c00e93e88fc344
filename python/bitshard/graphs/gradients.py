"""Memory of the gradients that a graph's backward leaves: pieces in the graphs' pool, which parameters borrow."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from bitshard.graphs.sharded import part
from bitshard.shards import gather


class Gradients:
    """Where the gradients of all trained parameters lie, behind one another in one piece for each dtype."""

    def __init__(self, parameters: list[nn.Parameter]):
        self._at: dict[nn.Parameter, tuple[torch.dtype, int, torch.Size]] = {}
        self._sizes: dict[torch.dtype, int] = {}
        for parameter in parameters:
            local = part(parameter)
            begin = self._sizes.get(local.dtype, 0)
            self._at[parameter] = local.dtype, begin, local.shape
            self._sizes[local.dtype] = begin + local.numel()
        self._device = part(parameters[0]).device

    def together(self, gradients: dict[nn.Parameter, Tensor]) -> list[Tensor]:
        """New pieces with these gradients, in few launches. What lies in the places of others is undefined."""
        pieces = [torch.empty(n, dtype=dtype, device=self._device) for dtype, n in self._sizes.items()]
        torch._foreach_copy_(self.views(pieces, list(gradients)), list(gradients.values()))
        return pieces

    def views(self, pieces: list[Tensor], parameters: list[nn.Parameter]) -> list[Tensor]:
        """The gradients of some parameters in such pieces."""
        by_dtype, views = dict(zip(self._sizes, pieces, strict=True)), []
        for parameter in parameters:
            dtype, begin, shape = self._at[parameter]
            views.append(by_dtype[dtype].narrow(0, begin, shape.numel()).view(shape))
        return views


class Lent:
    """Pieces that are gradients where they are, until the next launch overwrites them.

    Most steps have used and dropped them by then. Those that parameters still have, as in accumulation, get memory of
    their own first. Where somebody else holds some (`copied`), pieces are copied from then on.
    """

    def __init__(self) -> None:
        self.copied = False
        self._storages: list = []  # torch's weak references

    def lend(self, pieces: list[Tensor]) -> list[Tensor]:
        """Pieces of a graph's memory, for gradients."""
        from torch.multiprocessing.reductions import StorageWeakRef

        if self.copied:
            return [piece.clone() for piece in pieces]
        self._storages += [StorageWeakRef(piece.untyped_storage()) for piece in pieces]
        return pieces

    def take_back(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Copy what `parameters` still have as gradients. False where somebody else holds some of it."""
        self._forget()
        if self._storages:
            self._copy_gradients(parameters)
            self._forget()
        self.copied = self.copied or bool(self._storages)
        return not self._storages

    def give_up(self, parameters: Iterable[nn.Parameter]) -> None:
        """The graphs go, and with them gradients that `parameters` still have there; what others hold is left alone."""
        if self._storages:
            for parameter in self._borrowers(parameters):
                parameter.grad = None
        self._storages.clear()

    def _forget(self) -> None:
        """Storages that nobody has any more."""
        self._storages = [storage for storage in self._storages if not storage.expired()]

    def _borrowers(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Those of `parameters` whose gradient lies in a piece that is lent."""
        from torch.multiprocessing.reductions import StorageWeakRef

        graded = [parameter for parameter in parameters if parameter.grad is not None]
        return [p for p in graded if StorageWeakRef(part(p.grad).untyped_storage()) in self._storages]

    def _copy_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        own: dict = {}  # a lent storage -> a copy of its piece
        for parameter in self._borrowers(parameters):
            old = part(parameter.grad)
            storage = StorageWeakRef(old.untyped_storage())
            if storage not in own:
                own[storage] = old.new_empty(0).set_(old.untyped_storage()).clone()
            new = own[storage].as_strided(old.size(), old.stride(), old.storage_offset())
            parameter.grad = _like(new, parameter.grad)


def deliver(parameters: list[nn.Parameter], parts: list[Tensor]) -> None:
    """Add this process's parts of gradients to those of sharded parameters, as FSDP2 does."""
    adding = [(p.grad._local_tensor, new) for p, new in zip(parameters, parts, strict=True) if p.grad is not None]
    if adding:
        torch._foreach_add_([old for old, _ in adding], [new for _, new in adding])
    for p, new in zip(parameters, parts, strict=True):
        if p.grad is None:
            p.grad = _like(new, p)


def _like(local: Tensor, tensor: Tensor) -> Tensor:
    """This process's part of a gradient, as a gradient of `tensor`, or like it."""
    if not gather.is_dtensor(tensor):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor(local, tensor._spec, requires_grad=False)
