"""Embeddings: dense ones whose optimizer states stay in 32 bits, and quantized ones whose rows are decoded on demand.

table = Embedding4bit(N, K, quant_type="nf4")
table.load_state_dict(embedding.state_dict())
table.to("cuda")                                   # quantizes here
y = table(tokens)                                  # tokens [...] -> y [..., K]
"""

from __future__ import annotations

import logging
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from bitshard.formats.place import Place
from bitshard.formats.state import QuantState
from bitshard.functions import int8
from bitshard.functions.functional import dequantize_4bit
from bitshard.functions.rows import embedding_4bit, embedding_int8
from bitshard.nn.holder import HoldsPackedWeight, PackedWeight
from bitshard.nn.linear8bit import HoldsInt8Weight, Int8Weight
from bitshard.optim.config import GlobalOptimManager
from bitshard.process import launch
from bitshard.process.recognized import OfBitsandbytes
from bitshard.products.autograd import matmul_4bit
from bitshard.products.matmul_int8 import MatmulLtState, matmul_int8
from bitshard.weights import inventory
from bitshard.weights.int8_params import Int8Params
from bitshard.weights.tensor import Params4bit

logger = logging.getLogger(__name__)


class _Kept32Bits(nn.Embedding, OfBitsandbytes):
    """An embedding that is initialized by Xavier's rule, and whose weight has optimizer states of 32 bits."""

    def reset_parameters(self) -> None:
        """Xavier's uniform initialization, and zeros at `padding_idx`."""
        nn.init.xavier_uniform_(self.weight)
        self._fill_padding_idx_with_zero()

    def _keep(self) -> None:
        GlobalOptimManager.get_instance().register_module_override(self, "weight", {"optim_bits": 32})


class Embedding(_Kept32Bits):
    """nn.Embedding, its arguments too, whose optimizer states have 32 bits in any optimizer of bitsandbytes."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        device: torch.device | str | int | None = None,
    ):
        options = (padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, _weight)
        super().__init__(num_embeddings, embedding_dim, *options, device=device)
        self._keep()


class StableEmbedding(_Kept32Bits):
    """`Embedding` followed by a layer norm, which is computed in torch's default dtype; y has the weight's dtype.

    Args:
        num_embeddings, embedding_dim: N and K.
        padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, device, dtype: of nn.Embedding.
        _weight: the float weight [N, K] to use.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        options = (padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, _weight)
        super().__init__(num_embeddings, embedding_dim, *options, device=device, dtype=dtype)
        self.norm = nn.LayerNorm(embedding_dim, device=device)
        self._keep()

    def forward(self, input: Tensor) -> Tensor:
        rows = super().forward(input).to(torch.get_default_dtype())
        return self.norm(rows).to(self.weight.dtype)


class Embedding4bit(HoldsPackedWeight, nn.Embedding):
    """An embedding whose weight [N, K] is quantized to 4 bits when it moves to a device; frozen.

    The rows of a batch are decoded when they are needed (`bitshard.functions.rows`), with the bits of the dequantized
    weight. A row that is no whole number of blocks (of 64) costs more, for the blocks that cover it are decoded.

    State dicts have the keys of a `Linear4bit`. As in bitsandbytes, which saves no quantized embedding, a weight that
    is not quantized yet is not saved: NotImplementedError.

    Args:
        num_embeddings, embedding_dim: N and K.
        dtype: of the float weight, and of what forward gives; torch's default if None.
        quant_type: "nf4" or "fp4".
        quant_storage: dtype of the packed bytes.
        device: where the float weight is created; it is quantized when it moves.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        dtype: torch.dtype | None = None,
        quant_type: str = "fp4",
        quant_storage: torch.dtype = torch.uint8,
        device: torch.device | str | int | None = None,
    ):
        super().__init__(num_embeddings, embedding_dim, device=device, dtype=dtype)
        self.dtype = self.weight.dtype
        self.weight = Params4bit(
            self.weight.data,
            compress_statistics=False,
            quant_type=quant_type,
            quant_storage=quant_storage,
            module=self,
        )
        self.compress_statistics = False
        self.quant_type = quant_type
        self.quant_storage = quant_storage
        self.packed_weight = PackedWeight(self, "weight", (num_embeddings, embedding_dim))
        if self.weight.is_meta:
            launch.layer_waits(self, num_embeddings * embedding_dim)
        if embedding_dim % self.weight.blocksize:
            logger.warning(
                "Embedding4bit: rows of %d elements are no whole number of blocks of %d: slow inference.",
                embedding_dim,
                self.weight.blocksize,
            )

    def reset_parameters(self) -> None:
        """Initialize a weight that is not quantized; packed bytes are left alone."""
        if not getattr(self.weight, "bnb_quantized", False):
            super().reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        weight, state = self._ready()
        return embedding_4bit(input, weight, state).to(self.dtype)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """y [..., N] = x W^T + bias for a head that is tied to this embedding (`bitshard.nn.tied`), x [..., K]."""
        weight, state = self._ready()
        return matmul_4bit(x, weight, state, bias=bias)

    def _ready(self) -> tuple[Tensor, QuantState]:
        parameters, held = self._parameters, self.packed_weight
        weight, state = held.ready(parameters["weight"] if "weight" in parameters else self.weight)
        if not held.reported and not torch.compiler.is_compiling():
            inventory.log_line(self)
        return weight, state

    def dequantize(self) -> Tensor:
        """The values [N, K] of the dtype of forward. RuntimeError or ValueError where forward raises."""
        return dequantize_4bit(*self._ready()).to(self.dtype)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if self.packed_weight.place is Place.FLOAT and not self.weight.is_meta:
            _not_saved(self, prefix)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Read a copy or a pickle, bitsandbytes' too, in which the weight is a plain parameter."""
        super().__setstate__(state)
        weight = self._parameters.get("weight")
        if "packed_weight" not in state:
            if type(weight) is nn.Parameter and vars(weight).get("quant_state") is not None:
                weight = self._parameters["weight"] = Params4bit(weight.data, weight.requires_grad, **vars(weight))
            self.packed_weight = PackedWeight(self, "weight", (self.num_embeddings, self.embedding_dim))
            self.packed_weight.known(vars(weight).get("quant_state"))
            for name in ("compress_statistics", "quant_type", "quant_storage"):
                setattr(self, name, getattr(weight, name))
        if isinstance(weight, Params4bit):
            weight.module = self


def _not_saved(module: nn.Module, prefix: str) -> NoReturn:
    raise NotImplementedError(
        f"{prefix}weight: this {type(module).__name__} of {[module.num_embeddings, module.embedding_dim]} is not "
        "quantized yet and is not saved as it is: move it to a device first, for instance with .to('cpu') or .cuda()"
    )


class _OneFormat(Embedding4bit):
    format: str

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        dtype: torch.dtype | None = None,
        quant_storage: torch.dtype = torch.uint8,
        device: torch.device | str | int | None = None,
    ):
        super().__init__(num_embeddings, embedding_dim, dtype, self.format, quant_storage, device)


class EmbeddingNF4(_OneFormat):
    """Embedding4bit with quant_type="nf4"."""

    format = "nf4"


class EmbeddingFP4(_OneFormat):
    """Embedding4bit with quant_type="fp4"."""

    format = "fp4"


class Embedding8bit(HoldsInt8Weight, nn.Embedding):
    """An embedding whose weight [N, K] is quantized to int8 by rows when it moves to a device; frozen.

    The rows of a batch are decoded when they are needed (`bitshard.functions.rows`). State dicts have the keys of a
    `Linear8bitLt`, and load into an embedding that is quantized, or not yet. As in bitsandbytes, which saves no
    quantized embedding, a weight that is not quantized yet is not saved: NotImplementedError.

    Args:
        num_embeddings, embedding_dim: N and K.
        device: where the float weight is created; it is quantized when it moves.
        dtype: of the float weight, and of what forward gives; torch's default if None.

    Attributes:
        state: of its weight; `state.threshold` is that of outliers in what a tied head multiplies.
    """

    loads_codes_at_once = True

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(num_embeddings, embedding_dim, device=device, dtype=dtype)
        self.dtype = self.weight.dtype
        self.state = _int8_state(self)
        self.weight = Int8Params(self.weight.data, has_fp16_weights=False, requires_grad=False)
        self.packed_weight = Int8Weight(self, self.matrix_shape(), self.dtype)

    def matrix_shape(self) -> tuple[int, int]:
        """N and K."""
        return self.num_embeddings, self.embedding_dim

    def forward(self, input: Tensor) -> Tensor:
        weight, scales = self._ready()
        return embedding_int8(input, weight, scales.absmax, *scales.shape, self.dtype)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """y [..., N] = x W^T + bias for a head that is tied to this embedding (`bitshard.nn.tied`), x [..., K]."""
        weight, scales = self._ready()
        return matmul_int8(x, weight, scales, bias, self.state.threshold)

    def dequantize(self) -> Tensor:
        """The values [N, K] of the dtype of forward. RuntimeError or ValueError where forward raises."""
        weight, scales = self._ready()
        return int8.dequantize(weight, scales.absmax, *scales.shape, self.dtype)

    def _ready(self) -> tuple[Tensor, Any]:
        """Codes and scales. RuntimeError or ValueError where there are none, or others."""
        parameters, held = self._parameters, self.packed_weight
        weight = parameters["weight"] if "weight" in parameters else self.weight
        weight, scales = held.ready(weight)
        if not held.reported and not torch.compiler.is_compiling():
            inventory.log_line(self)
        return weight, scales

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        weight = self._parameters.get("weight")
        if isinstance(weight, Int8Params) and not weight.bnb_quantized and not weight.is_meta:
            _not_saved(self, prefix)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Read a copy or a pickle; bitsandbytes' has no `state`."""
        super().__setstate__({"state": _int8_state(self), **state})


def _int8_state(module: Embedding8bit) -> MatmulLtState:
    state = MatmulLtState()
    state.has_fp16_weights, state.threshold, state.owner = False, 6.0, module  # the threshold of load_in_8bit
    return state
