"""4-bit products of one kernel on the machine of this folder, and faults that are planted in the kernel's source."""

import functools
import itertools
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import torch
from bitshard import functional, ops

from . import gpu as machine

FORMATS = ("nf4", "fp4")
NONE = ops.empty(torch.device("cpu"))


def compile_kernels(stem: str, names: list[str], sm: int) -> None:
    """All that a file of tests runs, on all cores."""
    machine.ptx_of(stem, sm)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(machine.kernel_of, itertools.repeat(stem), names, itertools.repeat(sm)))


def dequantized(packed, scales, blocksize: int, fmt: int, N: int, K: int, dtype: torch.dtype):
    filled = [NONE if one is None else one for one in scales]
    return ops.dequantize_4bit(packed.view(-1, 1), *filled, blocksize, fmt, N, K, dtype).reshape(N, K)


def weight(N: int, K: int, dtype: torch.dtype, fmt: int, blocksize: int, nested: bool, decoded=None):
    """Packed bytes and scales of random numbers of `dtype`, and their values in `decoded` (`dtype` where None)."""
    w = torch.randn(N, K).to(dtype) * 0.1
    packed, state = functional.quantize_4bit(
        w, blocksize=blocksize, compress_statistics=nested, quant_type=FORMATS[fmt]
    )
    scales = (state.absmax, None, None, None)
    if nested:
        scales = (state.absmax, state.state2.code, state.state2.absmax, state.offset.reshape(1))
    return packed.flatten(), scales, dequantized(packed, scales, blocksize, fmt, N, K, decoded or dtype)


def hostile_scales(scales, offset: float = 0.0):
    """Nested scales of both signs, spread over 2^28, some 0."""
    code, values, absmax2, _ = scales
    spread = torch.exp2(torch.randint(-20, 8, absmax2.shape).float()) * (torch.rand(absmax2.shape) + 0.5)
    spread[::7] = 0
    return torch.randint_like(code, 256), values, spread, torch.full((1,), offset)


def multiply(kernel: str, gpu: machine.Gpu, x, packed, scales, bias, blocksize, fmt, N: int, K: int, gradient: bool):
    """y [M, N] of x [M, K], or with `gradient` dx [M, K] of x = dy."""
    if gradient:
        return gpu.linear_4bit_dgrad(x, packed, scales, blocksize, fmt, N, K, kernel)[0]
    return gpu.linear_4bit(x, packed, scales, bias, blocksize, fmt, N, K, kernel)[0]


def multiply_into(kernel: str, gpu: machine.Gpu, x, packed, scales, y) -> None:
    """A product in blocks of 64 of NF4 into a y whose rows may be further apart than they are long."""
    (M, K), N = x.shape, y.shape[1]
    operand, tensors = gpu.weight(packed, scales, 64, 0, N * K)
    sizes, one = (M, N, K, x.stride(0), y.stride(0)), (None, 0, 0.0)
    product = machine.Product(operand, x.data_ptr(), None, y.data_ptr(), *sizes, *one, machine.DTYPES[x.dtype])
    name = machine.ctypes.byref(machine.ctypes.c_char_p())
    gpu.call("product", product, b"linear_4bit", kernel.encode(), name, tensors=[*tensors, x, y])


def assert_product(y, x, w, bias, gradient: bool) -> None:
    """Within the rounding of y, and fp32 sums of at most 2,048 products."""
    b = w.double() if gradient else w.double().T
    exact = x.double() @ b + (0 if bias is None else bias.double())
    size = x.double().abs() @ b.abs() + 1e-30
    unit = 2.0**-8 if y.dtype == torch.bfloat16 else 2.0**-11
    assert ((y.double() - exact).abs() <= exact.abs() * unit + size * 2.0**-20).all()


def check_equal_bits(kernel: str, sm: int, sms: int, M: int, N: int, K: int, gradient: bool, dtype) -> machine.Gpu:
    """Whatever the order of threads, and where other work holds most of the GPU; the first of the GPUs."""
    torch.manual_seed(0)
    packed, scales, w = weight(N, K, dtype, 0, 64, True)
    x = torch.randn(M, N if gradient else K).to(dtype)
    orders = ((0, 0), (1, 0), (2, 0), (0, 1), (1, 2), (2, 3))
    gpus = [machine.Gpu(sm, sms, seed, at_once=blocks) for seed, blocks in orders]
    first, *others = (multiply(kernel, gpu, x, packed, scales, None, 64, 0, N, K, gradient) for gpu in gpus)
    assert_product(first, x, w, None, gradient)
    assert all(torch.equal(one, first) for one in others)
    return gpus[0]


def check_columns_apart(kernel: str, sm: int, dtype) -> None:
    """Rows of y further apart than N: what lies between stays."""
    torch.manual_seed(0)
    packed, scales, w = weight(250, 128, dtype, 0, 64, True)
    x, wide = torch.randn(9, 128).to(dtype), torch.full((9, 256), 7.0, dtype=dtype)
    y = wide[:, :250]
    multiply_into(kernel, machine.Gpu(sm, 4, 1), x, packed, scales, y)
    assert_product(y, x, w, None, False)
    assert bool((wide[:, 250:] == 7).all())


def plant(monkeypatch, folder, kernel: str, sm: int, form: str, kernels: str, file: str, pattern: str, instead=";"):
    """From now on `kernel` is built with `instead` in the place of what `pattern` finds in `file`.

    Its list of kernels, from the definition of the macro `form` on, is replaced by `kernels`: few compile fast.
    """
    sources = shutil.copytree(machine.ROOT / "cuda", folder / "cuda")
    main, changed = (next(sources.rglob(name)) for name in (f"{kernel}.cu", file))
    main.write_text(main.read_text().split(f"#define {form}(")[0] + kernels)
    text, n = re.subn(pattern, instead, changed.read_text())
    assert n > 0
    changed.write_text(text)
    flags = [*machine.nvcc_flags(), f"-arch={machine.TARGETS[sm]}", "-ptx"]
    folders = ["-I", str(machine.ROOT / "csrc"), "-I", str(folder)]
    machine.run([machine.nvcc(), *flags, *folders, str(main), "-o", str(folder / "planted.ptx")])
    monkeypatch.setattr(machine, "BUILT", folder)
    monkeypatch.setattr(machine, "ptx_of", lambda source, sm: folder / "planted.ptx")
    monkeypatch.setattr(machine, "kernel_of", functools.cache(machine.kernel_of.__wrapped__))


def goes_wrong(check) -> bool:
    """Whether check() finds wrong numbers, or its kernel touches what it must not, traps or waits for ever."""
    try:
        check()
    except AssertionError:
        return True
    except RuntimeError as error:
        assert "block (" in str(error) or "wait for one another" in str(error)
        return True
    return False
