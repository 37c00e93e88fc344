"""Trainer on a mixture of experts in 4 bits, experts adapted: the losses of its first steps.

    accelerate launch --config_file tests/fsdp/fsdp2_cut.yaml tests/fsdp/cpu_fsdp.py THIS_FILE FOLDER BATCH OUT

BATCH is that of a process. Rank 0 writes the losses and what it keeps of the base to OUT.
"""

import json
import os
import sys

import bitshard.experts
import bitshard.fsdp
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

folder, batch, out = sys.argv[1:]
torch.set_num_threads(1)
bitshard.experts.enable()
options = {"max_steps": 3, "per_device_train_batch_size": int(batch), "learning_rate": 1e-2, "logging_steps": 1}
options |= {"report_to": [], "save_steps": 2, "disable_tqdm": True, "lr_scheduler_type": "constant"}
rows = [torch.arange(16) * (i + 1) % 90 for i in range(12)]
data = [{"input_ids": row, "labels": row} for row in rows]


def train(checkpoint=None):
    """(losses, trainer) of three steps, or of the rest of them."""
    arguments = TrainingArguments(f"{out}.{'trainer' if checkpoint is None else 'resumed'}", **options)
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        ),
    )
    torch.manual_seed(0)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = LoraConfig(r=4, target_modules="all-linear", target_parameters=targets, task_type="CAUSAL_LM")
    trainer = Trainer(get_peft_model(model, lora), arguments, train_dataset=data)
    trainer.train(resume_from_checkpoint=checkpoint)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer


losses, trainer = train()
resumed, _ = train(f"{out}.trainer/checkpoint-2")
assert resumed[-1] == losses[-1] and len(losses) == 3, (resumed, losses)
if int(os.environ.get("RANK", 0)) == 0:
    with open(out, "w") as file:
        json.dump({"losses": losses, "kept": bitshard.fsdp.describe(trainer.model)}, file)
