"""QLoRA steps as graphs in plain torch, on several processes, by the stand-in for graphs of a machine without a GPU.

    torchrun --nproc-per-node 2 tests/fsdp/graphs.py --dir FOLDER_OF_A_LLAMA --only fsdp2,ddp --out r.json

Each scenario trains twice from the same start, as it is and with graphs: losses, gradient norms and the adapter.
"""

import contextlib
import functools
import random

import torch
import torch.distributed as dist
from bitshard import fsdp, graphs, lora
from bitshard.graphs import enabled
from common import finish, start
from helpers.graphs import StandIn
from helpers.llama import TOKENS
from lora import MIXED, build, checkpointed, decoder, fsdp1, fsdp2
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

enabled.RECORDER = StandIn


def hybrid(model):
    """HSDP: replicated over two ranks, each sharded over the others."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return fsdp2(model, mesh=mesh)


def in_place(model):
    """The embedding and the head are units of their own, which are gathered without a copy."""
    for unit in (model.base_model.model.model.embed_tokens, model.base_model.model.lm_head):
        fully_shard(unit)
    model = fsdp2(model)
    assert fsdp.gather_in_place(model)
    return model


def inside_units(model):
    """The adapters only, by bitshard's function, behind units that have none."""
    for unit in decoder(model):
        fully_shard(unit)
    fully_shard(model)
    return model


def evaluated(model, step):
    """Evaluation every 5 steps, saving every 10, and what was saved loaded again."""
    found = 0.0
    if step % 5 == 4:
        model.eval()
        with torch.no_grad():
            ids = torch.arange(12).view(1, 12)
            found = model(input_ids=ids, labels=ids).loss.item()
        model.train()
    if step % 10 == 9:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        kept = get_model_state_dict(model, options=options)
        found += sum(value.float().sum().item() for key, value in kept.items() if "lora_" in key)
        set_model_state_dict(model, get_model_state_dict(model))
    return found


def dropped(model, step):
    """A loaded adapter with other values."""
    if step == 3:
        values = {key: value * 0.5 for key, value in get_model_state_dict(model).items() if "lora_A" in key}
        set_model_state_dict(model, values, options=StateDictOptions(strict=False))
    return 0.0


# name: (how it is wrapped, dtype, options of the loop)
SCENARIOS = {
    "alone": (lambda model: model, torch.float32, {}),
    "ddp": (DistributedDataParallel, torch.float32, {}),
    "ddp_accumulate": (DistributedDataParallel, torch.float32, {"accumulate": 3}),
    "fsdp2": (fsdp2, torch.float32, {}),
    "fsdp2_kept": (functools.partial(fsdp2, reshard_after_forward=False), torch.float32, {}),
    "fsdp2_freed": (functools.partial(fsdp2, reshard_after_forward=True), torch.float32, {}),
    "fsdp2_mixed": (functools.partial(fsdp2, mp_policy=MIXED), torch.float32, {}),
    "fsdp2_checkpointed": (checkpointed, torch.float32, {}),
    "fsdp2_evaluated": (fsdp2, torch.float32, {"between": evaluated, "steps": 10}),
    "fsdp2_loaded": (fsdp2, torch.float32, {"between": dropped}),
    "fsdp2_accumulate": (fsdp2, torch.float32, {"accumulate": 3}),
    "fsdp2_own_lengths": (checkpointed, torch.float32, {"lengths": (6, 7, 8), "steps": 24}),
    "fsdp2_in_place": (in_place, torch.float32, {}),
    "hsdp": (hybrid, torch.float32, {}),
    "fsdp2_offload": (functools.partial(fsdp2, offload_policy=CPUOffloadPolicy(pin_memory=False)), torch.float32, {}),
    "fsdp1": (fsdp1, torch.float32, {}),
}
SHARDED = [name for name in SCENARIOS if name.startswith(("fsdp2", "hsdp"))]


def train(args, name, captured):
    wrap, dtype, options = SCENARIOS[name]
    model = build(args, dtype)
    model.config.use_cache = False
    lora.fuse(model)
    if captured and name != "fsdp2_evaluated":
        graphs.enable(model)  # before it is wrapped, and behind
    model = wrap(model)
    if captured:
        graphs.enable(model)
    assert any(isinstance(p, DTensor) for p in model.parameters()) is (name in SHARDED), name
    found = {"steps": loop(model, **options), "weights": weights(model)}
    if captured:
        said = graphs.report(model)
        found |= {"captures": said.captures, "replays": said.replays, "eager": said.eager, "graphs": said.graphs}
        graphs.disable(model)
    return found


def loop(model, steps=5, accumulate=1, lengths=(12,), between=None):
    """[loss, gradient norm, what `between` found] of each step; ranks have batches of their own."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    choice, found = random.Random(dist.get_rank()), []
    for step in range(steps):
        for micro in range(accumulate):
            last = micro == accumulate - 1
            rows = torch.randint(0, TOKENS, (2, choice.choice(lengths)), generator=generator)
            with synchronized(model, last):
                loss = model(input_ids=rows, labels=rows, attention_mask=torch.ones_like(rows)).loss
                (loss / accumulate).backward()
        norm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.5)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        optimizer.zero_grad()
        found.append([loss.item(), norm.item(), between(model, step) if between else 0.0])
    return found


@contextlib.contextmanager
def synchronized(model, last):
    """As accelerate's `no_sync` does for all steps of an accumulation but the last."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
        yield
    elif isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
    else:
        yield


def weights(model):
    """The trained adapter as numbers, gathered."""
    with torch.no_grad():
        found = [p for key, p in sorted(model.named_parameters()) if p.requires_grad]
        return torch.cat([(p.full_tensor() if isinstance(p, DTensor) else p).float().flatten() for p in found]).tolist()


def main():
    _, args = start()
    results = {}
    for name in args.only.split(","):
        results[name] = {kind: train(args, name, kind == "graphs") for kind in ("plain", "graphs")}
    finish(results, args)


if __name__ == "__main__":
    main()
