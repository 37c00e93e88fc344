"""Optimizer states and parameters beside those of bitsandbytes' CUDA library after 1, 2 and 100 steps.

tests/golden/optimizers.npz was made by `benchmarks/checks/cuda_optim.py golden` on an H200.
"""

import sys
from pathlib import Path

import numpy
import pytest
import torch
from bitshard.formats import maps

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks" / "checks"))

import cuda_optim  # noqa: E402

CASES = [(name, bits, label) for name, bits, label, _ in cuda_optim.cases()]
# There 1 - beta^t and what follows from it are approximations of the GPU, here they are rounded once: so far apart are
# parameters after a step, in learning rates and beside one rounding.
APART = {"adam": 1e-3, "ademamix": 1e-3, "rmsprop": 1e-6, "adagrad": 1e-6}  # the last two: roots and quotients
# bitsandbytes' 32-bit kernels for fp32 add weight decay to the gradient in one of two roundings, by place.
DECAYED = ("momentum", "rmsprop", "adagrad")


@pytest.fixture(scope="module")
def golden():
    with numpy.load(ROOT / "tests" / "golden" / "optimizers.npz") as file:
        return {key: file[key] for key in file.files}


def expected(golden: dict, key: str, like: torch.Tensor) -> torch.Tensor:
    found = torch.from_numpy(golden[key])
    return found.view(torch.bfloat16) if like.dtype == torch.bfloat16 else found


def compare(key: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    name, bits, label, step, kind = key.split(".")
    if bits == "32" and label == "fp32" and name in DECAYED:
        apart = (ours.double() - theirs.double()).abs()
        assert (apart <= 2e-6 * theirs.double().abs() + int(step) * 2e-8).all(), key
    elif kind == "p" and name in APART:
        apart = (ours.double() - theirs.double()).abs()
        unit = {"fp32": 2.0**-23, "fp16": 2.0**-10, "bf16": 2.0**-7}[label]
        allowed = int(step) * APART[name] * cuda_optim.NUMBERS["lr"] + 2 * unit * theirs.double().abs()
        assert (apart <= allowed).all(), (key, float((apart - allowed).max()))
    else:
        assert torch.equal(ours, theirs), (key, cuda_optim.difference(ours, theirs))


@pytest.mark.parametrize("name, bits, label", CASES)
def test_as_on_a_gpu(name, bits, label, golden, device):
    """Codes, scales and 32-bit states equal bit for bit, parameters too where nothing there is approximate."""
    dtype, size = cuda_optim.DTYPES[label], cuda_optim.whole_blocks(name, cuda_optim.GOLDEN_ELEMENTS)
    both = (maps.create_dynamic_map().to(device), maps.create_dynamic_map(signed=False).to(device))
    state = cuda_optim.State(name, bits, cuda_optim.parameter(size).to(device, dtype), both)
    for step in range(1, cuda_optim.STEPS + 1):
        state.step(cuda_optim.Ours, cuda_optim.gradient(size, step).to(device, dtype), step)
        for key, value in state.tensors().items() if step in cuda_optim.GOLDEN_STEPS else ():
            key = f"{name}.{bits}.{label}.{step}.{key}"
            compare(key, value.cpu(), expected(golden, key, value))
