"""The 4-bit ops on a GPU against bitsandbytes, bf16 and the limits of the machine, in one process.

    python benchmarks/bench_cuda.py [--upstream FOLDER] [--quick] [--out JSON] [--markdown MD] [--plot PNG]
    python benchmarks/bench_cuda.py --read JSON --markdown MD --plot PNG

--upstream names a folder that holds upstream's package `bitsandbytes`; without it its columns stay empty.
GPU time: one CUDA graph of calls over rotating weights (more than the L2 holds), median of replays, with launch gaps.
Forward + backward: autograd in eager mode between events. Host time: a loop of calls on a tiny problem, no waiting.
Every input is random: zeros run faster than data.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

os.environ["BITSHARD_PLUGIN"] = "0"  # an original bitsandbytes runs its own kernels

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from cases import MODEL_LINEAR as SHAPES  # noqa: E402

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TRAINING_ROWS = (1024, 2048, 4096, 8192)
COLD_BYTES = 500 << 20  # a rotation moves more than the L2 can hold
MIN_CALLS = 12  # per graph: the start of a graph costs some microseconds
BITS_PER_WEIGHT = 4 + (1 + 4 / 256) * 8 / 64  # nested NF4, blocksize 64


# ---- timing ---------------------------------------------------------------------------------------------------------


class Replay:
    """Calls captured in one CUDA graph, each at least MIN_CALLS / len(calls) times."""

    def __init__(self, calls: list[Callable[[], object]]):
        calls = calls * -(-MIN_CALLS // len(calls))
        self.count, self.times = len(calls), []
        self.keep: list[object] = []  # results live as long as the graph: no memory is reused inside it
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            calls[0]()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.keep.extend(call() for call in calls)
        self.graph.replay()

    def run(self) -> None:
        """One timed replay."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.graph.replay()
        end.record()
        torch.cuda.synchronize()
        self.times.append(start.elapsed_time(end) * 1e3 / self.count)


def graph_times(subjects: dict[str, list[Callable[[], object]]], replays: int = 5) -> dict[str, float]:
    """GPU microseconds per call of each subject: the graphs take turns, so that all see the same clocks; medians."""
    graphs = {name: Replay(calls) for name, calls in subjects.items()}
    for _ in range(replays):
        for graph in graphs.values():
            graph.run()
    return {name: statistics.median(graph.times) for name, graph in graphs.items()}


def graph_time(calls: list[Callable[[], object]]) -> float:
    return graph_times({"": calls})[""]


def event_times(subjects: dict[str, Callable[[int], object]], repeats: int = 9) -> dict[str, float]:
    """GPU microseconds per call(i) of each subject in turn, events around each, without waiting; medians."""
    for call in subjects.values():
        for i in range(3):
            call(i)
    pairs: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in subjects}
    for i in range(repeats):
        for name, call in subjects.items():
            pairs[name].append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            pairs[name][-1][0].record()
            call(i)
            pairs[name][-1][1].record()
    torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) * 1e3 for a, b in made) for name, made in pairs.items()}


def queue_time(calls: list[Callable[[], object]]) -> float:
    """GPU microseconds per call, queued behind a long wait so that the host is ahead as far as the calls allow."""
    calls[0]()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(50_000_000)
    start.record()
    keep = [call() for call in calls]
    end.record()
    torch.cuda.synchronize()
    del keep
    return start.elapsed_time(end) * 1e3 / len(calls)


def host_time(call: Callable[[], object], repeats: int = 3000) -> float:
    """Host microseconds per call, the best of five loops."""
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(repeats // 5):
            call()
        best = min(best, (time.perf_counter() - begin) / (repeats // 5) * 1e6)
    torch.cuda.synchronize()
    return best


# ---- subjects -------------------------------------------------------------------------------------------------------


class Ours:
    """One quantized weight and the calls on it."""

    def __init__(self, w: torch.Tensor, nested: bool):
        from bitshard import autograd, functional

        self.packed, self.state = functional.quantize_4bit(w, quant_type="nf4", compress_statistics=nested)
        self.matmul, self.decode = autograd.matmul_4bit, functional.dequantize_4bit

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        return self.matmul(x, self.packed, self.state)

    def dequantize(self) -> torch.Tensor:
        return self.decode(self.packed, self.state)

    @staticmethod
    def quantize(w: torch.Tensor) -> object:
        from bitshard import functional

        return functional.quantize_4bit(w, quant_type="nf4", compress_statistics=True)


class Upstream(Ours):
    """The same for upstream bitsandbytes."""

    def __init__(self, w: torch.Tensor, nested: bool):
        import bitsandbytes as bnb

        packed, self.state = bnb.functional.quantize_4bit(w, quant_type="nf4", compress_statistics=nested)
        self.packed, self.row = packed, packed.t()
        self.matmul, self.decode = bnb.matmul_4bit, bnb.functional.dequantize_4bit

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        return self.matmul(x, self.row, self.state)

    @staticmethod
    def quantize(w: torch.Tensor) -> object:
        import bitsandbytes.functional as F

        return F.quantize_4bit(w, quant_type="nf4", compress_statistics=True)


class Dense:
    """A bf16 weight."""

    def __init__(self, w: torch.Tensor, nested: bool = False):
        self.w = w

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.w)


def random_weights(N: int, K: int, bytes_each: float, most: int = 96) -> list[torch.Tensor]:
    """Enough bf16 weights that one pass over what is read of them exceeds COLD_BYTES."""
    count = min(most, max(3, int(COLD_BYTES / bytes_each) + 1))
    return [torch.randn(N, K, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(count)]


# ---- what is measured -----------------------------------------------------------------------------------------------


def ceilings() -> dict[str, float]:
    """Copy bandwidth (bytes read + written, TB/s) by an elementwise kernel on random data; bf16 product, TFLOP/s."""
    source = torch.randn(1 << 28, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy = min(graph_time([lambda: torch.neg(source, out=target)] * 4), graph_time([lambda: target.copy_(source)] * 4))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = graph_time([lambda: a @ b] * 4)
    return {"copy_tb_s": 2 * source.nbytes / copy / 1e6, "matmul_tflop_s": 2 * 8192**3 / product / 1e6}


def copy_time(n_bytes: float) -> float:
    """Microseconds of an elementwise copy that reads and writes n_bytes in all, cold and on random data."""
    half = int(n_bytes / 2) // 4096 * 4096
    pairs = [
        torch.randint(0, 256, (2, half), dtype=torch.uint8, device="cuda") for _ in range(max(3, COLD_BYTES // half))
    ]
    views = [pair.view(torch.bfloat16) for pair in pairs]
    return graph_time([lambda v=v: torch.neg(v[0], out=v[1]) for v in views])


def measure_blocks(shape: tuple[int, int], subjects: dict[str, type]) -> dict:
    N, K = shape
    row = {"N": N, "K": K, "copy": copy_time(N * K * (2 + BITS_PER_WEIGHT / 8))}
    for name, subject in subjects.items():
        weights = random_weights(N, K, N * K * 2.5)
        for nested in (True, False):
            made = [subject(w, nested) for w in weights]
            key = f"dequantize {'nested' if nested else 'plain'}"
            row[f"{key} {name}"] = graph_time([m.dequantize for m in made])
        quantize = [partial(subject.quantize, w) for w in weights]
        # upstream copies its table from the host in every call, which no graph captures
        row[f"quantize nested {name}"] = graph_time(quantize) if subject is Ours else queue_time(quantize)
    return row


def measure_linear(shape: tuple[int, int], rows: tuple[int, ...], subjects: dict[str, type]) -> list[dict]:
    N, K = shape
    made: dict[str, list] = {}
    for name, subject in subjects.items():
        for nested in (True, False) if subject is Ours else (True,):
            weights = random_weights(N, K, N * K * (2 if subject is Dense else BITS_PER_WEIGHT / 8), most=48)
            label = name if subject is Dense else f"{name} {'nested' if nested else 'plain'}"
            made[label] = [subject(w, nested) for w in weights]
    results = []
    for M in rows:
        x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
        most = max(2, int(2e13 / (M * N * K)) + 1)  # at most about 50 ms of products
        calls = {label: [partial(m.linear, x) for m in subject[:most]] for label, subject in made.items()}
        results.append({"M": M, "N": N, "K": K, **graph_times(calls)})
    return results


def measure_training(shape: tuple[int, int], rows: tuple[int, ...], subjects: dict[str, type]) -> list[dict]:
    N, K = shape
    weights = [torch.randn(N, K, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(3)]
    made = {name: [subject(w, True) for w in weights] for name, subject in subjects.items()}
    results = []
    for M in rows:
        x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn(M, N, device="cuda", dtype=torch.bfloat16)

        def step(name: str, i: int) -> None:
            x.grad = None  # noqa: B023
            made[name][i % 3].linear(x).backward(dy)  # noqa: B023

        results.append({"M": M, "N": N, "K": K, **event_times({name: partial(step, name) for name in made})})
    return results


def measure_host(subjects: dict[str, type]) -> dict[str, float]:
    x = torch.randn(1, 64, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    row = {"torch.mul": host_time(lambda: torch.mul(w, 2.0)), "F.linear": host_time(lambda: Dense(w).linear(x))}
    for name, subject in subjects.items():
        if subject is not Dense:
            made = subject(w, True)
            row[f"matmul_4bit {name}"] = host_time(partial(made.linear, x))
            row[f"dequantize_4bit {name}"] = host_time(made.dequantize)
    return row


def measure(upstream: str | None, quick: bool) -> dict:
    subjects: dict[str, type] = {"bitshard": Ours}
    if upstream:
        sys.path.insert(0, upstream)
        import bitsandbytes

        assert Path(bitsandbytes.__file__).is_relative_to(Path(upstream).resolve()), bitsandbytes.__file__
        subjects["bitsandbytes"] = Upstream
    shapes = dict(list(SHAPES.items())[2:3]) if quick else SHAPES
    rows = (1, 16, 1024) if quick else ROWS
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "ceilings": ceilings(),
        "host": measure_host({**subjects, "bf16": Dense}),
        "blocks": [],
        "linear": [],
        "training": [],
    }
    for shape in shapes.values():
        result["blocks"].append(measure_blocks(shape, subjects))
        result["linear"] += measure_linear(shape, rows, {**subjects, "bf16": Dense})
        if shape[0] > 1024:
            result["training"] += measure_training(shape, TRAINING_ROWS, {**subjects, "bf16": Dense})
        torch.cuda.empty_cache()
        print(f"{shape} done", flush=True)
    return result


# ---- report ---------------------------------------------------------------------------------------------------------


def floor(row: dict, ceiling: dict[str, float]) -> float:
    """Microseconds that no kernel beats: bytes over the copy bandwidth or operations over the product rate."""
    M, N, K = row["M"], row["N"], row["K"]
    n_bytes = N * K * BITS_PER_WEIGHT / 8 + 2 * M * (N + K)
    return max(n_bytes / ceiling["copy_tb_s"] / 1e6, 2 * M * N * K / ceiling["matmul_tflop_s"] / 1e6)


def number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def ratio(a: float | None, b: float | None) -> str:
    return "-" if a is None or b is None else f"{a / b:.2f}"


def markdown(result: dict) -> str:
    ceiling, host = result["ceilings"], result["host"]
    parts = [
        f"# 4-bit ops on one {result['gpu']}\n",
        f"torch {result['torch']}; microseconds; nested NF4, blocksize 64, bf16 unless said otherwise. Copy "
        f"{ceiling['copy_tb_s']:.2f} TB/s (read + written, random data), bf16 product 8192^3 "
        f"{ceiling['matmul_tflop_s']:.0f} TFLOP/s, both in this run. GPU times: CUDA graphs over rotating weights; "
        "forward + backward: eager, events. Made by `benchmarks/bench_cuda.py`.\n",
        "## Host time per call\n",
        table(["call", "us"], [[name, number(value, 2)] for name, value in host.items()]),
        "## Dequantize and quantize\n",
        "Copy: an elementwise kernel that moves the same bytes in the same graph form. Share: copy / time.\n",
    ]
    rows = []
    for b in result["blocks"]:
        ours, theirs = "bitshard", "bitsandbytes"
        cells = [f"{b['N']} x {b['K']}", number(b["N"] * b["K"] / 1e6), number(b["copy"])]
        for key in ("dequantize nested", "dequantize plain", "quantize nested"):
            mine, other = b.get(f"{key} {ours}"), b.get(f"{key} {theirs}")
            cells += [number(mine), ratio(b["copy"], mine), number(other), ratio(b["copy"], other)]
        rows.append(cells)
    header = ["N x K", "M weights", "copy"]
    for key in ("dequantize nested", "dequantize plain", "quantize nested"):
        header += [key, "share", "bitsandbytes", "share"]
    parts += [table(header, rows), "## y = x W^T\n", "Floor: bytes over copy or operations over the product rate.\n"]
    header = ["N x K", "M", "floor", "bitshard", "floor / it", "plain scales", "bitsandbytes", "bf16", "bf16 / it"]
    rows = [
        [
            f"{r['N']} x {r['K']}",
            str(r["M"]),
            number(floor(r, ceiling)),
            number(r["bitshard nested"]),
            ratio(floor(r, ceiling), r["bitshard nested"]),
            number(r.get("bitshard plain")),
            number(r.get("bitsandbytes nested")),
            number(r["bf16"]),
            ratio(r["bf16"], r["bitshard nested"]),
        ]
        for r in result["linear"]
    ]
    parts += [table(header, rows), "## Forward + backward (input gradient), autograd\n"]
    rows = [
        [
            f"{r['N']} x {r['K']}",
            str(r["M"]),
            number(r["bitshard"], 0),
            number(r.get("bitsandbytes"), 0),
            number(r["bf16"], 0),
            ratio(r["bitshard"], r["bf16"]),
            ratio(r.get("bitsandbytes"), r["bf16"]),
        ]
        for r in result["training"]
    ]
    header = ["N x K", "M", "bitshard", "bitsandbytes", "bf16", "bitshard / bf16", "bitsandbytes / bf16"]
    return "\n".join([*parts, table(header, rows)])


def plot(result: dict, path: str) -> None:
    """Speed over bf16 against M, one panel per shape."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shapes = sorted({(r["N"], r["K"]) for r in result["linear"]}, key=lambda s: s[0] * s[1])
    figure, axes = plt.subplots(2, (len(shapes) + 1) // 2, figsize=(16, 7), squeeze=False)
    for axis, (N, K) in zip(axes.flat, shapes, strict=False):
        rows = [r for r in result["linear"] if (r["N"], r["K"]) == (N, K)]
        limit = [r["bf16"] / floor(r, result["ceilings"]) for r in rows]
        axis.plot([r["M"] for r in rows], limit, color="0.6", linestyle="--", label="limit")
        for name, color in (("bitshard", "C0"), ("bitsandbytes", "C3")):
            points = [(r["M"], r["bf16"] / r[f"{name} nested"]) for r in rows if f"{name} nested" in r]
            axis.plot(*zip(*points, strict=True), marker="o", color=color, label=name) if points else None
        axis.axhline(1, color="k", linewidth=0.8)
        axis.set(title=f"{N} x {K}", xscale="log", yscale="log", xlabel="rows of x", ylabel="speed / bf16 linear")
    axes.flat[0].legend()
    figure.suptitle(f"y = x W^T, nested NF4, {result['gpu']}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("upstream", "out", "read", "markdown", "plot"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--quick", action="store_true", help="one shape, three sizes")
    options = parser.parse_args()
    result = json.loads(Path(options.read).read_text()) if options.read else measure(options.upstream, options.quick)
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=1))
    if options.markdown:
        Path(options.markdown).write_text(markdown(result))
    if options.plot:
        plot(result, options.plot)
    if not options.out and not options.markdown:
        print(markdown(result))


if __name__ == "__main__":
    main()
