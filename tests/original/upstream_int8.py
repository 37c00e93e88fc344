"""Run by test_int8_models.py with the original bitsandbytes: writes int8 checkpoints, or reads ours.

upstream_int8.py THEIRS OURS THEIRS_FROM_OURS DENSE    `write` to the first folder from a dense model, and `read` of
                                                        what it left in the second, to the third
"""

import sys
from pathlib import Path

import bitsandbytes as bnb
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

K, N = 64, 48


def make_layer():
    """A float layer that is not quantized yet, and an input [40, K] with outliers."""
    torch.manual_seed(3)
    layer = bnb.nn.Linear8bitLt(K, N, has_fp16_weights=False, threshold=6.0).half()
    x = torch.randn(40, K).half()
    x[0, 3] = 9.0
    return layer, x


def load_model(path, quantize):
    """A model: quantized now, or as its checkpoint says."""
    options = {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)} if quantize else {}
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, device_map={"": "cpu"}, **options)


def save_layer(layer, x, path):
    with torch.no_grad():
        y = layer(x)
    save_file({**layer.state_dict(), "x": x, "y": y}, path)


@torch.no_grad()
def save_model(model, folder, **options):
    model.save_pretrained(folder / "model", **options)
    torch.manual_seed(1)
    save_file({"logits": model(torch.randint(1, 128, (2, 12))).logits}, folder / "logits.safetensors")


def write(folder: Path, dense: Path) -> None:
    """layer.pt, before and after a forward, layer.safetensors, model, logits.safetensors."""
    layer, x = make_layer()
    layer = layer.to("cpu")
    torch.save(layer, folder / "layer.pt")
    save_layer(layer, x, folder / "layer.safetensors")
    torch.save(layer, folder / "used.pt")
    save_model(load_model(dense, True), folder)


def read(source: Path, target: Path) -> None:
    """The state dict into a quantized layer, and the model."""
    layer, _ = make_layer()
    entries = load_file(source / "layer.safetensors")
    x = entries.pop("x")
    del entries["y"]
    layer = layer.to("cpu")
    layer.load_state_dict(entries)
    save_layer(layer, x, target / "layer.safetensors")
    save_model(load_model(source / "model", False), target, save_original_format=False)


if __name__ == "__main__":
    theirs, ours, theirs_from_ours, dense = map(Path, sys.argv[1:])
    write(theirs, dense)
    read(ours, theirs_from_ours)
