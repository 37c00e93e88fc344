"""Memory of graphs without a GPU: what waits on the host, what a caller holds, and where there is little of it."""

import pytest
import torch

peft = pytest.importorskip("peft", reason="peft is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from bitshard import graphs  # noqa: E402
from bitshard.graphs import enabled, offload, pair  # noqa: E402
from helpers.graph_twins import adapted, batch, check  # noqa: E402
from helpers.graphs import StandIn  # noqa: E402
from helpers.llama import save_llama  # noqa: E402


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(enabled, "RECORDER", StandIn)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    save_llama(folder)
    return folder


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_activations_on_the_host(folder, monkeypatch, dropout):
    """Inputs of checkpointed layers wait in memory that all forms share; torch's hooks are called by no recording."""
    packed, place = [], offload.HostMemory.place
    monkeypatch.setattr(offload, "SMALLEST", 1)
    monkeypatch.setattr(offload, "PIECE", 4096)  # of the form of 8 tokens one layer fills it
    monkeypatch.setattr(offload.HostMemory, "place", lambda host, like: packed.append(like.shape) or place(host, like))

    def loss(model, given):
        with torch.autograd.graph.save_on_cpu():
            return model(**given).loss

    def make(step):
        return batch(step, length=8 - step % 2)

    said = check(folder, 8, 6, loss=loss, make=make, options={"dropout": dropout})
    assert said.graphs == 2 and len(packed) == 6 and set(packed) == {(2, 8, 48), (2, 7, 48)}
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_host_memory_is_given_out_once():
    host = offload.HostMemory()
    for _ in range(2):  # the second step takes what the first one took
        with host.layers(torch.nn.Module()):
            pass
        found = [
            host.place(torch.zeros(n, dtype=dtype)) for n in (3, 1 << 25, 7) for dtype in (torch.bfloat16, torch.int8)
        ]
        spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in found)
        assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:], strict=False)), spans
        assert [tensor.numel() for tensor in found] == [3, 3, 1 << 25, 1 << 25, 7, 7]
    assert sum(piece.numel() for piece in host._pieces) <= 4 << 26


def test_a_held_result_keeps_its_graph(folder, monkeypatch):
    """Where the model has changed: the memory of a graph is nobody else's while a caller has a result in it."""
    monkeypatch.setattr(pair, "SMALL", 64)
    ours = adapted(folder)
    graphs.enable(ours)
    for step in range(4):
        held = None
        held = (out := ours(**batch(step))).logits
        out.loss.backward()
        del out
    values, recorder = held.clone(), vars(ours)["_compiled_call_impl"]._recorder
    assert graphs.report(ours).replays == 3
    ours.base_model.model.config.any_new_setting = 1
    for step in range(3):
        ours(**batch(step)).loss.backward()
        assert not any(graph.dropped for graph in recorder.graphs) and torch.equal(held, values)
    del held
    for step in range(3):
        ours(**batch(step)).loss.backward()
    assert [graph.dropped for graph in recorder.graphs] == [True, True, False, False]


class Short(StandIn):
    """Has room for a step without a graph while there is no graph."""

    def short_of_memory(self, share):
        return any(not graph.dropped for graph in self.graphs)


@pytest.mark.parametrize("lengths, looks, captures", [([9, 9, 7, 8, 9, 7, 8], 1, 3), ([7, 7, 9, 9, 7, 8], 2, 4)])
def test_where_memory_is_short(folder, monkeypatch, lengths, looks, captures):
    """A form of fewer tokens than another had is recorded in its first call; a longer one runs with no graph alive."""
    monkeypatch.setattr(enabled, "RECORDER", Short)
    said = check(folder, len(lengths), len(lengths) - looks, make=lambda step: batch(step, length=lengths[step]))
    assert (said.captures, said.graphs) == (captures, 3)


def test_draws_are_counted_by_size(folder):
    learned = pair.Learned(torch.device("cpu"))
    assert learned.for_shorter(torch.device("cpu")) is None  # no backward came
    learned.used, learned.notes = {0}, [True, False]
    found = learned.for_shorter(torch.device("cpu"))
    assert (found.used, found.notes, found.answer) == ({0}, [True, False], None)
    learned.draws.regions = [(0, 0), (0, 4)]
    assert learned.for_shorter(torch.device("cpu")) is None


def test_no_memory_beside_other_graphs(folder, monkeypatch):
    """The others go, and are made anew in their turn."""

    class Small(StandIn):
        def record(self, body, generators=()):
            if sum(not graph.dropped for graph in self.graphs) == 2:
                raise torch.OutOfMemoryError("none left")
            return super().record(body, generators)

    monkeypatch.setattr(enabled, "RECORDER", Small)
    said = check(folder, 9, 7, make=lambda step: batch(step, length=[8, 8, 9, 9, 9, 8, 8, 9, 8][step]))
    assert (said.captures, said.graphs, set(said.eager)) == (5, 1, {"the first of its form"})
