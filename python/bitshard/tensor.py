"""The public name of `bitshard.weights.tensor`: the same module."""

import sys

from bitshard.weights import tensor

sys.modules[__name__] = tensor
