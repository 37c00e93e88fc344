"""The public name of `bitshard.functions.functional`: the same module."""

import sys

from bitshard.functions import functional

sys.modules[__name__] = functional
