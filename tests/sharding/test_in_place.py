"""The gather that writes into a parameter waits for the streams that compute; streams are played, no GPU is needed."""

import contextlib

import pytest
import torch
from bitshard.sharding.weights import in_place
from torch import nn

GPU = torch.device("cuda", 0)


class Stream:
    """A stream that notes which others it waits for."""

    def __init__(self, name, device=GPU):
        self.name, self.device, self.waited = name, device, []

    def wait_stream(self, other):
        self.waited.append(other.name)


class Played:
    """torch.cuda's streams: which is the current one, and on which memory was allocated."""

    def __init__(self, monkeypatch):
        self.default = self.current = Stream("default")
        self.allocated = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: self.default)
        monkeypatch.setattr(torch.cuda, "stream", self.use)
        monkeypatch.setattr(in_place, "gathered_output", self.output)

    @contextlib.contextmanager
    def use(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def output(self, record, numel, dtype, device):
        self.allocated.append(self.current.name)
        return torch.empty(numel, dtype=dtype)


@pytest.fixture
def played(monkeypatch):
    return Played(monkeypatch)


def gather_of(model):
    return in_place.InPlaceAllGather(None, in_place.ComputeStreams(model))


def allocate(played, gather):
    """As FSDP2 does, on a stream of its own; the streams that were waited for."""
    own = Stream("gathering")
    with played.use(own):
        gather.allocate((8,), dtype=torch.float32, device=GPU)
    return own.waited


def test_under_a_stream_of_one_s_own(played):
    model = nn.Linear(2, 2)
    gather = gather_of(model)
    with played.use(Stream("mine")):
        model(torch.zeros(1, 2))
        assert allocate(played, gather) == ["mine"]
    assert played.allocated == ["mine"]
    assert allocate(played, gather) == ["mine"]  # in a backward, which runs where the forward did


def test_on_the_default_stream(played):
    model = nn.Linear(2, 2)
    gather = gather_of(model)
    assert allocate(played, gather) == ["default"]  # before the first forward
    model(torch.zeros(1, 2))
    assert allocate(played, gather) == ["default"]


def test_a_step_on_another_stream_waits_for_both(played):
    """The memory is that which the step before may still read."""
    model = nn.Linear(2, 2)
    gather = gather_of(model)
    for name in ("first", "second"):
        with played.use(Stream(name)):
            model(torch.zeros(1, 2))
    assert allocate(played, gather) == ["first", "second"] and played.allocated == ["second"]


def test_streams_are_not_collected_without_end(played):
    model = nn.Linear(2, 2)
    gather = gather_of(model)
    for i in range(100):
        with played.use(Stream(str(i))):
            model(torch.zeros(1, 2))
    assert allocate(played, gather) == ["96", "97", "98", "99"]
