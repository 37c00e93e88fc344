"""Matrix multiplication with quantized weights."""

import logging

from bitshard.autograd import MatMul4Bit, matmul_4bit
from bitshard.matmul_int8 import MatMul8bitFp, MatMul8bitLt, MatmulLtState, matmul
from bitshard.outliers import GlobalOutlierPooler

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
