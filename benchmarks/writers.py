"""Every architecture of the installed transformers and every wrapper of peft through every writer of checkpoints.

    python benchmarks/writers.py --record FILE.json [--only TYPE] [--way WAY] [--wrapper NAME|all] [--tied yes|no]
                                 [--jobs N] [--keep] [--failed] [--pages FILE.md ...]

A tiny model of each class is made from its config class and written in every way: `bitshard.fsdp.save_pretrained`,
`dense_weights` (collected into a folder), `bitshard quantize`, `bitshard merge`. It is loaded again by its class, which
must miss nothing, find nothing that it does not know, and give the same outputs and tensors; or the writer must have
raised a clear error before the first byte. Each class is tried in a process of its own, with limits of time and memory.
Results are kept in FILE.json with a digest of the writers' sources: a run goes on where another one ended, and tries
again what was tried with other sources.

The wrappers of SWEEP are tried on every class; `--wrapper all` tries all of them (on the classes of `--only`).

`--pages` puts the tables of the record into pages that have a place for them: docs/models.md, and the record in
benchmarks/results/.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
import transformers
from helpers import tiny, writers
from helpers.wrappers import CHANGES_BASE, WRAPPERS
from transformers.conversion_mapping import _build_checkpoint_conversion_mapping
from transformers.models.auto import modeling_auto
from writers_table import Record, exceptions, heads, not_made, replaced, wrappers

ROOT = Path(__file__).resolve().parents[1]
SECONDS, SECONDS_A_TRY, BYTES = 60, 4, 8 << 30  # limits of one class
# Mappings of transformers from a model type to a class.
HEADS = {
    "CAUSAL_LM": "text",
    "SEQ_TO_SEQ_CAUSAL_LM": "text to text",
    "IMAGE_TEXT_TO_TEXT": "image and text",
    "MULTIMODAL_LM": "image, sound and text",
    "SPEECH_SEQ_2_SEQ": "speech to text",
    "CTC": "speech to text",
    "RNNT": "speech to text",
    "TDT": "speech to text",
    "AUDIO_CLASSIFICATION": "sound",
    "IMAGE_CLASSIFICATION": "image",
    "MASKED_LM": "masked text",
}
# What is tried on every class: the wrapper, and the ways that it says something new about.
SWEEP = {
    "": ("save", "dense_weights", "quantize"),
    "lora": ("save merge dtype", "merge (dense)"),
    "lora embedding": ("dense_weights",),
    "modules_to_save embedding": ("save merge dtype",),
}
LATER = {"text": 1, "image": 2, "masked text": 3}  # heads of which there are many alike
RESULTS = ("ok", "raises", "WRONG", "NAMES", "left out")
# On those of which there are many alike; those that transformers renames nothing of, and that are no text to text.
BRIEF = {"": ("save", "quantize"), "lora": ("save merge dtype", "merge (dense)")}
NO_TOKENS = ("image", "sound")  # heads without an embedding of tokens
SOURCES = ("sharding/checkpoints", "convert", "sharding/loading")


def classes():
    """[(model type, class, head, whether BRIEF is tried)], each class once, those first that transformers renames."""
    found = {}
    for mapping, head in HEADS.items():
        for kind, names in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES", {}).items():
            for name in [names] if isinstance(names, str) else names:
                found.setdefault(name, (head, []))[1].append(kind)
    jobs = [(_own(kinds, name), name, head) for name, (head, kinds) in found.items()]
    renamed = _build_checkpoint_conversion_mapping()
    order = {job: LATER.get(job[2], 0) for job in jobs if job[0] not in renamed and job[1] not in renamed}
    return [(*job, order.get(job, 0) > 0) for job in sorted(jobs, key=lambda job: order.get(job, -1))]


def _own(kinds, name):
    """Of the model types that share a class, the one that it is named after."""
    named = [kind for kind in kinds if name.lower().startswith(re.sub("[-_]", "", kind))]
    return max(named, key=len) if named else kinds[0]


def digest():
    """Of the writers' sources."""
    hashed = hashlib.sha256()
    files = [path for folder in SOURCES for path in sorted((ROOT / "python/bitshard" / folder).rglob("*.py"))]
    for path in files:
        hashed.update(path.read_bytes())
    return hashed.hexdigest()[:12]


def wanted(head, brief, args):
    """[(wrapper, way)] of a class."""
    if args.wrapper == "all":
        table = {name: writers.ways_of(name or None) for name in ("", *WRAPPERS)}
    elif args.wrapper:
        table = {args.wrapper: writers.ways_of(args.wrapper)}
    else:
        table = BRIEF if brief else SWEEP
        table = {name: ways for name, ways in table.items() if head not in NO_TOKENS or name in ("", "lora")}
    return [(name, way) for name, ways in table.items() for way in ways if args.way in (None, way)]


# ---- one class, in a process of its own ----


def key_of(name, tied, wrapper, way):
    """Of a row in the record."""
    return " | ".join((name, {None: "", True: "tied", False: "not tied"}[tied], wrapper, way))


def try_class(name, tied, tries, file):
    """Append a line to `file` for each of the tries, and one for the class itself where none can be made."""

    def put(wrapper, way, kind, words, begun):
        row = {"key": key_of(name, tied, wrapper, way), "kind": kind, "words": words, "s": time.time() - begun}
        file.write(json.dumps(row) + "\n")
        file.flush()

    begun = time.time()
    with tempfile.TemporaryDirectory(prefix="bitshard-writers-") as place:
        place = Path(place)
        try:
            options = {} if tied is None else {"tie_word_embeddings": tied}
            subject = writers.Subject(getattr(transformers, name), place / "model", **options)
            subject.prepare()
        except writers.LeftOut as error:
            put("", "", "left out", str(error), begun)
            return
        put("", "", "ok", subject.note + ("" if subject.is_packed else " no 4-bit weight"), begun)
        for number, (wrapper, way) in enumerate(tries):
            begun, folder = time.time(), place / str(number)
            folder.mkdir()
            wrap = WRAPPERS[wrapper] if wrapper else None
            result = writers.tried(subject, way, wrap, folder, wrapper in CHANGES_BASE)
            put(wrapper, way, result.kind, re.sub(rf"{re.escape(str(place))}\S*/", "", result.words), begun)
            shutil.rmtree(folder, ignore_errors=True)


def in_a_fork(name, tied, tries):
    """The process id, and the file of its lines."""
    file = tempfile.NamedTemporaryFile("w+", suffix=".jsonl", delete=False)
    pid = os.fork()
    if pid:
        return pid, file
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try_class(name, tied, tries, file)
    except BaseException as error:
        file.write(
            json.dumps({"key": key_of(name, tied, "", ""), "kind": "left out", "words": tiny.words(error)}) + "\n"
        )
        file.flush()
    finally:
        os._exit(0)


class Running:
    """A class that is being tried."""

    def __init__(self, job, tries):
        self.job, self.tries, self.begun = job, tries, time.time()
        self.pid, self.file = in_a_fork(job[1], job[3], tries)

    def poll(self):
        """Whether it has ended; after its time it is ended."""
        limit = SECONDS + SECONDS_A_TRY * len(self.tries)
        late = time.time() - self.begun > limit
        if late:
            os.kill(self.pid, signal.SIGKILL)
        pid, status = os.waitpid(self.pid, 0 if late else os.WNOHANG)
        self.why = f"{limit} s were over" if late else f"ended by signal {os.WTERMSIG(status)}" if status else ""
        return pid != 0

    def rows(self):
        """What it has written, and what it was ended in."""
        found = [json.loads(line) for line in Path(self.file.name).read_text().splitlines()]
        os.unlink(self.file.name)
        _, name, _, tied = self.job
        have = {row["key"] for row in found}
        rest = [key for key in (key_of(name, tied, *one) for one in self.tries) if key not in have]
        if self.why and not any(row["kind"] == "left out" and row["key"].endswith(" |  | ") for row in found):
            key = rest[0] if have and rest else key_of(name, tied, "", "")
            found.append({"key": key, "kind": "left out", "words": self.why})
        for row in found:
            row |= {"type": self.job[0], "head": self.job[2]}
        return found


# ---- all of them ----


def sweep(args, record):
    """Try all classes that are not in the record yet; the record is written after each."""
    now, jobs = digest(), []
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    for kind, name, head, brief in classes():
        if args.only and args.only not in (kind, name):
            continue
        tied = {"yes": True, "no": False, None: None}[args.tied]
        own = [
            row for key, row in record.items() if key.split(" | ")[:2] == key_of(name, tied, "", "").split(" | ")[:2]
        ]
        if args.failed and all(row["kind"] == "ok" for row in own):
            continue
        have = {key for key, row in record.items() if row["digest"] == now or args.keep}
        base = key_of(name, tied, "", "")
        if base in have and record[base]["kind"] == "left out":
            continue
        tries = [one for one in wanted(head, brief, args) if key_of(name, tied, *one) not in have]
        if tries:
            jobs.append(((kind, name, head, tied), tries))
    running, done, begun = [], 0, time.time()
    while jobs or running:
        while jobs and len(running) < args.jobs:
            running.append(Running(*jobs.pop(0)))
        time.sleep(0.02)
        for one in [one for one in running if one.poll()]:
            running.remove(one)
            done += 1
            rows = one.rows()
            for row in rows:
                record[row.pop("key")] = {**row, "digest": now, "tree": commit}
            Path(args.record).write_text(json.dumps(record, indent=0, sort_keys=True))
            left = (time.time() - begun) / done * (len(jobs) + len(running)) / 60
            counts = {kind: sum(row["kind"] == kind for row in rows) for kind in RESULTS[:-1]}
            why = next((row["words"] for row in rows if row["kind"] == "left out" and len(rows) == 1), "")
            text = why or " ".join(f"{count} {kind}" for kind, count in counts.items() if count)
            print(
                f"{done}/{done + len(jobs) + len(running)} {left:4.0f} min left  {one.job[1]:44s} {text}"[:170],
                flush=True,
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", required=True, help="JSON file of the results")
    parser.add_argument("--only", help="a model type, or a class")
    parser.add_argument("--way", choices=writers.WAYS)
    parser.add_argument("--wrapper", choices=["all", *WRAPPERS])
    parser.add_argument("--tied", choices=["yes", "no"], help="(default: as the config has it)")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="do not try again what was tried with other sources")
    parser.add_argument("--failed", action="store_true", help="only classes of which something in the record is not ok")
    parser.add_argument("--pages", nargs="*", default=[], help="pages whose tables are made anew")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    record = {}
    with contextlib.suppress(FileNotFoundError):
        record = json.loads(Path(args.record).read_text())
    with tempfile.TemporaryFile("w+") as file:  # imports and reads what every fork needs
        try_class("LlamaForCausalLM", None, [(name, way) for name, ways in BRIEF.items() for way in ways], file)
    sweep(args, record)
    print({kind: sum(row["kind"] == kind for row in record.values()) for kind in RESULTS})
    for page in map(Path, args.pages):
        page.write_text(replaced(page.read_text(encoding="utf-8"), tables(record)), encoding="utf-8")


def tables(record):
    """{name of a place in a page: table}."""
    rows, tried = Record(record), {(name, way) for name, ways in SWEEP.items() for way in ways}
    trees = Counter(row["tree"] for row in record.values())
    return {
        "heads": heads(rows, tried),
        "exceptions": exceptions(rows, tried),
        "not made": not_made(rows),
        "tensors only": ", ".join(rows.tensors_only()),
        "wrappers": wrappers(rows, WRAPPERS, "not tied"),
        "wrappers, tied": wrappers(rows, WRAPPERS, "tied"),
        "trees": ", ".join(f"{count:,} of {tree}" for tree, count in trees.most_common()),
        "counts": ", ".join(f"{sum(row['kind'] == kind for row in record.values()):,} {kind}" for kind in RESULTS),
    }


if __name__ == "__main__":
    main()
