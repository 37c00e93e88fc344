"""What looks on while a job trains: times of its steps, their losses, peak memory; and nothing in between.

A GPU is waited for at both ends of a window of steps only. Clipping and the optimizer alone, and launches, are looked
at in steps of their own behind the last window.
"""

from __future__ import annotations

import statistics
import time

import torch
from transformers import TrainerCallback

GIB = 2**30
SPLIT = 3  # steps in which clipping and the optimizer are timed alone
PROFILED = 2
FIRST_LOSSES = 8  # steps whose losses are kept; Trainer adds them up until it logs, which is later
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")


def now() -> float:
    """Seconds, when the GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Clock:
    """Told of each step by `end_of_step`: `warm` that count for nothing, `windows` times `steps`, SPLIT, PROFILED.

    losses: a run that is for its losses only: so many steps, all of whose losses are kept, and no other.
    """

    def __init__(self, warm: int, windows: int, steps: int, profile: bool, losses: int = 0):
        self.kept_losses = losses or min(FIRST_LOSSES, warm)
        self.steps = steps
        self.marks = [] if losses else [warm + i * steps for i in range(windows + 1)]
        self.timed_end = self.marks[-1] if self.marks else losses
        self.profile_at = self.timed_end + SPLIT if profile and not losses else None
        self.total = self.timed_end + SPLIT * (not losses) + PROFILED * bool(self.profile_at)
        self.times: list[float] = []
        self.parts: dict[str, list[float]] = {"clip_ms": [], "optimizer_ms": []}
        self.memory: dict[str, float] = {}
        self.profile: dict[str, float] = {}
        self._losses: list[tuple[torch.Tensor, bool]] = []
        self._fresh = True
        self._begun = self._profiler = None

    def begin(self) -> None:
        """Before the first step: what preparing took is not counted."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def splits(self, step: int) -> bool:
        """Whether the parts of step `step`, which counts from 1, are timed."""
        return bool(self.marks) and self.timed_end < step <= self.timed_end + SPLIT

    def part_begins(self) -> None:
        self._begun = now()

    def part_ends(self, name: str) -> None:
        """The part of this name has ended, and the next begins."""
        if self._begun is not None:
            end = now()
            self.parts[name].append((end - self._begun) * 1e3)
            self._begun = end

    def logged(self) -> None:
        """The sum of losses begins anew."""
        self._fresh = True

    def end_of_step(self, step: int, total: torch.Tensor) -> None:
        """total: sum of the losses since `logged`, on the device, which is not waited for."""
        self._begun = None
        if step <= self.kept_losses:
            self._losses.append((total.detach().clone(), self._fresh))
            self._fresh = False
        if step in self.marks:
            self.times.append(now())
        if step == self.timed_end and torch.cuda.is_available():
            self.memory = {
                "allocated_gib": torch.cuda.max_memory_allocated() / GIB,
                "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
            }
        if self.profile_at and step == self.profile_at:
            self._profiler = start_profiler()
        if self.profile_at and step == self.profile_at + PROFILED:
            try:
                self.profile = profiled(self._profiler)
            except Exception as error:  # the times are worth more
                self.profile = {"profile_error": f"{type(error).__name__}: {error}"}

    def losses(self) -> list[float]:
        """Of the first steps."""
        found, before = [], 0.0
        for total, fresh in self._losses:
            found.append(total.item() - (0.0 if fresh else before))
            before = total.item()
        return found

    def result(self, tokens: list[int]) -> dict:
        """What is written of a run; tokens: of all ranks in each step."""
        found = {"losses": self.losses(), **self.memory, **self.profile}
        if len(self.times) > 1:
            spans = [end - begin for begin, end in zip(self.times, self.times[1:], strict=False)]
            counted = sum(tokens[self.marks[0] : self.timed_end])
            found["windows_ms"] = [span / self.steps * 1e3 for span in spans]
            found["step_ms"] = statistics.median(found["windows_ms"])
            found["tokens_per_s"] = counted / sum(spans)
            found["tokens_per_step"] = counted / (self.timed_end - self.marks[0])
        found.update({name: statistics.median(times) for name, times in self.parts.items() if times})
        return found


def start_profiler():
    """Counts launches and GPU time. Only CUPTI looks, and torch does not say that someone does: where a profiler
    watches operators, bitshard calls other ones than it does in training."""
    if not torch.cuda.is_available():
        return None
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    profiler.start()
    torch.autograd.profiler._is_profiler_enabled = False
    return profiler


def profiled(profiler) -> dict[str, float]:
    """Of one step: launches from the host, what ran on the GPU, and its milliseconds there."""
    if profiler is None:
        return {}
    torch.cuda.synchronize()
    profiler.stop()
    events = profiler.profiler.kineto_results.events()
    gpu = torch.autograd.DeviceType.CUDA
    on_gpu = [event.duration_ns() for event in events if event.device_type() == gpu]
    launches = [event for event in events if event.device_type() != gpu and event.name().startswith(LAUNCHES)]
    return {
        "launches": len(launches) / PROFILED,
        "kernels": len(on_gpu) / PROFILED,
        "gpu_ms": sum(on_gpu) / PROFILED / 1e6,
    }


class Watch(TrainerCallback):
    """Tells `clock` what a Trainer does."""

    def __init__(self, clock: Clock, trainer):
        self.clock, self.trainer = clock, trainer

    def on_train_begin(self, args, state, control, **_):
        self.clock.begin()

    def on_step_begin(self, args, state, control, **_):
        if self.clock.splits(state.global_step + 1) and "_clip_grad_norm" not in vars(self.trainer):
            clip = self.trainer._clip_grad_norm  # no callback comes between backward and clipping

            def timed(model):
                self.clock.part_begins()
                return clip(model)

            self.trainer._clip_grad_norm = timed

    def on_pre_optimizer_step(self, args, state, control, **_):
        if self.clock.splits(state.global_step + 1):
            self.clock.part_ends("clip_ms")

    def on_optimizer_step(self, args, state, control, **_):
        if self.clock.splits(state.global_step + 1):
            self.clock.part_ends("optimizer_ms")

    def on_step_end(self, args, state, control, **_):
        self.clock.end_of_step(state.global_step, self.trainer._tr_loss)
        if state.global_step >= self.clock.timed_end + SPLIT:
            vars(self.trainer).pop("_clip_grad_norm", None)

    def on_log(self, args, state, control, **_):
        self.clock.logged()
