"""Quantize, dequantize and multiply against the reference and against bytes that bitsandbytes made on a GPU."""

import pathlib

import cases
import numpy as np
import pytest
import reference
import torch
from bitshard import _C, autograd, functional, ops
from bitshard.functions import blockwise
from bitshard.kinds import kind_of
from helpers.alike import agree, by_isa, by_threads
from helpers.bytes import resident_bytes
from helpers.drawn import packed_weight, random_weight
from torch.nn import functional as F

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "golden.npz"
TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
BITS = {torch.float32: np.int32, torch.float16: np.int16, torch.bfloat16: np.int16}
NEAR = 4 * 2.0**-23  # how far from a threshold fp32 arithmetic may decide either way


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as arrays:
        return dict(arrays)


def tensor(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Bits of the golden file as a tensor."""
    return torch.from_numpy(array.view(BITS[dtype]) if dtype in BITS else array).view(dtype)


# ---- golden bytes ----


def keys(golden: dict, kind: str, dtype: str) -> list[str]:
    return sorted({key.rpartition("/")[0] for key in golden if key.startswith(f"{kind}/{dtype}/")})


def one_step(actual: torch.Tensor, expected: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
    """Where two code tensors differ, after checking that they differ by one step of the ascending values only."""
    bad = actual != expected
    assert ((rank[actual.long()] - rank[expected.long()]).abs() <= 1).all()
    return bad


@pytest.mark.parametrize("dtype", TORCH)
def test_golden_4bit(golden, device, dtype, assert_equal):
    """Packed bytes, scales and values equal bitsandbytes'. From float32 another GPU may give a code that is one off."""
    differ = total = 0
    for key in keys(golden, "4bit", dtype):
        _, _, name, quant_type, blocksize = key.split("/")
        x = tensor(golden[f"x/{dtype}/{name}"], TORCH[dtype])
        packed, state = functional.quantize_4bit(x.to(device), blocksize=int(blocksize), quant_type=quant_type)
        assert_equal(state.absmax, tensor(golden[f"{key}/absmax"], torch.float32))
        expected = torch.from_numpy(golden[f"{key}/packed"])
        values = ops.dequantize_4bit(
            expected.to(device), *state.scales(), int(blocksize), ops.FORMATS[quant_type], 1, x.numel(), x.dtype
        )
        assert_equal(values.flatten(), tensor(golden[f"{key}/out"], TORCH[dtype]))
        if dtype == "float32":
            rank = ops.table(quant_type).argsort(stable=True).argsort()
            codes, wanted = reference.unpack(packed, x.numel()), reference.unpack(expected, x.numel())
            differ += int(one_step(codes, wanted, rank).sum())
            total += x.numel()
        else:
            assert torch.equal(packed.cpu().flatten(), expected), key
    allowed = 0 if device.type == "cpu" else total / 100_000  # reciprocals of other GPUs than the H200 differ
    assert differ <= allowed, f"{differ} of {total} codes are one off"


@pytest.mark.parametrize("dtype", TORCH)
def test_golden_nested(golden, device, dtype, assert_equal):
    """Second-level codes and the values decoded with them equal bitsandbytes'."""
    differ = total = 0
    map = ops.table("dynamic").to(device)
    for key in keys(golden, "nested", dtype):
        _, _, name, quant_type, blocksize = key.split("/")
        x = tensor(golden[f"x/{dtype}/{name}"], TORCH[dtype])
        offset = tensor(golden[f"{key}/offset"], torch.float32).to(device)
        absmax = tensor(golden[f"{key.replace('nested', '4bit', 1)}/absmax"], torch.float32).to(device)
        code, absmax2 = ops.quantize_blockwise(absmax, map, offset, 256)
        assert_equal(absmax2, tensor(golden[f"{key}/absmax2"], torch.float32))
        expected = torch.from_numpy(golden[f"{key}/code"])
        differ += int(one_step(code.cpu(), expected, torch.arange(256)).sum())
        total += code.numel()
        packed = torch.from_numpy(golden[f"{key.replace('nested', '4bit', 1)}/packed"]).to(device)
        values = ops.dequantize_4bit(
            packed,
            expected.to(device),
            map,
            absmax2,
            offset,
            int(blocksize),
            ops.FORMATS[quant_type],
            1,
            x.numel(),
            x.dtype,
        )
        assert_equal(values.flatten(), tensor(golden[f"{key}/out"], TORCH[dtype]))
    allowed = 0 if device.type == "cpu" else total / 1_000  # reciprocals of other GPUs than the H200 differ
    assert differ <= allowed, f"{differ} of {total} codes are one off"


@pytest.mark.parametrize("dtype", TORCH)
def test_golden_offset(golden, dtype, assert_equal):
    """Nested quantization on the CPU gives the offset that torch's mean gave on the H200, and so all of the bytes."""
    for key in keys(golden, "nested", dtype):
        _, _, name, quant_type, blocksize = key.split("/")
        x = tensor(golden[f"x/{dtype}/{name}"], TORCH[dtype])
        _, state = functional.quantize_4bit(x, None, None, int(blocksize), True, quant_type)
        expected = tensor(golden[f"{key}/offset"], torch.float32)[0]
        if expected.isnan():  # of which a GPU has one pattern and a CPU several
            assert state.offset.isnan()
            continue
        assert_equal(state.offset, expected)
        assert_equal(state.absmax, torch.from_numpy(golden[f"{key}/code"]))
        assert_equal(state.state2.absmax, tensor(golden[f"{key}/absmax2"], torch.float32))


@pytest.mark.parametrize("dtype", TORCH)
def test_golden_8bit(golden, device, dtype, assert_equal):
    """8-bit codes, scales and values equal bitsandbytes'."""
    differ = total = 0
    map = ops.table("dynamic").to(device)
    for key in keys(golden, "8bit", dtype):
        _, _, name, blocksize = key.split("/")
        x = tensor(golden[f"x/{dtype}/{name}"], TORCH[dtype]).to(device)
        code, absmax = ops.quantize_blockwise(x, map, ops.empty(device), int(blocksize))
        assert_equal(absmax, tensor(golden[f"{key}/absmax"], torch.float32))
        expected = torch.from_numpy(golden[f"{key}/code"])
        differ += int(one_step(code.cpu(), expected, torch.arange(256)).sum())
        total += code.numel()
        values = ops.dequantize_blockwise(expected.to(device), absmax, map, ops.empty(device), int(blocksize), x.dtype)
        assert_equal(values, tensor(golden[f"{key}/out"], TORCH[dtype]))
    allowed = 0 if device.type == "cpu" else total / 10_000  # reciprocals of other GPUs than the H200 differ
    assert differ <= allowed, f"{differ} of {total} codes are one off"


def test_golden_maps(golden, assert_equal):
    for name in ("nf4", "fp4", "dynamic"):
        assert_equal(ops.table(name), tensor(golden[f"map/{name}"], torch.float32))
    assert_equal(functional.create_dynamic_map(), tensor(golden["map/dynamic"], torch.float32))


# ---- against the reference ----


def assert_codes(codes: torch.Tensor, expected: torch.Tensor, v: torch.Tensor, thresholds: torch.Tensor) -> None:
    """Codes are equal except where v lies on a threshold as far as fp32 can tell."""
    near = ((v[:, None] - thresholds).abs() <= NEAR).any(1)
    bad = (codes != expected) & ~near
    assert not bad.any(), f"{int(bad.sum())} codes wrong, first at {int(torch.nonzero(bad)[0])}"


@pytest.mark.parametrize("n", cases.SIZES)
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("quant_type", cases.FORMATS)
def test_quantize_4bit(device, n, dtype, quant_type, assert_equal):
    x = random_weight(n, dtype, device, seed=n)
    for blocksize, storage in zip(cases.BLOCKSIZES, (*cases.STORAGES, torch.uint8, torch.bfloat16), strict=True):
        packed, absmax = ops.quantize_4bit(x, blocksize, ops.FORMATS[quant_type], storage)
        expected, expected_absmax = reference.quantize_4bit(x.cpu(), blocksize, quant_type)
        assert_equal(absmax, expected_absmax)
        assert packed.dtype is storage and packed.shape == (_C.storage_elements(n, storage.itemsize), 1)
        v, _ = reference.normalized(x.cpu(), blocksize)
        middles = reference.thresholds(ops.table(quant_type).abs() if quant_type == "fp4" else ops.table(quant_type))
        assert_codes(reference.unpack(packed, n), expected, v.abs() if quant_type == "fp4" else v, middles)
        bytes_ = packed.cpu().flatten().view(torch.uint8)
        assert not bytes_[-(-n // 2) :].any(), "padding is not zero"


@pytest.mark.parametrize("n", cases.SIZES)
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("quant_type", cases.FORMATS)
def test_dequantize_4bit(device, n, dtype, quant_type, assert_equal):
    """Plain and nested, from every storage dtype: bit-equal to the reference."""
    x = random_weight(n, torch.float32, device, seed=n)
    for blocksize, storage in zip(cases.BLOCKSIZES, (*cases.STORAGES, torch.uint8, torch.bfloat16), strict=True):
        for nested in (False, True):
            packed, state = functional.quantize_4bit(
                x, blocksize=blocksize, compress_statistics=nested, quant_type=quant_type, quant_storage=storage
            )
            state.dtype = dtype
            absmax, map, absmax2, offset = (t.cpu() for t in state.scales())
            scale = reference.nested_scale(absmax, map, absmax2, offset) if nested else absmax
            expected = reference.dequantize_4bit(reference.unpack(packed, n), scale, blocksize, quant_type, dtype)
            assert_equal(functional.dequantize_4bit(packed, state), expected.view(n))


@pytest.mark.parametrize("n", cases.SIZES)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_blockwise(device, n, dtype, assert_equal):
    x = random_weight(n, dtype, device, seed=n)
    map = ops.table("dynamic")
    for blocksize, offset in ((256, torch.tensor(0.01)), (64, None), (4096, None), (16384, None)):
        none = ops.empty(device) if offset is None else offset.to(device)
        code, absmax = ops.quantize_blockwise(x, map.to(device), none, blocksize)
        expected, expected_absmax = reference.quantize_blockwise(x.cpu(), map, offset, blocksize)
        assert_equal(absmax, expected_absmax)
        shifted = x.cpu().float() if offset is None else x.cpu().float() - offset
        v, _ = reference.normalized(shifted, blocksize)
        assert_codes(code.cpu().long(), expected, v, reference.thresholds(map))
        values = ops.dequantize_blockwise(code, absmax, map.to(device), none, blocksize, torch.float32)
        assert_equal(values, reference.dequantize_blockwise(code.cpu(), absmax.cpu(), map, offset, blocksize))


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_sums_of_one_sign_stay_within_their_bound(device, dtype):
    """4,096 terms of one sign: rounding the result alone exceeds what random signs are allowed (`LINEAR_BOUND`)."""
    long, short, own = 4096, 48, device.type == "cuda"
    for N, K in ((short, long), (long, short)):
        w = random_weight(N * K, torch.float32, device, seed=1).view(N, K).abs() + 0.02
        packed, state = functional.quantize_4bit(w, quant_type="nf4", blocksize=32)
        weight = ops.dequantize_4bit(packed, *state.scales(), 32, 0, N, K, dtype).double()
        for M in (1, 5, 16, 40):
            x = (torch.rand(M, long, generator=torch.Generator().manual_seed(M)) + 0.5).to(device=device, dtype=dtype)
            y = (
                functional.linear_4bit(x, packed, state)
                if K == long
                else functional.linear_4bit_dgrad(x, packed, state)
            )
            exact = x.double() @ (weight.T if K == long else weight)
            error = (y.double() - exact).abs()
            assert (error <= cases.largest_error(exact, exact.abs(), long, dtype, own)).all(), (N, K, M)


@pytest.mark.parametrize("n_bytes", [0, 1, 7, 8, 9, 63, 64, 65, 1000, 4099])
def test_checksum(device, n_bytes):
    data = torch.randint(0, 256, (n_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(n_bytes))
    assert int(ops.checksum(data.to(device))) == reference.checksum(data)


def test_checksum_sees_every_byte_and_its_place(device):
    data = torch.zeros(64, dtype=torch.uint8)
    sums = set()
    for place in range(64):
        for value in (1, 128):
            changed = data.clone()
            changed[place] = value
            sums.add(int(ops.checksum(changed.to(device))))
    assert len(sums) == 128 and int(ops.checksum(data.to(device))) not in sums


def test_checksum_does_not_depend_on_the_container(device):
    x = random_weight(1000, torch.float32, device)
    sums = {int(ops.checksum(functional.quantize_4bit(x, quant_storage=storage)[0])) for storage in cases.STORAGES}
    assert len(sums) == 1


# ---- edges ----


def test_no_elements(device):
    packed, state = functional.quantize_nf4(torch.empty(0, 8, device=device), compress_statistics=True)
    assert packed.shape == (0, 1) and functional.dequantize_4bit(packed, state).shape == (0, 8)


def test_no_rows(device):
    packed, state, _ = packed_weight(8, 64, device, "nf4", False)
    assert functional.linear_4bit(torch.empty(0, 64, device=device), packed, state).shape == (0, 8)
    none = torch.empty(2, 0, 8, device=device)
    assert ops.linear_4bit_dgrad(none, packed, *state.scales(), 64, 0, 8, 64).shape == (2, 0, 64)


@pytest.mark.parametrize("N, K", [(0, 64), (8, 0), (0, 0)])
@pytest.mark.parametrize("nested", [False, True])
def test_weights_without_rows_or_columns_multiply_like_torch(device, N, K, nested):
    """Empty sums are the bias, or zero; the empty gradients have their shapes."""
    packed, state, _ = packed_weight(N, K, device, "nf4", nested)
    weight = torch.zeros(N, K, device=device)
    assert functional.dequantize_4bit(packed, state).shape == (N, K)
    for shape in ((K,), (1, K), (3, K), (2, 20, K), (0, K)):
        x, other = (torch.ones(shape, device=device, requires_grad=True) for _ in range(2))
        bias, other_bias = (torch.arange(1.0, N + 1, device=device, requires_grad=True) for _ in range(2))
        y, expected = autograd.matmul_4bit(x, packed, state, bias=bias), F.linear(other, weight, other_bias)
        assert y.shape == expected.shape and torch.equal(y, expected)
        y.sum().backward(), expected.sum().backward()
        assert torch.equal(x.grad, other.grad) and torch.equal(bias.grad, other_bias.grad)
        assert torch.equal(functional.linear_4bit(x.detach(), packed, state), F.linear(x, weight))
        dx = functional.linear_4bit_dgrad(torch.ones_like(y), packed, state)
        assert dx.shape == x.shape and not dx.any()
    with pytest.raises((RuntimeError, ValueError), match=rf"{K + 1}"):
        functional.linear_4bit(torch.ones(2, K + 1, device=device), packed, state)


def test_not_contiguous(device):
    x = random_weight(96 * 64, torch.float32, device).view(96, 64)
    strided = torch.stack([x, x], dim=-1)[..., 0]
    assert torch.equal(functional.quantize_nf4(strided)[0], functional.quantize_nf4(x)[0])
    assert torch.equal(functional.quantize_nf4(x.t())[0], functional.quantize_nf4(x.t().contiguous())[0])
    assert torch.equal(functional.quantize_blockwise(strided)[0], functional.quantize_blockwise(x)[0])


def test_isas_agree():
    """Every instruction set gives the same bits for what the format determines."""
    x = random_weight(4096 * 3 + 5, torch.bfloat16, torch.device("cpu"))

    def call():
        packed, state = functional.quantize_nf4(x, compress_statistics=True)
        return packed, state.absmax, state.state2.absmax, functional.dequantize_4bit(packed, state)

    agree(by_isa(call))


def test_threads_agree():
    """One thread and two give the same bits, also of the product."""
    packed, state, _ = packed_weight(300, 512, torch.device("cpu"), "nf4", True)
    x = torch.randn(33, 512, generator=torch.Generator().manual_seed(3)).bfloat16()

    def call():
        y = functional.linear_4bit(x, packed, state)
        dx = ops.linear_4bit_dgrad(y, packed, *state.scales(), 64, 0, 300, 512)
        return functional.linear_4bit(x[:1], packed, state), y, dx

    agree(by_threads(call, 1, 2))


def test_threads_quantize_alike():
    """Also the offset of many scales, which torch's mean would add in another order."""
    x = random_weight(5_000_003, torch.bfloat16, torch.device("cpu"), seed=1)

    def call():
        packed, state = functional.quantize_nf4(x, compress_statistics=True)
        code, state8 = functional.quantize_blockwise(x, blocksize=64, nested=True)
        values = functional.dequantize_4bit(packed, state), functional.dequantize_blockwise(code, state8)
        return packed, *state.scales(), code, *state8.scales(), *values

    agree(by_threads(call, 1, 2))


@pytest.mark.parametrize("n", [1, 2, 100, 129, 1000, 4099, 7680, 7681, 32767, 32768, 100_001])
def test_mean(n):
    scales = torch.rand(n, generator=torch.Generator().manual_seed(n)) + 0.5
    expected = scales.double().mean()
    assert (blockwise.mean(scales).double() - expected).abs() <= 2**-23 * expected


# ---- leaks ----

LEAK_CALLS = {
    "quantize_4bit": lambda a: ops.quantize_4bit(a["x"], 64, 0, torch.bfloat16),
    "dequantize_4bit": lambda a: ops.dequantize_4bit(a["packed"], *a["scales"], 64, 0, 256, 512, torch.bfloat16),
    "quantize_blockwise": lambda a: ops.quantize_blockwise(a["x"], a["map"], a["none"], 256),
    "dequantize_blockwise": lambda a: ops.dequantize_blockwise(
        a["code"], a["absmax8"], a["map"], a["none"], 256, torch.float32
    ),
    "linear_4bit": lambda a: ops.linear_4bit(a["x"], a["packed"], *a["scales"], a["none"], 64, 0, 256, 512),
    "linear_4bit_dgrad": lambda a: ops.linear_4bit_dgrad(a["dy"], a["packed"], *a["scales"], 64, 0, 256, 512),
    "linear_4bit_int8": lambda a: ops.linear_4bit_int8(a["x"], a["packed"], *a["scales"], a["none"], 64, 0, 256, 512),
    "grouped_linear_4bit": lambda a: ops.grouped_linear_4bit(
        a["x"], a["offs"], a["packed"], *a["stack"], a["none"], 64, 0, 128, 512
    ),
    "grouped_linear_4bit_dgrad": lambda a: ops.grouped_linear_4bit_dgrad(
        a["dy"][:, :128], a["offs"], a["packed"], *a["stack"], 64, 0, 128, 512
    ),
    "sort_by_expert": lambda a: ops.sort_by_expert(a["chosen"], 4096, True),
    "sum_by_token": lambda a: ops.sum_by_token(a["x"], a["back"], a["map"][:128].view(-1, 2)),
    "search_4bit": lambda a: ops.search_4bit(a["x"], a["map"], a["x"][:, :20], 512, 0),
    "round_4bit": lambda a: ops.round_4bit(a["x"][:64, :64], a["x"][:64, :64], a["x"][:64, 64:128], 0),
    "merge_4bit": lambda a: ops.merge_4bit(
        a["packed"],
        *a["scales"],
        a["x"][:8],
        a["x"].view(256, 256)[:, :8].contiguous(),
        a["map"][:8],
        a["map"],
        64,
        0,
        256,
        512,
    ),
    "merge_e2m1": lambda a: ops.merge_e2m1(
        *(a["packed"], *a["short"], a["x"][:8], a["x"].view(256, 256)[:, :8].contiguous(), a["map"][:8]),
        *(16, 2, 256, 512),
    ),
    "merged_values": lambda a: ops.merged_values(
        *(a["packed"], *a["scales"], a["x"][:8], a["x"].view(256, 256)[:, :8].contiguous(), a["map"][:8]),
        *(64, 0, 256, 512, 32, 200),
    ),
    "quantize_e2m1": lambda a: ops.quantize_e2m1(a["x"], a["map"][200:201]),
    "quantize_int8": lambda a: ops.quantize_int8(a["x"], 2.0),
    "dequantize_int8": lambda a: ops.dequantize_int8(a["int8"], a["rows"], 256, 512, torch.bfloat16),
    "product_int8": lambda a: ops.product_int8(a["left"], a["int8"]),
    "scale_product_int8": lambda a: ops.scale_product_int8(
        a["int8"].int(), a["rows"], a["x"][0], a["none"], torch.bfloat16
    ),
    "linear_int8": lambda a: ops.linear_int8(a["x"], a["int8"], a["rows"], a["none"], 2.0, 256, 512),
    "linear_int8_dgrad": lambda a: ops.linear_int8_dgrad(a["dy"], a["int8"], a["rows"], 256, 512),
    "checksum": lambda a: ops.checksum(a["packed"]),
}


@pytest.mark.parametrize("name", LEAK_CALLS)
@pytest.mark.parametrize("fails", [False, True])
def test_leak(name, fails):
    """Memory stays flat over many calls, also of calls that the op refuses (each would leak 128 KiB or more)."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    packed, state, _ = packed_weight(256, 512, device, "nf4", True)
    x = torch.randn(128, 512, device=device)
    map = ops.table("dynamic").to(device)
    code, absmax8 = ops.quantize_blockwise(x, map, ops.empty(device), 256)
    arguments = {"packed": packed, "scales": state.scales(), "x": x, "dy": x[:, :256].contiguous(), "map": map}
    stack = functional.quantize_experts_4bit(torch.randn(2, 128, 512, device=device), None, True, "nf4")[1].scales()
    offs = torch.tensor([3, 120], dtype=torch.int32, device=device)
    short = kind_of("nvfp4").quantize(torch.randn(256, 512, device=device), quant_storage=torch.uint8)[1].scales()
    arguments |= {"short": short}
    arguments |= {"none": ops.empty(device), "code": code, "absmax8": absmax8, "stack": stack, "offs": offs}
    int8, rows, _ = ops.quantize_int8(torch.randn(256, 512, device=device), 0.0)
    arguments |= {"int8": int8, "rows": rows, "left": int8[:128]}
    arguments |= {"chosen": torch.arange(32768, device=device).view(-1, 8) % 4097}
    arguments |= {"back": torch.arange(128, device=device)}
    if fails:  # float64 is no dtype that any op takes where these are
        arguments |= {key: arguments[key].double() for key in ("x", "dy", "map", "rows", "left", "chosen")}
        arguments |= {"stack": (stack[0], *(t.double() for t in stack[1:]))}
        arguments |= {"short": (short[0], *(t.double() for t in short[1:]))}
        arguments |= {"scales": (state.absmax, *(t.double() for t in state.scales()[1:])), "absmax8": absmax8.double()}
        if name == "checksum":
            arguments["packed"] = packed.bool()

    def call():
        if not fails:
            return LEAK_CALLS[name](arguments)
        with pytest.raises(RuntimeError, match=f"{name}: "):
            LEAK_CALLS[name](arguments)

    def used():
        return torch.cuda.memory_allocated() if device.type == "cuda" else resident_bytes()

    for _ in range(10):
        call()
    before = used()
    for _ in range(200):
        call()
    assert used() - before < 8 * 2**20
