"""What `python -m bitsandbytes` prints: bitshard's own report."""

from bitshard.__main__ import main

__all__ = ["main"]
