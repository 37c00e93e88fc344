"""A training step of a mixture of experts of a published shape, random weights, on one GPU: memory by parts, and time.

    python benchmarks/experts_step.py [--tokens 2048] [--rank 8] [--cap 23.5] [--dense] [--layers N] [--out FILE]

4-bit: each decoder layer is made in bf16 on the GPU and quantized before the next one; no files. Adapters of peft on
attention and experts, fused (`bitshard.lora.fuse`), `AdamW8bit`, gradient checkpointing of decoder layers, 1 x TOKENS
tokens. --cap: GiB that the process may take. --dense: 16-bit weights, peft's adapters, torch's `grouped_mm`.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import bitsandbytes as bnb
import torch
from bitshard import experts, lora
from bitshard.planning import plan
from bitshard.planning.job import GIB
from bitshard.planning.model import config_of
from peft import LoraConfig, get_peft_model
from timing import commit
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

NAME = "Qwen3-30B-A3B"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def config(layers: int | None) -> Qwen3MoeConfig:
    """Of the published shape."""
    found = config_of(NAME)
    found.num_hidden_layers = layers or found.num_hidden_layers
    return found


def fill(module: nn.Module) -> None:
    """Random values for what is on the meta device."""
    module.to_empty(device="cuda")
    for parameter in module.parameters():
        if parameter.dim() == 1:
            parameter.data.fill_(1)
        else:
            parameter.data.normal_(0, 0.02)


def quantize(layer: nn.Module, device: str = "cuda") -> None:
    """The experts and linear layers of a decoder layer on the device in nested NF4."""
    experts.quantize(layer, quant_type="nf4", compress_statistics=True)
    for name in ATTENTION:
        linear = getattr(layer.self_attn, name)
        biased = linear.bias is not None
        new = bnb.nn.Linear4bit(
            linear.in_features, linear.out_features, biased, torch.bfloat16, quant_type="nf4", device="meta"
        )
        new.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4", module=new)
        new.bias = linear.bias
        setattr(layer.self_attn, name, new.to(device))


def build(layers: int | None, dense: bool) -> nn.Module:
    """The model on the GPU, unit by unit."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config(layers))
    torch.set_default_dtype(torch.float32)
    model.config._experts_implementation = "grouped_mm"
    with torch.no_grad():
        for layer in model.model.layers:
            fill(layer)
            if not dense:
                quantize(layer)
        for module in (model.model.embed_tokens, model.model.norm, model.lm_head):
            fill(module)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).cuda()
    model.is_loaded_in_4bit = not dense
    return model.requires_grad_(False)


def gib(value: float) -> str:
    """Bytes in GiB."""
    return f"{value / GIB:.2f}"


def run(options: argparse.Namespace) -> str:
    """What is printed."""
    torch.manual_seed(0)
    if options.cap:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(options.cap * GIB / total)
    model = build(options.layers, options.dense)
    torch.cuda.synchronize()
    loading, base = torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated()
    settings = LoraConfig(r=options.rank, target_modules=ATTENTION, target_parameters=STACKS, task_type="CAUSAL_LM")
    model = get_peft_model(model, settings, autocast_adapter_dtype=False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.data = parameter.data.to(torch.bfloat16)
    fused = "" if options.dense else str(lora.fuse(model))
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    adapters = torch.cuda.memory_allocated() - base
    optimizer = bnb.optim.AdamW8bit(trained, lr=1e-4)
    ids = torch.randint(0, model.config.vocab_size, (1, options.tokens), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    times, losses, peaks = [], [], []
    for _ in range(options.steps):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
        losses.append(loss.item())
        peaks.append(torch.cuda.max_memory_allocated())
    states = torch.cuda.memory_allocated() - base - adapters
    counted = plan(
        NAME, seq=options.tokens, rank=options.rank, lora_experts=True, lora_dtype="bfloat16", autocast=False,
        optimizer="adamw_8bit", nested=True, experts_4bit=not options.dense,
    ).memory.worst()  # fmt: skip
    kind = f"{'16-bit' if options.dense else '4-bit'} {NAME}, {model.config.num_hidden_layers} layers"
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, commit {commit('python', 'csrc', 'cuda')}"
    lines = [
        f"{kind}, 1 x {options.tokens} tokens, r = {options.rank}, cap {options.cap or 'none'} GiB: {where}",
        fused,
        f"- peak of loading, reserved: {gib(loading)} GiB",
        f"- base: {gib(base)} GiB, adapters {gib(adapters)}, states of the optimizer {gib(states)}",
        f"- peak of steps: allocated {gib(max(peaks))} GiB, reserved {gib(torch.cuda.max_memory_reserved())}",
        f"- step: {statistics.median(times[1:]):.1f} ms (first {times[0]:.0f})",
        f"- losses: {[round(loss, 3) for loss in losses]}",
        f"- planned: {gib(counted.total)}, {', '.join(f'{part} {gib(size)}' for part, size in counted.parts.items())}",
    ]
    return "\n".join(filter(None, lines)) + "\n"


def main() -> None:
    """Print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--cap", type=float, help="GiB")
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    text = run(options)
    print(text)
    if options.out:
        with options.out.open("a") as file:
            file.write(text)


if __name__ == "__main__":
    main()
