"""linear_4bit_int8 on CUDA without a GPU: the CPU's bits, whatever the order of the threads."""

import platform
import shutil

import pytest
import torch
from bitshard import functional, ops
from ptx import gpu as machine

pytestmark = [
    pytest.mark.skipif(machine.nvcc() is None, reason="needs nvcc"),
    pytest.mark.skipif(platform.machine() != "x86_64" or shutil.which("gcc") is None, reason="needs gcc on x86-64"),
]
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
NAMES = {F32: "f32", F16: "f16", BF16: "bf16"}
NONE = ops.empty(torch.device("cpu"))


def weight(N, K, quant_type="nf4", nested=True, blocksize=64):
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(N + K)) / K**0.5
    return functional.quantize_4bit(w, None, None, blocksize, nested, quant_type)


def activations(M, K, dtype, ld=None):
    x = torch.randn(M, ld or K, generator=torch.Generator().manual_seed(M + K)).to(dtype)[:, :K]
    x[M // 2] *= 30
    x[:, K // 3] *= 20
    return x


def agrees(gpu, x, packed, state, bias=None):
    """Bytes of the CPU; NaN where it has NaN."""
    numbers = (state.blocksize, ops.CODES[state.quant_type], *state.shape)
    scales = [None if s.numel() == 0 else s for s in state.scales()]
    found = gpu.linear_4bit_int8(x, packed, scales, bias, *numbers)
    expected = ops.linear_4bit_int8(x.contiguous(), packed, *state.scales(), NONE if bias is None else bias, *numbers)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0)), (found != expected).nonzero()[:3].tolist()
    return found


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("sm", [80, 90])
def test_the_cpus_bits(sm, dtype):
    """Tiles that are full and not, one group, an odd number of them and more than eight, rows of x that lie apart."""
    gpu = machine.Gpu(sm, 2, seed=sm)
    for M, N, K, ld in (
        (3, 5, 64, None),
        (130, 33, 192, None),
        (70, 140, 320, 327),
        (1, 256, 128, 136),
        (9, 66, 832, None),
    ):
        packed, state = weight(N, K)
        agrees(gpu, activations(M, K, dtype, ld), packed, state, torch.randn(N).to(dtype))
        assert gpu.launches == [f"{kernel}_{NAMES[dtype]}" for kernel in ("quantize_groups_int8", "int8_gemm_4bit")]


def test_every_storage_of_a_weight():
    """Both formats, plain and nested scales, blocks of several groups; packed codes at any byte; without a bias."""
    gpu, x = machine.Gpu(80, 2, seed=3), activations(9, 256, BF16)
    for quant_type in ("nf4", "fp4"):
        for nested in (False, True):
            for blocksize in (64, 256, 4096):
                packed, state = weight(34, 256, quant_type, nested, blocksize)
                agrees(gpu, x, packed, state)
    packed, state = weight(34, 256)
    moved = torch.zeros(packed.numel() + 3, dtype=torch.uint8)[3:].copy_(packed.flatten())
    agrees(gpu, x, moved, state)


def test_a_card_without_room_is_refused():
    packed, state = weight(5, 64)
    with pytest.raises(RuntimeError, match="needs a GPU of sm_80 or newer and a build for it, this is sm_75"):
        agrees(machine.Gpu(75, 1), activations(3, 64, F16), packed, state)


def test_every_code():
    gpu = machine.Gpu(80, 1)
    packed = torch.arange(256, dtype=torch.uint8).view(8, 32)
    for quant_type in ("nf4", "fp4"):
        state = functional.QuantState(torch.rand(8) + 0.5, torch.Size((8, 64)), None, 64, quant_type, F32)
        state.share(quant_type)
        agrees(gpu, torch.eye(64), packed, state)


def test_what_is_no_number():
    x = activations(6, 128, F32)
    x[0, 3], x[1, 70], x[2] = torch.nan, torch.inf, 0
    x[3] *= 2.0**-130
    packed, state = weight(40, 128)
    found = agrees(machine.Gpu(80, 2, seed=1), x, packed, state)
    assert found[:2].isnan().all() and not found[2:].isnan().any() and not found[2:4].any()


def test_chunks_of_rows_and_orders_of_threads():
    """Scratch memory for 128 rows: three chunks."""
    packed, state = weight(40, 128)
    x = activations(300, 128, BF16)
    for seed in (1, 2, 3):
        gpu = machine.Gpu(80, 2, seed=seed)
        gpu.workspace_bytes = 128 * (128 + 8)
        agrees(gpu, x, packed, state)
