"""Modules with packed weights: the holder of such a weight (`holder`), `Linear4bit`, and parametrized 4-bit weights."""

from bitshard.nn.linear import Linear4bit, LinearFP4, LinearNF4

__all__ = ["Linear4bit", "LinearFP4", "LinearNF4"]
