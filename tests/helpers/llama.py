"""A tiny Llama on disk, and loaded in 4 bits as a QLoRA script loads it."""

import torch
import transformers
from helpers import tiny
from helpers.tiny import TOKENS as TOKENS


def save_llama(folder) -> None:
    """One layer with odd sizes and random weights, in fp32."""
    sizes = {"hidden_size": 48, "intermediate_size": 104, "num_hidden_layers": 1, "num_key_value_heads": 2}
    tiny.llama(folder, max_position_embeddings=64, initializer_range=0.1, **sizes)


def config_4bit(quant_type="nf4", dtype=torch.float32):
    """How a model is quantized: NF4 with nested scales, or another format, computing in `dtype`."""
    options = {"bnb_4bit_quant_type": quant_type, "bnb_4bit_compute_dtype": dtype}
    if quant_type != "nf4":
        from bitshard.transformers import FourBitConfig

        return FourBitConfig(**options)
    return transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True, **options)


def load_4bit(folder, quant_type="nf4") -> torch.nn.Module:
    """NF4 with nested scales or another format, computing in fp32 on the CPU."""
    config = config_4bit(quant_type)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=config, device_map={"": "cpu"}
    )
