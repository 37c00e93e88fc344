"""unsloth as users start it, on a GPU: bitshard's `bitsandbytes` beside the original, one table.

    python benchmarks/checks/tools/on_gpu_unsloth.py --pack .cache/tools-gpu [--out FILE] [--steps 8] [--layers 16] ...

The pack is what `pack_gpu.py --upstream cuda130 --whole 3.12` made. FastLanguageModel.from_pretrained on a Llama with
random weights, get_peft_model and some steps of SFTTrainer, each package in a process of its own and one after the
other (workers/unsloth_whole.py). Exits with 1 where a layer of bitshard's is not 4-bit, or its losses or bytes are not
the original's.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

WORKERS = Path(__file__).resolve().parents[3] / "tests" / "tools" / "workers"
BOTH = ("bitshard", "bitsandbytes")
SIZES = {"hidden": 2048, "intermediate": 5632, "layers": 16, "heads": 16, "vocabulary": 4096, "length": 512}
LIMIT = 240  # seconds of a process


def unpack(pack: Path, target: Path) -> None:
    for archive in sorted(pack.glob("*.tar.xz")):
        with tarfile.open(archive) as opened:
            opened.extractall(target / archive.name.partition(".")[0], filter="data")


def run(which: str, args: argparse.Namespace, folder: Path) -> dict:
    """What the worker found with one of the two packages, or {"error": the end of what it printed}."""
    theirs = [str(args.upstream or folder / "upstream")] if which == "bitsandbytes" else []
    given = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    path = [*theirs, str(folder / "tools"), str(folder / "whole"), str(WORKERS), *given]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1", "BITSHARD_PLUGIN": "0"}
    env |= {"UNSLOTH_DISABLE_STATISTICS": "1", "TOKENIZERS_PARALLELISM": "false"}
    env |= {"TRITON_CACHE_DIR": str(folder / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    out = folder / which
    out.mkdir()
    command = [sys.executable, str(WORKERS / "unsloth_whole.py"), "--out", str(out), "--rate", "1e-3"]
    command += ["--model", str(folder / "model"), "--dtype", args.dtype, "--steps", str(args.steps)]
    for name in SIZES:
        command += [f"--{name}", str(getattr(args, name))]
    try:
        done = subprocess.run(command, env=env, cwd=out, text=True, capture_output=True, timeout=LIMIT)
        said = done.stdout[-1500:] + done.stderr[-4000:]
    except subprocess.TimeoutExpired as late:
        said = f"more than {LIMIT} s: {str(late.stderr)[-2000:]}"
    result = out / "result.0"
    found = json.loads(result.read_text()) if result.exists() else {"error": said}
    if found.get("bitsandbytes", which) != which:
        found = {"error": f"{found['bitsandbytes']} was imported"}
    return found


def rows(found: dict) -> dict[str, object]:
    """The lines of the table of one package."""
    if "error" in found:
        return {"error": found["error"]}
    loaded, trained, memory = found["loaded"], found.get("after", {}), found["memory"]
    shown = {"4-bit layers": f"{loaded['four_bit']} of {loaded['linear']}"}
    shown["after training"] = f"{trained.get('four_bit')} of {trained.get('linear')}"
    shown |= {"classes": ", ".join(loaded["classes"]), "dtypes": ", ".join(loaded["dtypes"])}
    shown["bytes of weights"] = (
        f"{loaded['bytes'] / 2**20:.1f} MiB, in 16 bits {loaded['bytes_in_16_bits'] / 2**20:.1f}"
    )
    for moment, kind in (("loaded", "held"), ("loaded", "peak"), ("trained", "peak")):
        if kind in memory.get(moment, {}):
            shown[f"{moment}, {kind}"] = f"{memory[moment][kind] / 2**20:.1f} MiB"
    shown["losses"] = " ".join(f"{loss:.4f}" for loss in found["losses"])
    shown["ms a step"] = f"{statistics.median(found['ms'][2:] or found['ms']):.1f} (first {found['ms'][0]:.0f})"
    return shown | {"trained": found["trained"], "lora.fuse": found["fuse"].get("line", "-")}


def table(both: dict[str, dict]) -> None:
    columns = {which: rows(found) for which, found in both.items()}
    for name in dict.fromkeys(name for column in columns.values() for name in column):
        print(f"{name}\n" + "\n".join(f"    {which:13} {column.get(name, '-')}" for which, column in columns.items()))


def faults(both: dict[str, dict]) -> list[str]:
    """What is wrong with bitshard's run, in words; beside the original's, where that ran."""
    ours, theirs = both["bitshard"], both.get("bitsandbytes", {})
    if "error" in ours:
        return ["bitshard ended with an error"]
    found = []
    for moment in ("loaded", "adapted", "after"):
        if ours[moment]["four_bit"] != ours[moment]["linear"] or not ours[moment]["linear"]:
            found.append(f"{moment}: {ours[moment]['four_bit']} of {ours[moment]['linear']} layers are 4-bit")
        if moment in theirs and ours[moment]["bytes"] != theirs[moment]["bytes"]:
            found.append(f"{moment}: {ours[moment]['bytes']} bytes, the original's are {theirs[moment]['bytes']}")
    if "losses" in theirs:
        gap = max(abs(a - b) / abs(b) for a, b in zip(ours["losses"], theirs["losses"], strict=True))
        print(f"largest difference of a loss: {gap:.2e}")
        found += [f"losses differ by {gap:.2e}"] if gap > 0.02 else []
    return found


def main(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        unpack(args.pack, folder)
        original = (args.upstream or folder / "upstream") / "bitsandbytes" / "__init__.py"
        both = {which: run(which, args, folder) for which in BOTH if which == "bitshard" or original.exists()}
    table(both)
    wrong = faults(both)
    print("\n".join(wrong) or "no fault")
    if args.out:
        import torch

        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        args.out.write_text(json.dumps({"device": device, "torch": torch.__version__, **both}, indent=1) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--pack", type=Path, default=Path(".cache/tools-gpu"))
    options.add_argument("--upstream", type=Path, help="folder that holds the package bitsandbytes of the original")
    options.add_argument("--out", type=Path)
    options.add_argument("--steps", type=int, default=8)
    options.add_argument("--dtype", default="bfloat16")
    for name, value in SIZES.items():
        options.add_argument(f"--{name}", type=int, default=value)
    sys.exit(main(options.parse_args()))
