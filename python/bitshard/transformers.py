"""The public name of `bitshard.huggingface.transformers`: the same module."""

import sys

from bitshard.huggingface import transformers

sys.modules[__name__] = transformers
