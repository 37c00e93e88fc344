"""The public name of `bitshard.weights.int8_params`: the same module."""

import sys

from bitshard.weights import int8_params

sys.modules[__name__] = int8_params
