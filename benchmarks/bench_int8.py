"""LLM.int8 on a GPU: speed beside fp16 F.linear and beside the original bitsandbytes, bits, and errors against fp64.

    python benchmarks/bench_int8.py [--only 4096x4096,...] [--rows 1,16,256] [--directions forward,dgrad]
                                    [--dtype float16] [--kernel gemm_int8] [--dgrad-kernels panels] [--seconds 240]

Prints what must be exact first, then a row for each shape and number of rows as soon as it is measured. GPU times are
of CUDA graphs of about 6 ms, over weights that rotate through more than 230 MB, ways taking turns, median of 5:
microseconds, and dense time over it. Columns: gemv_int8, forced, at 17 to 64 rows; threshold 0, then threshold 6 with
0, 8 and 64 outlier columns; of the input gradient, kernels. The error is |y - y64| / |y64| of the first 64 rows;
"dense" that of F.linear with W dequantized to the dtype. The original, where it can be imported (its package with
libbitsandbytes_cuda130.so on the path), waits for the GPU: its times, and ours beside them, are of calls one by one.
Ends with status 1 where something that must be exact is not.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from functools import partial

import timing  # noqa: F401 - so that the plug-in stays out of the original
import torch
from bitshard import _C, ops
from turns import microseconds

SHAPES = "4096x4096,14336x4096,28672x8192"
ROWS = "1,4,8,16,32,64,128,256,512,1024,4096"
ROTATION_BYTES = 230e6
CASES = ((0.0, 0), (6.0, 0), (6.0, 8), (6.0, 64))  # threshold, outlier columns
ORIGINAL_ROWS = (1, 16, 256, 4096)
failures: list[str] = []


def expect(good: bool, what: str) -> None:
    print(("ok      " if good else "WRONG   ") + what, flush=True)
    if not good:
        failures.append(what)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))
    )


def original():
    """The original's module, or None."""
    found = importlib.util.find_spec("bitsandbytes")
    if found is None or "bitshard" in open(found.origin, encoding="utf-8").read():
        return None
    import bitsandbytes

    return bitsandbytes


def activations(M: int, K: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Inliers below 5; of each outlier column every fourth row or so is 20."""
    x = torch.randn(M, K, device="cuda").clamp_(-5, 5)
    if columns:
        where = torch.randperm(K, device="cuda")[:columns]
        x[torch.randint(M, (max(1, M // 4), 1), device="cuda"), where] = 20.0
        x[0, where] = -20.0
    return x.to(dtype)


class Layer:
    """Weights of one shape, int8 and dense, as many as rotate through L2."""

    def __init__(self, N: int, K: int, dtype: torch.dtype):
        self.N, self.K, self.dtype = N, K, dtype
        many, few = (max(2, -(-int(ROTATION_BYTES) // (N * K * size))) for size in (1, 2))
        self.weights = [self.quantized() for _ in range(many)]
        self.dense = [torch.randn(N, K, device="cuda", dtype=dtype) * 0.02 for _ in range(few)]

    def quantized(self) -> tuple[torch.Tensor, torch.Tensor]:
        w = torch.randn(self.N, self.K, device="cuda", dtype=torch.float16) * 0.02
        codes, absmax, _ = ops.quantize_int8(w, 0.0)
        return codes, absmax

    def ours(self, direction: str, x: torch.Tensor, threshold: float, i: int) -> torch.Tensor:
        packed, absmax = self.weights[i % len(self.weights)]
        if direction == "dgrad":
            return ops.linear_int8_dgrad(x, packed, absmax, self.N, self.K)
        return ops.linear_int8(x, packed, absmax, x.new_empty(0), threshold, self.N, self.K)

    def vendor(self, direction: str, x: torch.Tensor, i: int) -> torch.Tensor:
        w = self.dense[i % len(self.dense)]
        return x @ w if direction == "dgrad" else torch.nn.functional.linear(x, w)

    def exact(self, direction: str, x: torch.Tensor) -> torch.Tensor:
        packed, absmax = self.weights[0]
        w = packed.double() * (absmax.double() / 127)[:, None]
        return x.double() @ (w if direction == "dgrad" else w.T)

    def dense_error(self, direction: str, x: torch.Tensor, exact: torch.Tensor) -> float:
        packed, absmax = self.weights[0]
        w = ops.dequantize_int8(packed, absmax, self.N, self.K, self.dtype)
        return relative(x @ w if direction == "dgrad" else torch.nn.functional.linear(x, w), exact)


def relative(y: torch.Tensor, exact: torch.Tensor) -> float:
    return ((y.double() - exact).norm() / exact.norm()).item()


# ---- what must be exact ----


def check_codes(bnb) -> None:
    """Every absmax that fp16 has; codes, scales and flags are the CPU's and the original's."""
    top = torch.arange(1, 0x7C00, dtype=torch.int16).view(torch.float16)
    part = torch.rand(top.numel(), 63, generator=torch.Generator().manual_seed(0)) * 2 - 1
    x = torch.cat([top[:, None], (part * top[:, None].float()).half()], 1).contiguous()
    for threshold in (0.0, 6.0):
        found, expected = ops.quantize_int8(x.cuda(), threshold), ops.quantize_int8(x, threshold)
        expect(all(map(same, found, expected)), f"quantize_int8, every fp16 absmax, threshold {threshold}: the CPU's")
    for dtype in (torch.float32, torch.bfloat16):
        y = torch.randn(300, 4096, generator=torch.Generator().manual_seed(1)).to(dtype)
        expect(all(map(same, ops.quantize_int8(y.cuda(), 3.0), ops.quantize_int8(y, 3.0))), f"quantize_int8 of {dtype}")
    if bnb is None:
        return
    for threshold in (0.0, 6.0):
        for name, one in (("every absmax", x.cuda()), ("outliers", activations(512, 4096, 8, torch.float16))):
            codes, absmax, columns = torch.ops.bitsandbytes.int8_vectorwise_quant(one, threshold)
            ours = ops.quantize_int8(one, threshold)
            good = torch.equal(ours[0], codes) and torch.equal(ours[1], absmax.flatten())
            if threshold > 0:
                good = good and torch.equal(ours[2].nonzero().flatten(), columns.flatten())
            expect(good, f"quantize_int8, {name}, threshold {threshold}: the original's")


def check_products(bnb) -> None:
    """Sums, their scaling, and layers of many rows, to the bit."""
    for M, N, K in ((300, 520, 1040), (17, 33, 129), (64, 4096, 4096), (512, 4096, 4096)):
        a, b = (torch.randint(-127, 128, (n, K), dtype=torch.int8, device="cuda") for n in (M, N))
        row, col = torch.rand(M, device="cuda") * 5, torch.rand(N, device="cuda")
        bias = torch.randn(N, device="cuda", dtype=torch.float16)
        sums = ops.product_int8(a, b)
        expect(torch.equal(sums, (a.double() @ b.double().T).int()), f"product_int8 {M} x {N} x {K}")
        for one in (bias, bias.new_empty(0)):
            y = ops.scale_product_int8(sums, row, col, one, torch.float16)
            cpu = ops.scale_product_int8(sums.cpu(), row.cpu(), col.cpu(), one.cpu(), torch.float16)
            expect(same(y, cpu), f"scale_product_int8 {M} x {N}: the CPU's")
            if bnb is not None:
                theirs = torch.ops.bitsandbytes.int8_mm_dequant(
                    sums, row, col, dtype=torch.float16, bias=one if one.numel() else None
                )
                expect(torch.equal(y, theirs), f"scale_product_int8 {M} x {N}: the original's")
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            x = torch.randn(M, K, device="cuda").to(dtype)
            codes, absmax, _ = ops.quantize_int8(x, 0.0)
            expected = ops.scale_product_int8(ops.product_int8(codes, b), absmax, col, x.new_empty(0), dtype)
            for threshold in (0.0, 6.0):
                y = ops.linear_int8(x, b, col, x.new_empty(0), threshold, N, K)
                again = ops.linear_int8(x, b, col, x.new_empty(0), threshold, N, K)
                expect(same(y, again), f"linear_int8 {M} x {N} x {K} {dtype} {threshold}: the same twice")
                if M > 128 or (M > 32 and threshold == 0):
                    expect(same(y, expected), f"linear_int8 {M} x {N} x {K} {dtype} {threshold}: the product scaled")


# ---- speed ----


def row_of(layer: Layer, direction: str, M: int, times: dict, errors: list[float], dense: float) -> str:
    base = times.pop("dense")
    cells = [f"{layer.N}x{layer.K}", direction, str(M), f"{base:.1f}"]
    cells += ["-" if one is None else f"{one:.1f} ({base / one:.2f})" for one in times.values()]
    cells.append(f"{dense:.1e} " + " ".join(f"{one:.1e}" for one in errors))
    return "| " + " | ".join(cells) + " |"


def forward(layer: Layer, M: int, kernel: str | None) -> str:
    """Thresholds and outlier columns of CASES; then gemv_int8, forced, where it takes as many rows."""
    xs = [activations(M, layer.K, columns, layer.dtype) for _, columns in CASES]
    calls = {"dense": lambda i: layer.vendor("forward", xs[0], i)}
    errors, dense = [], 0.0
    _C.force_kernel("linear_int8", kernel)
    for at, (threshold, columns) in enumerate(CASES):
        exact = layer.exact("forward", xs[at][:64])
        errors.append(relative(layer.ours("forward", xs[at], threshold, 0)[:64], exact))
        dense = layer.dense_error("forward", xs[at][:64], exact) if at == 0 else dense
        calls[f"{threshold} {columns}"] = partial(layer.ours, "forward", xs[at], threshold)

    def prepare(name: str) -> None:
        _C.force_kernel("linear_int8", "gemv_int8" if name == "gemv_int8" else kernel)

    if 16 < M <= 64:
        calls["gemv_int8"] = partial(layer.ours, "forward", xs[0], 0.0)
    times = microseconds(calls, False, prepare)
    prepare("")
    return row_of(layer, "forward", M, {"gemv_int8": None} | times, errors, dense)


def gradient(layer: Layer, M: int, kernels: list[str]) -> str:
    """Each kernel, forced."""
    dy = torch.randn(M, layer.N, device="cuda", dtype=layer.dtype)
    exact, errors = layer.exact("dgrad", dy[:64]), []
    calls = {"dense": lambda i: layer.vendor("dgrad", dy, i)}
    for kernel in kernels:
        _C.force_kernel("linear_int8_dgrad", kernel)
        try:
            errors.append(relative(layer.ours("dgrad", dy, 0.0, 0)[:64], exact))
        except RuntimeError as refused:
            if "cannot multiply" not in str(refused):
                raise
            continue
        calls[kernel] = partial(layer.ours, "dgrad", dy, 0.0)

    def prepare(name: str) -> None:
        _C.force_kernel("linear_int8_dgrad", name if name in kernels else None)

    times = microseconds(calls, False, prepare)
    prepare("")
    times = {name: times.get(name) for name in ("dense", *kernels)}
    return row_of(layer, "dgrad", M, times, errors, layer.dense_error("dgrad", dy[:64], exact))


def one_by_one(call, n: int = 30) -> float:
    """Median microseconds of calls that may wait for the GPU, a call at a time."""
    times = []
    for i in range(n + 3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def beside_the_original(bnb, layer: Layer) -> None:
    """Calls one by one, fp16; bits of layers of many rows at threshold 0, errors against fp64."""
    theirs = bnb.nn.Linear8bitLt(layer.K, layer.N, bias=False, has_fp16_weights=False, threshold=0.0)
    w = torch.randn(layer.N, layer.K).half() * 0.02
    theirs.weight = bnb.nn.Int8Params(w, requires_grad=False, has_fp16_weights=False)
    theirs = theirs.cuda()
    with torch.no_grad():
        theirs(activations(2, layer.K, 0, torch.float16))
        packed, absmax = theirs.state.CB, theirs.state.SCB
        layer.weights[0] = (packed, absmax)
        for M in ORIGINAL_ROWS:
            for threshold, columns in CASES:
                x = activations(M, layer.K, columns, torch.float16)
                theirs.state.threshold = threshold
                y, our = theirs(x), layer.ours("forward", x, threshold, 0)
                if M > 128 and columns == 0:
                    expect(
                        torch.equal(y, our),
                        f"{layer.N} x {layer.K}, {M} rows, threshold {threshold}: the original's bits",
                    )
                exact = layer.exact("forward", x[:64])
                times = [one_by_one(partial(theirs, x)), one_by_one(partial(layer.ours, "forward", x, threshold, 0))]
                error = [relative(one[:64], exact) for one in (y, our)]
                print(
                    f"| {layer.N}x{layer.K} | {M} | {threshold}, {columns} | {times[0]:.0f} | {times[1]:.0f} "
                    f"| {times[0] / times[1]:.2f} | {error[0]:.2e} | {error[1]:.2e} |",
                    flush=True,
                )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=SHAPES)
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--directions", default="forward,dgrad")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--kernel", help="this one for the products, whatever the plan says")
    parser.add_argument("--dgrad-kernels", default="panels,dgrad_int8_sm90,gemv_int8_dgrad")
    parser.add_argument("--seconds", type=float, default=240)
    options = parser.parse_args()
    begin, dtype = time.monotonic(), getattr(torch, options.dtype)
    torch.manual_seed(0)
    bnb, kernels = original(), options.dgrad_kernels.split(",")
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, {options.dtype}, original: {bnb and bnb.__version__}")
    check_codes(bnb)
    check_products(bnb)
    late = False
    for direction in options.directions.split(","):
        heads = ["gemv_int8", *(f"threshold {t:g}, {n}" for t, n in CASES)] if direction == "forward" else kernels
        print("\n| N x K | direction | M | dense us | " + " | ".join(heads) + " | errors: dense, ours |")
        print("|" + " --- |" * (5 + len(heads)), flush=True)
        for shape in options.only.split(","):
            layer = Layer(*map(int, shape.split("x")), dtype)
            for M in map(int, options.rows.split(",")):
                late = time.monotonic() - begin > options.seconds
                if late:
                    break
                print(forward(layer, M, options.kernel) if direction == "forward" else gradient(layer, M, kernels))
                sys.stdout.flush()
            del layer
            torch.cuda.empty_cache()
    if late:
        print(f"stopped after {options.seconds:.0f} s")
    if bnb is not None and not options.kernel and not late:
        print("\n| N x K | M | threshold, columns | original us | ours us | faster | error of the original | ours |")
        print("|" + " --- |" * 8, flush=True)
        for shape in options.only.split(","):
            if time.monotonic() - begin < options.seconds:
                beside_the_original(bnb, Layer(*map(int, shape.split("x")), torch.float16))
    print(f"\n{len(failures)} of what must be exact failed" if failures else "\nall that must be exact is")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
