"""Times of the CPU ops beside upstream bitsandbytes' CPU build, torch's own linears, and the memory limits.

    python benchmarks/bench.py [--upstream FOLDER_WITH_UPSTREAM_BITSANDBYTES] [--threads 2] [--size 4096]
    python benchmarks/bench.py --report [FILE] [--device cuda:0] [--quick]

bitshard (through its façade), upstream and plain torch run the same code in processes of their own, one at a time, case
by case in turn, --rounds times; a number is the median over rounds of a round's median. Weights are rotated over enough
copies (128 MB) that no case reads them from the last-level cache only because it read them just before. What returns or
needs a whole decoded weight spends much of its time on page faults of fresh memory: a second table has those cases with
a malloc that keeps what is freed. Without --upstream its wheel is fetched with pip into a temporary folder. Writes a
Markdown table and a plot into benchmarks/results.

--report is something else: one file about this GPU (or this CPU) to send in, made in less than three minutes: what it
is, whether results are exact on it, and times (report.py).
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from timing import ROOT, Contestant, commit, cpu_name_and_flags, markdown_table, median_ms, serve

UPSTREAM = "bitsandbytes==0.50.2"
M_VALUES = (1, 4, 16, 64, 256)
ROTATE_BYTES = 128 << 20
WARM = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}  # glibc: freed memory stays, and stays mapped


# ---- what a contestant runs ------------------------------------------------------------------------------------------


def bitsandbytes_cases(size: int):
    """answer(op, M, nested) of a process in which `bitsandbytes` is either the façade or upstream's."""
    import copy

    import bitsandbytes
    import torch
    from bitsandbytes import functional

    dense = torch.randn(size, size).bfloat16() / size**0.5
    copies = max(1, ROTATE_BYTES // (size * size // 2))
    quantized = {}
    for nested in (False, True):
        packed, state = functional.quantize_4bit(dense, blocksize=64, compress_statistics=nested, quant_type="nf4")
        quantized[nested] = [(packed.clone(), copy.deepcopy(state)) for _ in range(copies)]

    def answer(op: str, M: int = 0, nested: bool = False) -> dict:
        weights = quantized[nested]

        def pick(i):
            return weights[i % copies]

        if op == "about":
            return {"version": bitsandbytes.__version__, "file": bitsandbytes.__file__}
        if op == "quantize":
            return {
                "ms": median_ms(
                    lambda i: functional.quantize_4bit(
                        dense, blocksize=64, compress_statistics=nested, quant_type="nf4"
                    )
                )
            }
        if op == "dequantize":
            return {"ms": median_ms(lambda i: functional.dequantize_4bit(*pick(i)))}
        if op == "matmul":
            x = torch.randn(M, size).bfloat16()
            with torch.no_grad():
                return {"ms": median_ms(lambda i: bitsandbytes.matmul_4bit(x, pick(i)[0].t(), quant_state=pick(i)[1]))}
        if op == "module":
            return module_case(M, nested)
        x = torch.randn(M, size).bfloat16().requires_grad_()
        graphs = [bitsandbytes.matmul_4bit(x, packed.t(), quant_state=state) for packed, state in weights]
        dy = torch.randn(M, size).bfloat16()
        return {"ms": median_ms(lambda i: torch.autograd.grad(graphs[i % copies], x, dy, retain_graph=True))}

    def module_case(M: int, nested: bool) -> dict:
        """Linear4bit in eval mode; on CPUs with AVX512-BF16 upstream repacks its weight for this, once."""
        layers = []
        for _ in range(copies):
            layer = bitsandbytes.nn.Linear4bit(
                size,
                size,
                bias=False,
                compute_dtype=torch.bfloat16,
                compress_statistics=nested,
                quant_type="nf4",
                device="meta",
            )
            packed, state = quantized[nested][0]
            layer.weight = bitsandbytes.nn.Params4bit(
                packed.clone(),
                requires_grad=False,
                quant_state=copy.deepcopy(state),
                bnb_quantized=True,
                quant_type="nf4",
                compress_statistics=nested,
                module=layer,
            )
            layers.append(layer.eval())
        x = torch.randn(M, size).bfloat16()
        with torch.no_grad():
            for layer in layers:
                layer(x)
            return {"ms": median_ms(lambda i: layers[i % copies](x))}

    return answer


def torch_cases(size: int):
    """answer(op, M) for dense linears, their input gradients, and the speed of memory."""
    import torch

    weights = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        copies = max(1, ROTATE_BYTES // (size * size * dtype.itemsize))
        weights[name] = [torch.randn(size, size).to(dtype) / size**0.5 for _ in range(copies)]
    source = torch.empty(ROTATE_BYTES, dtype=torch.uint8).random_()
    target = torch.empty_like(source)
    words = source.view(torch.int64)
    values = source.view(torch.bfloat16).split(size * size)  # of several weights, as dequantize returns them

    def answer(op: str, M: int = 0, dtype: str = "bf16") -> dict:
        if op == "copy":  # bytes read and bytes written
            return {"gb_s": 2 * ROTATE_BYTES / median_ms(lambda i: target.copy_(source)) / 1e6}
        if op == "clone":  # into memory that is allocated for it, as the result of an op is
            return {"gb_s": 2 * values[0].nbytes / median_ms(lambda i: values[i % len(values)].clone()) / 1e6}
        if op == "read":
            return {"gb_s": ROTATE_BYTES / median_ms(lambda i: words.sum()) / 1e6}
        ws = weights[dtype]
        x = torch.randn(M, size).to(ws[0].dtype)
        if op == "matmul":
            return {"ms": median_ms(lambda i: torch.nn.functional.linear(x, ws[i % len(ws)]))}
        return {"ms": median_ms(lambda i: torch.mm(x, ws[i % len(ws)]))}

    return answer


def contestant(kind: str, arguments, upstream: str, warm: bool = False) -> Contestant:
    paths = {
        "bitshard": [str(ROOT / "python"), str(ROOT / "python" / "bitsandbytes" / "src")],
        "upstream": [upstream],
        "torch": [],
    }
    environment = {**os.environ, **(WARM if warm else {}), "PYTHONPATH": os.pathsep.join(paths[kind])}
    command = [sys.executable, __file__, "--contestant", kind]
    command += ["--threads", str(arguments.threads), "--size", str(arguments.size)]
    return Contestant(command, environment)


# ---- the comparison --------------------------------------------------------------------------------------------------


def cases() -> list[dict]:
    both = (False, True)
    small = [{"op": op, "M": 0, "nested": nested} for op in ("quantize", "dequantize") for nested in both]
    matmuls = [
        {"op": op, "M": M, "nested": nested}
        for op in ("matmul", "module", "gradient")
        for M in M_VALUES
        for nested in both
    ]
    return small + matmuls


def compare(arguments, upstream: str) -> dict:
    """{(op, M, nested, contestant): ms}, and the limits under "copy", "read", "clone" and "clone warm" in GB/s.

    Medians over rounds.
    """
    players = {kind: contestant(kind, arguments, upstream) for kind in ("bitshard", "upstream", "torch")}
    players |= {f"{kind} warm": contestant(kind, arguments, upstream, warm=True) for kind in tuple(players)}
    for kind, folder in (("bitshard", str(ROOT)), ("upstream", upstream)):
        about = players[kind].ask(op="about")
        if not Path(about["file"]).resolve().is_relative_to(Path(folder).resolve()):
            raise RuntimeError(f"{kind} runs {about['file']}, expected bitsandbytes in {folder}")
    times: dict = {}

    def note(key, value):
        times.setdefault(key, []).append(value)
        return value

    for turn in range(arguments.rounds):
        for limit in ("copy", "read"):
            note(limit, players["torch"].ask(op=limit)["gb_s"])
        for where in ("", " warm"):
            note(f"clone{where}", players[f"torch{where}"].ask(op="clone")["gb_s"])
        for case in cases():
            key = tuple(case.values())
            for kind in ("bitshard", "upstream", *(("bitshard warm", "upstream warm") if has_warm(case) else ())):
                note((*key, kind), players[kind].ask(**case)["ms"])
            if case["M"] and not case["nested"] and case["op"] != "module":
                for dtype in ("bf16", "fp32"):
                    request = {"op": case["op"], "M": case["M"], "dtype": dtype}
                    note((case["op"], case["M"], dtype), players["torch"].ask(**request)["ms"])
        print(f"round {turn + 1} of {arguments.rounds} done", file=sys.stderr)
    for player in players.values():
        player.close()
    return {key: statistics.median(values) for key, values in times.items()}


def has_warm(case: dict) -> bool:
    return case["op"] not in ("quantize", "module")


def warm_rows(t: dict, size: int) -> list[list[str]]:
    rows = []
    for case in filter(has_warm, cases()):
        ours, theirs = (t[(*case.values(), f"{kind} warm")] for kind in ("bitshard", "upstream"))
        name = f"{case['op']}{' nested' if case['nested'] else ''}"
        share = moved_bytes("dequantize", size, case["nested"]) / ours / 1e6 / t["clone warm"]
        rows.append([name, str(case["M"] or "-"), f"{ours:.2f}", f"{theirs:.2f}", f"{theirs / ours:.1f}x"])
        rows[-1].append("-" if case["M"] else f"{share:.2f}")
    return rows


def moved_bytes(op: str, size: int, nested: bool) -> int:
    """Bytes an op must read and write at least, bf16 outside, blocksize 64; activations are left out."""
    n = size * size
    packed = n // 2 + n // 64 * (1 if nested else 4) + (n // 64 // 256 * 4 if nested else 0)
    return packed + (0 if op in ("matmul", "module", "gradient") else 2 * n)


def elementwise_rows(t: dict, size: int) -> list[list[str]]:
    rows = []
    for op in ("quantize", "dequantize"):
        for nested in (False, True):
            ours, theirs = t[op, 0, nested, "bitshard"], t[op, 0, nested, "upstream"]
            share = moved_bytes(op, size, nested) / ours / 1e6 / t["clone" if op == "dequantize" else "copy"]
            name = f"{op}{' nested' if nested else ''}"
            rows.append([name, f"{ours:.2f}", f"{theirs:.2f}", f"{theirs / ours:.1f}x", f"{share:.2f}"])
    return rows


def matmul_rows(t: dict, size: int) -> list[list[str]]:
    rows = []
    for op in ("matmul", "module", "gradient"):
        dense = "matmul" if op == "module" else op
        for M in M_VALUES:
            bf16, fp32 = t[dense, M, "bf16"], t[dense, M, "fp32"]
            for nested in (False, True):
                ours, theirs = t[op, M, nested, "bitshard"], t[op, M, nested, "upstream"]
                share = moved_bytes(op, size, nested) / ours / 1e6 / t["read"]
                rows.append(
                    [
                        f"{op}{' nested' if nested else ''}",
                        *(str(M), f"{ours:.2f}", f"{theirs:.2f}", f"{theirs / ours:.1f}x"),
                        *(f"{bf16:.2f}", f"{bf16 / ours:.2f}", f"{fp32:.2f}", f"{fp32 / ours:.2f}"),
                        f"{share:.2f}" if M == 1 else "-",
                    ]
                )
    return rows


def report(t: dict, arguments) -> str:
    import torch

    sys.path.insert(0, str(ROOT / "python"))
    import bitshard._C as core

    cpu, flags = cpu_name_and_flags()
    size = arguments.size
    first = ["op", "bitshard ms", "upstream ms", "faster", "share of copy"]
    second = ["op", "M", "bitshard ms", "upstream ms", "faster"]
    second += ["bf16 linear ms", "speed to bf16", "fp32 linear ms", "speed to fp32", "share of read"]
    return f"""# CPU: {cpu}, {arguments.threads} threads, {datetime.date.today():%Y-%m-%d}

NF4, weight {size} x {size}, blocksize 64, bf16 activations; milliseconds, median of {arguments.rounds} rounds in turn.
"speed to bf16" and "speed to fp32": time of torch's `F.linear` (input gradient: `mm`) of that dtype over ours.
"module" is `Linear4bit` in eval mode, for which upstream repacks its weight on CPUs with AVX512-BF16.
Limits in the same run: copy {t["copy"]:.1f} GB/s (read + written), read {t["read"]:.1f} GB/s; a copy into memory that
is allocated for it, as the result of dequantize is, {t["clone"]:.1f} GB/s, and with warm memory (below)
{t["clone warm"]:.1f} GB/s: dequantize is compared with that, quantize with a copy into memory that is there.

{markdown_table(first, elementwise_rows(t, size))}

{markdown_table(second, matmul_rows(t, size))}

The same with warm memory ({" ".join(f"{k}={v}" for k, v in WARM.items())}), without the page faults of a
decoded weight. With glibc's defaults they are paid in every call, and their price varies with the state of the machine.

{markdown_table([*second[:5], "share of copy"], warm_rows(t, size))}

- instruction set: {core.isa()}; flags: {" ".join(flags)}
- bitshard {core.version}, commit {commit("csrc/cpu")}; upstream {UPSTREAM}
- torch {torch.__version__}, Python {sys.version.split()[0]}
- command: `python benchmarks/bench.py --threads {arguments.threads} --size {size} --rounds {arguments.rounds}`
"""


def plot(t: dict, path: Path) -> None:
    """Time over M: matmul and input gradient, nested scales."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for axis, op in zip(axes, ("matmul", "gradient"), strict=True):
        axis.plot(M_VALUES, [t[op, M, True, "bitshard"] for M in M_VALUES], "o-", label="bitshard")
        axis.plot(M_VALUES, [t[op, M, True, "upstream"] for M in M_VALUES], "s--", label="bitsandbytes")
        for dtype in ("bf16", "fp32"):
            axis.plot(M_VALUES, [t[op, M, dtype] for M in M_VALUES], ":", label=f"dense {dtype}")
        axis.set(xscale="log", yscale="log", title=f"{op}_4bit, nested" if op == "matmul" else "input gradient, nested")
        axis.set_xticks(M_VALUES, [str(M) for M in M_VALUES])
        axis.set_xlabel("rows of x")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("ms")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def fetch_upstream(folder: str) -> str:
    """Unpacks upstream's wheel into `folder`, where nothing else is."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, UPSTREAM]
    subprocess.run(command, check=True)
    return folder


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream", help="folder that holds upstream's unpacked `bitsandbytes` package")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--report", nargs="?", const="", metavar="FILE", help="write one file about this machine's GPU")
    parser.add_argument("--device", help="of --report: cuda, cuda:1, cpu; the first GPU if left out")
    parser.add_argument("--quick", action="store_true", help="of --report: small sizes, to see that it runs")
    parser.add_argument("--contestant", choices=("bitshard", "upstream", "torch"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.report is not None:
        import report as machine_report

        path = machine_report.write(arguments.report or None, arguments.device, arguments.quick)
        print(f"written to {path}\n{machine_report.SEND}")
        return
    if arguments.contestant:
        import torch

        torch.set_num_threads(arguments.threads)
        torch.manual_seed(0)
        serve((torch_cases if arguments.contestant == "torch" else bitsandbytes_cases)(arguments.size))
        return
    with tempfile.TemporaryDirectory() as temporary:
        t = compare(arguments, arguments.upstream or fetch_upstream(temporary))
    text = report(t, arguments)
    name = re.sub(r"[^a-z0-9]+", "-", cpu_name_and_flags()[0].lower()).strip("-")
    path = ROOT / "benchmarks" / "results" / f"cpu_{name}_{datetime.date.today():%Y%m}.md"
    path.write_text(text)
    if importlib.util.find_spec("matplotlib"):
        plot(t, path.with_suffix(".png"))
    print(text + f"\nwritten to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
