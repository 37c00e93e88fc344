"""Embeddings in 4 bits under FSDP2: rows of the bytes that were quantized, in every unit; state dicts; tied heads."""

import torch
import torch.distributed as dist
from bitshard.nn.embedding import Embedding8bit, EmbeddingNF4
from bitshard.nn.tied import TiedHead
from checks.common import FULL, raises
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

SHAPES = ((37, 33), (48, 64))  # rows that are no whole number of blocks, and blocks that no world divides; even ones


class Words(nn.Module):
    """A quantized embedding, a trained layer, and a head that is tied to the embedding or dense."""

    def __init__(self, shape, storage, device, ties, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        n, k = shape
        self.embedding = EmbeddingNF4(n, k, dtype=torch.bfloat16, quant_storage=storage).to(device)
        self.layer = nn.Linear(k, k, dtype=torch.bfloat16, device=device)
        dense = nn.Linear(k, n, bias=False, dtype=torch.bfloat16, device=device)
        self.head = TiedHead(self.embedding) if ties else dense

    def forward(self, ids):
        return self.head(torch.relu(self.layer(self.embedding(ids))))


def storages():
    return (torch.uint8, torch.bfloat16, torch.float32)


def ids_of(shape, device):
    """Tokens that differ between ranks."""
    return ((torch.arange(24) * 7 + 5 * dist.get_rank()) % shape[0]).view(2, 12).to(device)


def equal_forward(model, like, shape, device):
    """What `model`, sharded, gives is what `like`, which is not, gives; forward and backward, twice."""
    for _ in range(2):
        ids = ids_of(shape, device)
        y = model(ids)
        assert torch.equal(y, like(ids)), (y - like(ids)).abs().max()
        y.float().sum().backward()
    assert isinstance(model.embedding.weight, DTensor) and model.layer.weight.grad is not None


def check_embedding_units(device, args):
    """The embedding in a unit of its own, and in that of the whole model."""
    for shape in SHAPES:
        for storage in storages():
            for own in (False, True):
                model = Words(shape, storage, device, ties=False)
                if own:
                    fully_shard(model.embedding)
                fully_shard(model, reshard_after_forward=True)
                equal_forward(model, Words(shape, storage, device, ties=False), shape, device)


def check_embedding_tied_head(device, args):
    """Embedding and head in one unit, as accelerate puts them, and in the root's; apart they are refused."""
    for shape in SHAPES:
        for together in (False, True):
            model = Words(shape, torch.bfloat16, device, ties=True)
            if together:
                fully_shard([model.embedding, model.head], reshard_after_forward=False)
            fully_shard(model)
            equal_forward(model, Words(shape, torch.bfloat16, device, ties=True), shape, device)
    if dist.get_world_size() > 1:
        model = Words(SHAPES[0], torch.bfloat16, device, ties=True)
        fully_shard(model.embedding)
        fully_shard(model)
        raises(ValueError, r"head is tied|one unit|[37, 33]", lambda: model(ids_of(SHAPES[0], device)))


def check_embedding_state_dicts(device, args):
    """A full state dict is that of one process, and loads into a sharded model of other weights."""
    for shape in SHAPES:
        like, other = (Words(shape, torch.uint8, device, ties=True, seed=seed) for seed in (0, 1))
        model = fully_shard(Words(shape, torch.uint8, device, ties=True))
        expected, found = like.state_dict(), get_model_state_dict(model, options=FULL)
        if dist.get_rank() == 0:
            assert set(found) == set(expected) and "head.weight" not in found
            for key in ("embedding.weight", "embedding.weight.absmax"):
                assert torch.equal(found[key].cpu(), expected[key].cpu()), key
        whole = [{key: value.cpu() for key, value in like.state_dict().items()}]
        fully_shard(other)
        set_model_state_dict(other, whole[0], options=FULL)
        equal_forward(other, like, shape, device)


def check_embedding_8bit(device, args):
    """Codes that would be sharded without their scales are refused."""
    module = nn.Sequential(Embedding8bit(32, 64).to(device))
    raises((ValueError, RuntimeError), "int8|[32, 64]|scales", lambda: fully_shard(module))
