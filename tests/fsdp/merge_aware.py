"""Merge-aware QLoRA alone, under FSDP2 and FSDP1: the same training, and files with the bytes of the forward.

    torchrun --nproc-per-node 2 tests/fsdp/merge_aware.py --dir FOLDER_OF_A_LLAMA --only fsdp2,fsdp1 --out r.json

Ranks share a batch, so that their mean loss is that of one process on the whole batch. In the end each scenario is
evaluated and merged: by `save_pretrained(merge=True)`, and where nothing forbids it in place.
"""

import copy
import functools
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from bitshard import fsdp
from bitshard import lora as engine
from bitshard.functions import merge_again
from common import finish, start
from helpers import moe
from helpers.bytes import same_bytes
from lora import MIXED, as_trainer_wraps, build, checkpointed, decoder, fsdp1, fsdp2, steps, weights
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard

# name: (how it is wrapped, whether `merge_aware` comes before the wrapping, start_step); after a space the format
SCENARIOS = {
    "alone": (lambda model: model, True, 0),
    "fsdp2": (fsdp2, True, 0),
    "fsdp2_later": (fsdp2, False, 1),
    "fsdp2_checkpointed": (checkpointed, True, 0),
    "fsdp2_mixed": (functools.partial(fsdp2, mp_policy=MIXED), True, 0),
    "fsdp1": (fsdp1, True, 0),
    "fsdp1_trainer": (functools.partial(as_trainer_wraps, orig=True), True, 0),
}


def differing(made, folder):
    """How many of the weights `made` have packed bytes that no layer in the files has; and how many these are."""
    files = {}
    for file in Path(folder).glob("*.safetensors"):
        files |= load_file(file)
    packed = {
        name: tensor.view(torch.uint8).flatten() for name, tensor in files.items() if name.endswith("proj.weight")
    }
    found = [codes.view(torch.uint8).flatten() for codes, _ in made]
    return sum(not any(torch.equal(one, other) for other in packed.values()) for one in found), len(packed)


def stacks_merged(model, folder):
    """A merge of an experts model under FSDP2 beside that of one process: whether all is the same, and counts."""
    alone = copy.deepcopy(model)
    for unit in decoder(model):
        fully_shard(unit)
    fully_shard(model)
    loss, wanted = (each(input_ids=moe.TOKENS, labels=moe.TOKENS).loss for each in (model, alone))
    loss.backward(), wanted.backward()
    gradients = zip(model.parameters(), alone.parameters(), strict=True)
    found = {"same_loss": torch.equal(loss, wanted)}
    found["gradients"] = all(
        torch.allclose(a.grad.full_tensor(), b.grad, rtol=1e-4, atol=1e-6) for a, b in gradients if b.requires_grad
    )
    expected, model, alone = moe.logits(alone.eval()), model.eval(), alone.eval()
    fsdp.save_pretrained(model, folder, merge=True)
    model.merge_adapter()
    found["same_logits"] = torch.equal(moe.logits(model), expected)
    files = {key: tensor for file in Path(folder).glob("*.safetensors") for key, tensor in load_file(file).items()}
    entries = {key: one for key, one in alone.merge_and_unload().state_dict().items() if "experts." in key}
    differing = sum(not same_bytes(files[key], one) for key, one in entries.items() if "quant_state." not in key)
    return {**found, "differing": differing, "layers": sum(key.endswith("_proj") for key in entries)}


def run_stacks(name):
    _, family, quant_type = name.split()
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    moe.blocks_fit(family, folder[0])  # on rank 0 only
    dist.barrier()
    model = moe.adapted_4bit(folder[0], quant_type)
    engine.merge_aware(model)
    return stacks_merged(model.train(), f"{folder[0]}/merged")


def run(args, name):
    if name.startswith("experts"):
        return run_stacks(name)
    scenario, _, quant_type = name.partition(" ")
    wrap, first, start_step = SCENARIOS[scenario]
    model = build(args, quant_type=quant_type or "nf4")
    if first:
        engine.merge_aware(model, start_step)
    model = wrap(model)
    if not first:
        engine.merge_aware(model, start_step)
    try:
        losses, norms, rows = steps(model)
    except ValueError as error:
        return {"refused": str(error)}
    made, call = [], merge_again.merge_4bit
    merge_again.merge_4bit = lambda *given: made.append(call(*given)) or made[-1]
    with torch.no_grad():
        logits = model.eval()(input_ids=rows).logits
    merge_again.merge_4bit = call
    folder = [tempfile.mkdtemp() + "/merged"]
    dist.broadcast_object_list(folder)
    inner = model.module if name.startswith("fsdp1") else model
    fsdp.save_pretrained(model, folder[0], merge=True)
    found = {"losses": losses, "norms": norms, "weights": weights(model, name)}
    found["differing"], found["layers"] = differing(made, folder[0])
    if not name.startswith("fsdp1"):
        inner.merge_adapter()
        with torch.no_grad():
            found["same_logits"] = torch.equal(model(input_ids=rows).logits, logits)
    return found


def main():
    _, args = start()
    finish({name: run(args, name) for name in args.only.split(",")}, args)


if __name__ == "__main__":
    main()
