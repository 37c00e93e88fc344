"""The user's own job timed: `Trainer` or `SFTTrainer`, peft and `accelerate launch`, 8B shape, one GPU and FSDP2.

    python benchmarks/job.py --upstream FOLDER_OF_UPSTREAM --out RESULT.md      # steps beside bitsandbytes, bf16 LoRA
    python benchmarks/job.py --job sft --cases upstream,plain,fast --out RESULT.md     # rows as long as real ones
    python benchmarks/job.py --losses 20 --cases fuse,fast --out RESULT.md      # do graphs give the losses of eager?

The program that is timed is benchmarks/job_worker.py, which has no line for bitshard: cases differ by PYTHONPATH and
variables of the environment (CASES). Random weights in nested NF4, stored as bf16, made on the GPU; r = 16 on all seven
linears, gradient checkpointing, fused AdamW, clipping to 1.0, a log every 10 steps, one row a GPU and step with a mask.
Each case and number of GPUs is a launch, which goes through all lengths. A step's time is that of a window of steps
between two waits for the GPU, data and logging included; the table has the median of the windows. Clipping and the
optimizer are timed alone in other steps. Lines of JSON go to RESULT.jsonl as parts end, and RESULT.md is written again
after each launch; --also adds the lines of earlier calls.

--job loop: without a Trainer, everything in bf16. --losses N: N steps of each case, of the first one twice, and how far
they are apart. Without a GPU it runs too, with small --hidden and so on; two processes then get FSDP2 through
examples/cpu_fsdp.py, since accelerate by itself takes DDP there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import launches
from launches import SHAPE
from timing import commit, markdown_table

CASES = {  # variables of the environment
    "upstream": {},
    "plain": {},
    "fuse": {"BITSHARD_FUSE": "1"},
    "graphs": {"BITSHARD_GRAPHS": "1"},
    "waiting": {"BITSHARD_FAST": "1", "BITSHARD_NO_LOSS_WAIT": "0"},  # both
    "fast": {"BITSHARD_FAST": "1"},  # and Trainer does not wait for losses
    "merge-aware": {"BITSHARD_FAST": "1", "BITSHARD_MERGE_AWARE": "1"},
    "bf16": {},
}
WORDS = {"upstream": "the original bitsandbytes", "plain": "bitshard as it is", "bf16": "bf16 LoRA, no 4-bit weights"}
TOLD = ("job", "losses", "dropout", "prepare", "adapters", "batch", "shortest", "typical", "longest")  # to workers
TOLD += ("multiple", "warm", "windows", "steps", "profile", "arguments")
SHOWN = 20  # losses in a table
SFT_PARTS = "padded,padded rounded,fixed,packed,packed rounded,full"
SFT_WORDS = """Texts of log-normal lengths (median {typical}, {shortest} to {longest} tokens). Tokens are counted
without padding; filled: their share of the positions that are computed. padded: {batch} texts a step, padded to the
longest; padded rounded: to a multiple of {multiple}; fixed: {batch} of their mean length. packed: a row of up to
{longest} tokens of several texts; packed rounded: padded to {longest}; full: one text of {longest}."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", choices=["trainer", "sft", "loop"], default="trainer")
    parser.add_argument("--cases", help=f"of {', '.join(CASES)}; with commas between")
    parser.add_argument("--gpus", default="1,2")
    parser.add_argument("--tokens", default="512,2048", help="of a row, one part each")
    parser.add_argument("--parts", default=SFT_PARTS, help=f"of --job sft: {SFT_PARTS}")
    parser.add_argument("--upstream", help="folder that contains upstream's bitsandbytes package")
    parser.add_argument("--losses", type=int, default=0, metavar="N", help="compare the losses of N steps instead")
    parser.add_argument("--dropout", type=float, default=0.0, help="of LoRA")
    parser.add_argument("--prepare", choices=["kbit", "none"], default="kbit", help="prepare_model_for_kbit_training")
    parser.add_argument("--adapters", choices=["float32", "bfloat16"], default="float32", help="float32: as peft does")
    parser.add_argument("--arguments", type=json.loads, default={}, help="JSON: more of TrainingArguments")
    parser.add_argument("--batch", type=int, help="rows a GPU and step: 1, and 4 for --job sft")
    parser.add_argument("--longest", type=int, default=2048, help="tokens of a row of --job sft")
    parser.add_argument("--multiple", type=int, default=256, help="of tokens, to which `rounded` pads")
    parser.add_argument("--warm", type=int, default=8, help="steps before the first window")
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of a window")
    parser.add_argument("--rounds", type=int, default=1, help="launches of each case")
    parser.add_argument("--profile", action="store_true", help="count launches and GPU time in two more steps")
    parser.add_argument("--timeout", type=float, default=150, help="seconds of one launch")
    parser.add_argument("--exit-wait", type=float, default=30, help="seconds to end after the last part")
    parser.add_argument("--budget", type=float, default=3600, help="seconds of all; launches are left out then")
    parser.add_argument("--also", nargs="*", default=[], type=Path, help="files of lines of earlier calls")
    parser.add_argument("--commit", help="of the code, where there is no checkout")
    parser.add_argument("--out", type=Path, required=True)
    launches.add_shape(parser)
    options = parser.parse_args(argv)
    default = (
        "fuse,fast" if options.losses else ",".join(["upstream"] * bool(options.upstream) + ["plain,fuse,fast,bf16"])
    )
    options.cases = (default if options.cases is None else options.cases).split(",") if options.cases != "" else []
    if unknown := set(options.cases) - CASES.keys():
        parser.error(f"--cases: {', '.join(sorted(unknown))}: not of {', '.join(CASES)}")
    if "upstream" in options.cases and not options.upstream:
        parser.error("--cases upstream needs --upstream FOLDER")
    options.batch = options.batch or (4 if options.job == "sft" else 1)
    options.parts = (options.parts if options.job == "sft" else options.tokens).split(",")
    options.gpus = [int(gpus) for gpus in options.gpus.split(",")]
    options.shortest, options.typical = options.longest // 16, options.longest // 4
    options.record = options.out.with_suffix(".jsonl")
    return options


# ---- launches ----


def parts_of(options: argparse.Namespace, case: str) -> list[str]:
    """--losses: the first case goes through all twice, so that it is known how far two runs of one way are apart."""
    again = options.losses and case == options.cases[0]
    return [name for part in options.parts for name in ([part, f"{part} again"] if again else [part])]


class Progress:
    """What the records of a launch say; decides when it has had its time."""

    def __init__(self, options: argparse.Namespace, timeout: float):
        self.options, self.timeout = options, timeout
        self.records = launches.Records(options.record)
        self.done_at = None
        self.error = ""

    def __call__(self, seconds: float) -> str:
        for record in self.records.new():
            print(f"{time.strftime('%X')} {said(record)}", file=sys.stderr, flush=True)
            self.error = record.get("error", self.error)
            if "done" in record:
                self.done_at = seconds
        if self.done_at is not None and seconds > self.done_at + self.options.exit_wait:
            return f"had not ended {self.options.exit_wait:.0f} s after its last part"
        return f"no end after {seconds:.0f} s" if seconds > self.timeout else ""


def launch(options: argparse.Namespace, case: str, gpus: int, number: int, timeout: float) -> None:
    """One process a GPU; adds its lines to the file of records."""
    folder = options.upstream if case in ("upstream", "bf16") else None
    env = launches.environment(folder, **CASES[case])
    if gpus == 1 and launches.has_gpus():
        env["CUDA_VISIBLE_DEVICES"] = env.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # no DataParallel
    asked = {name: getattr(options, name) for name in TOLD}
    asked.update(case=case, gpus=gpus, round=number, parts=parts_of(options, case), started=time.time())
    asked.update(record=str(options.record.resolve()), shape={name: getattr(options, name) for name in SHAPE})
    worker = str(Path(__file__).with_name("job_worker.py"))
    starter = launches.torchrun(gpus) if options.job == "loop" else launches.accelerate(gpus)
    progress = Progress(options, timeout)
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, "log")
        begun = time.monotonic()
        status, reason = launches.watched([*starter, worker, json.dumps(asked)], env, log, progress)
        seconds = time.monotonic() - begun
        progress(0.0)
        if status and not (reason and progress.done_at):
            print(launches.telling_lines(log, 12), file=sys.stderr, flush=True)
    record = {"case": case, "job": options.job, "gpus": gpus, "round": number, "launch_s": seconds}
    if progress.done_at is not None:
        record["exit_s"] = seconds - progress.done_at
    elif not progress.error:
        reason = reason or f"exit status {status}"
    add(options, {**record, **({"error": reason, "part": ""} if reason else {})})


def add(options: argparse.Namespace, record: dict) -> None:
    print(f"{time.strftime('%X')} {said(record)}", file=sys.stderr, flush=True)
    launches.Records(options.record).add(record)


def said(record: dict) -> str:
    """A record in a line."""
    start = f"{record['gpus']} GPU {record['case']} {record.get('part', '')}".strip()
    if "error" in record:
        return f"{start}: {record['error']}"
    shown = {name: record[name] for name in ("step_ms", "launch_s", "exit_s", "start_s", "seconds") if name in record}
    return f"{start}: " + ", ".join(f"{name} {value:.1f}" for name, value in shown.items()) + record.get("graphs", "")


# ---- what is written ----


def merged(records: list[dict]) -> dict[tuple, dict]:
    """{(gpus, part, case): row}, the median over rounds, of the lines of all launches."""
    rows: dict[tuple, list[dict]] = {}
    for record in records:
        if "part" in record and (record["part"] or "error" in record):
            rows.setdefault((record["gpus"], record["part"], record["case"]), []).append(record)
    parts, cases = list(dict.fromkeys(part for _, part, _ in rows)), list(CASES)
    order = sorted(rows, key=lambda key: (key[0], parts.index(key[1]), cases.index(key[2])))
    return {key: over_rounds(rows[key]) for key in order}


def over_rounds(records: list[dict]) -> dict:
    """One row of the rounds of a case: an error if all failed."""
    good = [record for record in records if "error" not in record]
    if not good:
        return records[-1]
    row = dict(good[-1])
    if lost := [record["error"] for record in records if "error" in record]:
        row["error"] = f"{len(lost)} of {len(records)} rounds failed: {lost[0]}"
    for name in ("step_ms", "tokens_per_s", "clip_ms", "optimizer_ms"):
        if name in row:
            row[name] = statistics.median(record[name] for record in good if name in record)
    row["windows_ms"] = [ms for record in good for ms in record.get("windows_ms", [])]
    return row


def number(row: dict, name: str, form: str = ".1f") -> str:
    return format(row[name], form) if name in row else "-"


def speed(rows: dict, key: tuple, other: str) -> str:
    """Of a row against another case, by tokens a second."""
    beside = rows.get((*key[:2], other), {})
    if "tokens_per_s" not in beside or "tokens_per_s" not in rows[key]:
        return "-"
    return f"{rows[key]['tokens_per_s'] / beside['tokens_per_s']:.2f}"


def times(rows: dict[tuple, dict]) -> str:
    """The table of times."""
    header = "GPUs,part,case,step ms,windows ms,tok/s,against upstream,against bf16,clip ms,optimizer ms,allocated GiB,"
    header += "reserved GiB,captures"
    padded = any(row.get("filled", 1) < 1 for row in rows.values())
    profiled = any("launches" in row for row in rows.values())
    lines = []
    for key, row in rows.items():
        if "windows_ms" not in row or not row["windows_ms"]:
            continue
        windows = f"{min(row['windows_ms']):.1f} to {max(row['windows_ms']):.1f}"
        cells = [*map(str, key), number(row, "step_ms"), windows, number(row, "tokens_per_s", ".0f")]
        cells += [speed(rows, key, "upstream"), speed(rows, key, "bf16"), number(row, "clip_ms")]
        cells += [number(row, "optimizer_ms"), number(row, "allocated_gib", ".2f"), number(row, "reserved_gib", ".2f")]
        cells.append(number(row, "captures", "d"))
        extra = [number(row, name, form) for name, form in (("launches", ".0f"), ("kernels", ".0f"), ("gpu_ms", ".1f"))]
        lines.append(cells + [number(row, "filled", ".2f")] * padded + extra * profiled)
    names = header.split(",") + ["filled"] * padded + ["launches", "kernels", "GPU ms"] * profiled
    return markdown_table(names, lines) if lines else "No part ended.\n"


def apart(first: list[float], second: list[float]) -> float:
    """The largest difference of one step's losses."""
    return max((abs(a - b) for a, b in zip(first, second, strict=False)), default=float("nan"))


def losses(rows: dict[tuple, dict]) -> str:
    """The table of losses: how far each run is from the first one of its part that was bitshard's."""
    lines = []
    for key, row in rows.items():
        if not row.get("losses"):
            continue
        part = key[1].removesuffix(" again")
        base = [other for other in rows if other[:2] == (key[0], part) and rows[other].get("losses")]
        base = next((other for other in base if other[2] not in ("upstream", "bf16")), base[0])
        gap = "-" if base == key else f"{apart(row['losses'], rows[base]['losses']):.1e}"
        shown = [f"{loss:.5g}" for loss in row["losses"]]
        shown = [*shown[:4], "...", *shown[-4:]] if len(shown) > SHOWN else shown
        lines.append([*map(str, key), " ".join(shown), gap])
    return markdown_table(["GPUs", "part", "case", "losses", "largest difference"], lines) if lines else ""


def remarks(records: list[dict], rows: dict[tuple, dict]) -> str:
    """What bitshard said, what failed, how long processes took to start and to end."""
    lines = []
    for key, row in rows.items():
        said_of = [row[name] for name in ("error", "profile_error", "fused", "graphs") if row.get(name)]
        left = [f"{row['left_gib']:.2f} GiB were allocated before it began"] if row.get("left_gib", 0) > 0.05 else []
        if said_of or left:
            lines.append(f"- {key[0]} GPU, {key[1] or 'launch'}, {key[2]}: {'; '.join(said_of + left)}")
    for name, words in (("start_s", "until the first part"), ("exit_s", "from the last part to the end")):
        found = [f"{r['gpus']} GPU {r['case']} {r[name]:.1f}" for r in records if name in r]
        lines += [f"- seconds {words}: {', '.join(found)}"] if found else []
    return "\n".join(lines)


def report(options: argparse.Namespace) -> str:
    """The whole text."""
    files = [file for file in [*options.also, options.record] if file.exists()]
    records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    versions: dict[str, str] = {}
    for record in records:
        versions.update(record.get("versions", {}) if record["case"] != "upstream" else {})
        if record["case"] == "upstream" and "versions" in record:
            versions["original bitsandbytes"] = record["versions"]["bitsandbytes"]
            versions = {**record["versions"], **versions}
    rows = merged(records)
    device = versions.pop("device", "no device")
    shape = ", ".join(f"{name} {getattr(options, name)}" for name in SHAPE)
    text = [f"# {options.job}: a training step by the user's own program, {device}", ""]
    text += [
        ", ".join(f"{name} {version}" for name, version in versions.items()),
        f"Commit {commit_of(options)}; {shape}",
    ]
    text += [
        f"dropout {options.dropout}, prepare {options.prepare}, adapters {options.adapters}, {options.batch} row(s)"
    ]
    text += ["", f"Command: `python {' '.join(sys.argv)}`", "", legend(options), ""]
    if device == "CPU":
        text += ["On a CPU, which says nothing about GPUs; two processes are FSDP2 through examples/cpu_fsdp.py.", ""]
    text += [] if options.losses else [times(rows), ""]
    text += [losses(rows), "", remarks(records, rows), ""]
    return "\n".join(text)


def commit_of(options: argparse.Namespace) -> str:
    return options.commit or commit("python", "csrc", "cuda", "benchmarks")


def legend(options: argparse.Namespace) -> str:
    """What the cases are."""
    found = {case: WORDS.get(case, " ".join(f"{k}={v}" for k, v in CASES[case].items())) for case in options.cases}
    text = "; ".join(f"{case}: {words}" for case, words in found.items())
    if options.job != "sft":
        return text
    return f"{text}\n\n{SFT_WORDS.format(**vars(options))}"


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.budget
    for number in range(options.rounds):
        for gpus in options.gpus:
            for case in options.cases:
                left = end - time.monotonic()
                if left < 30:
                    add(options, {"case": case, "job": options.job, "gpus": gpus, "part": "", "error": "no time left"})
                    continue
                launch(options, case, gpus, number, min(options.timeout, left - 10))
                options.out.write_text(report(options))
    options.out.write_text(report(options))
    print(options.out.read_text())


if __name__ == "__main__":
    main()
