"""Modules with packed weights: the holder of a weight (`holder`), linear layers, embeddings, parametrized weights."""

from bitshard.nn.embedding import Embedding, Embedding4bit, Embedding8bit, EmbeddingFP4, EmbeddingNF4, StableEmbedding
from bitshard.nn.linear import Linear4bit, LinearFP4, LinearNF4

__all__ = [
    "Embedding",
    "Embedding4bit",
    "Embedding8bit",
    "EmbeddingFP4",
    "EmbeddingNF4",
    "Linear4bit",
    "LinearFP4",
    "LinearNF4",
    "StableEmbedding",
]
