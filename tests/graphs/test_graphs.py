"""A captured step (bitshard.graphs) without a GPU: a graph that is played by calling again what it would launch."""

import contextlib
import copy
import importlib.util
from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

peft = pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from bitshard import graphs  # noqa: E402
from bitshard.graphs import captured_step, enabled  # noqa: E402
from helpers.graphs import Played, StandIn  # noqa: E402
from helpers.lora import fused_copy, layers, model  # noqa: E402


@pytest.fixture(autouse=True)
def played(monkeypatch):
    monkeypatch.setattr(captured_step, "Graph", Played)
    monkeypatch.setattr(captured_step, "DEVICE", "cpu")


def batches(n, rows=5):
    made = []
    for seed in range(n):
        generator = torch.Generator().manual_seed(seed)
        made.append(
            {
                "x": torch.randn(rows, 128, generator=generator),
                "labels": torch.randint(0, 96, (rows,), generator=generator),
            }
        )
    return made


def loss_of(wrapped):
    return lambda batch: torch.nn.functional.cross_entropy(wrapped(batch["x"]), batch["labels"])


def capture(wrapped, batch, function=None):
    return graphs.CapturedStep(wrapped, function or loss_of(wrapped), batch)


def twins():
    theirs = fused_copy(model([(64, 128), (96, 64)]))
    return theirs, fused_copy(theirs)


def gradients(wrapped):
    return [p.grad for p in wrapped.parameters() if p.requires_grad]


def same(ours, theirs):
    pairs = zip(gradients(ours), gradients(theirs), strict=True)
    return all((a is None and b is None) or torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_training_is_that_without_a_graph(accumulate, to_none):
    ours, theirs = twins()
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in (ours, theirs)]
    step = capture(ours, batches(1)[0])
    assert gradients(ours) == [None] * 4
    for number, batch in enumerate(batches(6)):
        found = step(batch)
        expected = loss_of(theirs)(batch)
        expected.backward()
        assert torch.equal(found, expected.detach()) and same(ours, theirs) and not found.requires_grad
        if (number + 1) % accumulate == 0:
            for wrapped, optimizer in zip((ours, theirs), optimizers, strict=True):
                torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
    assert step._graph.replays == 6


def test_losses_and_batches_are_the_caller_s():
    """A loss stays what it was, and a batch is not kept."""
    ours, _ = twins()
    first, second = batches(2)
    step = capture(ours, first)
    losses = [step(first), step(second)]
    assert losses[0] != losses[1] and torch.equal(losses[0], loss_of(ours)(first).detach())
    first["x"].zero_()
    assert torch.equal(step(second), losses[1])


def test_gradients_from_before_are_kept_and_added_to():
    ours, theirs = twins()
    (batch,) = batches(1)
    for wrapped in (ours, theirs):
        loss_of(wrapped)(batch).backward()
    held = gradients(ours)
    step = capture(ours, batch)
    assert all(map(torch.equal, gradients(ours), held))
    step(batch)
    loss_of(theirs)(batch).backward()
    assert same(ours, theirs)


def test_parameters_without_a_gradient():
    """What the loss does not depend on has none, and what another gave it stays."""
    ours, _ = twins()
    first, second = layers(ours)
    (batch,) = batches(1)
    step = capture(ours, batch, lambda batch: first(batch["x"]).square().mean())
    other = second.lora_A["default"].weight
    step(batch)
    assert other.grad is None and first.lora_A["default"].weight.grad is not None
    other.grad = mark = torch.ones_like(other)
    step(batch)
    assert other.grad is mark


CHANGES = {
    "scale": lambda m: layers(m)[0].scaling.update(default=3.0),
    "disabled": lambda m: layers(m)[0].enable_adapters(False),
    "merged": lambda m: m.merge_adapter(),
    "another adapter": lambda m: (m.add_adapter("b", m.peft_config["default"]), m.set_adapter("b")),
    "evaluation": lambda m: m.eval(),
    "frozen": lambda m: layers(m)[0].lora_A["default"].weight.requires_grad_(False),
    "memory": lambda m: setattr(layers(m)[1].lora_B["default"].weight, "data", torch.zeros(96, 8)),
    "parameter": lambda m: setattr(layers(m)[1].lora_B["default"], "weight", torch.nn.Parameter(torch.zeros(96, 8))),
    "packed": lambda m: setattr(layers(m)[0].base_layer.weight, "data", layers(m)[0].base_layer.weight.data.clone()),
    "bias": lambda m: setattr(layers(m)[0].base_layer, "bias", None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_raises(name):
    ours, _ = twins()
    (batch,) = batches(1)
    step = capture(ours, batch)
    step(batch)
    trained = [p for p in ours.parameters() if p.requires_grad]
    before = [p.grad.clone() for p in trained]
    CHANGES[name](ours)
    with pytest.raises(RuntimeError, match="make another CapturedStep"):
        step(batch)
    assert step._graph.replays == 1 and all(torch.equal(p.grad, g) for p, g in zip(trained, before, strict=True))


def test_values_may_change():
    """What the graph reads from memory: an optimizer's step, a loaded adapter."""
    ours, theirs = twins()
    (batch,) = batches(1)
    step = capture(ours, batch)
    for wrapped in (ours, theirs):
        with torch.no_grad():
            layers(wrapped)[0].lora_B["default"].weight.mul_(2)
    assert torch.equal(step(batch), loss_of(theirs)(batch).detach())


@pytest.mark.parametrize(
    "change",
    [
        lambda b: {**b, "x": b["x"][:4]},
        lambda b: {**b, "x": b["x"].double()},
        lambda b: {"x": b["x"]},
        lambda b: {**b, "more": b["x"]},
    ],
)
def test_another_batch_raises(change):
    ours, _ = twins()
    (batch,) = batches(1)
    step = capture(ours, batch)
    with pytest.raises(ValueError, match=r"captured with .*\(5, 128\).*called with"):
        step(change(batch))
    assert step._graph.replays == 0


def test_a_batch_holds_tensors_only():
    ours, _ = twins()
    (batch,) = batches(1)
    with pytest.raises(TypeError, match="scale is a float"):
        capture(ours, {**batch, "scale": 2.0})
    step = capture(ours, batch)
    with pytest.raises(TypeError, match="labels is a NoneType"):
        step({**batch, "labels": None})
    assert step._graph.replays == 0


def test_what_cannot_be_captured(monkeypatch):
    ours, _ = twins()
    (batch,) = batches(1)
    with pytest.raises(RuntimeError, match="cannot be captured .*preserve_rng_state") as raised:
        capture(ours, batch, lambda batch: ours(batch["x"]))  # no loss
    assert "scalar" in str(raised.value.__cause__) and gradients(ours) == [None] * 4
    with pytest.raises(ValueError, match="requires a gradient"):
        capture(torch.nn.Linear(128, 96).requires_grad_(False), batch)
    monkeypatch.setattr(captured_step, "DEVICE", "cuda")
    with pytest.raises(ValueError, match=r"must be on one GPU, found \['cpu'\]"):
        capture(ours, batch)


@pytest.mark.parametrize("where", ["adapter", "config", "pdrop"])
def test_dropout_is_refused_in_training(where):
    ours = fused_copy(model([(96, 128)], lora_dropout=0.1 if where == "adapter" else 0.0))
    (batch,) = batches(1)
    if where != "adapter":
        ours.config = type("Config", (), {})()
        setattr(ours.config, "attention_dropout" if where == "config" else "attn_pdrop", 0.1)
    with pytest.raises(ValueError, match="drops at random"):
        capture(ours.train(), batch)
    assert capture(ours.eval(), batch)(batch).isfinite()


def test_one_of_several_processes(monkeypatch):
    ours, _ = twins()
    for name, value in (("is_initialized", True), ("get_world_size", 2)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    with pytest.raises(ValueError, match="one of 2 processes"):
        capture(ours, batches(1)[0])


def test_the_real_graph_captures_on_the_stream_it_warmed_up_on(monkeypatch):
    """`Graph` itself, with names of torch.cuda that note what is asked of them."""
    monkeypatch.undo()
    done = []

    class Stream:
        def wait_stream(self, other):
            done.append("wait")

    class CUDAGraph:
        def replay(self):
            done.append("replay")

    @contextlib.contextmanager
    def inside(name, *args, **kwargs):
        done.append((name, kwargs.get("stream", args[0])))
        yield
        done.append("end")

    stream = Stream()
    for name, value in {
        "Stream": lambda: stream,
        "CUDAGraph": CUDAGraph,
        "current_stream": Stream,
        "stream": lambda *args: inside("stream", *args),
        "graph": lambda *args, **kwargs: inside("graph", *args, **kwargs),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    graph = captured_step.Graph(lambda: done.append("work") or [])
    graph.replay()
    warm = ["work"] * captured_step.WARM_UP
    expected = ["wait", ("stream", stream), *warm, "end", "wait", ("graph", stream), "work", "end", "replay"]
    assert done == expected


# ---- layers of LLM.int8 ----


class Adapted(torch.nn.Module):
    """Two int8 layers, the first with an adapter; x has outliers."""

    def __init__(self, device="cpu", dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        settings = {"has_fp16_weights": False, "threshold": 6.0}
        self.first, self.second = (bnb.nn.Linear8bitLt(k, n, **settings) for k, n in ((128, 64), (64, 96)))
        self.a, self.b = torch.nn.Linear(128, 8, bias=False), torch.nn.Linear(8, 64, bias=False)
        self.first.requires_grad_(False), self.second.requires_grad_(False)
        self.to(dtype).to(device)

    def forward(self, x):
        return self.second(torch.relu(self.first(x) + self.b(self.a(x))))


def int8_batches(n, rows=40, device="cpu", dtype=torch.float32):
    """With outlier columns, another in each batch."""
    made = batches(n, rows)
    for number, batch in enumerate(made):
        batch["x"][number % rows, 7 * number % 128] = 30.0
    return [{"x": batch["x"].to(device, dtype), "labels": batch["labels"].to(device)} for batch in made]


def test_int8_layers_in_a_step():
    """By a played graph: losses and gradients, for other outlier columns than those of the capture, too."""
    ours, theirs = Adapted(), Adapted()
    step = capture(ours, int8_batches(1)[0])
    for batch in int8_batches(3):
        found, expected = step(batch), loss_of(theirs)(batch)
        expected.backward()
        assert torch.equal(found, expected.detach()) and same(ours, theirs)
    assert gradients(ours)[0].abs().sum() > 0 and step._graph.replays == 3


INT8_CHANGES = {
    "threshold": lambda m: setattr(m.first.state, "threshold", 2.0),
    "scales": lambda m: setattr(m.first.weight, "SCB", m.first.weight.SCB.clone()),
    "weight": lambda m: setattr(m.second, "weight", copy.deepcopy(m.second.weight)),
    "codes": lambda m: setattr(m.second.weight, "data", m.second.weight.CB.clone()),
    "a column": lambda m: m.second.packed_weight.enter(),
}


@pytest.mark.parametrize("name", INT8_CHANGES)
def test_a_changed_int8_layer_raises(name):
    ours, (batch,) = Adapted(), int8_batches(1)
    step = capture(ours, batch)
    step(batch)
    INT8_CHANGES[name](ours)
    with pytest.raises(RuntimeError, match="make another CapturedStep"):
        step(batch)
    assert step._graph.replays == 1


class Asked(TorchDispatchMode):
    """Names of the operators that were called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [1, 40])
def test_an_int8_layer_asks_for_no_value(rows):
    """What a graph cannot hold: an operator whose result the host reads, or whose shape depends on values."""
    model, (batch,) = Adapted(), int8_batches(1, rows)
    with Asked() as asked:
        loss_of(model)(batch).backward()
    assert {"linear_int8", "linear_int8_dgrad"} <= asked.names
    assert not asked.names & {"_local_scalar_dense", "nonzero", "argwhere", "masked_select", "unique_dim", "item"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_int8_layers_in_a_real_graph(monkeypatch, dtype, rows):
    """A forward alone, and a step: the values of calls without a graph, for other outlier columns, too."""
    monkeypatch.undo()
    model, (first, *others) = Adapted("cuda", dtype), int8_batches(4, rows, "cuda", dtype)
    x, graph = first["x"].clone(), torch.cuda.CUDAGraph()
    with torch.no_grad():
        model(x)
        with torch.cuda.graph(graph):
            y = model(x)
        for batch in others:
            x.copy_(batch["x"])
            graph.replay()
            assert torch.equal(y, model(batch["x"]))
    step = capture(model, first)
    for batch in others:
        found = step(batch)
        graded = [grad.clone() for grad in gradients(model)]
        model.zero_grad()
        expected = loss_of(model)(batch)
        expected.backward()
        assert torch.equal(found, expected.detach())
        for grad, plain in zip(graded, gradients(model), strict=True):
            torch.testing.assert_close(grad, plain)
        model.zero_grad()


EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_example_trains_alike_with_a_graph(tmp_path, monkeypatch, checkpointing):
    """examples/qlora.py with --graph: the losses of Trainer without it; on a GPU by real graphs."""
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        monkeypatch.setattr(enabled, "RECORDER", StandIn)
    model, text = example("tiny").make(tmp_path / "tiny")
    qlora, losses = example("qlora"), []
    command = ["--model", str(model), "--text", str(text), "--steps", "5", "--length", "32", "--dtype", "float32"]
    command += ["--quant-storage", "float32", "--fuse", "--output", str(tmp_path)]
    for options in ([], ["--graph"]):
        trainer = qlora.main([*command, *options, *["--gradient-checkpointing"] * checkpointing])
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 5 and losses[0][0] != losses[0][-1]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4 if on_gpu else 1e-6)
    assert graphs.report(trainer.model).replays == 4
