"""Memory of graphs without a GPU: what waits on the host, what a caller holds, and where there is little of it."""

import pytest
import torch

peft = pytest.importorskip("peft", reason="peft is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from bitshard import graphs  # noqa: E402
from bitshard.graphs import enabled, masks, offload, pair, record  # noqa: E402
from helpers.graph_twins import adapted, batch, check  # noqa: E402
from helpers.graphs import StandIn  # noqa: E402

pytestmark = pytest.mark.usefixtures("played_graphs")


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_activations_on_the_host(folder, monkeypatch, dropout):
    """Inputs of checkpointed layers wait in memory that all forms share."""
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


def test_no_other_hooks_in_a_recording():
    """Those of the caller, of whom one may stand inside another, are there again afterwards."""
    top = torch._C._autograd._top_saved_tensors_default_hooks
    host = offload.HostMemory()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        outer = top(True)
        with torch.autograd.graph.save_on_cpu():
            inner = top(True)
            with host.layers(torch.nn.Module()):
                assert top(True) is None
            assert top(True) == inner
        assert top(True) == outer
    assert top(True) is None


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


@pytest.mark.parametrize("order", [[2, 1, 0], [0, 2, 1]])
def test_inputs_come_back_as_they_left(monkeypatch, order):
    """Of each layer its own, whichever comes next, and however the layer's memory is used meanwhile."""
    monkeypatch.setattr(offload, "SMALLEST", 1)
    host, inputs = offload.HostMemory(), [torch.full((4,), float(n), requires_grad=True) for n in range(3)]
    shared = torch.ones(4)
    with host.layers(torch.nn.Module()):
        kept = [host._pack(tensor) for tensor in inputs]
        assert host._pack(shared) is shared and host._unpack(shared) is shared
    with torch.no_grad():
        for tensor in inputs:
            tensor.fill_(-1)
    assert [host._unpack(kept[n]).tolist() for n in order] == [[float(n)] * 4 for n in order]


def test_a_recording_that_failed_leaves_nothing(monkeypatch):
    """What it had begun to copy is no business of the next one."""
    monkeypatch.setattr(offload, "SMALLEST", 1)
    host, tensor = offload.HostMemory(), torch.ones(4, requires_grad=True)
    with pytest.raises(RuntimeError, match="in the middle"), host.layers(torch.nn.Module()):
        host._pack(tensor)
        host._fetch(0)
        raise RuntimeError("in the middle")
    assert host._leaving and host._ahead
    host.forget()
    assert not (host._kept or host._leaving or host._ahead)
    host._leaving.append((tensor, None))
    with host.layers(torch.nn.Module()):
        assert not (host._kept or host._leaving or host._ahead)


@pytest.mark.parametrize(
    "facts, share, short",
    [
        ({}, 1.0, False),
        ({"free": 124}, 1.0, True),  # 124 are left, 375 wanted
        ({"free": 124}, 0.3, False),
        ({"fraction": 0.9}, 1.0, True),
        ({"pool": 0, "free": 0}, 1.0, False),
        ({"backend": "cudaMallocAsync", "free": 0}, 1.0, False),  # has no snapshot
    ],
)
def test_short_of_memory(monkeypatch, facts, share, short):
    """Of a GPU of 1,300 bytes: 800 are reserved, of which the pool has 300 and tensors 500."""
    seen = {"free": 500, "fraction": 1.0, "pool": 300, "backend": "native"} | facts
    segments = [{"total_size": 500, "segment_pool_id": (0, 0)}, {"total_size": seen["pool"], "segment_pool_id": (0, 1)}]
    answers = {
        "get_allocator_backend": seen["backend"],
        "memory_snapshot": segments,
        "current_device": 0,
        "mem_get_info": (seen["free"], 1300),
        "memory_reserved": 800,
        "memory_allocated": 500,
        "get_per_process_memory_fraction": seen["fraction"],
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    recorder = record.Recorder.__new__(record.Recorder)
    recorder.pool = (0, 1)
    assert recorder.short_of_memory(share) is short


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


def test_memory_that_is_kept(monkeypatch):
    """By somebody, of the pool of which stock was taken."""
    segments = [{"allocated_size": 50, "segment_pool_id": (0, n)} for n in range(3)]
    pools = iter([(0, 1), (0, 2)])
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    recorder = record.Recorder.__new__(record.Recorder)
    recorder.new_pool()
    recorder.take_stock()
    segments[0]["allocated_size"] = 60
    assert not recorder.holds_more()
    recorder.new_pool()
    segments[2]["allocated_size"] = 60
    assert not recorder.holds_more()
    segments[1]["allocated_size"] = 51
    assert recorder.holds_more()
    recorder.forget_stock()
    assert not recorder.holds_more()


def test_as_many_graphs_are_kept_as_said(folder):
    """More than half of `KEPT`."""
    said = check(folder, 18, 9, make=lambda step: batch(step, length=12 - step % 9))
    assert enabled.KEPT == 16 and (said.captures, said.graphs) == (9, 9)


def test_draws_are_counted_by_size(folder):
    learned = pair.Learned(torch.device("cpu"))
    assert learned.for_shorter(torch.device("cpu")) is None  # no backward came
    learned.used, learned.notes = {0}, [None, masks.MADE]
    found = learned.for_shorter(torch.device("cpu"))
    assert (found.used, found.notes, found.answer) == ({0}, [None, masks.MADE], None)
    learned.notes = [None, object()]  # a mask of blocks, of this call's size
    assert learned.for_shorter(torch.device("cpu")) is None
    learned.notes = []
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
