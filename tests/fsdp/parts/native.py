"""Models that transformers shards before it loads them (`distributed_config=`): exact, trained, merged, faulty.

    torchrun --nproc-per-node 2 tests/fsdp/cpu_fsdp.py tests/fsdp/parts/native.py --dir DIR --out DIR/native

DIR is that of alone.py. The shim lets Trainer know of the processes on a machine without GPUs.
"""

import functools
import json

import exact
import faults
import qlora
import torch
import torch.distributed as dist
from bitshard import fsdp, lora
from safetensors.torch import load_file
from shared import (
    EVERY,
    HALF,
    LAYERS,
    differing,
    linears,
    load,
    load_from,
    logged,
    logits,
    name_of,
    rank,
    run,
    same_bytes,
    start,
    world,
)
from transformers.distributed import DistributedConfig


def sizes():
    """Four processes are two replicas of two shards."""
    return {"fsdp_size": 2, "dp_replicate_size": 2} if world() == 4 else {"fsdp_size": world()}


def sharded(folder, *cell, packed=False, **options):
    return load(folder, *cell, packed=packed, distributed_config=DistributedConfig(**sizes()), **options)


def check_model(cell, packed, folder):
    """Nothing missing, an Nth on each rank, and the logits and state dict of the model that was loaded whole."""
    expected = torch.load(f"{folder}/{name_of(*cell)}.pt")
    model, info = sharded(folder, *cell, packed=packed, output_loading_info=True)
    assert not any(info.values()), info
    check_share(model)
    assert same_bytes(logits(model), expected["logits"])
    full = fsdp.full_state_dict(model)
    assert rank() or not differing(full, expected["state_dict"]), differing(full, expected["state_dict"])


def check_share(model):
    share, parts = fsdp.measure(model), sizes()["fsdp_size"]
    assert share.fsdp == "FSDP2" and share.weights == LAYERS, share
    for layer in linears(model).values():
        assert layer.weight._local_tensor.size(0) <= -(-layer.weight.size(0) // parts)
    assert share.own_packed <= -(-share.packed // parts) + 4 * LAYERS, share
    assert share.own_scales <= share.scales / parts + 4 * LAYERS, share


def check_saved(cell, packed, folder):
    """`save_pretrained` of the sharded model writes the checkpoint that the whole one writes, and that one loads."""
    target = f"{folder}/saved{world()}-{name_of(*cell)}-{packed}"
    model = sharded(folder, *cell, packed=packed)
    before = logits(model)
    model.save_pretrained(
        target, save_original_format=not packed
    )  # transformers cannot undo its reading of packed files
    dist.barrier()
    good = load_file(f"{folder}/{name_of(*cell)}/model.safetensors")
    found = load_file(f"{target}/model.safetensors")
    assert not differing(found, good), differing(found, good)
    assert found.keys() == good.keys()
    for key in good:
        if "quant_state." in key:
            assert json.loads(bytes(found[key])) == json.loads(bytes(good[key])), key
    assert same_bytes(logits(load_from(target, cell[2], device_map="cpu")), before)


def check_planted(folder):
    """One changed byte on the last rank: logits on every rank and one key of the state dict differ."""
    cell = ("uint8", True, "fp32")
    expected = torch.load(f"{folder}/{name_of(*cell)}.pt")
    model = sharded(folder, *cell)
    name, layer = list(linears(model).items())[4]
    if rank() == world() - 1:
        layer.weight._local_tensor.plain().view(-1).view(torch.uint8)[7] ^= 0x55
    assert not same_bytes(logits(model), expected["logits"])
    full = fsdp.full_state_dict(model)
    wrong = differing(full, expected["state_dict"]) if rank() == 0 else [f"{name}.weight"]
    assert wrong == [f"{name}.weight"], wrong


def expected_losses(folder, name):
    with open(f"{folder}/losses.json") as file:
        return json.load(file)[name]


def train(folder, name, shard, train_function, adapt=qlora.with_adapters, fuse=False):
    """Losses are those of one process, and the adapters of all ranks one."""
    model = adapt(sharded(folder))
    if shard:
        assert fsdp.shard_adapters(model) == 2 * LAYERS  # two matrices of each layer
    if fuse:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
        report = lora.fuse(model)
        assert len(report.fused) == LAYERS and not report.left, str(report)
    with logged("bitshard") as messages:
        losses = train_function(model)
    gap, apart = qlora.gap(losses, expected_losses(folder, name)), qlora.apart(model)
    assert gap <= qlora.BOUND and apart <= 1e-6, (gap, apart, losses)
    assert not [message for message in messages if "shard_adapters" in message], messages
    check_share(model)
    return {"gap": gap, "apart": apart}


def check_trainer(shard, folder):
    return train(folder, "trainer", shard, functools.partial(qlora.trainer_losses, folder=folder))


def check_loop(folder):
    return train(folder, "loop", True, qlora.loop_losses)


def check_loop_fused(folder):
    """LoRA layers that are fused behind `shard_adapters`, with gradient checkpointing."""
    return train(folder, "loop", True, qlora.loop_losses, fuse=True)


def check_loop_beside(folder):
    """Adapters that are not peft's, which takes a mesh of replicas for tensor parallelism."""
    return train(folder, "beside", True, qlora.loop_losses, qlora.beside)


def check_loop_unsharded(folder):
    """Without `shard_adapters` every rank trains adapters of its own, and a warning says so."""
    model = qlora.with_adapters(sharded(folder))
    with logged("bitshard") as messages:
        losses = qlora.loop_losses(model)
    gap, apart = qlora.gap(losses, expected_losses(folder, "loop")), qlora.apart(model)
    assert gap > 100 * qlora.BOUND and apart > 1e-2, (gap, apart)  # else there is nothing to warn of
    warnings = [message for message in messages if "shard_adapters" in message]
    assert len(warnings) == 1, messages
    return {"gap": gap, "apart": apart, "warning": warnings[0]}


@torch.no_grad()
def check_merge(shard, folder):
    """merge_and_unload gives the bytes of one process and stays sharded."""
    model = qlora.with_adapters(sharded(folder), init_lora_weights=False)
    for parameter in model.parameters():
        if parameter.requires_grad:  # rank 0's, as in the one process
            dist.broadcast(parameter.data, 0)
    if shard:
        fsdp.shard_adapters(model)
    logits(model)
    merged = model.merge_and_unload()
    check_share(merged)
    full, expected = fsdp.full_state_dict(merged), torch.load(f"{folder}/merged.pt")
    assert rank() or not differing(full, expected), differing(full, expected)


def check_fault(name, folder):
    """All ranks have the faulty files: each ends with an error that names the fault, and none waits for another."""

    def attempt(options):
        return load_from(faults.folder_of(folder, name), distributed_config=DistributedConfig(**sizes()), **options)

    return faults.must_fail(name, attempt)


def models(wanted):
    return {
        f"model_{name_of(*cell)}_{'packed' if packed else 'dense'}": functools.partial(check_model, cell, packed)
        for cell, packed in wanted
    }


def checks():
    """Everything on two ranks, a part on three, little on two replicas."""
    if world() == 4:
        cells = [("uint8", True, "bf16"), ("bf16", False, "fp32"), ("fp32", True, "fp32")]
        return models((cell, packed) for cell, packed in EVERY if cell in cells) | {"loop_beside": check_loop_beside}
    saved = [(("uint8", True, "bf16"), False)]
    wrong = ["rows_missing", "no_absmax"]  # the last of three ranks reads as many rows as it expects
    if world() < 3:
        saved += [(("uint8", True, "bf16"), True), (("bf16", False, "fp32"), True), (("fp32", True, "fp32"), False)]
        wrong = list(faults.FAULTS)
    return {
        **exact.CHECKS,
        **models(EVERY if world() < 3 else HALF),
        **{
            f"saved_{cell[0]}_{'packed' if packed else 'dense'}": functools.partial(check_saved, cell, packed)
            for cell, packed in saved
        },
        "planted": check_planted,
        "loop_beside": check_loop_beside,
        "trainer_plain": functools.partial(check_trainer, False),
        "trainer_sharded": functools.partial(check_trainer, True),
        "loop_sharded": check_loop,
        "loop_fused": check_loop_fused,
        "loop_unsharded": check_loop_unsharded,
        "merge_plain": functools.partial(check_merge, False),
        "merge_sharded": functools.partial(check_merge, True),
        **{f"fault_{name}": functools.partial(check_fault, name) for name in wrong},
        "after_faults": functools.partial(check_model, ("uint8", True, "fp32"), False),
    }


if __name__ == "__main__":
    arguments = start()
    run(checks(), arguments)
