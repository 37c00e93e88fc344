"""Random weights, packed, for tests of products; and how near to its reference a product must be."""

import cases
import torch
from bitshard import functional, ops


def random_weight(n: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, generator=generator) * 0.05).to(device=device, dtype=dtype)


def packed_weight(N: int, K: int, device, quant_type: str, nested: bool, storage=torch.uint8):
    """(packed, state, decode): a random weight, and its values in a dtype as the product must see them."""
    packed, state = functional.quantize_4bit(
        random_weight(N * K, torch.float32, device, seed=N * K).view(N, K),
        compress_statistics=nested,
        quant_type=quant_type,
        quant_storage=storage,
    )

    def decode(dtype):
        rows, columns = state.shape
        return ops.dequantize_4bit(
            packed, *state.scales(), 64, ops.FORMATS[quant_type], rows, columns, dtype
        )  # W is decoded straight to the dtype of x

    return packed, state, decode


def assert_close(actual: torch.Tensor, expected: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias=None) -> None:
    """|actual - a b| <= bound * sqrt(sum of squared products) + one rounding of the result."""
    bound = cases.LINEAR_BOUND[actual.dtype]
    size = (a.double().square() @ b.double().square()).sqrt()
    if bias is not None:
        size = size + bias.double().abs()
    allowed = bound * size + torch.finfo(actual.dtype).eps * expected.abs() + torch.finfo(actual.dtype).tiny
    bad = (actual.double() - expected).abs() > allowed
    assert not bad.any(), (int(bad.sum()), (actual.double() - expected).abs().max())
