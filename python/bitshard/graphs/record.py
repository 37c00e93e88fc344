"""Work of a GPU recorded once and launched as one: CUDA graphs that share one pool of memory.

A graph's own tensors belong to the pool. Nothing here keeps them: another graph may be recorded over the same memory,
so that the pool is as large as the largest graph needs. What a graph reads from outside or leaves behind for others is
known by its `Place`, and holds until another graph of the pool is launched.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Body = Callable[[], list[Tensor]]


class Place(NamedTuple):
    """Where a tensor of a graph is: address and bytes that it spans, size, stride in elements, dtype, device."""

    address: int
    span: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Place:
        """The place of a strided tensor."""
        size, stride = tensor.size(), tensor.stride()
        last = sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if tensor.numel() else -1
        return cls(tensor.data_ptr(), (last + 1) * tensor.element_size(), size, stride, tensor.dtype, tensor.device)

    @property
    def bytes(self) -> int:
        """What a copy of the tensor takes."""
        return self.size.numel() * self.dtype.itemsize

    def tensor(self) -> Tensor:
        """A new tensor over the memory, in a storage of its own, which frees nothing."""
        out = torch.empty(0, dtype=self.dtype, device=self.device)
        if self.size.numel() == 0:
            return out.new_empty(self.size)
        storage = torch._C._construct_storage_from_data_pointer(self.address, self.device, self.span)
        return out.set_(storage, 0, self.size, self.stride)


class Graph:
    """Everything that `body` launches, as one launch; `results` are what it returned, until `forget`."""

    def __init__(self, body: Body, pool: Any, stream: Any, generators: Iterable[torch.Generator] = ()):
        self._graph = torch.cuda.CUDAGraph()
        for generator in generators:
            self._graph.register_generator_state(generator)
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self.results: list[Tensor] | None = body()

    def replay(self) -> None:
        """Launch it again: the same work on the same memory."""
        self._graph.replay()

    def forget(self) -> None:
        """Give the memory of the results back to the pool, for the next graph."""
        self.results = None

    def drop(self) -> None:
        """Free the graph, also what NCCL keeps for it."""
        self._graph.reset()


class Recorder:
    """Records graphs that are launched one after the other, in one pool of memory of one GPU."""

    device = "cuda"

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self._stock: tuple[Any, int] | None = None
        self.new_pool()

    def new_pool(self) -> None:
        """Record into another pool from now on: torch takes none again whose graphs have all gone."""
        self.pool = torch.cuda.graph_pool_handle()

    def record(self, body: Body, generators: Iterable[torch.Generator] = ()) -> Graph:
        """The graph of what `body` launches, which is not run now. Waits for the GPU; gives cached memory back."""
        gc.collect()  # cycles that hold memory; torch gives only what is free back
        self.stream.wait_stream(torch.cuda.current_stream())
        return Graph(body, self.pool, self.stream, generators)

    def tells(self) -> bool:
        """Whether the allocator tells what it has: torch's own does."""
        return torch.cuda.get_allocator_backend() == "native"

    def take_stock(self) -> None:
        """Before a recording: remember what of the pool somebody holds. Nothing of a graph does, but cuBLAS."""
        self._stock = self.pool, self._held(self.pool)

    def forget_stock(self) -> None:
        """Ask no more about this recording: who holds what of it can't be told."""
        self._stock = None

    def holds_more(self) -> bool:
        """Whether somebody kept memory of that pool since: a module a table for each length, say."""
        if self._stock is None:
            return False
        pool, before = self._stock
        return self._held(pool) > before

    def _held(self, pool: Any) -> int:
        gc.collect()
        return sum(segment["allocated_size"] for segment in self._segments(pool))

    def short_of_memory(self, share: float) -> bool:
        """Whether a step without a graph might find no memory beside the graphs' pool. It takes about as much, times
        its share: how much larger it is than the largest that has graphs. Allocators but torch's own don't say."""
        if not self.tells():
            return False
        pool = sum(segment["total_size"] for segment in self._segments(self.pool))
        if not pool:
            return False
        device = torch.cuda.current_device()
        free, total = torch.cuda.mem_get_info(device)
        reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
        limit = min(reserved + free, int(total * torch.cuda.get_per_process_memory_fraction(device)))
        return limit - allocated - pool < 1.25 * share * pool

    def give_back(self) -> None:
        """After graphs were dropped: their memory goes back to the GPU."""
        gc.collect()
        torch.cuda.empty_cache()

    def _segments(self, pool: Any) -> list[dict[str, Any]]:
        """The allocator's segments that belong to a pool."""
        return [segment for segment in torch.cuda.memory_snapshot() if segment["segment_pool_id"] == pool]

    def place(self, tensor: Tensor) -> Place:
        """Where a result of a graph is."""
        return Place.of(tensor)

    def before_launch(self) -> None:
        """What was left in the pool by the last graph is overwritten from now on."""

    def recover(self) -> None:
        """After an error while recording: torch leaves the default generator and the pool as being recorded."""
        device = torch.cuda.current_device()
        generator = torch.cuda.default_generators[device]
        generator.graphsafe_set_state(generator.clone_state())
        with contextlib.suppress(AttributeError, RuntimeError):  # it may have ended
            torch._C._cuda_endAllocateToPool(device, self.pool)
        self.new_pool()

    def fork(self, streams: Iterable[Any]) -> None:
        """Within a body: let streams that others work on belong to what is recorded."""
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())

    def join(self, streams: Iterable[Any]) -> None:
        """At the end of a body: wait for streams that were forked."""
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
