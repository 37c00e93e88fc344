"""The project's CUDA kernels on a machine without a GPU: `Gpu` has the ops on CPU tensors.

nvcc makes PTX of cuda/, translate.py makes C of the kernels that are launched, gcc compiles them over machine.c. The
way to a launch (plans, cuts, scratch memory) is the product's own C code, over driver.c in the place of CUDA's driver.
Built files are kept in .cache/built, by what they were built from.
"""

from __future__ import annotations

import ast
import ctypes
import hashlib
import os
import shutil
import subprocess
import threading
from functools import cache
from pathlib import Path

import torch
from bitshard.formats.maps import table
from torch import Tensor

from . import translate

HERE, ROOT = Path(__file__).resolve().parent, Path(__file__).resolve().parents[2]
BUILT = ROOT / ".cache" / "built"
C_FLAGS = ("-std=gnu11", "-Og", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-fno-strict-aliasing")
C_FLAGS += ("-Wall", "-Wextra", "-Wno-unused-function", "-Wno-unused-variable", "-Wno-unused-label")
C_FLAGS += ("-Werror=implicit-function-declaration", "-Wl,-z,defs")
MACHINE_FLAGS = tuple("-O3" if flag == "-Og" else flag for flag in C_FLAGS)  # it runs long, and is compiled once
LARGE = ("calibration", "gemm_4bit_sm90_wide", "gemm_4bit_sm90_wide_short")  # longer to compile than to run
LARGE_FLAGS = tuple("-O0" if flag == "-Og" else flag for flag in C_FLAGS)
# Instructions of one generation of GPUs come with its "a".
TARGETS = {75: "compute_75", 80: "compute_80", 90: "compute_90a"}
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
LOCKS: dict[Path, threading.Lock] = {}  # of files that are being built; threads build side by side
RANGES, LONGEST = 64, 1 << 15
POINTER, LONG = ctypes.c_void_p, ctypes.c_int64


def nvcc() -> str | None:
    """Path of nvcc, as setup.py looks for it; None without."""
    found = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    return found if os.path.exists(found) else None


def built(name: str, sources: list[Path], command: list[str], make) -> Path:
    """`make(path)` once for these sources and this command; the file."""
    digest = hashlib.sha256(repr(command).encode())
    for source in sources:
        digest.update(source.read_bytes())
    stem, dot, suffix = name.rpartition(".")
    path = BUILT / f"{stem}-{digest.hexdigest()[:16]}{dot}{suffix}"
    with LOCKS.setdefault(path, threading.Lock()):
        if not path.exists():
            BUILT.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"{os.getpid()}-{path.name}")
            make(part)
            part.rename(path)
    return path


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command[:3])} ...\n{done.stdout}{done.stderr[-4000:]}"


def nvcc_flags() -> list[str]:
    """Those of setup.py."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    named = (node for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "NVCC_FLAGS")
    return ast.literal_eval(next(named).value)


NVCC_FLAGS = nvcc_flags()  # here, since Python 3.11 does not parse in two threads at a time


def ptx_of_the_build(source: Path, headers: list[Path], target: str) -> Path | None:
    """What setup.py kept of the package's own build, where that was of these files; its `digest`."""
    digest = hashlib.sha256(repr(NVCC_FLAGS).encode())
    for file in (source, *headers):
        digest.update(file.read_bytes())
    name = f"{source.stem}-{digest.hexdigest()[:16]}.{target}.ptx"
    return next(ROOT.glob(f"build/temp*/{name}"), None)


@cache
def ptx_of(source: str, sm: int) -> Path:
    """PTX of cuda/<source>.cu for a GPU."""
    headers = sorted([*(ROOT / "cuda").rglob("*.*h"), *(ROOT / "csrc/core").glob("*.*h")])
    flags = [*NVCC_FLAGS, f"-arch={TARGETS[sm]}", "-ptx"]
    file = next((ROOT / "cuda").rglob(f"{source}.cu"))
    command = [nvcc(), *flags, "-I", str(ROOT / "csrc"), "-I", str(ROOT), str(file)]
    made = ptx_of_the_build(file, headers, TARGETS[sm])
    return made or built(f"{source}-sm{sm}.ptx", [file, *headers], flags, lambda to: run([*command, "-o", str(to)]))


MACHINE = [HERE / "machine.h", ROOT / "csrc/core/numerics.h", ROOT / "csrc/core/tensor_map.h"]  # of each kernel's C


def machine() -> Path:
    """machine.c as an object, once for all kernels."""
    source = HERE / "machine.c"
    command = ["gcc", *MACHINE_FLAGS, "-I", str(ROOT / "csrc"), "-c", str(source)]
    return built("machine.o", [source, *MACHINE], list(MACHINE_FLAGS), lambda to: run([*command, "-o", str(to)]))


def compiled(text: str, kernel: str, name: str, sources: list[Path], flags: tuple[str, ...] = C_FLAGS) -> ctypes.CDLL:
    """A kernel of a PTX text over the machine."""

    def make(to: Path) -> None:
        source = to.with_suffix(".c")
        source.write_text(translate.translate(text, [kernel]))
        command = ["gcc", *flags, "-I", str(HERE), "-I", str(ROOT / "csrc"), str(source), str(machine())]
        run([*command, "-lm", "-o", str(to)])
        source.unlink()

    made_of = [*sources, HERE / "machine.c", HERE / "translate.py", *MACHINE]
    return ctypes.CDLL(str(built(f"{name}.so", made_of, [*flags, *MACHINE_FLAGS], make)))


@cache
def text_of(ptx: Path) -> str:
    return ptx.read_text()


@cache
def kernel_of(stem: str, kernel: str, sm: int) -> tuple[ctypes.CDLL, list[int]]:
    """A kernel of cuda/<stem>.cu, compiled, and the sizes of its parameters."""
    ptx = ptx_of(stem, sm)
    functions, _ = translate.module_of(text_of(ptx))
    flags = LARGE_FLAGS if stem in LARGE else C_FLAGS
    library = compiled(text_of(ptx), kernel, f"{kernel}-sm{sm}", [ptx], flags)
    return library, list(functions[kernel].parameters.values())


@cache
def host() -> ctypes.CDLL:
    """The product's code between ops and launches, over driver.c."""
    lines = [line.split() for line in (ROOT / "csrc" / "sources.txt").read_text().splitlines()]
    sources = [
        HERE / "driver.c",
        *(ROOT / "csrc" / line[0] for line in lines if "played" in line[1:] and line[0] != "#"),
    ]
    headers = sorted([*(ROOT / "cuda").rglob("*.h"), *(ROOT / "csrc").rglob("*.*h")])
    command = ["gcc", *C_FLAGS, "-I", str(ROOT / "csrc"), "-I", str(ROOT), *map(str, sources), "-lm"]
    path = built("host.so", [*sources, *headers], list(C_FLAGS), lambda to: run([*command, "-o", str(to)]))
    library = ctypes.CDLL(str(path))
    library.gpu_error.restype = ctypes.c_char_p
    library.gpu_size.restype = LONG
    return library


class Run(ctypes.Structure):
    """ptx_run of machine.h."""

    _fields_ = [
        ("kernel", ctypes.c_char_p),
        ("parameters", POINTER),
        ("grid", ctypes.c_uint64 * 3),
        ("block", ctypes.c_uint64 * 3),
        ("shared", ctypes.c_uint64),
        ("cluster", ctypes.c_uint64),
        ("resident", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("n_ranges", ctypes.c_uint64),
        ("ranges", (ctypes.c_uint64 * 2) * RANGES),
        ("error", ctypes.c_char * 512),
    ]


def struct(name: str, fields: str) -> type[ctypes.Structure]:
    """A struct of core/kernels.h or int8.h: names of pointers with "*" in front, of 32-bit values with "-", of floats
    with "~", else 64 bits."""
    types = {"*": POINTER, "-": ctypes.c_int32, "~": ctypes.c_float}
    members = [(field.lstrip("*-~"), types.get(field[0], LONG)) for field in fields.split() if field != "weight"]
    if "weight" in fields.split():
        members.insert(0, ("weight", Weight))
    return type(name, (ctypes.Structure,), {"_fields_": members})


INT8 = 3  # bsh_format
Weight = struct("Weight", "*packed *absmax *absmax_code *absmax_map *absmax2 *offset n blocksize -format")
Quantize = struct("Quantize", "*x *packed *absmax n blocksize -dtype -format")
Dequantize = struct("Dequantize", "weight *out columns row0 n_rows column0 n_columns ld -dtype")
QuantizeBlockwise = struct("QuantizeBlockwise", "*x *map *offset *code *absmax n blocksize -dtype")
DequantizeBlockwise = struct("DequantizeBlockwise", "*code *absmax *map *offset *out n blocksize -dtype")
Sort = struct("Sort", "*chosen *order *back *row *offs S k -E -elsewhere")
Sum = struct("Sum", "*y *back *counts *out T k H -dtype -counts_dtype")
Search = struct("Search", "*x *weights *scales *choice n period blocksize G -format")
Round = struct("Round", "*w *u *scales *codes *errors N P -format")
Merge = struct("Merge", "weight *a *b *scales *packed *absmax N K R -dtype *map *mean *sums *scales8 *second")
Product = struct("Product", "weight *x *bias *y M N K ldx ldy *offs E ~threshold -dtype -direction")
StepTensor = struct("StepTensor", "*g *p *state1 *state2 *absmax1 *absmax2 n")
QuantizeInt8 = struct("QuantizeInt8", "*x *codes *absmax *outliers M K ldx ~threshold -dtype")
DequantizeInt8 = struct("DequantizeInt8", "*codes *absmax *y N K -dtype")
ProductInt8 = struct("ProductInt8", "*a *b *sums M N K")
ScaleProductInt8 = struct("ScaleProductInt8", "*sums *row_absmax *col_absmax *bias *y M N -dtype")
STRUCTS = (
    Weight,
    Quantize,
    Dequantize,
    QuantizeBlockwise,
    DequantizeBlockwise,
    Sort,
    Sum,
    Search,
    Round,
    Merge,
    Product,
    StepTensor,
    QuantizeInt8,
    DequantizeInt8,
    ProductInt8,
    ScaleProductInt8,
)


class State(ctypes.Structure):
    """gpu_state of driver.c."""

    _fields_ = [
        ("launch", POINTER),
        ("sm", ctypes.c_int32),
        ("sms", ctypes.c_int32),
        ("workspace_bytes", LONG),
        ("scratch_begin", ctypes.c_uint64),
        ("scratch_end", ctypes.c_uint64),
        ("ones_each", ctypes.c_int32),
    ]


LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_uint32),
    ctypes.POINTER(ctypes.c_uint32),
    ctypes.c_uint32,
    ctypes.c_uint32,
    ctypes.POINTER(POINTER),
)


def block_of(sizes: list[int], arguments) -> ctypes.Array:
    """A kernel's parameters, of these sizes at these addresses, as a launch has them."""
    block, place = ctypes.create_string_buffer(LONGEST), 0
    for i, size in enumerate(sizes):
        align = min(size & -size, 8)
        place = -(-place // align) * align
        ctypes.memmove(ctypes.addressof(block) + place, arguments[i], size)
        place += size
    return block


def start(library, name: bytes, parameters, grid, block, shared, cluster, resident, seed, ranges) -> str:
    """Runs a kernel; "", or what went wrong. ranges: (begin, end) of the memory that it may touch."""
    sizes = ctypes.c_uint64 * 3
    one = Run(name, ctypes.addressof(parameters), sizes(*grid[:3]), sizes(*block[:3]))
    one.shared, one.cluster, one.resident, one.seed = shared, cluster, resident, seed
    one.n_ranges = len(ranges)
    for i, (begin, end) in enumerate(ranges):
        one.ranges[i][0], one.ranges[i][1] = begin, end
    return one.error.decode() if library.ptx_launch(ctypes.byref(one)) else ""


class Gpu:
    """A GPU of compute capability `sm` with `sms` multiprocessors; `launches` lists the kernels that ran.

    `seed`: 0 runs threads in order, another number draws one. `at_once`: blocks of threads that run, the first to begin
    with. `ones_each`: 16-bit words of new scratch memory of which one has ones, the others zeros; 0: all have ones.
    RuntimeError with block and thread where a kernel touches
    memory that its op does not own, waits for ever, or traps.
    """

    def __init__(
        self,
        sm: int = 90,
        sms: int = 4,
        seed: int = 0,
        workspace_bytes: int = 64 << 20,
        at_once: int = 0,
        ones_each: int = 0,
    ):
        self.sm, self.sms, self.seed, self.workspace_bytes = sm, sms, seed, workspace_bytes
        self.at_once, self.ones_each = at_once or 4 * sms, ones_each
        self.launches: list[str] = []
        self.blocks: list[tuple[int, int]] = []  # of each launch: of a cluster, of all
        self.tensors: list[Tensor] = []
        self.error = ""
        library = host()
        assert [library.gpu_size(i) for i in range(len(STRUCTS))] == [ctypes.sizeof(one) for one in STRUCTS]
        self.state = State.in_dll(library, "gpu_state")
        self.callback = LAUNCH(self.launch)

    def launch(self, stem, name, grid, block, cluster, shared, arguments) -> int:
        """The driver's callback: runs one kernel."""
        try:
            library, sizes = kernel_of(stem.decode(), name.decode(), self.sm)
            self.launches.append(name.decode())
            self.blocks.append((cluster, grid[0] * grid[1] * grid[2]))
            ranges = [(t.data_ptr(), t.data_ptr() + t.untyped_storage().nbytes()) for t in self.tensors if t.numel()]
            if self.state.scratch_end:
                ranges.append((self.state.scratch_begin, self.state.scratch_end))
            resident = min(grid[0] * grid[1] * grid[2], self.at_once)
            parameters = block_of(sizes, arguments)
            self.error = start(library, name, parameters, grid, block, shared, cluster, resident, self.seed, ranges)
        except BaseException as error:  # nothing may pass through C
            self.error = f"{type(error).__name__}: {error}"
        return bool(self.error)

    def call(self, op: str, args, *more, tensors: list[Tensor | None]) -> None:
        """Runs an op of driver.c, a struct by its address; the launches may touch `tensors` only."""
        self.tensors = [tensor for tensor in tensors if tensor is not None]
        self.launches, self.blocks, self.error = [], [], ""
        self.state.launch = ctypes.cast(self.callback, POINTER)
        self.state.sm, self.state.sms, self.state.workspace_bytes = self.sm, self.sms, self.workspace_bytes
        self.state.ones_each = self.ones_each
        first = ctypes.byref(args) if isinstance(args, ctypes.Structure) else args
        if getattr(host(), f"gpu_{op}")(first, *more):
            raise RuntimeError(self.error or host().gpu_error().decode())

    # ---- ops; arguments as in python/bitshard/ops.py ----

    @staticmethod
    def weight(packed, scales, blocksize: int, fmt: int, n: int) -> tuple[Weight, list[Tensor]]:
        absmax, absmax_map, absmax2, offset = scales
        if absmax_map is None:
            pointers = (absmax.data_ptr(), None, None, None, None)
        else:
            pointers = (None, absmax.data_ptr(), absmax_map.data_ptr(), absmax2.data_ptr(), offset.data_ptr())
        return Weight(packed.data_ptr(), *pointers, n, blocksize, fmt), [packed, absmax, absmax_map, absmax2, offset]

    def quantize_4bit(self, x: Tensor, blocksize: int, fmt: int) -> tuple[Tensor, Tensor]:
        packed = torch.empty((x.numel() + 1) // 2, dtype=torch.uint8)
        absmax = torch.empty(-(-x.numel() // blocksize), dtype=torch.float32)
        args = Quantize(x.data_ptr(), packed.data_ptr(), absmax.data_ptr(), x.numel(), blocksize, DTYPES[x.dtype], fmt)
        self.call("quantize_4bit", args, tensors=[x, packed, absmax])
        return packed, absmax

    def dequantize_4bit(self, packed, scales, blocksize: int, fmt: int, n: int, dtype: torch.dtype) -> Tensor:
        weight, tensors = self.weight(packed, scales, blocksize, fmt, n)
        out = torch.empty(n, dtype=dtype)
        args = Dequantize(weight, out.data_ptr(), n, 0, 1, 0, n, n, DTYPES[dtype])
        self.call("dequantize_4bit", args, tensors=[*tensors, out])
        return out

    def quantize_blockwise(self, x: Tensor, values: Tensor, blocksize: int, offset: Tensor | None = None):
        code = torch.empty(x.numel(), dtype=torch.uint8)
        absmax = torch.empty(-(-x.numel() // blocksize), dtype=torch.float32)
        place = None if offset is None else offset.data_ptr()
        pointers = (x.data_ptr(), values.data_ptr(), place, code.data_ptr(), absmax.data_ptr())
        args = QuantizeBlockwise(*pointers, x.numel(), blocksize, DTYPES[x.dtype])
        self.call("quantize_blockwise", args, tensors=[x, values, offset, code, absmax])
        return code, absmax

    def dequantize_blockwise(self, code, absmax, values, blocksize: int, dtype: torch.dtype) -> Tensor:
        out = torch.empty(code.numel(), dtype=dtype)
        pointers = (code.data_ptr(), absmax.data_ptr(), values.data_ptr(), None, out.data_ptr())
        args = DequantizeBlockwise(*pointers, code.numel(), blocksize, DTYPES[dtype])
        self.call("dequantize_blockwise", args, tensors=[code, absmax, values, out])
        return out

    def sort_by_expert(self, chosen: Tensor, E: int, elsewhere: bool) -> list[Tensor]:
        found = [torch.empty(chosen.numel(), dtype=torch.int64) for _ in range(3)] + [torch.empty(E, dtype=torch.int32)]
        args = Sort(*(t.data_ptr() for t in (chosen, *found)), chosen.numel(), chosen.shape[-1], E, elsewhere)
        self.call("sort_by_expert", args, tensors=[chosen, *found])
        return found

    def sum_by_token(self, y: Tensor, back: Tensor, counts: Tensor) -> Tensor:
        out = y.new_empty(counts.shape[0], y.shape[1])
        tensors, dtypes = [y, back, counts, out], (DTYPES[y.dtype], DTYPES[counts.dtype])
        args = Sum(*(t.data_ptr() for t in tensors), *counts.shape, y.shape[1], *dtypes)
        self.call("sum_by_token", args, tensors=tensors)
        return out

    def search_4bit(self, x: Tensor, weights: Tensor, scales: Tensor, blocksize: int, fmt: int) -> Tensor:
        choice = torch.empty(-(-x.numel() // blocksize), dtype=torch.uint8)
        tensors = [x, weights, scales, choice]
        pointers = (tensor.data_ptr() for tensor in tensors)
        args = Search(*pointers, x.numel(), weights.numel(), blocksize, scales.shape[1], fmt)
        self.call("search_4bit", args, tensors=tensors)
        return choice

    def round_4bit(self, w: Tensor, u: Tensor, scales: Tensor, fmt: int) -> tuple[Tensor, Tensor]:
        codes, errors = torch.empty(w.shape, dtype=torch.uint8), torch.empty(w.shape)
        tensors = [w, u, scales, codes, errors]
        self.call("round_4bit", Round(*(tensor.data_ptr() for tensor in tensors), *w.shape, fmt), tensors=tensors)
        return codes, errors

    def merge_4bit(self, packed, scales, a, b, of_ranks, blocksize: int, fmt: int, N: int, K: int):
        weight, tensors = self.weight(packed, scales, blocksize, fmt, N * K)
        merged, absmax = torch.empty_like(packed), torch.empty(-(-N * K // blocksize))
        more, nested = [a, b, of_ranks, merged, absmax], []
        if scales[0].dtype is torch.uint8:
            codes, second = torch.empty(len(absmax), dtype=torch.uint8), torch.empty(-(-len(absmax) // 256))
            nested = [table("dynamic", torch.device("cpu")), torch.empty(1), codes, second]
        pointers = [tensor.data_ptr() for tensor in more]
        of, mean, *others = [tensor.data_ptr() for tensor in nested] or [None] * 4
        args = Merge(weight, *pointers, N, K, of_ranks.numel(), DTYPES[a.dtype], of, mean, None, *others)
        self.call("merge_4bit", args, tensors=[*tensors, *more, *nested])
        return merged, absmax, *nested[2:], *nested[1:2]

    def merge_e2m1(self, packed, scales, a, b, of_ranks, blocksize: int, fmt: int, N: int, K: int):
        weight, tensors = self.weight(packed, scales, blocksize, fmt, N * K)
        blocks = N * K // blocksize
        merged, scales8 = torch.empty_like(packed), torch.empty(blocks, dtype=torch.uint8)
        second = torch.empty(-(-blocks // 256) if blocksize == 16 else 0)
        more = [a, b, of_ranks, merged, scales8, *[second] * (blocksize == 16)]
        pointers = [tensor.data_ptr() for tensor in more] + [None] * (blocksize != 16)
        args = Merge(
            weight, *pointers[:4], None, N, K, of_ranks.numel(), DTYPES[a.dtype], None, None, None, *pointers[4:]
        )
        self.call("merge_e2m1", args, tensors=[*tensors, *more])
        return merged, scales8, second

    def merged_values(self, packed, scales, a, b, of_ranks, blocksize: int, fmt: int, N: int, K: int, row0, rows):
        weight, tensors = self.weight(packed, scales, blocksize, fmt, N * K)
        values, more = torch.empty(rows, K), [a, b, of_ranks]
        pointers = (tensor.data_ptr() for tensor in more)
        args = Merge(weight, *pointers, None, None, N, K, of_ranks.numel(), DTYPES[a.dtype])
        run = LONG(row0 * K), LONG((row0 + rows) * K), POINTER(values.data_ptr())
        self.call("merged_values", args, *run, tensors=[*tensors, *more, values])
        return values

    def checksum(self, data: Tensor) -> int:
        total = torch.zeros(1, dtype=torch.int64)
        n = data.numel() * data.element_size()
        more = (LONG(n), POINTER(total.data_ptr()))
        self.call("checksum", POINTER(data.data_ptr()), *more, tensors=[data, total])
        return total.item()

    def optimizer_step(
        self,
        algorithm: int,
        step: int,
        parameters: list[dict[str, Tensor]],
        maps: tuple[Tensor, Tensor] | None,
        numbers: list[float],
        skip_zeros: bool = False,
        unorm: Tensor | None = None,
    ) -> None:
        """In place, one launch for all that are alike.

        Each parameter: g, p, state1 and, where they are, state2, absmax1, absmax2; `numbers` as in driver.c.
        """
        names = ("g", "p", "state1", "state2", "absmax1", "absmax2")
        tensors = (StepTensor * len(parameters))()
        for one, p in zip(tensors, parameters, strict=True):
            for name in names:
                setattr(one, name, p[name].data_ptr() if p.get(name) is not None else None)
            one.n = p["p"].numel()
        first = parameters[0]
        what = (LONG * 5)(algorithm, step, skip_zeros, DTYPES[first["g"].dtype], DTYPES[first["p"].dtype])
        places = [None if maps is None else POINTER(one.data_ptr()) for one in (maps or (None, None))]
        more = (LONG(len(parameters)), what, (ctypes.c_float * 10)(*numbers), *places)
        place = None if unorm is None else POINTER(unorm.data_ptr())
        touched = [p.get(name) for p in parameters for name in names]
        self.call("optimizer_step", tensors, *more, place, tensors=[*touched, *(maps or ()), unorm])

    def product(self, op, weight, x, bias, N, K, kernel=None, threshold=0.0, offs=None, tensors=()):
        """[M, N] by an op of the core, [M, K] by a "..._dgrad", and the kernel that was planned; `kernel`: forced."""
        backward = op.endswith("_dgrad")
        M, columns, E = x.shape[0], K if backward else N, 0 if offs is None else offs.numel()
        y = torch.full((M, columns), torch.nan, dtype=x.dtype)
        places = (x.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr())
        stack = (None if offs is None else offs.data_ptr(), E)
        sizes = (M, N, K, x.stride(0), columns)
        args = Product(weight, *places, *sizes, *stack, threshold, DTYPES[x.dtype], backward)
        chosen, forced = ctypes.c_char_p(), kernel.encode() if kernel else None
        self.call("product", args, op.encode(), forced, ctypes.byref(chosen), tensors=[*tensors, x, bias, y, offs])
        return y, chosen.value.decode()

    def linear_4bit(self, x, packed, scales, bias, blocksize: int, fmt: int, N: int, K: int, kernel: str | None = None):
        """y [M, N], and the kernel that was planned."""
        weight, tensors = self.weight(packed, scales, blocksize, fmt, N * K)
        return self.product("linear_4bit", weight, x, bias, N, K, kernel, tensors=tensors)

    def linear_4bit_dgrad(
        self, dy, packed, scales, blocksize: int, fmt: int, N: int, K: int, kernel: str | None = None
    ):
        """dx [M, K], and the kernel that was planned."""
        weight, tensors = self.weight(packed, scales, blocksize, fmt, N * K)
        return self.product("linear_4bit_dgrad", weight, dy, None, N, K, kernel, tensors=tensors)

    def grouped_linear_4bit(self, x, offs, packed, scales, bias, blocksize, fmt, N, K, kernel: str, backward=False):
        """y [S, N] of a stack, or with `backward` dx [S, K]."""
        weight, tensors = self.weight(packed, scales, blocksize, fmt, offs.numel() * N * K)
        op = "grouped_linear_4bit" + "_dgrad" * backward
        return self.product(op, weight, x, bias, N, K, kernel, offs=offs, tensors=tensors)[0]

    def linear_4bit_int8(self, x, packed, scales, bias, blocksize: int, fmt: int, N: int, K: int) -> Tensor:
        weight, tensors = self.weight(packed, scales, blocksize, fmt, N * K)
        y = torch.full((x.shape[0], N), torch.nan, dtype=x.dtype)
        places = (x.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr())
        args = Product(weight, *places, x.shape[0], N, K, x.stride(0), N, None, 0, 0.0, DTYPES[x.dtype], 0)
        self.call("linear_4bit_int8", args, tensors=[*tensors, x, bias, y])
        return y

    # ---- int8 ----

    def quantize_int8(self, x: Tensor, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
        M, K = x.shape
        codes, absmax = torch.empty(M, K, dtype=torch.int8), torch.empty(M)
        outliers = torch.full((K if threshold > 0 else 0,), 7, dtype=torch.uint8)
        places = (x.data_ptr(), codes.data_ptr(), absmax.data_ptr(), outliers.data_ptr() if threshold > 0 else None)
        args = QuantizeInt8(*places, M, K, x.stride(0), threshold, DTYPES[x.dtype])
        self.call("quantize_int8", args, tensors=[x, codes, absmax, outliers])
        return codes, absmax, outliers

    def dequantize_int8(self, codes: Tensor, absmax: Tensor, dtype: torch.dtype) -> Tensor:
        y = torch.empty(codes.shape, dtype=dtype)
        places = (codes.data_ptr(), absmax.data_ptr(), y.data_ptr())
        self.call("dequantize_int8", DequantizeInt8(*places, *codes.shape, DTYPES[dtype]), tensors=[codes, absmax, y])
        return y

    def product_int8(self, a: Tensor, b: Tensor) -> Tensor:
        sums = torch.empty(a.shape[0], b.shape[0], dtype=torch.int32)
        tensors = [a, b, sums]
        args = ProductInt8(*(tensor.data_ptr() for tensor in tensors), *sums.shape, a.shape[1])
        self.call("product_int8", args, tensors=tensors)
        return sums

    def scale_product_int8(self, sums: Tensor, row: Tensor, col: Tensor, bias: Tensor | None, dtype: torch.dtype):
        y = torch.empty(sums.shape, dtype=dtype)
        places = (*(one.data_ptr() for one in (sums, row, col)), None if bias is None else bias.data_ptr())
        args = ScaleProductInt8(*places, y.data_ptr(), *sums.shape, DTYPES[dtype])
        self.call("scale_product_int8", args, tensors=[sums, row, col, bias, y])
        return y

    def linear_int8(self, x, packed, absmax, bias, threshold: float, kernel: str | None = None, dgrad: bool = False):
        """y [M, N], or with `dgrad` dx [M, K] of x = dy; packed [N, K]."""
        N, K = packed.shape
        weight = Weight(packed.data_ptr(), absmax.data_ptr(), None, None, None, None, N * K, 0, INT8)
        op = "linear_int8" + "_dgrad" * dgrad
        return self.product(op, weight, x, bias, N, K, kernel, threshold, tensors=[packed, absmax])[0]
