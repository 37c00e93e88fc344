"""Time of one QLoRA step of a Llama-3-8B-shaped model on one GPU: bitshard, with `bitshard.lora.fuse` and without,
upstream bitsandbytes, and bf16 LoRA.

    python benchmarks/qlora_step.py --upstream FOLDER_OF_UPSTREAM [--out RESULT.md]

Random weights, bf16 LoRA of rank 16 on all seven linears, gradient checkpointing, fused AdamW, batch 1. Every case is
a process of its own; all are alive at once and take turns of `--steps` steps, `--rounds` times. The table gives the
median over rounds of a turn's median, and of its fastest step. A case that fails (memory, a step that cannot be
captured) is said to have failed; its error is on standard error. Cases: bitshard, fused, merge-aware, bf16, upstream,
before and before-fused (another build, which fails where it has no fused layers), each also as "... graph" and with
weights of another format, as in "merge-aware mxfp4 graph". sm80 and panels stand for a card older than Hopper: products
of 4-bit layers by gemm_4bit_sm80, or W dequantized and multiplied by cuBLASLt's fastest kernels of sm_80. All
processes keep to the same few cores: where the host decides, processes on different ones differ by a tenth.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ["BITSHARD_PLUGIN"] = "0"  # an original bitsandbytes runs its own kernels
CORES = 4
ROOT = Path(__file__).resolve().parent.parent
OURS = os.pathsep.join([str(ROOT / "python"), str(ROOT / "python" / "bitsandbytes" / "src")])


def quantize(model, quant_type: str) -> None:
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
                compress_statistics=quant_type == "nf4",
                quant_type=quant_type,
            )
        kind = {"compress_statistics": quant_type == "nf4", "quant_type": quant_type}
        new.weight = bnb.nn.Params4bit(module.weight.data, requires_grad=False, module=new, **kind).to(
            module.weight.device
        )
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
    if not mode.startswith("bf16"):
        quantize(model, next((word for word in mode.split() if word in ("mxfp4", "nvfp4")), "nf4"))
    model.requires_grad_(False)
    again = {"use_reentrant": False, "preserve_rng_state": not mode.endswith("graph")}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=again)
    model.enable_input_require_grads()
    lora = LoraConfig(r=16, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    for parameter in model.parameters():
        if parameter.requires_grad:  # peft leaves adapters of uint8 weights in float32; TRL casts them like this
            parameter.data = parameter.data.to(torch.bfloat16)
    if mode.split()[0].endswith("fused"):
        from bitshard import lora as fused

        print(fused.fuse(model), file=sys.stderr)
    if mode.split()[0] == "sm80":
        from bitshard import _C

        for op in ("linear_4bit", "linear_4bit_dgrad"):
            _C.force_kernel(op, "gemm_4bit_sm80")
    if mode.split()[0] == "panels":
        import sm80_panels

        sm80_panels.replace(model)
    if mode.split()[0] == "merge-aware":
        from bitshard import lora as aware

        aware.merge_aware(model)
    model.train()
    return model


def step_of(model, optimizer, ids):
    """A training step, which leaves the last loss in its `loss`."""

    def step() -> None:
        step.loss = model(input_ids=ids, labels=ids).loss
        step.loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def captured(step):
    """`step` as one CUDA graph."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay() -> None:
        graph.replay()

    replay.loss = step.loss
    return replay


def serve(mode: str, layers: int) -> None:
    """One case: builds its model, then does what each line of standard input says and answers with a line of JSON:
    "tokens N" begins with batches of N tokens, "steps N" takes N steps."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    import torch

    model = build(mode, layers)
    trainable = [p for p in model.parameters() if p.requires_grad]
    graph = mode.endswith("graph")
    optimizer = torch.optim.AdamW(trainable, lr=1e-4, fused=True, capturable=graph)
    version = "" if mode.startswith("bf16") else __import__("bitsandbytes").__version__
    print(json.dumps({"bitsandbytes": version, "torch": torch.__version__, "gpu": torch.cuda.get_device_name()}))
    for line in sys.stdin:
        what, n = line.split()
        if what == "tokens":
            step = None  # a graph gives its memory back
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            step = step_of(model, optimizer, torch.randint(0, 128256, (1, int(n)), device="cuda"))
            if graph:
                step = captured(step)
            for _ in range(3):
                step()
        times, host = [], []
        for _ in range(int(n) if what == "steps" else 0):
            torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            host.append(time.perf_counter() - start)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(json.dumps({"times": times, "host": host, "peak_gib": peak, "loss": step.loss.item()}), flush=True)


class Case:
    """A process that holds one case's model and takes steps when asked."""

    def __init__(self, mode: str, arguments: argparse.Namespace):
        self.mode, self.rows = mode, {}
        build_of = mode.split()[0].removesuffix("-fused")
        path = {"upstream": arguments.upstream, "before": arguments.before}.get(build_of, OURS)
        path = "" if mode.startswith("bf16") else path
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))}
        command = [sys.executable, "-u", __file__, "--case", mode, "--layers", str(arguments.layers)]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def answer(self) -> dict | None:
        """None where the process has ended."""
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def ask(self, line: str) -> dict | None:
        try:
            print(line, file=self.process.stdin, flush=True)
        except BrokenPipeError:
            return None
        return self.answer()


def in_turn(cases: list[Case], tokens: int, rounds: int, steps: int) -> list[Case]:
    """Fills every case's rows[tokens], the cases taking turns; those that still run. `step_s`: median over rounds of a
    round's median, `best_s` of its fastest step."""
    cases = [case for case in cases if case.ask(f"tokens {tokens}") is not None]
    answers: dict[str, list[dict]] = {case.mode: [] for case in cases}
    for number in range(rounds):
        for case in list(cases):
            answer = case.ask(f"steps {steps}")
            if answer is None:
                cases.remove(case)
                continue
            answers[case.mode].append(answer)
            print(f"{tokens} {number} {case.mode} {statistics.median(answer['times']) * 1e3:.1f} ms", file=sys.stderr)
    for case in cases:
        found = answers[case.mode]
        case.rows[tokens] = {
            "step_s": statistics.median(statistics.median(answer["times"]) for answer in found),
            "best_s": statistics.median(min(answer["times"]) for answer in found),
            "host_s": statistics.median(statistics.median(answer["host"]) for answer in found),
            "peak_gib": found[-1]["peak_gib"],
            "loss": found[-1]["loss"],
        }
        print(json.dumps({"mode": case.mode, "tokens": tokens, **case.rows[tokens]}), flush=True)
    return cases


def table(cases: list[Case], tokens: list[int]) -> str:
    lines = [
        "| tokens | case | step ms | fastest ms | host ms | tok/s | against upstream | against bf16 LoRA | peak GiB |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for n in tokens:
        steps = {case.mode: case.rows[n]["step_s"] for case in cases if n in case.rows}
        for case in cases:
            row = case.rows.get(n)
            if row is None:
                lines.append(f"| 1x{n} | {case.mode} | failed | | | | | | |")
                continue
            against = [
                f"{steps[other] / row['step_s']:.2f}x" if other in steps else "-" for other in ("upstream", "bf16")
            ]
            figures = [f"{row[name] * 1e3:.1f}" for name in ("step_s", "best_s", "host_s")]
            figures += [f"{n / row['step_s']:.0f}", *against, f"{row['peak_gib']:.2f}"]
            lines.append(f"| 1x{n} | {case.mode} | {' | '.join(figures)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", metavar="MODE", help="be the process of one case")
    parser.add_argument("--upstream", help="folder that contains upstream's bitsandbytes package")
    parser.add_argument("--before", help="folder of another build of bitshard and its facade")
    parser.add_argument("--cases", help="the cases, with commas between")
    parser.add_argument("--graph", action="store_true", help="also with a step as one CUDA graph")
    parser.add_argument("--tokens", default="512,2048")
    parser.add_argument("--steps", type=int, default=4, help="of a case's turn")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--out", help="write the table with versions and command here")
    arguments = parser.parse_args()
    if arguments.case:
        return serve(arguments.case, arguments.layers)
    modes = ["bitshard", "fused", "bf16"] + ["upstream"] * bool(arguments.upstream)
    modes += ["before", "before-fused"] * bool(arguments.before) + ["fused graph", "bf16 graph"] * arguments.graph
    if arguments.cases:
        modes = arguments.cases.split(",")
    cases = [Case(mode, arguments) for mode in modes]
    versions = {case.mode: case.answer() for case in cases}
    tokens, alive = [int(n) for n in arguments.tokens.split(",")], cases
    for n in tokens:
        alive = in_turn(alive, n, arguments.rounds, arguments.steps)
    for case in cases:
        case.process.stdin.close()
    text = table(cases, tokens)
    print(text)
    if arguments.out:
        row = next(filter(None, versions.values()))
        head = f"QLoRA step, Llama-3-8B shape, {arguments.layers} layers, {row['gpu']}, torch {row['torch']}"
        names = ", ".join(f"{mode} {found['bitsandbytes']}".strip() for mode, found in versions.items() if found)
        turns = f"{arguments.rounds} rounds of {arguments.steps} steps"
        Path(arguments.out).write_text(f"# {head}\n\n{names}; {turns}\n\nCommand: `{' '.join(sys.argv)}`\n\n{text}\n")


if __name__ == "__main__":
    main()
