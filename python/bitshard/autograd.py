"""The public name of `bitshard.products.autograd`: the same module."""

import sys

from bitshard.products import autograd

sys.modules[__name__] = autograd
