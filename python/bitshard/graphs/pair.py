"""The forward and the backward of calls of one form as two CUDA graphs.

    pair = Pair(model, call, learned, recorder, units)
    run = pair.forward(call.tensors)          # run.output(...), tensors as the module returned them
    gradients = run.backward(incoming)        # one for each of pair.plain; those of sharded parameters are in p.grad

Both graphs are recorded before either is launched. The forward's graph keeps for the backward's what autograd keeps.
Then nothing of it is held: only the places of inputs, results and incoming gradients are known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bitshard.graphs import masks, watched
from bitshard.graphs.calls import Answer, Call, Refused
from bitshard.graphs.gradients import Gradients, Lent, deliver
from bitshard.graphs.offload import HostMemory
from bitshard.graphs.randomness import Draws
from bitshard.graphs.record import Place
from bitshard.graphs.sharded import Sharded, part

SMALL = 1 << 20  # bytes; smaller results are copied for the caller, larger ones lent


class Learned:
    """What the call before the recording showed, which ran without a graph.

    Attributes:
        answer: the form of the module's output, without its tensors.
        used: which of the output's tensors got a gradient; none until a backward came.
        notes: the answers of mask functions.
        draws: where random numbers were drawn.
        copied: results that callers held until the next call: they get copies of these.
        at_once: a call of another form showed all this; the form itself never ran without a graph.
        recorded: the form has, or had, graphs.
    """

    def __init__(self, device: torch.device):
        self.answer: Answer | None = None
        self.used: set[int] = set()
        self.notes: masks.Noted = []
        self.draws = Draws(device)
        self.copied: set[int] = set()
        self.at_once = self.recorded = False

    def for_shorter(self, device: torch.device) -> Learned | None:
        """The same for a call of the same kind with shorter tensors, which is recorded at once; None where it must run
        first: draws are counted by size, and so are masks of blocks. A mask that is left out here is left out there (a
        window masks nothing of fewer tokens)."""
        if not self.used or any(taken for _, taken in self.draws.regions) or not masks.for_any_shape(self.notes):
            return None
        found = Learned(device)
        found.used, found.notes, found.draws.regions = set(self.used), list(self.notes), list(self.draws.regions)
        found.copied, found.at_once = set(self.copied), True
        return found

    def lends(self, number: int) -> bool:
        """Whether a result is handed out where it is: a large one that gets no gradient, which nobody held so far.

        What gets one is often changed in place on its way to a loss; the backward's graph may need it as it was.
        """
        shape, dtype = self.answer.shapes[number]
        return number not in self.copied and number not in self.used and shape.numel() * dtype.itemsize > SMALL

    def came(self, incoming: tuple[Tensor | None, ...]) -> None:
        """A backward came, with gradients of differentiable results in their order."""
        self.used.update(n for n, grad in zip(self.answer.graded, incoming, strict=True) if grad is not None)


class Pair:
    """See the module. RuntimeError of torch or CUDA, or Refused, where a step can't be recorded."""

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        learned: Learned,
        recorder: Any,
        units: Sharded,
        memory: Gradients,
        lent: Lent,
        host: HostMemory | None = None,
    ):
        self._model, self.learned, self._recorder, self._host = model, learned, recorder, host
        self._call, self._memory, self._lent = call.without_tensors(), memory, lent
        self.elements = call.elements()
        self._inputs = [tensor.detach().clone() for tensor in call.tensors]
        self._streams = units.streams() + (host.streams(call.tensors[0].device) if host else [])
        self._trained = watched.trained(model)
        managed = units.managed()
        self._managed = [p for p in self._trained if id(p) in managed]
        # The graphs' own leaves: hooks on the model's parameters, DDP's above all, belong to the backward outside
        self._leaves = {p: nn.Parameter(p.data) for p in self._trained if id(p) not in managed}
        self._outs: list[Tensor] | None = None
        self._incoming: list[Tensor] | None = None
        self._places: list[Place] | None = None
        self._pieces: list[Place] | None = None
        self.plain = list(self._leaves)  # those that get a gradient, and are not FSDP2's
        self.sharded: list[nn.Parameter] = []
        self.copied, self.lends = learned.copied, learned.lends
        self._used = sorted(learned.used)
        generators = learned.draws.generators()
        self._forward = recorder.record(self._run_forward)
        self._backward = recorder.record(self._run_backward, generators)
        self._settle()

    # -- what is recorded --

    def _run_forward(self) -> list[Tensor]:
        """The module's call; returns its tensors."""
        learned = self.learned
        self._recorder.fork(self._streams)
        args, kwargs = self._call.arguments(self._inputs)
        with (
            self._own_leaves(),
            _no_autocast_cache(),
            masks.given(learned.notes),
            masks.every_position(),
            learned.draws.recorded(self._model),
            self._host.layers(self._model) if self._host else contextlib.nullcontext(),
        ):
            answer = Answer(self._model._call_impl(*args, **kwargs))
        if learned.answer is None:
            learned.answer = answer.form()
        if answer.shapes != learned.answer.shapes or answer.graded != learned.answer.graded:
            raise Refused("its output has another form than in the call before")
        if not set(self._used) <= set(answer.graded):
            raise Refused("other results are differentiable than in a longer call")
        self._outs = [answer.tensors[n] for n in self._used]
        if self._places is None:
            self._incoming = [torch.empty_like(out, memory_format=torch.contiguous_format) for out in self._outs]
        self._recorder.join(self._streams)
        return [tensor.detach() for tensor in answer.tensors]

    def _run_backward(self) -> list[Tensor]:
        """Gradients of all trained parameters, together in the pieces of `_memory`."""
        incoming = self._incoming if self._places is None else [place.tensor() for place in self._into]
        before = [p.grad for p in self._trained]
        for p in self._trained:
            p.grad = None
        self._recorder.fork(self._streams)
        try:
            torch.autograd.backward(self._outs, incoming)
            found = self._found()
            pieces = self._memory.together(found)
        finally:
            self._outs = None
            for leaf in self._leaves.values():
                leaf.grad = None
            for p, grad in zip(self._trained, before, strict=True):
                p.grad = grad
        self._recorder.join(self._streams)
        self.plain = [p for p in found if p in self._leaves]
        self.sharded = [p for p in found if p not in self._leaves]
        return pieces

    def _found(self) -> dict[nn.Parameter, Tensor]:
        """Gradients by parameter, this process's part of sharded ones."""
        around = next((p for p in self._leaves if p.grad is not None), None)
        if around is not None:
            raise Refused(f"a parameter of shape {list(around.shape)} is read from elsewhere than its module")
        found = {p: leaf.grad for p, leaf in self._leaves.items() if leaf.grad is not None}
        found.update({p: part(p.grad) for p in self._managed if p.grad is not None})
        if not found:
            raise Refused("no parameter gets a gradient")
        return found

    @contextlib.contextmanager
    def _own_leaves(self) -> Iterator[None]:
        """The graphs' leaves in the modules' places, within."""
        slots = [(module._parameters, name, p) for p, at in self._trained.items() for module, name in at]
        slots = [(parameters, name, p) for parameters, name, p in slots if p in self._leaves]
        for parameters, name, p in slots:
            parameters[name] = self._leaves[p]
        try:
            yield
        finally:
            for parameters, name, p in slots:
                parameters[name] = p

    def _settle(self) -> None:
        """Know the places of results, and hold them no longer."""
        if self._places is None and self._forward.results is not None:
            self._places = [self._recorder.place(tensor) for tensor in self._forward.results]
            self._into = [self._recorder.place(tensor) for tensor in self._incoming]
            self._incoming = None
            self._forward.forget()
        if self._pieces is None and self._backward.results is not None:
            self._pieces = [self._recorder.place(tensor) for tensor in self._backward.results]
            self._backward.forget()

    # -- launches --

    def forward(self, tensors: list[Tensor]) -> Run:
        """Launch the forward with these inputs."""
        self._recorder.before_launch()
        for mine, given in zip(self._inputs, tensors, strict=True):
            mine.copy_(given, non_blocking=True)
        self.learned.draws.before_forward()
        self._forward.replay()
        self._settle()
        return Run(self, [self._result(n, place) for n, place in enumerate(self._places)])

    def _result(self, number: int, place: Place) -> Tensor:
        tensor = place.tensor()
        return tensor if self.lends(number) else tensor.clone()

    def backward(self, incoming: dict[int, Tensor], plain: list[nn.Parameter]) -> list[Tensor | None]:
        """Launch the backward with gradients of results, by number; those of parameters that are not FSDP2's."""
        used = self._used
        unknown = sorted(set(incoming) - set(used))
        if unknown:
            raise RuntimeError(
                f"bitshard.graphs: a gradient came for result {unknown[0]} of the module, of shape "
                f"{list(self.learned.answer.shapes[unknown[0]][0])}, but the graph was recorded after a step that "
                f"used {used} only. Call bitshard.graphs.disable(model), or use the same results in each step"
            )
        for number, place in zip(used, self._into, strict=True):
            given = incoming.get(number)
            place.tensor().zero_() if given is None else place.tensor().copy_(given)
        self.learned.draws.before_backward()
        self._backward.replay()
        self._settle()
        pieces = self._lent.lend([place.tensor() for place in self._pieces])
        copies = self._memory.views(pieces, [*self.plain, *self.sharded])
        deliver(self.sharded, copies[len(self.plain) :])
        found = dict(zip(self.plain, copies, strict=False))
        return [found.get(p) for p in plain]

    def output(self, tensors: list[Tensor]) -> Any:
        """The module's output with these tensors."""
        return self.learned.answer.output(tensors)

    @property
    def graded(self) -> list[int]:
        """Which results are differentiable."""
        return self.learned.answer.graded

    def drop(self) -> None:
        """Free both graphs."""
        self._forward.drop()
        self._backward.drop()


class Run:
    """One launched forward, whose backward may come once."""

    def __init__(self, pair: Pair, results: list[Tensor]):
        self.pair, self.results, self.done = pair, results, False
        self.inputs = list(pair.plain)
        self._lent: list[tuple[Tensor, int]] = []

    def keep(self, results: list[Tensor]) -> None:
        """Remember which results the caller has where they are: the backward's graph may need their values."""
        lent = [tensor for n, tensor in enumerate(results) if self.pair.lends(n)]
        self._lent = [(tensor.detach(), tensor._version) for tensor in lent]

    def backward(self, incoming: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Launch the backward with gradients of the differentiable results, in their order; those of `inputs`."""
        if self.done:
            raise RuntimeError(
                "bitshard.graphs: a second backward through one step, whose graph keeps nothing for it (retain_graph)"
            )
        changed = next((tensor for tensor, version in self._lent if tensor._version != version), None)
        if changed is not None:
            raise RuntimeError(
                f"bitshard.graphs: a result of shape {list(changed.shape)} was changed in place before the backward, "
                "whose graph may need it as it was; change a copy"
            )
        self.done, self._lent = True, []
        given = zip(self.pair.graded, incoming, strict=True)
        return self.pair.backward({n: grad for n, grad in given if grad is not None}, self.inputs)


@contextlib.contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Without autocast's cache: a cast from before would be a constant of the graph."""
    enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
        torch.clear_autocast_cache()
