"""Optimizers of bitsandbytes under DeepSpeed's ZeRO on two processes, given to it as the caller's own.

For each case the losses of one process, those of both under ZeRO, those behind a checkpoint in the same engine and in a
new one, which has read the checkpoint with the optimizer's state or without.
"""

import contextlib
import gc

import bitsandbytes as bnb
import torch
from common import run

# name: stage, optimizer, dtype of the engine, whether state is offloaded to the CPU
CASES = {
    "zero1_32bit": (1, "AdamW32bit", torch.float32, False),
    "zero1_8bit": (1, "AdamW8bit", torch.float32, False),
    "zero1_lion_bf16": (1, "Lion8bit", torch.bfloat16, False),
    "zero2_32bit": (2, "AdamW32bit", torch.float32, False),
    "zero2_8bit": (2, "AdamW8bit", torch.float32, False),
    "zero2_8bit_bf16": (2, "AdamW8bit", torch.bfloat16, False),
    "zero2_ademamix": (2, "AdEMAMix8bit", torch.float32, False),
    "zero2_paged": (2, "PagedAdamW8bit", torch.float32, False),
    "zero2_offload": (2, "AdamW8bit", torch.float32, True),
    "zero3_8bit": (3, "AdamW8bit", torch.float32, False),
}
ROWS, STEPS = 8, 12


def make(name):
    """A model of odd sizes, and its optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 301), torch.nn.GELU(), torch.nn.Linear(301, 64))
    small = {"min_8bit_size": 1} if "8bit" in name else {}
    return model, getattr(bnb.optim, name)(model.parameters(), lr=1e-3, **small)


def batch(step, rank, world, dtype):
    """This rank's rows of inputs and of what they are to become."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 64, generator=generator)
    return x[rank::world].to(dtype), x.roll(1, 1)[rank::world].to(dtype)


def alone(name):
    model, optimizer = make(name)
    losses = []
    for step in range(STEPS):
        x, y = batch(step, 0, 1, torch.float32)
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def engine(stage, name, dtype, offload):
    import deepspeed

    model, optimizer = make(name)
    zero = {"stage": stage, **({"offload_optimizer": {"device": "cpu"}} if offload else {})}
    config = {"train_micro_batch_size_per_gpu": ROWS // 2, "zero_allow_untested_optimizer": True}
    config |= {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
    config |= {"bf16": {"enabled": dtype == torch.bfloat16}}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(made, dtype, steps):
    """Losses, the mean of both ranks."""
    losses = []
    for step in steps:
        x, y = batch(step, torch.distributed.get_rank(), 2, dtype)
        loss = (made(x) - y).square().mean()
        made.backward(loss)
        made.step()
        mean = loss.detach().float().clone()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / 2)
    return losses


def case(folder, stage, name, dtype, offload):
    first, rest = range(STEPS // 2), range(STEPS // 2, STEPS)
    made = engine(stage, name, dtype, offload)
    found = {"alone": alone(name), "before": train(made, dtype, first)}
    made.save_checkpoint(str(folder))
    found["after"] = train(made, dtype, rest)
    for key, with_state in (("resumed", True), ("without_state", False)):
        again = engine(stage, name, dtype, offload)
        again.load_checkpoint(str(folder), load_optimizer_states=with_state)
        found[key] = train(again, dtype, rest)
    return found


def main(parser):
    import deepspeed

    args = parser.parse_args()
    deepspeed.init_distributed("gloo")
    found = {}
    for name, settings in CASES.items():
        with contextlib.redirect_stdout(None):
            found[name] = case(args.out / name, *settings)
        gc.collect()
    return args, found


run(main)
