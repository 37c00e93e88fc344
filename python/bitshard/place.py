"""The public name of `bitshard.formats.place`: the same module."""

import sys

from bitshard.formats import place

sys.modules[__name__] = place
