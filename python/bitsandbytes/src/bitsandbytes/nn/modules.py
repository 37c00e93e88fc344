"""Modules and parameters with quantized weights."""

import torch
from bitshard.linear import Linear4bit, LinearFP4, LinearNF4, fix_4bit_weight_quant_state_from_module
from bitshard.tensor import Params4bit

from .._absent import Absent

__all__ = [
    "Embedding",
    "Embedding4bit",
    "Embedding8bit",
    "EmbeddingFP4",
    "EmbeddingNF4",
    "Int8Params",
    "Linear4bit",
    "Linear8bitLt",
    "LinearFP4",
    "LinearNF4",
    "OutlierAwareLinear",
    "Params4bit",
    "StableEmbedding",
    "fix_4bit_weight_quant_state_from_module",
]


class Int8Params(Absent, torch.nn.Parameter):
    """Part of LLM.int8."""


class Linear8bitLt(Absent, torch.nn.Linear):
    """Part of LLM.int8."""


class OutlierAwareLinear(Absent, torch.nn.Linear):
    """Part of LLM.int8."""


class StableEmbedding(Absent, torch.nn.Embedding):
    """Embedding with a layer norm, whose optimizer state stays in 32 bits."""


class Embedding(Absent, torch.nn.Embedding):
    """Embedding whose optimizer state stays in 32 bits."""


class Embedding8bit(Absent, torch.nn.Embedding):
    """Embedding with int8 rows."""


class Embedding4bit(Absent, torch.nn.Embedding):
    """Embedding with 4-bit rows."""


class EmbeddingFP4(Embedding4bit):
    """Embedding with FP4 rows."""


class EmbeddingNF4(Embedding4bit):
    """Embedding with NF4 rows."""
