"""Sharded state dicts: what is in them, copies of them, files, and entries that do not fit."""

import copy
import io

import torch
from bitshard.nn.linear import Linear4bit
from bitshard.shards.shard import PackedShard
from checks.common import ENTRIES, batch, build, exact, layers, raises, shard
from torch import nn
from torch.distributed.tensor import DTensor


def check_sharded_state_dict(device, args):
    """Entries are DTensors only; loaded in place and by assignment into models of other weights that never ran."""
    for run_first in (False, True):
        model = shard(build(device))
        if run_first:
            model(batch(device))
        saved = model.state_dict()
        assert all(isinstance(value, DTensor) for value in saved.values()), {k: type(v) for k, v in saved.items()}
        assert {f"0.base.weight{end}" for end in ENTRIES} <= set(saved)
        for assign in (False, True):
            other = shard(build(device, seed=50))
            other.load_state_dict(saved, assign=assign)
            assert all(isinstance(layer.weight._local_tensor, PackedShard) for layer in layers(other))
            exact(other, device, build(device))
            saved = {key: value.clone() for key, value in saved.items()}


def check_torch_save(device, args):
    """A sharded state dict survives torch.save and torch.load(weights_only=True), DTensors and local tensors alike.

    Copies of it and parameters made of its entries still hold shards, apart from those of the model.
    """
    model, other = shard(build(device)), shard(build(device, seed=50))
    saved = model.state_dict()
    for copied in (copy.deepcopy(saved), {key: nn.Parameter(value.clone(), False) for key, value in saved.items()}):
        key = "0.base.weight"
        assert isinstance(copied[key]._local_tensor, PackedShard) and type(copied[key]) is type(saved[key])
        assert copied[key]._local_tensor.data_ptr() != saved[key]._local_tensor.data_ptr()
        other.load_state_dict(copied)
        exact(other, device, build(device))
        other = shard(build(device, seed=50))
    file = io.BytesIO()
    torch.save([saved, {key: value.to_local() for key, value in saved.items()}], file)
    file.seek(0)
    sharded, local = torch.load(file, weights_only=True)
    assert all(type(value) is torch.Tensor for value in local.values())
    other.load_state_dict(sharded)
    exact(other, device, build(device))


def check_contradictions(device, args):
    """Entries of another weight, format or size raise and name the key, on every rank."""
    model = shard(build(device))
    saved = model.state_dict()
    plain = {key: value.full_tensor() for key, value in saved.items()}
    key = "0.base.weight"
    for change, text in (
        ({f"{key}.absmax": plain[f"{key}.absmax"][:-1]}, "absmax|18|19"),
        ({f"{key}.absmax": plain[f"{key}.absmax"].float()}, "float32|uint8"),
        ({f"{key}.nested_absmax": -plain[f"{key}.nested_absmax"]}, "nested_absmax are|below zero"),
        ({key: plain[key][:-1]}, "0.base.weight"),
        ({name: plain[name.replace("0.", "1.", 1)] for name in plain if name.startswith(f"{key}.")}, "shape"),
    ):
        raises(
            (ValueError, RuntimeError, TypeError),
            text,
            lambda change=change: model.load_state_dict({**saved, **change}),
        )
    missing = {name: value for name, value in saved.items() if name != f"{key}.absmax"}
    raises((ValueError, RuntimeError), "absmax", lambda: model.load_state_dict(missing))
    flat = shard(nn.Sequential(Linear4bit(33, 35, False, None, False, "nf4", torch.float32).to(device)))
    saved = flat.state_dict()
    scales = saved["0.weight.absmax"].full_tensor().clone()
    scales[-1] = torch.nan  # in one rank's part
    raises(ValueError, "0.weight.absmax|not finite", lambda: flat.load_state_dict({**saved, "0.weight.absmax": scales}))
    flat.load_state_dict(saved)
