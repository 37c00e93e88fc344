"""What a training step takes and what limits it, on a card and a number of them: `Time(plan, card, ...)`.

The operations of a step are listed without a GPU (`bitshard.planning.work`). Products with packed weights take what the
plan of the C core says (`_C.plan_linear_4bit`), which for Hopper was measured; everything else what it moves or
multiplies, by rates of the card. Gathers run beside products, and the longer of both counts. Without graphs the step
takes what the host needs to launch it, if that is longer. docs/plan.md#how-long-a-step-takes.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from bitshard import _C
from bitshard.planning import cards
from bitshard.planning.cards import Card
from bitshard.planning.work import Op, Work

if TYPE_CHECKING:
    from bitshard.planning import Plan

# Fitted to the graphs of benchmarks/results/qlora_step_h200_202611.md: fused and peft's, 512 and 2,048 tokens.
PASSES = 0.60  # of the memory's GB/s on paper: elementwise operations, and products with adapters
DENSE, ATTENTION = 0.66, 0.35  # of the TFLOP/s on paper: products in 16 bits, attention
LAUNCH = 2e-6  # seconds of a kernel beside what it moves
# Fitted to the eager steps of that record, 512 tokens, on four cores: seconds of the host.
HOST = 44e-6  # a kernel, with all Python on its way
PEFT = 88e-6  # a forward of peft's layer besides
FITTED = "qlora_step_h200"

ARCHITECTURES = "75,80,90a"  # as a wheel has them
_BF16, _F16 = 2, 1  # of `_C.plan_linear_4bit`

PACKED, OTHER, MEMORY, LINKS, HOSTS = "packed weights", "other products", "memory", "links", "host"


class Part(NamedTuple):
    """What a moment of a step waits for.

    Attributes:
        moment, limit: names.
        seconds.
        source: "measured: RECORD", a file of benchmarks/results, or "modelled" and by what.
    """

    moment: str
    limit: str
    seconds: float
    source: str


class Way(NamedTuple):
    """How a step is run.

    Attributes:
        graphs: as CUDA graphs; else eagerly.
        fused: adapters by `bitshard.lora` (BITSHARD_FUSE); else peft's.
        accumulate: batches before the optimizer steps.
        replicas: groups of the job's GPUs, each with all weights: HSDP, or DDP of single GPUs.
        link, across: to other GPUs of the group, and between groups: names or GB/s; None: the card's own.
        host_us: microseconds of the host for a kernel; None: what was measured.
    """

    graphs: bool = True
    fused: bool = True
    accumulate: int = 1
    replicas: int = 1
    link: str | None = None
    across: str | None = None
    host_us: float | None = None

    def checked(self) -> Way:
        """Itself. ValueError with the number that makes no sense."""
        for name in ("accumulate", "replicas"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.host_us is not None and not 0 < self.host_us < 1e6:
            raise ValueError(f"host_us is {self.host_us:g}, expected more than 0 microseconds for a kernel")
        for each in (self.link, self.across):
            if each is not None:
                cards.link(each)
        return self


class Layer(NamedTuple):
    """{limit: seconds} of a decoder layer's moments, and seconds of the host in an eager step."""

    forward: dict[str, float]
    again: dict[str, float]
    backward: dict[str, float]
    host: float


def _total(parts: dict[str, float]) -> float:
    return sum(parts.values())


class Time:
    """A step of a plan's job on `plan.job.gpus * way.replicas` cards.

    Args:
        plan: of 4-bit layers; ValueError for others.
        card: a name or rates, see `cards.card`.
        way: how it is run.

    ValueError also where the model's code does not run on the meta device.
    """

    def __init__(self, plan: Plan, card: Card | str, way: Way | None = None):
        if plan.job.bits != 4 or plan.job.library != "bitshard":
            raise ValueError("the time of a step is planned for bitshard's 4-bit layers alone")
        if plan.estimated:
            raise ValueError(f"{plan.model.name}: its operations cannot be listed without a GPU: {plan.estimated}")
        self.plan, self.card = plan, cards.card(card) if isinstance(card, str) else card
        self.way = (way or Way()).checked()
        self._ops: dict[Op, tuple[str, float]] = {}

    @property
    def left_out(self) -> str | None:
        """Why there is no figure of a whole step, where there is none: what was compared was off by more than 15 %."""
        if not self.plan.model.fused_attention:
            return "this model's attention runs as single operations, and gpt-oss-120b's step took a fifth longer"
        if not self.way.graphs and self.plan.memory.ranks > 1:
            return "the host limits eager steps under FSDP2, and what FSDP2 takes of its time is not modelled"
        return None

    # -- operations --

    def _of(self, ops: list[Op]) -> dict[str, float]:
        found = dict.fromkeys((PACKED, OTHER, MEMORY), 0.0)
        for op in ops:
            if op not in self._ops:
                self._ops[op] = self._packed(op) if op.kind in ("product", "stack") else self._plain(op)
            limit, seconds = self._ops[op]
            found[limit] += seconds
        return found

    def _plain(self, op: Op) -> tuple[str, float]:
        reading = op.moved / (self.card.gb * 1e9 * PASSES)
        multiplying = op.flops / (self.card.tflops * 1e12 * (ATTENTION if op.kind == "attention" else DENSE))
        return (OTHER if multiplying > reading else MEMORY), max(reading, multiplying) + LAUNCH

    def _packed(self, op: Op) -> tuple[str, float]:
        job = self.plan.job
        *stack, rows, N, K = op.sizes
        experts = stack[0] if stack else 1
        if stack and not job.experts_4bit:
            return self._plain(Op("dense", 2.0 * (experts * N * K + rows * (N + K)), 2.0 * rows * N * K))
        planned = _C.plan_grouped_linear_4bit if stack else _C.plan_linear_4bit
        found = planned(
            *stack, rows, N, K, _BF16 if self.card.sm >= 80 else _F16, self.card.sm, self.card.sms,
            blocksize=job.blocksize, nested=job.nested, gradient=op.gradient, vendor="cublas",
            architectures=ARCHITECTURES,
        )  # fmt: skip
        if 100 <= found["ns"] < 1e12:
            return PACKED, found["ns"] * 1e-9
        # Chosen without an estimate: for few rows, by what reading the weight takes; or panels of experts.
        weight = float(experts * N * K)
        reading = weight * (0.5 + 1 / job.blocksize) / (self.card.gb * 1e9 * cards.READ)
        return PACKED, max(reading, 2.0 * rows * N * K / (self.card.tflops * 1e12 * DENSE)) + LAUNCH

    # -- layers --

    @cached_property
    def _layers(self) -> list[Layer]:
        found, known = [], {}
        with cards.planned_for(self.card):
            for number, unit in enumerate(self.plan.memory.layers):
                if unit.kind not in known:
                    work = self.plan.worked.layer(number, unit.kind, self.plan.job, self.way.fused)
                    known[unit.kind] = self._layer(work, len(unit.adapters) // 2)
                found.append(known[unit.kind])
        return found

    def _layer(self, work: Work, adapted: int) -> Layer:
        """The last product with a packed weight is not made again where a layer is checkpointed."""
        again = []
        if self.plan.job.checkpointing:
            last = max((i for i, op in enumerate(work.forward) if op.kind == "product"), default=-1)
            again = [op for i, op in enumerate(work.forward) if i != last]
        kernels = len(work.forward) + len(again) + len(work.backward)
        host = kernels * self._host_us * 1e-6
        if not self.way.fused:
            host += adapted * (2 if again else 1) * PEFT
        return Layer(self._of(work.forward), self._of(again), self._of(work.backward), host)

    @property
    def _host_us(self) -> float:
        return HOST * 1e6 if self.way.host_us is None else self.way.host_us

    @cached_property
    def _ends(self) -> tuple[dict[str, float], int]:
        work = self.plan.worked.ends(self.plan.job)
        return self._of(work.forward + work.backward), len(work.forward) + len(work.backward)

    # -- links --

    def _rate(self, name: str) -> float:
        link = cards.link(name)
        return link.gb * link.share * 1e9

    @property
    def _link(self) -> str:
        return self.way.link or self.card.link

    def _gathering(self, size: float) -> float:
        """Seconds of the links until a unit of so many bytes is whole."""
        ranks = self.plan.memory.ranks
        if ranks == 1:
            return 0.0
        seconds = size * (ranks - 1) / ranks / self._rate(self._link)
        return seconds + (size / ranks / self._rate(self.card.host) if self.plan.job.offload_weights else 0.0)

    def _copying(self, size: float) -> float:
        """Seconds in which FSDP2 copies its shard into a buffer, and the gathered buffer out into the weights."""
        memory = self.plan.memory
        copies = memory.ranks > 1 and self.plan.job.sharding == "fsdp2"
        return 2 * size * (1 + 1 / memory.ranks) / (self.card.gb * 1e9 * PASSES) if copies else 0.0

    def _keeping(self, kept: float) -> float:
        """Seconds of a layer's input on its way to the host, or back."""
        job = self.plan.job
        return kept / self._rate(self.card.host) if job.offload_activations and job.checkpointing else 0.0

    @property
    def _root(self) -> float:
        """Bytes of embeddings and head, which nothing runs beside."""
        memory, job = self.plan.memory, self.plan.job
        if job.vocabulary == "split":
            return 16.0 * job.seq * job.batch * memory.units.hidden * memory.ranks
        return memory.units.embeddings + memory.head()

    def _reducing(self) -> float:
        """Gradients of the first layer's adapters, for those of others come beside products; and of all between
        replicas."""
        memory, seconds = self.plan.memory, 0.0
        if memory.ranks > 1:
            seconds = memory.adapters_of(memory.layers[0]) * (memory.ranks - 1) / memory.ranks / self._rate(self._link)
        if self.way.replicas > 1:
            share = 2 * (self.way.replicas - 1) / self.way.replicas
            seconds += share * memory.adapters() / self._rate(self.way.across or self._link)
        return seconds

    # -- the step --

    @cached_property
    def parts(self) -> list[Part]:
        """What a step waits for, moment by moment; what runs beside something longer is left out."""
        found: dict[tuple[str, str], float] = {}

        def add(moment: str, parts: dict[str, float]) -> None:
            for limit, seconds in parts.items():
                found[moment, limit] = found.get((moment, limit), 0.0) + seconds * self.way.accumulate

        memory = self.plan.memory
        for unit, played, layer in zip(memory.layers, memory.played(), self._layers, strict=True):
            size = memory.gathered(unit)
            gather, keep, copy = self._gathering(size), self._keeping(float(played.kept)), self._copying(size)
            add("forward", layer.forward)
            add("recomputation", layer.again)
            add("backward", layer.backward)
            add("gathers", {MEMORY: 2 * copy})
            for computed in (_total(layer.forward), _total(layer.again) + _total(layer.backward)):
                add("gathers", {LINKS: max(0.0, gather - computed - copy)})
                add("activations to the host and back", {LINKS: max(0.0, keep - max(computed + copy, gather))})
        add("head and loss", self._ends[0])
        add("gathers", {LINKS: self._gathering(self._root), MEMORY: self._copying(self._root)})
        made = [Part(*where, seconds, self._source(*where)) for where, seconds in found.items() if seconds]
        made += self._once()
        idle = 0.0 if self.way.graphs else self.host - sum(part.seconds for part in made)
        return [*made, Part("waiting for launches", HOSTS, idle, self._source("", HOSTS))] if idle > 0 else made

    def _once(self) -> list[Part]:
        """What there is once for all accumulated batches. Graphs reduce each time."""
        memory, rate = self.plan.memory, self.card.gb * 1e9 * PASSES
        moved = 4 * memory.adapters() + 2 * memory.states()  # gradients are read twice: clipped before
        paged = memory.states() / self._rate(self.card.host) if self.plan.job.paged else 0.0
        reducing = self._reducing() * (self.way.accumulate if self.way.graphs else 1)
        found = [("reduce-scatter", LINKS, reducing), ("optimizer, clipping", MEMORY, moved / rate)]
        found.append(("optimizer, clipping", LINKS, paged))
        return [Part(*part, self._source(*part[:2])) for part in found if part[2]]

    def _source(self, moment: str, limit: str) -> str:
        if limit == PACKED and self.card.measured:
            stacks = any(unit.experts for unit in self.plan.memory.layers)
            return "measured: wide_h200" + (", experts_h100" if stacks else "")
        if limit == PACKED:
            return "modelled: gemm_sm80_h100"
        if limit == LINKS:
            hosts = moment in ("activations to the host and back", "optimizer, clipping")
            record = cards.link(self.card.host if hosts else self._link).source
            return f"modelled: share of {record}" if record else "modelled: share assumed"
        if limit == HOSTS and self.way.host_us is not None:
            return "modelled: given"
        return f"modelled: fitted to {FITTED}"

    @cached_property
    def host(self) -> float:
        """Seconds of the host until all kernels of an eager step are launched."""
        seconds = sum(layer.host for layer in self._layers) + self._ends[1] * self._host_us * 1e-6
        return seconds * self.way.accumulate

    @property
    def seconds(self) -> float:
        """Of a step; a lower bound where `left_out` says why."""
        return sum(part.seconds for part in self.parts)

    @property
    def limits(self) -> dict[str, float]:
        """{what is waited for: seconds}, the longest first."""
        found: dict[str, float] = {}
        for part in self.parts:
            found[part.limit] = found.get(part.limit, 0.0) + part.seconds
        return dict(sorted(found.items(), key=lambda each: -each[1]))

    @property
    def cards(self) -> int:
        """All GPUs."""
        return self.plan.memory.ranks * self.way.replicas

    @property
    def tokens(self) -> float:
        """Of all cards in a second."""
        job = self.plan.job
        return job.seq * job.batch * self.cards * self.way.accumulate / self.seconds
