"""A graph that is played, by calling again what it would launch, for machines without a GPU."""

import torch
from bitshard.graphs.record import Place


class Played:
    """Fills the same results by the same work."""

    def __init__(self, body):
        self.body, self.results, self.replays = body, body(), 0

    def replay(self):
        self.replays += 1
        trained = self.body.__self__._trained
        kept = [p.grad for p in trained]
        for result, new in zip(self.results, self.body(), strict=True):
            result.copy_(new.detach())
        for p, grad in zip(trained, kept, strict=True):
            p.grad = grad


class StandIn:
    """In the place of `bitshard.graphs.record.Recorder`: a graph runs its body again, at its launch and not before.

    What a pool of memory does to others is done by hand: before each launch of a forward all that any graph of the pool
    has left is overwritten, so that a result, gradient or input that was kept by its place only is garbage.
    """

    device = "cpu"

    def __init__(self):
        self.graphs, self.kept = [], []

    def record(self, body, generators=()):
        self.graphs.append(Again(body))
        return self.graphs[-1]

    def place(self, tensor):
        self.kept.append(Kept(tensor))
        return self.kept[-1]

    def before_launch(self):
        for place in self.kept:
            place.spoil()

    def recover(self):
        pass

    def tells(self):
        return True

    def take_stock(self):
        pass

    def forget_stock(self):
        pass

    def holds_more(self):
        return False

    def short_of_memory(self, share):
        return False

    def give_back(self):
        for place in self.kept:  # somebody else's from now on
            place.spoil()

    def new_pool(self):
        pass

    def fork(self, streams):
        assert not list(streams)

    def join(self, streams):
        assert not list(streams)


class Again:
    """A graph whose results are where those of its first launch were."""

    def __init__(self, body):
        self.body, self.results, self._fixed, self.replays, self.dropped = body, None, None, 0, False

    def replay(self):
        assert not self.dropped, "a graph was launched after it was dropped"
        self.replays += 1
        new = self.body()
        if self._fixed is None:
            self.results = self._fixed = new
        else:
            for fixed, tensor in zip(self._fixed, new, strict=True):
                fixed.copy_(tensor)

    def forget(self):
        self.results = None

    def drop(self):
        self.dropped = True


class Kept:
    """A place whose memory stays, for there is no pool that has it."""

    def __init__(self, tensor):
        self._tensor, self._place = tensor, Place.of(tensor)
        self.bytes = self._place.bytes

    def tensor(self):
        return self._place.tensor()

    def spoil(self):
        if self._tensor.is_floating_point():
            self._place.tensor().fill_(float("nan"))
        elif self._tensor.dtype != torch.bool:
            self._place.tensor().fill_(torch.iinfo(self._tensor.dtype).min)
