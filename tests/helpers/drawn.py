"""Random weights, packed, for tests of products; and how near to its reference a product must be."""

import copy

import cases
import torch
from bitshard import functional, int8, ops
from bitshard.kinds import INT8, kind_of
from bitshard.matmul_int8 import RowScales
from bitshard.products import matmul

# nested scales, plain ones, experts, rows of int8, short blocks, experts of them
KINDS = ("nf4", "fp4", "stack", "int8", "mxfp4", "nvfp4", "nvfp4_stack")
EXPERTS = 3


class Weight:
    """A random packed weight [N, K] of a kind (a stack: [E, N, K]), its values in float64, and its product both ways.

    offs(rows): where the rows of each expert of a stack end: one has none, and the last row is no expert's.
    """

    def __init__(self, kind: str, N: int = 96, K: int = 130, device="cpu"):
        self.kind, self.N, self.K, self.stacked = kind, N, K, kind.endswith("stack")
        shape = (EXPERTS, N, K) if self.stacked else (N, K)
        w = torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(device)
        if kind == "stack":
            self.packed, self.state = functional.quantize_experts_4bit(w, compress_statistics=True)
        elif kind in ("mxfp4", "nvfp4", "nvfp4_stack"):
            one = kind_of(kind.removesuffix("_stack"))
            self.packed, self.state = (one.stack if self.stacked else one).quantize(w, quant_storage=torch.bfloat16)
        elif kind == "int8":
            self.packed, scales, _ = int8.quantize(w)
            self.state = RowScales(scales, w.shape, INT8)
        else:
            storage = {"nf4": torch.uint8, "fp4": torch.bfloat16}[kind]
            settings = {"compress_statistics": kind == "nf4", "quant_type": kind, "quant_storage": storage}
            self.packed, self.state = functional.quantize_4bit(w, **settings)
        self.values = self.decoded(torch.float32).double()

    def decoded(self, dtype):
        """The weight in a dtype, as products with x of that dtype see it."""
        if self.kind == "int8":
            return int8.dequantize(self.packed, self.state.absmax, self.N, self.K, dtype)
        state = copy.copy(self.state)
        state.dtype = dtype
        return functional.dequantize_4bit(self.packed, state)

    def offs(self, rows: int):
        """int32 [E], or None for what is no stack."""
        ends = [rows // 3, rows // 3, max(rows - 1, 0)]
        return torch.tensor(ends, dtype=torch.int32, device=self.packed.device) if self.stacked else None

    def drawn(self, *shape: int, seed: int = 0, dtype=torch.float32):
        """Random numbers where the weight is."""
        generator = torch.Generator().manual_seed(seed + sum(shape))
        return torch.randn(shape, generator=generator).to(self.packed.device, dtype)

    def bias(self, dtype=torch.float32):
        return self.drawn(*self.values.shape[:-1], seed=1, dtype=dtype)

    def product(self, x, bias=None, out=None):
        """What is tested."""
        return matmul(x, self.packed, self.state, bias, out, self.offs(x.shape[0] if x.dim() else 0))

    def exact(self, x, bias=None, w=None):
        """The same of the values, or of `w`, in the dtype of x; rows of no expert are zeros."""
        w, linear = (self.values if w is None else w).to(x.dtype), torch.nn.functional.linear
        if not self.stacked:
            return linear(x, w, bias)
        begin, parts = 0, []
        for e, end in enumerate(self.offs(x.shape[0]).tolist()):
            parts.append(linear(x[begin:end], w[e], None if bias is None else bias[e]))
            begin = end
        return torch.cat([*parts, x.new_zeros(x.shape[0] - begin, w.shape[-2])])


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
