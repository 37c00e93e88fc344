"""QLoRA with peft's layers and with fused ones, in plain torch: alone, under DDP, FSDP1 and FSDP2.

    torchrun --nproc-per-node 2 tests/fsdp/lora.py --dir FOLDER_OF_A_LLAMA --only fsdp2,ddp --out r.json

Each scenario trains three times from the same start: with peft's layers, with fused ones, and with fused ones whose
scale is wrong. Ranks share a batch, so that their mean loss is that of one process on the whole batch.
"""

import contextlib
import functools
import logging

import peft
import torch
import torch.distributed as dist
import transformers
from bitshard import lora
from common import finish, start
from helpers import switches
from helpers.llama import TOKENS, config_4bit
from helpers.lora import fused_calls, layers, randomize, wrong_scale
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

STEPS, ROWS, LENGTH = 3, 4, 12


def build(args, dtype=torch.float32, quant_type="nf4", **options):
    """The 4-bit Llama under a LoRA adapter that matters, of dtype `dtype` where nothing is packed."""
    base = transformers.AutoModelForCausalLM.from_pretrained(
        args.dir, dtype=dtype, quantization_config=config_4bit(quant_type, dtype), device_map={"": "cpu"}
    )
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(base, config)
    torch.manual_seed(8)
    randomize(model, dtype)
    return model.train()


def decoder(model):
    return model.base_model.model.model.layers


def fsdp2(model, **options):
    for unit in decoder(model):
        fully_shard(unit, **options)
    return fully_shard(model, **options)


def fsdp1(model, **options):
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}),
        device_id=torch.device("cpu"),
        **{"use_orig_params": True, **options},
    )


def as_trainer_wraps(model, orig):
    """peft's policy for FSDP1: each A and B is a unit of its own, with use_orig_params and without."""
    policy = peft.utils.other.fsdp_auto_wrap_policy(model)
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=orig)


def layer_by_layer(model):
    """FSDP2 on the LoRA layers themselves, which become classes that FSDP2 derives."""
    for part in layers(model):
        fully_shard(part)
    return fsdp2(model)


def checkpointed(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return fsdp2(model)


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# name: (how it is wrapped, dtype, whether `fuse` comes before the wrapping)
SCENARIOS = {
    "alone": (lambda model: model, torch.float32, True),
    "ddp": (DistributedDataParallel, torch.float32, True),
    "fsdp2": (fsdp2, torch.float32, True),
    "fsdp2_fused_later": (fsdp2, torch.float32, False),
    "fsdp2_kept": (functools.partial(fsdp2, reshard_after_forward=False), torch.float32, True),
    "fsdp2_mixed": (functools.partial(fsdp2, mp_policy=MIXED), torch.float32, True),
    "fsdp2_offload": (functools.partial(fsdp2, offload_policy=CPUOffloadPolicy(pin_memory=False)), torch.float32, True),
    "fsdp2_checkpointed": (checkpointed, torch.float32, True),
    "fsdp2_layers": (layer_by_layer, torch.float32, True),
    "fsdp1": (fsdp1, torch.float32, True),
    "fsdp1_fused_later": (fsdp1, torch.float32, False),
    "fsdp1_bf16": (functools.partial(fsdp1, mixed_precision=BF16), torch.bfloat16, True),
    "fsdp1_trainer": (functools.partial(as_trainer_wraps, orig=False), torch.float32, True),
    "fsdp1_trainer_orig_params": (functools.partial(as_trainer_wraps, orig=True), torch.float32, True),
}
BY_SWITCH = ("ddp", "fsdp2", "fsdp1", "fsdp1_trainer", "fsdp1_trainer_orig_params")  # BITSHARD_FUSE=1 instead of `fuse`


def by_switch(model):
    """Fuse a wrapped model as BITSHARD_FUSE=1 does when its train() is called; what rank 0 says of it."""
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(f"{record.levelname} {record.getMessage()}")
    logger = logging.getLogger("bitshard")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    with switches.set_to(FUSE="1"):
        for _ in range(2):
            model.train()
    logger.removeHandler(handler)
    assert dist.get_rank() == 0 or not said, said
    everybody = [said]
    dist.broadcast_object_list(everybody)
    return everybody[0]


def steps(model):
    """Losses and gradient norms of a run, and the rows of its last step."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    generator = torch.Generator().manual_seed(1)
    losses, norms = [], []
    for _ in range(STEPS):
        rows = torch.randint(0, TOKENS, (ROWS, LENGTH), generator=generator)
        rows = rows.chunk(dist.get_world_size())[dist.get_rank()]
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        norms.append(float(clip(model)))
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().float()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    return losses, norms, rows


def train(args, name, kind):
    """Losses and gradient norms of a run, calls that were fused, what `report` says, the adapter; and after unfuse."""
    wrap, dtype, first = SCENARIOS[name]
    model = build(args, dtype)
    by_hand = kind == "planted" or (kind == "fused" and name not in BY_SWITCH)
    if by_hand and first:
        lora.fuse(model)
    model = wrap(model)
    if by_hand and not first:
        lora.fuse(model)
    said = [] if by_hand or kind == "peft" else by_switch(model)
    sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
    assert bool(sharded) is name.startswith("fsdp2"), name
    with fused_calls() as calls, wrong_scale() if kind == "planted" else contextlib.nullcontext():
        losses, norms, rows = steps(model)
    found = {"losses": losses, "norms": norms, "calls": len(calls), "report": str(lora.report(model)), "said": said}
    found |= {"weights": weights(model, name), "unfused": lora.unfuse(model)}
    with fused_calls() as calls, torch.no_grad():
        model(input_ids=rows)
    return {**found, "calls_unfused": len(calls)}


def clip(model):
    """Clip the gradients; their norm before."""
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(0.5)
    norm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.5)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def weights(model, name):
    """The trained adapter as numbers, gathered."""
    found = FullyShardedDataParallel.summon_full_params(model) if "fsdp1" in name else contextlib.nullcontext()
    with found, torch.no_grad():
        parameters = [p for key, p in sorted(model.named_parameters()) if "lora_" in key]
        whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in parameters]
        return torch.cat([p.float().flatten() for p in whole]).tolist()


def main():
    _, args = start()
    results = {}
    for name in args.only.split(","):
        results[name] = {kind: train(args, name, kind) for kind in ("peft", "fused", "planted")}
    finish(results, args)


if __name__ == "__main__":
    main()
