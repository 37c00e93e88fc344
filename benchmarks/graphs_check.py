"""Is each kind of training job captured as graphs, with the losses that it has without?

    python benchmarks/graphs_check.py --out RESULT.md [--gpus 1,2] [--only trainer,sft]

The jobs are those of benchmarks/graphs_jobs.py: Trainer with padded batches, SFTTrainer, packed, with activations
offloaded, DPO and KTO (also with trl's head alike in all runs), GRPO, dropout, accumulation, clipping, fp16, and
evaluating, saving and resuming; a small model in 4 bits, on one GPU and under FSDP2 by `accelerate launch`. A job is
right if graphs were recorded, at least half of its steps ran as graphs, and the loss and gradient norm of each step are
as near to those without graphs as rounding allows: BOUNDS, or three times what two runs without are apart. With
dropout, too: graphs draw what the same steps draw without them.

One launch goes through all jobs; one that fails or hangs is noted, and the others get another launch. Without a GPU
nothing is captured, unless --stand-in plays the graphs (the tests' stand-in, which runs everything again).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path

import launches
from timing import commit, markdown_table

JOBS = ["trainer", "sft", "sft packed", "offload", "dpo", "dpo scored alike", "kto", "kto scored alike", "grpo"]
JOBS += ["dropout", "accumulate", "clipping", "fp16", "resume"]
BOUNDS = {"losses": 5e-3, "evaluated": 5e-3, "norms": 3e-2}  # of the largest value of a run, in 16 bits
FLOOR = 1e-5  # GRPO's loss is zero but for rounding; its gradients are not
OWN = {"hidden": 1024, "intermediate": 2816, "layers": 4, "heads": 16, "kv_heads": 8}
LIMIT = 0.05  # of `clipping`


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="1,2")
    parser.add_argument("--only", default=",".join(JOBS), help="jobs, with commas between")
    parser.add_argument("--steps", type=int, default=12, help="of a job, a multiple of four")
    parser.add_argument("--multiple", type=int, default=64, help="of tokens, to which Trainer's batches are padded")
    parser.add_argument("--plain", action="store_true", help="peft's LoRA layers as they are, not fused")
    parser.add_argument("--stand-in", action="store_true", help="graphs that are played, without a GPU")
    parser.add_argument("--patience", type=float, default=120, help="seconds for a job, and for the start")
    parser.add_argument("--budget", type=float, default=3600, help="seconds of all")
    parser.add_argument("--commit", help="of the code, where there is no checkout")
    parser.add_argument("--out", type=Path, required=True)
    launches.add_shape(parser, **OWN)
    options = parser.parse_args(argv)
    options.only = options.only.split(",")
    if unknown := set(options.only) - set(JOBS):
        parser.error(f"--only: {', '.join(sorted(unknown))}: not of {', '.join(JOBS)}")
    options.gpus = [int(gpus) for gpus in options.gpus.split(",")]
    options.record = options.out.with_suffix(".jsonl")
    return options


# ---- launches ----


def check(options: argparse.Namespace, gpus: int, end: float) -> None:
    """All jobs, with as many launches as it takes."""
    left = list(options.only)
    while left and time.monotonic() < end - 30:
        known = launches.Records(options.record)
        progress = Progress(known, options.patience, end)
        with tempfile.TemporaryDirectory() as scratch:
            log = Path(scratch, "log")
            command = [*launches.accelerate(gpus), str(Path(__file__).with_name("graphs_jobs.py"))]
            command.append(json.dumps(asked(options, gpus, left, scratch)))
            env = launches.environment(str(launches.ROOT / "tests") if options.stand_in else None)
            if gpus == 1 and launches.has_gpus():
                env["CUDA_VISIBLE_DEVICES"] = env.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
            status, reason = launches.watched(command, env, log, progress)
            progress(0.0)
            if status or progress.failed:
                print(launches.telling_lines(log, 12), file=sys.stderr, flush=True)
        if progress.done:
            return
        why = reason or f"exit status {status}"
        failed = {progress.job} if progress.job else set(left)  # where none has begun, no other launch would do better
        for job in [job for job in left if job in failed - progress.ended]:
            known.add({"gpus": gpus, "job": job, "error": why})
        left = [job for job in left if job not in progress.ended | failed]
    for job in left:
        launches.Records(options.record).add({"gpus": gpus, "job": job, "error": "no time left"})


def asked(options: argparse.Namespace, gpus: int, jobs: list[str], folder: str) -> dict:
    """What a launch is told."""
    multiple = options.multiple
    return {
        **{"jobs": jobs, "gpus": gpus, "steps": options.steps, "folder": folder, "multiple": multiple},
        **{"lengths": list(range(multiple // 2, 2 * multiple, 5)), "two_lengths": [multiple // 2, multiple]},
        **{"fuse": not options.plain, "stand_in": options.stand_in, "patience": options.patience},
        "record": str(options.record.resolve()),
        "shape": {name: getattr(options, name) for name in launches.SHAPE},
    }


class Progress:
    """Ends a launch that says nothing for too long."""

    def __init__(self, records: launches.Records, patience: float, end: float):
        self.records, self.patience, self.end = records, patience, end
        self.job, self.ended, self.done, self.failed, self.last = "", set(), False, False, 0.0

    def __call__(self, seconds: float) -> str:
        for record in self.records.new():
            self.last = max(self.last, seconds)
            self.job = record.get("begins", self.job)
            self.ended |= {record["job"]} if "job" in record else set()
            self.done |= "done" in record
            self.failed |= "error" in record
            if "job" in record:
                print(f"{time.strftime('%X')} {said(record)}", file=sys.stderr, flush=True)
        if time.monotonic() > self.end:
            return "no time left"
        silent = seconds - self.last
        return f"nothing new for {silent:.0f} s" if silent > self.patience else ""


# ---- what is written ----


def said(record: dict) -> str:
    return f"{record['gpus']} GPU {record['job']}: " + (record.get("error") or verdict(record)[0])


def apart(one: list[float], other: list[float]) -> float:
    """The largest difference; infinite where numbers are missing, or only one of both is finite."""
    if len(one) != len(other):
        return math.inf
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if math.isfinite(a) or math.isfinite(b)]
    return max((abs(a - b) if math.isfinite(a) and math.isfinite(b) else math.inf for a, b in pairs), default=0.0)


def verdict(record: dict) -> tuple[str, float, float]:
    """("right" or what is wrong, the largest difference of losses, that of two runs without graphs)."""
    eager, again, graphs = record["eager"], record["again"], record["graphs"]
    calls = graphs["replays"] + sum(graphs["eager"].values())
    wrong = [] if graphs["captures"] and graphs["replays"] * 2 >= calls else ["not captured"]
    if not eager["losses"]:
        wrong.append("no losses")
    wrong += differences(eager, again, graphs)
    if record["job"] == "clipping" and min(eager["norms"], default=0.0) <= LIMIT:
        wrong.append("nothing to clip")
    gap, twice = apart(graphs["losses"], eager["losses"]), apart(again["losses"], eager["losses"])
    return ", ".join(wrong) or "right", gap, twice


def differences(eager: dict, again: dict, graphs: dict) -> list[str]:
    """The series that graphs change by more than rounding."""
    wrong = []
    for name, bound in BOUNDS.items():
        largest = max((abs(value) for value in eager[name] if math.isfinite(value)), default=0.0)
        allowed = max(bound * largest, 3 * apart(again[name], eager[name]), FLOOR)
        gap = apart(graphs[name], eager[name])
        wrong += [f"{name} {gap:.1e} apart, {allowed:.1e} allowed"] if gap > allowed or math.isnan(gap) else []
    return wrong


def line(record: dict) -> list[str]:
    """Of the table."""
    start = [str(record["gpus"]), record["job"]]
    if "error" in record:
        return [*start, "-", "-", "-", "-", "-", "failed"]
    graphs = record["graphs"]
    words, gap, twice = verdict(record)
    seconds = sum(record[way]["seconds"] for way in ("eager", "again", "graphs"))
    calls = graphs["replays"] + sum(graphs["eager"].values())
    return [
        *start,
        str(graphs["captures"]),
        f"{graphs['replays']} of {calls}",
        f"{gap:.1e}",
        f"{twice:.1e}",
        f"{seconds:.1f}",
        words,
    ]


def report(options: argparse.Namespace) -> tuple[str, bool]:
    """The text, and whether all jobs are right."""
    records = [json.loads(text) for text in options.record.read_text().splitlines()] if options.record.exists() else []
    jobs = list({(record["gpus"], record["job"]): record for record in records if "job" in record}.values())
    versions = next((record for record in records if "device" in record), {"device": "no device", "torch": ""})
    header = ["GPUs", "job", "captured", "replays", "largest loss difference", "two runs without", "wall s", "verdict"]
    notes = []
    for record in jobs:
        whys = record.get("graphs", {}).get("eager", {})
        words = record.get("error") or "; ".join(f"{n} without: {why}" for why, n in whys.items())
        notes += [f"- {record['gpus']} GPU, {record['job']}: {words}"] if words else []
    shape = ", ".join(f"{name} {getattr(options, name)}" for name in launches.SHAPE)
    text = [
        f"# Jobs as graphs and without, {versions['device']}, torch {versions['torch']}",
        f"\nCommit {options.commit or commit('python', 'csrc', 'cuda', 'benchmarks')}; {shape}; {options.steps} steps",
        f"\nCommand: `python {' '.join(sys.argv)}`\n",
        *(["By the stand-in for graphs: it says nothing about GPUs.\n"] if options.stand_in else []),
        markdown_table(header, [line(record) for record in jobs]) if jobs else "No job ended.",
        "\n" + "\n".join(notes) + "\n",
    ]
    right = bool(jobs) and all(line(record)[-1] == "right" for record in jobs)
    return "\n".join(text), right


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.record.unlink(missing_ok=True)
    end = time.monotonic() + options.budget
    for gpus in options.gpus:
        check(options, gpus, end)
        options.out.write_text(report(options)[0])
    text, right = report(options)
    print(text)
    if not right:
        sys.exit("not all jobs are right")


if __name__ == "__main__":
    main()
