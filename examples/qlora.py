"""QLoRA fine-tuning of a causal language model on a text file: transformers, peft and a 4-bit base.

    python examples/qlora.py --model FOLDER_OR_NAME --text FILE
    accelerate launch --config_file examples/fsdp2.yaml examples/qlora.py --model FOLDER_OR_NAME --text FILE

Nothing but `--fuse` and `--graph` knows about sharding or about the package behind `import bitsandbytes`: the launch
config decides the first, pip the second. BITSHARD_FAST=1 in the environment does what these two do. To launch it
without a GPU go through examples/cpu_fsdp.py, which says why.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import bitshard.graphs
import bitshard.lora
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; `argv` replaces it when the script is called from Python."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub name of a causal language model")
    parser.add_argument("--text", required=True, help="UTF-8 text file to train on")
    parser.add_argument("--output", default="qlora-out", help="folder for the adapter")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=1, help="sequences per process and step")
    parser.add_argument("--length", type=int, default=512, help="tokens per sequence")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--rank", type=int, default=16, help="rank of the LoRA matrices")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--quant-storage", default="bfloat16", help="dtype that carries the packed bytes")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--fuse", action="store_true", help="LoRA layers in few launches: bitshard.lora.fuse")
    parser.add_argument("--graph", action="store_true", help="steps as CUDA graphs: bitshard.graphs.enable")
    return parser.parse_args(argv)


def cut(tokenizer: PreTrainedTokenizerBase, text: str, length: int) -> list[dict[str, list[int]]]:
    """Cut a text into sequences of `length` tokens; the rest at the end is dropped."""
    ids = tokenizer(text, verbose=False)["input_ids"]
    starts = range(0, len(ids) - length + 1, length)
    return [{"input_ids": ids[start : start + length], "labels": ids[start : start + length]} for start in starts]


def main(argv: Sequence[str] | None = None) -> Trainer:
    """Train, save the adapter to `--output`, and return the trainer."""
    options = parse(argv)
    set_seed(options.seed)  # the adapter's random matrices, the same on every process
    dtype = getattr(torch, options.dtype)
    # Before the model: this starts the process group and gives each process its own GPU.
    training = TrainingArguments(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        learning_rate=options.lr,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        bf16=dtype == torch.bfloat16 and torch.cuda.is_available(),  # Trainer refuses both flags without a GPU
        fp16=dtype == torch.float16 and torch.cuda.is_available(),
        gradient_checkpointing=options.gradient_checkpointing or None,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(
        options.model,
        dtype=dtype,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_quant_storage=getattr(torch, options.quant_storage),
        ),
    )
    lora = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    if options.fuse:
        print(bitshard.lora.fuse(model))
    if options.graph:
        bitshard.graphs.enable(model)
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=cut(tokenizer, Path(options.text).read_text(encoding="utf-8"), options.length),
        data_collator=default_data_collator,
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main()
