"""What safetensors files of a folder hold, and comparing it."""

import torch
from safetensors.torch import load_file


def tensors(folder):
    """{name: tensor} of all safetensors files of a folder."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(load_file(path))
    return found


def same(first, second):
    """Names, dtypes, shapes and bytes."""
    assert first.keys() == second.keys(), first.keys() ^ second.keys()
    for name, one in first.items():
        other = second[name]
        assert one.dtype is other.dtype and one.shape == other.shape, name
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)), name
