"""The user's own job, one process of it: benchmarks/job.py starts this by `accelerate launch` and says what to do.

    accelerate launch ... benchmarks/job_worker.py '{"case": "plain", "parts": ["512"], ...}'

`trainer`, `sft` and `loop` are what users write, without a line for bitshard: PYTHONPATH and variables of the
environment decide which package answers to `import bitsandbytes`, and what it does. Every part makes its own model.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from job_clock import Clock, Watch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from random_llama import END, FIRST, LINEARS, build, device, forget, tokenizer
from transformers import Trainer, TrainingArguments, default_data_collator, set_seed

CUDA = torch.cuda.is_available()
WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
DTYPE = torch.bfloat16 if CUDA else torch.float32
ORIGINALS = ("upstream", "bf16")  # cases in which bitshard may not be imported
SPREAD = 0.8  # deviation of the logarithm of a text's length


# ---- what a user writes ----


def settings(options, steps: int) -> dict:
    """Of TrainingArguments and SFTConfig alike."""
    return {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": steps,
        "per_device_train_batch_size": options.batch,
        "learning_rate": 1e-4,
        "bf16": CUDA,  # Trainer refuses it without a GPU
        "optim": "adamw_torch_fused",
        "max_grad_norm": 1.0,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "logging_steps": 1 if options.losses else 10,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **options.arguments,
    }


def lora(options) -> LoraConfig:
    return LoraConfig(r=16, lora_alpha=32, lora_dropout=options.dropout, target_modules=LINEARS, task_type="CAUSAL_LM")


def trainer(options, part: str, steps: int) -> Trainer:
    """QLoRA by peft and Trainer; batches of one length, with a mask, as collators give it."""
    args = TrainingArguments(**settings(options, steps))  # before the model: gives each process its own GPU
    model = build(options.shape, options.case != "bf16", DTYPE)
    if options.case != "bf16" and options.prepare == "kbit":
        model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    set_seed(0)
    model = get_peft_model(model, lora(options), autocast_adapter_dtype=options.adapters == "float32")
    rows = random_rows(options, [int(part.split()[0])] * (steps * options.batch * WORLD))
    rows = [{"input_ids": row, "attention_mask": [1] * len(row), "labels": row} for row in rows]
    return Trainer(model, args, train_dataset=rows, data_collator=default_data_collator)


def sft(options, part: str, steps: int) -> Trainer:
    """The same by trl, whose collator pads or packs; the parts are those of job.SFT_PARTS."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    kind, _, rounded = part.partition(" ")
    own = {"max_length": options.longest, "packing": kind == "packed"}
    if kind in ("packed", "full"):  # a row of `options.longest` tokens
        own["per_device_train_batch_size"] = 1
    if rounded:
        own["pad_to_multiple_of"] = options.longest if own["packing"] else options.multiple
    args = SFTConfig(**{**settings(options, steps), **own})
    rows = steps * args.per_device_train_batch_size * WORLD
    return SFTTrainer(
        model=build(options.shape, options.case != "bf16", DTYPE),
        args=args,
        train_dataset=Dataset.from_list(
            [{"input_ids": row} for row in random_rows(options, lengths(options, kind, rows))]
        ),
        processing_class=tokenizer(),
        peft_config=lora(options),
    )


def loop(options, part: str, clock: Clock) -> SimpleNamespace:
    """Without a Trainer: everything in bf16, FSDP2 by hand, no clipping."""
    start_without_accelerate()
    model = build(options.shape, options.case != "bf16", DTYPE).requires_grad_(False)
    set_seed(0)
    model = get_peft_model(model, lora(options), autocast_adapter_dtype=False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    if WORLD > 1:
        shard(model)
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    tokens = int(part.split()[0])
    rows = random_rows(options, [tokens] * (clock.total * options.batch * WORLD))
    rows = torch.tensor(rows).view(clock.total, WORLD, options.batch, tokens)[:, RANK].to(device())
    clock.begin()
    for step, ids in enumerate(rows, 1):
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
        loss.backward()
        if clock.splits(step):
            clock.part_begins()
        optimizer.step()
        clock.part_ends("optimizer_ms")
        optimizer.zero_grad()
        clock.logged()
        clock.end_of_step(step, loss)
    return SimpleNamespace(model=model, counts=[tokens * options.batch] * clock.total)


def start_without_accelerate() -> None:
    if CUDA:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if WORLD > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if CUDA else "gloo", device_id=device() if CUDA else None)


def shard(model) -> None:
    """The units that accelerate makes."""
    from torch.distributed.fsdp import fully_shard

    base = model.get_base_model()
    for layer in base.model.layers:
        fully_shard(layer)
    fully_shard(base.model.embed_tokens)
    fully_shard([base.model.norm, base.lm_head], reshard_after_forward=False)
    fully_shard(model)


# ---- data ----


def random_rows(options, sizes: list[int]) -> list[list[int]]:
    """Rows of random tokens, of these lengths; each ends as a text does."""
    generator = torch.Generator().manual_seed(2)
    size = options.shape["vocabulary"]
    ids = torch.randint(FIRST, size, (sum(sizes),), generator=generator).tolist()
    rows, begin = [], 0
    for length in sizes:
        rows.append([*ids[begin : begin + length - 1], END])
        begin += length
    return rows


def lengths(options, kind: str, rows: int) -> list[int]:
    """Of texts: log-normal around `options.typical` and cut off at both ends, of all one length, or the longest."""
    if kind == "full":
        return [options.longest] * rows
    draw = random.Random(3)
    texts = rows if kind != "packed" else 2 * rows * options.longest // options.typical  # enough to fill the rows
    found = [int(options.typical * draw.lognormvariate(0, SPREAD)) for _ in range(texts)]
    found = [min(max(length, options.shortest), options.longest) for length in found]
    return [round(sum(found) / texts)] * texts if kind == "fixed" else found


class Counted:
    """A collator that remembers how many tokens its batches had, padding not counted, and how many with it."""

    def __init__(self, collate: Callable):
        self.collate, self.counts, self.positions = collate, [], []

    def __call__(self, rows):
        batch = self.collate(rows)
        mask = batch.get("attention_mask")
        self.positions.append(batch["input_ids"].numel())
        self.counts.append(self.positions[-1] if mask is None else int(mask.sum()))
        return batch


# ---- one part ----


def run(options, part: str) -> dict:
    """Train, and what is written about it."""
    left = torch.cuda.memory_allocated() / 2**30 if CUDA else 0.0
    clock = Clock(options.warm, options.windows, options.steps, options.profile, options.losses)
    begun = time.time()
    if options.job == "loop":
        job = loop(options, part, clock)
        model, counts = job.model, job.counts
    else:
        job = {"trainer": trainer, "sft": sft}[options.job](options, part, clock.total)
        counted = job.data_collator = Counted(job.data_collator)
        job.add_callback(Watch(clock, job))
        job.train()
        model, counts = job.model, counted.counts
    found = clock.result(of_all_ranks(counts[: clock.total]))
    if options.job != "loop":
        found["filled"] = sum(counted.counts) / sum(counted.positions)
    found.update(left_gib=left, seconds=time.time() - begun, **described(options, model))
    found["share"] = share(model)
    if options.gpus > 1 and found["share"] > 0.75:
        raise RuntimeError(f"not sharded: this rank keeps {found['share']:.2f} of the parameters' elements")
    if options.job != "loop":
        job.accelerator.free_memory()
    return found


def of_all_ranks(counts: list[int]) -> list[int]:
    if not dist.is_initialized() or WORLD == 1:
        return counts
    total = torch.tensor(counts, device=device())
    dist.all_reduce(total)
    return total.tolist()


def share(model) -> float:
    """Which part of the parameters' elements this process holds."""
    pairs = [(p.numel(), p.to_local().numel() if hasattr(p, "to_local") else p.numel()) for p in model.parameters()]
    return sum(own for _, own in pairs) / sum(whole for whole, _ in pairs)


def described(options, model) -> dict:
    """What bitshard says of the model, where it is in use."""
    found = {"fused": "", "graphs": ""}
    if options.case in ORIGINALS:
        return found
    import bitshard.graphs
    import bitshard.lora

    found["fused"] = str(bitshard.lora.report(model))
    try:
        report = bitshard.graphs.report(model)
    except (AttributeError, ValueError):  # it has no such function yet, or graphs are not on
        return found
    return {**found, "graphs": str(report), "captures": report.captures, "eager": dict(report.eager)}


# ---- the process ----


def package(options) -> dict:
    """Versions; RuntimeError if another package answers than the case is about."""
    import accelerate
    import peft
    import transformers

    found = {module.__name__: module.__version__ for module in (torch, transformers, accelerate, peft)}
    found["python"] = sys.version.split()[0]
    found["device"] = torch.cuda.get_device_name() if CUDA else "CPU"
    driver = Path("/proc/driver/nvidia/version")
    if driver.exists():
        found["driver"] = driver.read_text().partition("  ")[2].split()[0]
    if options.job == "sft":
        import trl

        found["trl"] = trl.__version__
    if options.case != "bf16":
        import bitsandbytes

        found["bitsandbytes"] = bitsandbytes.__version__
        if ("bitshard" in bitsandbytes.__version__) == (options.case == "upstream"):
            raise RuntimeError(f"{options.case}: import bitsandbytes is {bitsandbytes.__version__}")
    return found


def write(options, record: dict) -> None:
    """A line of the file of records: of rank 0, and errors of any rank."""
    if RANK == 0 or "error" in record:
        known = {name: getattr(options, name) for name in ("case", "job", "gpus", "round")}
        with Path(options.record).open("a") as file:
            file.write(json.dumps({**known, **record}) + "\n")


def main() -> None:
    options = SimpleNamespace(**json.loads(sys.argv[1]))
    if not CUDA:
        torch.set_num_threads(1)
    part = ""
    try:
        write(options, {"versions": package(options), "start_s": time.time() - options.started})
        for part in options.parts:
            write(options, {"part": part, **run(options, part)})
            forget()
        if options.case == "upstream" and "bitshard" in sys.modules:
            raise RuntimeError("bitshard was imported beside the original bitsandbytes")
    except Exception as error:
        traceback.print_exc()
        write(options, {"part": part, "error": f"{type(error).__name__}: {error}"[:500]})
        sys.stderr.flush()
        os._exit(1)  # the other ranks may wait in a collective: the launcher ends them
    write(options, {"done": True})


if __name__ == "__main__":
    main()
