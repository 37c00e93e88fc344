"""The public name of `bitshard.formats.state`: the same module."""

import sys

from bitshard.formats import state

sys.modules[__name__] = state
