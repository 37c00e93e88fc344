"""The public name of `bitshard.functions.int8`: the same module."""

import sys

from bitshard.functions import int8

sys.modules[__name__] = int8
