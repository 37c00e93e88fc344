"""A graph that is played, by calling again what it would launch, for machines without a GPU."""


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
