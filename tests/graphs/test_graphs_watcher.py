"""Graphs go before the process group does, and a launch that never ends is seen (bitshard.graphs.watcher)."""

import sys
import threading
import time

import pytest
import torch
from bitshard import graphs
from bitshard.graphs import enabled, watcher
from fsdp.launch import run
from helpers.graphs import StandIn


class Event:
    """Of a launch that ends when `over` is set."""

    def __init__(self):
        self.over = False

    def query(self):
        return self.over


@pytest.fixture(autouse=True)
def nothing_launched(monkeypatch):
    monkeypatch.setattr(watcher, "_last", None)


def test_a_late_launch(monkeypatch):
    assert not watcher.late(1.0)
    event = Event()
    monkeypatch.setattr(watcher, "_last", (event, time.monotonic() - 5.0))
    assert watcher.late(4.0) and not watcher.late(6.0)
    event.over = True
    assert not watcher.late(4.0) and watcher._last is None


def test_a_group_that_is_being_destroyed():
    """Seen from another thread, while torch's function waits."""
    assert not watcher.destroying()
    source = compile("def destroy_process_group(wait):\n    wait()\n", "torch/distributed/distributed_c10d.py", "exec")
    scope = {}
    exec(source, scope)
    seen = []
    scope["destroy_process_group"](lambda: seen.append(watcher.destroying()))
    assert seen == [True] and not watcher.destroying()


def test_torch_has_that_function():
    code = torch.distributed.destroy_process_group
    while hasattr(code, "__wrapped__"):
        code = code.__wrapped__
    assert code.__name__ == "destroy_process_group" and code.__code__.co_filename.endswith("distributed_c10d.py")


@pytest.fixture
def captured(monkeypatch):
    monkeypatch.setattr(enabled, "RECORDER", StandIn)
    model = torch.nn.Linear(4, 4).train()
    graphs.enable(model)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
    assert graphs.report(model).graphs == 1
    return model


def test_an_error_of_one_model_keeps_no_others_graphs(captured, monkeypatch):
    class Failing:
        def drop(self):
            raise torch.OutOfMemoryError("none left")

    made = vars(captured)["_compiled_call_impl"]._recorder.graphs
    others = Failing(), vars(captured)["_compiled_call_impl"], Failing()
    monkeypatch.setattr(watcher, "_known", others)
    with pytest.raises(torch.OutOfMemoryError, match="none left"):
        watcher.drop_all()
    assert len(made) == 2 and all(graph.dropped for graph in made)


def test_all_graphs_are_dropped(captured):
    made = vars(captured)["_compiled_call_impl"]._recorder.graphs
    watcher.drop_all()
    assert len(made) == 2 and all(graph.dropped for graph in made)
    for _ in range(2):
        captured(torch.ones(2, 4)).sum().backward()
    assert graphs.report(captured).captures == 2


def test_the_thread_drops_graphs_while_a_group_goes(captured, monkeypatch):
    """In a group of one process, by torch's own function, held in the middle."""
    monkeypatch.setattr(watcher, "PERIOD", 0.01)
    monkeypatch.setattr(watcher, "_thread", None)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    held = threading.Event()
    update = torch.distributed.distributed_c10d._update_default_pg
    monkeypatch.setattr(
        torch.distributed.distributed_c10d, "_update_default_pg", lambda group: (held.wait(10), update(group))
    )
    watcher.knows(vars(captured)["_compiled_call_impl"])
    assert watcher._thread.daemon and watcher._thread.is_alive()
    ending = threading.Thread(target=torch.distributed.destroy_process_group)
    ending.start()
    try:
        for _ in range(500):
            if graphs.report(captured).graphs == 0:
                break
            time.sleep(0.01)
        assert graphs.report(captured).graphs == 0 and ending.is_alive()
    finally:
        held.set()
        ending.join()


LATE = """
import datetime, time, torch
from bitshard.graphs import watcher
class Never:
    def query(self): return False
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1,
    timeout=datetime.timedelta(milliseconds=300))
watcher.PERIOD = 0.05
watcher._last = Never(), time.monotonic()
enabled = type("Enabled", (), {"drop": lambda self: None})()
watcher.knows(enabled)
time.sleep(30)
"""


def test_a_rank_that_waits_too_long_ends():
    begin = time.monotonic()
    said = run([sys.executable, "-c", LATE], 60, fails=True)
    assert "rank 0 has waited for 0 s, the timeout of its process group" in said and time.monotonic() - begin < 25
