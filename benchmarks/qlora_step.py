"""Time of one QLoRA step of a Llama-3-8B-shaped model on one GPU: bitshard, with `bitshard.lora.fuse` and without,
upstream bitsandbytes, and bf16 LoRA.

    python benchmarks/qlora_step.py --upstream FOLDER_OF_UPSTREAM [--out RESULT.md]

Random weights, bf16 LoRA of rank 16 on all seven linears, gradient checkpointing, fused AdamW, batch 1. Every case runs
in a process of its own, the cases in turn, `--rounds` times; the table gives the best round's median step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OURS = os.pathsep.join([str(ROOT / "python"), str(ROOT / "python" / "bitsandbytes" / "src")])


def quantize(model) -> None:
    """Replace every linear of the decoder by a 4-bit one, as transformers does when it loads a checkpoint."""
    import bitsandbytes as bnb
    import torch

    for name, module in list(model.model.named_modules()):
        if type(module) is not torch.nn.Linear:
            continue
        with torch.device("meta"):
            new = bnb.nn.Linear4bit(
                module.in_features,
                module.out_features,
                False,
                torch.bfloat16,
                compress_statistics=True,
                quant_type="nf4",
            )
        new.weight = bnb.nn.Params4bit(
            module.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4", module=new
        ).to("cuda")
        model.model.set_submodule(name, new)
    model.is_loaded_in_4bit = True


def build(mode: str, layers: int):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    if mode != "bf16":
        quantize(model)
    model.requires_grad_(False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    lora = LoraConfig(r=16, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    for parameter in model.parameters():
        if parameter.requires_grad:  # peft leaves adapters of uint8 weights in float32; TRL casts them like this
            parameter.data = parameter.data.to(torch.bfloat16)
    if mode == "fused":
        from bitshard import lora as fused

        print(fused.fuse(model), file=sys.stderr)
    model.train()
    return model


def run_case(mode: str, tokens: int, steps: int, layers: int) -> dict:
    import torch

    model = build(mode, layers)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-4, fused=True)
    ids = torch.randint(0, 128256, (1, tokens), device="cuda")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    times, host = [], []
    for _ in range(steps + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        host.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    version = ""
    if mode != "bf16":
        import bitsandbytes

        version = bitsandbytes.__version__
    return {
        "mode": mode,
        "tokens": tokens,
        "step_s": statistics.median(times[3:]),
        "host_s": statistics.median(host[3:]),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "loss": float(loss),
        "bitsandbytes": version,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
    }


def in_process(mode: str, tokens: int, arguments: argparse.Namespace) -> dict:
    path = {"bitshard": OURS, "fused": OURS, "upstream": arguments.upstream, "bf16": ""}[mode]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, __file__, "--case", mode, str(tokens), "--steps", str(arguments.steps)]
    command += ["--layers", str(arguments.layers)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{mode}, {tokens} tokens failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def table(best: dict[tuple[str, int], dict]) -> str:
    lines = ["| tokens | case | step ms | host ms | tok/s | against upstream | against bf16 LoRA | peak GiB |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for (mode, tokens), row in best.items():
        speed = [
            best[other, tokens]["step_s"] / row["step_s"] if (other, tokens) in best else None
            for other in ("upstream", "bf16")
        ]
        ratios = " | ".join("-" if ratio is None else f"{ratio:.2f}x" for ratio in speed)
        figures = f"{row['step_s'] * 1e3:.1f} | {row['host_s'] * 1e3:.1f} | {tokens / row['step_s']:.0f}"
        lines.append(f"| 1x{tokens} | {mode} | {figures} | {ratios} | {row['peak_gib']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs=2, metavar=("MODE", "TOKENS"), help="run one case in this process, print JSON")
    parser.add_argument("--upstream", help="folder that contains upstream's bitsandbytes package")
    parser.add_argument("--tokens", default="512,2048")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--out", help="write the table with versions and command here")
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(run_case(arguments.case[0], int(arguments.case[1]), arguments.steps, arguments.layers)))
        return
    best: dict[tuple[str, int], dict] = {}
    modes = ["bitshard", "fused", *(["upstream"] if arguments.upstream else []), "bf16"]
    for tokens in map(int, arguments.tokens.split(",")):
        for _ in range(arguments.rounds):
            for mode in modes:
                row = in_process(mode, tokens, arguments)
                print(json.dumps(row), flush=True)
                if (mode, tokens) not in best or row["step_s"] < best[mode, tokens]["step_s"]:
                    best[mode, tokens] = row
    text = table(best)
    print(text)
    if arguments.out:
        row = next(iter(best.values()))
        head = f"QLoRA step, Llama-3-8B shape, {arguments.layers} layers, {row['gpu']}, torch {row['torch']}"
        versions = ", ".join(sorted({f"{r['mode']} {r['bitsandbytes']}".strip() for r in best.values()}))
        Path(arguments.out).write_text(f"# {head}\n\n{versions}\n\nCommand: `{' '.join(sys.argv)}`\n\n{text}\n")


if __name__ == "__main__":
    main()
