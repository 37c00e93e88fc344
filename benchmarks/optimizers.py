"""Time of one optimizer step beside the time it takes to copy as many bytes: bitshard, upstream, torch and torchao.

    python benchmarks/optimizers.py --device cuda [--upstream FOLDER_OF_UPSTREAM] [--torchao] [--out RESULT.md]
    python benchmarks/optimizers.py --device cpu --threads 2 [--upstream FOLDER_OF_UPSTREAM] [--out RESULT.md]
    python benchmarks/optimizers.py --device cuda --only "one parameter,448 adapters fp32 bitshard"

Cases: one parameter of 2^28 elements in bf16 (on a CPU 2^24), and the 448 adapter tensors of a LoRA of rank 16 on all
seven linears of an 8B Llama (41,943,040 elements) in bf16 and fp32. Every library runs in a process of its own, all of
them in turn, `--rounds` times; upstream takes part where its folder is given (or BITSHARD_UPSTREAM names it), torchao
with `--torchao`. `--only` names rows by the words they begin with, those of the table, or by a word in them, with
commas between. `--out` is written anew behind every row, so that a run that is cut off leaves what it has measured.

GB/s: bytes that a step must move (parameter and states read and written, gradient read, scales included) over its
time. Its share is of a `Tensor.copy_` that reads and writes as many bytes together, measured between the steps of the
same row.

On a GPU "step" is the time on the device: CUDA events around steps that are queued behind a sleeping kernel, so that
the host is not in it; the median, as of the copies. "back to back" is the time of steps in a loop, where the slower of
host and GPU decides. "host" is how long a call of step() takes to return when the GPU has nothing to do. On a CPU
"step" is the best of many that alternate with copies, and there are two shares: of the best of both, and of the
medians. "host" is a step over 448 parameters of 16 elements, where the work is next to nothing, alternating with
torch's fused AdamW on the same; the ratio is of the best of both.
"""

import argparse
import gc
import os
import statistics
import sys
import time
from pathlib import Path

from timing import ROOT, Contestant, commit, cpu_name_and_flags, markdown_table, serve

OURS = [str(ROOT / "python"), str(ROOT / "python" / "bitsandbytes" / "src")]
BNB = {  # name in the table: (class, states of how many bits)
    "AdamW 8-bit": ("AdamW8bit", 2, 8),
    "Lion 8-bit": ("Lion8bit", 1, 8),
    "AdEMAMix 8-bit": ("AdEMAMix8bit", 3, 8),
    "AdamW 32-bit": ("AdamW32bit", 2, 32),
}
LIBRARIES = {
    "bitshard": list(BNB),
    "upstream": list(BNB),
    "torch": ["AdamW fused"],
    "torchao": ["AdamW 8-bit"],
}
CASES = [("one", "bf16"), ("adapters", "bf16"), ("adapters", "fp32")]
SOURCES = ("csrc", "cuda", "python")
TIMES = ("step", "copy", "median step", "median copy", "loop", "host", "fused")
LABELS = {"one": "one parameter", "adapters": "448 adapters", "small": "448 of 16"}


# ---- in the process of one library -----------------------------------------------------------------------------------


def shapes(case: str, device: str) -> list[tuple[int, ...]]:
    """One large parameter, or A [16, in] and B [out, 16] of each linear of 32 layers; "small": 448 of 16 elements."""
    if case == "one":
        return [(2**14, 2**14)] if device == "cuda" else [(2**12, 2**12)]
    if case == "small":
        return [(16,)] * 448
    linears = [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), (4096, 14336), (4096, 14336), (14336, 4096)]
    return [shape for _ in range(32) for inner, outer in linears for shape in ((16, inner), (outer, 16))]


def make(library: str, name: str, params: list):
    """The optimizer; `small` parameters get 8-bit state too."""
    import torch

    if library == "torch":
        return torch.optim.AdamW(params, lr=1e-5, fused=True)
    if library == "torchao":
        try:
            from torchao.optim import AdamW8bit
        except ImportError:
            from torchao.prototype.low_bit_optim import AdamW8bit
        return AdamW8bit(params, lr=1e-5)
    import bitsandbytes as bnb

    return getattr(bnb.optim, BNB[name][0])(params, lr=1e-5, min_8bit_size=1)


def bytes_per_element(library: str, name: str, element: int) -> float:
    """Parameter and states read and written, gradient read."""
    if library == "torch":
        return 3 * element + 2 * 2 * element
    _, states, bits = BNB[name]
    return 3 * element + 2 * states * (4 if bits == 32 else 1 + 4 / 256)


class Copy:
    """`Tensor.copy_` of `size` bytes."""

    def __init__(self, size: int, device: str):
        import torch

        self.source, self.target = (torch.ones(size // 4, device=device) for _ in range(2))
        self.bytes = 2 * size

    def __call__(self) -> None:
        self.target.copy_(self.source)


def seconds(call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def in_turn(step, other, budget: float, at_least: int = 5) -> tuple[list[float], list[float]]:
    """Seconds of both, in turn, for `budget` seconds."""
    steps, others = [], []
    end = time.perf_counter() + budget
    while len(steps) < at_least or time.perf_counter() < end:
        others.append(seconds(other))
        steps.append(seconds(step))
    return steps, others


def on_cpu(step, copy: Copy, budget: float) -> dict:
    """Best and median of both."""
    steps, copies = in_turn(step, copy, budget)
    found = {"step": min(steps), "copy": min(copies)}
    return found | {"median step": statistics.median(steps), "median copy": statistics.median(copies)}


def host_on_cpu(library: str, name: str, dtype: str) -> dict:
    """Seconds of a step over small parameters, and of torch's fused AdamW over the same."""
    small, fused = (prepared(*who, "small", dtype, "cpu")[0] for who in ((library, name), ("torch", "AdamW fused")))
    steps, others = in_turn(small.step, fused.step, 0.5, 10)
    return {"host": min(steps), "fused": min(others)}


def behind_sleep(call, times: int, host: float) -> float:
    """Seconds on the GPU of one of `times` calls that are all queued before the first begins."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(int((2.0 * host * times + 2e-4) * 2e9))
    begin.record()
    for _ in range(times):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e-3 / times


def back_to_back(step, times: int = 10) -> float:
    """Seconds of one of `times` steps in a loop."""
    import torch

    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / times


def on_gpu(step, copy: Copy, rounds: int = 9) -> dict:
    """Medians of step and copy in turn, of steps back to back, and of the host's part."""
    import torch

    hosts = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        hosts.append(seconds(step))
    host = statistics.median(hosts)
    steps, copies = [], []
    for _ in range(rounds):
        copies.append(behind_sleep(copy, 3, 2e-5))
        steps.append(behind_sleep(step, 2, host))
    loop = statistics.median(back_to_back(step) for _ in range(3))
    return {"step": statistics.median(steps), "copy": statistics.median(copies), "loop": loop, "host": host}


def prepared(library: str, name: str, case: str, dtype: str, device: str):
    """(optimizer, elements) after three steps."""
    import torch

    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    params = [torch.nn.Parameter(torch.randn(s, device=device).to(kind)) for s in shapes(case, device)]
    for p in params:
        p.grad = (torch.randn(p.shape, device=device) * 1e-2).to(kind)
    optimizer = make(library, name, params)
    for _ in range(3):
        optimizer.step()
    return optimizer, sum(p.numel() for p in params)


def measure(library: str, device: str, budget: float, *, name: str, case: str, dtype: str) -> dict:
    """Times in seconds, bytes of a step; or what went wrong."""
    import torch

    try:
        optimizer, numel = prepared(library, name, case, dtype, device)
        moved = numel * bytes_per_element(library, name, 2 if dtype == "bf16" else 4)
        copy = Copy(int(moved / 2), device)
        found = on_gpu(optimizer.step, copy) if device == "cuda" else on_cpu(optimizer.step, copy, budget)
        found |= {"bytes": moved, "copied": copy.bytes, "elements": numel}
        if device == "cpu":
            found |= host_on_cpu(library, name, dtype)
        return found
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    finally:
        optimizer = copy = None
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def version(library: str, device: str) -> dict:
    """What runs here."""
    import torch

    try:
        module = __import__({"bitshard": "bitsandbytes", "upstream": "bitsandbytes"}.get(library, library))
    except ImportError as error:
        return {"missing": str(error)}
    machine = torch.cuda.get_device_name() if device == "cuda" else cpu_name_and_flags()[0]
    return {"version": module.__version__, "torch": torch.__version__, "machine": machine}


def contestant(options) -> None:
    import torch

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)

    def answer(**request) -> dict:
        if not request:
            return version(options.contestant, options.device)
        return measure(options.contestant, options.device, options.seconds, **request)

    serve(answer)


# ---- the comparison --------------------------------------------------------------------------------------------------


def start(library: str, options) -> Contestant:
    paths = {"bitshard": OURS, "upstream": [options.upstream or ""]}.get(library, [])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, __file__, "--contestant", library, "--device", options.device]
    return Contestant([*command, "--threads", str(options.threads), "--seconds", str(options.seconds)], environment)


def best(results: list[dict]) -> dict:
    """The best of each time over the rounds; an error where there is one."""
    failed = [result for result in results if "error" in result]
    if failed:
        return failed[0]
    return results[0] | {key: min(result[key] for result in results) for key in TIMES if key in results[0]}


def share(result: dict, kind: str = "") -> float:
    """Rate of the step over that of the copy."""
    return (result["bytes"] / result[kind + "step"]) / (result["copied"] / result[kind + "copy"])


def table(found: dict, cuda: bool) -> str:
    """A row for each case, library and optimizer."""
    header = ["case", "dtype", "library", "optimizer", "B/element", "step ms", "GB/s", "copy GB/s", "share of copy"]
    header += ["back to back ms"] if cuda else ["of medians"]
    header += ["host us", "host / torch fused"]
    rows = []
    for (case, dtype, library, name), result in found.items():
        row = [LABELS[case], dtype, library, name]
        if "error" in result:
            rows.append([*row, *["-"] * (len(header) - 4)])
            continue
        row += [f"{result['bytes'] / result['elements']:.2f}", f"{result['step'] * 1e3:.3f}"]
        row += [f"{result['bytes'] / result['step'] / 1e9:.1f}", f"{result['copied'] / result['copy'] / 1e9:.1f}"]
        row += [f"{share(result):.2f}", f"{result['loop'] * 1e3:.3f}" if cuda else f"{share(result, 'median '):.2f}"]
        fused = result.get("fused") or found.get((case, dtype, "torch", "AdamW fused"), {}).get("host")
        row += [f"{result['host'] * 1e6:.0f}", f"{result['host'] / fused:.2f}" if fused else "-"]
        rows.append(row)
    return markdown_table(header, rows)


def command_of(options) -> str:
    """What was typed."""
    words = [f"--device {options.device}"]
    if options.device == "cpu":
        words += [f"--threads {options.threads}", f"--seconds {options.seconds:g}"]
    words += [f"--rounds {options.rounds}", "--upstream FOLDER" if options.upstream else ""]
    words += ["--torchao" if options.torchao else "", f'--only "{options.only}"' if options.only else ""]
    return " ".join(["python benchmarks/optimizers.py", *filter(None, words)])


def text(found: dict, versions: dict, options) -> str:
    cuda = options.device == "cuda"
    ours = next(iter(versions.values()))
    where = f"{ours['machine']}" + ("" if cuda else f", {options.threads} threads")
    lines = [f"# Optimizer steps: {where}, {time.strftime('%Y-%m-%d')}", ""]
    seen = {"torch": ours["torch"]} | {library: seen["version"] for library, seen in versions.items()}
    lines += [", ".join(f"{name} {number}" for name, number in seen.items()) + f"; commit {commit(*SOURCES)}."]
    lines += [f"Command: `{command_of(options)}`", ""]
    lines += [
        f'"one parameter" has {"2^28" if cuda else "2^24"} elements, "448 adapters" are a LoRA of rank 16 of an 8B'
    ]
    lines += [
        "Llama (41,943,040 elements). B/element: bytes that a step must move. Copy: `Tensor.copy_` that reads and"
    ]
    lines += ["writes as many bytes as the step, between the steps."]
    if cuda:
        lines += ["Step: on the device, queued behind a sleeping kernel, median. Host: until step() returns, median."]
    else:
        lines += [
            "Step and copy: the best of many in turn; their share, and that of the medians. Host: a step over 448"
        ]
        lines += ["parameters of 16 elements, beside torch's fused AdamW on the same in turn."]
        if loaded := os.getloadavg()[0]:
            lines += [f"The load of the machine was {loaded:.1f} at the end, this run included."]
    lines += [f"Times are the best of {options.rounds} rounds.", "", table(found, cuda), ""]
    errors = {key: result["error"] for key, result in found.items() if "error" in result}
    lines += [f"- {' '.join(key)}: {error.splitlines()[0]}" for key, error in errors.items()]
    return "\n".join(lines).rstrip() + "\n"


def is_wanted(key: tuple[str, str, str, str], only: str | None) -> bool:
    """Whether `--only` names the row: by the words it begins with, or by one in it."""
    row = " ".join((LABELS[key[0]], *key[1:])).lower()
    names = [name.strip().lower() for name in (only or "").split(",") if name.strip()]
    return not names or any(row.startswith(name) or f" {name} " in f" {row} " for name in names)


def asked(running: dict, key: tuple[str, str, str, str], options) -> dict:
    """One row; a process that has ended is an error, and is started again."""
    case, dtype, library, name = key
    try:
        return running[library].ask(name=name, case=case, dtype=dtype)
    except (RuntimeError, OSError) as error:
        running[library] = start(library, options)
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def compare(options) -> str:
    """Start all libraries, ask each in turn, and write the table behind every row."""
    there = {"upstream": bool(options.upstream), "torchao": options.torchao}
    keys = [(*case, library, name) for case in CASES for library in LIBRARIES for name in LIBRARIES[library]]
    keys = [key for key in keys if there.get(key[2], True) and is_wanted(key, options.only)]
    running = {library: start(library, options) for library in LIBRARIES if any(key[2] == library for key in keys)}
    versions = {library: process.ask() for library, process in running.items()}
    for library in [library for library, seen in versions.items() if "missing" in seen]:
        print(f"{library} does not take part: {versions.pop(library)['missing']}", file=sys.stderr)
        running.pop(library).close()
    rounds: dict = {}
    report = ""
    for number in range(options.rounds):
        for key in [key for key in keys if key[2] in running]:
            rounds.setdefault(key, []).append(asked(running, key, options))
            print(f"round {number + 1}: {' '.join(key)} {rounds[key][-1]}", file=sys.stderr, flush=True)
            report = text({key: best(results) for key, results in rounds.items()}, versions, options)
            if options.out:
                options.out.write_text(report)
    for process in running.values():
        process.close()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--upstream", default=os.environ.get("BITSHARD_UPSTREAM"), help="folder with bitsandbytes/")
    parser.add_argument("--torchao", action="store_true", help="torchao takes part where it can be imported")
    parser.add_argument("--only", help="rows, with commas between")
    parser.add_argument("--rounds", type=int, help="default: 3 on a CPU, 1 on a GPU")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0, help="on a CPU: time for each row and round")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    parser.add_argument("--contestant", choices=tuple(LIBRARIES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant:
        contestant(options)
        return
    options.rounds = options.rounds or (1 if options.device == "cuda" else 3)
    print(compare(options))


if __name__ == "__main__":
    main()
