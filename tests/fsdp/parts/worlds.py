"""A model on many processes: loaded in parts, exact, trained, saved, resumed by another number; one that is killed.

    python tests/fsdp/parts/worlds.py --dir DIR --out DIR/alone                   # the files, and one process's losses
    torchrun --nproc-per-node 8 tests/fsdp/parts/worlds.py --dir DIR --out DIR/8

A rank's folder and results are those of shared.py. FSDP2 is transformers' (`distributed_config`), not accelerate's,
which would be DDP on a CPU; that each rank has its part only is asserted.
"""

import json
import os
import signal
import time
from pathlib import Path

import native
import qlora
import torch
import torch.distributed as dist
from bitshard import fsdp
from shared import (
    TOKENS,
    VOCABULARY,
    differing,
    linears,
    load,
    logits,
    make_dense,
    name_of,
    rank,
    run,
    same_bytes,
    start,
    world,
    wrong_bytes,
)
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

CELL = ("uint8", True, "fp32")
ROWS, STEPS = 16, 3  # rows of a batch of all ranks; steps before and after a checkpoint
ADAPTERS = StateDictOptions(ignore_frozen_params=True)


def batch():
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(3, VOCABULARY, (ROWS, 24), generator=generator)
    return rows.chunk(world())[rank()]


class Training:
    """A model with adapters and its optimizer; all ranks have the same batch in parts."""

    def __init__(self, model):
        self.model = qlora.with_adapters(model).train()
        if world() > 1:
            fsdp.shard_adapters(self.model)
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(self.trained.values(), lr=1e-2)

    def losses(self, steps=STEPS):
        """Of all rows, step by step."""
        rows, found = batch(), []
        for _ in range(steps):
            loss = self.model(input_ids=rows, labels=rows).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            mean = loss.detach().clone()
            if world() > 1:
                dist.all_reduce(mean)
            found.append(mean.item() / world())
        return found

    def state(self):
        """Adapters and the optimizer's states, as shards."""
        return {
            "adapters": {name: p.data for name, p in self.trained.items()},
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=ADAPTERS),
        }


def make(folder):
    """The files, what one process sees, and its losses."""
    make_dense(f"{folder}/dense")
    model = load(folder, *CELL, device_map="cpu")
    model.save_pretrained(f"{folder}/{name_of(*CELL)}")
    torch.save({"state_dict": dict(model.state_dict()), "logits": logits(model)}, f"{folder}/{name_of(*CELL)}.pt")
    losses = Training(model).losses(2 * STEPS)
    Path(folder, "losses.json").write_text(json.dumps(losses))
    return losses


def expected(folder):
    return torch.load(f"{folder}/{name_of(*CELL)}.pt")


def close(found, good):
    """Losses of one process, but for the order of sums."""
    gap = qlora.gap(found, good)
    assert gap <= qlora.BOUND, (gap, found, good)
    return gap


def check_exact(folder):
    """Each rank has a part; in forward and backward each layer sees the bytes and scales of one process."""
    good = expected(folder)["state_dict"]
    model = native.sharded(folder, *CELL, packed=True)
    native.check_share(model)
    wrong, seen = [0, 0], []

    def look(name):
        def hook(layer, args, output):
            seen.append(name)
            wrong[0] += wrong_bytes(layer.weight, good[f"{name}.weight"])
            wrong[1] += wrong_bytes(layer.quant_state.absmax, good[f"{name}.weight.absmax"])

        return hook

    for name, layer in linears(model).items():
        layer.register_forward_hook(look(name))
    model.enable_input_require_grads()
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    assert wrong == [0, 0] and sorted(seen) == sorted(linears(model)), (wrong, seen)
    full = fsdp.full_state_dict(model)
    assert rank() or not differing(full, good), differing(full, good)
    share = fsdp.measure(model)
    return {"fsdp": share.fsdp, "ranks": share.ranks, "own": share.own_packed, "packed": share.packed}


def check_planted(folder):
    """A changed byte of the last rank is seen by all."""
    native.check_planted(folder)


def check_trained(folder):
    """Losses of one process; a checkpoint in between; the base's bytes are untouched by training."""
    good = json.loads(Path(folder, "losses.json").read_text())
    training = Training(native.sharded(folder, *CELL, packed=True))
    before = training.losses()
    checkpoint.save(training.state(), checkpoint_id=f"{folder}/checkpoint-{world()}")
    gap = close(before + training.losses(), good)
    native.check_share(training.model)
    assert qlora.apart(training.model) <= 1e-6
    return {"gap": gap}


def check_resumed(folder):
    """From the checkpoint of every number of ranks that is there: the losses of the run that went through."""
    good = json.loads(Path(folder, "losses.json").read_text())[STEPS:]
    gaps = {}
    for saved in sorted(Path(folder).glob("checkpoint-*")):
        training = Training(native.sharded(folder, *CELL, packed=True))
        state = training.state()
        fsdp.load_checkpoint(state, str(saved))
        for name, value in state["adapters"].items():
            training.trained[name].data.copy_(value)
        set_optimizer_state_dict(training.model, training.optimizer, state["optimizer"], options=ADAPTERS)
        gaps[saved.name] = close(training.losses(), good)
    return gaps


def check_saved(folder):
    """The files of `save_pretrained` are those of one process, and one process loads them."""
    model = native.sharded(folder, *CELL, packed=True)
    before = logits(model)
    target = f"{folder}/saved-{world()}"
    fsdp.save_pretrained(model, target)
    dist.barrier()
    if rank() == 0:
        assert same_bytes(logits(native.load_from(target, CELL[2], device_map="cpu")), before)
    dist.barrier()


def killed(args):
    """The last rank but one is killed by the system in its second step; what the others see goes to their results."""
    training = Training(native.sharded(args.dir, *CELL, packed=True))
    training.losses(1)
    dist.barrier()
    if rank() == world() - 2:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        training.losses(50)
        found = "no error"
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    Path(f"{args.out}.{rank()}").write_text(json.dumps({"error": found, "seconds": time.monotonic() - began}))
    os._exit(1)


CHECKS = {
    "exact": check_exact,
    "planted": check_planted,
    "trained": check_trained,
    "resumed": check_resumed,
    "saved": check_saved,
}

if __name__ == "__main__":
    args = start()
    if args.only == "killed":
        killed(args)
    run(CHECKS if "RANK" in os.environ else {"make": make}, args)
