"""Tiny models of any architecture of transformers, made from its config class by the names of its settings."""

import contextlib
import copy
import inspect
import re

import torch
import transformers

TOKENS, LENGTH = 96, 12
LLAMA = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
LARGEST = 6_000_000  # parameters of a tiny model
# What makes a config small. A number in a config whose name is none of these stays as it is.
SIZES = {
    r"hidden_size|d_model|n_embd|.*embed_dim|.*hidden_dim|embedding_size|dim|width|.*_hidden_size|word_embed.*dim": 32,
    r"projection_dim|.*_embed_size|proj_size|output_dim|out_hidden_size|d_embed|.*projection_size|emb_dim": 32,
    r"(.*_)?(intermediate|ffn_hidden|mlp|ffn)_(size|dim)|d_ff|intermediate_dim|.*ffn_dim|d_inner|n_inner|ffn_dim": 48,
    r".*shared_expert.*_size|moe_intermediate_size|dim_feedforward|mlp_hidden_size|.*intermediate_size": 48,
    r"(.*_)?num_(hidden_)?layers|n_layers?|.*_layers|depth|num_blocks|num_hidden_groups|.*_depth": 2,
    r"(.*_)?num_(attention_|key_value_)?heads|n_heads?|num_key_value_heads|.*_attention_heads|.*num_heads": 4,
    r"(.*_)?head_dim|mamba_d_head|d_kv|head_size|attention_head_size": 8,
    r"(.*_)?vocab_size.*|vocab_size.*|n_vocab": TOKENS,
    r"num_local_experts|num_experts|n_routed_experts|moe_num_experts|.*num_experts": 4,
    r"num_experts_per_tok|moe_topk|moe_k|top_k_experts|num_experts_per_token|num_selected_experts": 2,
    r"n_group|topk_group|n_shared_experts|num_shared_experts|moe_num_shared_experts": 1,
    r"q_lora_rank|kv_lora_rank|.*_lora_rank": 16,
    r"qk_rope_head_dim|qk_nope_head_dim|v_head_dim": 8,
    r"mamba_d_state|ssm_state_size|mamba_n_groups|n_groups|state_size": 8,
    r"max_position_embeddings|n_positions|max_.*_positions|n_ctx|max_seq(uence)?_len(gth)?": 64,
    r"first_k_dense_replace|num_dense_layers|num_nextn_predict_layers|moe_layer_start_index": 0,
    r"num_kv_shared_layers": 0,
    r"rotary_dim": 8,
    r".*group_vocab": TOKENS,
    r"image_size|img_size": 32,
    r"patch_size|vision_patch_size": 8,
    r"num_queries|query_length|num_query.*|n_queries": 4,
    r"num_codebooks|num_mel_bins|num_conv_pos_embeddings": 16,
    r"num_conv_pos_embedding_groups": 4,
    r"type_vocab_size": 2,
    r"num_labels": 3,
}
ABSENT = (  # what is None in some default configs
    r"num_experts_per_tok|n_shared_experts|num_experts|n_routed_experts|top_k_experts|(moe|expert)_intermediate_size"
)
SPECIAL = (
    r"(pad|bos|eos|sep|cls|unk|image|video|audio|vision|boi|eoi|decoder_start|forced).*token.*|.*_token_(id|index)"
)

# What else a type of model needs.
OWN = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1]},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 4},
    "nemotron_h": {
        **{"layers_block_type": ["attention", "moe"], "n_group": 1, "topk_group": 1, "mamba_num_heads": 4},
        **{"mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 16},
    },
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 8]},
    "zamba2": {"mamba_headdim": 8, "n_mamba_heads": 8},
    "xmod": {"default_language": "en_XX"},
}


def llama(folder=None, dtype=torch.float32, seed=0, shard="50GB", **sizes):
    """A Llama with random weights, saved to `folder` where one is given; `sizes` go into its config beside LLAMA."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**{"vocab_size": TOKENS, **LLAMA, **sizes})
    model = transformers.LlamaForCausalLM(config).to(dtype)
    if folder is not None:
        model.save_pretrained(folder, max_shard_size=shard)
    return model


def _small(name, value):
    """A smaller value of a setting, or None where it stays."""
    if re.fullmatch(SPECIAL, name):
        return None if type(value) is not int or value < TOKENS - 8 else 3
    size = next((size for pattern, size in SIZES.items() if re.fullmatch(pattern, name)), None)
    if type(value) is int or (value is None and re.fullmatch(ABSENT, name)):
        return size if size is None or value is None or value > size or size == 0 else None
    is_list = isinstance(value, (list, tuple)) and value and all(type(one) is int for one in value)
    if is_list and re.fullmatch(r"depths|num_layers|.*layer_indices", name):
        return [1] * len(value)
    if is_list and re.fullmatch(r".*hidden_sizes|.*embed_dims?|.*channels|conv_dim|tdnn_dim|dims", name):
        return [32] * len(value)
    return None


def settings(config):
    """{name: value} that makes another config of its class small; of those inside it, too."""
    known, found = inspect.signature(type(config).__init__).parameters, {}
    for name, value in vars(config).items():
        if isinstance(value, transformers.PreTrainedConfig):
            inner = settings(value)
            found[name] = {"model_type": value.model_type, **inner} if value.model_type else inner
        elif (small := _small(name, value)) is not None and name in known:
            found[name] = small
    return found


def shrink(config):
    """The same in place, where the class does not take what it has."""
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PreTrainedConfig):
            shrink(value)
        elif (small := _small(name, value)) is not None:
            setattr(config, name, small)
        elif isinstance(value, list) and len(value) > 2 and re.fullmatch(r".*layer_types|layers_block_type", name):
            setattr(config, name, value[-2:])
    return config


def configs(config_class, **options):
    """Small configs of a class, the most consistent one first; each may be refused by its model."""
    options = {**OWN.get(config_class.model_type, {}), **options}
    with contextlib.suppress(Exception):  # whatever its code says of these settings
        yield config_class(**{**settings(config_class()), **options})
    config = shrink(config_class())
    for name, value in options.items():
        setattr(config, name, value)
    yield config


def make(model_class, **options):
    """A tiny model of random weights in fp32. RuntimeError that says why there is none."""
    reasons = []
    for config in _each(model_class.config_class, options, reasons):
        try:
            with torch.device("meta"):
                size = sum(p.numel() for p in model_class(copy.deepcopy(config)).parameters())
            if size > LARGEST:
                reasons.append(f"not made small: {size:,} parameters")
                continue
            torch.manual_seed(0)
            return randomized(model_class(config).float().eval())
        except Exception as error:  # whatever its code says of this config
            reasons.append(words(error))
    raise RuntimeError(reasons[0])


def _each(config_class, options, reasons):
    try:
        yield from configs(config_class, **options)
    except Exception as error:
        reasons.append(words(error))


@torch.no_grad()
def randomized(model):
    """Values of such a size that each tensor counts: matrices by their width, vectors and norms by a tenth."""
    seen, unsaved = set(), [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_save", None) or ()]
    for name, parameter in model.named_parameters():
        if any(pattern.search(name) for pattern in unsaved):
            continue  # the class computes it
        if parameter.dim() > 1:
            parameter.copy_(torch.randn_like(parameter) / max(parameter[0].numel(), 1) ** 0.5)
        else:
            parameter.add_(0.1 * torch.randn_like(parameter))
    for module in model.modules():
        for name, buffer in module._buffers.items():
            persistent = name not in module._non_persistent_buffers_set
            if buffer is not None and persistent and buffer.is_floating_point() and id(buffer) not in seen:
                seen.add(id(buffer))
                buffer.add_(0.1 * torch.rand_like(buffer))
    return model


def words(error):
    """One line about an exception."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"


# ---- a forward ----


def _values(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _tokens(config, length=LENGTH):
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    count = getattr(text, "vocab_size", None)
    count = count if isinstance(count, int) else TOKENS
    return (torch.arange(length).view(1, length) * 7) % max(min(count, TOKENS) - 12, 4) + min(4, count // 4)


def _images(config):
    vision = getattr(config, "vision_config", None) or config
    size, channels = getattr(vision, "image_size", 32), getattr(vision, "num_channels", 3)
    size = size if isinstance(size, int) else 32
    return _values(1, channels if isinstance(channels, int) else 3, size, size)


def _features(config):
    audio = getattr(config, "audio_config", None) or config
    bins = getattr(audio, "num_mel_bins", None) or getattr(audio, "feature_size", None) or 80
    frames = getattr(audio, "max_source_positions", None)
    return _values(1, bins, 2 * frames if isinstance(frames, int) else 64)


def inputs(model):
    """Kinds of arguments, the fullest first; a model takes at least one of them, or has no generic forward."""
    known, config = inspect.signature(model.forward).parameters, model.config
    with_decoder = {"decoder_input_ids": _tokens(config)} if "decoder_input_ids" in known else {}
    if "pixel_values" in known and "input_ids" not in known:
        yield {"pixel_values": _images(config)} | with_decoder
    if "input_features" in known and "input_ids" not in known:
        yield {"input_features": _features(config)} | with_decoder
        yield {"input_features": _features(config).transpose(1, 2)} | with_decoder
    if "input_values" in known:
        yield {"input_values": _values(1, 2000)} | with_decoder
        yield {"input_values": _values(1, 64, 16)} | with_decoder
    if "input_ids" in known:
        ids = {"input_ids": _tokens(config)}
        yield ids | with_decoder
        yield ids


@torch.no_grad()
def outputs(model, arguments=None, **more):
    """{name: float tensor} that a seeded forward gives, and the arguments it was made with. LookupError that says why
    there is none.

    Args:
        arguments: of an earlier forward; None: of those of `inputs` the first ones that the model takes.
        more: beside them.
    """
    reason = "no argument that is known here"
    for given in [arguments] if arguments is not None else inputs(model):
        try:
            torch.manual_seed(0)
            found = model(**given, **more, **({"use_cache": False} if _takes(model, "use_cache") else {}))
        except Exception as error:  # whatever its code says of these arguments
            reason = words(error)
            continue
        tensors = {k: v.float() for k, v in found.items() if torch.is_tensor(v) and v.is_floating_point()}
        tensors = {k: v for k, v in tensors.items() if v.numel()}
        if tensors and all(bool(v.isfinite().all()) for v in tensors.values()):
            return tensors, given
        reason = "no finite float tensor comes out"
    raise LookupError(reason)


def _takes(model, name):
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return name in inspect.signature(inner.forward).parameters
