"""Training jobs of many kinds, each as it is and as graphs; benchmarks/graphs_check.py launches this and compares.

    accelerate launch ... benchmarks/graphs_jobs.py '{"jobs": ["trainer", "sft"], "record": FILE, ...}'

Each job is what a user writes. It runs three times from the same start: twice as it is, to know how far that is apart,
and once behind `bitshard.graphs.enable(trainer.model)`. Rows repeat few tokens, so that each batch has a loss of its
own, and graphs that see another batch than they should are found.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import bitshard.graphs
import bitshard.lora
import torch
import torch.distributed as dist
from bitshard.graphs import masks
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from random_llama import END, FIRST, LINEARS, build, forget, tokenizer
from transformers import (
    DataCollatorForLanguageModeling,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

CUDA = torch.cuda.is_available()
WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
WORDS = 64  # of the tokenizer


# ---- what users write ----


def settings(options, dtype: str = "bf16", **own) -> dict:
    """Of TrainingArguments and of trl's configs; Trainer refuses 16 bits without a GPU."""
    return {
        "output_dir": options.folder,
        "max_steps": options.steps,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        **({dtype: True} if CUDA else {"bf16": False}),
        "optim": "adamw_torch_fused",
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **own,
    }


def lora(**own) -> LoraConfig:
    return LoraConfig(r=16, lora_alpha=32, target_modules=LINEARS, task_type="CAUSAL_LM", **own)


def base(options, dtype: str = "bf16"):
    return build(options.shape, True, HALF[dtype] if CUDA else torch.float32)


def adapted(options, dtype: str = "bf16", **own):
    model = base(options, dtype)
    set_seed(0)
    return get_peft_model(model, lora(**own))


def rows(options, count: int, lengths: list[int]) -> list[list[int]]:
    """Of three tokens each, in any order."""
    draw, made = random.Random(1), []
    for _ in range(count):
        few = draw.choices(range(FIRST, WORDS), k=3)
        made.append([*draw.choices(few, k=draw.choice(lengths) - 1), END])
    return made


def words(row: list[int]) -> str:
    """What the tokenizer makes `row` of, without its end."""
    return " ".join(f"w{token}" for token in row[:-1])


def plain(options, dtype: str = "bf16", lora_options: dict | None = None, **own) -> Trainer:
    """Trainer with batches padded to a multiple, with masks."""
    args = TrainingArguments(**settings(options, dtype, **own))
    count = options.steps * 2 * WORLD * args.gradient_accumulation_steps
    made = [{"input_ids": row} for row in rows(options, count, options.lengths)]
    return Trainer(
        adapted(options, dtype, **(lora_options or {})),
        args,
        train_dataset=made,
        eval_dataset=made[: 4 * WORLD],
        data_collator=DataCollatorForLanguageModeling(tokenizer(WORDS), mlm=False, pad_to_multiple_of=options.multiple),
    )


def dropped(options) -> Trainer:
    """lora_dropout, B not zero, no learning, the same row always: losses differ by their masks alone."""
    made = plain(options, lora_options={"lora_dropout": 0.05, "init_lora_weights": False}, learning_rate=0.0)
    made.train_dataset = [made.train_dataset[0]] * len(made.train_dataset)
    return made


def sft(options, **own) -> Trainer:
    from trl import SFTConfig, SFTTrainer

    texts = [{"text": words(row)} for row in rows(options, 16 * options.steps * WORLD, options.two_lengths)]
    return SFTTrainer(
        model=base(options),
        args=SFTConfig(**settings(options, max_length=2 * options.two_lengths[-1], **own)),
        train_dataset=Dataset.from_list(texts),
        processing_class=tokenizer(WORDS),
        peft_config=lora(),
    )


def dpo(options) -> Trainer:
    from trl import DPOConfig, DPOTrainer

    length = options.two_lengths[0]
    made = [words(row) for row in rows(options, 6 * options.steps * WORLD, [length])]
    triples = zip(made[0::3], made[1::3], made[2::3], strict=True)
    return DPOTrainer(
        model=base(options),
        args=DPOConfig(**settings(options, max_length=4 * length, learning_rate=1e-4)),
        train_dataset=Dataset.from_list([{"prompt": p, "chosen": f" {c}", "rejected": f" {r}"} for p, c, r in triples]),
        processing_class=tokenizer(WORDS),
        peft_config=lora(),
    )


def kto(options) -> Trainer:
    from trl import KTOConfig, KTOTrainer

    length = options.two_lengths[0]
    made = [words(row) for row in rows(options, 4 * options.steps * WORLD, [length])]
    pairs = enumerate(zip(made[0::2], made[1::2], strict=True))
    made = [{"prompt": p, "completion": f" {c}", "label": number % 2 == 0} for number, (p, c) in pairs]
    return KTOTrainer(
        model=base(options),
        args=KTOConfig(**settings(options, max_length=4 * length, learning_rate=1e-4)),
        train_dataset=Dataset.from_list(made),
        processing_class=tokenizer(WORDS),
        peft_config=lora(),
    )


def grpo(options) -> Trainer:
    """Learns so slowly that completions stay those of the run without graphs."""
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions: list[str], **_) -> list[float]:
        return [sum(map(ord, completion)) % 7 / 7 for completion in completions]

    length = options.two_lengths[0] // 2
    own = {"max_completion_length": length, "generation_kwargs": {"min_new_tokens": length}}
    own |= {"per_device_train_batch_size": 4, "num_generations": 4}
    prompts = rows(options, options.steps * WORLD, [options.two_lengths[0]])
    return GRPOTrainer(
        model=base(options),
        reward_funcs=reward,
        args=GRPOConfig(**settings(options, learning_rate=1e-6, **own)),
        train_dataset=Dataset.from_list([{"prompt": words(prompt)} for prompt in prompts]),
        processing_class=tokenizer(WORDS),
        peft_config=lora(),
    )


def evaluated(options, **own) -> Trainer:
    """Evaluation and saving in between."""
    saved = {"save_strategy": "steps", "save_steps": options.steps // 2, "save_only_model": False}
    seen = {"eval_strategy": "steps", "eval_steps": options.steps // 4, "per_device_eval_batch_size": 2}
    return plain(options, **seen, **saved, **own)


JOBS: dict[str, Callable] = {
    "trainer": plain,
    "sft": sft,
    "sft packed": lambda options: sft(options, packing=True),
    "offload": lambda options: sft(options, activation_offloading=True),
    "dpo": dpo,
    "dpo scored alike": dpo,
    "kto": kto,
    "kto scored alike": kto,
    "grpo": grpo,
    "dropout": dropped,
    "accumulate": lambda options: plain(options, gradient_accumulation_steps=4),
    "clipping": lambda options: plain(options, max_grad_norm=0.05),
    "fp16": lambda options: plain(options, "fp16"),
    "resume": evaluated,
}


ALIKE = "scored alike"  # without graphs, too, trl's fused head scores every position


# ---- one job, three times ----


class Norms(TrainerCallback):
    """What Trainer logs, unrounded."""

    def __init__(self):
        self.losses, self.norms, self.evaluated = [], [], []

    def on_log(self, args, state, control, logs=None, **_):
        for name, kept in (("loss", self.losses), ("grad_norm", self.norms), ("eval_loss", self.evaluated)):
            if name in (logs or {}):
                kept.append(float(logs[name]))


def once(options, name: str, graphed: bool) -> dict:
    """Losses and gradient norms of a job, and how it ran; "resume" goes on from its middle in a second trainer."""
    begun, seen = time.time(), Norms()
    found = {"captures": 0, "replays": 0, "eager": {}}
    checkpoints = [None, str(Path(options.folder, f"checkpoint-{options.steps // 2}"))]
    for checkpoint in checkpoints[: 2 if name == "resume" else 1]:
        trainer = JOBS[name](options)
        trainer.add_callback(seen)
        if options.fuse:
            bitshard.lora.fuse(trainer.model)
        if graphed:
            bitshard.graphs.enable(trainer.model)
        with masks.every_position() if name.endswith(ALIKE) else contextlib.nullcontext():
            trainer.train(resume_from_checkpoint=checkpoint)
        if graphed:
            report = bitshard.graphs.report(trainer.model)
            found["captures"] += report.captures
            found["replays"] += report.replays
            found["eager"] = {why: found["eager"].get(why, 0) + n for why, n in report.eager.items()}
            bitshard.graphs.disable(trainer.model)
        found["sharded"] = any(hasattr(p, "to_local") for p in trainer.model.parameters())
        trainer.accelerator.free_memory()
        del trainer
        forget()
    found.update(losses=seen.losses, norms=seen.norms, evaluated=seen.evaluated, seconds=time.time() - begun)
    return found


def three(options, name: str) -> dict:
    """As it is, as it is again, and as graphs."""
    eager, again, graphs = (once(options, name, graphed) for graphed in (False, False, True))
    if options.gpus > 1 and not graphs["sharded"]:
        raise RuntimeError("not sharded: is this a launch with FSDP2?")
    return {"job": name, "eager": eager, "again": again, "graphs": graphs}


def write(options, record: dict) -> None:
    """A line of the file of records: of rank 0, and errors of any rank."""
    if RANK == 0 or "error" in record:
        with Path(options.record).open("a") as file:
            file.write(json.dumps({"gpus": options.gpus, **record}) + "\n")


def all_failed(options, job: str) -> bool:
    """Whether every rank has failed at this job and its GPU is well: then none waits in a collective for another."""
    Path(options.folder, f"failed {job} {RANK}").touch()
    end = time.monotonic() + 5
    while time.monotonic() < end and len(list(Path(options.folder).glob(f"failed {job} *"))) < WORLD:
        time.sleep(0.1)
    try:
        torch.cuda.synchronize() if CUDA else None
    except RuntimeError:
        return False
    return len(list(Path(options.folder).glob(f"failed {job} *"))) == WORLD


def main() -> None:
    options = SimpleNamespace(**json.loads(sys.argv[1]))
    if not CUDA:
        torch.set_num_threads(1)
    if options.stand_in:  # graphs that are played, from the tests
        from bitshard.graphs import enabled
        from helpers.graphs import StandIn

        enabled.RECORDER = StandIn
    name = torch.cuda.get_device_name() if CUDA else "CPU"
    write(options, {"device": name, "torch": torch.__version__})
    for job in options.jobs:
        write(options, {"begins": job})
        faulthandler.dump_traceback_later(0.8 * options.patience)  # where it hangs, before the launch is ended
        try:
            write(options, three(options, job))
        except Exception as error:
            traceback.print_exc()
            write(options, {"job": job, "error": f"{type(error).__name__}: {error}"[:500]})
            sys.stderr.flush()
            if not all_failed(options, job):
                os._exit(1)  # what is left gets another launch
        forget()
    write(options, {"done": True})
    if dist.is_initialized():
        dist.barrier()


if __name__ == "__main__":
    main()
