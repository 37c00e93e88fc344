"""QLoRA from plain and from calibrated 4-bit weights: held-out loss by step, with the same data and the same adapters.

    python benchmarks/calibration_training.py MODEL WORK [--steps 120] [--every 10] [--rank 16] [--seeds 3]
        [--lr 2e-4] [--only REGEX] [--tf32] [--device cuda] [--out benchmarks/results/FILE.md]

WORK is the folder of that model below `--work` of benchmarks/calibration.py, which has made the weights: NF4,
NF4-calibrated, with-adapter-RANK and adapter-RANK, and those that are tuned; of its weights those that are there are
trained. The curve of each row and seed is kept in WORK/training when it ends, and not trained again with the same
settings: several commands, of other rows, may run at once, and the last one writes the whole table. Text: Python's
language reference (pydoc_data.topics), of no kind that was calibrated on; its first nine tenths are trained on in
sequences of 512 tokens, 8 a step in an order that the seed chooses, the last tenth is held out. LoRA on all linear
layers, alpha 2 rank, AdamW, a linear decay. The row "with an adapter" starts from calibration's own adapter, of the
same rank and its own scaling.
"""

import argparse
import json
import math
import platform
import re
import sys
import time
from datetime import date
from pathlib import Path
from pydoc_data.topics import topics

import bitsandbytes
import torch
import transformers
from calibration import where
from peft import LoraConfig, PeftModel, get_peft_model
from quality import mean_loss
from transformers import AutoModelForCausalLM, AutoTokenizer

LENGTH, BATCH = 512, 8


def texts(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [S, LENGTH] to train on, and held out."""
    ids = AutoTokenizer.from_pretrained(folder)("\n\n".join(topics.values()), return_tensors="pt", verbose=False)
    rows = ids.input_ids[0][: ids.input_ids.shape[1] // LENGTH * LENGTH].view(-1, LENGTH)
    held = len(rows) // 10
    return rows[:-held], rows[-held:]


def starts(options: argparse.Namespace) -> dict[str, tuple[Path, Path | None]]:
    """{row: (weights, adapter to start from)}."""
    work, rank = options.work, options.rank
    return {
        "dense": (options.model, None),
        "NF4": (work / "NF4", None),
        "NF4, calibrated": (work / "NF4-calibrated", None),
        "NF4, tuned": (work / "NF4-tuned", None),
        "NF4, calibrated, with an adapter": (work / f"with-adapter-{rank}", work / f"adapter-{rank}"),
        "NF4, tuned, with an adapter": (work / f"with-adapter-{rank}-tuned", work / f"adapter-{rank}-tuned"),
    }


def load(weights: Path, adapter: Path | None, options: argparse.Namespace, seed: int) -> PeftModel:
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32, device_map={"": options.device})
    if adapter is not None:
        return PeftModel.from_pretrained(model, adapter, is_trainable=True)
    torch.manual_seed(seed)
    settings = LoraConfig(
        r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return get_peft_model(model, settings)


def curve(start: tuple[Path, Path | None], data: tuple, options: argparse.Namespace, seed: int) -> list[float]:
    """Held-out loss before training and after each `every` steps."""
    train, held = data
    model = load(*start, options, seed)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=options.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / options.steps)
    generator = torch.Generator().manual_seed(seed)
    order = torch.cat([torch.randperm(len(train), generator=generator) for _ in range(99)])
    found = [mean_loss(model.eval(), held, BATCH)]
    for step in range(options.steps):
        rows = train[order[step * BATCH : (step + 1) * BATCH]].to(options.device)
        model.train()
        model(input_ids=rows, labels=rows).loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % options.every == 0:
            found.append(mean_loss(model.eval(), held, BATCH))
    return found


def kept_curve(name: str, start: tuple[Path, Path | None], data: tuple, options: argparse.Namespace, seed: int) -> dict:
    """{"curve": `curve`, "seconds": its time}, measured once for the same settings and kept in WORK/training."""
    settings = [options.steps, options.every, options.rank, options.lr, options.tf32, where(options.device)]
    note = options.work / "training" / f"{name}, seed {seed}.json"
    if note.exists() and (found := json.loads(note.read_text()))["settings"] == settings:
        return found
    begin = time.monotonic()
    losses = curve(start, data, options, seed)
    found = {"settings": settings, "curve": losses, "seconds": time.monotonic() - begin}
    note.parent.mkdir(exist_ok=True)
    note.write_text(json.dumps(found))
    return found


def steps_to(losses: list[float], target: float, every: int) -> str:
    """The first measured step at which a loss is at most `target`."""
    reached = [number * every for number, loss in enumerate(losses) if loss <= target]
    return str(reached[0]) if reached else "not reached"


def main() -> None:
    """Train all rows; print the table and, with --out, write it and the curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--only", default="", metavar="REGEX", help="rows")
    parser.add_argument("--tf32", action="store_true", help="products in TF32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    transformers.logging.disable_progress_bar()
    if options.tf32:
        torch.set_float32_matmul_precision("high")
    data = texts(options.model)
    seconds, curves = 0.0, {}
    for name, start in starts(options).items():
        if not start[0].exists() or re.search(options.only, name) is None:
            continue
        runs = [kept_curve(name, start, data, options, seed) for seed in range(options.seeds)]
        seconds += sum(run["seconds"] for run in runs)
        curves[name] = [sum(at) / len(at) for at in zip(*(run["curve"] for run in runs), strict=True)]
        spread = math.sqrt(sum((run["curve"][-1] - curves[name][-1]) ** 2 for run in runs) / len(runs))
        print(f"{name}: {curves[name][0]:.4f} -> {curves[name][-1]:.4f} (+-{spread:.4f})", flush=True)
    target, dense = (curves.get(name, [math.nan])[-1] for name in ("NF4", "dense"))
    lines = [
        f"bitsandbytes {bitsandbytes.__version__}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}, {where(options.device)}, {date.today()}",
        f"`python benchmarks/calibration_training.py {options.model.name} {options.work.name} "
        f"{' '.join(sys.argv[3:])}`",
        f"{len(data[0])} sequences of {LENGTH} tokens to train on, {len(data[1])} held out; means of the seeds; "
        f"{seconds:.0f} s of training in all",
        "",
        "| start | loss before | after | above dense after | steps to plain NF4's final loss |",
        "|---|---|---|---|---|",
    ]
    for name, losses in curves.items():
        lines.append(
            f"| {name} | {losses[0]:.4f} | {losses[-1]:.4f} | {losses[-1] - dense:+.4f} "
            f"| {steps_to(losses, target, options.every)} |"
        )
    lines += ["", f"Held-out loss each {options.every} steps:", "", "```json", json.dumps(curves), "```"]
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
