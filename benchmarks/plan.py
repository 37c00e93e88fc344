"""Memory of training jobs on one GPU: what `bitshard plan` says, and what torch's allocator had.

    python benchmarks/plan.py [--models llama-3-8b,qwen3-8b] [--layers N] [--out RESULT.md]

Random weights, nested NF4, LoRA of rank 16 on all linear layers; of mixtures of experts the stacks are 4-bit, too. Each
model is a process of its own, its jobs run one behind the other, two steps each. Of the first job the table also tells
the smallest limit on torch's allocator with which a step runs, and what lies outside torch. Without a GPU nothing can
be measured.
"""

import argparse
import json
import os
import subprocess
import sys

os.environ["BITSHARD_PLUGIN"] = "0"  # an original bitsandbytes runs its own kernels
GIB = 2**30
BASE = {"rank": 16, "lora_dtype": "bfloat16", "optimizer": "adamw_torch_fused", "nested": True, "experts_4bit": True}
JOBS = [
    {"seq": 2048},
    {"seq": 512},
    {"seq": 1024, "batch": 4},
    {"seq": 2048, "checkpointing": False},
    {"seq": 2048, "optimizer": "adamw_8bit"},
    {"seq": 2048, "lora_dtype": "float32", "autocast": False},
    {"seq": 8192},
]
CAPS = (0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15)
MODELS = "llama-3-8b,qwen2.5-7b,qwen3-8b,mistral-7b,llama-3.2-3b,gpt-oss-20b"


def build(name: str, layers: int):
    """The planned model with its weights on the GPU."""
    import bitsandbytes as bnb
    import torch
    from bitshard import experts
    from bitshard.planning.model import config_of
    from transformers import AutoModelForCausalLM

    config = config_of(name)
    config.use_cache = False
    config.num_hidden_layers = layers or config.num_hidden_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    kept = {id(model.get_output_embeddings())}
    for path, module in list(model.named_modules()):
        if type(module) is torch.nn.Linear and id(module) not in kept:
            model.set_submodule(path, four_bit(bnb, torch, module))
    if any(True for _ in experts.modules.found(model)):
        experts.quantize(model, compress_statistics=True)
    model.is_loaded_in_4bit = True
    model.requires_grad_(False)
    torch.cuda.empty_cache()
    return model


def four_bit(bnb, torch, module):
    """A linear layer in nested NF4, its bias as it was."""
    biased = module.bias is not None
    with torch.device("meta"):
        new = bnb.nn.Linear4bit(
            module.in_features, module.out_features, biased, torch.bfloat16, compress_statistics=True, quant_type="nf4"
        )
    weight = module.weight.data
    module.weight = None
    new.weight = bnb.nn.Params4bit(
        weight, requires_grad=False, compress_statistics=True, quant_type="nf4", module=new
    ).to("cuda")
    new.bias = module.bias
    return new


def steps_of(model, options: dict):
    """(a training step, what it trains)."""
    import bitsandbytes as bnb
    import torch

    again = {"use_reentrant": False}
    if options.get("checkpointing", True):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=again)
    else:
        model.gradient_checkpointing_disable()
    model.enable_input_require_grads()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.data = parameter.data.to(getattr(torch, options["lora_dtype"]))
    kind = bnb.optim.AdamW8bit if options["optimizer"] == "adamw_8bit" else torch.optim.AdamW
    more = {} if options["optimizer"] == "adamw_8bit" else {"fused": True}
    optimizer = kind(trained, lr=1e-4, **more)
    ids = torch.randint(0, model.config.vocab_size, (options.get("batch", 1), options["seq"]), device="cuda")

    def step() -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def measure(name: str, layers: int) -> None:
    """Print a line of JSON for each job of a model."""
    import torch
    from bitshard.planning import plan
    from bitshard.planning.model import Model
    from peft import LoraConfig, get_peft_model

    planned = Model(name)
    model = build(name, layers)
    resident = torch.cuda.memory_allocated()
    lora = LoraConfig(r=16, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora, autocast_adapter_dtype=False).train()
    for number, job in enumerate(JOBS):
        options = {**BASE, **job}
        found = plan(planned, **options)
        paper, paper_weights = found.memory.worst().total, sum(found.memory.resident().values())
        row = {"model": name, "job": job, "paper": paper, "moment": found.memory.worst().name}
        row |= {"weights": resident, "paper_weights": paper_weights}
        try:
            row |= one(model, options, limits=number == 0)
        except torch.OutOfMemoryError as error:
            row["error"] = str(error)[:120]
        print(json.dumps(row), flush=True)


def one(model, options: dict, limits: bool) -> dict:
    """What a job had at the peak, and the smallest limit with which it runs."""
    import gc

    import torch

    step = steps_of(model, options)
    gc.collect()
    torch.cuda.empty_cache()
    step()
    torch.cuda.reset_peak_memory_stats()
    loss = step()
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    free, total = torch.cuda.mem_get_info()
    row = {"peak": peak, "reserved": reserved, "outside": total - free - torch.cuda.memory_reserved(), "loss": loss}
    for more in CAPS if limits else ():
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(peak * (1 + more) / total)
        try:
            step()
            step()
            row["limit"] = more
            break
        except torch.OutOfMemoryError:
            for parameter in model.parameters():
                parameter.grad = None
            gc.collect()
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    return row


def table(rows: list[dict]) -> str:
    """Markdown."""
    lines = ["| model | job | planned, GiB | allocated | error | reserved | runs within | outside torch | moment |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|---:|---|")
    for row in rows:
        job = ", ".join(f"{key} {value}" for key, value in row["job"].items())
        if "error" in row:
            lines.append(f"| {row['model']} | {job} | {row['paper'] / GIB:.2f} | {row['error']} | | | | | |")
            continue
        limit = f"+{row['limit']:.1%}" if "limit" in row else ""
        sizes = (row["paper"] / GIB, row["peak"] / GIB, row["paper"] / row["peak"] - 1, row["reserved"] / GIB)
        cells = "{:.2f} | {:.2f} | {:+.1%} | {:.2f}".format(*sizes)
        lines.append(f"| {row['model']} | {job} | {cells} | {limit} | {row['outside'] / GIB:.2f} | {row['moment']} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--layers", type=int, default=0, help="fewer than the model has")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out")
    options = parser.parse_args()
    if options.one:
        return measure(options.models, options.layers)
    rows = []
    for name in options.models.split(","):
        command = [sys.executable, __file__, "--one", "--models", name, "--layers", str(options.layers)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        rows += [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        print(table(rows[-len(JOBS) :]), flush=True)
        if done.returncode:
            print(f"{name}: status {done.returncode}", flush=True)
    if options.out:
        with open(options.out, "w") as file:
            file.write(table(rows) + "\n")
    return None


if __name__ == "__main__":
    main()
