"""QLoRA with TRL's SFTTrainer, as the documentation of FSDP-QLoRA has it: nothing here knows about sharding.

    accelerate launch --config_file examples/fsdp2.yaml examples/sft.py --model FOLDER_OR_NAME --data FILE
    python examples/sft.py --tiny --steps 4      # one process, a made model and text

FILE has JSON lines of any form that SFTTrainer knows ("text", "prompt" and "completion", "messages"), or is plain text,
a paragraph for each example. To launch it without a GPU go through examples/cpu_fsdp.py, which says why.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import bitshard.lora
import tiny
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, set_seed
from trl import SFTConfig, SFTTrainer


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; `argv` replaces it when the script is called from Python."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub name of a causal language model")
    parser.add_argument("--data", help="JSON lines or text to train on")
    parser.add_argument("--tiny", action="store_true", help="a made model and text instead, see examples/tiny.py")
    parser.add_argument("--output", default="sft-out", help="folder for the adapter")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=1, help="sequences per process and step")
    parser.add_argument("--accumulate", type=int, default=1, help="batches to one step of the optimizer")
    parser.add_argument("--length", type=int, default=512, help="tokens per sequence, at most")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--rank", type=int, default=16, help="rank of the LoRA matrices")
    parser.add_argument("--fuse", action="store_true", help="LoRA layers in few launches: bitshard.lora.fuse")
    options = parser.parse_args(argv)
    if options.tiny:
        options.model, options.data = map(str, tiny.make(Path(options.output, "tiny")))
    if not (options.model and options.data):
        parser.error("give --model and --data, or --tiny")
    return options


def rows(file: Path) -> Dataset:
    """The examples of a file."""
    text = file.read_text(encoding="utf-8")
    if file.suffix in (".json", ".jsonl"):
        return Dataset.from_list([json.loads(line) for line in text.splitlines() if line.strip()])
    return Dataset.from_list([{"text": paragraph} for paragraph in text.split("\n\n") if paragraph.strip()])


def main(argv: Sequence[str] | None = None) -> SFTTrainer:
    """Train, save the adapter to `--output`, and return the trainer."""
    options = parse(argv)
    set_seed(0)  # the adapter's random matrices, the same on every process
    cuda = torch.cuda.is_available()
    dtype = torch.bfloat16 if not cuda or torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    training = SFTConfig(  # before the model: this starts the process group and gives each process its own GPU
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=options.accumulate,
        gradient_checkpointing=True,
        max_length=options.length,
        learning_rate=options.lr,
        lr_scheduler_type="constant",
        bf16=cuda and dtype is torch.bfloat16,  # Trainer refuses both flags without a GPU
        fp16=dtype is torch.float16,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    model = AutoModelForCausalLM.from_pretrained(
        options.model,
        dtype=dtype,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_quant_storage=dtype,  # FSDP1 flattens packed bytes and norms into one tensor
        ),
    )
    trainer = SFTTrainer(
        model=model,
        args=training,
        train_dataset=rows(Path(options.data)),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        peft_config=LoraConfig(
            r=options.rank,
            lora_alpha=2 * options.rank,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        ),
    )
    if options.fuse:
        print(bitshard.lora.fuse(trainer.model))
    trainer.train()
    trainer.save_model()
    trainer.save_state()  # trainer_state.json has the losses
    return trainer


if __name__ == "__main__":
    main()
