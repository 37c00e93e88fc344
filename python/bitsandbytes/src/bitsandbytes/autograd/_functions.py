"""Matrix multiplication with quantized weights."""

import logging

import torch
from bitshard.autograd import MatMul4Bit, matmul_4bit

from .._absent import INT8, Absent, AbsentInstance, absent_function

__all__ = [
    "GlobalOutlierPooler",
    "MatMul4Bit",
    "MatMul8bitFp",
    "MatMul8bitLt",
    "MatmulLtState",
    "logger",
    "matmul",
    "matmul_4bit",
]


logger = logging.getLogger(__name__)


class GlobalOutlierPooler(AbsentInstance):
    """Part of LLM.int8."""

    _advice = INT8


class MatmulLtState(Absent):
    """Part of LLM.int8."""

    _advice = INT8


class MatMul8bitFp(Absent, torch.autograd.Function):
    """Part of LLM.int8."""

    _advice = INT8
    apply = absent_function(__name__, "MatMul8bitFp.apply", INT8)


class MatMul8bitLt(Absent, torch.autograd.Function):
    """Part of LLM.int8."""

    _advice = INT8
    apply = absent_function(__name__, "MatMul8bitLt.apply", INT8)


matmul = absent_function("bitsandbytes", "matmul", INT8)
