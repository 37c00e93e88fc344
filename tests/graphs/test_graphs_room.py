"""First calls of forms beside graphs, without a GPU: recorded at once, or after the graphs have gone."""

import gc
import random
import weakref

import pytest
import torch

peft = pytest.importorskip("peft", reason="peft is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from bitshard import graphs  # noqa: E402
from bitshard.graphs import enabled, masks, pair, randomness, room  # noqa: E402
from bitshard.graphs.calls import Refused  # noqa: E402
from helpers.graph_twins import batch, check, loss_of, run, trained, twins  # noqa: E402
from helpers.graphs import Again, StandIn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

pytestmark = pytest.mark.usefixtures("played_graphs")
FIRST = "the first of its form"


@pytest.fixture
def looks(monkeypatch):
    """Of each first call: its elements, and those of the largest form that had graphs meanwhile."""
    found, look = [], enabled.Enabled._look

    def looking(self, model, key, call):
        most = max((form.elements for form in self._forms.values() if isinstance(form, pair.Pair)), default=0)
        alive = any(not graph.dropped for graph in self._recorder.graphs)
        found.append((call.elements(), most))
        assert alive == bool(most)
        return look(self, model, key, call)

    monkeypatch.setattr(enabled.Enabled, "_look", looking)
    return found


@pytest.fixture
def recordings(monkeypatch):
    """Of each recording the same."""
    found, record = [], enabled.Enabled._record

    def recording(self, model, key, call, *rest):
        forms = [form.elements for form in self._forms.values() if isinstance(form, pair.Pair)]
        found.append((call.elements(), max(forms, default=0)))
        return record(self, model, key, call, *rest)

    monkeypatch.setattr(enabled.Enabled, "_record", recording)
    return found


def lengths_of(lengths, **options):
    return lambda step: batch(step, length=lengths[step], **options)


def drawn(seed, steps, choices):
    draw = random.Random(seed)
    return [draw.choice(choices) for _ in range(steps)]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_lengths_in_any_order(folder, looks, recordings, seed, padded):
    """Eight lengths: all steps are those without graphs, none runs beside graphs, and a larger graph is the first of
    its pool."""
    make = lengths_of(drawn(seed, 40, range(4, 12)), padded=padded)
    ours, theirs = twins(folder)
    assert run(ours, 40, make=make) == run(theirs, 40, make=make)
    said = graphs.report(ours)
    assert set(said.eager) == {FIRST} and said.eager[FIRST] == len(looks) < 8
    assert said.replays == 40 - len(looks) and said.captures <= 16
    assert not any(most for _, most in looks), looks
    assert not any(elements > most > 0 for elements, most in recordings), recordings


def test_shorter_and_shorter(folder, looks):
    """Each shorter length is a graph from its first call on."""
    lengths = [12, 12, *range(11, 3, -1)]
    said = check(folder, 10, 9, make=lengths_of(lengths))
    assert (said.captures, said.graphs, looks) == (9, 9, [(24, 0)])


def test_longer_and_longer(folder, looks):
    """A new length every third step: each is looked at, recorded and launched twice, and costs no other recording."""
    lengths = [length for length in range(4, 14) for _ in range(3)]
    said = check(folder, 30, 20, make=lengths_of(lengths))
    assert (said.captures, said.graphs) == (10, 1) and looks == [(2 * length, 0) for length in range(4, 14)]


def test_longer_and_longer_with_all_before(folder, monkeypatch, looks):
    """What makes all others anew each time ends where launches don't pay for it: the next runs beside the graphs."""
    monkeypatch.setattr(room, "FREE", 4)
    lengths = [length for most in range(4, 12) for length in (most, most, *range(4, most))]
    said = check(folder, len(lengths), len(lengths) - 8, make=lengths_of(lengths))
    assert said.captures <= 8 + 4 + len(lengths) // 16 + 8  # the forms, what is free, what is paid, the last time
    assert looks[0][1] == looks[1][1] == 0 and looks[-1][1] > 0


def test_lengths_that_never_come_again(folder, monkeypatch):
    """Are not recorded for ever, which takes longer than a step."""
    monkeypatch.setattr(room, "FREE", 3)
    said = check(folder, 12, 4, make=lengths_of([20, 20, *range(19, 9, -1)]))
    assert (said.captures, said.eager) == (4, {FIRST: 8})


@pytest.mark.parametrize("last, captures, kept", [(6, 3, 2), (8, 4, 1)])
def test_the_least_used_graphs_go(folder, monkeypatch, last, captures, kept):
    """Of three lengths the longest was used least lately; where it comes again the smaller ones go for it."""
    monkeypatch.setattr(enabled, "KEPT", 2)
    said = check(folder, 12, 9, make=lambda step: batch(step, length=8 - step % 3 if step < 6 else last))
    assert said.graphs == kept and said.captures == captures


@pytest.mark.parametrize("clear", [True, False])
@pytest.mark.parametrize("accumulate", [3, 4])
def test_graphs_go_in_the_middle_of_an_accumulation(folder, monkeypatch, accumulate, clear):
    """Gradients of the steps before lie in the graphs' memory, which is somebody else's afterwards."""
    moved, give_back = [], StandIn.give_back

    def giving(recorder):
        held = [p.grad for p in trained(moved[0]) if p.grad is not None]
        give_back(recorder)
        moved.append(bool(held) and all(grad.isfinite().all() for grad in held))

    monkeypatch.setattr(StandIn, "give_back", giving)
    lengths = [6, 6, 6, 6, 6, 8, 6, 8, 8, 6, 10, 7, 10, 7, 6, 10]
    ours, theirs = twins(folder)
    moved.append(ours)
    make = lengths_of(lengths)
    found = [run(m, 16, make=make, accumulate=accumulate, clear=clear) for m in (ours, theirs)]
    assert found[0] == found[1] and moved[1:] == [True, True]
    assert set(graphs.report(ours).eager) == {FIRST}


def test_no_graph_goes_before_its_backward(folder):
    """A longer call between a forward and its backward runs as it is, beside the graphs."""
    ours, theirs = twins(folder)
    found = []
    for model in (ours, theirs):
        run(model, 3)
        first, second = loss_of(model, batch(3)), loss_of(model, batch(4, length=16))
        assert model is theirs or graphs.report(ours).graphs == 1
        (first * second).backward()
        found.append([first.item(), second.item(), *(p.grad.sum().item() for p in trained(model))])
        model.zero_grad()
        found[-1] += run(model, 4, make=lengths_of([16, 8, 16, 8]))
    assert found[0] == found[1]
    recorder = vars(ours)["_compiled_call_impl"]._recorder
    assert [graph.dropped for graph in recorder.graphs[:2]] == [True, True] and not recorder.graphs[-1].dropped


def test_a_changed_model_between_a_forward_and_its_backward(folder):
    """The graph is that of the model before, and goes after its backward."""
    ours, theirs = twins(folder)
    found = []
    for model in (ours, theirs):
        run(model, 3)
        first = loss_of(model, batch(3))
        model.base_model.model.config.any_new_setting = 1
        second = loss_of(model, batch(4))
        (first * second).backward()
        found.append([first.item(), second.item(), *(p.grad.sum().item() for p in trained(model))])
        model.zero_grad()
        found[-1] += run(model, 3)
    assert found[0] == found[1]
    assert [g.dropped for g in vars(ours)["_compiled_call_impl"]._recorder.graphs] == [True, True, False, False]


def test_results_that_are_held(folder, monkeypatch):
    """Who keeps logits of one length keeps them of the next: they are copied, and no step runs as it is for that."""
    monkeypatch.setattr(pair, "SMALL", 64)
    ours, theirs = twins(folder)
    found = []
    for model in (ours, theirs):
        held = []
        for step, length in enumerate([9, 9, 9, 8, 7, 6, 8]):
            out = model(**batch(step, length=length))
            out.loss.backward()
            held.append(out.logits)
        found.append(held)
    assert all(map(torch.equal, *found))
    assert graphs.report(ours).eager == {FIRST: 1}


# ---- what only a first call shows ----


def learned(used=(0,), notes=(), regions=()):
    found = pair.Learned(torch.device("cpu"))
    found.used, found.notes, found.draws.regions = set(used), list(notes), list(regions)
    return found


SHOWN = {  # first calls that ran, by length, and whether they show what one of 6 tokens would
    "a longer one": ([(8, learned())], True),
    "a shorter one": ([(4, learned())], False),
    "no backward": ([(8, learned(used=()))], False),
    "a mask that was left out": ([(8, learned(notes=[None]))], True),
    "a mask that may be left out": ([(8, learned(notes=[masks.MADE]))], False),
    "a mask that is always made": ([(8, learned(notes=[masks.MADE])), (4, learned(notes=[masks.MADE]))], True),
    "a window's": ([(8, learned(notes=[None, masks.MADE])), (4, learned(notes=[None, None]))], False),
    "draws": ([(8, learned(regions=[(0, 4)]))], False),
    "another loss": ([(8, learned()), (4, learned(used=[1]))], False),
}


@pytest.mark.parametrize("name", SHOWN)
def test_what_others_show(name):
    calls, enough = SHOWN[name]
    looks, device = room.Looks(), torch.device("cpu")
    for length, found in calls:
        looks.add("kind", [torch.Size([2, length])], found)
    asked = [torch.Size([2, 6])]
    assert (looks.shown("kind", asked, device) is not None) is enough
    assert looks.shown("another kind", asked, device) is None
    assert looks.shown("kind", [torch.Size([3, 6])], device) is None
    looks.each("kind")
    assert looks.shown("kind", asked, device) is None


def test_what_cannot_be_recorded_at_once(folder, monkeypatch):
    """A kernel that is tuned in its first call, say: the form is looked at, and so are all others of its kind."""
    tried = []

    class Tunes(StandIn):
        def record(self, body, generators=()):
            if body.__self__.learned.at_once:
                tried.append(body)
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().record(body, generators)

    monkeypatch.setattr(enabled, "RECORDER", Tunes)
    lengths = [9, 9, 7, 7, 9, 8, 8, 7, 9]
    said = check(folder, 9, 6, make=lengths_of(lengths))
    assert len(tried) == 1 and said.eager == {FIRST: 3}


def test_draws_of_the_host_while_recording():
    """Are refused, and drawn again by the call that runs instead."""
    draws = randomness.Draws(torch.device("cpu"))
    draws._generator = torch.Generator()
    torch.manual_seed(3)
    random.seed(3)
    expected = torch.rand(2).tolist(), random.random()
    torch.manual_seed(3)
    random.seed(3)
    with pytest.raises(Refused, match="random numbers on the CPU"), draws.recorded(torch.nn.Module()):
        torch.rand(1), random.random()
    assert (torch.rand(2).tolist(), random.random()) == expected


class Fresh(TorchDispatchMode):
    """Notes tensors that are made within."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        new = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        self.made += [weakref.ref(t) for t in new if t.untyped_storage()._cdata not in given]
        return out


class Captured(Again):
    """A graph whose recording runs the module, and computes nothing: what is kept of it has no value until a launch."""

    def __init__(self, body, recorder):
        super().__init__(body)
        self._recorder, state = recorder, torch.get_rng_state()
        with Fresh() as fresh:
            body()
        gc.collect()
        torch.set_rng_state(state)
        alive = [ref() for ref in fresh.made if ref() is not None and ref().grad_fn is None]
        mine = {id(value) for value in (*(body.__self__._incoming or ()), *(body.__self__._outs or ()))}
        self.left = [(weakref.ref(t), t.detach().clone()) for t in alive if id(t) not in mine]
        self.spoil()
        self.pool = recorder.pools
        recorder.left[self.pool] += len(self.left)

    def spoil(self):
        for ref, _ in self.left:
            if ref() is not None:
                ref().data.fill_(float("nan"))

    def replay(self):
        for later in self._recorder.graphs[self._recorder.graphs.index(self) + 1 :]:
            if later.pool == self.pool:  # what was free when this one was recorded
                later.spoil()
        for ref, value in self.left:
            if ref() is not None:
                ref().data.copy_(value)
        super().replay()


class Pools(StandIn):
    """Tells what of a pool somebody has kept, and lets other graphs of the pool overwrite it."""

    def __init__(self):
        super().__init__()
        self.pools, self.left = 0, [0]

    def record(self, body, generators=()):
        self.graphs.append(Captured(body, self))
        return self.graphs[-1]

    def new_pool(self):
        self.pools, self.left = self.pools + 1, [*self.left, 0]

    def take_stock(self):
        self._stock = self.pools, self.left[-1]

    def holds_more(self):
        return self.left[self._stock[0]] > self._stock[1]


class Tables(torch.nn.Module):
    """Multiplies positions by a table that is made once for each length, or for the last length alone."""

    def __init__(self, last):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.last, self.length = torch.nn.Linear(4, 4), last, 0
        self.tables = {}

    def forward(self, x):
        return {"loss": (self.linear(x) * self.table(len(x))).square().mean()}

    def table(self, length):
        if self.last and self.length != length:
            self.tables.clear()
            self.length = length
        if length not in self.tables:
            self.tables[length] = 1 / torch.arange(1, length + 1, dtype=torch.float32)[:, None]
        return self.tables[length]


@pytest.mark.parametrize("last", [False, True])
def test_tables_by_length(monkeypatch, last):
    """A table that was made in a recording is what it is without one, also for evaluation, whatever runs meanwhile."""
    monkeypatch.setattr(enabled, "RECORDER", Pools)
    ours, theirs = Tables(last).train(), Tables(last).train()
    graphs.enable(ours)
    found = []
    for model in (ours, theirs):
        found.append([])
        lengths = [9, 9, 9, 6, 9, 6, 4, 9, 4, 6, 6, 4, 9, 9, 4, 6]
        for step, length in enumerate(lengths):
            torch.manual_seed(step)
            loss = model(torch.randn(length, 4))["loss"]
            loss.backward()
            found[-1] += [loss.item(), model.linear.weight.grad.sum().item()]
            model.zero_grad()
            with torch.no_grad():
                seen = [length] if last else sorted(set(lengths[: step + 1]))
                found[-1] += [model.eval()(torch.ones(n, 4))["loss"].item() for n in seen]
            model.train()
    assert found[0] == found[1]
    said = graphs.report(ours)
    assert said.replays >= (2 if last else 10), said


def test_a_table_of_a_recording_that_failed(monkeypatch):
    """Would be wrong in all steps that follow."""

    class Fails(Pools):
        def record(self, body, generators=()):
            graph = super().record(body, generators)
            if body.__self__.learned.at_once:
                raise RuntimeError("operation not permitted")
            return graph

    monkeypatch.setattr(enabled, "RECORDER", Fails)
    model = Tables(False).train()
    graphs.enable(model)
    for _ in range(3):
        model(torch.ones(9, 4))["loss"].backward()
    with pytest.raises(RuntimeError, match=r"a module of Tables keeps .*operation not permitted.*BITSHARD_GRAPHS=0"):
        model(torch.ones(6, 4))
