"""GPU time of calls that take turns, so that all of them meet the same clock, which on a busy GPU its power limits."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

TURNS = 6  # the first one counts for nothing


def captured(call: Callable[[int], object], ms: float, routine: int = 1) -> tuple[torch.cuda.CUDAGraph, int]:
    """A CUDA graph of call(0), call(1), ..., about `ms` milliseconds of them, and how many: a multiple of `routine`."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(0)
        begin.record()
        call(1), call(2)
        end.record()
    torch.cuda.synchronize()
    n = max(2, min(400, int(2 * ms / max(begin.elapsed_time(end), 1e-3))))
    n = -(-n // routine) * routine
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(n):
            call(i)
    return graph, n


def microseconds(
    ways: dict[str, Callable[[int], object]],
    bursts: bool = False,
    prepare: Callable[[str], None] = lambda name: None,
    routine: int = 1,
) -> dict[str, float]:
    """Median microseconds of a call of each way, gaps between launches included.

    Graphs of about 6 ms, one replay of each way in turn; who begins changes from turn to turn. bursts: graphs of 1 ms,
    and 30 ms of nothing before each. prepare(name) is called before a way is captured.
    """
    graphs = {}
    for name, call in ways.items():
        prepare(name)
        graphs[name] = captured(call, 1.0 if bursts else 6.0, routine)
    times: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(TURNS):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            graph, n = graphs[name]
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if bursts:
                time.sleep(0.03)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if turn:
                times[name].append(begin.elapsed_time(end) * 1e3 / n)
    return {name: statistics.median(of) for name, of in times.items()}
