"""A short list of calls that runs every CUDA kernel but gemm_4bit_sm90_wide once, for compute-sanitizer.

That one, which shares no tiles in so small a workspace, has benchmarks/checks/cuda_wide.py.

    compute-sanitizer --tool memcheck|racecheck python benchmarks/checks/cuda_sanitize.py [float32|float16|bfloat16 ...]

`optimizers` in the place of dtypes runs those kernels alone, with gradients and parameters of two dtypes, too; `int8`
the int8 kernels alone, `grouped` those of stacks of experts.
A workspace of 1 MiB makes small weights take several panels. With PYTORCH_NO_CUDA_MEMORY_CACHING=1 every tensor is an
allocation of its own, and memcheck sees what passes its end.
"""

import itertools
import os
import sys
from functools import partial
from pathlib import Path

os.environ["BITSHARD_WORKSPACE_MB"] = "1"
os.environ["BITSHARD_LINEAR_4BIT_DGRAD"] = "panels"

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

import reference
import torch
from bitshard import _C, functional, ops
from bitshard.formats.maps import create_dynamic_map
from bitshard.optim.base import Optimizer1State, Optimizer2State
from cuda_optim import NAMES, Ours, State
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def blocks(x: Tensor, blocksize: int, format: int) -> None:
    none, map = ops.empty(x.device), ops.table("dynamic").to(x.device)
    packed, absmax = ops.quantize_4bit(x, blocksize, format, torch.uint8)
    offset = absmax.mean()
    code, absmax2 = ops.quantize_blockwise(absmax, map, offset, 256)
    shape = (blocksize, format, 1, x.numel(), x.dtype)
    plain = ops.dequantize_4bit(packed, absmax, none, none, none, *shape)
    ops.dequantize_4bit(packed, code, map, absmax2, offset, *shape)
    assert torch.allclose(plain.flatten().float(), x.float(), atol=0.5 * float(x.abs().max()))
    code, absmax = ops.quantize_blockwise(x, map, none, blocksize)
    ops.dequantize_blockwise(code, absmax, map, none, blocksize, x.dtype)
    ops.checksum(packed)


def calibration(N: int, P: int, blocksize: int, format: int) -> None:
    w, weights = torch.randn(N, P, device="cuda"), torch.rand(P, device="cuda")
    u = torch.eye(P, device="cuda") + torch.triu(torch.rand(P, P, device="cuda"), 1) / P
    ops.round_4bit(w, u, w.abs().amax(1, keepdim=True).expand(N, P).contiguous(), format)
    scales = torch.randn(-(-N * P // blocksize), 42, device="cuda")
    ops.search_4bit(w, weights, scales, blocksize, format)


def quantized(N: int, K: int, dtype: torch.dtype, nested: bool, format: int) -> tuple[Tensor, list[Tensor]]:
    """A random W [N, K]: packed codes, and the four scale arguments of the ops."""
    none, map = torch.empty(0, device="cuda"), ops.table("dynamic").cuda()
    packed, absmax = ops.quantize_4bit(torch.randn(N, K, device="cuda", dtype=dtype), 64, format, torch.uint8)
    if not nested:
        return packed, [absmax, none, none, none]
    offset = absmax.mean()
    code, absmax2 = ops.quantize_blockwise(absmax, map, offset, 256)
    return packed, [code, map, absmax2, offset]


def products(N: int, K: int, dtype: torch.dtype, nested: bool, format: int, rows: tuple[int, ...]) -> None:
    packed, scales = quantized(N, K, dtype, nested, format)
    decoded = ops.dequantize_4bit(packed, *scales, 64, format, N, K, dtype).double()
    for M in rows:
        x, dy = (torch.randn(M, width, device="cuda", dtype=dtype) for width in (K, N))
        for bias in (torch.empty(0, device="cuda", dtype=dtype), torch.randn(N, device="cuda", dtype=dtype)):
            y = ops.linear_4bit(x, packed, *scales, bias, 64, format, N, K).double()
            exact = x.double() @ decoded.T + (bias.double() if bias.numel() else 0)
            assert (y - exact).norm() < 0.02 * exact.norm(), (N, K, M, dtype)
        dx = ops.linear_4bit_dgrad(dy, packed, *scales, 64, format, N, K).double()
        assert (dx - dy.double() @ decoded).norm() < 0.02 * dx.norm(), (N, K, M, dtype)


def forced(op: str, call) -> None:
    """Each kernel that takes the call; their results are alike."""
    kernels = ("gemv_int8", "any", "mixed_int8_sm90", "gemm_int8", "gemm_int8_sm90")
    kernels += ("dgrad_int8_sm90", "gemv_int8_dgrad", "panels")
    results = []
    for kernel in kernels:
        _C.force_kernel(op, kernel)
        try:
            results.append(call())
        except RuntimeError as refused:
            assert "cannot multiply" in str(refused)
    _C.force_kernel(op, None)
    first = results[0].double()
    assert all((one.double() - first).norm() <= 0.03 * first.norm() for one in results), (op, first.shape)


def int8(N: int, K: int, dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    """Every int8 kernel: with outlier columns that are gathered, beyond what the workspace holds, and without."""
    w = torch.randn(N, K, device="cuda", dtype=dtype)
    codes, absmax, _ = ops.quantize_int8(w, 0.0)
    ops.dequantize_int8(codes, absmax, N, K, dtype)
    for M in rows:
        x, dy = (torch.randn(M, width, device="cuda", dtype=dtype) for width in (K, N))
        bias = torch.randn(N, device="cuda", dtype=dtype)
        x_codes, x_absmax, _ = ops.quantize_int8(x, 2.0)
        ops.scale_product_int8(ops.product_int8(x_codes, codes), x_absmax, absmax, bias, dtype)
        for threshold in (0.0, 2.0, 4.0):
            forced("linear_int8", partial(ops.linear_int8, x, codes, absmax, bias, threshold, N, K))
        forced("linear_int8_dgrad", partial(ops.linear_int8_dgrad, dy, codes, absmax, N, K))


def int8_of(dtype: torch.dtype) -> None:
    int8(272, 1040, dtype, (1, 9, 30, 70, 300))
    int8(33, 77, dtype, (2, 20))


def grouped(N: int, K: int, dtype: torch.dtype, nested: bool, counts: tuple[int, ...]) -> None:
    """Each kernel of a stack of experts that takes the rows, both directions."""
    w = torch.randn(len(counts), N, K, device="cuda", dtype=dtype)
    packed, state = functional.quantize_experts_4bit(w, compress_statistics=nested, quant_type="nf4")
    decoded, end = functional.dequantize_4bit(packed, state), sum(counts)
    offs = torch.tensor(counts, device="cuda").cumsum(0).int()
    x, dy = (torch.randn(end + 3, width, device="cuda", dtype=dtype) for width in (K, N))
    bias = torch.randn(len(counts), N, device="cuda", dtype=dtype)
    exact = reference.grouped_linear_4bit(x, offs, decoded, bias)
    for kernel in ("gemv_4bit_grouped", "gemm_4bit_sm90_wide_grouped", "gemm_4bit_sm80_grouped"):
        _C.force_kernel("grouped_linear_4bit", kernel)
        y = ops.grouped_linear_4bit_fused(x, offs, packed, *state.scales(), bias, 64, 0, N, K)
        assert (y - exact).norm() < 0.02 * exact.norm() and not y[end:].any(), (N, K, counts, kernel)
    _C.force_kernel("grouped_linear_4bit", None)
    exact = reference.grouped_linear_4bit_dgrad(dy, offs, decoded)
    for kernel in ("gemm_4bit_sm90_wide_grouped", "gemm_4bit_sm80_grouped"):
        _C.force_kernel("grouped_linear_4bit_dgrad", kernel)
        dx = ops.grouped_linear_4bit_dgrad_fused(dy, offs, packed, *state.scales(), 64, 0, N, K)
        assert (dx - exact).norm() < 0.02 * exact.norm() and not dx[end:].any(), (N, K, counts, kernel)
    _C.force_kernel("grouped_linear_4bit_dgrad", None)


def few_rows(dtype: torch.dtype) -> None:
    """Each form of the fused kernels with tensor cores; prints what the chooser gives.

    On sm_90: gemv_4bit m8_k4, m8_k8, m16_k4, with groups of tokens and with K split by a cluster; gemm_4bit_sm90 m16,
    m32, m64 with shared row blocks, m32_p2 and m64_p2 with and without. A build for compute_80 gives gemv_4bit m32_k4
    and join_splits, one for compute_75 the forms of sm_75.
    """
    properties = torch.cuda.get_device_properties(0)
    gpu = (10 * properties.major + properties.minor, properties.multi_processor_count)
    for N, K, rows in (
        (64, 1024, (8, 16, 24, 33)),
        (64, 8192, (8, 16, 32)),
        (16, 20480, (8, 16, 64)),
        (4112, 3072, (48, 64)),
        (2576, 7808, (17, 32)),
        (8560, 2304, (17, 32, 64)),
        (9984, 4160, (64,)),
        (16912, 4096, (32,)),
        (20480, 4096, (16,)),
    ):
        for nested in (True, False):
            packed, scales = quantized(N, K, dtype, nested, 0)
            decoded = ops.dequantize_4bit(packed, *scales, 64, 0, N, K, dtype)
            for M in rows:
                x, bias = torch.randn(M, K, device="cuda", dtype=dtype), torch.randn(N, device="cuda", dtype=dtype)
                y = ops.linear_4bit(x, packed, *scales, bias, 64, 0, N, K)
                some = torch.randint(N, (48,), device="cuda")  # columns of y: the whole product takes too long here
                exact = x.double() @ decoded[some].double().T + bias[some].double()
                assert (y[:, some].double() - exact).norm() < 0.02 * exact.norm(), (N, K, M, dtype)
                print(N, K, M, _C.plan_linear_4bit(M, N, K, DTYPES.index(dtype), *gpu)["kernel"], flush=True)


def optimizers(dtype: torch.dtype) -> None:
    """Every algorithm and kind of state, several parameters in a launch: whole blocks, tails, views off alignment."""
    for name in sorted(set(ops.OPTIMIZERS) - {"lamb", "lars"}):
        for bits in (8, 32):
            optimizer = Optimizer2State if name in ("adam", "ademamix") else Optimizer1State
            betas = (0.9, 0.999, 0.9999) if name == "ademamix" else (0.9, 0.999)
            for max_unorm in (0.0, 0.1):
                params = [
                    torch.randn(n + 1, device="cuda").to(dtype)[s:][:n] for n, s in ((1024, 0), (1001, 0), (257, 1))
                ]
                for p in params:
                    p.grad = torch.randn_like(p)
                    p.grad[3::7] = 0
                options = {"betas": betas, "optim_bits": bits, "min_8bit_size": 1, "max_unorm": max_unorm}
                it = optimizer(name, params, lr=1e-3, weight_decay=0.01, **options)
                for _ in range(2):
                    it.step()
                assert all(bool(p.isfinite().all()) for p in params), (name, bits, dtype)


def mixed_optimizers() -> None:
    """Every algorithm, in 8 and 32 bits, where gradient and parameter are of two dtypes."""
    maps = tuple(create_dynamic_map(signed).cuda() for signed in (True, False))
    for name, (p_dtype, g_dtype), bits in itertools.product(NAMES, itertools.permutations(DTYPES, 2), (8, 32)):
        for n, start in ((1024, 0), (1001, 0), (257, 1)):
            p = torch.randn(n + start, device="cuda").to(p_dtype)[start:]
            state = State(name, bits, p, maps)
            for step in (1, 2):
                state.step(Ours, torch.randn(n, device="cuda").to(g_dtype), step)
            assert bool(p.isfinite().all()), (name, bits, p_dtype, g_dtype)


def main(names: list[str]) -> None:
    torch.manual_seed(0)
    if names == ["optimizers"]:
        for dtype in DTYPES:
            optimizers(dtype)
        mixed_optimizers()
        torch.cuda.synchronize()
        print("every optimizer kernel ran")
        return
    if names == ["grouped"]:
        for dtype, nested in itertools.product(DTYPES[1:], (True, False)):
            grouped(272, 320, dtype, nested, (5, 0, 130, 1))
            grouped(272, 320, dtype, nested, (1, 129, 0, 193, 257, 385, 449))
            grouped(48, 4160, dtype, nested, (40, 0, 3))
            grouped(48, 8256, dtype, nested, (2, 1))
        for pairs, experts in ((16, 128), (3000, 7)):
            chosen = torch.randint(-1, experts + 1, (pairs // 2, 2))
            for elsewhere in (False, True):
                found = ops.sort_by_expert(chosen.cuda(), experts, elsewhere)
                expected = reference.sort_by_expert(chosen, experts, elsewhere)
                assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))
        for dtype, columns in itertools.product(DTYPES, (1001, 2880)):
            y, back, counts = torch.randn(66, columns).to(dtype), torch.randperm(66), torch.rand(6, 11)
            back[7] -= 66
            found = ops.sum_by_token(y.cuda(), back.cuda(), counts.cuda()).cpu()
            assert torch.allclose(found, reference.sum_by_token(y, back, counts), rtol=0, atol=0, equal_nan=True)
        torch.cuda.synchronize()
        print("every kernel of a stack ran")
        return
    if names == ["int8"]:
        for dtype in DTYPES:
            int8_of(dtype)
        torch.cuda.synchronize()
        print("every int8 kernel ran")
        return
    for dtype in [getattr(torch, name) for name in names] or DTYPES:
        optimizers(dtype)
        for format in (0, 1):
            for n, start, blocksize in ((8192, 0, 64), (8191, 0, 32), (5000, 1, 64), (9000, 0, 4096)):
                calibration(n // 64, 64 - start, blocksize, format)
                blocks(torch.randn(n + start, device="cuda").to(dtype)[start:], blocksize, format)
        for nested in (True, False):
            products(384, 1024, dtype, nested, 0, (1, 4, 8, 13, 16, 24, 32, 64, 100))
        products(1024, 2048, dtype, True, 1, (1, 7, 64))
        if dtype != torch.float32:
            few_rows(dtype)
        products(98, 130, dtype, True, 0, (3,))
        int8_of(dtype)
    torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    main(sys.argv[1:])
