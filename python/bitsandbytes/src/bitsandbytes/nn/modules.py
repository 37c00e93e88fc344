"""Modules and parameters with quantized weights."""

import logging
from typing import TypeVar

import torch
from bitshard.int8_params import Int8Params
from bitshard.nn.embedding import Embedding, Embedding4bit, Embedding8bit, EmbeddingFP4, EmbeddingNF4, StableEmbedding
from bitshard.nn.linear import Linear4bit, LinearFP4, LinearNF4, fix_4bit_weight_quant_state_from_module
from bitshard.nn.linear8bit import Linear8bitLt, maybe_rearrange_weight
from bitshard.outliers import OutlierAwareLinear
from bitshard.tensor import Params4bit

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
