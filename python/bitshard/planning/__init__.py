"""Will this train? The memory of a 4-bit or 8-bit training job, before a GPU is rented: `plan(model, Job(...))`.

The model is built on the meta device, so every language model of transformers that is a decoder alone can be planned,
experts included; one of images and text, for text.
What lies in memory all the time is counted; what a step keeps for backward is found by running one decoder layer of
each kind, and embeddings, head and loss, on the meta device (`bitshard.planning.played`). docs/plan.md.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from bitshard.planning.job import GIB, Job
from bitshard.planning.loading import host, links, loading
from bitshard.planning.memory import Memory, Moment
from bitshard.planning.model import Model
from bitshard.planning.played import Play
from bitshard.planning.work import Worked

__all__ = ["Change", "Job", "Memory", "Model", "Moment", "Plan", "plan"]

# Measured with models of 8 billion parameters (docs/plan.md):
OUTSIDE = 0.75 * GIB  # driver and kernels: outside torch's allocator
OUTSIDE_SHARDED = 1.6 * GIB  # the same with NCCL's buffers, on two GPUs
FRAGMENTS = 0.06  # of what is allocated at the peak: what torch's allocator has to reserve besides


class Change(NamedTuple):
    """An option, or several, that the job could have.

    Attributes:
        name: for people.
        options: {field of Job: value}.
        needs: bytes of a GPU with it.
        fits: whether that is enough.
    """

    name: str
    options: dict[str, Any]
    needs: float
    fits: bool


class Plan:
    """What a job needs.

    Attributes:
        model, job, memory.
        loading: {phase: bytes}, or None where it is not known.
        host, links: {what: bytes}.
    """

    def __init__(self, model: Model, play: Play, job: Job, worked: Worked | None = None):
        self.model, self.job, self._play = model, job, play
        self.worked = worked or Worked(model, play)
        self.memory = Memory(model, play, job)
        self.loading = loading(self.memory)
        self.host, self.links = host(self.memory), links(self.memory)

    @property
    def estimated(self) -> str | None:
        """Why activations are estimated, if they are: the model's code does not run on the meta device."""
        return self._play.estimated

    @property
    def notes(self) -> list[str]:
        """What is not planned, or otherwise than the config may have it, a sentence each."""
        return self.model.notes

    @property
    def peak(self) -> float:
        """Bytes that torch has allocated at the most, loading included."""
        return max([self.memory.worst().total, *(self.loading or {}).values()])

    @property
    def fragments(self) -> float:
        """Bytes that torch's allocator reserves beyond that."""
        return FRAGMENTS * self.peak

    @property
    def outside(self) -> float:
        """Bytes outside torch's allocator."""
        return OUTSIDE if self.memory.ranks == 1 else OUTSIDE_SHARDED

    @property
    def needs(self) -> float:
        """Bytes of a GPU."""
        return self.peak + self.fragments + self.outside

    @property
    def fits(self) -> bool:
        """Whether a GPU has that much."""
        return self.needs <= self.job.gib * GIB

    def other(self, **options: Any) -> Plan:
        """The plan of the same model with other options. ValueError if they make no sense together."""
        return Plan(self.model, self._play, self.job._replace(**options), self.worked)

    def bitsandbytes(self) -> Plan | None:
        """The same with bitsandbytes: whole weights while loading, whole scales, experts in 16 bits. None where it
        cannot: it shards no 8-bit layers."""
        if self.job.bits == 8 and self.job.sharding != "none":
            return None
        return self.other(library="bitsandbytes", vocabulary="gathered", load="auto")

    def changes(self) -> list[Change]:
        """What each option alone would save, those that save something."""
        return [change for change in map(self._changed, _options(self.job)) if change and change.needs < self.needs]

    def remedy(self) -> Change | None:
        """The first options, in the order of what they cost a step, with which it fits; None: there are none."""
        taken: list[tuple[str, dict[str, Any]]] = []
        for option in _options(self.job):
            change = self._changed(*[_joined([*taken, option])])
            if change is None or change.needs >= self._changed_needs(taken):
                continue
            taken.append(option)
            if change.fits:
                return self._changed(_joined(self._needed(taken)))
        return None

    def _needed(self, taken: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
        """Those of the options without which it does not fit, the costly ones asked first."""
        for option in reversed(taken[:-1]):
            rest = [each for each in taken if each is not option]
            change = self._changed(_joined(rest))
            if change is not None and change.fits:
                taken = rest
        return taken

    def _changed_needs(self, taken: list[tuple[str, dict[str, Any]]]) -> float:
        change = self._changed(_joined(taken)) if taken else None
        return self.needs if change is None else change.needs

    def _changed(self, option: tuple[str, dict[str, Any]]) -> Change | None:
        name, options = option
        try:
            other = self.other(**options)
        except ValueError:  # options that exclude one another
            return None
        return Change(name, options, other.needs, other.fits)


def _joined(options: list[tuple[str, dict[str, Any]]]) -> tuple[str, dict[str, Any]]:
    merged: dict[str, Any] = {}
    for _, each in options:
        merged |= each
    return ", ".join(name for name, _ in options), merged


def _options(job: Job) -> list[tuple[str, dict[str, Any]]]:
    """What a job could change, first what costs a step least."""
    found: list[tuple[str, dict[str, Any]]] = [
        ("nested scales", {"nested": True}),
        ("4-bit experts", {"experts_4bit": True}),
    ]
    found.append(("8-bit optimizer", {"optimizer": "adamw_8bit"}))
    found.append(("adapters in bfloat16", {"lora_dtype": "bfloat16"}))
    if job.sharding == "fsdp2":
        found.append(("bitshard.fsdp.gather_in_place", {"vocabulary": "in_place"}))
        found.append(("weights loaded by rows (DistributedConfig)", {"load": "native"}))
    found.append(("loss in chunks of 512 tokens", {"loss_chunk": 512}))
    found.append(("gradient checkpointing", {"checkpointing": True}))
    found.append(("activations on the host", {"checkpointing": True, "offload_activations": True}))
    found.append(("4-bit layers", {"bits": 4}))
    found.append(("4-bit head", {"head_4bit": True}))
    if job.sharding != "none":
        found += [(f"{gpus} GPUs", {"gpus": gpus}) for gpus in (4, 8, 16) if gpus > job.gpus]
        found.append(("weights on the host", {"offload_weights": True}))
    else:
        found += [(f"{gpus} GPUs with FSDP2", {"gpus": gpus, "sharding": "fsdp2"}) for gpus in (2, 4, 8)]
    if job.seq >= 1024:
        found.append((f"sequences of {job.seq // 2} tokens", {"seq": job.seq // 2}))
    return [(name, options) for name, options in found if any(getattr(job, k) != v for k, v in options.items())]


def plan(source: str | os.PathLike | dict | Model, job: Job | None = None, **options: Any) -> Plan:
    """What a job needs.

    Args:
        source: a config.json, a folder with one, a dictionary of its values, a known name
            (`bitshard.planning.shapes.KNOWN`), or a Model.
        job: what is trained where; None: one GPU of 24 GiB.
        options: fields of Job, over those of `job`.

    ValueError where the job makes no sense or names layers that the model has not, or where that is not one of
    transformers, or an encoder-decoder; FileNotFoundError for a name that is no file and not known.
    """
    job = (job or Job())._replace(**options).checked()
    model = source if isinstance(source, Model) else Model(source)
    model.require(job)
    return Plan(model, Play(model), job)
