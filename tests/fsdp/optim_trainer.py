"""Trainer with each of bitsandbytes' `optim` names: trains, saves, resumes to the same losses.

    accelerate launch --config_file tests/fsdp/fsdp2.yaml tests/fsdp/cpu_fsdp.py tests/fsdp/optim_trainer.py OUT FOLDER

Without a launcher one process. OUT.<rank> gets {name: losses}; a name that fails ends all.
"""

import json
import os
import shutil
import sys
import traceback
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments

sys.path.append(str(Path(__file__).parents[1]))  # a worker starts in this folder, and helpers/ is beside it
from helpers import tiny  # noqa: E402
from helpers.optim import TRAINER_NAMES  # noqa: E402

WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
TOKENS, LENGTH = 96, 12
STEPS, SAVED = 5, 3  # two steps after saving: the loss of the last shows what the state did
# Through torch.distributed.checkpoint; the dicts of the others are whole. Not under FSDP1: accelerate 1.15 asks the new
# optimizer what to read, which has no state yet, so that nothing is read (adamw_torch's neither).
SHARDED = ("ademamix_8bit", "lion_32bit") if os.environ.get("FSDP_VERSION") == "2" else ()


def model():
    """One layer; MLP weights of 64 x 96 are large enough for 8 bits, the embedding is too and stays in 32."""
    return tiny.llama(vocab_size=TOKENS, num_hidden_layers=1, num_attention_heads=2)


def rows():
    found = torch.randint(3, TOKENS, (8, LENGTH), generator=torch.Generator().manual_seed(1)).tolist()
    return [{"input_ids": row, "labels": row} for row in found]


def train(name, folder, resume=None):
    arguments = TrainingArguments(
        output_dir=folder,
        optim=name,
        max_steps=STEPS,
        per_device_train_batch_size=4 // WORLD,
        save_strategy="no" if resume else "steps",
        save_steps=SAVED,
        logging_steps=1,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        use_cpu=WORLD == 1,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=5,
    )
    trainer = Trainer(model=model(), args=arguments, train_dataset=rows())
    trainer.train(resume_from_checkpoint=resume)
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def check(name, folder):
    """The losses of a run that went through, which the resumed one must have too."""
    trainer, losses = train(name, folder)
    optimizer = trainer.optimizer.optimizer
    parameters = list(trainer.model_wrapped.parameters())
    assert "bitsandbytes" in str(type(optimizer)), type(optimizer)
    if WORLD > 1 and os.environ["FSDP_VERSION"] == "1":
        assert all(getattr(p, "_fsdp_flattened", False) for p in parameters), "not sharded"
    elif WORLD > 1:
        assert all(isinstance(p, DTensor) for p in parameters), "not sharded"
    dtypes = {state["state1"].dtype for state in optimizer.state.values()}
    assert (torch.uint8 in dtypes) == ("8bit" in name), dtypes
    resumed = train(name, folder, os.path.join(folder, f"checkpoint-{SAVED}"))[1]
    assert resumed[-1] == losses[-1] and len(losses) == STEPS, (name, resumed, losses)
    if WORLD > 1:
        torch.distributed.barrier()  # the other rank's Trainer may still list the folder
    if RANK == 0:
        shutil.rmtree(folder, ignore_errors=True)
    return losses


def main():
    out, folder = sys.argv[1], sys.argv[2]
    results = {}
    for name in TRAINER_NAMES:
        os.environ["FSDP_STATE_DICT_TYPE"] = "SHARDED_STATE_DICT" if name in SHARDED else "FULL_STATE_DICT"
        try:
            results[name] = check(name, os.path.join(folder, name))
        except Exception:
            print(f"rank {RANK} {name} {traceback.format_exc()[-4000:]}", file=sys.stderr, flush=True)
            os._exit(1)  # ends the other ranks, which may wait for this one
    Path(f"{out}.{RANK}").write_text(json.dumps(results))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
