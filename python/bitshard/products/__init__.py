"""Products with packed weights of any kind: x W^T + bias, dx = dy W, and their derivatives."""

from bitshard.products.matmul import InputGradient, MatMul, matmul

__all__ = ["InputGradient", "MatMul", "matmul"]
