"""One process: the models on disk, whole and faulty, and what the sharded ones are compared with.

python tests/fsdp/parts/alone.py --dir DIR --out DIR/alone
"""

import functools
import json

import exact
import faults
import qlora
import torch
import torch.distributed as dist
from shared import CELLS, load, logits, make_dense, name_of, run, start


def make(folder):
    make_dense(f"{folder}/dense")
    for cell in CELLS:
        model = load(folder, *cell, device_map="cpu")
        model.save_pretrained(f"{folder}/{name_of(*cell)}")
        expected = {"state_dict": dict(model.state_dict()), "logits": logits(model)}
        torch.save(expected, f"{folder}/{name_of(*cell)}.pt")
    faults.make(folder)


def losses(folder):
    """Of Trainer and of a loop, and the state dict after merging."""
    ways = {"trainer": functools.partial(qlora.trainer_losses, folder=folder), "loop": qlora.loop_losses}
    found = {"beside": qlora.loop_losses(qlora.beside(load(folder, device_map="cpu")))}
    found |= {name: train(qlora.with_adapters(load(folder, device_map="cpu"))) for name, train in ways.items()}
    with open(f"{folder}/losses.json", "w") as file:
        json.dump(found, file)
    return found


def merged(folder):
    model = qlora.with_adapters(load(folder, device_map="cpu"), init_lora_weights=False).merge_and_unload()
    torch.save(dict(model.state_dict()), f"{folder}/merged.pt")


def group(folder):
    """A process group of one, for the exact cells."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


if __name__ == "__main__":
    run({"make": make, "losses": losses, "merged": merged, "group": group, **exact.CHECKS}, start())
