"""Run by test_optim.py with the original bitsandbytes: writes state dicts of optimizers, or reads ours.

upstream_optim.py write FOLDER          trains with each class; state dict and parameters to FOLDER/<name>.pt
upstream_optim.py read FOLDER OUT       loads state dicts of FOLDER, and writes those of what it loaded to OUT
"""

import sys
from pathlib import Path

import bitsandbytes as bnb
import torch

ALGORITHMS = ("Adagrad", "Adam", "AdamW", "AdEMAMix", "LAMB", "LARS", "Lion", "RMSprop", "SGD")
SHAPES = [(48, 100), (16, 256), (7,), ()]  # two of 4096 elements and more, one of them not in whole blocks
STEPS = 3


def cases():
    """(name, class, arguments)."""
    for algorithm in ALGORITHMS:
        momentum = {"momentum": 0.9} if algorithm in ("LARS", "SGD") else {}
        for bits in (8, 32):
            yield f"{algorithm}-{bits}", algorithm, {"lr": 1e-2, "weight_decay": 1e-2, "optim_bits": bits, **momentum}
    yield "paged", "PagedAdamW8bit", {}
    yield "schedule", "AdEMAMix", {"t_alpha": 4, "t_beta3": 4}


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def train(optimizer, params, steps=range(STEPS)):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def write(folder):
    for name, cls, options in cases():
        params = parameters()
        optimizer = getattr(bnb.optim, cls)(params, **options)
        train(optimizer, params)
        values = [p.detach() for p in params]
        torch.save({"state_dict": optimizer.state_dict(), "parameters": values}, Path(folder) / f"{name}.pt")


def read(folder, out):
    """Beside what was read, the parameters after one more step."""
    for name, cls, options in cases():
        saved = torch.load(Path(folder) / f"{name}.pt", weights_only=True)
        params = [torch.nn.Parameter(value) for value in saved["parameters"]]
        optimizer = getattr(bnb.optim, cls)(params, **options)
        optimizer.load_state_dict(saved["state_dict"])
        loaded = optimizer.state_dict()
        loaded["state"] = {key: clone(value) for key, value in loaded["state"].items()}
        train(optimizer, params, [STEPS])
        torch.save({"state_dict": loaded, "parameters": [p.detach() for p in params]}, Path(out) / f"{name}.pt")


def clone(value):
    if isinstance(value, dict):
        return {key: clone(item) for key, item in value.items()}
    return value.clone() if isinstance(value, torch.Tensor) else value


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](*sys.argv[2:])
