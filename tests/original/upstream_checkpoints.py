"""Run by test_checkpoints.py with the original bitsandbytes: writes checkpoints, or reads ours.

upstream_checkpoints.py write FOLDER    layers and models in every storage, with what they compute
upstream_checkpoints.py read FOLDER     loads our layers and models; writes back what it read and computed
upstream_checkpoints.py dense FOLDER FILE    a model's 4-bit weights, dequantized
"""

import sys
from pathlib import Path

import bitsandbytes as bnb
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

STORAGES = ["uint8", "int8", "bfloat16", "float16", "float32", "float64"]
MODEL_STORAGES = ["uint8", "bfloat16", "float16", "float32"]


def layer_cases():
    """(file name, storage, nested, format, weight shape, dtype)."""
    for storage in STORAGES:
        for nested in (False, True):
            for quant_type in ("nf4", "fp4"):
                yield f"{storage}-{nested}-{quant_type}", storage, nested, quant_type, (144, 128), torch.bfloat16
    yield "odd", "uint8", True, "nf4", (5, 33), torch.float32
    yield "half", "float16", True, "nf4", (300, 64), torch.float16


def make_layer(storage, nested, quant_type, shape, dtype):
    """A quantized layer with bias, and an input [3, in_features]."""
    torch.manual_seed(sum(shape))
    weight, bias, x = torch.randn(shape, dtype=dtype), torch.randn(shape[0], dtype=dtype), torch.randn(3, shape[1])
    options = {"compress_statistics": nested, "quant_type": quant_type, "quant_storage": getattr(torch, storage)}
    layer = bnb.nn.Linear4bit(shape[1], shape[0], True, dtype, device="meta", **options)
    layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, module=layer, **options)
    layer.bias = torch.nn.Parameter(bias, requires_grad=False)
    return layer.to("cpu"), x.to(dtype)


def read_layer(path, shape, dtype):
    """A layer around the packed weight of a checkpoint, in the way of transformers."""
    entries = load_file(path)
    weight, bias, x = entries.pop("weight"), entries.pop("bias"), entries.pop("x")
    entries = {key: value for key, value in entries.items() if key.startswith("weight.")}
    layer = bnb.nn.Linear4bit(shape[1], shape[0], True, dtype, device="meta", quant_storage=weight.dtype)
    layer.weight = bnb.nn.Params4bit.from_prequantized(weight, entries, device="cpu", module=layer)
    layer.bias = torch.nn.Parameter(bias, requires_grad=False)
    return layer, x


def save_layer(layer, x, path):
    """State dict, input, output, and the dequantized weight."""
    state = {key: value.detach().contiguous().clone() for key, value in layer.state_dict().items()}
    weight = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    with torch.no_grad():
        save_file({**state, "x": x, "y": layer(x), "dense": weight}, path)


def load_model(path, storage=None, nested=True):
    """A model: quantized now where `storage` is given, else as its checkpoint says."""
    options = {"dtype": torch.bfloat16, "device_map": {"": "cpu"}}
    if storage is not None:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=nested,
            bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_quant_storage=storage,
        )
    return AutoModelForCausalLM.from_pretrained(path, **options)


@torch.no_grad()
def save_logits(model, path):
    torch.manual_seed(1)
    save_file({"logits": model(torch.randint(1, 128, (2, 12))).logits}, path)


def write(folder: Path, model_folder: Path) -> None:
    """Layers into layer-*.safetensors and layer-*.pt; models into model-*, and resaved-* from pre-quantized form."""
    for name, *case in layer_cases():
        layer, x = make_layer(*case)
        torch.save(layer, folder / f"layer-{name}.pt")
        save_layer(layer, x, folder / f"layer-{name}.safetensors")
    for storage in MODEL_STORAGES:
        for nested in (False, True):
            model = load_model(model_folder, storage, nested)
            model.save_pretrained(folder / f"model-{storage}-{nested}")
            save_logits(model, folder / f"logits-{storage}-{nested}.safetensors")
            model = load_model(folder / f"model-{storage}-{nested}")
            model.save_pretrained(folder / f"resaved-{storage}-{nested}", save_original_format=False)


def read(source: Path, target: Path) -> None:
    """Load everything that `write` left in `source`; save it again, with what it computes, in `target`."""
    for name, _, _, _, shape, dtype in layer_cases():
        layer, x = read_layer(source / f"layer-{name}.safetensors", shape, dtype)
        save_layer(layer, x, target / f"layer-{name}.safetensors")
    for storage in MODEL_STORAGES:
        for nested in (False, True):
            for kind in ("model", "resaved"):
                model = load_model(source / f"{kind}-{storage}-{nested}")
                model.save_pretrained(target / f"{kind}-{storage}-{nested}", save_original_format=False)
                save_logits(model, target / f"{kind}-logits-{storage}-{nested}.safetensors")


def dense(source: Path, target: Path) -> None:
    """The dequantized weight of every 4-bit layer of a model's folder."""
    model = AutoModelForCausalLM.from_pretrained(source, device_map={"": "cpu"})
    layers = [(name, module.weight) for name, module in model.named_modules() if isinstance(module, bnb.nn.Linear4bit)]
    save_file({name: bnb.functional.dequantize_4bit(w.data, w.quant_state) for name, w in layers}, target)


if __name__ == "__main__":
    command, *folders = sys.argv[1:]
    {"write": write, "read": read, "dense": dense}[command](*map(Path, folders))
