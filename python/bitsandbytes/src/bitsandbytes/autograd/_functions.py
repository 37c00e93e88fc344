"""Matrix multiplication with quantized weights."""

from bitshard.autograd import MatMul4Bit, matmul_4bit

from .._absent import Absent, absent_function

__all__ = [
    "GlobalOutlierPooler",
    "MatMul4Bit",
    "MatMul8bitFp",
    "MatMul8bitLt",
    "MatmulLtState",
    "matmul",
    "matmul_4bit",
]


class GlobalOutlierPooler(Absent):
    """Part of LLM.int8."""


class MatmulLtState(Absent):
    """Part of LLM.int8."""


class MatMul8bitFp(Absent):
    """Part of LLM.int8."""


class MatMul8bitLt(Absent):
    """Part of LLM.int8."""


matmul = absent_function("bitsandbytes", "matmul")
