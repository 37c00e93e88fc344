"""Modules and parameters with quantized weights."""

import logging
from typing import TypeVar

import torch
from bitshard.int8_params import Int8Params
from bitshard.nn.linear import Linear4bit, LinearFP4, LinearNF4, fix_4bit_weight_quant_state_from_module
from bitshard.nn.linear8bit import Linear8bitLt, maybe_rearrange_weight
from bitshard.outliers import OutlierAwareLinear
from bitshard.tensor import Params4bit

from .._absent import EMBEDDINGS, Absent
from ..functional import QuantState, has_avx512bf16
from ..optim import GlobalOptimManager
from ..utils import INVERSE_LINEAR_8BIT_WEIGHTS_FORMAT_MAPPING, OutlierTracer

__all__ = [
    "Embedding",
    "Embedding4bit",
    "Embedding8bit",
    "EmbeddingFP4",
    "EmbeddingNF4",
    "GlobalOptimManager",
    "INVERSE_LINEAR_8BIT_WEIGHTS_FORMAT_MAPPING",
    "Int8Params",
    "Linear4bit",
    "Linear8bitLt",
    "LinearFP4",
    "LinearNF4",
    "OutlierAwareLinear",
    "OutlierTracer",
    "Params4bit",
    "QuantState",
    "StableEmbedding",
    "T",
    "fix_4bit_weight_quant_state_from_module",
    "has_avx512bf16",
    "logger",
    "maybe_rearrange_weight",
]

logger = logging.getLogger(__name__)
T = TypeVar("T", bound=torch.nn.Module)


class StableEmbedding(Absent, torch.nn.Embedding):
    """Embedding with a layer norm, whose optimizer state stays in 32 bits."""

    _advice = EMBEDDINGS


class Embedding(Absent, torch.nn.Embedding):
    """Embedding whose optimizer state stays in 32 bits."""

    _advice = EMBEDDINGS


class Embedding8bit(Absent, torch.nn.Embedding):
    """Embedding with int8 rows."""

    _advice = EMBEDDINGS


class Embedding4bit(Absent, torch.nn.Embedding):
    """Embedding with 4-bit rows."""

    _advice = EMBEDDINGS


class EmbeddingFP4(Embedding4bit):
    """Embedding with FP4 rows."""


class EmbeddingNF4(Embedding4bit):
    """Embedding with NF4 rows."""
