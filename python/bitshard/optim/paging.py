"""State of paged optimizers on a GPU: it lives in pinned host memory and is streamed through a bounded device buffer.

A step cuts the states of all paged parameters into slots (`cut`) and moves each through one of `RING` places of the
buffer: one stream copies it in, the current stream updates it, a third copies it back, so that copies both ways and
updates overlap. Scales and maps stay on the device. A step returns when the last copies back are done, as that of
bitsandbytes' paged optimizers does: who reads a state then, or saves it, sees what the step has written.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from math import prod
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitshard import ops
from bitshard.optim.paged import host_bytes
from bitshard.optim.shards import BLOCKSIZE
from bitshard.optim.update import Settings, Tensors, give_back, update, update_all, working

PAGED_FROM = 100_000  # elements, as in bitsandbytes: smaller states stay on the device
RING = 4  # slots of the device buffer
ALIGN = 256  # bytes
MIB = 2**20
LEAST_SLOT = 4 * MIB  # a copy of less does not reach the speed of the link
PIECES = 16  # slots of a step at least, where they are not smaller than that: the first and the last do not overlap
LARGEST_ARENA = 2**30
ON_CPU = False  # for tests: parameters on the CPU go the way of a GPU's

Item = tuple[Settings, Tensors]
Chunk = tuple[int, int, int]  # (index of a parameter, first element, last + 1)
Note = Callable[[int, int | None], None]  # of a parameter so many elements are updated; None: it is not known


def budget() -> int:
    """Bytes that the device buffer may take: BITSHARD_PAGING_MB, in MiB, 256 by default. ValueError for nonsense."""
    text = os.environ.get("BITSHARD_PAGING_MB", "256")
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0.0 < size < 2**40:
        raise ValueError(f"BITSHARD_PAGING_MB must be a number of MiB above 0, got {text!r}")
    return int(size * MIB)


def applies(part: Tensor) -> bool:
    """Whether the state of this part of a parameter is paged, in a paged optimizer."""
    return part.numel() >= PAGED_FROM and (part.device.type == "cuda" or ON_CPU)


def is_paged(value: Any) -> bool:
    """Whether this is a tensor in paged memory."""
    return getattr(value, "is_paged", False)


# ---- slots ----


def cut(sizes: list[int], widths: list[int], room: int, starts: list[int] | None = None) -> list[list[Chunk]]:
    """Slots of at most `room` bytes, each a list of chunks, in order; all elements of all parameters, each once.

    sizes: elements of each parameter; widths: bytes of state an element; starts: the first element of each that is
    wanted, a multiple of 256. A chunk begins at a multiple of 256 elements
    and ends at one or at the end of its parameter. A slot of less room than one block of 256 takes one all the same.
    """
    slots: list[list[Chunk]] = []
    left = 0
    for index, (n, width) in enumerate(zip(sizes, widths, strict=True)):
        begin = starts[index] if starts else 0
        while begin < n:
            blocks = left // (BLOCKSIZE * width)
            if blocks <= 0:
                slots.append([])
                left, blocks = room, max(1, room // (BLOCKSIZE * width))
            end = min(n, begin + blocks * BLOCKSIZE)
            slots[-1].append((index, begin, end))
            left -= ops.block_count(end - begin, BLOCKSIZE) * BLOCKSIZE * width
            begin = end
    return slots


def slot_room(sizes: list[int], widths: list[int], limit: int) -> int:
    """Bytes of a slot where the buffer may take `limit`."""
    blocks = [ops.block_count(n, BLOCKSIZE) * BLOCKSIZE * width for n, width in zip(sizes, widths, strict=True)]
    return max(min(limit // RING, max(sum(blocks) // PIECES, LEAST_SLOT)), BLOCKSIZE * max(widths, default=1))


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


# ---- host memory ----


class Pages:
    """Host memory for states: pieces of arenas, one behind another, so that one copy moves many small states.

    A state has a storage of its own, which keeps its arena alive. Arenas double in size up to 1 GiB: the pinned
    allocator of torch rounds up to powers of two.
    """

    def __init__(self):
        self._arena: Tensor | None = None
        self._used, self._size = 0, 8 * MIB
        self._places: dict[int, tuple[weakref.ref, int]] = {}

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros, with `is_paged` and the index of the GPU. RuntimeError where memory cannot be pinned."""
        size = prod(shape) * dtype.itemsize
        if self._arena is None or self._used + size > self._arena.numel():
            self._size = min(2 * self._size, LARGEST_ARENA)
            rounded = max(self._size, 1 << (size - 1).bit_length())
            self._arena, self._used = host_bytes(rounded, device), 0
        start = self._arena.data_ptr() + self._used
        memory = (ctypes.c_char * size).from_address(start)
        memory.arena = self._arena
        self._places[start] = (weakref.ref(self._arena), self._used)
        self._used += _aligned(size)
        tensor = torch.frombuffer(memory, dtype=dtype).view(shape)
        tensor.is_paged, tensor.page_deviceid = True, device.index
        return tensor

    def place(self, tensor: Tensor) -> tuple[Tensor, int]:
        """(bytes, where in them the tensor begins): its arena, or the tensor itself where it is from elsewhere."""
        found = self._places.get(tensor.data_ptr())
        arena = None if found is None else found[0]()
        if arena is None:
            return tensor.view(-1).view(torch.uint8), 0
        return arena, found[1]


# ---- what moves ----


class _Copy(NamedTuple):
    host: Tensor  # bytes
    start: int
    place: int  # in the slot
    size: int


class _Part(NamedTuple):
    """A chunk and where its state is in a slot."""

    index: int
    begin: int
    end: int
    whole: bool  # the chunk is the parameter
    state1: Tensor
    state2: Tensor | None


class _Slot(NamedTuple):
    parts: list[_Part]
    copies: list[tuple[Tensor, Tensor]]  # (bytes on the host, bytes of the slot)


def _merge(copies: list[_Copy]) -> list[_Copy]:
    """Copies of neighbours as one; between neighbours is nothing but the padding of both."""
    merged: list[_Copy] = []
    for copy in copies:
        if merged:
            host, start, place, size = merged[-1]
            if host is copy.host and _aligned(size) == copy.start - start == copy.place - place:
                merged[-1] = _Copy(host, start, place, copy.start + copy.size - start)
                continue
        merged.append(copy)
    return merged


def _pieces(state: Tensor, n: int, begin: int, end: int) -> list[tuple[int, int]]:
    """(first byte, bytes) of each run of a chunk in a state of n elements, or 2 * n for AdEMAMix's pair."""
    width = state.itemsize
    if end - begin == n:
        return [(0, state.numel() * width)]
    return [((row * n + begin) * width, (end - begin) * width) for row in range(state.numel() // n)]


class _Lanes:
    """The streams of a device and the order between them. The CPU needs none."""

    def __init__(self, device: torch.device):
        self.device, self.cuda = device, device.type == "cuda"
        self.fetch, self.keep = (torch.cuda.Stream(device) if self.cuda else None for _ in range(2))
        self.kept: Any = None  # event: all that was under way is done

    def on(self, lane: Any) -> Any:
        """Copies inside go through this stream."""
        return torch.cuda.stream(lane) if self.cuda else nullcontext()

    def current(self) -> Any:
        """The stream of the updates."""
        return torch.cuda.current_stream(self.device) if self.cuda else None

    def mark(self, lane: Any) -> Any:
        """An event behind all that a stream has now."""
        return lane.record_event() if self.cuda else None

    def wait(self, lane: Any, event: Any) -> None:
        """What a stream gets from now on comes after the event."""
        if event is not None:
            lane.wait_event(event)

    def end(self) -> None:
        """Mark the end of a step, for which `finish` waits."""
        self.wait(self.keep, self.mark(self.current()))
        self.kept = self.mark(self.keep)

    def finish(self) -> None:
        """Wait until the host sees all."""
        if self.kept is not None:
            self.kept.synchronize()


class _Progress:
    """How far the update of some parameters has come, on the device and on the host alike.

    `note(i, end)` is told that the first `end` elements of the i-th are updated, None that it is not known how many:
    of whole ones at once, of others where the update stops.
    """

    def __init__(self, sizes: list[int], starts: list[int], note: Note):
        self.sizes, self.ends, self._note = sizes, list(starts), note
        self.open: list[_Part] = []  # chunks that are being updated
        self._torn: set[int] = set()

    def close(self, done: list[bool]) -> None:
        """The open chunks are updated, or as they were."""
        for part, is_done in zip(self.open, done, strict=True):
            if is_done:
                self.ends[part.index] = part.end
                if part.end == self.sizes[part.index]:
                    self._note(part.index, part.end)
        self.open = []

    def stop(self, answers: bool) -> str:
        """Note what is not whole; what to say of all. Nothing is known where the device does not answer."""
        self._torn = {part.index for part in self.open} if answers else set(range(len(self.sizes)))
        parts = []
        places = list(zip(self.ends, self.sizes, strict=True))
        for index, (end, size) in enumerate(places):
            if index in self._torn:
                self._note(index, None)
            elif 0 < end < size:
                self._note(index, end)
                parts.append(f", of one more the first {end} of {size} elements")
        whole = sum(end == size for i, (end, size) in enumerate(places) if i not in self._torn)
        if self._torn:
            parts.append(f", of {len(self._torn)} it is not known")
        return f"of {len(self.sizes)} paged parameters {whole} were updated{''.join(parts)}"


class _Pager:
    """What one device has: its streams, its buffer, and the slots that were cut last."""

    def __init__(self, device: torch.device, pages: Pages):
        self.device, self.pages, self.lanes = device, pages, _Lanes(device)
        self.known: list[Any] = []  # states that the slots are of
        self.limit = 0
        self.starts: list[int] = []
        self.slots: list[_Slot] = []
        self.buffers: list[Tensor] = []

    def forget(self) -> None:
        """Give the buffer back."""
        self.lanes.finish()
        self.known, self.slots, self.buffers = [], [], []

    def prepare(self, parameters: list[tuple], starts: list[int]) -> None:
        """Slots for these parameters, `Tensors`, each from an element on.

        The last step's if they fit.
        """
        states, limit = [state for parameter in parameters for state in parameter[2:4]], budget()
        self.starts = starts
        if any(starts):
            limit = 0  # these slots are for one step
        elif limit == self.limit and len(states) == len(self.known) and all(map(is_, states, self.known)):
            return
        self.known, self.slots = [], []
        sizes = [parameter[1].numel() for parameter in parameters]
        widths = [
            sum(state.numel() // n * state.itemsize for state in parameter[2:4] if state is not None)
            for n, parameter in zip(sizes, parameters, strict=True)
        ]
        room = slot_room(sizes, widths, budget())
        chunks = cut(sizes, widths, room, starts)
        self._allocate(min(RING, len(chunks)), room)
        self.slots = [self._slot(number % RING, slot, parameters) for number, slot in enumerate(chunks)]
        self.known, self.limit = states, limit

    def _allocate(self, count: int, room: int) -> None:
        if [buffer.numel() for buffer in self.buffers] == [room] * count:
            return
        self.forget()
        self.buffers = [torch.empty(room, dtype=torch.uint8, device=self.device) for _ in range(count)]
        for lane in (self.lanes.fetch, self.lanes.keep):
            self.lanes.wait(lane, self.lanes.mark(self.lanes.current()))  # who had this memory before may still use it
            for buffer in self.buffers if self.lanes.cuda else ():
                buffer.record_stream(lane)

    def _slot(self, place: int, chunks: list[Chunk], parameters: list[tuple]) -> _Slot:
        buffer, used, parts, copies = self.buffers[place], 0, [], []
        for index, begin, end in chunks:
            states: list[Tensor | None] = [None, None]
            n = parameters[index][1].numel()
            for number, state in enumerate(parameters[index][2:4]):
                if state is None:
                    continue
                host, offset = self.pages.place(state)
                first = used
                for start, size in _pieces(state, n, begin, end):
                    copies.append(_Copy(host, offset + start, used, size))
                    used += size
                states[number] = buffer[first:used].view(state.dtype)
                used = _aligned(used)
            parts.append(_Part(index, begin, end, end - begin == n, *states))
        moves = [
            (copy.host[copy.start : copy.start + copy.size], buffer[copy.place : copy.place + copy.size])
            for copy in _merge(copies)
        ]
        return _Slot(parts, moves)

    def run(self, items: list[Item], note: Note) -> None:
        """Update what was prepared, and tell `note` what is done. A RuntimeError says how far it came."""
        tensors = [(working(g), working(p)) for _, (g, p, *_) in items]
        progress = _Progress([p.numel() for _, p in tensors], self.starts, note)
        try:
            self._stream(items, tensors, progress)
        except BaseException as error:
            said = progress.stop(self._answers(items, tensors))
            if not isinstance(error, RuntimeError):
                raise
            raise type(error)(f"{error} ({said})") from error
        _write_back(items, tensors)
        self.lanes.end()

    def _stream(self, items: list[Item], tensors: list[tuple[Tensor, Tensor]], progress: _Progress) -> None:
        """All slots, one after the other. What fails before the chunks of a slot are updated has not touched them."""
        lanes = self.lanes
        lanes.wait(lanes.fetch, lanes.kept)
        fetched = [self._fetch(slot, None) for slot in self.slots[:RING]]
        for number, slot in enumerate(self.slots):
            lanes.wait(lanes.current(), fetched[number])
            work = _work_of(slot, items, tensors)
            progress.open = slot.parts
            error, done = _update_slot(work)
            kept = self._keep(slot, lanes.mark(lanes.current()))
            progress.close(done)
            if error is not None:
                raise error
            if number + RING < len(self.slots):
                fetched.append(self._fetch(self.slots[number + RING], kept))

    def _answers(self, items: list[Item], tensors: list[tuple[Tensor, Tensor]]) -> bool:
        """After a failure: whether what was updated has come to its place."""
        try:
            _write_back(items, tensors)
            self.lanes.end()
            self.lanes.finish()
        except RuntimeError:
            return False
        return True

    def _fetch(self, slot: _Slot, after: Any) -> Any:
        self.lanes.wait(self.lanes.fetch, after)
        with self.lanes.on(self.lanes.fetch):
            for host, place in slot.copies:
                place.copy_(host, non_blocking=True)
        return self.lanes.mark(self.lanes.fetch)

    def _keep(self, slot: _Slot, after: Any) -> Any:
        self.lanes.wait(self.lanes.keep, after)
        with self.lanes.on(self.lanes.keep):
            for host, place in slot.copies:
                host.copy_(place, non_blocking=True)
        return self.lanes.mark(self.lanes.keep)


def _write_back(items: list[Item], tensors: list[tuple[Tensor, Tensor]]) -> None:
    """Parameters that were updated by way of a contiguous copy."""
    for (_, work), (_, (_, p, *_)) in zip(tensors, items, strict=True):
        if work is not p:
            give_back(p, work)


class _Work(NamedTuple):
    """The chunks of a slot as `update_all` takes them."""

    batches: dict[tuple, list[tuple]]
    places: list[int]  # in the slot, of all chunks of all batches in order
    written: list[tuple[Tensor, Tensor]]  # (scales, their copy, which is updated)


def _work_of(slot: _Slot, items: list[Item], tensors: list[tuple[Tensor, Tensor]]) -> _Work:
    batches: dict[tuple, list[tuple]] = {}
    places: dict[tuple, list[int]] = {}
    written: list[tuple[Tensor, Tensor]] = []
    for place, part in enumerate(slot.parts):
        settings, whole = items[part.index]
        absmax1, absmax2 = whole.absmax1, whole.absmax2
        g, p = tensors[part.index]
        if not part.whole:
            g, p = (tensor.view(-1)[part.begin : part.end] for tensor in (g, p))
            absmax1, absmax2 = (_scales(table, part, written) for table in (absmax1, absmax2))
        chunk = Tensors(g, p, part.state1, part.state2, whole.qmap1, whole.qmap2, absmax1, absmax2)
        batches.setdefault(settings, []).append(chunk)
        places.setdefault(settings, []).append(place)
    return _Work(batches, list(chain.from_iterable(places.values())), written)


def _update_slot(work: _Work) -> tuple[Exception | None, list[bool]]:
    """One call for all chunks of a slot: (what stopped it or None, which of the slot's chunks are updated)."""
    error, done = _update_batches(work)
    for table, scales in work.written:
        table.copy_(scales)
    own = sorted(zip(work.places, done, strict=True))
    return error, [is_done for _, is_done in own]


def _update_batches(work: _Work) -> tuple[Exception | None, list[bool]]:
    chunks = [(settings, chunk) for settings, own in work.batches.items() for chunk in own]
    done = 0
    try:
        if update_all(list(work.batches.items())):
            done = len(chunks)
        for settings, chunk in chunks[done:]:
            update(settings, chunk)
            done += 1
    except Exception as error:
        return error, getattr(error, "done", [i < done for i in range(len(chunks))])
    return None, [True] * len(chunks)


def _scales(table: Tensor | None, part: _Part, written: list[tuple[Tensor, Tensor]]) -> Tensor | None:
    """The scales of a chunk, contiguous; a copy, which AdEMAMix's pairs need, is noted in `written`."""
    if table is None:
        return None
    own = table[..., part.begin // BLOCKSIZE : ops.block_count(part.end, BLOCKSIZE)]
    if own.is_contiguous():
        return own
    written.append((own, own.contiguous()))
    return written[-1][1]


# ---- of an optimizer ----


class Paging:
    """The paged state of one optimizer."""

    def __init__(self):
        self._pages = Pages()
        self._pagers: dict[torch.device, _Pager] = {}

    def zeros(self, part: Tensor, lead: int, dtype: torch.dtype) -> Tensor:
        """Paged state for this rank's part of a parameter, [*shape] or with `lead` [2, *shape]."""
        return self._pages.take((*(2,) * lead, *part.shape), dtype, part.device)

    def move(self, value: Tensor, part: Tensor) -> Tensor:
        """A copy of a state in paged memory."""
        return self._pages.take(tuple(value.shape), value.dtype, part.device).copy_(value)

    def prepare(self, items: list[Item], starts: list[int]) -> Callable[[Note], None]:
        """Make buffers and slots for a step of parameters, each from an element on; the result runs it."""
        places: dict[torch.device, list[int]] = {}
        for index, (_, parameter) in enumerate(items):
            places.setdefault(parameter[1].device, []).append(index)
        for device, own in places.items():
            if device not in self._pagers:
                self._pagers[device] = _Pager(device, self._pages)
            self._pagers[device].prepare([items[index][1] for index in own], [starts[index] for index in own])

        def run(note: Note) -> None:
            try:
                for device, own in places.items():
                    self._pagers[device].run([items[i] for i in own], lambda i, end, own=own: note(own[i], end))
                self.finish()
            except BaseException:
                self._finish_or_note(places, note)
                raise

        return run

    def _finish_or_note(self, places: dict[torch.device, list[int]], note: Note) -> None:
        """As `finish`, after a failure: of a device that does not answer nothing is known."""
        for device, own in places.items():
            try:
                self._pagers[device].lanes.finish()
            except RuntimeError:
                for index in own:
                    note(index, None)

    def finish(self) -> None:
        """Wait until the host sees what the last step wrote."""
        for pager in self._pagers.values():
            pager.lanes.finish()

    def forget(self) -> None:
        """The state is another: drop what was known of the old one."""
        for pager in self._pagers.values():
            pager.forget()

    @contextmanager
    def whole(self, state: dict[str, Any], device: torch.device) -> Iterator[None]:
        """Inside, the state of one parameter is on its device as a whole; then copied back, unless this raised."""
        paged = {key: state[key] for key in ("state1", "state2") if is_paged(state.get(key))}
        try:
            state.update({key: value.to(device, copy=True) for key, value in paged.items()})
            yield
            for key, value in paged.items():
                value.copy_(state[key])
        finally:
            state.update(paged)


def check_state(state: dict[str, Any], n: int, lead: int) -> None:
    """ValueError where the paged state of n elements is not whole."""
    state1, blocks = state["state1"], ops.block_count(n, BLOCKSIZE)
    expected = {"state1": ((1 + lead) * n, state1.dtype), "state2": (n, state1.dtype)}
    if state1.dtype == torch.uint8:
        expected |= {"absmax1": ((1 + lead) * blocks, torch.float32), "absmax2": (blocks, torch.float32)}
    for key, (numel, dtype) in expected.items():
        found = state.get(key)
        if found is not None and (found.numel() != numel or found.dtype != dtype or not found.is_contiguous()):
            raise ValueError(f"{key} is {found.dtype} {tuple(found.shape)}, of which {numel} of {dtype} are needed")
