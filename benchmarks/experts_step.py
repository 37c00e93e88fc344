"""A training step of a mixture of experts of a published shape, random weights, on one GPU: memory by parts, and time.

    python benchmarks/experts_step.py [--tokens 2048] [--rank 8] [--cap 23.5] [--dense] [--layers N] [--out FILE]
    python benchmarks/experts_step.py --turns 10 [--tokens 512,2048]

4-bit: each decoder layer is made in bf16 on the GPU and quantized before the next one; no files. Adapters of peft on
attention and experts, fused (`bitshard.lora.fuse`), `AdamW8bit`, gradient checkpointing of decoder layers, 1 x TOKENS
tokens. --cap: GiB that the process may take. --dense: 16-bit weights, peft's adapters, torch's `grouped_mm`.
--original: bitsandbytes' layers, and its parametrization for stacks, with peft's adapters, of which those stacks get
none, in silence; its package is first on the path, and BITSHARD_PLUGIN is 0. --attention-only: so for all. --turns:
both models in one process, a step of one and a step of the other so many times, since the host's speed differs from
process to process by more than the two do; for each of the --tokens. Needs 140 GB for 48 layers.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import bitsandbytes as bnb
import torch
from bitshard import experts, graphs, lora
from bitshard.planning import plan
from bitshard.planning.job import GIB
from bitshard.planning.model import config_of
from peft import LoraConfig, get_peft_model
from timing import commit
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

NAME = "Qwen3-30B-A3B"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
KINDS = ("4-bit", "16-bit", "bitsandbytes")
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


def quantize(layer: nn.Module, device: str = "cuda", original: bool = False) -> None:
    """The experts and linear layers of a decoder layer on the device in nested NF4."""
    if original:
        from bitsandbytes.nn.parametrize import replace_parameter_4bit

        for stack in STACKS:
            holder, _, name = stack.rpartition(".")
            replace_parameter_4bit(layer.get_submodule(holder), name, True, "nf4", 64)
    else:
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


def build(layers: int | None, weights: str) -> nn.Module:
    """The model on the GPU, unit by unit; weights: one of KINDS."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config(layers))
    torch.set_default_dtype(torch.float32)
    model.config._experts_implementation = "grouped_mm"
    with torch.no_grad():
        for layer in model.model.layers:
            fill(layer)
            if weights != "16-bit":
                quantize(layer, original=weights == "bitsandbytes")
        for module in (model.model.embed_tokens, model.model.norm, model.lm_head):
            fill(module)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).cuda()
    model.is_loaded_in_4bit = weights != "16-bit"
    return model.requires_grad_(False)


def gib(value: float) -> str:
    """Bytes in GiB."""
    return f"{value / GIB:.2f}"


class Job:
    """A model under training, on the GPU. Attributes are bytes of its parts."""

    def __init__(self, options: argparse.Namespace, weights: str):
        begin = torch.cuda.memory_allocated()
        self.model = build(options.layers, weights)
        torch.cuda.synchronize()
        self.loading, self.base = torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated() - begin
        stacks = None if options.attention_only else STACKS
        settings = LoraConfig(r=options.rank, target_modules=ATTENTION, target_parameters=stacks, task_type="CAUSAL_LM")
        self.model = get_peft_model(self.model, settings, autocast_adapter_dtype=False)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.trained = sum(parameter.numel() for parameter in trained)
        for parameter in trained:
            parameter.data = parameter.data.to(torch.bfloat16)
        self.fused = ""
        if options.merge_aware:
            self.fused = f"{lora.merge_aware(self.model)} layers merge-aware"
        elif weights == "4-bit":
            self.fused = str(lora.fuse(self.model))
        self.model.enable_input_require_grads()
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model.train()
        self.adapters = torch.cuda.memory_allocated() - begin - self.base
        self.optimizer = bnb.optim.AdamW8bit(trained, lr=1e-4)
        if options.graphs:
            graphs.enable(self.model)

    def step(self, ids: torch.Tensor) -> tuple[float, float]:
        """(milliseconds, loss)."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end), loss.item()


def where() -> str:
    """GPU and versions."""
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, commit {commit('python', 'csrc', 'cuda')}"


def run(options: argparse.Namespace) -> str:
    """What is printed of one model."""
    torch.manual_seed(0)
    if options.cap:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(options.cap * GIB / total)
    weights = "16-bit" if options.dense else "bitsandbytes" if options.original else "4-bit"
    job, tokens = Job(options, weights), int(options.tokens)
    ids = torch.randint(0, job.model.config.vocab_size, (1, tokens), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    times, losses, peaks = [], [], []
    for _ in range(options.steps):
        ms, loss = job.step(ids)
        times.append(ms)
        losses.append(loss)
        peaks.append(torch.cuda.max_memory_allocated())
    states = torch.cuda.memory_allocated() - job.base - job.adapters
    counted = plan(
        NAME, seq=tokens, rank=options.rank, lora_experts=not options.attention_only, lora_dtype="bfloat16",
        autocast=False, optimizer="adamw_8bit", nested=True, experts_4bit=not options.dense,
    ).memory.worst()  # fmt: skip
    kind = f"{weights} {NAME}, {job.model.config.num_hidden_layers} layers"
    lines = [
        f"{kind}, 1 x {tokens} tokens, r = {options.rank}, cap {options.cap or 'none'} GiB: {where()}",
        job.fused,
        str(graphs.report(job.model)) if options.graphs else "",
        f"- peak of loading, reserved: {gib(job.loading)} GiB",
        f"- base: {gib(job.base)} GiB, adapters {gib(job.adapters)}, states of the optimizer {gib(states)}",
        f"- trained: {job.trained:,} elements",
        f"- peak of steps: allocated {gib(max(peaks))} GiB, reserved {gib(torch.cuda.max_memory_reserved())}",
        f"- step: {statistics.median(times[1:]):.1f} ms (first {times[0]:.0f})",
        f"- losses: {[round(loss, 3) for loss in losses]}",
        f"- planned: {gib(counted.total)}, {', '.join(f'{part} {gib(size)}' for part, size in counted.parts.items())}",
    ]
    return "\n".join(filter(None, lines)) + "\n"


def take_turns(options: argparse.Namespace) -> str:
    """What is printed of both models: medians, the first two steps of each left out, and how far single steps lie."""
    torch.manual_seed(0)
    jobs = {weights: Job(options, weights) for weights in ("16-bit", "4-bit")}
    layers = jobs["4-bit"].model.config.num_hidden_layers
    lines = [f"{NAME}, {layers} layers, r = {options.rank}, steps taking turns: {where()}"]
    for tokens in map(int, options.tokens.split(",")):
        ids = torch.randint(0, jobs["4-bit"].model.config.vocab_size, (1, tokens), device="cuda")
        times: dict[str, list[float]] = {name: [] for name in jobs}
        for turn in range(options.turns + 2):
            for name in list(jobs)[:: 1 if turn % 2 else -1]:
                times[name].append(jobs[name].step(ids)[0])
        lines.append(f"- 1 x {tokens} tokens, {options.turns} steps each")
        medians = {}
        for name, of in times.items():
            medians[name] = statistics.median(of[2:])
            lines.append(f"  - {name}: {medians[name]:.1f} ms ({min(of[2:]):.1f} to {max(of[2:]):.1f})")
        lines.append(f"  - speed of 16-bit experts: {medians['16-bit'] / medians['4-bit']:.2f}")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="2048")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--cap", type=float, help="GiB")
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--attention-only", action="store_true", help="no adapters on experts")
    parser.add_argument("--merge-aware", action="store_true", help="train on merged weights")
    parser.add_argument("--graphs", action="store_true", help="each step as CUDA graphs")
    parser.add_argument("--original", action="store_true", help="the original bitsandbytes")
    parser.add_argument("--turns", type=int, help="steps of each model, both in this process")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    text = take_turns(options) if options.turns else run(options)
    print(text)
    if options.out:
        with options.out.open("a") as file:
            file.write(text)


if __name__ == "__main__":
    main()
