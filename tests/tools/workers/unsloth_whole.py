"""unsloth as its users start it: FastLanguageModel, get_peft_model and some steps of SFTTrainer, on a Llama made here.

Where there is no GPU this is unsloth's own way for CPUs. With UNSLOTH_ALLOW_CPU=1, which is unsloth's, its check for a
GPU is answered by a stand-in: what it does to a model on a GPU is done to one on the CPU. No step is made then, for its
kernels need a GPU.
"""

import unsloth  # noqa: I001  first, as it asks for
import os
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from common import LINEARS, TOKENS, layers_of, make_model, run, texts, which
from unsloth import FastLanguageModel

CUDA = torch.cuda.is_available()
STAND_IN = os.environ.get("UNSLOTH_ALLOW_CPU") == "1"


class Clock:
    """Wall time of each step in ms; the device has finished before a time is read."""

    def __init__(self):
        self.times: list[float] = []
        self.started = 0.0

    def callback(self):
        from transformers import TrainerCallback

        clock = self

        class Timed(TrainerCallback):
            def on_step_begin(self, *args, **kwargs):
                clock.started = now()

            def on_step_end(self, *args, **kwargs):
                clock.times.append(round(1e3 * (now() - clock.started), 2))

        return Timed()


def now() -> float:
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def stand_in() -> dict:
    """Where the model goes that unsloth would put on a GPU, and what it asks the GPU of then."""
    if not STAND_IN:
        return {}
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(name="none", total_memory=2**36, major=9, minor=0)
    torch.cuda.current_device = lambda: torch.device("cpu")
    unsloth.models.loader.ALLOW_BITSANDBYTES = True  # "are there kernels for CUDA" is part of its check for a GPU
    return {"device_map": {"": "cpu"}}


def memory() -> dict[str, int]:
    return {"held": torch.cuda.memory_allocated(), "peak": torch.cuda.max_memory_allocated()} if CUDA else {}


def fused(model) -> dict:
    """What `bitshard.lora.fuse` reports of the model; nothing of the original's."""
    if which() != "bitshard":
        return {}
    from bitshard import lora

    try:
        report = lora.fuse(model)
    except ValueError as error:  # none of them is 4-bit
        return {"fused": 0, "left": {}, "line": str(error)}
    return {"fused": len(report.fused), "left": report.reasons, "line": str(report)}


def train(model, tokenizer, args) -> dict:
    """Losses and times of the steps of SFTTrainer."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_dict({"text": texts(4, args.length, args.vocabulary) * args.steps})
    settings = SFTConfig(
        output_dir=str(args.out / "run"),
        per_device_train_batch_size=4,
        max_steps=args.steps,
        learning_rate=args.rate,
        lr_scheduler_type="constant",
        warmup_steps=0,
        optim="adamw_torch",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        max_length=args.length,
        dataset_num_proc=1,
        bf16=args.dtype == "bfloat16",
        fp16=args.dtype == "float16",
        use_cpu=not CUDA,
        seed=5,
    )
    clock = Clock()
    trainer = SFTTrainer(
        model=model, processing_class=tokenizer, train_dataset=data, args=settings, callbacks=[clock.callback()]
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, "ms": clock.times, "trainer": type(trainer).__name__}


def main(options):
    options.add_argument("--model", type=Path, required=True, help="folder; made where it is missing")
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--hidden", type=int, default=64)
    options.add_argument("--intermediate", type=int, default=192)
    options.add_argument("--layers", type=int, default=2)
    options.add_argument("--heads", type=int, default=4)
    options.add_argument("--vocabulary", type=int, default=TOKENS)
    options.add_argument("--length", type=int, default=24)
    options.add_argument("--steps", type=int, default=4)
    options.add_argument("--rate", type=float, default=1e-2)
    args = options.parse_args()
    sizes = {"vocab_size": args.vocabulary, "hidden_size": args.hidden, "intermediate_size": args.intermediate}
    sizes |= {"num_hidden_layers": args.layers, "num_attention_heads": args.heads}
    sizes |= {"num_key_value_heads": args.heads // 2, "max_position_embeddings": max(64, args.length)}
    sizes["initializer_range"] = 0.8 / args.hidden**0.5
    dtype = getattr(torch, args.dtype)
    if not args.model.exists():
        make_model(args.model, dtype, **sizes)
    model, tokenizer = FastLanguageModel.from_pretrained(
        str(args.model), max_seq_length=args.length, dtype=dtype, load_in_4bit=True, **stand_in()
    )
    result = {"loader": FastLanguageModel.__module__, "loaded": layers_of(model), "memory": {"loaded": memory()}}
    model = FastLanguageModel.get_peft_model(
        model, r=8, lora_alpha=16, lora_dropout=0, target_modules=list(LINEARS), random_state=3
    )
    result["adapted"] = layers_of(model)
    result["trained"] = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if not STAND_IN:
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        result |= train(model, tokenizer, args)
        result["memory"]["trained"] = memory()
        result["after"] = layers_of(model)
    result["fuse"] = fused(model)
    return args, result


run(main)
