"""The public name of `bitshard.functions.outliers`: the same module."""

import sys

from bitshard.functions import outliers

sys.modules[__name__] = outliers
