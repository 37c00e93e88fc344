"""How what rank 0's host does grows with the number of ranks and of layers: nothing may grow with both.

    python benchmarks/worlds.py [--ranks 2,4,8,16] [--layers 2,4,8] [--out RESULT.md] [--picture RESULT.png]

Tiny 4-bit Llamas on processes of this machine's CPU over gloo, each loaded by its ranks in parts (transformers'
`distributed_config`), given adapters, trained, written. Of rank 0's main thread: how many functions it calls, Python's
and C's, which is exact where its own work decides; the most that Python's objects take beyond before (tracemalloc); and
seconds of CPU time in a run of its own. Processes are forks of this one, which has imported everything.

The last column of the table is what of the largest size is there because ranks and layers are many at once: the mixed
difference f(R, L) - f(R, l) - f(r, L) + f(r, l) over f(R, L), with the largest and the smallest of each.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from timing import commit, cpu_name_and_flags, markdown_table

PHASES = ("load", "adapters", "step", "describe", "full_state_dict", "save", "checkpoint")
MEASURES = ("calls", "python MiB", "cpu s")


def sizes(layers: int) -> dict:
    return {
        "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": layers, "vocab_size": 96, "max_position_embeddings": 64,
    }  # fmt: skip


def make(folder: str, layers: int) -> None:
    """The files of a model in nested NF4."""
    import torch
    import transformers

    torch.manual_seed(0)
    dense = f"{folder}/dense-{layers}"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes(layers))).save_pretrained(dense)
    four = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    auto = transformers.AutoModelForCausalLM
    auto.from_pretrained(dense, quantization_config=four, device_map="cpu").save_pretrained(f"{folder}/{layers}")


# ---- a rank ----


class Run:
    """A model of so many layers on this rank; a method for each of PHASES."""

    def __init__(self, folder: str, layers: int, world: int):
        self.folder, self.layers, self.world = folder, layers, world

    def load(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.distributed import DistributedConfig

        config = DistributedConfig(fsdp_size=self.world)
        self.model = AutoModelForCausalLM.from_pretrained(
            f"{self.folder}/{self.layers}", dtype=torch.float32, distributed_config=config
        )

    def adapters(self) -> None:
        import torch
        from bitshard import fsdp
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model = get_peft_model(self.model, config).train()
        fsdp.shard_adapters(self.model)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-3)
        self.ids = torch.arange(16).view(1, 16)
        self.step()  # the first one makes states

    def step(self) -> None:
        self.model(input_ids=self.ids, labels=self.ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def describe(self) -> None:
        from bitshard import fsdp

        share = fsdp.measure(self.model)
        assert share.fsdp == "FSDP2" and share.ranks == self.world, share

    def full_state_dict(self) -> None:
        from bitshard import fsdp

        fsdp.full_state_dict(self.model)

    def save(self) -> None:
        from bitshard import fsdp

        out = f"{self.folder}/out-{self.world}-{self.layers}"
        fsdp.save_pretrained(self.model, out, progress=False)  # a bar is drawn by time, and its calls would count

    def checkpoint(self) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save({"model": self.model.state_dict()}, checkpoint_id=f"{self.folder}/dcp-{self.world}-{self.layers}")


def counted(function: Callable[[], None]) -> int:
    """Calls of functions that this thread makes."""
    calls = 0

    def count(frame, event, argument) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.disable()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def peak(function: Callable[[], None]) -> float:
    """MiB of Python's objects beyond what there was before. Tracing goes on: to end it beside gloo's threads can crash
    CPython 3.11."""
    gc.collect()
    if not tracemalloc.is_tracing():
        tracemalloc.start()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    function()
    return (tracemalloc.get_traced_memory()[1] - before) / 2**20


def seconds(function: Callable[[], None]) -> float:
    """CPU time of this thread."""
    began = time.thread_time()
    function()
    return time.thread_time() - began


def rank(number: int, world: int, port: int, folder: str, layers: list[int]) -> None:
    """All sizes, once for each measure, after one that is not counted; memory last, for tracing makes the rest slow."""
    import torch
    import torch.distributed as dist
    import transformers

    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    dist.init_process_group("gloo")
    found = {}
    for name, measure in (("warm", seconds), ("calls", counted), ("cpu s", seconds), ("python MiB", peak)):
        for count in layers:
            run = Run(folder, count, world)
            made = measure if number == 0 else seconds
            found[f"{count} {name}"] = {phase: made(getattr(run, phase)) for phase in PHASES}
            dist.barrier()
    if number == 0:
        Path(folder, f"found-{world}.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def launched(world: int, folder: str, layers: list[int]) -> dict:
    """{"layers measure": {phase: number}} of rank 0."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ranks = []
    for number in range(world):
        if not (pid := os.fork()):
            try:
                rank(number, world, port, folder, layers)
            finally:
                os._exit(1)
        ranks.append(pid)
    codes = [os.waitpid(pid, 0)[1] for pid in ranks]
    if any(codes):
        raise SystemExit(f"{world} ranks ended with {codes}")
    return json.loads(Path(folder, f"found-{world}.json").read_text())


# ---- tables ----


def mixed(values: dict[tuple[int, int], float]) -> float:
    """What is there because ranks and layers are many at once, of the largest size."""
    worlds, layers = ({key[axis] for key in values} for axis in (0, 1))
    most, few, deep, flat = max(worlds), min(worlds), max(layers), min(layers)
    both = values[most, deep] - values[most, flat] - values[few, deep] + values[few, flat]
    return both / values[most, deep]


def every_size(found: dict[int, dict], layers: list[int], measure: str, phase: str) -> dict[tuple[int, int], float]:
    """{(ranks, layers): number}."""
    return {(world, count): every[f"{count} {measure}"][phase] for world, every in found.items() for count in layers}


def table(found: dict[int, dict], layers: list[int], measure: str) -> str:
    """A row for each phase."""
    heads = [f"{world} x {count}" for count in layers for world in found]
    rows = []
    for phase in PHASES:
        values = every_size(found, layers, measure, phase)
        shown = [values[world, count] for count in layers for world in found]
        form = "{:,.0f}" if measure == "calls" else "{:.2f}"
        rows.append([phase, *map(form.format, shown), f"{mixed(values):+.1%}"])
    return markdown_table([measure, *heads, "both"], rows)


def picture(found: dict[int, dict], layers: list[int], path: Path) -> None:
    """Calls and CPU time of rank 0 by ranks, a line for each number of layers."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(PHASES), sharex=True)
    for column, phase in enumerate(PHASES):
        for row, measure in enumerate(("calls", "cpu s")):
            for count in layers:
                values = [found[world][f"{count} {measure}"][phase] for world in found]
                axes[row][column].plot(list(found), values, marker=".", label=f"{count} layers")
            axes[row][column].set_ylim(bottom=0)
            axes[row][column].set_xscale("log", base=2)
        axes[0][column].set_title(phase, fontsize=9)
        axes[1][column].set_xlabel("ranks")
    axes[0][0].set_ylabel("calls of rank 0")
    axes[1][0].set_ylabel("CPU seconds of rank 0")
    axes[0][0].legend(fontsize=7)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,8,16")
    parser.add_argument("--layers", default="2,4,8")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--json", type=Path, help="what of the calls grows with both, by phase")
    options = parser.parse_args()
    worlds, layers = ([int(word) for word in text.split(",")] for text in (options.ranks, options.layers))
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES="")
    import bitsandbytes  # noqa: F401
    import bitshard.fsdp  # noqa: F401
    import peft
    import torch
    import torch.distributed.checkpoint  # noqa: F401
    import transformers.trainer  # noqa: F401

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        if not os.fork():  # so that no thread is there when ranks are forked
            torch.set_num_threads(1)
            for count in layers:
                make(folder, count)
            os._exit(0)
        if os.wait()[1]:
            raise SystemExit("no models could be made")
        for world in worlds:
            found[world] = launched(world, folder, layers)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}"
    lines = [f"{cpu_name_and_flags()[0]}; {versions}; commit {commit('python', 'csrc')}", ""]
    if options.json:
        shares = {phase: mixed(every_size(found, layers, "calls", phase)) for phase in PHASES}
        options.json.write_text(json.dumps(shares))
    lines += [f"{measure}\n\n{table(found, layers, measure)}\n" for measure in MEASURES]
    text = "\n".join(lines)
    print(text)
    if options.out:
        options.out.write_text(text)
    if options.picture:
        picture(found, layers, options.picture)


if __name__ == "__main__":
    main()
