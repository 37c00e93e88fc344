"""QLoRA with TRL's GRPOTrainer, whose completions come from a vLLM server that is sent dense, merged weights.

    trl vllm-serve --model NAME --dtype bfloat16      # on other GPUs: the model in 16 bits
    accelerate launch --config_file examples/fsdp2.yaml examples/grpo.py --model NAME --data FILE --server URL

FILE has JSON lines with "prompt" and "answer"; a completion with the answer in it is rewarded. The server gets every
weight under its name in the checkpoint after each step of the optimizer, the adapters merged, one at a time: the base
here stays in 4 bits and sharded. docs/serving.md has the three lines that do it.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import bitshard.fsdp
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, set_seed
from trl import GRPOConfig, GRPOTrainer


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; `argv` replaces it when the script is called from Python."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub name of a causal language model")
    parser.add_argument("--data", required=True, help="JSON lines with prompt and answer")
    parser.add_argument("--server", default="http://localhost:8000", help="of vLLM")
    parser.add_argument("--output", default="grpo-out", help="folder for the adapter")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="completions per process and step")
    parser.add_argument("--generations", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--length", type=int, default=256, help="tokens of a completion, at most")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--rank", type=int, default=16, help="rank of the LoRA matrices")
    return parser.parse_args(argv)


def has_answer(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """1 for each completion with its answer in it."""
    return [float(right in completion) for completion, right in zip(completions, answer, strict=True)]


def send_dense_weights(trainer: GRPOTrainer) -> None:
    """Let the server get what was trained: TRL's own walk sends packed bytes, or merges into them."""
    weights = bitshard.fsdp.dense_weights(lambda: trainer.model_wrapped)
    trainer.vllm_generation._iter_named_params = weights.__iter__
    trainer.vllm_generation._weight_metadata = weights.metadata()


def main(argv: Sequence[str] | None = None, rewards: object = has_answer) -> GRPOTrainer:
    """Train, save the adapter to `--output`, and return the trainer."""
    options = parse(argv)
    set_seed(0)  # the adapter's random matrices, the same on every process
    training = GRPOConfig(  # before the model: this starts the process group and gives each process its own GPU
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        num_generations=options.generations,
        max_completion_length=options.length,
        learning_rate=options.lr,
        lr_scheduler_type="constant",
        bf16=torch.cuda.is_available(),
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=options.server,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    model = AutoModelForCausalLM.from_pretrained(
        options.model,
        dtype=torch.bfloat16,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_quant_storage=torch.bfloat16,
        ),
    )
    lora = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=rewards,
        args=training,
        train_dataset=Dataset.from_list(
            [json.loads(line) for line in Path(options.data).read_text(encoding="utf-8").splitlines() if line.strip()]
        ),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        peft_config=lora,
    )
    send_dense_weights(trainer)
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main()
