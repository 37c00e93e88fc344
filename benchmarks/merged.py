"""What is left of an adapter's gain once it is merged into 4-bit weights: plain merging beside merge-aware training.

    python benchmarks/merged.py MODEL [--steps 120] [--rank 16] [--seeds 3] [--lrs 3e-4,1e-3,3e-3]
        [--texts prose,docs,code,numbers] [--rows REGEX] [--type nf4] [--jobs 1] [--minutes M] [--graphs]
        [--samples 512] [--tune-steps 150] [--prepare FOLDER] [--work FOLDER] [--device cuda] [--table]
        [--out benchmarks/results/FILE.md]

MODEL is a folder of 16-bit weights, such as examples/smollm2.py makes, or of 4-bit ones; its linear layers but the head
are weights of --type, NF4 with nested scales. LoRA on all of them, alpha 2 rank, no dropout, AdamW, a linear decay, the
same seeds, data and order for each row. Texts: presidents' messages, Python's language reference, source code of its
standard library; held out are the last messages, the last tenth, other modules. And a task with a score: "4711: " and
the number in German words (PyPI's num2words), numbers below 100,000, other ones held out; the score is the share of
held-out lines whose words are all the likeliest ones, behind the other lines of a sequence.

Rows: ordinary LoRA, as it is and merged to the nearest codes; merged with codes and scales that are calibrated on
--samples of the sequences that were trained on, alone and with --tune-steps of tuning; merge-aware from the start, from
half and from three quarters of the steps; and both, from half and tuned.
The learning rate of each row and text is the one with the least loss with seed 0, of calibrated rows that of ordinary
LoRA; ordinary LoRA merged has a row also with the rate that is best for it after merging.
Gain kept: (base - merged) / (base - ordinary LoRA unmerged), of the means over the seeds. Each run is kept in --work
and not trained again with the same settings; --jobs of them run at a time, each in a process, and none begins after
--minutes. --table trains nothing, and makes the table of what is kept.
--prepare writes 4-bit weights and the texts' tokens to a folder, which is a MODEL.
"""

import argparse
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

os.environ["BITSHARD_PLUGIN"] = "0"

import torch
import torch.multiprocessing as processes
import transformers
from bitshard import functional, graphs, lora
from bitshard.calibration import calibrate
from bitshard.transformers import FourBitConfig
from bitshard.weights.inventory import holders_of
from calibration import CODE, LATE, MORE_CODE, OTHER_CODE, ROOT, source, speeches, where
from peft import LoraConfig, get_peft_model
from quality import mean_loss
from timing import markdown_table
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

LENGTH, BATCH, HELD = 256, 8, 48
ORDINARY, CALIBRATED, TUNED = "LoRA", "LoRA, calibrated", "LoRA, calibrated and tuned"
AWARE, LATER, LATEST = "merge-aware", "merge-aware from half of the steps", "merge-aware from three quarters"
BOTH = "both: merge-aware from 0.5 on, tuned at the merge"
STARTS = {
    ORDINARY: None,
    CALIBRATED: None,
    TUNED: None,
    AWARE: 0.0,
    LATER: 0.5,
    LATEST: 0.75,
    BOTH: 0.5,
}  # of the steps
AT_MERGE = {CALIBRATED: False, TUNED: True, BOTH: True}  # rows that are calibrated at the merge: whether they are tuned
NUMBERS, WORDS, LARGEST = "numbers", "num2words==0.5.14", 100_000


def settings_of(quant_type: str) -> BitsAndBytesConfig:
    nested = {"bnb_4bit_use_double_quant": True} if quant_type == "nf4" else {}
    kind = BitsAndBytesConfig if nested else FourBitConfig
    return kind(load_in_4bit=True, bnb_4bit_quant_type=quant_type, bnb_4bit_compute_dtype=torch.bfloat16, **nested)


def numbers(cache: Path) -> tuple[str, str]:
    """Lines to train on and held-out ones; the package is downloaded on the first call."""
    if not list(cache.glob("num2words-*.whl")):
        pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--dest", str(cache), WORDS]
        subprocess.run(pip, check=True)
    sys.path.insert(0, str(next(cache.glob("num2words-*.whl"))))
    from num2words import num2words

    lines = [f"{n}: {num2words(n, lang='de')}\n" for n in random.Random(0).sample(range(LARGEST), 12_000)]
    return "".join(lines[1000:]), "".join(lines[:1000])


def answers(ids: torch.Tensor, colon: int, newline: int) -> torch.Tensor:
    """int64 like ids [S, L]: the number of its line where a token belongs to an answer, else -1; whole lines only."""
    ends, at = ids == newline, torch.arange(ids.shape[1])

    def last(mark: torch.Tensor) -> torch.Tensor:
        """Where a mark is that comes before a token, nearest; -1: none does."""
        return torch.where(mark, at, -1).roll(1, 1).index_fill(1, at[:1], -1).cummax(1).values

    line = ends.cumsum(1) - ends.long()  # its newline is of a line
    asked = last(ids == colon) > last(ends)
    whole = (line > 0) & (line < ends.sum(1, keepdim=True))  # the first may have begun in the row before
    return torch.where(asked & whole, line, -1)


@torch.no_grad()
def score(model: torch.nn.Module, ids: torch.Tensor, lines: torch.Tensor) -> float:
    """Share of answers all of whose tokens are the likeliest."""
    right = total = 0
    for rows, of in zip(ids.split(BATCH), lines.split(BATCH), strict=True):
        wrong = model(input_ids=rows.to(model.device)).logits[:, :-1].argmax(-1).cpu() != rows[:, 1:]
        for each, line in zip(wrong, of[:, 1:], strict=True):
            total += len(line.unique()) - 1  # -1 is none
            right += len(line.unique()) - 1 - len(line[each & (line >= 0)].unique())
    return right / total


def texts(folder: Path, cache: Path) -> dict[str, tuple[torch.Tensor, ...]]:
    """{text: int64 [S, LENGTH] to train on, [HELD, LENGTH] held out}; of numbers also `answers` of these."""
    tokenizer, messages, pages = AutoTokenizer.from_pretrained(folder), speeches(cache), list(topics.values())
    tenth = len(pages) // 10
    given = {
        "prose": ([text for year, text in messages.items() if year not in LATE], [messages[year] for year in LATE]),
        "docs": (pages[:-tenth], pages[-tenth:]),
        "code": ([source(OTHER_CODE + MORE_CODE)], [source(CODE)]),
        NUMBERS: [[lines] for lines in numbers(cache)],
    }

    def rows(parts: list[str]) -> torch.Tensor:
        ids = tokenizer("\n\n".join(parts), return_tensors="pt", verbose=False).input_ids[0]
        return ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)

    found = {name: (rows(train), rows(held)[:HELD]) for name, (train, held) in given.items()}
    marks = [tokenizer(mark).input_ids[-1] for mark in ("1:", "x\n")]
    found[NUMBERS] += (answers(found[NUMBERS][1], *marks),)
    return found


def load(folder: Path, device: str, quant_type: str) -> torch.nn.Module:
    """The model in 4 bits, in bfloat16 elsewhere."""
    given = {}
    if "quantization_config" not in json.loads((folder / "config.json").read_text()):
        given["quantization_config"] = settings_of(quant_type)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map={"": device}, **given)


def dense(model: torch.nn.Module) -> torch.nn.Module:
    """A float32 model with the values of a 4-bit one, and its adapters in them."""
    inner = model.get_base_model()
    plain = {name: tensor for name, tensor in inner.named_parameters() if tensor.is_floating_point()}
    values = {
        name.replace(".base_layer.", "."): tensor.detach().float()
        for name, tensor in plain.items()
        if "lora_" not in name
    }
    for name, layer in inner.named_modules():
        if hasattr(layer, "lora_A"):
            held = next(iter(holders_of(layer.get_base_layer())))
            state = held.state.clone()
            state.dtype = torch.float32
            product = layer.lora_B["default"].weight.float() @ layer.lora_A["default"].weight.float()
            packed = layer.get_base_layer().weight.detach().as_subclass(torch.Tensor)
            weight = functional.dequantize_4bit(packed, state)
            values[f"{name}.weight"] = weight + layer.scaling["default"] * product
    config = inner.config.__class__.from_dict(inner.config.to_dict())
    config.__dict__.pop("quantization_config", None)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    wrong = made.load_state_dict(values, strict=False)
    if wrong.unexpected_keys or set(wrong.missing_keys) - {"lm_head.weight"}:
        raise RuntimeError(f"dense: {wrong}")
    made.tie_weights()
    return made.to(inner.device)


@torch.no_grad()
def quantized(made: torch.nn.Module, ids: torch.Tensor, steps: int, seed: int, quant_type: str) -> torch.nn.Module:
    """A dense model as a calibrated 4-bit one, in bfloat16 elsewhere as the base is."""
    with torch.enable_grad():
        calibrate(made, ids, settings_of(quant_type), tune_steps=steps, seed=seed)
    for parameter in made.parameters():
        if parameter.dtype is torch.float32:
            parameter.data = parameter.data.bfloat16()
    return made.eval()


def trained(base: torch.nn.Module, data: tuple, row: str, seed: int, lr: float, options: Any) -> dict[str, float]:
    """Held-out losses of the base, of the adapter that was trained, and of what merging it makes."""
    train, held, *lines = data
    losses = {}

    def measure(name: str, model: torch.nn.Module) -> None:
        losses[name] = mean_loss(model.eval(), held, BATCH)
        if lines:
            losses[f"{name}, score"] = score(model, held, *lines)

    measure("base", base)
    torch.manual_seed(seed)
    settings = LoraConfig(
        r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = get_peft_model(base, settings)
    if STARTS[row] is None:
        lora.fuse(model)
    else:
        lora.merge_aware(model, int(STARTS[row] * options.steps))
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=lr, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / options.steps)
    generator = torch.Generator().manual_seed(seed)
    order = torch.cat([torch.randperm(len(train), generator=generator) for _ in range(99)])
    if options.graphs:
        graphs.enable(model)
    begin = time.monotonic()
    for step in range(options.steps):
        rows = train[order[step * BATCH : (step + 1) * BATCH]].to(options.device)
        model.train()
        model(input_ids=rows, labels=rows, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    losses["seconds"] = time.monotonic() - begin
    if options.graphs:
        print(graphs.report(model))
        graphs.disable(model)
    optimizer = None
    if STARTS[row] is None:
        measure("unmerged", model)
    if row in AT_MERGE:
        ids = train[order[: options.steps * BATCH].unique()[: options.samples]]
        steps = options.tune_steps if AT_MERGE[row] else 0
        measure("merged", quantized(dense(model), ids, steps, seed, options.type))
        losses["seconds calibrated"] = time.monotonic() - begin - losses["seconds"]
    else:
        if row == ORDINARY:
            lora.merge_aware(model)  # nearest codes of the sum
        measure("merged", model)
    lora.merge_aware(model, None)
    if STARTS[row] is not None:
        measure("unmerged", model)  # beside the base as others serve it, without rounding
    model.unload()
    return losses


def machine(device: str) -> str:
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    return f"{where(device)}, {versions}"


def note_of(run: tuple, options: Any) -> Path:
    text, row, seed, lr = run
    kind = "" if options.type == "nf4" else f"{options.type}, "
    tuned = f", tuned {options.tune_steps}" if AT_MERGE.get(row) else ""
    steps = f"{options.steps} steps, rank {options.rank}{tuned}"
    return options.work / f"{options.model.name}, {kind}{text}, {row}, {lr:g}, seed {seed}, {steps}.json"


def work_off(number: int, runs: list[tuple], begun: Any, data: dict, options: Any) -> None:
    """Process `number` of --jobs: runs that none has begun."""
    torch.set_num_threads(1 if options.device == "cuda" else torch.get_num_threads())
    transformers.logging.disable_progress_bar()
    base = load(options.model, options.device, options.type)
    while time.time() < options.until:
        with begun.get_lock():
            begun.value += 1
            if begun.value > len(runs):
                return
            run = runs[begun.value - 1]
        text, row, seed, lr = run
        try:
            found = trained(base, data[text], row, seed, lr, options) | {"where": machine(options.device)}
        except torch.OutOfMemoryError as error:
            print(f"{run}: {error}", flush=True)
            base = load(options.model, options.device, options.type)
            continue
        note_of(run, options).write_text(json.dumps(found))
        print(f"{run}: {found}", flush=True)


def made(runs: list[tuple], data: dict, options: Any) -> dict[tuple, dict]:
    """{run: what it has found}, by --jobs processes where it is not kept; with --table of those that are."""
    new = [run for run in runs if not note_of(run, options).exists()]
    if new and not options.table:
        begun = processes.get_context("spawn").Value("i", 0)
        processes.spawn(work_off, (new, begun, data, options), min(options.jobs, len(new)))
    return {run: json.loads(note.read_text()) for run in runs if (note := note_of(run, options)).exists()}


def served(rows: list[str]) -> dict[str, tuple[str, str]]:
    """{line of the table: row that is trained, loss that is served}."""
    ordinary = {f"{ORDINARY}, unmerged": (ORDINARY, "unmerged"), f"{ORDINARY}, nearest": (ORDINARY, "unmerged")}
    later = {f"{ORDINARY}, nearest, by its own rate": (ORDINARY, "merged")}
    return ordinary | later | {row: (row, "merged") for row in rows if row != ORDINARY}


def chosen(found: dict[tuple, dict], text: str, row: str, key: str, options: Any) -> float:
    """The learning rate with the least loss with seed 0."""
    if row in AT_MERGE:
        row, key = ORDINARY, "unmerged"
    rates = [lr for lr in options.lrs if (text, row, 0, lr) in found]
    return min(rates, key=lambda lr: found[text, row, 0, lr][key], default=options.lrs[0])


def table(found: dict[tuple, dict], rows: list[str], options: Any) -> str:
    lines = []
    for text in options.texts:
        begin = next(run for (of, *_), run in found.items() if of == text)
        base = begin["base"]
        lines.append(
            [text, "base", "", "", f"{base:.4f}", "0", f"{begin['base, score']:.3f}" if text == NUMBERS else ""]
        )
        full = None
        for name, (row, key) in served(rows).items():
            lr = chosen(found, text, row, key, options)
            runs = [run for (of, kind, _, rate), run in found.items() if (of, kind, rate) == (text, row, lr)]
            of = "unmerged" if name.endswith("unmerged") else "merged"
            losses = [run[of] for run in runs]
            if not losses:
                continue
            scores = f"{statistics.mean(run[f'{of}, score'] for run in runs):.3f}" if text == NUMBERS else ""
            mean = statistics.mean(losses)
            full = full or base - mean
            spread = f"{mean:.4f} ({min(losses):.4f} to {max(losses):.4f})"
            lines.append([text, name, f"{lr:g}", f"{len(runs)}", spread, f"{(base - mean) / full:.3f}", scores])
    return markdown_table(["text", "weights", "learning rate", "seeds", "held-out loss", "gain kept", "score"], lines)


def main() -> None:
    """Train what is not kept yet; print the table and, with --out, write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lrs", default="3e-4,1e-3,3e-3")
    parser.add_argument("--texts", default=f"prose,docs,code,{NUMBERS}")
    parser.add_argument("--type", default="nf4", choices=("nf4", "mxfp4", "nvfp4"))
    parser.add_argument("--rows", default="", metavar="REGEX")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--graphs", action="store_true", help="steps as CUDA graphs")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--tune-steps", type=int, default=150)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--prepare", type=Path, metavar="FOLDER")
    parser.add_argument("--work", type=Path, default=ROOT / ".cache" / "merged")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.until = time.time() + 60 * options.minutes
    options.texts, options.lrs = options.texts.split(","), [float(lr) for lr in options.lrs.split(",")]
    rows = [row for row in STARTS if row == ORDINARY or re.search(options.rows, row)]
    kept = options.model / "tokens.pt"
    if options.table:
        data = {}
    else:
        data = torch.load(kept) if kept.exists() else texts(options.model, ROOT / ".cache")
    if options.prepare:
        load(options.model, options.device, options.type).save_pretrained(options.prepare)
        return torch.save(data, options.prepare / "tokens.pt")
    options.work.mkdir(parents=True, exist_ok=True)
    first = [(text, row, 0, lr) for lr in options.lrs for text in options.texts for row in rows]
    found = made([run for run in first if run[1] not in AT_MERGE], data, options)
    picked = {
        (text, row, chosen(found, text, row, key, options))
        for text in options.texts
        for row, key in served(rows).values()
    }
    others = [(text, row, seed, lr) for seed in range(options.seeds) for text, row, lr in sorted(picked)]
    found |= made(others, data, options)
    lines = [
        f"{'; '.join({run['where'] for run in found.values()})}; {date.today()}",
        f"`python benchmarks/merged.py {options.model.name} {' '.join(sys.argv[2:])}`",
        f"{options.steps} steps of {BATCH} sequences of {LENGTH} tokens; {HELD} sequences held out; means of the seeds "
        f"(least to most); {sum(run['seconds'] for run in found.values()):.0f} s of training in all",
        "",
        table(found, rows, options),
    ]
    print("\n".join(lines))
    if options.out:
        options.out.write_text(
            f"# What merging into {options.type.upper()} leaves of an adapter\n\n" + "\n".join(lines) + "\n"
        )


if __name__ == "__main__":
    main()
