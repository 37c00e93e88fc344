"""Embeddings in 4 and 8 bits under FSDP2: rows of what was quantized, in every unit; state dicts; tied heads."""

from pathlib import Path

import torch
import torch.distributed as dist
from bitshard import fsdp
from bitshard.nn.embedding import Embedding8bit, EmbeddingNF4
from bitshard.nn.tied import TiedHead
from bitshard.sharding.checkpoints.state_dicts import full_state_dict, load_full_state_dict
from checks.common import raises
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

SHAPES = ((37, 33), (48, 64))  # rows that are no whole number of blocks, and blocks that no world divides; even ones


class Words(nn.Module):
    """A quantized embedding (int8, or NF4 in a storage dtype), a trained layer, and a head, tied to it or dense."""

    def __init__(self, shape, storage, device, ties, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        n, k = shape
        options = {} if storage is torch.int8 else {"quant_storage": storage}
        kind = Embedding8bit if storage is torch.int8 else EmbeddingNF4
        self.embedding = kind(n, k, dtype=torch.bfloat16, **options).to(device)
        self.layer = nn.Linear(k, k, dtype=torch.bfloat16, device=device)
        dense = nn.Linear(k, n, bias=False, dtype=torch.bfloat16, device=device)
        self.head = TiedHead(self.embedding) if ties else dense

    def forward(self, ids):
        return self.head(torch.relu(self.layer(self.embedding(ids))))


def storages():
    return (torch.uint8, torch.bfloat16, torch.float32, torch.int8)


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
        for storage in (torch.bfloat16, torch.int8):
            for together in (False, True):
                model = Words(shape, storage, device, ties=True)
                if together:
                    fully_shard([model.embedding, model.head], reshard_after_forward=False)
                fully_shard(model)
                equal_forward(model, Words(shape, storage, device, ties=True), shape, device)
    if dist.get_world_size() > 1:
        for storage in (torch.bfloat16, torch.int8):
            model = Words(SHAPES[0], storage, device, ties=True)
            fully_shard(model.embedding)
            fully_shard(model)
            raises(ValueError, r"head is tied|one unit|[37, 33]", lambda model=model: model(ids_of(SHAPES[0], device)))


def check_embedding_state_dicts(device, args):
    """A full state dict is that of one process, and loads into a sharded model of other weights."""
    for shape in SHAPES:
        for storage, scales in ((torch.uint8, "weight.absmax"), (torch.int8, "SCB")):
            like, other = (Words(shape, storage, device, ties=True, seed=seed) for seed in (0, 1))
            model = fully_shard(Words(shape, storage, device, ties=True))
            expected, found = like.state_dict(), full_state_dict(model)
            if dist.get_rank() == 0:
                assert set(found) == set(expected) and "head.weight" not in found
                for key in ("embedding.weight", f"embedding.{scales}"):
                    assert torch.equal(found[key].cpu(), expected[key].cpu()), key
            fully_shard(other)
            load_full_state_dict(other, {key: value.cpu() for key, value in expected.items()})
            equal_forward(other, like, shape, device)


def check_embedding_load(device, args):
    """`fsdp.load` keeps embedding and head in one unit, exact, and writes them again, in 4 and 8 bits."""
    from bitshard.transformers import FourBitConfig
    from helpers import tiny
    from transformers import AutoModelForCausalLM

    folder = Path(args.dir, f"tied{dist.get_world_size()}")
    sizes = {"vocab_size": 91, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    if dist.get_rank() == 0:
        tiny.llama(folder, torch.bfloat16, **sizes, num_attention_heads=2, tie_word_embeddings=True)
    dist.barrier()
    for bits in (4, 8):
        quantization = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
        settings = FourBitConfig(bnb_4bit_embedding_bits=bits, **quantization)
        options = {"dtype": torch.bfloat16, "device_map": {"": device}}
        model = fsdp.load(folder, quantization_config=settings, dtype=torch.bfloat16)
        whole = AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings, **options)
        ids = ids_of((91, 64), device)
        assert isinstance(model.model.embed_tokens.weight, DTensor) and isinstance(model.lm_head, TiedHead)
        y = model(input_ids=ids).logits
        assert torch.equal(y, whole(input_ids=ids).logits), bits
        fsdp.save_pretrained(model, folder / f"saved{bits}")
        again = AutoModelForCausalLM.from_pretrained(folder / f"saved{bits}", **options)
        assert torch.equal(again(input_ids=ids).logits, y), bits
