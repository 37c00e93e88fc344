"""The public name of `bitshard.formats.kinds`: the same module."""

import sys

from bitshard.formats import kinds

sys.modules[__name__] = kinds
