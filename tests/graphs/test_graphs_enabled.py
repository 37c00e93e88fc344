"""Calls of a model as graphs (bitshard.graphs.enable) without a GPU: a graph runs its body again on the same memory.

Each step is compared with that of a twin without graphs, bit for bit, and the report says that graphs ran.
"""

import contextlib
import copy
import gc

import pytest
import torch

peft = pytest.importorskip("peft", reason="peft is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from bitshard import graphs  # noqa: E402
from bitshard.graphs import enabled, pair  # noqa: E402
from helpers.copies import pickled  # noqa: E402
from helpers.graph_twins import adapted, batch, check, loss_of, run, trained, twins  # noqa: E402
from helpers.graphs import StandIn  # noqa: E402
from helpers.llama import TOKENS  # noqa: E402

pytestmark = pytest.mark.usefixtures("played_graphs")


def test_each_step_is_that_without_graphs(folder):
    said = check(folder)
    assert (said.graphs, said.captures, said.eager) == (1, 1, {"the first of its form": 1})
    assert "5 steps as graphs (a forward and a backward each) of 1 forms, recorded 1 times" in str(said)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_dropout_and_checkpointing(folder, dropout, checkpointing):
    check(folder, 4, options={"dropout": dropout, "checkpointing": checkpointing})


def test_lengths_and_padding(folder):
    """Three lengths, with a mask of ones and another: a graph each, whose memory the others overwrite."""
    said = check(folder, 30, 24, make=lambda step: batch(step, length=6 + step % 3, padded=step % 2 == 1))
    assert said.graphs == 6


@pytest.mark.parametrize("clear", [True, False])
def test_accumulation(folder, clear):
    check(folder, 8, accumulate=4, clear=clear)


def test_a_loss_outside(folder):
    """Of results that are not the loss: the incoming gradients are inputs of the backward's graph."""

    def loss(model, given):
        logits = model(given["input_ids"], attention_mask=given["attention_mask"]).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), given["labels"][:, 1:].flatten())

    check(folder, loss=loss)


def test_loss_and_logits_together(folder):
    def loss(model, given):
        out = model(**given)
        return out.loss + 0.1 * out["logits"].float().square().mean() + 0 * out[0]

    check(folder, loss=loss)


def test_an_unused_result_stays_unused(folder):
    """The loss alone in the first step, logits, too, later: no gradient is lost in silence."""
    ours, _ = twins(folder)
    for step in range(3):
        loss_of(ours, batch(step)).backward()
    out = ours(**batch(3))
    with pytest.raises(RuntimeError, match=r"a gradient came for result 1 .*used \[0\] only.*disable"):
        (out.loss + out.logits.mean()).backward()


def test_results_are_the_callers(folder, monkeypatch):
    """Losses and logits of earlier steps keep their values, small or large."""
    monkeypatch.setattr(pair, "SMALL", 64)
    ours, theirs = twins(folder)
    kept = [[m(**batch(step)) for step in range(5) if not m.zero_grad()] for m in (ours, theirs)]
    assert all(torch.equal(a.logits, b.logits) and torch.equal(a.loss, b.loss) for a, b in zip(*kept, strict=True))
    del kept
    found = []
    for m in (ours, theirs):
        held = None
        for step in range(6):
            out = m(**batch(step))
            out.loss.backward()
            held = (held, out.logits[:, -1]) if step < 3 else held
        found.append(held)
    assert torch.equal(found[0][1], found[1][1]) and torch.equal(found[0][0][1], found[1][0][1])


def test_a_large_result_is_lent(folder, monkeypatch):
    """Not copied where nobody holds it when the next step comes; copied from the first time that somebody did."""
    monkeypatch.setattr(pair, "SMALL", 64)
    ours, _ = twins(folder)
    for step in range(3):
        ours(**batch(step)).loss.backward()
    (form,) = [form for form in vars(ours)["_compiled_call_impl"]._forms.values()]
    first = ours(**batch(3))
    assert first.logits.data_ptr() == form._places[1].tensor().data_ptr() and form.lends(1)
    first.loss.backward()
    second = ours(**batch(4))
    assert not form.lends(1) and graphs.report(ours).eager.pop(HELD) == 1
    second.loss.backward()
    assert ours(**batch(5)).logits.data_ptr() != form._places[1].tensor().data_ptr()


def places(model):
    """Where the backward of the model's one graph leaves gradients."""
    (form,) = vars(model)["_compiled_call_impl"]._forms.values()
    return form._pieces


def lent(model, pieces):
    """Parameters whose gradient lies there."""
    spans = [(kept._place.address, kept._place.address + kept._place.span) for kept in pieces]
    found = [p for p in model.parameters() if p.grad is not None]
    return [p for p in found if any(begin <= p.grad.data_ptr() < end for begin, end in spans)]


def lending(folder, steps=3):
    """Two models, one with graphs, after some steps and a backward whose gradients are still there; their places."""
    ours, theirs = twins(folder)
    for step in range(steps):
        for m in (ours, theirs):
            m.zero_grad()
            m(**batch(step)).loss.backward()
    assert len(lent(ours, places(ours))) == sum(p.grad is not None for p in ours.parameters()) > 0
    return ours, theirs, places(ours)


def same_gradients(ours, theirs):
    pairs = [(a.grad, b.grad) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)]
    return all(torch.equal(a, b) if a is not None else b is None for a, b in pairs)


def test_gradients_are_lent(folder):
    """Where the graph leaves them; those that a parameter still has in the next step move out of its way."""
    ours, theirs, pieces = lending(folder)
    assert same_gradients(ours, theirs)
    for step in range(3, 6):
        for m in (ours, theirs):
            m(**batch(step)).loss.backward()  # adds
        assert same_gradients(ours, theirs) and not lent(ours, pieces)
    assert set(graphs.report(ours).eager) == {"the first of its form"}
    for m in (ours, theirs):
        m.zero_grad()
        m(**batch(6)).loss.backward()
    assert lent(ours, pieces) and same_gradients(ours, theirs)


def test_gradients_that_somebody_holds_stay_what_they_are(folder):
    ours, theirs, pieces = lending(folder)
    held = [[p.grad for p in m.parameters() if p.grad is not None] for m in (ours, theirs)]
    for step in (3, 4):  # as long as somebody has them
        for m in (ours, theirs):
            m.zero_grad()
            m(**batch(step)).loss.backward()
        assert same_gradients(ours, theirs) and all(map(torch.equal, *held))
    del held
    for m in (ours, theirs):
        m.zero_grad()
        m(**batch(5)).loss.backward()
    assert same_gradients(ours, theirs)
    eager = graphs.report(ours).eager
    assert eager.pop("a gradient of the step before was still held; they are copied from now on") == 2
    assert not lent(ours, pieces) and set(eager) == {"the first of its form"}


@pytest.mark.parametrize("how", ["disabled", "dropped", "changed"])
def test_gradients_outlive_their_graphs(folder, how):
    """Graphs that go between a backward and the optimizer's step leave gradients behind."""
    ours, theirs, pieces = lending(folder)
    if how == "disabled":
        graphs.disable(ours)
    elif how == "dropped":
        vars(ours)["_compiled_call_impl"].drop()
    else:
        ours.base_model.model.config.any_new_setting = 1
        for m in (ours, theirs):
            m(**batch(3)).loss.backward()
    assert not lent(ours, pieces) and same_gradients(ours, theirs)


def test_graphs_go_where_no_memory_is_left_for_their_gradients(folder, monkeypatch):
    """An error, and no gradient that lies in memory which is somebody else's by now."""
    ours, _, pieces = lending(folder)
    call = vars(ours)["_compiled_call_impl"]

    def full(parameters):
        raise torch.OutOfMemoryError("none left")

    with monkeypatch.context() as patch:
        patch.setattr(call._gradients, "_copy_gradients", full)
        with pytest.raises(torch.OutOfMemoryError, match="none left"):
            graphs.disable(ours)
    assert not call._forms and all(graph.dropped for graph in call._recorder.graphs)
    assert not lent(ours, pieces) and not [p for p in ours.parameters() if p.grad is not None]


HELD = "a large result of the step before was still held; it is copied from now on"


def test_evaluation_and_generation_between(folder):
    def between(model, step):
        if step % 2:
            return 0.0
        model.eval()
        with torch.no_grad():
            loss = model(**batch(50)).loss.item()
            tokens = model.generate(**{k: batch(51)[k] for k in ("input_ids", "attention_mask")}, max_new_tokens=2)
        model.train()
        return loss + tokens.sum().item()

    assert check(folder, between=between).captures == 1


def test_numbers_are_no_constants(folder):
    """num_items_in_batch, an int that differs in each step, is read from memory; other numbers make other graphs."""
    check(folder, 5, make=lambda step: {**batch(step), "num_items_in_batch": 5 + step})
    check(folder, 5, make=lambda step: {**batch(step), "num_items_in_batch": torch.tensor(5 + step)})

    def loss(model, given):
        given.pop("labels")
        return model(**given).logits.float().square().mean()

    said = check(folder, 9, 6, make=lambda step: {**batch(step), "logits_to_keep": step % 3}, loss=loss)
    assert said.graphs == 3


CONSTANTS = {
    "an int": lambda step: 1 + step % 2,
    "a float": lambda step: 0.5 + step % 2,
    "a bool": lambda step: step % 2 == 0,
    "a string": lambda step: "ab"[: 1 + step % 2],
    "None or a tensor": lambda step: None if step % 2 else torch.tensor(2.0),
    "a list": lambda step: [1.0, 2.0 + step % 2],
    "a shape": lambda step: torch.Size([1 + step % 2]),
}


class Scaled(torch.nn.Module):
    """y = W x times what a constant of the call says."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 4)
        self.alpha = 1.0

    def forward(self, x, constant=1.0):
        if constant is None:
            factor = 0.5
        elif isinstance(constant, (list, torch.Size)):
            factor = sum(constant)
        else:
            factor = len(constant) if isinstance(constant, str) else constant
        return {"loss": (self.linear(x) * factor * self.alpha).square().mean()}


def steps_of(model, constants, context=contextlib.nullcontext):
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step, constant in enumerate(constants):
        torch.manual_seed(step)
        with context():
            loss = model(torch.randn(3, 4), constant=constant)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("kind", CONSTANTS)
def test_a_constant_that_changes(kind):
    ours, theirs = Scaled().train(), Scaled().train()
    graphs.enable(ours)
    constants = [CONSTANTS[kind](step) for step in range(8)]
    assert steps_of(ours, constants) == steps_of(theirs, constants)
    assert graphs.report(ours).replays == 6


def test_an_attribute_that_changes():
    """A number that a module keeps, changed by the script between steps: another graph."""
    ours, theirs = Scaled().train(), Scaled().train()
    graphs.enable(ours)
    found = []
    for model in (ours, theirs):
        found.append([])
        for alpha in (1.0, 3.0):
            model.alpha = alpha
            found[-1] += steps_of(model, [1.0] * 3)
    assert found[0] == found[1]
    assert graphs.report(ours).captures == 2 and graphs.report(ours).replays == 4


def test_a_forward_that_counts():
    """In Python, which a graph would not do: such a model has none."""

    class Counts(Scaled):
        def forward(self, x, constant=1.0):
            self.alpha = self.alpha + 0.5
            return super().forward(x, constant)

    ours, theirs = Counts().train(), Counts().train()
    graphs.enable(ours)
    assert steps_of(ours, [1.0] * 5) == steps_of(theirs, [1.0] * 5)
    assert graphs.report(ours).replays == 0


def test_a_captured_constant_would_be_seen():
    """The stand-in runs the body with what was recorded: a number that escaped the key makes another loss."""
    ours, theirs = Scaled().train(), Scaled().train()
    graphs.enable(ours)
    steps_of(ours, [1.0, 1.0]), steps_of(theirs, [1.0, 1.0])
    (form,) = vars(ours)["_compiled_call_impl"]._forms.values()
    torch.manual_seed(5)
    x = torch.randn(3, 4)
    assert form.forward([x]).results[0].item() != theirs(x, constant=2.0)["loss"].item()


# ---- what changes between steps ----

CHANGES = {
    "scale": lambda m: [layer.scaling.update(default=3.0) for layer in m.modules() if hasattr(layer, "lora_A")],
    "frozen": lambda m: trained(m)[0].requires_grad_(False),
    "memory": lambda m: setattr(trained(m)[1], "data", torch.zeros_like(trained(m)[1])),
    "adapter": lambda m: (m.add_adapter("b", m.peft_config["default"]), m.set_adapter("b")),
    "disabled": lambda m: m.base_model.disable_adapter_layers() or m.base_model.enable_adapter_layers(),
    "config": lambda m: setattr(m.config, "output_hidden_states", True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_gets_another_graph(folder, name):
    def between(model, step):
        if step == 3:
            torch.manual_seed(3)
            CHANGES[name](model)
        return 0.0

    ours, theirs = twins(folder)
    found = [[], []]
    for mine, model in zip(found, (ours, theirs), strict=True):
        for step in range(8):
            torch.manual_seed(step)
            loss = loss_of(model, batch(step))
            loss.backward()
            mine += [loss.item(), *(p.grad.sum().item() for p in trained(model) if p.grad is not None)]
            model.zero_grad()
            between(model, step)
    assert found[0] == found[1]
    said = graphs.report(ours)
    assert said.replays >= 5 and said.captures == (1 if name == "disabled" else 2)


def test_a_loaded_adapter_is_seen(folder, tmp_path):
    """Values that a graph reads from memory: a state dict, and an adapter from files."""
    ours, theirs = twins(folder)
    run(theirs, 2)
    theirs.save_pretrained(tmp_path)
    run(ours, 3)
    peft.set_peft_model_state_dict(ours, peft.load_peft_weights(str(tmp_path), device="cpu"))
    assert loss_of(ours, batch(9)).item() == loss_of(theirs, batch(9)).item()
    assert graphs.report(ours).captures == 1


def test_a_hook_that_reads_activations(folder, caplog, monkeypatch):
    monkeypatch.setattr(enabled, "AGAIN", 1)
    ours, theirs = twins(folder)
    seen = []
    run(ours, 3)
    handle = ours.base_model.model.model.norm.register_forward_hook(lambda *call: seen.append(call[2].sum().item()))
    run(ours, 3)
    assert len(seen) == 3
    assert caplog.text.count("a hook of test_graphs_enabled on base_model.model.model.norm") == 1
    handle.remove()
    run(ours, 3)
    said = graphs.report(ours)
    assert len(seen) == 3 and said.replays == 4 and said.captures == 2


def test_hooks_on_parameters_and_outputs_run(folder):
    ours, theirs = twins(folder)
    for model in (ours, theirs):
        for p in trained(model):
            p.register_hook(lambda grad: grad * 2)
    calls = []
    trained(ours)[0].register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.sum().item()))
    assert run(ours, 4) == run(theirs, 4)
    assert len(calls) == 4 and graphs.report(ours).replays == 3


# ---- calls that are no graphs ----


def test_a_second_forward_before_the_first_backward(folder):
    ours, theirs = twins(folder)
    run(ours, 2), run(theirs, 2)
    found = []
    for model in (ours, theirs):
        first, second = (loss_of(model, batch(step)) for step in (3, 4))
        (first * second).backward()
        found.append([first.item(), second.item(), *(p.grad.sum().item() for p in trained(model))])
    assert found[0] == found[1]
    assert graphs.report(ours).eager["the backward of the forward before had not come"] == 1


def test_a_backward_comes_once(folder):
    ours, _ = twins(folder)
    run(ours, 2)
    loss = loss_of(ours, batch(3))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward through one step"):
        loss.backward()
    assert loss_of(ours, batch(4)).isfinite()


def test_a_forward_whose_backward_never_comes(folder):
    ours, theirs = twins(folder)
    run(ours, 2), run(theirs, 2)
    ours(**batch(5))
    assert run(ours, 2) == run(theirs, 2)
    assert graphs.report(ours).replays == 4


def test_without_gradients_and_in_evaluation(folder):
    ours, theirs = twins(folder)
    run(ours, 2), run(theirs, 2)
    with torch.no_grad():
        assert loss_of(ours, batch(3)).item() == loss_of(theirs, batch(3)).item()
    ours.eval(), theirs.eval()
    assert loss_of(ours, batch(3)).item() == loss_of(theirs, batch(3)).item()
    assert graphs.report(ours).replays == 1


class Odd(torch.nn.Module):
    def __init__(self, way):
        super().__init__()
        self.linear, self.way = torch.nn.Linear(4, 4), way
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x, other=None):
        y = self.linear(x)
        if self.way == "object":
            return y.sum(), object()
        if self.way == "integers":
            return y.argmax(-1)
        if self.way == "buffer":
            self.count = self.count + 1
        return y.sum()


WAYS = {
    "object": (lambda m: m(torch.ones(4))[0].backward(), "its output has a object"),
    "integers": (lambda m: m(torch.ones(4)), "its output has nothing differentiable"),
    "buffer": (lambda m: m(torch.ones(4)).backward(), None),
    "argument": (lambda m: m(torch.ones(4), other=object()).backward(), "an argument is a object"),
    "graded": (lambda m: m(torch.ones(4, requires_grad=True)).backward(), "an argument requires a gradient"),
    "meta": (lambda m: m(torch.ones(4), other=torch.ones(1, device="meta")).backward(), "an argument is on meta"),
    "sparse": (lambda m: m(torch.ones(4), other=torch.eye(2).to_sparse()).backward(), "layout torch.sparse_coo"),
    "subclass": (
        lambda m: m(torch.ones(4), other=torch.nn.Buffer(torch.ones(1)).as_subclass(Sub)).backward(),
        "argument is a Sub",
    ),
    "mode": (lambda m: in_mode(lambda: m(torch.ones(4)).backward()), "mode of torch"),
    "saved": (lambda m: offloaded(lambda: m(torch.ones(4)).backward()), "offloaded without gradient checkpointing"),
    "hooks": (lambda m: in_hooks(lambda: m(torch.ones(4)).backward()), "hooks on saved tensors that nobody knows"),
    "anomaly": (lambda m: in_anomaly(lambda: m(torch.ones(4)).backward()), "anomaly mode"),
}


class Sub(torch.Tensor):
    pass


def in_mode(call):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Mode():
        call()


def offloaded(call):
    with torch.autograd.graph.save_on_cpu():
        call()


def in_hooks(call):
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        call()


def in_anomaly(call):
    with torch.autograd.detect_anomaly():
        call()


@pytest.mark.parametrize("way", WAYS)
def test_what_runs_as_it_is(way, caplog):
    call, words = WAYS[way]
    model = Odd(way).train()
    graphs.enable(model)
    for _ in range(4):
        model.zero_grad()
        call(model)
    said = graphs.report(model)
    assert said.replays == 0
    if words:
        assert any(words in why for why in said.eager), said
        assert sum(words in line for line in caplog.text.splitlines()) == 1
    if way != "integers":
        assert torch.equal(model.linear.weight.grad, torch.ones(4, 4))


def test_a_model_off_the_gpu(monkeypatch, folder, caplog):
    monkeypatch.undo()
    ours = adapted(folder)
    monkeypatch.setattr(enabled, "RECORDER", type("GPU", (StandIn,), {"device": "cuda"}))
    graphs.enable(ours)
    run(ours, 2)
    assert graphs.report(ours).eager == {"the model is on cpu, not on one GPU": 2} and "not on one GPU" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError("capture failed\nat a line"), torch.OutOfMemoryError("none left")])
@pytest.mark.parametrize("number", [0, 1])
def test_an_error_while_recording(folder, monkeypatch, error, number, caplog):
    """The model goes on as it is, nothing is lost, and it is said once."""

    class Failing(StandIn):
        def record(self, body, generators=()):
            if len(self.graphs) == number:
                raise error
            return super().record(body, generators)

    monkeypatch.setattr(enabled, "RECORDER", Failing)
    said = check(folder, replays=0)
    assert said.eager[f"it can't be recorded ({str(error).splitlines()[0]})"] == 5
    assert caplog.text.count("it can't be recorded") == 1


def test_an_interrupt_while_recording(folder, monkeypatch):
    class Interrupted(StandIn):
        interrupts = 1

        def record(self, body, generators=()):
            if Interrupted.interrupts:
                Interrupted.interrupts = 0
                raise KeyboardInterrupt
            return super().record(body, generators)

    monkeypatch.setattr(enabled, "RECORDER", Interrupted)
    ours, theirs = twins(folder)
    assert run(ours, 1) == run(theirs, 1)
    before = [p.grad for p in trained(ours)]
    with pytest.raises(KeyboardInterrupt):
        loss_of(ours, batch(1))
    assert [p.grad for p in trained(ours)] == before
    assert run(ours, 3) == run(theirs, 3) and graphs.report(ours).replays == 3


# ---- enable, disable, copies ----


def test_enable_and_disable(folder):
    ours, theirs = twins(folder)
    graphs.enable(ours)
    run(ours, 2), run(theirs, 2)
    made = vars(ours)["_compiled_call_impl"]._recorder.graphs
    graphs.disable(ours)
    assert len(made) == 2 and all(graph.dropped for graph in made)
    assert "_compiled_call_impl" not in vars(ours) and run(ours, 2) == run(theirs, 2)
    graphs.disable(ours)
    with pytest.raises(ValueError, match="enable was not called with this PeftModel"):
        graphs.report(ours)
    with pytest.raises(TypeError, match="model is a int"):
        graphs.enable(3)


def test_copies_are_not_enabled():
    model = Scaled().train()
    graphs.enable(model)
    steps_of(model, [1.0] * 3)
    others = copy.deepcopy(model), copy.copy(model), pickled(model)
    expected = steps_of(copy.deepcopy(model), [1.0])
    for other in others:
        assert "_compiled_call_impl" not in vars(other)
        assert steps_of(copy.deepcopy(other), [1.0]) == expected


def test_a_model_is_freed_with_its_graphs():
    import weakref

    model = Scaled().train()
    graphs.enable(model)
    steps_of(model, [1.0] * 3)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_torch_compile_on_top(folder):
    model = Scaled()
    model.compile(backend="eager")
    with pytest.raises(ValueError, match=r"torch.compile compiles the call of this Scaled"):
        graphs.enable(model)
    with pytest.raises(ValueError, match="torch.compile wraps this model"):
        graphs.enable(torch.compile(Scaled(), backend="eager"))


def test_compiled_around(folder):
    """A function that torch.compile traces calls an enabled model: as it is."""
    model = Scaled().train()
    graphs.enable(model)
    step = torch.compile(lambda x: model(x)["loss"], backend="eager")
    for _ in range(3):
        step(torch.ones(3, 4)).backward()
    assert graphs.report(model).replays == 0 and model.linear.weight.grad is not None


def test_settings_belong_to_the_form():
    ours, theirs = Scaled().train(), Scaled().train()
    graphs.enable(ours)
    for _ in range(2):
        for context in (contextlib.nullcontext, lambda: torch.autocast("cpu", torch.bfloat16)):
            assert steps_of(ours, [1.0] * 3, context) == steps_of(theirs, [1.0] * 3, context)
    said = graphs.report(ours)
    assert said.captures == 3 and said.replays == 10  # the first form's graphs go for the first call of the other


def test_autocast_around_all_steps():
    """autocast keeps its casts until it ends, also those of weights that have been trained since: no graph has them."""
    model, plain = Scaled().train(), Scaled().train()
    graphs.enable(model)
    with torch.autocast("cpu", torch.bfloat16):
        found = steps_of(model, [1.0] * 4)
    assert found[0] == steps_of(plain, [1.0], lambda: torch.autocast("cpu", torch.bfloat16))[0]
    assert graphs.report(model).replays == 3


def test_two_models(folder):
    first, second = twins(folder)[0], twins(folder)[0]
    theirs = adapted(folder)
    assert run(first, 3) == run(second, 3) == run(theirs, 3)
    assert graphs.report(first).replays == graphs.report(second).replays == 2


def test_a_model_inside_an_enabled_one(folder):
    ours, theirs = twins(folder)
    graphs.enable(ours.base_model.model)
    assert run(ours, 3) == run(theirs, 3)
    assert graphs.report(ours).replays == 2


# ---- lengths that share a graph ----


def packed(lengths):
    """Sequences in one row, as trl packs them."""
    ids = torch.randint(0, TOKENS, (1, sum(lengths)))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    labels = ids.masked_fill(positions == 0, -100)
    return {
        **{"input_ids": ids, "labels": labels, "position_ids": positions, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends},
        **{"max_length_q": max(lengths), "max_length_k": max(lengths)},
    }


LENGTHS = (5, 6, 7, 8, 7, 5, 6, 5, 8, 6)
BATCHES = {
    "ones": lambda step: batch(step, length=LENGTHS[step]),
    "zeros": lambda step: batch(step, length=LENGTHS[step], padded=True),
    "no mask": lambda step: {k: v for k, v in batch(step, length=LENGTHS[step]).items() if k != "attention_mask"},
    "packed": lambda step: packed([(2, 3), (3, 4), (2, 2, 2), (7,), (4, 3)][step % 5]),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_padding_to_a_step(folder, kind):
    """All lengths are one graph; losses, norms and what was trained are those of the batches as they are."""
    ours, theirs = (adapted(folder) for _ in range(2))
    graphs.enable(ours, pad_to_multiple_of=8)
    found = [run(model, 10, make=BATCHES[kind]) for model in (ours, theirs)]
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    said = graphs.report(ours)
    assert said.graphs <= 2 and said.replays >= 8, said
    given = BATCHES[kind](0)
    shapes = [model(**given).logits.shape for model in (ours, theirs)]
    assert shapes[0] == shapes[1]


def test_packed_rows_of_one_length(folder):
    """However many sequences a row holds, and however long they are: one graph, and one for rows that are a sequence,
    which need no mask."""
    rows = [(3, 5), (8,), (2, 2, 4), (1, 7), (2, 2, 2, 2)]
    said = check(folder, 10, 8, make=lambda step: packed(rows[step % 5]))
    assert said.graphs == 2


def test_packed_rows_are_described_alike():
    """Where sequences end as before, whatever their number; a bound of the longest; and where rows are long."""
    from bitshard.graphs import padding

    rows = [((3, 5), 1, 32, 8), ((2,) * 40, 1, 64, 80), ((3, 4), 8, 32, 8), ((100, 20000), 1, 32, 20100)]
    for lengths, step, entries, longest in [*rows, ((30000, 7000, 7000), 1, 32, 32768)]:
        given, sequences = packed(lengths), torch.tensor([0, *lengths]).cumsum(0).int()
        found = padding.padded(given, step, True).kwargs
        total = sum(lengths) + -sum(lengths) % step
        assert found["input_ids"].shape == (1, total) and found["max_length_q"] == longest >= max(lengths)
        ends = found["cu_seq_lens_q"]
        assert ends.dtype == torch.int32 and ends.shape == (entries,) and ends[-1] == total
        assert torch.equal(ends[: len(sequences)], sequences) and bool((ends[len(sequences) :] == total).all())


def test_what_is_not_padded(folder):
    """Batches with a tensor of unknown meaning, and models where tokens behind others count."""
    from bitshard.graphs import padding

    given = {"input_ids": torch.ones(1, 5, dtype=torch.long)}
    assert padding.padded(given, 8, True).kwargs["input_ids"].shape == (1, 8)
    for more in (
        {"weights": torch.ones(1, 5)},
        {"labels": torch.ones(1, 4)},
        {"attention_mask": torch.ones(1, 1, 5, 5)},
    ):
        assert padding.padded({**given, **more}, 8, True).kwargs.keys() == {*given, *more}
        assert padding.padded({**given, **more}, 8, True).kwargs["input_ids"].shape == (1, 5)
    model = adapted(folder)
    assert padding.pads(model)
    model.config.output_router_logits = True
    assert not padding.pads(model) and not padding.pads(Scaled())
    for wrong in (0, -8, True, 2.0):
        with pytest.raises(ValueError, match="pad_to_multiple_of is"):
            graphs.enable(model, pad_to_multiple_of=wrong)


def test_the_step_by_a_variable(monkeypatch, caplog):
    for value, step in (("16", 16), ("", None), ("x", None), ("0", None)):
        monkeypatch.setenv("BITSHARD_PAD_TO_MULTIPLE_OF", value)
        model = Scaled()
        graphs.enable(model)
        assert vars(model)["_compiled_call_impl"]._step == step
    assert caplog.text.count("BITSHARD_PAD_TO_MULTIPLE_OF=x is ignored: expected a number of tokens") == 1


def test_a_torch_without_cuda(monkeypatch, folder):
    """Nothing of CUDA is asked where the model is on a CPU."""
    monkeypatch.undo()
    ours, theirs = twins(folder)
    assert run(ours, 2) == run(theirs, 2)
    assert graphs.report(ours).eager == {"the model is on cpu, not on one GPU": 2}


def test_a_copy_of_data_parallel_is_called_itself(folder):
    """Its threads call copies that have the module's `__dict__`, and so what stands in front of its call."""
    import threading

    ours = Scaled().train()
    graphs.enable(ours)
    for _ in range(3):
        ours(torch.ones(3, 4))["loss"].backward()
    other = copy.deepcopy(ours)
    other.__dict__["_compiled_call_impl"] = vars(ours)["_compiled_call_impl"]
    with torch.no_grad():
        other.linear.weight.mul_(2)
    found = []
    source = "def _worker(module, x):\n    found.append(module(x)['loss'].item())\n"
    scope = {"found": found}
    exec(compile(source, "torch/nn/parallel/parallel_apply.py", "exec"), scope)
    thread = threading.Thread(target=scope["_worker"], args=(other, torch.ones(3, 4)))
    thread.start()
    thread.join()
    assert found == [other._call_impl(torch.ones(3, 4))["loss"].item()]
    assert found[0] != ours(torch.ones(3, 4))["loss"].item()


def test_a_model_that_can_be_captured_later(folder, monkeypatch):
    """What stands against it is looked for again, every few calls."""
    monkeypatch.setattr(enabled, "AGAIN", 4)
    ours, theirs = twins(folder)
    handle = ours.base_model.model.model.norm.register_forward_hook(lambda *call: None)
    assert run(ours, 3) == run(theirs, 3)
    handle.remove()
    assert run(ours, 8) == run(theirs, 8)
    assert graphs.report(ours).replays >= 4
