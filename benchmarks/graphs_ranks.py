"""What graphs do with ranks and memory: lengths of each rank's own, HSDP, many lengths, and how processes end.

    python benchmarks/graphs_ranks.py --gpus 2 --out RESULT.md [--only lengths,hsdp,late,leaves,raises,SIGINT,SIGTERM]
    python benchmarks/graphs_ranks.py --gpus 1 --only memory --out RESULT.md

A small Llama in 4 bits with LoRA by peft, sharded by `fully_shard` where there is more than one GPU, NCCL as it is by
itself. lengths: each rank draws the length of its row in each step, so that ranks record in different steps; hsdp: as
many replicas as GPUs. Both run twice without graphs and once with, the losses and gradient norms of all steps are
compared. late: a rank comes to a step 10 s after the others. leaves: a rank ends without a word, and the others are
timed, whose group has a timeout of 20 s. raises, SIGINT, SIGTERM: an exception, Ctrl-C or a launcher's end in a step,
with graphs alive. memory: the largest of eight lengths alone, all eight, and all eight on a GPU that is capped to a
tenth more than the largest alone reserved; each in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import faulthandler
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import launches
from timing import commit, markdown_table

OWN = {"hidden": 2048, "intermediate": 5632, "layers": 4, "heads": 16, "kv_heads": 8}
RANKS = ["lengths", "hsdp", "late", "leaves", "raises", "SIGINT", "SIGTERM"]
MEMORY = ["memory", "memory 8", "memory 8 capped"]
ENDED = ["leaves", "raises", "SIGINT", "SIGTERM"]  # parts in which processes end by an error
BEFORE = 8  # steps until something happens
LATE, TIMEOUT = 10, 20  # seconds


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--only", help="with commas between; default: all that the number of GPUs allows")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--longest", type=int, default=1024, help="tokens; the lengths are its eighths")
    parser.add_argument("--patience", type=float, default=120, help="seconds of a launch")
    parser.add_argument("--commit", help="of the code, where there is no checkout")
    parser.add_argument("--out", type=Path, required=True)
    launches.add_shape(parser, **OWN)
    options = parser.parse_args(argv)
    options.only = options.only.split(",") if options.only else (RANKS if options.gpus > 1 else ["memory"])
    if unknown := set(options.only) - {*RANKS, "memory"}:
        parser.error(f"--only: {', '.join(sorted(unknown))}: not of {', '.join([*RANKS, 'memory'])}")
    return options


# ---- launches ----


def launch(options: argparse.Namespace, part: str, cap: float) -> dict:
    """What the ranks of one launch wrote, and how it ended."""
    with tempfile.TemporaryDirectory() as scratch:
        record, log = Path(scratch, "record"), Path(scratch, "log")
        shape = {name: getattr(options, name) for name in launches.SHAPE}
        asked = {"part": part, "steps": options.steps, "longest": options.longest, "shape": shape, "cap": cap}
        asked["patience"] = options.patience
        command = [*launches.torchrun(options.gpus), __file__, "--rank", json.dumps({**asked, "record": str(record)})]
        records, seen = launches.Records(record), []

        def allow(seconds: float) -> str:
            for line in records.new():
                seen.append(line)
                if "happens" in line and part.startswith("SIG"):
                    os.kill(line["happens"], getattr(signal, part))
            return f"no end after {seconds:.0f} s" if seconds > options.patience else ""

        found: dict = {"part": part}
        status, reason = launches.watched(command, launches.environment(None), log, allow)
        ended = time.time()
        seen.extend(records.new())
        for line in seen:
            found.update(line)
        if "at" in found:
            found["ended_s"] = ended - found["at"]
        wrong = reason or unexpected(part, status, "at" in found)
        if wrong:
            print(launches.telling_lines(log, 15), file=sys.stderr, flush=True)
        return {**found, **({"error": wrong} if wrong else {}), "said": said_of(log)}


def unexpected(part: str, status: int, happened: bool) -> str:
    """What is wrong with how a launch ended, or ""; ENDED may fail, but not before what is to happen."""
    if part in ENDED and not happened:
        return f"exit status {status} before anything had happened"
    if part in ENDED:
        return ""
    return f"exit status {status}" if status else ""


def said_of(log: Path) -> str:
    """bitshard's own words about the end."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if "has waited for" in line]
    return lines[0][lines[0].index("rank") :][:160] if lines else ""


def row(found: dict) -> list[str]:
    """Of the table."""
    if "error" in found:
        return [found["part"], found["error"]]
    words = []
    if "apart" in found:
        words.append(f"losses and norms {found['apart']:.1e} apart, two runs without {found['twice']:.1e}")
    if "reserved" in found:
        words.append(f"{found['reserved']:,} MiB reserved, {found['allocated']:,} allocated")
    words += [found["graphs"]] if "graphs" in found else []
    if "ended_s" in found:
        words.append(f"all had ended {found['ended_s']:.1f} s later")
    words += [found["said"]] if found.get("said") else []
    return [found["part"], "; ".join(words)]


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    rows, device, cap = [], "no device", 0.0
    parts = [part for name in options.only for part in (MEMORY if name == "memory" else [name])]
    for part in parts:
        found = launch(options, part, cap if part.endswith("capped") else 0.0)
        device = found.get("device", device)
        cap = 1.1 * found["reserved"] if part == "memory" and "reserved" in found else cap
        rows.append(row(found))
        print(f"{time.strftime('%X')} {': '.join(rows[-1])}", file=sys.stderr, flush=True)
    shape = ", ".join(f"{name} {getattr(options, name)}" for name in launches.SHAPE)
    text = f"# Ranks and memory of graphs, {options.gpus} GPU, {device}\n\nCommit "
    text += f"{options.commit or commit('python', 'csrc', 'cuda', 'benchmarks')}; {shape}; {options.steps} steps\n\n"
    text += f"Command: `python {' '.join(sys.argv)}`\n\n" + markdown_table(["part", "what was seen"], rows)
    options.out.write_text(text)
    print(text)


# ---- one rank ----


def rank(options: SimpleNamespace) -> None:
    import torch
    import torch.distributed as dist
    from bitshard import graphs

    faulthandler.dump_traceback_later(0.8 * options.patience)  # where it hangs, before the launch is ended
    cuda, number, world = (
        torch.cuda.is_available(),
        int(os.environ.get("RANK", 0)),
        int(os.environ.get("WORLD_SIZE", 1)),
    )
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        if options.cap:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(options.cap * 2**20 / total)
    if world > 1:
        place = torch.device("cuda", torch.cuda.current_device()) if cuda else None
        limit = datetime.timedelta(seconds=TIMEOUT)
        dist.init_process_group("nccl" if cuda else "gloo", device_id=place, timeout=limit)
    name = torch.cuda.get_device_name() if cuda else "CPU"
    write(options, device=f"{name}, torch {torch.__version__}")
    job = Job(options, number, world)
    kind = options.part.split()[0]
    if kind in ("lengths", "hsdp"):
        eager, again, played = (job.run(graphed) for graphed in (False, False, True))
        write(options, apart=apart(eager, played), twice=apart(eager, again), graphs=job.said)
    elif kind == "memory":
        job.lengths = job.lengths[-1:] if options.part == kind else job.lengths
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        job.run(True)
        peaks = (torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()) if cuda else (0, 0)
        write(options, reserved=peaks[0] >> 20, allocated=peaks[1] >> 20, graphs=job.said)
    else:
        job.happens(kind)
    graphs.disable(job.model)
    if world > 1:
        dist.destroy_process_group()


class Job:
    """A training loop whose rows have lengths of this rank's own."""

    def __init__(self, options: SimpleNamespace, number: int, world: int):
        self.options, self.number, self.world = options, number, world
        self.lengths = [options.longest * eighths // 8 for eighths in range(1, 9)]
        self.said, self.model = "", None

    def build(self) -> None:
        import torch
        from peft import LoraConfig, get_peft_model
        from random_llama import LINEARS, build
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        cuda = torch.cuda.is_available()
        base = build(self.options.shape, True, torch.bfloat16 if cuda else torch.float32).requires_grad_(False)
        torch.manual_seed(0)
        lora = LoraConfig(r=16, lora_alpha=16, target_modules=LINEARS, task_type="CAUSAL_LM")
        self.model = get_peft_model(base, lora, autocast_adapter_dtype=False)
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.enable_input_require_grads()
        if self.world > 1:
            kind = {"mesh_shape": (self.world,), "mesh_dim_names": ("shard",)}
            if self.options.part == "hsdp":
                kind = {"mesh_shape": (self.world, 1), "mesh_dim_names": ("replicate", "shard")}
            mesh = init_device_mesh("cuda" if cuda else "cpu", **kind)
            for layer in base.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.model.train()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=cuda)

    def run(self, graphed: bool) -> list[float]:
        """Losses and gradient norms of all steps."""
        import torch
        from bitshard import graphs
        from random_llama import forget

        self.model = self.optimizer = None
        forget()
        self.build()
        if graphed:
            graphs.enable(self.model)
        torch.manual_seed(1 + self.number)
        draw, found = random.Random(2 + self.number), []
        for _ in range(self.options.steps):
            found += self.step(draw.choice(self.lengths))
        self.said = str(graphs.report(self.model)) if graphed else ""
        return found

    def step(self, tokens: int) -> list[float]:
        import torch

        place = next(self.model.parameters()).device
        ids = torch.randint(2, self.options.shape["vocabulary"], (1, tokens), device=place)
        loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.requires_grad], 1.0)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [loss.item(), norm.item()]

    def happens(self, what: str) -> None:
        """Train with graphs, and let something happen on the last rank."""
        from bitshard import graphs

        self.build()
        graphs.enable(self.model)
        last = self.number == self.world - 1
        for _ in range(BEFORE):
            self.step(self.lengths[-1])
        if last:
            write(self.options, happens=os.getpid(), at=time.time())
        if last and what == "late":
            time.sleep(LATE)
        if last and what == "leaves":
            os._exit(0)
        if last and what == "raises":
            raise ValueError("as it was asked for")
        for _ in range(BEFORE if what == "late" else 10**6):
            self.step(self.lengths[-1])
        self.said = str(graphs.report(self.model))


def apart(one: list[float], other: list[float]) -> float:
    """The largest difference."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def write(options: SimpleNamespace, **line: object) -> None:
    """A line for the launcher."""
    with contextlib.suppress(OSError), Path(options.record).open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(SimpleNamespace(**json.loads(sys.argv[2])))
    else:
        main()
