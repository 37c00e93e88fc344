"""Bytes on one GPU: what a job holds, and the moments of a step when most is there."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from bitshard.planning.job import OPTIMIZERS, Job
from bitshard.planning.model import Matrix, Model, Parts, Unit
from bitshard.planning.played import Layer, Play

PANELS = 64 << 20  # bound of the panels into which products decode weights, cuBLAS' workspace for them included
CUBLAS = 32 << 20  # torch's workspace for the products of the adapters, on Hopper

CODES = {4: "4-bit weights", 8: "8-bit weights"}
SCALES, SECOND = "scales", "second level of the scales"
VOCABULARY, DENSE = "embeddings and head", "other 16-bit weights"
ADAPTERS, GRADIENTS, STATES = "adapters", "gradients of adapters", "states of the optimizer"
KEPT, COMPUTED, LOGITS = "activations kept for backward", "activations of one layer", "logits and loss"
GATHERED, WORKSPACES = "gathered units", "workspaces"


class Moment(NamedTuple):
    """One moment of a step.

    Attributes:
        name: what is computed.
        parts: {part: bytes}, in all.
        buffer: of the bytes, those of the stream in which FSDP2 gathers.
    """

    name: str
    parts: dict[str, float]
    buffer: float = 0.0

    @property
    def total(self) -> float:
        """Bytes."""
        return sum(self.parts.values())


class Memory:
    """What one GPU holds in a job.

    FSDP2 gathers a unit into one flat buffer and copies it out into the weights: twice its size for a moment. In
    forward the flat buffer stays until the next unit has been copied out, that of the last unit, the head, until the
    loss is there. In backward the next unit is gathered while one is computed; behind the first layer that is the
    embedding, in vain. FSDP1 computes with views of the flat buffer.

    Args:
        model, play: of the same model.
        job: what is trained where. ValueError if it makes no sense.
    """

    def __init__(self, model: Model, play: Play, job: Job):
        self.job, self.model, self.play = job.checked(), model, play
        self.units: Parts = model.parts(job)
        self.layers = self.units.layers
        self.ranks = 1 if job.sharding == "none" else job.gpus
        self.scales_sharded = job.library == "bitshard" and job.sharding == "fsdp2"
        self._on_gpu = 0.0 if job.offload_weights else 1.0
        self._played = [play.layer(number, unit.kind, job) for number, unit in enumerate(self.layers)]
        self._ends = play.ends(job)

    # -- weights --

    @property
    def _all(self) -> tuple[Unit, ...]:
        return (*self.layers, self.units.rest)

    def codes(self, weight: Matrix) -> float:
        """Two weights in a byte, or one."""
        return weight.elements * self.job.bits / 8

    def scales(self, weight: Matrix) -> float:
        """Bytes: one for each block, four where scales are not nested; in 8-bit weights four for each row."""
        if self.job.bits == 8:
            return weight.rows * 4.0
        return weight.elements / self.job.blocksize * (1 if self.job.nested else 4)

    def second_level(self, weight: Matrix) -> float:
        """Bytes of the second level of nested scales: a float32 for 256 blocks, whole on every rank."""
        return weight.elements / self.job.blocksize / 256 * 4 if self.job.nested else 0.0

    def head(self) -> float:
        """The head, whole."""
        packed = self.units.packed_head
        return self.units.head + (self.codes(packed) + self.scales(packed) if packed else 0.0)

    def adapters_of(self, unit: Unit) -> float:
        """Adapters of a unit, whole."""
        return sum(unit.adapters) * self.job.lora_bytes

    def gathered(self, unit: Unit) -> float:
        """A unit as its products need it, with its scales where they are sharded."""
        scales = sum(map(self.scales, unit.packed)) if self.scales_sharded else 0.0
        return sum(map(self.codes, unit.packed)) + scales + unit.dense + self.adapters_of(unit)

    def played(self) -> list[Layer]:
        """What each decoder layer keeps and needs."""
        return self._played

    def whole(self) -> dict[str, float]:
        """{part: bytes} of all weights on one device that is not sharded."""
        packed = [weight for unit in self._all for weight in unit.packed]
        return {
            CODES[self.job.bits]: sum(map(self.codes, packed)),
            SCALES: sum(map(self.scales, packed)),
            SECOND: sum(map(self.second_level, packed)),
            VOCABULARY: self.units.embeddings + self.head(),
            DENSE: sum(unit.dense for unit in self._all),
        }

    def shard(self) -> dict[str, float]:
        """{part: bytes} of the weights that one rank keeps, on whichever device."""
        shares = {SCALES: self.ranks if self.scales_sharded else 1, SECOND: 1}
        return {part: size / shares.get(part, self.ranks) for part, size in self.whole().items()}

    def resident(self) -> dict[str, float]:
        """{part: bytes} of the weights that are on the GPU all the time."""
        stay = {SECOND: 1.0, VOCABULARY: 1.0 if self.job.vocabulary == "split" else self._on_gpu}
        if not self.scales_sharded:
            stay[SCALES] = 1.0
        return {part: size * stay.get(part, self._on_gpu) for part, size in self.shard().items()}

    def adapters(self) -> float:
        """Adapters of one rank on the GPU; `shard_adapters` leaves them there where each rank loaded its rows."""
        on_gpu = 1.0 if self.job.way == "native" else self._on_gpu
        return sum(map(self.adapters_of, self._all)) / self.ranks * on_gpu

    def states(self) -> float:
        """The optimizer's states of one rank, wherever they are."""
        multiple, more = OPTIMIZERS[self.job.optimizer]
        return sum(sum(unit.adapters) for unit in self._all) / self.ranks * (multiple * self.job.lora_bytes + more)

    def states_on_gpu(self) -> float:
        """Those on the GPU."""
        on_gpu = 1.0 if self.job.way == "native" else self._on_gpu
        return 0.0 if self.job.paged else self.states() * on_gpu

    # -- moments of a step --

    def moments(self) -> list[Moment]:
        """The moments of a step, in their order."""
        return self._moments

    @cached_property
    def _moments(self) -> list[Moment]:
        found = [*self._forward(), *self._loss(), *self._backward()]
        return [*found, self._moment("optimizer", {GRADIENTS: self.adapters()})]

    @cached_property
    def _always(self) -> dict[str, float]:
        """{part: bytes} of what is there at every moment."""
        own = {ADAPTERS: self.adapters(), STATES: self.states_on_gpu(), WORKSPACES: float(PANELS + CUBLAS)}
        return {**self.resident(), **own}

    def worst(self) -> Moment:
        """The moment when most is allocated."""
        return max(self.moments(), key=lambda moment: moment.total)

    def pools(self) -> float:
        """Bytes that torch's allocator would like to reserve: it keeps a pool for each stream."""
        moments = self.moments()
        return max(each.total - each.buffer for each in moments) + max(each.buffer for each in moments)

    def _moment(self, name: str, more: dict[str, float], buffer: float = 0.0) -> Moment:
        parts = dict(self._always)
        stays = self.units.embeddings if self._gathers and self.units.tied else 0  # in the root unit, which stays
        more = {**more, GATHERED: more.get(GATHERED, 0.0) + stays + buffer}
        for part, size in more.items():
            parts[part] = parts.get(part, 0.0) + size
        return Moment(name, {part: size for part, size in parts.items() if size}, buffer)

    @property
    def _gathers(self) -> bool:
        """Whether embeddings and head are gathered."""
        return self.ranks > 1 and self.job.vocabulary != "split"

    def _kept(self, layers: int) -> float:
        """What the first `layers` decoder layers keep for backward; two inputs if they go to the host."""
        if not self.job.checkpointing:
            return float(sum(layer.saved for layer in self._played[:layers]))
        if self.job.offload_activations:
            return float(2 * max(layer.kept for layer in self._played))
        return float(sum(layer.kept for layer in self._played[:layers]))

    def _unit(self, number: int) -> tuple[float, float]:
        """A gathered decoder layer, and the buffer that it is gathered into."""
        if self.ranks == 1:
            return 0.0, 0.0
        size = self.gathered(self.layers[number])
        return size, size if self.job.sharding == "fsdp2" else 0.0

    def _forward(self) -> list[Moment]:
        last = len(self.layers) - 1
        unit, buffer = self._unit(last)
        embeddings = self.units.embeddings if self._gathers and not self.units.tied else 0
        copied = embeddings if self.job.sharding == "fsdp2" and self.job.vocabulary == "gathered" else 0
        computed = {GATHERED: unit, KEPT: self._kept(last + 1), COMPUTED: self._played[last].forward}
        return [
            self._moment("embeddings", {GATHERED: embeddings}, copied),
            self._moment("last layer, forward", computed, buffer),
        ]

    def _loss(self) -> list[Moment]:
        kept = self._kept(len(self.layers))
        head = self.head() if self._gathers and not self.units.tied else 0.0
        forward, backward = self._logits()
        buffer = (head or self._unit(len(self.layers) - 1)[1]) if self.job.sharding == "fsdp2" else 0.0
        steps = [("loss", head, forward, buffer), ("loss, backward", head, backward, 0.0)]
        if self.job.vocabulary == "in_place":
            steps = self._loss_in_place(head, forward, backward)
        return [
            self._moment(name, {KEPT: kept, GATHERED: gathered, LOGITS: logits}, buffer)
            for name, gathered, logits, buffer in steps
        ]

    def _loss_in_place(self, head: float, forward: float, backward: float) -> list[tuple[str, float, float, float]]:
        """With `gather_in_place` and a head in a unit of its own, which is freed after its forward.

        The last norm's gather has freed the last layer's flat buffer before the head comes, and the head comes back
        when the gradient of the logits is there: until then the loss has no head beside it. Chunks have.
        """
        chunks = bool(self.job.loss_chunk)
        beside, logits = (head, backward) if chunks else (0.0, float(self._ends.logits))
        return [
            ("head, forward", head, logits, 0.0),
            ("loss", beside, forward, 0.0),
            ("loss, backward", beside, backward, 0.0),
            ("head, backward", head, logits, 0.0),
        ]

    def _logits(self) -> tuple[float, float]:
        """Bytes of head and loss, forward and backward.

        A split head has t V / N logits of 8 bytes for a chunk of t tokens, and 8 N T H for the states of all ranks.
        """
        job = self.job
        if job.vocabulary != "split":
            return float(self._ends.forward), float(self._ends.backward)
        tokens = job.seq * job.batch
        chunk = min(job.loss_chunk or 128, tokens)
        size = 8.0 * (chunk * self.units.vocabulary / job.gpus + job.gpus * tokens * self.units.hidden)
        return size, size

    def _backward(self) -> list[Moment]:
        """The decoder layers in backward: the last, the first, and the one with most."""
        found = []
        gradients = self.adapters_of(self.units.rest) / self.ranks
        for number in reversed(range(len(self.layers))):
            unit, buffer = self._unit(number)
            ahead = self._unit(number - 1)[1] if number else self._embeddings_in_vain()
            parts = {GATHERED: unit, GRADIENTS: gradients, KEPT: self._kept(number + self.job.checkpointing)}
            parts[COMPUTED] = float(self._played[number].backward)
            found.append(self._moment(f"layer {number}, backward", parts, max(buffer, ahead)))
            gradients += self.adapters_of(self.layers[number]) / self.ranks
        most = max(found, key=lambda moment: moment.total)
        return [moment for moment in found if moment in (found[0], most, found[-1])]

    def _embeddings_in_vain(self) -> float:
        if self.job.sharding != "fsdp2" or self.units.tied or self.job.vocabulary != "gathered":
            return 0.0
        return float(self.units.embeddings)
