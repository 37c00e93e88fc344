"""A Llama of random weights, made on the device one decoder layer at a time, for programs that may use no model hub.

A 4-bit one has what `from_pretrained` leaves on a model: transformers' own quantizer puts the layers and the marks on
it, and only the reading of files is left out. Works with the original bitsandbytes as well.
"""

from __future__ import annotations

import gc

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PAD, END = 0, 1  # tokens; text begins at FIRST
FIRST = 2


def config(shape: dict[str, int]) -> LlamaConfig:
    """Of a dict with the names of launches.SHAPE."""
    return LlamaConfig(
        hidden_size=shape["hidden"],
        intermediate_size=shape["intermediate"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        vocab_size=shape["vocabulary"],
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        eos_token_id=END,
        bos_token_id=END,
    )


def quantization(dtype: torch.dtype) -> BitsAndBytesConfig:
    """Nested NF4 that computes in `dtype`, which is the dtype of its storage, too."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,
    )


def device() -> torch.device:
    """The process's own GPU, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def build(shape: dict[str, int], four_bit: bool, dtype: torch.dtype) -> LlamaForCausalLM:
    """The model on `device()`, the same on every rank; its linear layers but the head in nested NF4 if `four_bit`."""
    from transformers.quantizers.auto import AutoHfQuantizer

    settings, place = config(shape), device()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = LlamaForCausalLM(settings)
    finally:
        torch.set_default_dtype(before)
    quantizer = AutoHfQuantizer.from_config(quantization(dtype), pre_quantized=False) if four_bit else None
    if quantizer is not None:
        quantizer.preprocess_model(model=model, device_map={"": place})
    generator = torch.Generator(place).manual_seed(1)
    with torch.no_grad():
        for layer in model.model.layers:
            _fill(layer, place, dtype, generator)
        _fill(model, place, dtype, generator)
    model.model.rotary_emb = type(model.model.rotary_emb)(settings).to(place)
    if quantizer is not None:
        model.hf_quantizer = quantizer
        quantizer.postprocess_model(model)
    return model


def _fill(module: nn.Module, place: torch.device, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Random values for what is still on the meta device: norms of ones, the rest of deviation 0.02."""
    for owner in module.modules():
        for name, parameter in list(owner._parameters.items()):
            if parameter is None or not parameter.is_meta:
                continue
            packed = type(parameter).__name__ == "Params4bit"  # whose own shape may be that of packed bytes
            size = (owner.out_features, owner.in_features) if packed else parameter.shape
            value = torch.ones(size, dtype=dtype, device=place)
            if len(size) > 1:
                value.normal_(0, 0.02, generator=generator)
            owner._parameters[name] = _packed(parameter, value, owner) if packed else nn.Parameter(value, False)


def _packed(like: nn.Parameter, value: torch.Tensor, owner: nn.Module) -> nn.Parameter:
    """`value` quantized with the settings of `like`."""
    made = type(like)(
        value,
        requires_grad=False,
        compress_statistics=like.compress_statistics,
        quant_type=like.quant_type,
        quant_storage=like.quant_storage,
        module=owner,
    )
    return made.to(value.device)


def tokenizer(words: int = 1000) -> PreTrainedTokenizerFast:
    """One that reads "w2 w3 ..." and has a pad and an end token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<pad>": PAD, "</s>": END} | {f"w{i}": i for i in range(FIRST, words)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=f"w{FIRST}"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")


def forget() -> None:
    """Let the next part begin as in a new process, as far as a process can: no accelerator, no cached memory."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
