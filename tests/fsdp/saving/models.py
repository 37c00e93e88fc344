"""What the workers that save share: a base and its adapters in one process, and what it writes; folders compared."""

import sys
from pathlib import Path

import torch

sys.path += [str(Path(__file__).parents[1] / "parts"), str(Path(__file__).parents[2])]
from bitshard.functional import dequantize_4bit  # noqa: E402
from helpers import tiny  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from shared import DTYPES, linears, load, load_from, name_of  # noqa: E402

CELLS = [("uint8", True, "bf16"), ("bf16", False, "fp32"), ("fp32", True, "bf16")]
LIMIT = 30_000  # bytes of a file: the base takes several, and its largest tensor is smaller
KINDS = {
    "lora": {},
    "dora": {"use_dora": True},
    "bias": {"lora_bias": True, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 4},  # peft leaves out a scale
    "trained": {"modules_to_save": ["lm_head"], "target_modules": ["q_proj", "embed_tokens"]},
}


def adapted(model, kind):
    """`model` with adapters of random values in float32, the same on every rank."""
    if kind == "none":
        return model
    config = {"target_modules": "all-linear", "r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **KINDS[kind]}
    torch.manual_seed(11)
    model = get_peft_model(model, LoraConfig(**config))
    generator = torch.Generator().manual_seed(5)
    for name, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad:
            values = torch.randn(parameter.shape, generator=generator) * 0.05
            if "magnitude" in name:
                values = values + 0.5
            elif "lora_" not in name:
                values = values + parameter.data.float()
            parameter.data = values
    return model


def reference(folder, cell, kind="none", what="4bit"):
    """The folder that one process writes: a kind of adapters or "none"; 4-bit, or the dtype of the values."""
    return f"{folder}/reference-{name_of(*cell)}-{kind}-{what}"


def dense_of(folder, cell):
    """The values of a 4-bit model in a model that is not quantized."""
    packed = load(folder, *cell, device_map="cpu")
    dense = load_from(f"{folder}/dense", cell[2])
    for name, layer in linears(packed).items():
        weight = dense.get_submodule(name).weight
        weight.data = dequantize_4bit(layer.weight.data, layer.weight.quant_state).to(weight.dtype)
    return dense


def make_wide(folder):
    """A dense model whose 4-bit layers are most of it, so that what is held at a time can be told from the rest."""
    sizes = {"vocab_size": 128, "hidden_size": 384, "intermediate_size": 768, "num_hidden_layers": 5}
    tiny.llama(f"{folder}/wide/dense", torch.bfloat16, pad_token_id=0, **sizes)


def write_reference(folder, cell, kind="none", what="4bit", limit=LIMIT):
    """With transformers' and peft's own functions. Names of tensors as the model has them, so in its order."""
    model = load(folder, *cell, device_map="cpu") if what == "4bit" else dense_of(folder, cell)
    model = adapted(model, kind)
    model = model.merge_and_unload() if kind != "none" else model
    if what != "4bit":
        model = model.to(DTYPES[what])
    model.save_pretrained(reference(folder, cell, kind, what), max_shard_size=limit, save_original_format=False)


def differing_files(found, expected):
    """Names of files that are not there twice, or have other bytes."""
    files = [{path.name: path.read_bytes() for path in Path(place).iterdir()} for place in (found, expected)]
    return sorted(name for name in {*files[0], *files[1]} if files[0].get(name) != files[1].get(name))


def tensors_of(folder):
    """{key: tensor} of all files of a checkpoint."""
    found = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        found |= load_file(path)
    return found
