"""The exported C functions: bitsandbytes' names, signatures and results, called with addresses as its users call them.

The CPU functions run everywhere; the CUDA functions need a GPU.
"""

import ctypes as ct
import json
import shutil
import subprocess
import threading

import bitsandbytes as bnb
import pytest
import torch
from bitsandbytes.cextension import BNBNativeLibrary, CudaBNBNativeLibrary
from bitsandbytes.functional import get_ptr
from bitshard import _C, ops
from cases import BLOCKSIZES, LINEAR_BOUND
from helpers import upstream
from safetensors.torch import load_file, save_file
from torch import Tensor

lib = bnb.functional.lib

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SIZES = (1, 2, 63, 64, 65, 1001, 16384 + 7, 100000)
SCRIPT = upstream.SCRIPTS / "upstream_native.py"
FILL = 0xA5
BUILT = _C.cuda_state()["built"]

needs_gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and BUILT),
    reason="needs a GPU" if BUILT else "bitshard was built without nvcc",
)
needs_cuda_build = pytest.mark.skipif(not BUILT, reason="bitshard was built without nvcc")


def filled(n: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Memory of n elements with a tail of 64 bytes, all of the same byte."""
    return torch.full((n * dtype.itemsize + 64,), FILL, dtype=torch.uint8, device=device)


def content(memory: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """The n elements; whoever wrote them must not have touched the tail."""
    assert bool((memory[n * dtype.itemsize :] == FILL).all()), "written beyond the end"
    return memory[: n * dtype.itemsize].view(dtype)


def blocks(n: int, blocksize: int) -> int:
    return -(-n // blocksize)


def dynamic_map() -> Tensor:
    return ops.table("dynamic")


def dequantized(packed: Tensor, absmax: Tensor, blocksize: int, quant_type: str, rows: int, columns: int, dtype):
    """What the op gives, [rows, columns]."""
    none = ops.empty(packed.device)
    arguments = (absmax, none, none, none, blocksize, ops.FORMATS[quant_type], rows, columns, dtype)
    return ops.dequantize_4bit(packed, *arguments)


# ---- names and signatures ----


@pytest.fixture(scope="module")
def described() -> dict:
    """What upstream_native.py says about the original."""
    upstream.folder_or_skip()
    return json.loads(upstream.run(SCRIPT, "describe").splitlines()[-1])


def cuda_library() -> CudaBNBNativeLibrary:
    """The library with its CUDA functions, also where there is no GPU to call them on."""
    return lib if isinstance(lib, CudaBNBNativeLibrary) else CudaBNBNativeLibrary(ct.CDLL(_C.__file__))


def our_cuda_names() -> set[str]:
    return set(bnb.cextension._CUDA_ARGTYPES)


def our_cpu_names() -> set[str]:
    return {*bnb.cextension._CPU_FUNCTIONS, "has_avx512f_cpu", "has_avx512bf16_cpu"}


@needs_cuda_build
def test_cuda_signatures_are_upstreams(described):
    library = cuda_library()
    assert our_cuda_names() == {*described["argtypes"], "get_context"} and len(our_cuda_names()) == 28
    for name in described["argtypes"]:
        function = getattr(library, name)
        assert isinstance(function, ct._CFuncPtr) and hasattr(function, "restype")
        assert [t.__name__ for t in function.argtypes] == described["argtypes"][name], name
        assert (function.restype and function.restype.__name__) == described["restypes"][name], name


def test_cpu_signatures_are_upstreams(described):
    assert described["cpu_argtypes"] is None
    for name in our_cpu_names():
        function = getattr(lib, name)
        assert isinstance(function, ct._CFuncPtr) and function.argtypes is None, name
        assert function.restype.__name__ == described["cpu_restype"], name


def test_names_are_upstreams(described):
    """Upstream's libraries export every name."""
    folder = upstream.folder() / "bitsandbytes"
    cpu = (folder / "libbitsandbytes_cpu.so").read_bytes()
    cuda = next(folder.glob("libbitsandbytes_cuda1*.so")).read_bytes()
    assert not [name for name in our_cpu_names() if b"\0" + name.encode() + b"\0" not in cpu]
    assert not [name for name in our_cuda_names() if b"\0" + name.encode() + b"\0" not in cuda]


def test_library_answers_like_upstreams(described):
    assert described["unknown"] == [True, "RuntimeError", "RuntimeError"] and described["kept"] and described["same"]
    assert hasattr(lib, "cnonsense") and lib.cnonsense is lib.cnonsense and lib["cnonsense"] is lib.cnonsense
    with pytest.raises(RuntimeError):
        lib.cnonsense()
    assert bnb.functional.lib is bnb.cextension.lib and lib.compiled_with_cuda == described["compiled_with_cuda"]
    assert [bool(lib.has_avx512f_cpu()), bool(lib.has_avx512bf16_cpu())] == described["avx512"]
    for name in ("nf4", "fp4"):
        assert ops.table(name).tolist() == described["tables"][name]


def test_absent_functions_say_so():
    for name in ("cadam32bit_grad_fp32", "cigemmlt_8", "cbatched_igemm"):
        with pytest.raises(NotImplementedError, match=f"{name} is not in bitshard yet"):
            lib[name](1, 2, 3)
    assert isinstance(lib, BNBNativeLibrary) and not hasattr(lib, "__wrapped__")


def test_without_gpu_cuda_functions_raise():
    library = BNBNativeLibrary(ct.CDLL(_C.__file__))
    assert not library.compiled_with_cuda
    for name in our_cuda_names():
        assert not hasattr(getattr(library, name), "restype")
        with pytest.raises(RuntimeError, match=f"{name} needs CUDA"):
            library[name](None, None, None, None, 64, 64, None)


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_nothing_else_is_exported():
    listed = subprocess.run(["nm", "-D", "--defined-only", _C.__file__], capture_output=True, text=True, check=True)
    names = {line.split()[-1] for line in listed.stdout.splitlines()}
    expected = {"PyInit__C", "bsh_native_last_error", *our_cpu_names(), *(our_cuda_names() if BUILT else ())}
    assert names - {"_init", "_fini"} == expected


# ---- CPU ----


@pytest.mark.parametrize("blocksize", [*BLOCKSIZES, 16384])
@pytest.mark.parametrize("name", DTYPES)
def test_cpu_8bit_blocks(name, blocksize, assert_equal):
    dtype, map, none = DTYPES[name], dynamic_map(), torch.empty(0)
    for n in SIZES:
        x = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
        code, absmax = filled(n, torch.uint8), filled(blocks(n, blocksize), torch.float32)
        sizes = (ct.c_longlong(blocksize), ct.c_longlong(n))
        lib[f"cquantize_blockwise_cpu_{name}"](get_ptr(map), get_ptr(x), get_ptr(absmax), get_ptr(code), *sizes)
        expected_code, expected_absmax = ops.quantize_blockwise(x, map, none, blocksize)
        assert_equal(content(code, n, torch.uint8), expected_code)
        assert_equal(content(absmax, blocks(n, blocksize), torch.float32), expected_absmax)
        out = filled(n, dtype)
        lib[f"cdequantize_blockwise_cpu_{name}"](get_ptr(map), get_ptr(code), get_ptr(absmax), get_ptr(out), *sizes)
        expected = ops.dequantize_blockwise(expected_code, expected_absmax, map, none, blocksize, dtype)
        assert_equal(content(out, n, dtype), expected)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("name", DTYPES)
def test_cpu_4bit_blocks(name, quant_type, assert_equal):
    dtype = DTYPES[name]
    for rows, columns in ((1, 1), (1, 64), (3, 5), (7, 130), (96, 256), (31, 4097)):
        for blocksize in BLOCKSIZES:
            w = torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns)).to(dtype)
            packed, absmax = ops.quantize_4bit(w, blocksize, ops.FORMATS[quant_type], torch.uint8)
            out = filled(rows * columns, dtype)
            sizes = (ct.c_longlong(size) for size in (blocksize, rows, columns))
            function = lib[f"cdequantize_blockwise_cpu_{quant_type}_{name}"]
            function(get_ptr(packed), get_ptr(absmax), get_ptr(out), *sizes)
            expected = dequantized(packed, absmax, blocksize, quant_type, rows, columns, dtype)
            assert_equal(content(out, rows * columns, dtype).view(rows, columns), expected)


def test_cpu_calls_are_upstreams(described, tmp_path):
    """The same calls with the same inputs on both libraries; upstream's CPU build may choose neighbouring codes."""
    rows, columns = 48, 256
    x = torch.randn(rows * columns, generator=torch.Generator().manual_seed(1))
    code, absmax = ops.quantize_blockwise(x, dynamic_map(), torch.empty(0), 64)
    packed, _ = ops.quantize_4bit(x, 64, 0, torch.uint8)
    inputs = {"x": x, "map": dynamic_map(), "code": code, "absmax": absmax, "packed": packed}
    save_file({**inputs, "shape": torch.tensor([rows, columns])}, tmp_path / "inputs.safetensors")
    upstream.run(SCRIPT, "cpu", str(tmp_path))
    theirs = load_file(tmp_path / "outputs.safetensors")
    assert torch.equal(theirs["absmax"], absmax)
    assert (theirs["code"] != code).float().mean() < 0.01
    assert torch.equal(
        theirs["values"], ops.dequantize_blockwise(code, absmax, dynamic_map(), torch.empty(0), 64, x.dtype)
    )
    for quant_type in ("nf4", "fp4"):
        ours = dequantized(packed, absmax, 64, quant_type, rows, columns, torch.float32).flatten()
        torch.testing.assert_close(theirs[quant_type], ours, rtol=1e-2, atol=1e-6)
    state = bnb.functional.QuantState(absmax, torch.Size([32, x.numel() // 32]), None, 64, "nf4", torch.float32)
    reordered, state = bnb.functional._convert_weight_packed_for_cpu(packed, state)
    assert torch.equal(reordered, theirs["reordered"]) and torch.equal(state.absmax, theirs["reordered_absmax"])


def test_cpu_calls_without_elements():
    """The addresses of empty tensors are NULL."""
    lib.cquantize_blockwise_cpu_fp32(None, None, None, None, ct.c_longlong(64), ct.c_longlong(0))
    lib.cdequantize_blockwise_cpu_fp16(None, None, None, None, ct.c_longlong(64), ct.c_longlong(0))
    lib.cdequantize_blockwise_cpu_nf4_bf16(None, None, None, ct.c_longlong(64), ct.c_longlong(3), ct.c_longlong(0))


# (what is wrong, replaced arguments of cquantize_blockwise_cpu_fp32, words of the error)
CPU_MISTAKES = [
    ("blocksize", {4: ct.c_longlong(48)}, "blocksize 48 is not a power of two from 32 to 16384"),
    ("large blocksize", {4: ct.c_longlong(1 << 20)}, "blocksize 1048576 is not"),
    ("n", {5: ct.c_longlong(-7)}, "n is -7"),
    ("code", {0: None}, "code is NULL"),
    ("A", {1: None}, "A is NULL"),
    ("absmax", {2: None}, "absmax is NULL"),
    ("out", {3: None}, "out is NULL"),
    ("alignment", {1: "odd"}, "A .* is not aligned to its elements of 4 bytes"),
]


@pytest.mark.parametrize(("arguments", "words"), [pytest.param(*rest, id=name) for name, *rest in CPU_MISTAKES])
def test_cpu_mistakes(arguments, words):
    """They raise and leave the output as it was."""
    n, x, map = 256, torch.randn(257), dynamic_map()
    code, absmax = filled(n, torch.uint8), filled(4, torch.float32)
    call = [*map_pointers(map, x, absmax, code), ct.c_longlong(64), ct.c_longlong(n)]
    for position, value in arguments.items():
        call[position] = ct.c_void_p(x.data_ptr() + 1) if value == "odd" else value
    with pytest.raises(RuntimeError, match=f"cquantize_blockwise_cpu_fp32: {words}"):
        lib.cquantize_blockwise_cpu_fp32(*call)
    assert bool((code == FILL).all()) and bool((absmax == FILL).all())


def map_pointers(*tensors: Tensor) -> list[ct.c_void_p | None]:
    return [get_ptr(tensor) for tensor in tensors]


def test_mistakes_are_written_once_for_each_cause(capfd):
    x, absmax = torch.zeros(64, dtype=torch.uint8), torch.zeros(1)
    for blocksize, packed in ((3, x), (5, x), (7, x), (64, None)):
        with pytest.raises(RuntimeError):
            sizes = (ct.c_longlong(size) for size in (blocksize, 2, 32))
            lib.cdequantize_blockwise_cpu_fp4_bf16(get_ptr(packed), get_ptr(absmax), get_ptr(x), *sizes)
    lines = capfd.readouterr().err.splitlines()
    assert [line.split("; ")[0] for line in lines] == [
        "bitshard: cdequantize_blockwise_cpu_fp4_bf16: blocksize 3 is not a power of two from 32 to 4096",
        "bitshard: cdequantize_blockwise_cpu_fp4_bf16: A is NULL",
    ]


def test_last_error_is_of_this_thread_and_call():
    plain = ct.CDLL(_C.__file__)  # without the façade's check
    plain.bsh_native_last_error.restype = ct.c_char_p
    sizes = (ct.c_longlong(64), ct.c_longlong(2), ct.c_longlong(32))
    plain.cdequantize_blockwise_cpu_nf4_fp32(None, None, None, *sizes)
    assert plain.bsh_native_last_error() == b"cdequantize_blockwise_cpu_nf4_fp32: A is NULL"
    seen = []
    thread = threading.Thread(target=lambda: seen.append(plain.bsh_native_last_error()))
    thread.start(), thread.join()
    assert seen == [b""]
    packed, absmax, out = torch.zeros(32, dtype=torch.uint8), torch.ones(1), torch.empty(64)
    plain.cdequantize_blockwise_cpu_nf4_fp32(*map_pointers(packed, absmax, out), *sizes)
    assert plain.bsh_native_last_error() == b"" and bool((out == -1).all())


@needs_cuda_build
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_functions_without_driver():
    x, packed, absmax = torch.randn(128), filled(64, torch.uint8), filled(2, torch.float32)
    with pytest.raises(RuntimeError, match="cquantize_blockwise_fp32_nf4: no NVIDIA driver"):
        cuda_library().cquantize_blockwise_fp32_nf4(None, *map_pointers(x, absmax, packed), 64, 128)
    assert bool((packed == FILL).all())
    with pytest.raises(RuntimeError, match="cint8_vector_quant: no NVIDIA driver"):
        cuda_library().cint8_vector_quant(*map_pointers(x.half(), packed, absmax), 0.0, 1, 128, None)
    with pytest.raises(RuntimeError, match="cigemmlt_32: no NVIDIA driver"):
        pointers = map_pointers(packed, packed, packed)
        cuda_library().cigemmlt_32(cuda_library().get_context(), 1, 1, 4, *pointers, None, 4, 4, 1, None)
    assert bool((packed == FILL).all())


# ---- CUDA ----


def on_gpu(n: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(n, device="cuda", generator=generator).to(dtype)


@needs_gpu
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("name", DTYPES)
def test_cuda_4bit_blocks(name, quant_type, blocksize, assert_equal):
    dtype = DTYPES[name]
    for n in SIZES:
        x = on_gpu(n, dtype, n)
        packed, absmax = filled((n + 1) // 2, torch.uint8, "cuda"), filled(blocks(n, blocksize), torch.float32, "cuda")
        lib[f"cquantize_blockwise_{name}_{quant_type}"](None, *map_pointers(x, absmax, packed), blocksize, n)
        expected_packed, expected_absmax = ops.quantize_4bit(x, blocksize, ops.FORMATS[quant_type], torch.uint8)
        assert_equal(content(packed, (n + 1) // 2, torch.uint8), expected_packed.flatten())
        assert_equal(content(absmax, blocks(n, blocksize), torch.float32), expected_absmax)
        out = filled(n, dtype, "cuda")
        stream = torch.cuda.current_stream().cuda_stream
        function = lib[f"cdequantize_blockwise_{name}_{quant_type}"]
        function(None, *map_pointers(packed, absmax, out), blocksize, n, stream)
        expected = dequantized(expected_packed, expected_absmax, blocksize, quant_type, 1, n, dtype)
        assert_equal(content(out, n, dtype), expected.flatten())


@needs_gpu
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
@pytest.mark.parametrize("name", DTYPES)
def test_cuda_8bit_blocks(name, blocksize, assert_equal):
    dtype, map, none = DTYPES[name], dynamic_map().cuda(), torch.empty(0, device="cuda")
    for n in SIZES:
        x = on_gpu(n, dtype, n)
        code, absmax = filled(n, torch.uint8, "cuda"), filled(blocks(n, blocksize), torch.float32, "cuda")
        lib[f"cquantize_blockwise_{name}"](*map_pointers(map, x, absmax, code), blocksize, n)
        expected_code, expected_absmax = ops.quantize_blockwise(x, map, none, blocksize)
        assert_equal(content(code, n, torch.uint8), expected_code)
        assert_equal(content(absmax, blocks(n, blocksize), torch.float32), expected_absmax)
        out, stream = filled(n, dtype, "cuda"), torch.cuda.current_stream().cuda_stream
        lib[f"cdequantize_blockwise_{name}"](*map_pointers(map, code, absmax, out), blocksize, n, stream)
        expected = ops.dequantize_blockwise(expected_code, expected_absmax, map, none, blocksize, dtype)
        assert_equal(content(out, n, dtype), expected)


def nested(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, bnb.functional.QuantState]:
    w = on_gpu(rows * columns, dtype, rows).view(rows, columns)
    return bnb.functional.quantize_4bit(w, quant_type="nf4", compress_statistics=True)


def dequantize_as_lora_kernels(packed: Tensor, state, stream) -> Tensor:
    """The calls that unsloth and axolotl make for nested scales; `stream` as either of them passes it."""
    absmax = torch.empty(state.absmax.numel(), dtype=torch.float32, device="cuda")
    out = torch.empty(state.shape, dtype=state.dtype, device="cuda")
    second = state.state2
    lib.cdequantize_blockwise_fp32(
        *map_pointers(second.code, state.absmax, second.absmax, absmax),
        ct.c_int(second.blocksize),
        ct.c_int(absmax.numel()),
        stream,
    )
    absmax += state.offset
    name = "fp16" if state.dtype == torch.float16 else "bf16"
    function = lib[f"cdequantize_blockwise_{name}_nf4"]
    function(
        get_ptr(None), *map_pointers(packed, absmax, out), ct.c_int(state.blocksize), ct.c_int(out.numel()), stream
    )
    return out


@needs_gpu
@pytest.mark.parametrize("form", ["int", "c_void_p", "Stream"])
@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cuda_nested_sequence(dtype, side, form, assert_equal):
    packed, state = nested(1000, 192, dtype)
    expected = bnb.functional.dequantize_4bit(packed, state)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    argument = {"int": int, "c_void_p": ct.c_void_p}.get(form, lambda _: stream)(stream.cuda_stream)
    with torch.cuda.stream(stream):
        out = dequantize_as_lora_kernels(packed, state, argument)
    stream.synchronize()
    assert_equal(out, expected)


@needs_gpu
def test_cuda_work_goes_to_the_stream_given(assert_equal):
    """The input is written late on a side stream that is not torch's current one."""
    packed, state = nested(512, 256, torch.bfloat16)
    expected = bnb.functional.dequantize_4bit(packed, state)
    absmax = bnb.functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    late, out = torch.zeros_like(packed), torch.empty_like(expected)
    dequantize_as_lora_kernels(packed, state, torch.cuda.current_stream().cuda_stream)  # loads the kernels
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(packed)
    lib.cdequantize_blockwise_bf16_nf4(None, *map_pointers(late, absmax, out), 64, out.numel(), stream.cuda_stream)
    assert not stream.query(), "the side stream was done too early to show anything"
    stream.synchronize()
    assert_equal(out, expected)


@needs_gpu
def test_cuda_quantizes_on_torchs_stream(assert_equal):
    x, stream = on_gpu(1 << 16, torch.bfloat16), torch.cuda.Stream()
    packed, absmax = torch.empty(1 << 15, dtype=torch.uint8, device="cuda"), torch.empty(1 << 10, device="cuda")
    lib.cquantize_blockwise_bf16_nf4(None, *map_pointers(x, absmax, packed), 64, x.numel())
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(x)
        lib.cquantize_blockwise_bf16_nf4(None, *map_pointers(late, absmax, packed), 64, x.numel())
    stream.synchronize()
    assert_equal(packed, ops.quantize_4bit(x, 64, 0, torch.uint8)[0].flatten())


@needs_gpu
def test_cuda_in_a_fresh_thread(assert_equal):
    packed, state = nested(256, 128, torch.bfloat16)
    expected, made = bnb.functional.dequantize_4bit(packed, state), []
    torch.cuda.synchronize()
    absmax = bnb.functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    out = torch.empty_like(expected)
    torch.cuda.synchronize()

    def call():  # nothing of torch before it: no context is current
        made.append(lib.cdequantize_blockwise_bf16_nf4(None, *pointers, 64, out.numel(), None))

    pointers = map_pointers(packed, absmax, out)
    thread = threading.Thread(target=call)
    thread.start(), thread.join()
    torch.cuda.synchronize()
    assert made == [None]
    assert_equal(out, expected)


@needs_gpu
def test_cuda_in_a_graph(assert_equal):
    packed, state = nested(300, 192, torch.bfloat16)
    expected, graph = bnb.functional.dequantize_4bit(packed, state), torch.cuda.CUDAGraph()
    dequantize_as_lora_kernels(packed, state, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = dequantize_as_lora_kernels(packed, state, torch.cuda.current_stream().cuda_stream)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert_equal(out, expected)


# ---- CUDA: products ----


@needs_gpu
@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_cuda_int8(threshold, assert_equal):
    """A layer of LLM.int8 as callers with addresses compute it: codes of x, int32 sums, values; on another stream."""
    side = torch.cuda.Stream()
    for M, N, K in ((1, 17, 64), (7, 33, 100), (130, 256, 4096)):
        x, w, bias = on_gpu(M * K, torch.float16, 1), on_gpu(N * K, torch.float16, 2), on_gpu(N, torch.float16, 3)
        x[::K] = 9.0  # an outlier in each row
        codes_w, scales_w, _ = ops.quantize_int8(w.view(N, K), 0.0)
        codes, scales = filled(M * K, torch.int8, "cuda"), filled(M, torch.float32, "cuda")
        sums, y = filled(M * N, torch.int32, "cuda"), filled(M * N, torch.float16, "cuda")
        side.wait_stream(torch.cuda.current_stream())
        stream = side.cuda_stream
        lib.cint8_vector_quant(*map_pointers(x, codes, scales), threshold, M, K, stream)
        pointers = map_pointers(codes_w, codes, sums)
        assert lib.cigemmlt_32(lib.get_context(), N, M, K, *pointers, None, K, K, N, stream) == 0
        lib.cdequant_mm_int32_fp16(*map_pointers(sums, scales, scales_w, y, bias), M, N, stream)
        side.synchronize()
        codes = content(codes, M * K, torch.int8).view(M, K)
        expected = [ops.quantize_int8(row[None], threshold)[:2] for row in x.view(M, K)]
        assert_equal(codes, torch.cat([row for row, _ in expected]))
        assert_equal(content(scales, M, torch.float32), torch.cat([scale for _, scale in expected]))
        assert bool((codes[:, 0] == 0).all()) == (threshold > 0.0)
        sums = content(sums, M * N, torch.int32).view(M, N)
        assert_equal(sums, ops.product_int8(codes, codes_w))
        rows = content(scales, M, torch.float32)
        expected = ops.scale_product_int8(sums, rows, scales_w, bias, torch.float16)
        assert_equal(content(y, M * N, torch.float16).view(M, N), expected)


class Product:
    """W [N, K] of a format, x [M, K], and the float64 result with the bound of docs/numerics.md."""

    def __init__(self, name: str, M: int, N: int, K: int, quant_type="nf4", blocksize=64, nested=False, bias=False):
        self.name, self.M, self.N, self.K, self.blocksize = name, M, N, K, blocksize
        self.dtype, self.quant_type, self.nested = DTYPES[name], quant_type, nested
        w = on_gpu(N * K, torch.float32, N).view(N, K) * 0.05
        self.packed, self.absmax = ops.quantize_4bit(w, blocksize, ops.FORMATS[quant_type], torch.uint8)
        self.x = on_gpu(M * K, self.dtype, 7919 + K).view(
            M, K
        )  # never W's own draw: products of equal rows do not cancel
        self.bias = on_gpu(N, self.dtype, M) if bias else None
        self.table = ops.table(quant_type).cuda()
        self.offset, self.map = self.absmax.mean(), dynamic_map().cuda()
        self.code, self.absmax2 = ops.quantize_blockwise(self.absmax, self.map, self.offset, 256)

    def expected(self) -> tuple[Tensor, Tensor]:
        """y in float64 and the largest error allowed, both [M, N]."""
        none = torch.empty(0, device="cuda")
        scales = (self.code, self.map, self.absmax2, self.offset) if self.nested else (self.absmax, none, none, none)
        sizes = (self.blocksize, ops.FORMATS[self.quant_type], self.N, self.K, self.dtype)
        w, x = ops.dequantize_4bit(self.packed, *scales, *sizes).double(), self.x.double()
        bias = torch.zeros(self.N, device="cuda").double() if self.bias is None else self.bias.double()
        bound = LINEAR_BOUND[self.dtype] * (x.square() @ w.square().T).sqrt()
        expected = x @ w.T + bias
        # beside the bound half a unit of the result, which among millions of them is not always small against the sum
        return expected, bound + torch.finfo(self.dtype).eps * (bias.abs() + expected.abs() / 2) + 2.0**-30

    def gemv(self) -> Tensor:
        stream = torch.cuda.current_stream().cuda_stream
        memory = filled(self.N, self.dtype, "cuda")
        pointers = map_pointers(self.x, self.packed, self.absmax, self.table, memory)
        sizes = [ct.c_int32(size) for size in (self.N, self.K // 2, self.N, self.blocksize)]
        function = lib[f"cgemm_4bit_inference_naive_{self.name}"]
        function(ct.c_int32(self.N), ct.c_int32(1), ct.c_int32(self.K), *pointers, *sizes, stream)
        return self.result(memory)

    def launch_gemm(self, stream: int) -> Tensor:
        """The memory that the result will be in."""
        memory = filled(self.M * self.N, self.dtype, "cuda")
        scales = (self.absmax2, self.code, self.map, self.offset) if self.nested else (self.absmax, None, None, None)
        pointers = map_pointers(self.x, self.packed, *scales, memory, self.bias)
        sizes = (self.M, self.N, self.K, self.blocksize, 1 if self.quant_type == "fp4" else 2)
        lib[f"cgemm_4bit_{self.name}"](*pointers, *sizes, stream)
        return memory

    def gemm(self) -> Tensor:
        return self.result(self.launch_gemm(torch.cuda.current_stream().cuda_stream))

    def result(self, memory: Tensor) -> Tensor:
        torch.cuda.synchronize()
        return content(memory, self.M * self.N, self.dtype).view(self.M, self.N)

    def check(self, y: Tensor) -> None:
        expected, bound = self.expected()
        worst = ((y.double() - expected).abs() / bound).max().item()
        assert worst <= 1, f"{worst} times the bound"


GEMV = ((17, 64), (128, 256), (1000, 512), (4096, 4096), (14336, 4096), (4096, 14336))


@needs_gpu
@pytest.mark.parametrize("blocksize", [32, 64, 128, 4096])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("name", DTYPES)
def test_cuda_gemv(name, quant_type, blocksize):
    for N, K in GEMV:
        product = Product(name, 1, N, K, quant_type, blocksize)
        product.check(product.gemv())


@needs_gpu
def test_cuda_gemv_is_no_less_accurate_than_upstreams(described, tmp_path):
    inputs, cases, products = {}, [], {}
    for name in DTYPES:
        for N, K in GEMV[2:]:
            key, product = f"{name}/{N}x{K}", Product(name, 1, N, K)
            products[key] = product
            cases.append({"key": key, "m": N, "k": K, "blocksize": 64, "dtype": name})
            tensors = {"x": product.x, "packed": product.packed, "absmax": product.absmax, "table": product.table}
            inputs.update({f"{key}/{what}": tensor.cpu() for what, tensor in tensors.items()})
    save_file(inputs, tmp_path / "inputs.safetensors")
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    upstream.run(SCRIPT, "gemv", str(tmp_path))
    theirs = load_file(tmp_path / "outputs.safetensors", device="cuda")
    for key, product in products.items():
        expected = product.expected()[0]
        ours = (product.gemv().double() - expected).norm().item()
        slack = 2 if key.startswith("fp32") else 1.02  # fp32: nothing but the order of the sums differs
        assert ours <= slack * (theirs[key].double() - expected).norm().item(), key


@needs_gpu
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("name", DTYPES)
def test_cuda_gemm(name, nested, bias):
    for M in (1, 3, 8, 17, 64, 100, 300):
        for N, K in ((64, 128), (1024, 512), (4096, 4096)):
            product = Product(name, M, N, K, "fp4" if M % 2 == 0 else "nf4", nested=nested, bias=bias)
            product.check(product.gemm())


@needs_gpu
def test_cuda_products_on_streams_that_torch_does_not_know_about():
    """Workspace of a raw stream must not be a block that torch gives to its current stream meanwhile."""
    split, ordered = Product("bf16", 1, 4096, 14336), Product("bf16", 48, 4096, 4096, nested=True)
    products, stream = (split, ordered, Product("fp16", 300, 2048, 2048)), torch.cuda.Stream()
    for product in products:
        product.check(product.gemm())
    for _ in range(3):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
        results = [product.launch_gemm(stream.cuda_stream) for product in products]
        noise = [torch.full((n,), 1e30, device="cuda") for n in (1 << 16, 1180160, 1 << 21, 1 << 24) for _ in range(4)]
        torch.cuda.current_stream().synchronize()
        assert not stream.query(), "the side stream was done too early to show anything"
        for product, memory in zip(products, results, strict=True):
            product.check(product.result(memory))
        del noise


@needs_gpu
def test_cuda_gemv_is_refused_in_a_graph():
    """It has to read which format `datatype` holds."""
    product, graph = Product("bf16", 1, 128, 256), torch.cuda.CUDAGraph()
    product.gemv()
    out = torch.zeros(128, dtype=torch.bfloat16, device="cuda")
    pointers = map_pointers(product.x, product.packed, product.absmax, product.table, out)
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        with pytest.raises(RuntimeError, match="datatype cannot be read while a CUDA graph is captured"):
            lib.cgemm_4bit_inference_naive_bf16(128, 1, 256, *pointers, 128, 128, 128, 64, stream)
        out.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert bool((out == 1).all())


# ---- CUDA: mistakes ----

# (what is wrong, function, replaced arguments, words of the error). Arguments: see the fixture below.
CUDA_MISTAKES = [
    ("host input", "dequantize", {1: "host"}, "A .* is no address that a GPU reaches"),
    ("host output", "dequantize", {3: "host"}, "out .* is no address that a GPU reaches"),
    ("NULL scales", "dequantize", {2: None}, "absmax is NULL"),
    ("odd scales", "dequantize", {2: "odd"}, "absmax .* is not aligned"),
    ("blocksize", "dequantize", {4: 48}, "blocksize 48 is not"),
    ("n", "dequantize", {5: -5}, "n is -5"),
    ("rows", "gemv", {1: 2}, "n is 2, expected 1"),
    ("ldb", "gemv", {9: 100}, "ldb is 100, expected k / 2 for k = 256"),
    ("datatype", "gemv", {6: "noise"}, "datatype holds the values of neither NF4 nor FP4"),
    ("host datatype", "gemv", {6: "host"}, "datatype .* is no address"),
    ("gemv blocksize", "gemv", {11: 16}, "blocksize 16 is not"),
    ("quant_type", "gemm", {12: 3}, "quant_type 3 is neither"),
    ("no map", "gemm", {3: "noise", 4: None}, "absmax_code is NULL"),
    ("K", "gemm", {10: 0}, ".*K = 0 is no product"),
    ("host codes", "int8", {4: "host"}, "A .* is no address that a GPU reaches"),
    ("ldb", "int8", {9: 12}, "lda, ldb, ldc = 4, 12, 128, expected k, k, m = 4, 4, 128"),
    ("k", "int8", {3: 1 << 20}, "m = 128, n = 256, k = 1048576, expected k from 1 to 131071"),
]


@needs_gpu
@pytest.mark.parametrize(
    ("which", "arguments", "words"), [pytest.param(*rest, id=name) for name, *rest in CUDA_MISTAKES]
)
def test_cuda_mistakes(which, arguments, words):
    product, host, noise = Product("bf16", 1, 128, 256), torch.zeros(128 * 256), on_gpu(1024, torch.float32)
    out = filled(128 * 256, torch.bfloat16, "cuda")
    p = map_pointers(product.x, product.packed, product.absmax, product.table, out)
    name, call = {
        "dequantize": ("cdequantize_blockwise_bf16_nf4", [None, p[1], p[2], p[4], 64, 128 * 256, None]),
        "gemv": ("cgemm_4bit_inference_naive_bf16", [128, 1, 256, *p, 128, 128, 128, 64, None]),
        "int8": ("cigemmlt_32", [None, 128, 256, 4, p[0], p[0], p[4], None, 4, 4, 128, None]),
        "gemm": ("cgemm_4bit_bf16", [*p[:3], None, None, None, p[4], None, 1, 128, 256, 64, 2, None]),
    }[which]
    names = {"host": host.data_ptr(), "noise": noise.data_ptr(), "odd": product.absmax.data_ptr() + 1}
    for position, value in arguments.items():
        call[position] = names.get(value, value)
    with pytest.raises(RuntimeError, match=f"{name}: {words}"):
        lib[name](*call)
    torch.cuda.synchronize()
    assert bool((out == FILL).all())


@needs_gpu
def test_cpu_functions_refuse_gpu_memory():
    map, x = dynamic_map(), on_gpu(256, torch.float32)
    absmax, code = filled(4, torch.float32), filled(256, torch.uint8)
    with pytest.raises(RuntimeError, match="A .* is memory of a GPU"):
        pointers = map_pointers(map, x, absmax, code)
        lib.cquantize_blockwise_cpu_fp32(*pointers, ct.c_longlong(64), ct.c_longlong(256))
    assert bool((code == FILL).all())


@needs_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_cuda_device_is_where_the_output_lies(assert_equal):
    packed, state = nested(256, 128, torch.bfloat16)
    absmax = bnb.functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    expected = bnb.functional.dequantize_4bit(packed, state)
    there = [tensor.to("cuda:1") for tensor in (packed, absmax, torch.empty_like(expected))]
    torch.cuda.synchronize("cuda:1")
    assert torch.cuda.current_device() == 0
    lib.cdequantize_blockwise_bf16_nf4(None, *map_pointers(*there), 64, expected.numel(), None)
    torch.cuda.synchronize("cuda:1")
    assert torch.cuda.current_device() == 0
    assert_equal(there[2], expected)
    with pytest.raises(RuntimeError, match="absmax is on cuda:0, the output on cuda:1"):
        lib.cdequantize_blockwise_bf16_nf4(None, *map_pointers(there[0], absmax, there[2]), 64, expected.numel(), None)
