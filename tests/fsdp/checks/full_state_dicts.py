"""Whole state dicts, ours and torch's, out of sharded models and back into them."""

import torch
import torch.distributed as dist
from bitshard import fsdp
from checks.common import batch, build, exact, layers, padded, shard
from common import as_bytes, same_bytes
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict


def check_full_state_dict(device, args):
    """Ours: on rank 0, what an unsharded model of the declared storage saves. Loads into unsharded and sharded ones."""
    for storage in (torch.uint8, torch.float32):
        full = fsdp.full_state_dict(shard(build(device, storage=storage)))
        reference = {key: value.cpu() for key, value in build(device, storage=storage).state_dict().items()}
        other = shard(build(device, seed=50, storage=storage))
        other.load_state_dict({**other.state_dict(), **only_base(reference)})
        exact(other, device, build(device, storage=storage))
        other = shard(build(device, seed=60, storage=storage))
        fsdp.load_full_state_dict(other, reference)
        exact(other, device, build(device, storage=storage))
        if dist.get_rank() != 0:
            assert full == {}
            continue
        assert set(full) == set(reference), set(full) ^ set(reference)
        for key, value in full.items():
            found, expected = (bytes(as_bytes(data).tolist()).rstrip() for data in (value, reference[key]))
            assert type(value) is torch.Tensor and value.dtype == reference[key].dtype, (key, value.dtype)
            assert found == expected.rstrip(), key
        whole = build(device, seed=50, storage=storage)
        whole.load_state_dict(full)
        for layer, original in zip(layers(whole), layers(build(device, storage=storage)), strict=True):
            assert same_bytes(layer.weight, original.weight)


def only_base(state_dict):
    return {key: value for key, value in state_dict.items() if ".base.weight" in key}


def check_torch_full_state_dict(device, args):
    """torch's: whole tensors in the declared storage, on every rank, which torch loads back into a sharded model."""
    reference = build(device).state_dict()
    assert reference["0.base.weight"].dtype == torch.uint8
    for run_first in (False, True):
        model = shard(build(device))
        if run_first:
            model(batch(device))
        gathered = {key: value.full_tensor() for key, value in model.state_dict().items()}
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        assert set(full) == set(gathered) == set(reference)
        for key, value in padded(reference).items():
            for found in (full[key], gathered[key]):
                assert same_bytes(found, value), key
        other = shard(build(device, seed=50))
        set_model_state_dict(other, dict(full), options=StateDictOptions(full_state_dict=True))
        exact(other, device, build(device))
