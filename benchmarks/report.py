"""One file about one GPU, for whoever owns one that was never at hand: is it exact there, and how fast.

    python benchmarks/bench.py --report [FILE] [--device cuda:0] [--quick]

Takes less than three minutes and a third of the free memory at most, 3 GB; runs without a GPU too, on the CPU. What
fails is written down and the rest goes on. The file has no name, path or address of the machine in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from timing import ROOT, commit, cpu_name_and_flags, markdown_table

try:
    import bitshard
except ModuleNotFoundError:  # built in place, not installed
    sys.path.insert(0, str(ROOT / "python"))
    import bitshard

sys.path.append(str(ROOT / "tests"))
import card_rates  # noqa: E402
import cases  # noqa: E402
import optimizers  # noqa: E402
import reference  # noqa: E402
from bitshard import _C, functional  # noqa: E402

BYTES_4BIT = 0.5 + 1 / 64 + 4 / 64 / 256  # of a weight, nested scales, blocksize 64
SECONDS = 150.0  # of the timings; exactness and the start take some more
LARGEST = 3 << 30  # bytes of tensors at a time
SEND = "Please open an issue in bitshard's repository and attach this file. It names neither you nor your machine."


@dataclasses.dataclass(frozen=True)
class Scope:
    """What is measured."""

    shapes: tuple[tuple[int, int], ...]  # (N, K) of layers
    rows: tuple[int, ...]
    elements: int  # of the parameter that the optimizer updates
    copy_bytes: int
    square: int  # of the product that gives the limit
    seconds: float


WHOLE = Scope(
    tuple(cases.MODEL_LINEAR[name] for name in ("8B q, o", "8B gate, up", "8B down")),
    (1, 8, 16, 64, 256, 1024, 4096),
    *(1 << 26, 1 << 28, 4096, SECONDS),
)
ON_CPU = dataclasses.replace(WHOLE, rows=WHOLE.rows[:-1], elements=1 << 22, copy_bytes=1 << 26, square=1024)
QUICK = Scope(((128, 256), (256, 128), (64, 64)), (1, 8, 65), 1 << 14, 1 << 20, 128, 60.0)


# ---- the machine -----------------------------------------------------------------------------------------------------


def nvidia_smi(device: torch.device) -> dict[str, str]:
    """Clocks, power and driver as nvidia-smi says them; nothing where there is none."""
    fields = ("driver_version", "pstate", "clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem")
    fields += ("power.limit", "temperature.gpu", "pcie.link.gen.current", "pcie.link.width.current")
    identity = getattr(torch.cuda.get_device_properties(device), "uuid", None)  # never written down
    chosen = f"--id=GPU-{identity}" if identity else f"--id={device.index or 0}"
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", chosen]
    try:
        line = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in line.split(",")]
    return dict(zip(fields, values, strict=True)) if len(values) == len(fields) else {}


def versions() -> dict[str, str]:
    return {
        "bitshard": f"{bitshard.__version__}, checkout {commit('csrc', 'cuda', 'python')}",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}",
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}",
        "CUDA kernels": _C.cuda_state()["architectures"] or "not in this build",
        "CPU": f"{cpu_name_and_flags()[0]}, {torch.get_num_threads()} threads, kernels {_C.isa()}",
        "variables": ", ".join(sorted(name for name in os.environ if name.startswith("BITSHARD_"))) or "none",
    }


def about_gpu(device: torch.device) -> dict[str, str]:
    if device.type != "cuda":
        return {}
    properties, state = torch.cuda.get_device_properties(device), _C.cuda_state()
    sm = 10 * properties.major + properties.minor
    arch, only = _C.kernel_image(state["architectures"], sm)
    free, total = torch.cuda.mem_get_info(device)
    l2 = getattr(properties, "L2_cache_size", 0)
    return {
        "GPU": properties.name,
        "architecture": f"sm_{sm}, {properties.multi_processor_count} multiprocessors",
        "memory": f"{total / 2**30:.1f} GiB, {free / 2**30:.1f} free; L2 {l2 / 2**20:.0f} MiB",
        "kernels that load here": f"sm_{arch}{'a' if only else ''}" if arch else missing_kernels(sm),
        **{f"nvidia-smi {key}": value for key, value in nvidia_smi(device).items()},
    }


def missing_kernels(sm: int) -> str:
    return f"none: install again with BITSHARD_CUDA_ARCHS={sm} in the environment"


def pick_device(wanted: str | None) -> torch.device:
    """The first GPU where torch and the build have CUDA, else the CPU."""
    if wanted:
        return torch.device(wanted)
    return torch.device("cuda", 0) if torch.cuda.is_available() and _C.cuda_state()["built"] else torch.device("cpu")


def sixteen_bits(device: torch.device) -> torch.dtype:
    """bfloat16, but float16 where tensor cores have no bfloat16."""
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    return torch.float16 if old else torch.bfloat16


def memory_for(device: torch.device) -> int:
    """Bytes of tensors that may be there at a time: a third of what is free, so that small and busy cards do it too."""
    if device.type == "cuda":
        return min(LARGEST, torch.cuda.mem_get_info(device)[0] // 3)
    return min(LARGEST, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 3)


def copies(bytes_each: float, cold: float, memory: float) -> int:
    """Weights to go round: more than the cache holds, in a quarter of the memory; one at least, 24 at most."""
    return max(1, min(24, int(cold / bytes_each) + 1, int(memory / 4 / bytes_each)))


# ---- one thing after the other ---------------------------------------------------------------------------------------


class Run:
    """Goes through the steps: progress on stderr, failures kept, nothing begun after the end of its time."""

    def __init__(self, steps: int, seconds: float):
        self.steps, self.done = steps, 0
        self.end = time.monotonic() + seconds
        self.failures: list[tuple[str, str]] = []  # step, why

    def attempt(self, label: str, step: Callable[[], object], always: bool = False) -> object | None:
        """What `step` returns; None where it failed or its turn came too late."""
        self.done += 1
        self.show(label)
        if not always and time.monotonic() > self.end:
            self.failures.append((label, "left out, the time was over"))
            return None
        try:
            return step()
        except Exception as error:  # whatever it is, the report must say it
            self.failures.append((label, plain(error)))
            return None

    def show(self, label: str) -> None:
        share = min(1.0, self.done / self.steps)
        bar = "#" * round(30 * share)
        last = "\n" if self.done >= self.steps else ""
        if sys.stderr.isatty():
            print(f"\r[{bar:<30}] {share:4.0%} {label[:45]:<45}", end=last, file=sys.stderr, flush=True)


def plain(error: BaseException) -> str:
    """The kind of an error and its first line, without folders of this machine."""
    text = (str(error).strip() or "no message").splitlines()[0]
    text = re.sub(r"(?<![\w.])/(?:[\w.@+-]+/)+", ".../", text)
    return f"{type(error).__name__}: {text[:300]}"


# ---- exact? ----------------------------------------------------------------------------------------------------------


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    """The same numbers on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=dtype)


def wrong_elements(device: torch.device) -> dict[str, int]:
    """Of dequantized values against the reference in plain PyTorch: how many elements differ in a bit."""
    wrong = {}
    for quant_type in cases.FORMATS:
        for nested in (False, True):
            count = 0
            for N, K in ((256, 512), (37, 96)):  # whole tiles; odd rows
                for dtype in cases.DTYPES:
                    w = random(N, K, dtype=dtype, device=device, seed=N)
                    packed, state = functional.quantize_4bit(w, quant_type=quant_type, compress_statistics=nested)
                    absmax, map_, absmax2, offset = (s.cpu() for s in state.scales())
                    scale = reference.nested_scale(absmax, map_, absmax2, offset) if nested else absmax
                    codes = reference.unpack(packed, N * K)
                    expected = reference.dequantize_4bit(codes, scale, 64, quant_type, dtype).view(N, K)
                    actual = functional.dequantize_4bit(packed, state).cpu()
                    bits = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
                    count += int((actual.view(bits) != expected.view(bits)).sum())
            wrong[f"{quant_type}{', nested scales' if nested else ''}"] = count
    return wrong


def wrong_codes(device: torch.device) -> int:
    """Bytes of quantized 16-bit weights that are not those of the plain C kernel on the CPU."""
    before, wrong = _C.isa(), 0
    for quant_type in cases.FORMATS:
        for dtype in (torch.float16, torch.bfloat16):
            w = random(500, 130, dtype=dtype, device=torch.device("cpu"), seed=3)
            packed, _ = functional.quantize_4bit(w.to(device), quant_type=quant_type)
            _C.set_isa("scalar")
            try:
                expected, _ = functional.quantize_4bit(w, quant_type=quant_type)
            finally:
                _C.set_isa(before)
            wrong += int((packed.cpu() != expected).sum())
    return wrong


def error_over_bound(actual: torch.Tensor, expected: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest |actual - a b| over what docs/numerics.md allows; not above 1 where all is well."""
    size = (a.double().square() @ b.double().square()).sqrt()
    limits = torch.finfo(actual.dtype)
    allowed = cases.LINEAR_BOUND[actual.dtype] * size + limits.eps * expected.abs() + limits.tiny
    return ((actual.double() - expected).abs() / allowed).nan_to_num(nan=float("inf")).max().item()


def product_errors(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Forward and gradient against float64, many numbers of rows, shapes that each kind of kernel takes."""
    worst = {"forward": 0.0, "gradient": 0.0, "not repeated": 0.0}
    for N, K, quant_type in ((272, 448, "nf4"), (97, 96, "fp4"), (64, 4096, "nf4")):
        w = random(N, K, dtype=dtype, device=device, seed=K)
        packed, state = functional.quantize_4bit(w, quant_type=quant_type, compress_statistics=quant_type == "nf4")
        decoded = functional.dequantize_4bit(packed, state).cpu()
        for M in (1, 3, 8, 9, 16, 17, 33, 64, 65, 130):
            x, dy = (random(M, n, dtype=dtype, device=device, seed=M) for n in (K, N))
            y, again = (functional.linear_4bit(x, packed, state) for _ in range(2))
            dx = functional.linear_4bit_dgrad(dy, packed, state)
            worst["not repeated"] += int((y != again).sum())
            pairs = (("forward", y, x, decoded.T), ("gradient", dx, dy, decoded))
            for what, result, left, right in pairs:
                left, result = left.cpu(), result.cpu()
                expected = left.double() @ right.double()
                worst[what] = max(worst[what], error_over_bound(result, expected, left, right))
    return worst


# ---- fast? -----------------------------------------------------------------------------------------------------------


def microseconds(calls: list[Callable[[], object]], device: torch.device, seconds: float) -> float:
    """Of one call, the calls in turn: on a GPU in a CUDA graph, gaps included; medians."""
    return on_gpu(calls, seconds) if device.type == "cuda" else on_cpu(calls, seconds)


def on_cpu(calls: list[Callable[[], object]], seconds: float) -> float:
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 2 or time.perf_counter() < end and len(times) < 200:
        begin = time.perf_counter()
        calls[len(times) % len(calls)]()
        times.append(time.perf_counter() - begin)
        if len(times) == 1 and times[0] > seconds:
            break
    return statistics.median(times[1:] or times) * 1e6


def between_events(work: Callable[[], object]) -> float:
    """GPU microseconds."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3


def on_gpu(calls: list[Callable[[], object]], seconds: float) -> float:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    once = max(1.0, between_events(calls[-1]))
    count = max(2, min(96, int(10_000 / once), 4 * len(calls)))  # 10 ms a graph

    def work() -> None:
        for i in range(count):
            calls[i % len(calls)]()

    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            work()
        replay = graph.replay
    except RuntimeError:  # what cannot be captured is queued; the host may then be what takes time
        replay = work
    replay()
    rounds = max(3, min(15, int(seconds * 1e6 / (count * once))))
    return statistics.median(between_events(replay) for _ in range(rounds)) / count


class Times:
    """The timings of one device; `budget` seconds for one case."""

    def __init__(self, device: torch.device, scope: Scope):
        self.device, self.scope, self.dtype = device, scope, sixteen_bits(device)
        self.memory = memory_for(device)
        l2 = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) if device.type == "cuda" else 0
        self.cold = max(256 << 20, 3 * l2) if scope is not QUICK else 1
        self.budget = 0.02 if scope is QUICK else min(0.25, scope.seconds / 400)

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype or self.dtype)

    def time(self, calls: list[Callable[[], object]]) -> float:
        return microseconds(calls, self.device, self.budget)

    def copy(self, n_bytes: float) -> float:
        """Microseconds of a copy that reads and writes n_bytes in all."""
        half = max(1, int(n_bytes / 2) // 2)
        pairs = [[self.tensor(half) for _ in range(2)] for _ in range(copies(2 * half * 2, self.cold, self.memory))]
        return self.time([lambda p=p: p[0].copy_(p[1]) for p in pairs])

    def limits(self) -> dict[str, float]:
        n, n_bytes = self.scope.square, min(self.scope.copy_bytes, self.memory // 4)
        a, b = self.tensor(n, n), self.tensor(n, n)
        return {
            "copy GB/s": n_bytes / self.copy(n_bytes) / 1e3,
            f"{n}^3 product TFLOP/s": 2 * n**3 / self.time([lambda: a @ b]) / 1e6,
        }

    def host(self) -> dict[str, float]:
        """Microseconds of the host for a call on next to nothing."""
        w, x = self.tensor(64, 64), self.tensor(1, 64)
        packed, state = functional.quantize_4bit(w, quant_type="nf4", compress_statistics=True)
        subjects = {
            "linear_4bit": lambda: functional.linear_4bit(x, packed, state),
            "F.linear": lambda: torch.nn.functional.linear(x, w),
        }
        return {name: self.host_of(call) for name, call in subjects.items()}

    def host_of(self, call: Callable[[], object], times: int = 300) -> float:
        best = float("inf")
        for _ in range(5):
            self.wait()
            begin = time.perf_counter()
            for _ in range(times):
                call()
            best = min(best, (time.perf_counter() - begin) / times * 1e6)
        self.wait()
        return best

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def optimizer(self) -> dict[str, float]:
        """A step of 8-bit AdamW, and a copy of as many bytes; milliseconds."""
        from bitshard.optim.base import Optimizer2State

        n = min(self.scope.elements, self.memory // 24)
        p = torch.nn.Parameter(self.tensor(n))
        p.grad = self.tensor(n) * 1e-2
        made = Optimizer2State("adam", [p], 1e-5, (0.9, 0.999), 1e-8, 0.01, optim_bits=8)
        for _ in range(3):
            made.step()
        moved = n * optimizers.bytes_per_element("bitshard", "AdamW 8-bit", self.dtype.itemsize)
        copy = optimizers.Copy(int(moved / 2), self.device.type)
        on = optimizers.on_gpu(made.step, copy, 9) if self.device.type == "cuda" else None
        found = on or optimizers.on_cpu(made.step, copy, min(1.0, self.scope.seconds / 40))
        return {"step ms": found["step"] * 1e3, "copy ms": found["copy"] * 1e3, "elements": n}


class Layer:
    """Weights of one shape, dense and 4-bit, as many as it takes to find none of them in a cache."""

    def __init__(self, times: Times, N: int, K: int):
        self.times, self.N, self.K = times, N, K
        memory, cold = times.memory, times.cold
        self.dense = [times.tensor(N, K) * 0.02 for _ in range(copies(2 * N * K, cold, memory))]
        count = copies(BYTES_4BIT * N * K, cold, memory)
        self.packed = [self.quantize(self.dense[i % len(self.dense)]) for i in range(count)]

    @staticmethod
    def quantize(w: torch.Tensor) -> tuple:
        return functional.quantize_4bit(w, quant_type="nf4", compress_statistics=True)

    def blocks(self) -> dict[str, float]:
        """Quantizing and dequantizing beside a copy that moves as many bytes; microseconds."""
        copy = self.times.copy(self.N * self.K * (2 + BYTES_4BIT))
        decode = [lambda w=w: functional.dequantize_4bit(*w) for w in self.packed[: len(self.dense)]]
        encode = [lambda w=w: self.quantize(w) for w in self.dense]
        return {"dequantize": self.times.time(decode), "quantize": self.times.time(encode), "copy": copy}

    def rows(self, M: int) -> dict[str, float]:
        """Microseconds of both products, 4-bit and dense."""
        if 2 * M * (self.N + self.K) * 3 > self.times.memory // 2:
            raise MemoryError(f"{M} rows need more than the {self.times.memory >> 20} MiB that are used here")
        x, dy = self.times.tensor(M, self.K), self.times.tensor(M, self.N)
        return {
            "linear": self.times.time([lambda w=w: functional.linear_4bit(x, *w) for w in self.packed]),
            "dense": self.times.time([lambda w=w: torch.nn.functional.linear(x, w) for w in self.dense]),
            "gradient": self.times.time([lambda w=w: functional.linear_4bit_dgrad(dy, *w) for w in self.packed]),
            "dense gradient": self.times.time([lambda w=w: torch.mm(dy, w) for w in self.dense]),
        }


# ---- all of it -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad(), torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        yield


def measure(device: torch.device, scope: Scope) -> dict:
    """Everything, as JSON can hold it."""
    begin = time.monotonic()
    kinds = dict.fromkeys((sixteen_bits(device), *cases.DTYPES))
    with_rates = device.type == "cuda" and scope is WHOLE and torch.cuda.get_device_capability(device) >= (8, 0)
    run = Run(5 + with_rates + len(kinds) + len(scope.shapes) * (2 + len(scope.rows)), scope.seconds)
    result: dict = {"date": f"{datetime.date.today():%Y-%m-%d}", "device": device.type}
    with on_device(device):
        result |= {"dtype": str(sixteen_bits(device)).removeprefix("torch.")}
        result |= {"versions": versions(), "gpu": about_gpu(device)}
        result["dequantize"] = run.attempt("dequantize_4bit, exact", lambda: wrong_elements(device), True)
        result["quantize"] = run.attempt("quantize_4bit, exact", lambda: wrong_codes(device), True)
        result["products"] = {
            str(kind).removeprefix("torch."): run.attempt(
                f"products in {kind}", lambda kind=kind: product_errors(device, kind), True
            )
            for kind in kinds
        }
        times = Times(device, scope)
        result["limits"] = run.attempt("limits", times.limits)
        result["host"] = run.attempt("host time", times.host)
        result["optimizer"] = run.attempt("8-bit optimizer", times.optimizer)
        if with_rates:
            sizes, counts = scope.shapes[:2], (128, 512, 2048)
            result["rates"] = run.attempt("rates of the card", lambda: card_rates.text(sizes, counts, device))
        result["layers"] = [measure_layer(run, times, N, K, i) for i, (N, K) in enumerate(scope.shapes)]
        if device.type == "cuda":
            result["nvidia-smi after"] = nvidia_smi(device)
            result["peak MiB"] = torch.cuda.max_memory_allocated(device) >> 20
    result |= {"failures": run.failures, "seconds": round(time.monotonic() - begin, 1)}
    return result


def measure_layer(run: Run, times: Times, N: int, K: int, index: int) -> dict:
    """A third of what is left of the time for the first of three shapes, a half for the second, all for the last."""
    whole, left = run.end, len(times.scope.shapes) - index
    run.end = time.monotonic() + max(0.0, whole - time.monotonic()) / left
    found: dict = {"N": N, "K": K, "rows": {}}
    layer = run.attempt(f"{N} x {K}", lambda: Layer(times, N, K))
    if layer is None:
        run.done += 1 + len(times.scope.rows)
        run.end = whole
        return found
    found["blocks"] = run.attempt(f"{N} x {K}, blocks", layer.blocks)
    for M in times.scope.rows:
        found["rows"][M] = run.attempt(f"{N} x {K}, {M} rows", lambda M=M: layer.rows(M))
    run.end = whole
    return found


def kernel_name(device: torch.device, M: int, N: int, K: int, gradient: bool = False) -> str:
    """The kernel that the core chooses, without a word where it is a CPU's."""
    if device.type != "cuda":
        return "-"
    properties = torch.cuda.get_device_properties(device)
    dtype = 1 if sixteen_bits(device) is torch.float16 else 2  # as the C core counts
    sm, sms = 10 * properties.major + properties.minor, properties.multi_processor_count
    return _C.plan_linear_4bit(M, N, K, dtype, sm, sms, gradient=gradient)["kernel"]


# ---- the file --------------------------------------------------------------------------------------------------------


def number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def over(a: float | None, b: float | None) -> str:
    return f"{a / b:.2f}" if a is not None and b else "-"


def exactness(result: dict) -> list[list[str]]:
    wrong = result["dequantize"] or {}
    rows = [[f"dequantize_4bit, {name}", "elements unlike the reference", str(n), "0"] for name, n in wrong.items()]
    if result["quantize"] is not None:
        rows.append(["quantize_4bit, 16-bit weights", "bytes unlike the CPU's", str(result["quantize"]), "0"])
    for dtype, found in result["products"].items():
        for what in ("forward", "gradient") if found else ():
            rows.append([f"product, {what}, {dtype}", "error over its bound", f"{found[what]:.3f}", "at most 1"])
        if found:
            rows.append([f"product, {dtype}", "elements unlike in two runs", f"{found['not repeated']:.0f}", "0"])
    return rows


def is_exact(result: dict) -> bool:
    """Whether all checks were made and passed."""
    found = [result["dequantize"], result["quantize"], *result["products"].values()]
    if any(each is None for each in found):
        return False
    errors = [each[what] for each in result["products"].values() for what in ("forward", "gradient")]
    repeated = all(each["not repeated"] == 0 for each in result["products"].values())
    return not any(result["dequantize"].values()) and result["quantize"] == 0 and repeated and max(errors) <= 1


def block_rows(result: dict) -> list[list[str]]:
    rows = []
    for layer in result["layers"]:
        b = layer.get("blocks") or {}
        cells = [f"{layer['N']} x {layer['K']}", number(b.get("copy"))]
        for op in ("dequantize", "quantize"):
            cells += [number(b.get(op)), over(b.get("copy"), b.get(op))]
        rows.append(cells)
    return rows


def linear_rows(result: dict, device: torch.device) -> list[list[str]]:
    rows = []
    for layer in result["layers"]:
        N, K = layer["N"], layer["K"]
        for M, found in layer["rows"].items():
            found = found or {}
            cells = [f"{N} x {K}", str(M)]
            for ours, theirs in (("linear", "dense"), ("gradient", "dense gradient")):
                a, b = found.get(ours), found.get(theirs)
                cells += [kernel_name(device, M, N, K, ours == "gradient"), number(a), number(b), over(b, a)]
            rows.append(cells)
    return rows


def optimizer_words(result: dict) -> str:
    step = result["optimizer"]
    if not step:
        return "not measured"
    took, copy, share = step["step ms"], step["copy ms"], over(step["copy ms"], step["step ms"])
    what = f"{step['elements']} elements of {result['dtype']}"
    return f"{took:.3f} ms for {what}, {share} of the speed of a copy of as many bytes ({copy:.3f} ms)"


def failure_words(failures: list[tuple[str, str]]) -> str:
    """What failed, steps that failed alike together."""
    alike: dict[str, list[str]] = {}
    for label, why in failures:
        alike.setdefault(why, []).append(label)
    return "\n".join(f"- {why}: {'; '.join(labels)}" for why, labels in alike.items()) or "nothing"


def markdown(result: dict, device: torch.device) -> str:
    name = result["gpu"].get("GPU") or result["versions"]["CPU"]
    dtype = result["dtype"]
    facts = [[key, str(value)] for key, value in {**result["gpu"], **result["versions"]}.items()]
    limits = ", ".join(f"{key} {value:.1f}" for key, value in (result["limits"] or {}).items()) or "not measured"
    host = ", ".join(f"{key} {value:.1f}" for key, value in (result["host"] or {}).items()) or "not measured"
    header = ["N x K", "rows", "kernel", "forward us", "F.linear us", "times faster"]
    header += ["kernel", "gradient us", "mm us", "times faster"]
    parts = [
        f"# bitshard on {name}, {result['date']}",
        SEND,
        markdown_table(["", "what"], facts),
        f"## Exact: {'yes' if is_exact(result) else '**no**'}",
        markdown_table(["check", "counted", "found", "expected"], exactness(result)),
        f"## Products, nested NF4, blocksize 64, {dtype}\n\nMicroseconds, beside the same with dense weights.",
        markdown_table(header, linear_rows(result, device)),
        "## Quantizing and dequantizing\n\nMicroseconds; share: of the speed of a copy that moves as many bytes.",
        markdown_table(["N x K", "copy us", "dequantize us", "share", "quantize us", "share"], block_rows(result)),
        f"## More\n\n- limits: {limits}\n- host, us a call: {host}\n- step of 8-bit AdamW: {optimizer_words(result)}",
        f"- peak of torch's memory: {result.get('peak MiB', '-')} MiB; the whole took {result['seconds']} s",
        f"## What the plan takes this GPU to do\n\n{result.get('rates') or 'Not measured.'}",
        f"## What failed or was left out\n\n{failure_words(result['failures'])}",
        "## The same for programs\n\n```json\n" + json.dumps(result, indent=1) + "\n```",
    ]
    return "\n\n".join(parts) + "\n"


def file_name(result: dict) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", (result["gpu"].get("GPU") or "cpu").lower()).strip("-")
    return f"bitshard_report_{name}_{result['date']}.md"


def write(path: str | None, device: str | None, quick: bool) -> Path:
    """Measures and writes the file; path None: into the folder where one is, named after the GPU and the day."""
    chosen = pick_device(device)
    result = measure(chosen, QUICK if quick else WHOLE if chosen.type == "cuda" else ON_CPU)
    target = Path(path or file_name(result))
    target.write_text(markdown(result, chosen), encoding="utf-8")
    return target
