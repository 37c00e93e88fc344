"""The three programs of docs/programs.md at size, on two GPUs: losses beside one process, seconds, peak memory, plots.

    python benchmarks/programs.py --model FOLDER --out RESULTS            # a dense causal language model; 10 minutes
    python benchmarks/programs.py --tiny --out RESULTS --steps 3          # on two CPU processes, to try it

The text is Python's own documentation. RESULTS gets table.md, which grows with every part, result.json and a plot for
each part; --only names parts (fsdp_qlora, sft, two_gpus). --resume keeps the runs that RESULTS has from a call that was
cut off. Each part ends where its losses are further from those of one process than BOUNDS, which is what tells a
sharded run that is right from one that trains something else.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

# name: (options of fsdp_qlora.py on two GPUs, the run of one process that has its losses)
PLAIN = {
    "qlora bf16": ("--train-type qlora --fsdp 2", "qlora bf16"),
    "qlora bf16, FSDP1": ("--train-type qlora --fsdp 1", "qlora bf16"),
    "qlora bf16, low memory": ("--train-type qlora --fsdp 2 --low-memory --checkpointing", "qlora bf16"),
    "qlora bf16, low memory, FSDP1": ("--train-type qlora --fsdp 1 --low-memory", "qlora bf16"),
    "qlora bf16, wrapped by size": ("--train-type qlora --fsdp 2 --wrap size --min-params 1000000", "qlora bf16"),
    "hf_qlora bf16, low memory": ("--train-type hf_qlora --fsdp 2 --low-memory", "qlora bf16"),
    "qlora fp16": ("--train-type qlora --fsdp 2 --low-memory --precision mp_fp16_autocast", "qlora fp16"),
    "qlora fp16, offloaded": (
        "--train-type qlora --fsdp 2 --low-memory --precision mp_fp16_autocast --offload",
        "qlora fp16",
    ),
    "qlora fp16, offloaded, FSDP1": (
        "--train-type qlora --fsdp 1 --low-memory --precision mp_fp16_autocast --offload",
        "qlora fp16",
    ),
    "qlora mixed bf16": ("--train-type qlora --fsdp 2 --precision mp_bf16_autocast", "qlora mixed bf16"),
    "dora fp32": ("--train-type dora --fsdp 2 --precision fp32", "dora fp32"),
    "lora bf16": ("--train-type lora --fsdp 2 --low-memory", "lora bf16"),
    "full bf16": ("--train-type full --fsdp 2 --low-memory --lr 2e-5", "full bf16"),
}
ALONE = {
    "qlora bf16": "--train-type qlora",
    "qlora fp16": "--train-type qlora --precision mp_fp16_autocast",
    "qlora mixed bf16": "--train-type qlora --precision mp_bf16_autocast",
    "dora fp32": "--train-type dora --precision fp32",
    "lora bf16": "--train-type lora",
    "full bf16": "--train-type full --lr 2e-5",
}
# Largest relative difference of a step's loss: gradients are summed over ranks in the dtype of the adapters.
BOUNDS = {"bf16": 1e-2, "fp16": 1e-2, "fp32": 1e-4}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a dense causal language model")
    parser.add_argument("--tiny", action="store_true", help="a made model instead, see examples/tiny.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--resume", action="store_true", help="keep the runs that RESULTS has")
    parser.add_argument("--worker", choices=["one", "two"], help="be a process of the first part")
    options = parser.parse_args()
    if not (options.model or options.tiny):
        parser.error("give --model or --tiny")
    return options


def has_gpus() -> bool:
    import torch

    return torch.cuda.is_available()


# ---- fsdp_qlora.py: all options in one launch ----


def worker(options: argparse.Namespace) -> None:
    """Every run of PLAIN on this rank, or of ALONE in one process; RESULTS/fsdp_qlora.<worker>.json behind each."""
    import cpu_fsdp
    import fsdp_qlora
    import torch
    import torch.distributed as dist

    cuda, two = torch.cuda.is_available(), options.worker == "two"
    fsdp_qlora.join()
    file = options.out / f"fsdp_qlora.{options.worker}.json"
    found = json.loads(file.read_text()) if options.resume and file.exists() else {}
    dist.barrier()  # behind this rank 0 writes the file
    lines = {name: line for name, (line, _) in PLAIN.items()} if two else ALONE
    common = f"--model {options.model} --text {options.out}/text.txt --steps {options.steps} --length {options.length}"
    for name, line in lines.items():
        run = fsdp_qlora.parse(f"{common} {line} {'' if two else '--fsdp 0 --batch 2'}".split())
        if name in found or fsdp_qlora.impossible(run):  # offloading without a GPU
            continue
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        begin = time.monotonic()
        losses = fsdp_qlora.train(run)
        peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
        found[name] = {"losses": losses, "seconds": time.monotonic() - begin, "peak_gib": peak}
        if dist.get_rank() == 0:
            file.write_text(json.dumps(found, indent=1))
    cpu_fsdp.leave()


def fsdp_qlora_part(options: argparse.Namespace) -> dict:
    """{name: losses, seconds, peak, gap and bound} of the plain loop."""
    here = [str(Path(__file__).resolve()), "--model", str(options.model), "--out", str(options.out)]
    here += ["--steps", str(options.steps), "--length", str(options.length), *["--resume"] * options.resume]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} if not has_gpus() else None
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([sys.executable, *here, "--worker", "one"], check=True, env=environment)
    subprocess.run([*torchrun, *here, "--worker", "two"], check=True, env=environment)
    alone, both = (json.loads((options.out / f"fsdp_qlora.{which}.json").read_text()) for which in ("one", "two"))
    found = {f"one process, {name}": run for name, run in alone.items()}
    for name, run in both.items():
        reference = PLAIN[name][1]
        found[name] = run | compared(run["losses"], found, f"one process, {reference}", reference.split()[-1])
    return found


def compared(losses: list[float], runs: dict, reference: str, precision: str) -> dict:
    """How far `losses` are from those of run `reference`."""
    return {
        "gap": max(apart(losses, runs[reference]["losses"])),
        "bound": BOUNDS[precision],
        "reference": reference,
    }


def apart(losses: list[float], expected: list[float]) -> list[float]:
    """The relative difference of each step."""
    return [abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)]


# ---- sft.py and fsdp2_two_gpus.py: one launch for each run ----


def launched(options: argparse.Namespace, name: str, version: int, *more: str) -> dict:
    """examples/sft.py under `accelerate launch`; version 0: in one process."""
    out, cuda = options.out / name.replace(" ", "-"), has_gpus()
    kept = out / "run.json"
    if options.resume and kept.exists():
        return json.loads(kept.read_text())
    command, environment = [sys.executable], dict(os.environ)
    if version:
        command += ["-m", "accelerate.commands.launch", "--config_file", str(EXAMPLES / f"fsdp{version}.yaml")]
        command += ["--num_processes", "2", "--main_process_port", "0"]
        command += (
            [] if cuda else ["--fsdp_state_dict_type", "SHARDED_STATE_DICT" if version == 1 else "FULL_STATE_DICT"]
        )
        command += [] if cuda else [str(EXAMPLES / "cpu_fsdp.py")]
    else:
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command += [str(EXAMPLES / "sft.py"), "--model", str(options.model), "--data", str(options.out / "text.txt")]
    command += ["--output", str(out), "--steps", str(options.steps), "--length", str(options.length)]
    begin = time.monotonic()
    subprocess.run([*command, "--batch", "1" if version else "2", *more], check=True, env=environment)
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    found = {"losses": losses, "seconds": time.monotonic() - begin, "peak_gib": None}
    kept.write_text(json.dumps(found))
    return found


def sft_part(options: argparse.Namespace) -> dict:
    """SFTTrainer under both versions, and with fused LoRA layers."""
    found = {"sft, one process": launched(options, "sft one process", 0)}
    runs = (("FSDP1", 1, ()), ("FSDP2", 2, ()), ("FSDP2, LoRA layers fused", 2, ("--fuse",)))
    for name, version, more in runs:
        run = launched(options, f"sft {name}", version, *more)
        found[f"sft, {name}"] = run | compared(run["losses"], found, "sft, one process", "bf16")
    return found


def two_gpus_part(options: argparse.Namespace) -> dict:
    """examples/fsdp2_two_gpus.py, which compares and draws by itself."""
    out = options.out / "two-gpus"
    command = [sys.executable, str(EXAMPLES / "fsdp2_two_gpus.py"), "--model", str(options.model), "--output", str(out)]
    command += ["--text", str(options.out / "text.txt"), "--steps", str(options.steps // 2 * 2)]
    begin = time.monotonic()
    subprocess.run([*command, "--length", str(options.length)], check=True)
    result = json.loads((out / "result.json").read_text())
    seconds = time.monotonic() - begin
    found = {
        "one GPU, float16": {"losses": result["one"]["losses"], "seconds": None, "peak_gib": result["one"]["peak_gib"]}
    }
    two = {"losses": result["resumed"]["losses"], "seconds": seconds, "peak_gib": result["resumed"]["peak_gib"]}
    found["two GPUs, resumed in the middle (all three launches)"] = (
        two | {key: result[key] for key in ("gap", "bound")} | {"reference": "one GPU, float16"}
    )
    return found


PARTS = {"fsdp_qlora": fsdp_qlora_part, "sft": sft_part, "two_gpus": two_gpus_part}


# ---- what is written ----


def table(parts: dict[str, dict]) -> str:
    lines = ["| run | loss: first, last | from one process | bound | seconds | peak GiB |", "|---|---|---|---|---|---|"]
    for runs in parts.values():
        for name, run in runs.items():
            gap = f"{run['gap']:.1e} | {run['bound']:.0e}" if "gap" in run else " | "
            rest = " | ".join("" if run[key] is None else f"{run[key]:.1f}" for key in ("seconds", "peak_gib"))
            lines.append(f"| {name} | {run['losses'][0]:.4f}, {run['losses'][-1]:.4f} | {gap} | {rest} |")
    return "\n".join(lines) + "\n"


def plot(part: str, runs: dict, file: Path) -> None:
    """The curves of one process, those of sharded runs dashed over them, and below how far these are apart."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (upper, lower) = pyplot.subplots(2, sharex=True, figsize=(10, 7), layout="constrained")
    for i, (name, run) in enumerate(runs.items()):
        steps = range(1, len(run["losses"]) + 1)
        if "reference" not in run:
            upper.plot(steps, run["losses"], "-", color=f"C{i}", linewidth=2.5, alpha=0.6, label=name)
            continue
        style = {"linestyle": ("--", ":", "-.")[i % 3], "color": f"C{i % 10}", "linewidth": 1.2}
        upper.plot(steps, run["losses"], label=name, **style)
        lower.plot(steps, apart(run["losses"], runs[run["reference"]]["losses"]), marker=".", **style)
        lower.axhline(run["bound"], color="gray", linewidth=0.8)
    upper.set(title=f"{part}: one process, and sharded runs (dashed)", ylabel="training loss (nats per token)")
    lower.set(xlabel="step", ylabel="relative difference (lines: bounds)", yscale="log")
    lower.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(loc="outside right upper", fontsize=7)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def main() -> None:
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    options.out = options.out.resolve()
    if options.tiny:
        import tiny

        options.model = tiny.make(options.out / "tiny")[0]
    if options.worker:
        worker(options)
        return
    (options.out / "text.txt").write_text("\n\n".join(topics[name] for name in sorted(topics)), encoding="utf-8")
    parts = {}
    for part in options.only:
        print(f"== {part}", flush=True)
        parts[part] = PARTS[part](options)
        (options.out / "table.md").write_text(table(parts))
        (options.out / "result.json").write_text(json.dumps(parts, indent=1))
        plot(part, parts[part], options.out / f"{part}.png")
    print(f"\n{table(parts)}")
    wrong = [
        name for runs in parts.values() for name, run in runs.items() if "gap" in run and not run["gap"] <= run["bound"]
    ]
    if wrong:
        sys.exit(f"further from one process than the bound: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
