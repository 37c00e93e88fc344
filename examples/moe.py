"""QLoRA of a mixture of experts: the experts in 4 bits too, and adapters on them.

    python examples/moe.py --model FOLDER_OR_NAME --text FILE --output OUT
    accelerate launch --config_file examples/fsdp2.yaml examples/moe.py --model FOLDER_OR_NAME --text FILE
    python examples/moe.py --tiny                       # a random Qwen3-MoE of two layers, made here

It prints what is 4-bit, what each rank keeps, and with --merge writes the merged model as well. Three lines differ from
a script for a dense model: the import, `enable()`, and `target_parameters`.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import bitshard.experts
import bitshard.fsdp
import bitshard.lora
import qlora
import tiny
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; `argv` replaces it when the script is called from Python."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub name of a causal language model with experts")
    parser.add_argument("--text", help="UTF-8 text file to train on")
    parser.add_argument("--tiny", action="store_true", help="a small random model and a text that Python brings")
    parser.add_argument("--output", default="moe-out", help="folder for the adapter")
    parser.add_argument("--merge", help="folder for the merged model, in 4 bits")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=1, help="sequences per process and step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--length", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--rank", type=int, default=8, help="rank of the LoRA matrices")
    return parser.parse_args(argv)


def make_tiny(folder: Path) -> tuple[Path, Path]:
    """Folder of a random Qwen3-MoE with the tokenizer of tiny.py, and file of its text."""
    dense, text = tiny.make(folder / "dense")
    if not (folder / "moe" / "config.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(dense)
        sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 64, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "initializer_range": 0.1}
        config = Qwen3MoeConfig(vocab_size=len(tokenizer), **sizes, **heads, **experts)
        tokenizer.save_pretrained(folder / "moe")
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(config).save_pretrained(folder / "moe")
    return folder / "moe", text


def main(argv: Sequence[str] | None = None) -> Trainer:
    """Train, save the adapter to `--output`, and return the trainer."""
    options = parse(argv)
    if options.tiny:
        options.model, options.text = make_tiny(Path(tempfile.gettempdir()) / "bitshard-moe")
    set_seed(0)
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    training = TrainingArguments(  # before the model: this starts the process group and gives each process its own GPU
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        learning_rate=options.lr,
        bf16=dtype == torch.bfloat16,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
    )
    bitshard.experts.enable()
    model = AutoModelForCausalLM.from_pretrained(
        options.model,
        dtype=dtype,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        ),
    )
    lora = LoraConfig(r=options.rank, target_modules="all-linear", target_parameters=STACKS, task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    model.print_trainable_parameters()
    print(bitshard.lora.fuse(model))  # optional: fewer launches, and less work of the host
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    text = Path(options.text).read_text(encoding="utf-8")
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=qlora.cut(tokenizer, text, options.length),
        data_collator=default_data_collator,
        processing_class=tokenizer,
    )
    trainer.train()
    if trainer.is_world_process_zero():
        print(bitshard.fsdp.describe(trainer.model))
    trainer.save_model()
    if options.merge:
        bitshard.fsdp.save_pretrained(trainer.model, options.merge, merge=True)
    return trainer


if __name__ == "__main__":
    main()
