"""Times of LLM.int8() on the CPU: bitshard's ops beside upstream bitsandbytes' CPU build and torch's bf16 `F.linear`.

    python benchmarks/int8_cpu.py --upstream FOLDER_WITH_UPSTREAM_BITSANDBYTES [--threads 2] [--out RESULT.md]
    python benchmarks/int8_cpu.py --upstream FOLDER_WITH_UPSTREAM_BITSANDBYTES --threads 1 --clock cpu

The three run in processes of their own, one at a time, case by case in turn, --rounds times; a number is the least of
all calls. Weights are rotated over enough copies (128 MB) that no case reads them from the last-level cache only
because it read them just before. Where other programs run, too, the CPU time of one thread says more than wall time.
bitshard runs the op, upstream what its layer runs: `matmul` of a frozen int8 weight,
`int8_vectorwise_quant`, `int8_linear_matmul`, and a dense weight and `matmul` for the gradient, as its backward does.
x is bf16, with 8 columns of outliers in every row where the threshold is 6.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

from timing import Contestant, commit, cpu_name_and_flags, markdown_table, serve

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
ROWS = (1, 4, 8, 16, 64, 256, 1024)
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336))  # N, K
ROTATE_BYTES = 128 << 20
OUTLIERS = 8
# What each contestant can run; torch's "linear" and "gradient" are dense.
LINEARS = ("linear 0", "linear 6", "gradient")
OPS = (*LINEARS, "product", "quantize 0", "quantize 6")


def least_ms(call: Callable[[int], object], seconds: float, clock: str) -> float:
    """Least milliseconds of call(i), i = 0, 1, ..., of which two warm up."""
    now = CLOCKS[clock]
    call(0), call(1)
    least, end, i = float("inf"), now() + seconds, 2
    while i < 6 or now() < end:
        begin = now()
        call(i)
        least, i = min(least, now() - begin), i + 1
    return least * 1e3


def inputs(M: int, N: int, K: int):
    """x [M, K] bf16 with outlier columns, and dy [M, N]."""
    import torch

    generator = torch.Generator().manual_seed(M + N + K)
    x = torch.randn(M, K, generator=generator)
    x[:, torch.randperm(K, generator=generator)[:OUTLIERS]] = 20.0
    return x.bfloat16(), torch.randn(M, N, generator=generator).bfloat16()


def weights(N: int, K: int, itemsize: int) -> list:
    """Copies of int8 codes and a scale for each row."""
    import torch

    codes = torch.randint(-127, 128, (N, K), dtype=torch.int8)
    return [codes.clone() for _ in range(max(2, ROTATE_BYTES // (N * K * itemsize)))], torch.rand(N) * 0.1 + 0.05


def bitshard_cases(N: int, K: int) -> Callable:
    import torch
    from bitshard import ops

    codes, absmax = weights(N, K, 1)
    none = torch.empty(0)

    def call(op: str, M: int) -> Callable[[int], object]:
        (x, dy), threshold = inputs(M, N, K), 6.0 if op.endswith("6") else 0.0
        a = ops.quantize_int8(x, 0.0)[0]
        return {
            "linear": lambda i: ops.linear_int8(x, codes[i % len(codes)], absmax, none, threshold, N, K),
            "gradient": lambda i: ops.linear_int8_dgrad(dy, codes[i % len(codes)], absmax, N, K),
            "product": lambda i: ops.product_int8(a, codes[i % len(codes)]),
            "quantize": lambda i: ops.quantize_int8(x, threshold),
        }[op.split()[0]]

    return call


def upstream_cases(N: int, K: int) -> Callable:
    import logging

    import bitsandbytes
    import torch
    from bitsandbytes import functional

    logging.disable(logging.WARNING)  # a warning in every call that x is cast to fp16
    codes, absmax = weights(N, K, 1)
    state = bitsandbytes.MatmulLtState()
    state.has_fp16_weights, state.is_training, state.SCB = False, False, absmax

    def multiply(x, threshold: float, i: int):
        state.threshold, state.CB = threshold, codes[i % len(codes)]
        return bitsandbytes.matmul(x, state.CB, state=state)

    def gradient(dy, i: int):
        weight = codes[i % len(codes)].to(dy.dtype).mul_(absmax.unsqueeze(1).mul(1.0 / 127.0))
        return torch.matmul(dy, weight.to(dy.dtype))

    def call(op: str, M: int) -> Callable[[int], object]:
        (x, dy), threshold = inputs(M, N, K), 6.0 if op.endswith("6") else 0.0
        a = functional.int8_vectorwise_quant(x.half())[0]
        return {
            "linear": lambda i: multiply(x, threshold, i),
            "gradient": lambda i: gradient(dy, i),
            "product": lambda i: functional.int8_linear_matmul(a, codes[i % len(codes)]),
            "quantize": lambda i: functional.int8_vectorwise_quant(x.half(), threshold),
        }[op.split()[0]]

    return call


def torch_cases(N: int, K: int) -> Callable:
    import torch

    dense = [codes.bfloat16() for codes in weights(N, K, 2)[0]]

    def call(op: str, M: int) -> Callable[[int], object]:
        x, dy = inputs(M, N, K)
        return {
            "linear": lambda i: torch.nn.functional.linear(x, dense[i % len(dense)]),
            "gradient": lambda i: torch.mm(dy, dense[i % len(dense)]),
        }[op.split()[0]]

    return call


def contest(kind: str, threads: int, clock: str) -> None:
    """Answers (shape, op, M, seconds) with milliseconds; weights of one shape are kept at a time."""
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    make = {"bitshard": bitshard_cases, "upstream": upstream_cases, "torch": torch_cases}[kind]
    kept: dict = {}

    def answer(shape: list, op: str, M: int, seconds: float) -> dict:
        if op == "about":
            module = sys.modules.get("bitsandbytes") or sys.modules.get("bitshard")
            return {"file": getattr(module, "__file__", "")}
        if tuple(shape) not in kept:
            kept.clear()
            kept[tuple(shape)] = make(*shape)
        return {"ms": least_ms(kept[tuple(shape)](op, M), seconds, clock)}

    serve(answer)


def contestant(kind: str, options: argparse.Namespace) -> Contestant:
    folder = {"bitshard": os.environ.get("BITSHARD_ENGINE", ""), "upstream": options.upstream}
    environment = {**os.environ, "PYTHONPATH": folder.get(kind, "")}
    command = [sys.executable, __file__, "--contestant", kind, "--threads", str(options.threads)]
    command += ["--clock", options.clock]
    return Contestant(command, environment)


def compare(options: argparse.Namespace) -> dict:
    """{(shape, op, M, contestant): least milliseconds}."""
    players = {kind: contestant(kind, options) for kind in ("bitshard", "upstream", "torch")}
    times: dict = {}
    for shape in options.shapes:
        for turn in range(options.rounds):
            for op in options.ops:
                for M in options.rows:
                    for kind, player in players.items():
                        if kind == "torch" and op.split()[0] not in ("linear", "gradient"):
                            continue
                        found = player.ask(shape=shape, op=op, M=M, seconds=options.seconds)["ms"]
                        key = (shape, op, M, kind)
                        times[key] = min(found, times.get(key, found))
            print(f"{shape}: round {turn + 1} of {options.rounds} done", file=sys.stderr)
    for player in players.values():
        player.close()
    return times


def table(times: dict, options: argparse.Namespace) -> str:
    header = ["N x K", "op", "M", "bitshard ms", "upstream ms", "faster", "bf16 ms", "speed to bf16"]
    rows = []
    for shape in options.shapes:
        for op in options.ops:
            for M in options.rows:
                ours, theirs = (times[shape, op, M, kind] for kind in ("bitshard", "upstream"))
                dense = times.get((shape, op, M, "torch"))
                to_dense = [f"{dense:.3f}", f"{dense / ours:.2f}"] if dense else ["-", "-"]
                name = f"{shape[0]} x {shape[1]}"
                rows.append([name, op, str(M), f"{ours:.3f}", f"{theirs:.3f}", f"{theirs / ours:.2f}", *to_dense])
    return markdown_table(header, rows)


def report(times: dict, options: argparse.Namespace) -> str:
    import torch

    cpu, flags = cpu_name_and_flags()
    names = {options.upstream: "FOLDER", str(options.out): "RESULT.md"}
    given = shlex.join(names.get(word, word) for word in sys.argv[1:])
    return f"""# LLM.int8() on the CPU: {cpu}, {options.threads} threads, {datetime.date.today():%Y-%m-%d}

Least milliseconds ({options.clock} time) of {options.rounds} rounds in turn; bf16.
"linear 6": threshold 6, {OUTLIERS} columns of outliers.
"faster": upstream's time over ours. "speed to bf16": time of torch's `F.linear` (gradient: `mm`) over ours.
The load of the machine was {os.getloadavg()[0]:.1f} at the end, this run included.

{table(times, options)}

- flags: {" ".join(flags)}
- commit {commit("csrc/cpu")}; upstream bitsandbytes 0.50.2; torch {torch.__version__}, Python {sys.version.split()[0]}
- command: `python benchmarks/int8_cpu.py {given}`
"""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream", help="folder that holds upstream's unpacked `bitsandbytes` package")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.2, help="of one case of one contestant in one round")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: CPU time, for a machine that is not idle")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, type=lambda text: tuple(map(int, text.split("x"))))
    parser.add_argument("--ops", nargs="+", default=OPS, choices=OPS)
    parser.add_argument("--out", type=Path, help="file for the report")
    parser.add_argument("--contestant", choices=("bitshard", "upstream", "torch"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.contestant:
        contest(options.contestant, options.threads, options.clock)
        return
    if not options.upstream:
        sys.exit("--upstream: name the folder that holds upstream's bitsandbytes package")
    text = report(compare(options), options)
    if options.out:
        options.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
