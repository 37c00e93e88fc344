"""Tiny mixture-of-experts models of transformers, one of each family of experts modules."""

import copy
import json

import torch
import transformers
from bitshard import functional
from bitshard.experts import modules
from safetensors.torch import load_file, save_file

VOCABULARY = 96
TOKENS = torch.arange(48).view(2, 24) * 7 % VOCABULARY
_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
_SIZES |= {"vocab_size": VOCABULARY, "head_dim": 16, "num_experts_per_tok": 2, "initializer_range": 0.1}
_SIZES |= {"pad_token_id": 0, "tie_word_embeddings": False}
# name of the family -> (class, its own settings, how the number of experts is called)
FAMILIES = {
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"intermediate_size": 96, "moe_intermediate_size": 48}, "num_experts"),
    "mixtral": ("MixtralForCausalLM", {"intermediate_size": 48}, "num_local_experts"),
    "gpt_oss": (
        "GptOssForCausalLM",
        {"intermediate_size": 48, "layer_types": ["full_attention"] * 2},
        "num_local_experts",
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            **{"intermediate_size": 96, "moe_intermediate_size": 48, "n_group": 2, "topk_group": 1, "q_lora_rank": 32},
            **{"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16},
            **{"first_k_dense_replace": 1, "n_shared_experts": 1, "num_key_value_heads": 4},
        },
        "n_routed_experts",
    ),
    "nemotron_h": (
        "NemotronHForCausalLM",
        {
            **{"intermediate_size": 96, "moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 48},
            **{"layers_block_type": ["attention", "moe"], "n_group": 1, "topk_group": 1, "mamba_num_heads": 4},
            **{"mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 16},
        },
        "n_routed_experts",
    ),
}


def model(family, experts=8, dtype=torch.float32, **sizes):
    """A model with random weights; the same for the same arguments."""
    name, own, count = FAMILIES[family]
    made = getattr(transformers, name)
    torch.manual_seed(0)
    config = made.config_class(**{**_SIZES, **own, count: experts, **sizes})
    found = made(config).to(dtype).eval()
    with torch.no_grad():
        for _, module in modules.found(found):
            for parameter in module.parameters():
                parameter.normal_(0, 0.1)
    return found


def blocks_fit(family, folder, count=3):
    """Dense files of a model whose experts are whole blocks in any format."""
    sizes = {"qwen3_moe": "moe_intermediate_size"}.get(family, "intermediate_size")
    model(family, count, **{sizes: 64}).save_pretrained(folder)
    return folder


def adapted_4bit(folder, quant_type):
    """A 4-bit model of dense files with adapters of peft on its stacks and on q_proj; they change most codes."""
    import peft
    from bitshard.transformers import FourBitConfig

    config = FourBitConfig(bnb_4bit_quant_type=quant_type, bnb_4bit_use_double_quant=quant_type == "nf4")
    found = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    settings = {"target_modules": ["q_proj"], "target_parameters": targets, "task_type": "CAUSAL_LM"}
    found = peft.get_peft_model(found, peft.LoraConfig(r=3, lora_alpha=6, **settings))
    torch.manual_seed(1)
    for parameter in found.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.05)
    return found


def decoded(dense, quantized):
    """A copy of a dense model with the values of the stacks and 4-bit layers of a quantized one."""
    other = copy.deepcopy(dense)
    for (_, mine), (_, theirs) in zip(modules.found(other), modules.found(quantized), strict=True):
        for name, held in theirs.packed_stacks.items():
            values = functional.dequantize_4bit(theirs._parameters[name].data, held.state)
            mine._parameters[name].data = held.oriented(values).to(mine._parameters[name].dtype)
    layers = dict(quantized.named_modules())
    for name, module in other.named_modules():
        if "Linear4bit" in type(layers[name]).__name__:
            weight = layers[name].weight
            module.weight.data = functional.dequantize_4bit(weight.data, weight.quant_state).to(module.weight.dtype)
    return other


@torch.no_grad()
def logits(model):
    return model(input_ids=TOKENS).logits


# ---- published formats ----


def save_mxfp4(model, folder, seed=0):
    """The files of a gpt-oss whose stacks are MXFP4, with random codes and scales."""

    def encode(tensors):
        for key in [key for key in tensors if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            E, K, N = tensors.pop(key).shape
            tensors[f"{key}_blocks"] = torch.randint(0, 256, (E, N, K // 32, 16), dtype=torch.uint8)
            tensors[f"{key}_scales"] = torch.randint(120, 126, (E, N, K // 32), dtype=torch.uint8)

    _save_encoded(model, folder, encode, {"quant_method": "mxfp4"}, seed)


def save_fp8(model, folder):
    """The files of a model whose linear layers, experts among them, are FP8 in blocks of [128, 128] where they fit."""

    def encode(tensors):
        for key in [key for key in tensors if key.endswith("proj.weight")]:
            weight = tensors[key]
            if not any(size % 128 for size in weight.shape):
                scales = torch.rand(weight.shape[0] // 128, weight.shape[1] // 128) + 0.5
                spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
                tensors[key] = (weight.float() / spread).to(torch.float8_e4m3fn)
                tensors[f"{key}_scale_inv"] = scales

    settings = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    _save_encoded(model, folder, encode, settings)


# layout, and of experts the family, of files in NVFP4
NVFP4 = ("modelopt", "compressed-tensors", "modelopt qwen3_moe", "compressed-tensors mixtral")
MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}


def save_nvfp4(model, folder, layout):
    """The files of a model whose linear layers but the head are NVFP4, experts too, with random codes and scales, as
    ModelOpt or compressed-tensors have them; with what only servers use, and what the model has no place for."""
    modelopt = layout == "modelopt"

    def encode(tensors):
        for key in [key for key in tensors if key.endswith(("proj.weight", "w1.weight", "w2.weight", "w3.weight"))]:
            (N, K), layer = tensors.pop(key).shape, key.removesuffix(".weight")
            tensors[f"{layer}.weight" if modelopt else f"{layer}.weight_packed"] = torch.randint(
                0, 256, (N, K // 2), dtype=torch.uint8
            )
            tensors[f"{layer}.weight_scale"] = (torch.rand(N, K // 16) * 400).to(torch.float8_e4m3fn)
            whole = torch.rand(()) * 1e-4 + 1e-5
            tensors |= (
                {f"{layer}.weight_scale_2": whole} if modelopt else {f"{layer}.weight_global_scale": 1 / whole[None]}
            )
            tensors[f"{layer}.input_scale" if modelopt else f"{layer}.input_global_scale"] = torch.rand(())
        for n in range(model.config.num_hidden_layers):
            attention = f"model.layers.{n}.self_attn"
            for kind in "kv":
                name = f"{attention}.{kind}_proj.{kind}_scale" if modelopt else f"{attention}.{kind}_scale"
                tensors[name] = torch.rand(()) if modelopt else torch.rand(1)
        tensors["mtp.layers.0.eh_proj.weight"] = torch.randn(300, 200)  # of a layer for drafting; large
        tensors["mtp.layers.0.enorm.weight"] = torch.randn(64)

    settings = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"]}
    if modelopt:
        settings = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}
    _save_encoded(model, folder, encode, settings)
    if modelopt:
        (folder / "hf_quant_config.json").write_text(json.dumps(MODELOPT))


def _save_encoded(model, folder, encode, settings, seed=0):
    model.save_pretrained(folder)
    file, config = folder / "model.safetensors", folder / "config.json"
    tensors = load_file(file)
    torch.manual_seed(seed)
    encode(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": settings}))
