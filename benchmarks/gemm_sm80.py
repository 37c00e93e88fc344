"""gemm_4bit_sm80 beside the fastest product of the same instructions that cuBLASLt has, alone and behind dequantizing.

    python benchmarks/gemm_sm80.py [--seconds 500] [--shapes 4096x4096 ...] [--rows 128 ...] [--slow]

On a Hopper card, too: mma.sync there has an A100's ratio of tensor cores to the rest. cuBLASLt lists its algorithms;
those whose kernels are of sm_80 (mma.sync, no wgmma) are timed one by one, all tiles, stages and parts of the depth,
and the fastest is taken. Prints a table in microseconds: medians of graph replays that take turns, weights rotate
through more than L2. "one pass" is the kernel that the plan would launch if it were forced.

--slow: then the kernel with every product issued four times (gemm_sm80.cu, compiled here by nvcc for this card), of its
cuts the fastest: as on a card whose tensor cores are four times slower beside everything else. Four times the vendor's
time, of one product each, over that.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import pathlib
import statistics
import subprocess
import tempfile
import time

import torch
from bitshard import _C, functional, ops
from bitshard.formats.maps import get_4bit_type

SHAPES = ("4096x4096", "14336x4096", "4096x14336", "28672x8192")  # N x K
ROWS = (64, 128, 256, 512, 1024, 2048, 4096)
KERNEL = "gemm_4bit_sm80"
PACKED_BYTES, DENSE_BYTES = 120 << 20, 160 << 20
F32, BF16, COMPUTE_F32 = 0, 14, 68  # cudaDataType, cublasComputeType_t
OLD = ("cutlass_80", "ampere", "sm80", "_16816", "turing")


class Lt:
    """cuBLASLt's algorithms for y = x W^T and dx = dy W in bf16, by its C functions."""

    def __init__(self):
        torch.mm(*(torch.ones(16, 16, device="cuda", dtype=torch.bfloat16) for _ in range(2)))  # loads the library
        with open("/proc/self/maps", encoding="utf-8") as maps:
            path = next(line.split()[-1] for line in maps if "libcublasLt" in line)
        self.lib, self.handle = ctypes.CDLL(path), ctypes.c_void_p()
        self.space = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        self.call("Create", ctypes.byref(self.handle))

    def call(self, name: str, *arguments) -> None:
        status = getattr(self.lib, f"cublasLt{name}")(*arguments)
        if status:
            raise RuntimeError(f"cublasLt{name}: {status}")

    def product(self, M: int, N: int, K: int, gradient: bool):
        """Descriptor and layouts of W, x, y, column by column as cuBLAS sees them."""
        made = [ctypes.c_void_p() for _ in range(4)]
        self.call("MatmulDescCreate", ctypes.byref(made[0]), COMPUTE_F32, F32)
        for attribute, transposed in ((3, not gradient), (4, False)):
            value = ctypes.c_int(transposed)
            self.call("MatmulDescSetAttribute", made[0], attribute, ctypes.byref(value), ctypes.c_size_t(4))
        inner, outer = (N, K) if gradient else (K, N)
        for to, rows, columns in zip(made[1:], (K, inner, outer), (N, M, M), strict=True):
            sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
            self.call("MatrixLayoutCreate", ctypes.byref(to), BF16, *sizes)
        return made

    def algorithms(self, product) -> list:
        """All that pass cuBLASLt's own check, as its 64 bytes: of every algorithm every tile and number of stages."""
        ids, n = (ctypes.c_int * 512)(), ctypes.c_int()
        types = (COMPUTE_F32, F32, BF16, BF16, BF16, BF16)
        self.call("MatmulAlgoGetIds", self.handle, *types, 512, ids, ctypes.byref(n))
        found = []
        for number in ids[: n.value]:
            first = (ctypes.c_uint64 * 8)()
            if self.lib.cublasLtMatmulAlgoInit(self.handle, *types, number, first):
                continue
            for tile, stages, parts in itertools.product(self.list(first, 6), self.list(first, 13), (1, 2, 4)):
                algorithm = (ctypes.c_uint64 * 8)(*first)
                settings = [(1, tile), (6, stages)] + ([(2, parts), (3, 2)] if parts > 1 else [])
                if all(self.set(algorithm, *one) for one in settings) and self.fits(product, algorithm):
                    found.append(algorithm)
        return found

    def list(self, algorithm, capability: int) -> list[int]:
        values, written = (ctypes.c_int * 1024)(), ctypes.c_size_t()
        size = ctypes.c_size_t(ctypes.sizeof(values))
        arguments = (algorithm, capability, values, size, ctypes.byref(written))
        if self.lib.cublasLtMatmulAlgoCapGetAttribute(*arguments) or not written.value:
            return [0]
        return values[: written.value // 4]

    def set(self, algorithm, attribute: int, value: int) -> bool:
        number = ctypes.c_int(value)
        arguments = (algorithm, attribute, ctypes.byref(number), ctypes.c_size_t(4))
        return value == 0 or not self.lib.cublasLtMatmulAlgoConfigSetAttribute(*arguments)

    def fits(self, product, algorithm) -> bool:
        result = (ctypes.c_uint64 * 16)()  # algorithm, bytes of workspace, ...
        desc, w, x, y = product
        arguments = (self.handle, desc, w, x, y, y, algorithm, result)
        return not self.lib.cublasLtMatmulAlgoCheck(*arguments) and result[8] <= self.space.numel()

    def run(self, product, algorithm, w, x, y) -> None:
        desc, of_w, of_x, of_y = product
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        pointers = [ctypes.c_void_p(one.data_ptr()) for one in (w, x, y, self.space)]
        operands = (pointers[0], of_w, pointers[1], of_x, ctypes.byref(zero), pointers[2], of_y, pointers[2], of_y)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        space = (pointers[3], ctypes.c_size_t(self.space.numel()), stream)
        self.call("Matmul", self.handle, desc, ctypes.byref(one), *operands, algorithm, *space)


def kernels_of(calls: list) -> list[str]:
    """The name of the longest kernel of each call."""
    names = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for call in calls:
            call()
            torch.cuda._sleep(1)  # between two calls
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    longest = None
    for event in sorted(events, key=lambda e: e.time_range.start):
        if "spin" in event.name:
            names.append(longest.name if longest else "")
            longest = None
        elif longest is None or event.time_range.elapsed_us() > longest.time_range.elapsed_us():
            longest = event
    return names


def microseconds(call, runs: int = 3) -> float:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
    call()
    for event in events[:-1]:
        event.record()
        call()
    events[-1].record()
    torch.cuda.synchronize()
    return min(a.elapsed_time(b) for a, b in itertools.pairwise(events)) * 1e3


def timed(calls: dict, copies: dict[str, int], rounds: int = 5) -> dict[str, float]:
    """Median microseconds; call(i) works on the i-th copy of the weights."""
    graphs = {}
    for name, call in calls.items():
        call(0)
        torch.cuda.synchronize()
        n = max(copies[name], min(200, int(2500 / max(1.0, microseconds(lambda call=call: call(0))))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(n):
                call(i % copies[name])
        graphs[name] = graph, n
    found = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, (graph, n) in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if turn:
                found[name].append(begin.elapsed_time(end) * 1e3 / n)
    return {name: statistics.median(times) for name, times in found.items()}


class Case:
    """One weight, in copies, packed and dequantized."""

    def __init__(self, N: int, K: int):
        self.N, self.K = N, K
        w = torch.randn(N, K, device="cuda", dtype=torch.bfloat16) * 0.02
        self.packed, state = functional.quantize_4bit(w, quant_type="nf4", compress_statistics=True)
        self.scales = (state.absmax, state.state2.code, state.state2.absmax, state.offset)
        self.w = ops.dequantize_4bit(self.packed, *self.scales, 64, 0, N, K, torch.bfloat16)
        self.codes = [self.packed.clone() for _ in range(max(2, -(-PACKED_BYTES // self.packed.numel())))]
        self.dense = [self.w.clone() for _ in range(max(2, -(-DENSE_BYTES // (2 * N * K))))]

    def one_pass(self, x, i: int, gradient: bool):
        arguments = (self.codes[i], *self.scales)
        if gradient:
            return ops.linear_4bit_dgrad(x, *arguments, 64, 0, self.N, self.K)
        return ops.linear_4bit(x, *arguments, x.new_empty(0), 64, 0, self.N, self.K)

    def dequantized(self, i: int):
        return ops.dequantize_4bit(self.codes[i], *self.scales, 64, 0, self.N, self.K, torch.bfloat16)


def fastest(lt: Lt, product, w, x, y) -> list:
    """cuBLASLt's algorithms of sm_80 for a product, the fastest first."""
    algorithms = lt.algorithms(product)
    calls = [lambda a=a: lt.run(product, a, w, x, y) for a in algorithms]
    names = kernels_of(calls)
    old = [i for i, name in enumerate(names) if any(part in name for part in OLD)]
    return [algorithms[i] for i in sorted(old, key=lambda i: microseconds(calls[i]))]


def measure(lt: Lt, case: Case, M: int, gradient: bool) -> dict:
    N, K = case.N, case.K
    x = torch.randn(M, N if gradient else K, device="cuda", dtype=torch.bfloat16)
    y = torch.empty(M, K if gradient else N, device="cuda", dtype=torch.bfloat16)
    product = lt.product(M, N, K, gradient)
    old = fastest(lt, product, case.w, x, y)
    vendors = {f"vendor {i}": lambda w, a=a: lt.run(product, a, w, x, y) for i, a in enumerate(old[:3])}
    algorithm = old[0]

    def panels(i: int) -> None:
        lt.run(product, algorithm, case.dequantized(i), x, y)

    def linear(i: int):
        w = case.dense[i]
        return x @ w if gradient else torch.nn.functional.linear(x, w)

    _C.force_kernel("linear_4bit_dgrad" if gradient else "linear_4bit", KERNEL)
    wanted = linear(0).float()
    error = ((case.one_pass(x, 0, gradient).float() - wanted).norm() / wanted.norm()).item()
    assert error < 0.01, error
    calls = {name: lambda i, call=call: call(case.dense[i]) for name, call in vendors.items()}
    calls |= {"panels": panels, "one pass": lambda i: case.one_pass(x, i, gradient), "wgmma": linear}
    copies = {name: len(case.codes if name in ("panels", "one pass") else case.dense) for name in calls}
    found = timed(calls, copies)
    _C.force_kernel("linear_4bit_dgrad" if gradient else "linear_4bit", None)
    found["vendor"] = min(found[name] for name in vendors)
    plan = _C.plan_linear_4bit(M, N, K, 2, *card(), gradient=gradient, kernel=KERNEL)["slices"][0]
    return found | {"form": plan["launches"][0]["entry"].rpartition("_")[2], "algorithms": len(old)}


class Args(ctypes.Structure):
    """bsh_gemm_sm80_args."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("packed", "codes", "map", "absmax", "offset", "x", "bias", "y")]
    _fields_ += [("partial", ctypes.c_void_p), ("flags", ctypes.c_void_p)]
    _fields_ += [(name, ctypes.c_int64) for name in ("ldx", "ldy", "x_step")]
    _fields_ += [(name, ctypes.c_int32) for name in ("M", "N", "K", "block_shift", "absmax_shift")]
    _fields_ += [("last_half", ctypes.c_uint32), ("store_eights", ctypes.c_int32)]
    _fields_ += [("offs", ctypes.c_void_p), ("experts", ctypes.c_int32), ("expert_absmax", ctypes.c_int32)]
    _fields_ += [(name, ctypes.c_int32) for name in ("rows", "row_tiles", "tiles", "stages", "shared", "splits")]
    _fields_ += [("share", ctypes.c_int32), ("longer", ctypes.c_int32), ("values", ctypes.c_float * 16)]


LEAST_STAGES = 8  # of a block that shares tiles in order, as in csrc/plan/sm80.c


def cuts(sms: int, M: int, width: int, depth: int):
    """(blocks of a multiprocessor, blocks, cut) of all ways to share out tiles: whole ones, shared by 2 and by 4 blocks
    at once, and in order by all blocks, those of the last round, or of the one before it, too."""
    for rows, resident in ((256, 1), (128, 1), (128, 2)):
        row_tiles, stages, blocks = -(-M // rows), -(-depth // 64), sms * resident
        tiles = row_tiles * -(-width // 128)
        base = {"rows": rows, "row_tiles": row_tiles, "tiles": tiles, "stages": stages}
        yield resident, min(tiles, blocks), base
        for splits in (2, 4):
            if sms * (resident - 1) < tiles * splits <= blocks and stages >= splits:
                yield resident, tiles * splits, base | {"splits": splits, "shared": tiles}
        for shared in (tiles % blocks, tiles % blocks + blocks):
            if 0 < shared <= tiles and tiles % blocks and shared * stages >= LEAST_STAGES * blocks:
                order = {"share": shared * stages // blocks, "longer": shared * stages % blocks}
                yield resident, blocks, base | {"shared": shared, **order}


class Slow:
    """The kernel with `products` for each product."""

    def __init__(self, products: int):
        root, folder = pathlib.Path(__file__).parents[1], tempfile.mkdtemp()
        file, (sm, self.sms) = f"{folder}/slow{products}.so", card()
        command = ["nvcc", "-std=c++17", "-O3", f"-arch=sm_{sm}", "-shared", "-Xcompiler", "-fPIC"]
        command += [
            f"-DBSH_SM80_PRODUCTS={products}",
            "-I",
            root / "csrc",
            "-I",
            root,
            root / "benchmarks/gemm_sm80.cu",
        ]
        subprocess.run([*command, "-o", file], check=True)
        self.lib = ctypes.CDLL(file)
        assert self.lib.args_bytes() == ctypes.sizeof(Args)
        self.flags = torch.zeros(1024, dtype=torch.int32, device="cuda")
        self.partial = torch.empty(2 * self.sms, 256 * 128, device="cuda")

    def call(self, case: Case, x, y, i: int, gradient: bool, blocks: int, cut: dict) -> None:
        step = cut["rows"] // 8 * x.stride(0) * 2
        code, values, absmax, offset = case.scales
        places = [one.data_ptr() for one in (case.codes[i], code, values, absmax, offset, x)]
        sizes = (x.stride(0), y.stride(0), step, x.shape[0], case.N, case.K)
        flags = self.flags.data_ptr() if cut.get("shared") else None  # are zeroed
        args = Args(*places, None, y.data_ptr(), self.partial.data_ptr(), flags, *sizes, 1, 9)
        args.last_half, args.store_eights = case.N * case.K // 32 - 1, 1
        args.values[:] = get_4bit_type("nf4", "cpu").tolist()
        for name, value in cut.items():
            setattr(args, name, value)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        status = self.lib.run(int(gradient), ctypes.byref(args), blocks, stream)
        assert status == 0, status

    def fastest(self, case: Case, M: int, gradient: bool) -> float:
        width, depth = (case.K, case.N) if gradient else (case.N, case.K)
        x = torch.randn(M, depth, device="cuda", dtype=torch.bfloat16)
        y = torch.empty(M, width, device="cuda", dtype=torch.bfloat16)
        calls = {}
        for _, blocks, cut in cuts(self.sms, M, width, depth):
            calls[f"{blocks} {cut}"] = lambda i, b=blocks, c=cut: self.call(case, x, y, i, gradient, b, c)
        return min(timed(calls, dict.fromkeys(calls, len(case.codes)), rounds=3).values())


def card() -> tuple[int, int]:
    properties = torch.cuda.get_device_properties(0)
    return 10 * properties.major + properties.minor, properties.multi_processor_count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--shapes", nargs="*", default=SHAPES)
    parser.add_argument("--rows", nargs="*", type=int, default=ROWS)
    parser.add_argument("--slow", action="store_true")
    options = parser.parse_args()
    slow = [Slow(products) for products in (1, 4)] if options.slow else []
    begin, lt = time.monotonic(), Lt()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {len(options.shapes)} shapes")
    head = ("N x K", "rows", "", "wgmma", "vendor sm_80", "one pass", "tile", "panels", "vendor / one pass")
    head += ("panels / one pass", *["best cut", "four products", "4 vendor / four products"] * options.slow)
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for shape in options.shapes:
        N, K = map(int, shape.split("x"))
        case = Case(N, K)
        for gradient, M in itertools.product((False, True), options.rows):
            if time.monotonic() - begin > options.seconds:
                print(f"stopped after {options.seconds:.0f} s")
                return
            us = measure(lt, case, M, gradient)
            times = [f"{us[name]:.1f}" for name in ("wgmma", "vendor", "one pass")]
            ratios = [f"{us[name] / us['one pass']:.2f}" for name in ("vendor", "panels")]
            cells = [f"{N} x {K}", M, "gradient" if gradient else "forward", *times, us["form"], f"{us['panels']:.1f}"]
            if slow and M <= 1024:
                one, four = (it.fastest(case, M, gradient) for it in slow)
                ratios += [f"{one:.1f}", f"{four:.1f}", f"{4 * us['vendor'] / four:.2f}"]
            print("| " + " | ".join(map(str, (*cells, *ratios))) + " |", flush=True)
        del case
        torch.cuda.empty_cache()
    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
