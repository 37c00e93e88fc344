"""What stands in front of the call of a model: each call of a training step as two CUDA graphs, or as it is.

`Enabled` is what `model(...)` calls, hooks and all: torch asks a module's `_compiled_call_impl` for that first, where
its own `compile` puts a call, too. It is dropped from copies and pickles. Nothing is patched.

A call of a new form (shapes, dtypes, other arguments, settings) runs as it is, and is looked at. The next one of this
form is recorded and launched, all later ones are launched. Where the first one would need much memory beside the graphs
it is recorded at once, or they go first (`room`). Ranks need not agree on that: what is recorded calls
nothing, and what is launched calls the collectives of the step, in its order, whichever way another rank goes.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bitshard.graphs import masks, offload, padding, record, room, watched, watcher
from bitshard.graphs.calls import Answer, Call, Refused, settings
from bitshard.graphs.gradients import Gradients, Lent
from bitshard.graphs.pair import Learned, Pair, Run
from bitshard.graphs.sharded import Sharded
from bitshard.process import foreign, launch, switches

logger = logging.getLogger("bitshard")

RECORDER = record.Recorder  # for tests
KEPT = 16  # graphs of a model, for as many forms of calls; the one that was used least lately goes
AGAIN = 16  # calls until a model that can't be captured is looked at again
FORMS = 4096  # forms that are remembered
_inside = threading.local()


@dataclass(frozen=True)
class Report:
    """How calls of a model in training ran so far; prints as one line.

    Attributes:
        graphs: forms of calls that have graphs now.
        captures: how often a form was recorded.
        replays: calls that were launched as graphs.
        eager: {why: calls that ran as they are}.
    """

    graphs: int = 0
    captures: int = 0
    replays: int = 0
    eager: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        line = f"{self.replays:,} steps as graphs (a forward and a backward each) of {self.graphs} forms, recorded "
        line += f"{self.captures} times"
        return line + "".join(f"; {n:,} without: {why}" for why, n in self.eager.items())


class Enabled:
    """The call of `model`, as graphs where that is the same."""

    def __init__(self, model: nn.Module, step: int | None = None):
        self._model, self._step, self._pads = weakref.ref(model), step, False
        self._forms: OrderedDict[Hashable, Learned | Pair | str] = OrderedDict()
        self._recorder: Any = None
        self._units: Sharded | None = None
        self._memory: Gradients | None = None
        self._gradients = Lent()
        self._host = offload.HostMemory()
        self._seen: list[Any] = []
        self._modules: list[nn.Module] = []
        self._never: str | None = None
        self._calls = 0
        self._device = torch.device("cpu")
        self._outstanding: Any = lambda: None
        self._lent: list[tuple[Any, Learned | Pair, int]] = []
        self._ended: list[Pair] = []
        self._looks = room.Looks()
        self._captures = self._replays = self._spent = 0
        self._eager: Counter = Counter()
        self._said: set[str] = set()
        self._anchor = torch.zeros((), dtype=torch.float32, requires_grad=True)

    # -- a call --

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        if (copied := foreign.threaded_module(foreign.TORCH_REPLICATES)) is not None:
            return copied._call_impl(*args, **kwargs)
        if not (torch.is_grad_enabled() and model.training) or getattr(_inside, "call", False) or _traced():
            return model._call_impl(*args, **kwargs)
        _inside.call = True
        try:
            return self._run(model, args, kwargs)
        finally:
            _inside.call = False

    def _run(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        try:
            self._prepare(model)
            facts = masks.facts(args, kwargs)
            given = self._padded(args, kwargs, facts)
            call = Call.of(args, given.kwargs, self._device)
            offloaded = offload.asked(model)
            key = call.key, given.facts(facts), settings(), offloaded
        except Refused as refused:
            return self._eagerly(model, args, kwargs, str(refused))
        form, why = self._current(key), self._not_now()
        if why is None:
            form = self._with_graphs(model, key, call, form, self._host if offloaded else None)
        if form is None or (isinstance(form, Learned) and not form.used):
            return given.cut(self._look(model, key, call))
        why = form if isinstance(form, str) else why
        return given.cut(self._launch(form, call)) if why is None else self._eagerly(model, args, kwargs, why)

    def _padded(self, args: tuple, kwargs: dict[str, Any], facts: tuple) -> padding.Padded:
        """The arguments, with tokens behind all others where somebody asked for that; packed rows always alike."""
        step = self._step if self._step is not None and self._pads else 1
        if args or (step == 1 and not padding.packed(kwargs)):
            return padding.Padded(kwargs)
        return padding.padded(kwargs, step, "attention_mask" not in kwargs or facts[:1] == (True,))

    def _prepare(self, model: nn.Module) -> None:
        """Look at the model in its first call in training, and again where it has changed; Refused for good reasons."""
        self._calls += 1
        if not self._modules:
            self._take(model)
        if self._never is not None and self._calls % AGAIN:
            raise Refused(self._never)
        if self._units and self._never is None:
            self._units.between_steps()
            self._units.reduce_always()
        if self._everything() != self._seen:
            self._take(model)
        if self._never is not None:
            raise Refused(self._never)
        _refuse_contexts()

    def _take(self, model: nn.Module) -> None:
        """What the model is now. Its graphs are dropped: they have parts of another one inside."""
        self._forget()
        self._modules = list(model.modules())
        self._units = Sharded(model)
        if not self._units.ready():
            self._modules = []
            raise Refused(_FIRST)
        self._units.between_steps()
        self._never = self._reason(model)
        if self._never is None:
            self._units.reduce_always()
            self._recorder = self._recorder or RECORDER()
        self._pads = padding.pads(model)
        trained = list(watched.trained(model))
        self._memory = Gradients(trained) if trained and self._never is None else None
        self._seen = self._everything()

    def _reason(self, model: nn.Module) -> str | None:
        """Why no call of the model can be a graph."""
        devices = set(watched.places(model))
        wanted = RECORDER.device
        if len(devices) != 1 or next(iter(devices)).type != wanted:
            return f"the model is on {', '.join(sorted(map(str, devices)))}, not on one GPU"
        self._device = next(iter(devices))
        if not watched.trained(model):
            return "no parameter requires a gradient"
        if (words := watched.unknown_hooks(model)) is not None:
            return f"{words} may read what a graph does not show"
        if self._units and (words := self._units.never(wanted == "cuda")) is not None:
            return words
        return watched.foreign(model, self._units.managed())

    def _everything(self) -> list[Any]:
        found = watched.seen(self._modules)
        return found + self._units.seen() if self._units else found

    def _current(self, key: Hashable) -> Learned | Pair | str | None:
        """What is known of this form of calls."""
        form = self._forms.get(key)
        if form is not None:
            self._forms.move_to_end(key)
        return form

    def _not_now(self) -> str | None:
        """Why this call runs as it is, though the next may be a graph."""
        if self._waits():
            return "the backward of the forward before had not come"
        if not self._take_back():
            return "a gradient of the step before was still held; they are copied from now on"
        held = self._held()
        self._let_go([])
        for form, number in held:
            form.copied.add(number)
        if any(isinstance(form, Pair) for form, _ in held):
            return "a large result of the step before was still held; it is copied from now on"
        return self._units.not_now() if self._units else None

    def _waits(self) -> bool:
        """Whether the backward of the last launch may still come."""
        run = self._outstanding()
        return run is not None and not run.done

    def _held(self) -> list[tuple[Learned | Pair, int]]:
        """Large results that a caller still has, by form and number."""
        self._lent = [entry for entry in self._lent if not entry[0].expired()]
        return [(form, number) for _, form, number in self._lent]

    def _take_back(self) -> bool:
        """Before graphs' memory is overwritten or freed; see `Lent.take_back`."""
        return self._gradients.take_back(self._parameters())

    def _parameters(self) -> Iterable[nn.Parameter]:
        model = self._model()
        return () if model is None else model.parameters()

    def _let_go(self, pairs: list[Pair]) -> None:
        """Drop graphs as soon as no backward of theirs is to come, and no caller has a result or a gradient that lies
        in their memory."""
        self._ended += pairs
        if self._ended and not self._waits() and self._take_back() and not self._held():
            for pair in self._ended:
                pair.drop()
            self._ended.clear()

    # -- without a graph --

    def _eagerly(self, model: nn.Module, args: tuple, kwargs: dict[str, Any], why: str) -> Any:
        self._eager[why] += 1
        self._say(why)
        if self._never is not None or not self._units:
            return model._call_impl(*args, **kwargs)
        try:
            return looked_at(model, Learned(self._device), args, kwargs, self._anchor)
        except _RefusedLater as later:
            return later.output

    def _say(self, why: str) -> None:
        if why not in self._said and not why.startswith(_PASSING):
            self._said.add(why)
            if why.startswith(_FAILED) or launch.first_rank():
                logger.warning("bitshard.graphs: %s runs without a graph: %s", type(self._model()).__name__, why)

    def _look(self, model: nn.Module, key: Hashable, call: Call) -> Any:
        """Run the first call of a form as it is, and learn from it."""
        self._eager[_FIRST] += 1
        learned = Learned(self._device)
        args, kwargs = call.arguments(call.tensors)
        try:
            output = looked_at(model, learned, args, kwargs, self._anchor if self._units else None)
        except _RefusedLater as later:
            self._remember(key, later.why)
            self._say(later.why)
            return later.output
        self._remember(key, learned)
        self._looks.add(_kind(key, call), call.shapes(), learned)
        self._lend(learned, Answer(output).tensors)
        return output

    def _share(self, call: Call) -> float:
        """How large a call is, of the largest that has graphs; 0 where none has."""
        most = max((form.elements for form in self._forms.values() if isinstance(form, Pair)), default=0)
        return call.elements() / most if most else 0.0

    def _first(self, key: Hashable, call: Call) -> Learned | None:
        """Before the first call of a form, where it needs much memory beside the graphs: what other calls showed, so
        that this one is recorded at once. Where it has to be looked at the graphs go, to be made anew."""
        share = self._share(call)
        if not share or not self._recorder.tells():
            return None
        crowded = share > room.BESIDE and self._affordable()
        if not crowded and not self._recorder.short_of_memory(share):
            return None
        found = self._looks.shown(_kind(key, call), call.shapes(), self._device)
        if found is None:
            self._set_aside()
            self._recorder.give_back()
        return found

    def _affordable(self) -> bool:
        return room.affordable(self._spent, self._replays)

    def _set_aside(self) -> bool:
        """Drop all graphs and keep what their forms' first calls showed. Returns whether there were any."""
        pairs = {key: form for key, form in self._forms.items() if isinstance(form, Pair)}
        for key, pair in pairs.items():
            self._forms[key] = pair.learned
        self._let_go(list(pairs.values()))
        if pairs:
            self._recorder.new_pool()
        return bool(pairs)

    def _remember(self, key: Hashable, form: Learned | Pair | str) -> None:
        self._forms[key] = form
        self._forms.move_to_end(key)
        pairs = [key for key, form in self._forms.items() if isinstance(form, Pair)]
        old = [self._forms.pop(key) for key in pairs[: max(0, len(pairs) - KEPT)]]
        while len(self._forms) > FORMS:
            old.append(self._forms.popitem(last=False)[1])
        self._let_go([form for form in old if isinstance(form, Pair)])

    # -- with one --

    def _with_graphs(
        self,
        model: nn.Module,
        key: Hashable,
        call: Call,
        form: Learned | Pair | str | None,
        host: offload.HostMemory | None,
    ) -> Learned | Pair | str | None:
        """A form with its graphs, recorded now where there are none yet; unchanged where the call has to run first."""
        if form is None:
            form = self._first(key, call)
        if not isinstance(form, Learned) or not form.used:
            return form
        if self._share(call) > 1 and self._affordable():
            self._set_aside()  # memory of smaller graphs comes in pieces that are too small for this one
        record = self._record_at_once if form.at_once else self._record
        return record(model, key, call, form, host)

    def _record_at_once(
        self, model: nn.Module, key: Hashable, call: Call, learned: Learned, host: offload.HostMemory | None
    ) -> Pair | None:
        """Record a form that never ran; None, where it can't be, lets it run, as all others of its kind from now on."""
        self._recorder.take_stock()
        form = self._record(model, key, call, learned, host)
        if isinstance(form, str):
            self._forms.pop(key)
            self._looks.each(_kind(key, call))
            return None
        if self._recorder.holds_more():
            self._set_apart(key, call)
        return form

    def _set_apart(self, key: Hashable, call: Call) -> None:
        """A module keeps what it made while this form was recorded. It is computed when that is launched, which is now;
        graphs that were recorded before would overwrite it, for its memory was free then."""
        form = self._forms.pop(key)
        self._set_aside()
        self._forms[key] = form
        self._looks.each(_kind(key, call))

    def _record(
        self, model: nn.Module, key: Hashable, call: Call, learned: Learned, host: offload.HostMemory | None
    ) -> Pair | str:
        """Record a form, with activations on the host where `host` is given; the words why not where it can't be."""
        before = self._everything()
        form = self._made(model, call, learned, host)
        if learned.at_once and not isinstance(form, Pair):
            self._refuse_remains(form)
            self._recorder.take_stock()
        if isinstance(form, Learned):
            return self._record(model, key, call, learned, host)
        if isinstance(form, str):
            self._recorder.give_back()
        if self._everything() != before:
            form = self._changed(form)
        self._remember(key, form)
        if isinstance(form, Pair):
            self._spent += learned.at_once or learned.recorded
            learned.recorded = True
            watcher.knows(self)
        return form

    def _made(
        self, model: nn.Module, call: Call, learned: Learned, host: offload.HostMemory | None
    ) -> Pair | Learned | str:
        """New graphs; the words why not; or `learned` where other graphs have gone, so that there is memory now."""
        try:
            pair = Pair(model, call, learned, self._recorder, self._units, self._memory, self._gradients, host)
        except torch.OutOfMemoryError as error:
            if self._units:
                self._recorder.forget_stock()  # FSDP2 keeps what it was gathering, for the next step
            return learned if self._give_up() else f"{_FAILED} ({_first_line(error)})"
        except (RuntimeError, Refused) as error:
            self._give_up()
            return str(error) if isinstance(error, Refused) else f"{_FAILED} ({_first_line(error)})"
        except BaseException:
            self._give_up()
            raise
        self._captures += 1
        return pair

    def _refuse_remains(self, form: Learned | str) -> None:
        """An error where a module keeps what it made in a recording that failed, before the form ever ran."""
        if self._recorder.holds_more():
            why = form if isinstance(form, str) else "no memory was left"
            raise RuntimeError(
                f"bitshard.graphs: a module of {type(self._model()).__name__} keeps a tensor that it made while a call "
                f"of another length was recorded, which failed ({why}), so that it has no value. Train this model "
                "without graphs (BITSHARD_GRAPHS=0)"
            )

    def _changed(self, form: Pair | str) -> Pair | str:
        """The model is another one after a recording. Where the form never ran the change is what its first call does,
        whose results are the graphs'; they go before the next call, as always where the model has changed."""
        self._units.between_steps()
        if isinstance(form, str) or form.learned.at_once:
            return form
        self._let_go([form])
        return "its forward changes the model"

    def _give_up(self) -> bool:
        """After an error in the middle of a recording: the state between two steps again. Graphs go, for they may draw.
        Returns whether there were any."""
        self._recorder.recover()
        self._units.abandon()
        self._host.forget()
        return self._set_aside()

    def _launch(self, pair: Pair, call: Call) -> Any:
        self._replays += 1
        run = pair.forward(call.tensors)
        self._outstanding = weakref.ref(run)
        results, run.results = list(run.results), None
        self._lend(pair, results)
        graded = _Step.apply(run, [results[n] for n in pair.graded], self._anchor, *run.inputs)
        for n, tensor in zip(pair.graded, graded, strict=True):
            results[n] = tensor
        run.keep(results)
        if self._units:
            watcher.launched(self._device)
        if switches.acting is not None:
            switches.acting.launches()
        return pair.output(results)

    def _lend(self, form: Learned | Pair, results: list[Tensor]) -> None:
        """Remember which large results the caller has: those of a graph are overwritten by the next launch."""
        from torch.multiprocessing.reductions import StorageWeakRef

        large = [n for n, tensor in enumerate(results) if form.lends(n)]
        in_pool = [entry for entry in self._lent if isinstance(entry[1], Pair)]
        self._lent = in_pool + [(StorageWeakRef(results[n].untyped_storage()), form, n) for n in large]

    def _forget(self) -> None:
        """Drop all graphs, and what was learned."""
        self._set_aside()
        self._forms.clear()
        self._looks.forget()

    # -- for others --

    def drop(self) -> None:
        """Drop all graphs, also where copying gradients raises; later calls record anew."""
        try:
            self._take_back()
        finally:
            self._gradients.give_up(self._parameters())
            self._lent.clear()
            self._outstanding = lambda: None
            self._forget()
            self._modules, self._seen = [], []

    def report(self) -> Report:
        """How calls ran so far."""
        graphs = sum(isinstance(form, Pair) for form in self._forms.values())
        return Report(graphs, self._captures, self._replays, dict(self._eager.most_common()))


_FAILED = "it can't be recorded"
_FIRST = "the first of its form"
_PASSING = ("the backward of", "a large result", "a gradient of", _FIRST)


def _kind(key: tuple, call: Call) -> Hashable:
    """A form without the sizes of its tensors."""
    return call.kind(), *key[1:]


class _RefusedLater(Exception):
    """A call that ran, with its output, after which it turned out that it can't be a graph."""

    def __init__(self, why: str, output: Any):
        super().__init__(why)
        self.why, self.output = why, output


class _Step(torch.autograd.Function):
    """Differentiable results of a launched forward, whose backward launches the other graph."""

    @staticmethod
    def forward(ctx: Any, run: Run, results: list[Tensor], anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.run.backward(incoming)


class _Look(torch.autograd.Function):
    """Copies of results, for the caller may change them in place; notes which of them get a gradient from there."""

    @staticmethod
    def forward(ctx: Any, learned: Learned, *results: Tensor) -> tuple[Tensor, ...]:
        ctx.learned = learned
        ctx.set_materialize_grads(False)
        return tuple(tensor.clone() for tensor in results)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.learned.came(incoming)
        return None, *incoming


class _Apart(torch.autograd.Function):
    """The same for FSDP2's units, with autograd's graph of the call apart from the caller's.

    A caller who holds a result would hold the leaves of FSDP2's whole parameters with it, which belong to the stream of
    this call: the recording, on another stream, would meet them.
    """

    @staticmethod
    def forward(ctx: Any, learned: Learned, results: list[Tensor], anchor: Tensor) -> tuple[Tensor, ...]:
        ctx.learned, ctx.results = learned, list(results)
        ctx.set_materialize_grads(False)
        return tuple(tensor.clone() for tensor in results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[None, None, None]:
        if ctx.results is None:
            raise RuntimeError("bitshard.graphs: a second backward through one step (retain_graph)")
        ctx.learned.came(incoming)
        pairs = [(tensor, grad) for tensor, grad in zip(ctx.results, incoming, strict=True) if grad is not None]
        ctx.results = None
        with torch.enable_grad():
            torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])
        return None, None, None


def looked_at(model: nn.Module, learned: Learned, args: tuple, kwargs: dict[str, Any], anchor: Tensor | None) -> Any:
    """The module's output, of a call that is looked at; `_RefusedLater` with it where that shows a reason."""
    output = None
    try:
        with masks.noted(learned.notes), learned.draws.noted(model):
            output = model._call_impl(*args, **kwargs)
        answer = Answer(output)
        if not answer.graded:
            raise Refused("its output has nothing differentiable")
    except Refused as refused:
        raise _RefusedLater(str(refused), output) from None
    tensors, answer.tensors, learned.answer = answer.tensors, None, answer
    graded = [tensors[n] for n in answer.graded]
    passed = _Look.apply(learned, *graded) if anchor is None else _Apart.apply(learned, graded, anchor)
    for n, tensor in zip(answer.graded, passed, strict=True):
        tensors[n] = tensor
    return answer.output(tensors)


def _traced() -> bool:
    """Whether somebody else records or transforms this call."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _refuse_contexts() -> None:
    """Refused within contexts that look into a step."""
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        raise Refused("a dispatch or function mode of torch")
    if torch.is_anomaly_enabled():
        raise Refused("autograd's anomaly mode")


def _first_line(error: BaseException) -> str:
    """First line of the first error: those that follow while the recording ends say less."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
