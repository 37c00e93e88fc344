"""Read a 4-bit checkpoint through transformers and write what its layers hold.

python read.py CHECKPOINT FILE
"""

import sys

import bitsandbytes as bnb
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

checkpoint, file = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(checkpoint, device_map={"": "cpu"})
layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, bnb.nn.Linear4bit)}
assert len(layers) == 14
found = {}
for name, layer in layers.items():
    state = layer.state_dict()
    assert len(state) >= 6
    found |= {f"{name}.{key}": value.contiguous() for key, value in state.items()}
save_file(found, file)
