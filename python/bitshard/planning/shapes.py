"""Sizes of models that many people train, as their published configs have them: plans need no download."""

from __future__ import annotations

from typing import Any


def _llama(hidden: int, intermediate: int, layers: int, heads: int, kv: int, vocabulary: int, **more: Any) -> dict:
    return {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": vocabulary,
        "max_position_embeddings": 131072, "tie_word_embeddings": False, **more,
    }  # fmt: skip


def _qwen(kind: str, hidden: int, intermediate: int, layers: int, heads: int, kv: int, **more: Any) -> dict:
    sizes = {"vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": False}
    return _llama(
        hidden, intermediate, layers, heads, kv, **{"vocabulary": 151936, **sizes, **more, "model_type": kind}
    )


def _experts_of_qwen(hidden: int, layers: int, heads: int, intermediate: int) -> dict:
    return _qwen(
        "qwen3_moe", hidden, 3 * hidden, layers, heads, 4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=intermediate, decoder_sparse_step=1, norm_topk_prob=True,
    )  # fmt: skip


KNOWN: dict[str, dict[str, Any]] = {
    "smollm2-135m": _llama(576, 1536, 30, 9, 3, 49152, tie_word_embeddings=True),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, 8, 128256, tie_word_embeddings=True, head_dim=64),
    "llama-3.2-3b": _llama(3072, 8192, 28, 24, 8, 128256, tie_word_embeddings=True, head_dim=128),
    "llama-3-8b": _llama(4096, 14336, 32, 32, 8, 128256),
    "llama-3-70b": _llama(8192, 28672, 80, 64, 8, 128256),
    "llama-3.1-405b": _llama(16384, 53248, 126, 128, 8, 128256),
    "mistral-7b": _llama(4096, 14336, 32, 32, 8, 32768, model_type="mistral", sliding_window=None),
    "qwen2.5-7b": _qwen("qwen2", 3584, 18944, 28, 28, 4, vocabulary=152064, vocab_size=152064),
    "qwen2.5-32b": _qwen("qwen2", 5120, 27648, 64, 40, 8, vocabulary=152064, vocab_size=152064),
    "qwen2.5-72b": _qwen("qwen2", 8192, 29568, 80, 64, 8, vocabulary=152064, vocab_size=152064),
    "qwen3-8b": _qwen("qwen3", 4096, 12288, 36, 32, 8, head_dim=128),
    "qwen3-32b": _qwen("qwen3", 5120, 25600, 64, 64, 8, head_dim=128),
    "qwen3-30b-a3b": _experts_of_qwen(2048, 48, 32, 768),
    "qwen3-235b-a22b": _experts_of_qwen(4096, 94, 64, 1536),
    "gpt-oss-20b": {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": {"model_type": "gpt_oss", "num_hidden_layers": 36, "num_local_experts": 128},
    "mixtral-8x7b": _llama(
        4096, 14336, 32, 32, 8, 32000, model_type="mixtral", num_local_experts=8, num_experts_per_tok=2,
        sliding_window=None,
    ),
    "deepseek-v3": {"model_type": "deepseek_v3"},
}  # fmt: skip


def known(name: str) -> dict[str, Any] | None:
    """The config of a name, however it is written (Llama-3-8B, meta-llama/Llama-3-8B); None: it is not known."""
    return KNOWN.get(name.rstrip("/").rpartition("/")[2].lower().replace("_", "-"))
