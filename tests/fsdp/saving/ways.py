"""The ways in which a model is loaded and sharded, and what is saved compared with what one process saves."""

import shutil

import torch
import torch.distributed as dist
from bitshard import fsdp
from common import BYTES, SIGNAL
from models import differing_files, tensors_of
from shared import environment, load, rank, same_bytes, world
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from transformers.distributed import DistributedConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

# What tells this process that FSDP shards, so that uint8 gets a container of the model's dtype: where it needs one
TOLD = {} if BYTES is torch.uint8 else {SIGNAL: "false"}


def whole(folder, cell, adapt):
    """Loaded whole, then sharded by FSDP2."""
    with environment(**TOLD):
        return shard(adapt(load(folder, *cell, device_map="cpu")))


def shard(model):
    for module in model.modules():
        if isinstance(module, LlamaDecoderLayer):
            fully_shard(module)
    return fully_shard(model)


def cut(folder, cell, adapt):
    """Loaded by parts, then sharded by FSDP2."""
    with environment(BITSHARD_CUT="1"):
        return shard(adapt(load(folder, *cell, device_map="cpu")))


def parts(folder, cell, adapt):
    """Loaded by parts, not sharded yet."""
    with environment(BITSHARD_CUT="1"):
        return adapt(load(folder, *cell, device_map="cpu"))


def native(folder, cell, adapt):
    """Sharded before it is loaded, adapters beside it on every rank."""
    return adapt(load(folder, *cell, distributed_config=DistributedConfig(fsdp_size=world())))


def native_sharded(folder, cell, adapt):
    """The same, its adapters sharded, too."""
    model = native(folder, cell, adapt)
    fsdp.shard_adapters(model)
    return model


def fsdp1(folder, cell, adapt, orig=False):
    """FSDP1: a unit for each decoder layer, and for each module with what is trained."""
    with environment(**{SIGNAL: "false"}):
        model = adapt(load(folder, *cell, device_map="cpu"))

        if not any("lora_" in name for name, _ in model.named_parameters()):
            model.requires_grad_(False)  # FSDP1 wants all or none of a unit trained

        def unit(module, recurse, nonwrapped_numel):
            trained = [p.requires_grad for p in module.parameters()]
            return recurse or isinstance(module, LlamaDecoderLayer) or (bool(trained) and all(trained))

        return FullyShardedDataParallel(
            model, auto_wrap_policy=unit, use_orig_params=orig, device_id=torch.device("cpu")
        )


def fsdp1_orig(folder, cell, adapt):
    """With use_orig_params."""
    return fsdp1(folder, cell, adapt, orig=True)


WAYS = {way.__name__: way for way in (whole, cut, parts, native, native_sharded, fsdp1, fsdp1_orig)}


def target_of(folder, name):
    """An empty folder to save to."""
    target = f"{folder}/streamed{world()}-{name}"
    if rank() == 0:
        shutil.rmtree(target, ignore_errors=True)
    dist.barrier()
    return target


def assert_same(target, expected):
    """File by file; where FSDP1 or the late length of an entry changes the order, tensor by tensor. On all ranks."""
    box = [compare(target, expected) if rank() == 0 else None]
    dist.broadcast_object_list(box)
    assert box[0] == [], box[0]


def compare(target, expected):
    """What is wrong."""
    wrong = differing_files(target, expected)
    if not wrong:
        return []
    found, good = tensors_of(target), tensors_of(expected)
    return [
        *sorted(found.keys() ^ good.keys()),
        *(key for key in good if key in found and not alike(key, found[key], good[key])),
        *(name for name in wrong if "config" in name or "partial" in name),
    ]


def alike(key, found, good):
    """Biases keep their dtype; peft makes them float32 where it adds one to them."""
    return same_bytes(found, good.to(found.dtype) if key.endswith(".bias") else good)
