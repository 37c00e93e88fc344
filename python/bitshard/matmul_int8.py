"""The public name of `bitshard.products.matmul_int8`: the same module."""

import sys

from bitshard.products import matmul_int8

sys.modules[__name__] = matmul_int8
